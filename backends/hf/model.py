"""Loading a Hugging Face model, and what it says of itself."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from lmpool.backends.hf.leftovers import check_all_used
from lmpool.backends.lora import CONFIG as ADAPTER_CONFIG
from lmpool.backends.model_config import LONGEST_PROMPT_NAMES, SpecialTokens, special_tokens
from lmpool.backends.options import check_dtype
from lmpool.backends.soft_caps import capped_attention
from lmpool.checks import why_failed
from lmpool.errors import SettingsError
from lmpool.garbage import uncollected

# Untyped on purpose: its annotations differ from release to release.
transformers: Any = importlib.import_module("transformers")

logger = logging.getLogger(__name__)

_BITSANDBYTES_PREFIXES: Final = ("load_in_", "bnb_", "llm_int8_")

_OTHER_ATTENTION: Final = ("flex_attention", "paged|")
"""How the implementations of attention begin that plain forward passes are not made for."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A causal language model on its device, ready to run."""

    model: Any
    device: torch.device
    dtype: str


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
    it do not fill the model, or mean something else than what it takes them for.
    """
    place = resolve_device(device)
    check_dtype(dtype)
    kwargs = with_quantization(model_kwargs)
    config: Any = None
    try:
        config = _load_config(folder, trust_remote_code)
        kwargs |= capped_attention(config, kwargs)
        stored = _stored_quantization(config, folder)
        if "quantization_config" in kwargs or stored is not None:
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
                **{**kwargs, "ignore_mismatched_sizes": True},  # to name them
            )
        if "device_map" not in kwargs:
            model.to(place)
    except SettingsError:
        raise
    except Exception as error:
        kind = "" if config is None else f" ({config.model_type})"
        raise SettingsError(
            f"the model in {str(folder)!r}{kind} cannot be loaded: "
            f"{why_failed(error, _beginning(str(error)))}"
        ) from error
    for name, stored_shape, shape in sorted(loading["mismatched_keys"]):
        raise SettingsError(
            f"the weights in {str(folder)!r} are not those of the model in its config.json: {name} "
            f"is {list(stored_shape)}, and {list(shape)} is expected"
        )
    if missing := sorted(loading["missing_keys"]):
        raise SettingsError(
            f"the weights in {str(folder)!r} lack {len(missing)} of the model's tensors, "
            f"{missing[0]} for one: they are not those of the model in its config.json"
        )
    if stored is None and "gguf_file" not in kwargs:
        check_all_used(model, folder, loading["unexpected_keys"])
    attention = str(getattr(model.config.get_text_config(), "_attn_implementation", None))
    if attention.startswith(_OTHER_ATTENTION):
        raise SettingsError(
            f"attn_implementation={attention!r}: it is compiled anew for each shape, or computes "
            "no prompt without a cache of its own; write 'sdpa' (the default) or 'eager'"
        )
    model.eval()
    return LoadedModel(
        model=model,
        device=model.device,
        dtype=str(model.dtype).removeprefix("torch."),
    )


def _beginning(text: str) -> str:
    """The first line, with the next where that says what it announces: transformers lists all that
    it knows below."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return " ".join(lines[: 1 + lines[0].endswith(":")])


def _load_config(folder: Path, trust_remote_code: bool) -> Any:
    if (folder / ADAPTER_CONFIG).is_file():
        raise SettingsError(
            f"the folder {str(folder)!r} holds an adapter beside the model ({ADAPTER_CONFIG}), "
            "which transformers would apply to its rows until another adapter is added: serve a "
            "copy without the adapter's files, and either merge the adapter into it with PEFT or "
            "load it by add_new_lora() from a folder of its own"
        )
    with uncollected():  # they import much
        importlib.import_module("transformers.modeling_utils")
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
    if getattr(config, "is_encoder_decoder", False):
        raise SettingsError(
            f"the model in {str(folder)!r} ({config.model_type}) has an encoder: what it says next "
            "depends on a second text, which a prompt does not have; serve a decoder-only model"
        )
    return config


def _stored_quantization(config: Any, folder: Path) -> object:
    """What a config says of how its weights are quantized; None: nothing.

    Raises `SettingsError` for a way that transformers does not know: it would take what is stored
    for the weights themselves.
    """
    said = getattr(config, "quantization_config", None)
    said = said or getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if said is None:
        return None
    as_dict = said if isinstance(said, Mapping) else said.to_dict()
    if not transformers.quantizers.AutoHfQuantizer.supports_quant_method(as_dict):
        raise SettingsError(
            f"the model in {str(folder)!r} is quantized by {as_dict['quant_method']!r}, which "
            "transformers does not know: serve it with another engine, or serve weights that are "
            "not quantized"
        )
    return as_dict


def resolve_device(device: str) -> torch.device:
    """The torch device named `device`; ``auto`` is the first GPU, or else the CPU."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda:0")
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
        if named not in ("", "-1"):  # as --gpus sets it
            logger.warning(
                "CUDA_VISIBLE_DEVICES=%s names GPUs and torch %s sees none: this computes on the "
                "CPU; look at nvidia-smi and at torch's build",
                named, torch.__version__,
            )  # fmt: skip
        return torch.device("cpu")
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


def prompt_bounds(model: Any, tokenizer: Any) -> list[object]:
    """What the model, then its tokenizer, say of how long a prompt may be."""
    config = model.config.get_text_config()
    bounds = [getattr(config, name, None) for name in LONGEST_PROMPT_NAMES]
    return [*bounds, getattr(tokenizer, "model_max_length", None)]


def known_special_tokens(model: Any, tokenizer: Any, vocab_size: int) -> SpecialTokens:
    """The special tokens by the generation config, the model's config or the tokenizer."""
    sources = (
        getattr(model, "generation_config", None),
        model.config.get_text_config(),
        tokenizer,
    )
    return special_tokens((partial(_attribute, source) for source in sources), vocab_size)


def _attribute(source: object, name: str) -> object:
    return getattr(source, name, None)


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
