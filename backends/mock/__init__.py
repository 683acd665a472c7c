"""The engine without a model: rows that look random, are known in advance and cost nothing."""

from lmpool.backends.mock.engine import MockEngine, mock_row

__all__ = ["MockEngine", "mock_row"]
