"""The engine of Hugging Face transformers: a packed token trie with kept states."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmpool.backends.hf.engine import HFEngine

__all__ = ["HFEngine"]


def __getattr__(name: str) -> type[HFEngine]:
    # Not at once: parts of this folder are used where the engine's packages are not installed.
    if name == "HFEngine":
        from lmpool.backends.hf.engine import HFEngine

        return HFEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
