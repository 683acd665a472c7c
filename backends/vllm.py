"""The vLLM engine, where a vLLM is installed that it knows."""

from lmpool.backends import vllm_internals

vllm_internals.check_version()  # before anything of vLLM is imported

from lmpool.backends.vllm_engine import VLLMEngine  # noqa: E402

__all__ = ["VLLMEngine"]
