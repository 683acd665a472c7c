"""The contract on hidden states: right engines pass, and those that are broken do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lmpool.backends import Engine, Outcome, Request
from lmpool.backends.contract import examine
from lmpool.backends.contract.ends import CLOSED
from lmpool.backends.contract.hidden import ROWS_OF_STATES
from lmpool.backends.mock import MockEngine
from lmpool.wants import Hidden
from tests.engines.test_contract import VOCAB
from tests.engines.test_contract import TestMock as Mock
from tests.support.hidden_engine import F32, HiddenEngine

PARTS = ["continuations", "adapters"]


def suite_of(make: type[Engine]) -> type[Mock]:
    class Suite(Mock):
        @classmethod
        def open_engine(cls, **options: Any) -> Engine:
            return make("mock", **{**cls.options, **options})  # type: ignore[call-arg]

    return Suite


class Unnormed(HiddenEngine):
    """The state before the final norm."""

    def state(self, request: Request) -> F32:
        return super().state(request) * np.float32(1.7)


class Neighbours(HiddenEngine):
    """The state of another prompt of the batch."""

    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        outcomes = list(super().compute(requests))
        found = [o for o in outcomes if isinstance(o.answer, np.ndarray) and o.answer.size == VOCAB]
        for one, other in zip(found, found[1:] + found[:1], strict=True):
            outcomes[outcomes.index(one)] = replace(one, answer=other.answer)
        return outcomes


class Earlier(HiddenEngine):
    """The state after all of the prompt but its last token."""

    def state(self, request: Request) -> F32:
        return super().state(replace(request, tokens=request.tokens[:-1]))


class Bare(HiddenEngine):
    """The state of the base model, whatever the adapter."""

    def state(self, request: Request) -> F32:
        return super().state(replace(request, adapter=None))


class Uncapped(HiddenEngine):
    """A head that leaves its cap out."""

    def __init__(self, model: str = "mock", **options: Any) -> None:
        super().__init__(model, **options)
        assert self.info.head is not None
        self.info = replace(self.info, head=replace(self.info.head, cap=None))


class Unscaled(HiddenEngine):
    """A head that leaves its scale out."""

    def __init__(self, model: str = "mock", **options: Any) -> None:
        super().__init__(model, **options)
        assert self.info.head is not None
        self.info = replace(self.info, head=replace(self.info.head, scale=1.0))


class Unbiased(HiddenEngine):
    """A head that leaves its bias out."""

    def __init__(self, model: str = "mock", **options: Any) -> None:
        super().__init__(model, **options)
        assert self.info.head is not None
        self.info = replace(self.info, head=replace(self.info.head, bias=False))


class Shifted(HiddenEngine):
    """A head whose rows are those of the tokens before."""

    def head_weights(self, rows: slice) -> F32:
        return np.roll(super().head_weights(slice(None)), 1, axis=0)[rows]


class Cut(HiddenEngine):
    """A part of the head that lacks its last row."""

    def head_weights(self, rows: slice) -> F32:
        return super().head_weights(slice(rows.start, rows.stop - 1))


class Changing(HiddenEngine):
    """A head that is another one later."""

    reads = 0

    def head_bias(self) -> F32:
        self.reads += 1
        return super().head_bias() * np.float32(1 if self.reads < 2 else 1.5)

    def state(self, request: Request) -> F32:
        return super().state(request) if self.reads < 2 else np.zeros(VOCAB, np.float32)


class Outliving(HiddenEngine):
    """A head that is there when its engine is not."""

    def head_weights(self, rows: slice) -> F32:
        return np.eye(self.info.vocab_size, dtype=np.float32)[rows]


class Wide(HiddenEngine):
    """A state in float64."""

    def state(self, request: Request) -> F32:
        return super().state(request).astype(np.float64)  # type: ignore[return-value]


class Rows(HiddenEngine):
    """A row in the place of the state."""

    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        return MockEngine.compute(self, requests)


class Careless(MockEngine):
    """No hidden states, and zeros for whoever asks."""

    def _reason_to_refuse(self, request: Request) -> str | None:
        if isinstance(request.want, Hidden):
            return None
        return super()._reason_to_refuse(request)

    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        states = [r for r in requests if isinstance(r.want, Hidden)]
        yield from super().compute([r for r in requests if not isinstance(r.want, Hidden)])
        yield from (Outcome(r.id, answer=np.zeros(4, np.float32)) for r in states)


BROKEN: dict[type[Engine], str] = {
    Unnormed: ROWS_OF_STATES,
    Neighbours: ROWS_OF_STATES,
    Earlier: ROWS_OF_STATES,
    Bare: ROWS_OF_STATES,
    Uncapped: ROWS_OF_STATES,
    Unscaled: ROWS_OF_STATES,
    Unbiased: ROWS_OF_STATES,
    Shifted: ROWS_OF_STATES,
    Cut: "an engine with info.head has each part of it",
    Changing: "",
    Wide: "a hidden state is float32, as many numbers as info.head says",
    Rows: "",
    Careless: "what cannot be run fails",
}


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
def test_a_broken_engine_is_found_out(make: type[Engine]) -> None:
    found = next(f for seed in range(3) if (f := examine(suite_of(make), parts=PARTS, seed=seed)))
    assert found is not None
    assert BROKEN[make] in found.promise, found


def test_a_head_ends_with_its_engine() -> None:
    found = examine(suite_of(Outliving), parts=["ends"])
    assert found is not None
    assert found.promise == CLOSED
    assert examine(suite_of(HiddenEngine), parts=["ends"]) is None


@pytest.mark.parametrize("seed", range(1))
def test_a_right_engine_is_not(seed: int) -> None:
    assert examine(suite_of(HiddenEngine), parts=PARTS, seed=seed) is None
