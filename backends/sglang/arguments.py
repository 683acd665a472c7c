"""Which SGLang is known, and what it is told of how to run."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lmpool.errors import SettingsError

VERSIONS: Final = ("0.5.23",)
"""The releases whose scheduler this package knows."""

OWN: Final = frozenset(
    {
        "model_path",
        "device",
        "dtype",
        "disable_overlap_schedule",
        "skip_tokenizer_init",
        "grammar_backend",
        "tp_size",
        "pp_size",
        "dp_size",
        "enable_lora",
        "max_loras_per_batch",
        "max_lora_rank",
        "lora_target_modules",
        "lora_paths",
        "max_queued_requests",
        "speculative_algorithm",
        "disable_radix_cache",
    }
)

_COUNTS: Final = ("max_running_requests", "max_total_tokens", "max_prefill_tokens", "page_size")


def check_version() -> None:
    """Raise `SettingsError` where there is no SGLang, or another one."""
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise SettingsError(
            "engine='sglang' needs sglang, which is not installed: pip install 'lmpool[sglang]'"
        ) from None
    if found not in VERSIONS:
        raise SettingsError(
            f"engine='sglang' was made for sglang {', '.join(VERSIONS)}, and {found} is installed: "
            f"pip install sglang=={VERSIONS[-1]}"
        )


def check_bounds(arguments: Mapping[str, Any]) -> None:
    """Refuse numbers that SGLang takes, and then breaks of."""
    share = arguments.get("mem_fraction_static")
    if share is not None and not 0 < share < 1:
        raise SettingsError(f"server_args has mem_fraction_static={share!r}: between 0 and 1")
    for name in _COUNTS:
        value = arguments.get(name)
        if value is not None and value < 1:
            raise SettingsError(f"server_args has {name}={value!r}: a positive integer expected")


def engine_arguments(
    folder: Path, device: str, dtype: str, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """What SGLang is told of how to run, but for its adapters, with `overrides` of config.json."""
    arguments: dict[str, Any] = {
        "model_path": str(folder),
        "device": device,
        "dtype": dtype,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "skip_tokenizer_init": True,
        # A row is ready when its batch is: there is no next batch's work to hide behind it.
        "disable_overlap_schedule": True,
        "log_level": "error",
        "random_seed": 0,
        "json_model_override_args": json.dumps(overrides),
    }
    if device == "cpu":
        arguments |= {
            "attention_backend": "torch_native",
            "lora_backend": "torch_native",
            "disable_cuda_graph": True,
            "mem_fraction_static": 0.1,
            "max_total_tokens": 32_768,
            "max_running_requests": 256,
        }
    return arguments


def joined(arguments: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's arguments with those that are `given`, whose overrides of config.json come on top
    of its own."""
    found = {**arguments, **given}
    name = "json_model_override_args"
    try:
        own, theirs = json.loads(arguments[name]), json.loads(given.get(name, "{}"))
        overrides = {**own, **theirs}
        if isinstance(own.get("text_config"), dict) and isinstance(theirs.get("text_config"), dict):
            overrides["text_config"] = {**own["text_config"], **theirs["text_config"]}
    except (TypeError, ValueError):
        return found  # SGLang says what is wrong with it
    return {**found, name: json.dumps(overrides)}
