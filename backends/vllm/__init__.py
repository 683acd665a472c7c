"""The vLLM engine, where a vLLM is installed that it knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmpool.backends.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]


def __getattr__(name: str) -> type[VLLMEngine]:
    # Not at once: parts of this folder are used where the engine's packages are not installed.
    if name == "VLLMEngine":
        from lmpool.backends.vllm import internals

        internals.check_version()  # before anything of vLLM is imported
        from lmpool.backends.vllm.engine import VLLMEngine

        return VLLMEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
