"""How many prompts are computed at once where memory is short."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmpool.backends.batch import _TRUSTED
from lmpool.backends.contract import ask
from lmpool.backends.engine import Outcome, Request
from lmpool.backends.mock import MockEngine
from tests.support.engines import requests_of

Fits = Callable[[Sequence[Request]], bool]
SHORT = [[1, n] for n in range(64)]


class Short(MockEngine):
    """Computes the batches that fit into its memory."""

    def __init__(self, fits: Fits) -> None:
        super().__init__(max_prompt_tokens=1_000)
        self.fits = fits
        self.asked: list[int] = []
        """The sizes of the batches."""

    def compute(self, requests: Sequence[Request]) -> list[Outcome]:
        self.asked.append(len(requests))
        if not self.fits(requests):
            raise MemoryError("as if it did not fit")
        return list(super().compute(requests))

    def sizes(self, prompts: list[list[int]]) -> list[int]:
        """The batches in which these are computed; all are answered."""
        self.asked.clear()
        outcomes = ask(self, requests_of(prompts))
        assert all(outcome.error is None for outcome in outcomes)
        return list(self.asked)


def tokens(requests: Sequence[Request]) -> int:
    return sum(request.tokens.size for request in requests)


def test_what_did_not_fit_is_remembered() -> None:
    engine = Short(lambda requests: len(requests) <= 10)
    assert engine.sizes(SHORT) == [64, 32, 16, *[8] * 8]
    assert engine.sizes(SHORT) == [8] * 8


def test_a_prompt_that_does_not_fit_alone_leaves_others_together() -> None:
    for place in (0, 21, 63):
        engine = Short(lambda requests: max(r.tokens.size for r in requests) < 500)
        prompts = [*SHORT[:place], [7] * 500, *SHORT[place + 1 :]]
        outcomes = ask(engine, requests_of(prompts))
        assert [i for i, outcome in enumerate(outcomes) if outcome.error is not None] == [place]
        assert engine.sizes(SHORT) == [64]


def test_beside_a_prompt_that_does_not_fit_alone_the_others_bound_is_found() -> None:
    engine = Short(lambda requests: len(requests) <= 10 and tokens(requests) < 500)
    ask(engine, requests_of([*SHORT[:63], [7] * 500]))
    assert engine.sizes(SHORT) == [8] * 8


def test_an_odd_batch_is_bounded_by_its_larger_half() -> None:
    engine = Short(lambda requests: len(requests) <= 2)
    assert engine.sizes(SHORT[:3]) == [3, 1, 2]
    assert engine.sizes(SHORT[:4]) == [2, 2]


def test_after_long_prompts_more_fit_again() -> None:
    engine = Short(lambda requests: tokens(requests) <= 400)
    assert engine.sizes([*SHORT, [7] * 395])[-1] < 4  # it fits with a few others
    until_all = sum(engine.sizes(SHORT) != [64] for _ in range(_TRUSTED))
    assert 0 < until_all < _TRUSTED / 4
    assert engine.sizes(SHORT) == [64]


def test_a_bound_that_stays_is_tried_rarely() -> None:
    engine = Short(lambda requests: len(requests) <= 10)
    engine.sizes(SHORT)
    asked = [size for _ in range(80) for size in engine.sizes(SHORT)]
    assert 1 <= asked.count(16) <= len(asked) / _TRUSTED
    assert set(asked) == {8, 16}
