"""Texts that are scored by engines which give rows only, step by step beside other requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmpool.backends import Engine, Outcome, Request
from lmpool.backends.contract import ask, request_for
from lmpool.backends.contract.asking import finish
from lmpool.backends.mock import MockEngine, mock_row
from lmpool.backends.scoring import MOST_ROW_BYTES, MOST_ROWS, Scorings
from lmpool.errors import PromptFailed
from lmpool.wants import Generate, Score, TextScores
from tests.support.engines import drawn
from tests.support.fed_engine import FedEngine
from tests.support.scores import check_scores, random_score

VOCAB = 256
ENGINES = [MockEngine, FedEngine]


def texts_of(rng: np.random.Generator, sizes: Sequence[int]) -> list[npt.NDArray[np.uint32]]:
    return [rng.integers(0, VOCAB, size).astype(np.uint32) for size in sizes]


def check(outcome: Outcome, request: Request) -> None:
    text = request.tokens
    rows = [mock_row(text[:n], VOCAB, request.adapter) for n in range(1, text.size)]
    check_scores(outcome, request, np.array(rows, np.float64))


class Recording(MockEngine):
    """Remembers the sizes of what it was asked to compute."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.asked: list[int] = []
        self.fails = 0
        """Batches from this size on are too large for its memory; 0: none are."""

    def compute(self, requests: Sequence[Request]) -> list[Outcome]:
        self.asked.append(len(requests))
        if self.fails and len(requests) >= self.fails:
            raise MemoryError("too many prompts")
        return list(super().compute(requests))


@pytest.mark.parametrize("make", ENGINES)
def test_scores_are_those_of_the_rows(make: Any) -> None:
    engine, rng = make(), np.random.default_rng(1)
    info: Any = engine.info
    texts = texts_of(rng, [2, 3, 200, 70, 70, 9])
    texts.append(texts[2].copy())
    requests = [
        request_for(text, want=random_score(rng, text.size, VOCAB).checked(info)) for text in texts
    ]
    others = [request_for([1, 2]), request_for([3], want=Generate(4, (), 1.0, 1))]
    outcomes = ask(engine, [*requests, *others])
    for request, outcome in zip(requests, outcomes, strict=False):
        check(outcome, request)
    assert (outcomes[-2].logprobs() == mock_row([1, 2], VOCAB)).all()
    assert len(drawn(outcomes[-1])) == 4
    assert engine.in_flight() == 0


@pytest.mark.parametrize("make", ENGINES)
def test_others_get_in_between(make: Any) -> None:
    engine = make()
    (long,) = [
        request_for(text, want=Score()) for text in texts_of(np.random.default_rng(2), [1800])
    ]
    engine.submit([long])
    engine.step()
    assert engine.in_flight() == 1
    later = request_for([5])
    engine.submit([later])
    assert engine.in_flight() == 2
    found: list[Outcome] = []
    for _ in range(20):
        found += engine.step()
    assert [outcome.id for outcome in found] == [later.id]
    (outcome,) = finish(engine, [long])
    check(outcome, long)


@pytest.mark.parametrize("make", ENGINES)
def test_texts_take_turns(make: Any) -> None:
    engine, rng = make(), np.random.default_rng(3)
    long, *short = [request_for(t, want=Score()) for t in texts_of(rng, [900, 10, 10, 10])]
    engine.submit([long, *short])
    found: list[bytes] = []
    while engine.in_flight():
        found += [outcome.id for outcome in engine.step()]
    assert found[-1] == long.id
    assert set(found[:-1]) == {request.id for request in short}


def test_a_step_asks_for_few_rows() -> None:
    rng = np.random.default_rng(4)
    engine = Recording()
    requests = [request_for(t, want=Score()) for t in texts_of(rng, [100] * 5)]
    assert all(isinstance(o.answer, TextScores) for o in ask(engine, requests))
    assert max(engine.asked) == MOST_ROWS
    assert sum(engine.asked) == 5 * 99
    wide = Recording(vocab_size=1 << 20)
    text = texts_of(rng, [12])[0]
    ask(wide, [request_for(text, want=Score())])
    assert max(wide.asked) == MOST_ROW_BYTES // (4 << 20)
    scorings = Scorings()
    scorings.begin(request_for(text), Score())
    assert len(scorings.next_rows(1 << 24)) == 1  # one, however large


def test_what_does_not_fit_into_memory_is_halved() -> None:
    engine = Recording()
    engine.fails = 10
    requests = [request_for(t, want=Score()) for t in texts_of(np.random.default_rng(5), [50, 30])]
    for request, outcome in zip(requests, ask(engine, requests), strict=True):
        check(outcome, request)


def test_a_text_of_which_one_row_fails_fails_alone() -> None:
    engine = MockEngine(fail_token=7)
    good, bad = texts_of(np.random.default_rng(6), [40, 40])
    good[good == 7] = 8
    bad[bad == 7] = 8
    last = bad.copy()
    bad[20], last[-1] = 7, 7
    requests = [request_for(text, want=Score()) for text in (good, bad, last)]
    outcomes = ask(engine, requests)
    check(outcomes[0], requests[0])
    assert isinstance(outcomes[1].error, PromptFailed)
    assert "contains the token 7" in str(outcomes[1].error)
    check(outcomes[2], requests[2])  # a target alone, which the engine never sees
    assert engine.in_flight() == 0


def test_a_row_that_fails_ends_the_others_of_its_text() -> None:
    class Failing(FedEngine):
        def advance(self) -> list[Outcome]:
            given = super().advance()
            error = PromptFailed("one row")
            return [Outcome(o.id, error=error) if n == 0 else o for n, o in enumerate(given)]

    engine = Failing(steps=1, most=4)
    bad = request_for(np.arange(1, 40, dtype=np.uint32), want=Score())
    (outcome,) = ask(engine, [bad])
    assert "one row" in str(outcome.error)
    assert (engine.in_flight(), len(engine.waiting), len(engine.running)) == (0, 0, 0)
    assert not engine._scoring_adapters


@pytest.mark.parametrize("make", ENGINES)
def test_cancelled_texts_ask_for_no_more(make: Any) -> None:
    engine, rng = make(), np.random.default_rng(7)
    gone, stays = [request_for(t, want=Score()) for t in texts_of(rng, [300, 90])]
    engine.submit([gone, stays])
    engine.step()
    engine.cancel([gone.id])
    assert engine.in_flight() == 1
    if isinstance(engine, FedEngine):
        assert {w.request.tokens.size for w in engine.waiting} <= set(range(1, 90))
    (outcome,) = finish(engine, [stays])
    check(outcome, stays)
    # The same id again, at once.
    engine.submit([gone])
    engine.cancel([gone.id])
    (outcome,) = ask(engine, [gone])
    check(outcome, gone)


def test_a_batch_that_loses_its_adapter() -> None:
    engine, rng = MockEngine(), np.random.default_rng(8)
    engine.add_adapter("fr", "")
    text, other = texts_of(rng, [200, 200])
    mine, base = request_for(text, adapter="fr", want=Score()), request_for(other, want=Score())
    engine.submit([mine, base])
    engine.step()
    engine.remove_adapter("fr")
    outcomes = finish(engine, [mine, base])
    assert "'fr' was removed" in str(outcomes[0].error)
    check(outcomes[1], base)
    engine.add_adapter("fr", "")
    engine.submit([mine])
    engine.step()
    engine.finish_adapter("fr")
    (outcome,) = finish(engine, [mine])
    check(outcome, mine)


def test_a_fed_engine_keeps_an_adapter_as_long_as_texts_need_it() -> None:
    engine = FedEngine()
    engine.add_adapter("fr", "")
    text = texts_of(np.random.default_rng(9), [300])[0]
    mine = request_for(text, adapter="fr", want=Score())
    engine.submit([mine])
    engine.step()
    engine.remove_adapter("fr")
    assert engine.loaded
    (outcome,) = finish(engine, [mine])
    check(outcome, mine)
    assert not engine.loaded
    (refused,) = ask(engine, [mine])
    assert "no adapter named 'fr'" in str(refused.error)


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize(
    ("text", "want", "said"),
    [
        ([1], Score(), "a text of 1 token"),
        ([], Score(), "0 tokens"),
        ([1, 2, 3], Score(start=3), "start=3 is beyond a text of 3 tokens"),
        ([1, 2], Score(top_logprobs=VOCAB + 1), "top_logprobs=257: at most 256"),
        ([1, 2], Score(token_ids=b"\0\1\0\0"), "token id 256 in token_ids: below 256"),
        (list(range(6)), Score(), "a prompt of 6 tokens: 1 to 5 expected"),
        ([VOCAB, 2], Score(), "token id 256: below 256"),
        ([2, VOCAB], Score(), "token id 256: below 256"),
    ],
)
def test_hostile_jobs_are_refused(make: Any, text: list[int], want: Score, said: str) -> None:
    engine: Engine = make(max_prompt_tokens=4)
    good = request_for([1, 2, 3, 4, 5], want=Score())  # one more than a prompt may have
    bad, right = ask(engine, [request_for(text, want=want), good])
    assert said in str(bad.error)
    check(right, good)


def test_pieces_of_a_step_are_bounded_together() -> None:
    scorings, rng = Scorings(), np.random.default_rng(10)
    for text in texts_of(rng, [30, 95, 30, 30]):
        scorings.begin(request_for(text), Score())

    def pieces() -> list[tuple[int, int]]:
        asked = scorings.next_pieces(50, lambda tokens: tokens < 90)
        return [(r.want.start, r.tokens.size) for r in asked if isinstance(r.want, Score)]

    assert pieces() == [(1, 30)]
    assert pieces() == [(1, 95)]  # at once, as it does not continue
    assert pieces() == [(1, 30), (1, 20)]
    (cut,) = [scoring for scoring in scorings._texts.values() if scoring.waiting]
    assert cut.next == 20


def test_a_text_that_has_no_row_in_flight_keeps_its_adapter() -> None:
    engine = FedEngine()
    engine.add_adapter("fr", "")
    first, second = texts_of(np.random.default_rng(11), [300, 20])
    long = request_for(first, want=Score())
    mine = request_for(second, adapter="fr", want=Score())
    engine.submit([long, mine])
    assert all(admitted.adapter is None for admitted in engine.waiting)
    engine.remove_adapter("fr")
    assert engine.loaded
    outcomes = finish(engine, [long, mine])
    check(outcomes[0], long)
    check(outcomes[1], mine)
    assert not engine.loaded
