"""SGLang engines under test: a process has one at a time, and making one takes seconds."""

from __future__ import annotations

from typing import Any

import pytest

from lmpool.backends.sglang import SGLangEngine

SMALL = {"server_args": {"chunked_prefill_size": 48, "max_total_tokens": 1200}}
"""Prompts in pieces of 48 tokens, and room for two of the longest at most."""

WARNINGS = [
    # Of SGLang's and its dependencies' own making.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class OneAtATime:
    """The engine of the tiny model that there is, if any."""

    def __init__(self) -> None:
        self._open: SGLangEngine | None = None
        self._shared: dict[str, Any] | None = None

    def make(self, **options: Any) -> SGLangEngine:
        """A new one, in the place of the other."""
        self.close()
        self._open = SGLangEngine("tiny", **options)
        return self._open

    def shared(self, **options: Any) -> SGLangEngine:
        """One with these options that leaves nothing of those who had it before."""
        if self._open is None or self._shared != options or self._open.in_flight():
            self.make(**options)
            self._shared = options
        assert self._open is not None
        self._open.clear_cache()
        return self._open

    def close(self) -> None:
        """Have none."""
        if self._open is not None:
            self._open.close()
        self._open = self._shared = None
