"""The tokens whose keys and values an engine keeps on a GPU, as it does by default or is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lmpool.cache_memory import MOST_POSITIONS, OF_GPU, OF_MACHINE, Share
from lmpool.checks import quoted
from lmpool.errors import SettingsError

ENGINE_SHARE: Final = 0.9
"""Of a GPU's memory, what vLLM and SGLang take for weights, keys and values: about, of SGLang."""
MOST_BYTES: Final = 1e15
_OF_ALL: Final = ("sglang", "vllm")
_OF_FREE: Final = {"hf": OF_GPU, "mlx": OF_MACHINE}
"""What lmpool's own engines keep, beside weights and what is computed with."""
_BYTES: Final = {"hf": "kv_cache_bytes", "mlx": "cache_bytes", "vllm": "kv_cache_memory_bytes"}
"""The option that says how many bytes of keys and values an engine keeps."""
_SHARES: Final = {"sglang": "mem_fraction_static", "vllm": "gpu_memory_utilization"}
"""The option that says which part of a GPU's memory it takes."""
KNOWN: Final = (*_OF_FREE, *_OF_ALL)


@dataclass(frozen=True, slots=True)
class Kept:
    """So many tokens, by which formula, of which numbers."""

    what: str
    formula: str
    numbers: str
    tokens: int


def kept_states(
    engine: str, memory: int, weights: int, state: int, options: Mapping[str, Any]
) -> Kept | None:
    """Of a GPU's memory, beside the weights, of so many bytes a token; None of other engines.

    ``auto`` is reckoned as what it is without vLLM. Raises `SettingsError` for an engine's option
    that cannot be.
    """
    name = "hf" if engine == "auto" else engine
    if name == "sglang":
        given = options.get("server_args")
        options = given if isinstance(given, Mapping) else {}
    held = _option(options, _BYTES.get(name))
    share_of_all = _option(options, _SHARES.get(name), most=1)
    told = held is not None or share_of_all is not None
    what = f"tokens whose states {name} keeps {'as it is set' if told else 'by default'}"
    if engine == "auto":
        what += " (auto, without vLLM; --engine vllm reckons with it)"
    if held is not None:
        most = f", at most {MOST_POSITIONS:,}" if name in _OF_FREE else ""
        tokens = int(held // state)
        return Kept(
            what,
            f"{_BYTES[name]} / states of a token{most}",
            f"min({held:,} / {state:,}, {MOST_POSITIONS:,})" if most else f"{held:,} / {state:,}",
            min(tokens, MOST_POSITIONS) if most else tokens,
        )
    if name in _OF_ALL:
        part = ENGINE_SHARE if share_of_all is None else share_of_all
        return Kept(
            what,
            f"(GPU memory x {part:g} - weights) / states of a token",
            f"({memory:,} x {part:g} - {weights:,}) / {state:,}",
            max(0, int((memory * part - weights) // state)),
        )
    share = _OF_FREE.get(name)
    return None if share is None else _of_free(what, share, memory, weights, state)


def _option(
    options: Mapping[str, Any], name: str | None, most: float = MOST_BYTES
) -> int | float | None:
    """A number that an engine is told, if it is. Raises `SettingsError`."""
    found = None if name is None else options.get(name)
    if found is None:
        return None
    if isinstance(found, (int, float)) and type(found) is not bool and 0 <= found <= most:
        return found
    raise SettingsError(f"engine_opts: {name}={quoted(found)}: write a number up to {most:g}")


def _of_free(what: str, share: Share, memory: int, weights: int, state: int) -> Kept:
    return Kept(
        what,
        f"min((GPU memory - weights) / {share.parts}, {share.most >> 30} GiB) / states of a token, "
        f"at most {MOST_POSITIONS:,}",
        f"min(min(({memory:,} - {weights:,}) / {share.parts}, {share.most:,}) / {state:,}, "
        f"{MOST_POSITIONS:,})",
        min(share.of(memory - weights) // state, MOST_POSITIONS),
    )
