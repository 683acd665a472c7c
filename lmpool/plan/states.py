"""The tokens whose keys and values an engine keeps on a GPU, as each takes memory by default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lmpool.cache_memory import MOST_POSITIONS, OF_GPU, OF_MACHINE, Share

ENGINE_SHARE: Final = 0.9
"""Of a GPU's memory, what vLLM and SGLang take for weights, keys and values: about, of SGLang."""
_OF_ALL: Final = ("sglang", "vllm")
_OF_FREE: Final = {"hf": OF_GPU, "mlx": OF_MACHINE}
"""What lmpool's own engines keep, beside weights and what is computed with."""
KNOWN: Final = (*_OF_FREE, *_OF_ALL)


@dataclass(frozen=True, slots=True)
class Kept:
    """So many tokens, by which formula, of which numbers."""

    what: str
    formula: str
    numbers: str
    tokens: int


def kept_states(engine: str, memory: int, weights: int, state: int) -> Kept | None:
    """Of a GPU's memory, beside the weights, of so many bytes a token; None of other engines.

    ``auto`` is reckoned as what it is without vLLM.
    """
    name = "hf" if engine == "auto" else engine
    what = f"tokens whose states {name} keeps by default"
    if engine == "auto":
        what += " (auto, without vLLM; --engine vllm reckons with it)"
    if name in _OF_ALL:
        free = memory * ENGINE_SHARE - weights
        return Kept(
            what,
            f"(GPU memory x {ENGINE_SHARE:g} - weights) / states of a token",
            f"({memory:,} x {ENGINE_SHARE:g} - {weights:,}) / {state:,}",
            max(0, int(free // state)),
        )
    share = _OF_FREE.get(name)
    return None if share is None else _of_free(what, share, memory, weights, state)


def _of_free(what: str, share: Share, memory: int, weights: int, state: int) -> Kept:
    return Kept(
        what,
        f"min((GPU memory - weights) / {share.parts}, {share.most >> 30} GiB) / states of a token, "
        f"at most {MOST_POSITIONS:,}",
        f"min(min(({memory:,} - {weights:,}) / {share.parts}, {share.most:,}) / {state:,}, "
        f"{MOST_POSITIONS:,})",
        min(share.of(memory - weights) // state, MOST_POSITIONS),
    )
