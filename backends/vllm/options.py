"""What of vLLM's own options passes through, and what cannot."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
from collections.abc import Mapping
from typing import Any, Final

from vllm import EngineArgs
from vllm.platforms import current_platform

from lmpool.backends.options import check_positive, check_types
from lmpool.backends.vllm import faithful, internals
from lmpool.cache_memory import default_cache_bytes
from lmpool.errors import SettingsError

CAPTURED_ROWS: Final = "lmpool.backends.vllm.capture.CapturedRows"

CAPTURE_PROCESSOR: Final = "lmpool.backends.vllm.capture:CaptureProcessor"
FORMER_CAPTURE_PROCESSOR: Final = "lmpool.backends.vllm_capture:CaptureProcessor"
"""The same, by the name that an environment of before still says."""

REFUSED: Final[Mapping[str, str]] = {
    "model": "the worker's setting `model` names it",
    "model_weights": "the worker's setting `model` names the weights",
    "tokenizer": "the model's folder has it; prompts arrive as token ids",
    "skip_tokenizer_init": "lmpool never lets vLLM tokenize",
    "tokenizer_revision": "the tokenizer is the model's",
    "served_model_name": "a pool has a name of its own: set `pool`",
    "max_model_len": "write max_prompt_tokens, which is one less",
    "trust_remote_code": "it is an option of the engine: write it as such",
    "logits_processors": "rows are captured by one, and another would change them",
    "worker_extension_cls": "rows are read by way of it",
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        "vLLM runs no logits processors with it, so that no row can be captured",
    ),
    "logprobs_mode": "rows are the model's own log-probabilities",
    "max_logprobs": "rows are whole vocabularies",
    "runner": "only generating models have next-token log-probabilities",
    "convert": "only generating models have next-token log-probabilities",
    "pooler_config": "only generating models have next-token log-probabilities",
    "enable_prompt_embeds": "prompts are token ids",
    "data_parallel_size": "start that many workers instead: they share one pool",
    "scheduling_policy": "jobs run in the order of their stream",
    "stream_interval": "rows come with one token",
    "disable_log_stats": "the pool has statistics of its own: lmpool stats",
    "max_cpu_loras": "adapters stay loaded until they are removed, and a worker knows how many",
    "hf_overrides": "the model's fingerprint would not show them: edit a copy of its config.json",
    "hf_config_path": "the model's fingerprint would not show what is there: serve a copy of the "
    "model's folder with that config.json",
    "override_generation_config": "sampling is what the caller says, nothing else",
    "generation_config": "sampling is what the caller says, nothing else",
}
"""Options of vLLM that would break what the engine promises, and why or what to write instead."""

NUMERIC: Final = (
    "quantization",
    "quantization_config",
    "kv_cache_dtype",
    "load_format",
    "config_format",
    "code_revision",
)
"""Options that change the model's numbers, and so belong to its fingerprint."""


_MEMORY: Final = frozenset({"kv_cache_memory_bytes", "gpu_memory_utilization"})
"""Options that say how much memory vLLM takes."""

MOST_ADAPTERS: Final = 64
"""As many as a worker keeps loaded, and as many removed ones that requests in flight still use."""


def check_options(given: Mapping[str, Any], arguments: type) -> None:
    """Refuse what `arguments`, vLLM's `EngineArgs`, does not know or lmpool cannot let through.

    Nor what is of another type. Raises `SettingsError` with the reason, or with what to write
    instead.
    """
    known = {field.name for field in dataclasses.fields(arguments)}
    for name in given:
        if name in REFUSED:
            raise SettingsError(f"engine_opts has {name!r}: {REFUSED[name]}")
        if name not in known:
            close = difflib.get_close_matches(name, known - REFUSED.keys(), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise SettingsError(
                f"the engine 'vllm' has no option {name!r}, and vLLM's EngineArgs has none{hint}"
            )
    check_types("engine_opts", given, arguments)


def capture_processors() -> list[str]:
    """The processors that vLLM must be told of: none where it finds the entry point by itself."""
    points = importlib.metadata.entry_points(group="vllm.logits_processors")
    known = {point.value for point in points} & {CAPTURE_PROCESSOR, FORMER_CAPTURE_PROCESSOR}
    return [] if known else [CAPTURE_PROCESSOR]


def engine_arguments(
    folder: str,
    *,
    dtype: str,
    max_prompt_tokens: int | None,
    trust_remote_code: bool,
    given: Mapping[str, Any],
) -> EngineArgs:
    """The arguments for vLLM, its own among them as `given`. Raises `SettingsError`."""
    check_options(given, EngineArgs)
    check_positive(max_prompt_tokens=max_prompt_tokens)
    longest = max_prompt_tokens
    options: dict[str, Any] = {"enable_prefix_caching": True, **given}
    on_cpu = current_platform.is_cpu()
    if on_cpu and not _MEMORY & given.keys():
        # vLLM would want nearly all of the machine's memory, and not start where others use some.
        options["kv_cache_memory_bytes"] = default_cache_bytes()
    try:
        if options.get("enable_lora"):
            # What is loaded stays loaded: vLLM would read a file again that may be another by then.
            options["max_cpu_loras"] = max(MOST_ADAPTERS, options.get("max_loras", 1))
        return EngineArgs(
            model=folder,
            dtype="float32" if dtype == "auto" and on_cpu else dtype,
            max_model_len=None if longest is None else longest + 1,
            trust_remote_code=trust_remote_code,
            skip_tokenizer_init=True,
            generation_config="vllm",
            max_logprobs=-1,
            disable_log_stats=True,
            logits_processors=capture_processors(),
            hf_overrides=faithful.as_transformers,
            worker_extension_cls=CAPTURED_ROWS,
            **options,
        )
    except Exception as error:
        raise SettingsError(f"engine_opts: {internals.root_cause(error)}") from error
