"""The engines, behind one small interface. Importing this imports no machine-learning library."""

from lmpool.backends.batch import BatchEngine
from lmpool.backends.continuous import ContinuousEngine
from lmpool.backends.engine import Engine, EngineInfo, Measures, Outcome, Request
from lmpool.backends.load import load_engine

__all__ = [
    "BatchEngine",
    "ContinuousEngine",
    "Engine",
    "EngineInfo",
    "Measures",
    "Outcome",
    "Request",
    "load_engine",
]
