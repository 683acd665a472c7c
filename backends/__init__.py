"""The engines, behind one small interface. Importing this imports no machine-learning library."""

from lmpool.backends.engine import BatchEngine, Engine, EngineInfo, Outcome, Request, Sampling

__all__ = [
    "BatchEngine",
    "Engine",
    "EngineInfo",
    "Outcome",
    "Request",
    "Sampling",
]
