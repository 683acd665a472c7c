"""A mock engine that is fed while it runs, whose rows and tokens are those of `MockEngine`."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, assert_never

from lmpool.backends import ContinuousEngine, Outcome
from lmpool.backends.continuous import Admitted
from lmpool.backends.mock import MockEngine, mock_row
from lmpool.errors import EngineBroken
from lmpool.wants import Generate, HeadPart, Hidden, OfRow, Row, Score


class FedEngine(ContinuousEngine[str]):
    """Takes a step a token, and `steps` for a row; no more than `most` requests run at once."""

    def __init__(self, model: str = "mock", *, most: int = 8, steps: int = 2, **options: Any):
        super().__init__()
        self.info = MockEngine(model, **options).info
        self.dropped = 0
        self.loaded: set[str] = set()
        self.stopped: deque[str] = deque(maxlen=8)
        self._most = most
        self._steps = steps
        self._numbers = itertools.count()
        self._steps_of: dict[str, int] = {}
        """How many each that is to have a row has run."""
        self._closed = False

    def begin(self, admitted: Admitted[str]) -> str:
        if self._closed:
            raise EngineBroken("the engine was closed")
        assert admitted.adapter is None or admitted.adapter in self.loaded
        name = f"request {next(self._numbers)}"
        self._steps_of[name] = 0
        return name

    def next_to_join(self) -> Sequence[Admitted[str]]:
        room = self._most - len(self.running)
        return [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]

    def advance(self) -> list[Outcome]:
        return [o for name in list(self.running) if (o := self._advance(name)) is not None]

    def _advance(self, name: str) -> Outcome | None:
        admitted = self.running[name]
        request, continuation = admitted.request, admitted.continuation
        adapter = None if admitted.adapter is None else admitted.adapter.rpartition("#")[0]
        match request.want:
            case Row() | OfRow():
                self._steps_of[name] += 1
                if self._steps_of[name] < self._steps:
                    return None
                row = mock_row(request.tokens, self.info.vocab_size, adapter)
                outcome = Outcome(request.id, row=row)
            case Generate():
                assert continuation is not None
                tokens = continuation.next_request().tokens
                continuation.take(mock_row(tokens, self.info.vocab_size, adapter))
                if not continuation.finished:
                    return None
                outcome = Outcome(request.id, answer=continuation.answer())
            case Score() | Hidden() | HeadPart():
                raise AssertionError("it was refused, or its rows join instead")
            case _:
                assert_never(request.want)
        self.ended(name)
        del self._steps_of[name]
        return outcome

    def abort(self, names: Sequence[str]) -> None:
        self.stopped.extend(names)
        for name in names:
            del self._steps_of[name]

    def drop_state(self) -> None:
        assert not self.running
        self.dropped += 1

    def load_adapter(self, name: str, path: str) -> str:
        self.loaded.add(f"{name}#{next(self._numbers)}")
        return max(self.loaded, key=lambda adapter: int(adapter.rpartition("#")[2]))

    def unload_adapter(self, adapter: str) -> None:
        self.loaded.remove(adapter)

    def close(self) -> None:
        self._closed = True
