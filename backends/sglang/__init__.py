"""The SGLang engine: its scheduler, run in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmpool.backends.sglang.engine import SGLangEngine

__all__ = ["SGLangEngine"]


def __getattr__(name: str) -> type[SGLangEngine]:
    # Not at once: parts of this folder are used where the engine's packages are not installed.
    if name == "SGLangEngine":
        from lmpool.backends.sglang.engine import SGLangEngine

        return SGLangEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
