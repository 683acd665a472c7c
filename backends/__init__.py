"""The engines, behind one small interface. Importing this imports no machine-learning library."""

from lmpool.backends.engine import BatchEngine, Engine, EngineInfo, Outcome, Request, Sampling
from lmpool.backends.load import load_engine

__all__ = [
    "BatchEngine",
    "Engine",
    "EngineInfo",
    "Outcome",
    "Request",
    "Sampling",
    "load_engine",
]
