"""Loading a Hugging Face model: its dtype, its device, its bounds and its special tokens."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from lmpool.backends.model_files import tokenizer_files
from lmpool.errors import SettingsError

logger = logging.getLogger(__name__)

# Untyped on purpose: its annotations differ from release to release.
transformers: Any = importlib.import_module("transformers")

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
_BITSANDBYTES_PREFIXES: Final = ("load_in_", "bnb_", "llm_int8_")
_LONGEST_PROMPT_NAMES: Final = ("max_position_embeddings", "n_positions", "max_seq_len")
_ENDLESS: Final = 1 << 24  # tokenizers without a bound say 10**30


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A causal language model on its device, ready to run, and its tokenizer where it has one."""

    model: Any
    tokenizer: Any
    device: torch.device
    dtype: str


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The token ids that a model begins, ends and pads its texts with."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None


def load_model(
    folder: Path,
    *,
    dtype: str,
    device: str,
    trust_remote_code: bool,
    model_kwargs: Mapping[str, Any],
) -> LoadedModel:
    """Load the model in `folder`.

    Raises `SettingsError` where an option or the folder cannot be used, or where the weights in
    it do not fill the model.
    """
    place = resolve_device(device)
    if dtype not in DTYPES:
        raise SettingsError(f"dtype={dtype!r}: one of {', '.join(DTYPES)} expected")
    kwargs = with_quantization(model_kwargs)
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
        if "quantization_config" in kwargs or hasattr(config, "quantization_config"):
            # Quantized weights are made on their device and cannot be moved there later.
            kwargs.setdefault("device_map", {"": str(place)})
        if dtype == "auto":
            kwargs["dtype"] = torch.float32 if place.type == "cpu" else "auto"
        else:
            kwargs["dtype"] = getattr(torch, dtype)
        with _no_progress_bars():
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **kwargs,
            )
        if "device_map" not in kwargs:
            model.to(place)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise SettingsError(f"the model in {str(folder)!r} cannot be loaded: {reason}") from error
    if missing := sorted(loading["missing_keys"]):
        raise SettingsError(
            f"the weights in {str(folder)!r} lack {len(missing)} of the model's tensors, "
            f"{missing[0]} for one: they are not those of the model in its config.json"
        )
    model.eval()
    return LoadedModel(
        model=model,
        tokenizer=load_tokenizer(folder, trust_remote_code=trust_remote_code),
        device=model.device,
        dtype=str(model.dtype).removeprefix("torch."),
    )


def resolve_device(device: str) -> torch.device:
    """The torch device named `device`; ``auto`` is the first GPU, or else the CPU."""
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise SettingsError(
            f"device={device!r}: 'auto', 'cpu', 'cuda' or 'cuda:1' expected"
        ) from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise SettingsError(
            f"device={device!r}: torch sees {torch.cuda.device_count()} GPUs here; check "
            "CUDA_VISIBLE_DEVICES, or write device='cpu'"
        )
    return place


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """The tokenizer in `folder`, or None where there is none that loads."""
    if not tokenizer_files(folder):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # rows can be served without one
        logger.warning("the tokenizer of %s cannot be loaded: %s", folder, error)
        return None


def longest_prompt(loaded: LoadedModel, wanted: int | None) -> int:
    """The longest prompt to serve: the model's own bound, or fewer tokens where `wanted`."""
    config = loaded.model.config.get_text_config()
    bounds = [getattr(config, name, None) for name in _LONGEST_PROMPT_NAMES]
    bounds.append(getattr(loaded.tokenizer, "model_max_length", None))
    known = [int(b) for b in bounds if isinstance(b, int | float) and 0 < b < _ENDLESS]
    if wanted is not None and (type(wanted) is not int or wanted < 1):
        raise SettingsError(f"max_prompt_tokens={wanted!r}: a positive integer expected")
    if not known and wanted is None:
        raise SettingsError(
            "the model's config.json names no longest prompt: write one as max_prompt_tokens"
        )
    if wanted is not None and known and wanted > known[0]:
        raise SettingsError(
            f"max_prompt_tokens={wanted}: the model takes {known[0]} tokens; write that or less"
        )
    return wanted if wanted is not None else known[0]


def special_tokens(loaded: LoadedModel, vocab_size: int) -> SpecialTokens:
    """The special tokens by the generation config, the model's config or the tokenizer.

    The first of them that knows an id is believed; ids without a place in the row are left out.
    """
    sources = (
        getattr(loaded.model, "generation_config", None),
        loaded.model.config.get_text_config(),
        loaded.tokenizer,
    )

    def first(name: str) -> tuple[int, ...]:
        for source in sources:
            value = getattr(source, name, None)
            found = value if isinstance(value, Iterable) else [value]
            ids = [token for token in found if isinstance(token, int) and 0 <= token < vocab_size]
            if ids:
                return tuple(dict.fromkeys(ids))
        return ()

    bos, pad = first("bos_token_id"), first("pad_token_id")
    return SpecialTokens(
        bos=bos[0] if bos else None,
        eos=first("eos_token_id"),
        pad=pad[0] if pad else None,
    )


def with_quantization(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with bitsandbytes' own (``load_in_4bit``, ...) made a quantization config."""
    kwargs = dict(model_kwargs)
    reserved = {"config", "dtype", "torch_dtype", "trust_remote_code", "output_loading_info"}
    if refused := sorted(reserved & kwargs.keys()):
        raise SettingsError(
            f"model_kwargs has {refused[0]!r}: dtype and trust_remote_code are options of the "
            "engine, the rest is its own affair"
        )
    names = [name for name in kwargs if name.startswith(_BITSANDBYTES_PREFIXES)]
    if names and "quantization_config" in kwargs:
        raise SettingsError(f"model_kwargs has {names[0]!r} beside 'quantization_config'")
    if names:
        options = {name: kwargs.pop(name) for name in names}
        kwargs["quantization_config"] = transformers.BitsAndBytesConfig(**options)
    return kwargs


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
