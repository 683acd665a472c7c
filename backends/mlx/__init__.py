"""The engine of mlx-lm, for Apple GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmpool.backends.mlx.engine import MLXEngine

__all__ = ["MLXEngine"]


def __getattr__(name: str) -> type[MLXEngine]:
    # Not at once: parts of this folder are used where the engine's packages are not installed.
    if name == "MLXEngine":
        from lmpool.backends.mlx.engine import MLXEngine

        return MLXEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
