"""What every engine that is fed while it runs has from `ContinuousEngine`."""

from __future__ import annotations

import pytest

from lmpool.backends import ContinuousEngine, Engine, EngineInfo, Outcome
from lmpool.backends.contract import ask, request_for
from lmpool.backends.mock import mock_row
from lmpool.errors import AdapterError, PromptFailed
from lmpool.wants import Generate
from tests.support.engines import drawn
from tests.support.fed_engine import FedEngine


def steps(engine: Engine, count: int) -> list[Outcome]:
    return [outcome for _ in range(count) for outcome in engine.step()]


def test_requests_join_while_others_run() -> None:
    engine = FedEngine()
    assert engine.continuous
    long = request_for([1], want=Generate(10, (), 1.0, 3))
    engine.submit([long])
    assert steps(engine, 3) == []
    short = request_for([2])
    engine.submit([short])
    assert [outcome.id for outcome in steps(engine, 2)] == [short.id]
    assert engine.in_flight() == 1
    assert [outcome.id for outcome in steps(engine, 5)] == [long.id]
    assert engine.in_flight() == 0


def test_who_finds_no_room_waits_and_joins_as_others_end() -> None:
    engine = FedEngine(most=3)
    requests = [request_for([n]) for n in range(10)]
    engine.submit(requests)
    assert (len(engine.running), len(engine.waiting), engine.in_flight()) == (3, 7, 10)
    outcomes = {outcome.id: outcome for outcome in steps(engine, 8)}
    for number, request in enumerate(requests):
        assert (outcomes[request.id].row == mock_row([number], 256)).all()


def test_refusals_are_outcomes_and_run_nowhere() -> None:
    engine = FedEngine(max_prompt_tokens=4)
    bad = [
        request_for([]),
        request_for([1] * 5),
        request_for([256]),
        request_for([1], adapter="nobody"),
        request_for([1], want=Generate(3, (), float("nan"), 0)),
    ]
    full = request_for([1] * 4, want=Generate(3, (), 0.0, 0))
    nothing = request_for([1], want=Generate(0, (), 0.0, 0))
    outcomes = ask(engine, [*bad, full, nothing, good := request_for([5])])
    assert all(isinstance(outcome.error, PromptFailed) for outcome in outcomes[:5])
    assert [len(drawn(outcome)) for outcome in outcomes[5:7]] == [1, 0]
    assert outcomes[7].id == good.id
    assert outcomes[7].row is not None


def test_cancelling_what_waits_runs_and_has_ended() -> None:
    engine = FedEngine(most=2)
    running = [request_for([n], want=Generate(5, (), 1.0, n)) for n in range(2)]
    waiting = [request_for([n]) for n in range(2)]
    refused = request_for([])
    engine.submit([*running, *waiting, refused])
    engine.cancel([running[0].id, waiting[0].id, refused.id, b"nobody's"])
    assert list(engine.stopped) == ["request 0"]
    assert engine.in_flight() == 2
    found = {outcome.id for outcome in steps(engine, 8)}
    assert found == {running[1].id, waiting[1].id}
    # The same id may be asked for again, and what was stopped says nothing of it.
    (again,) = ask(engine, [running[0]])
    assert len(drawn(again)) == 5


def test_kept_state_is_dropped_between_what_runs_and_what_waits() -> None:
    engine = FedEngine()
    first, second = request_for([1]), request_for([2])
    engine.submit([first])
    engine.clear_cache()
    engine.submit([second])
    assert engine.dropped == 0
    assert [outcome.id for outcome in steps(engine, 2)] == [first.id]
    assert engine.dropped == 1
    assert [outcome.id for outcome in steps(engine, 2)] == [second.id]
    engine.clear_cache()
    assert engine.dropped == 2


def test_a_request_that_is_tried_again_has_no_company() -> None:
    class Picky(FedEngine):
        """Gives nobody a row in company, and lets everybody in."""

        next_to_join = ContinuousEngine.next_to_join
        seen: list[int] = []

        def advance(self) -> list[Outcome]:
            self.seen.append(len(self.running))
            company = len(self.running) > 1
            held = dict(self.running)
            outcomes = super().advance()
            for name, admitted in held.items():
                if company and name not in self.running:
                    outcomes = [o for o in outcomes if o.id != admitted.request.id]
                    self.retry_alone(admitted)
            return outcomes

    engine = Picky(steps=1)
    requests = [request_for([n]) for n in range(3)]
    engine.submit(requests)
    found = steps(engine, 1)
    later = request_for([9])
    engine.submit([later])
    found += steps(engine, 5)
    assert {outcome.id for outcome in found} == {r.id for r in (*requests, later)}
    assert engine.seen == [3, 1, 1, 1, 1]
    assert engine.dropped == 1


def test_an_adapter_stays_loaded_as_long_as_requests_use_it() -> None:
    engine = FedEngine(most=1)
    engine.add_adapter("french", "/anywhere")
    engine.submit([request_for([n], adapter="french") for n in range(2)])
    engine.add_adapter("french", "/elsewhere")
    assert len(engine.loaded) == 2
    newer = request_for([3], adapter="french")
    engine.submit([newer])
    engine.remove_adapter("french")
    engine.remove_adapter("french")
    assert len(engine.leaving) == 2
    steps(engine, 4)
    assert len(engine.loaded) == 1
    (outcome,) = steps(engine, 2)
    assert outcome.id == newer.id
    assert engine.loaded == set()
    (refused,) = ask(engine, [request_for([1], adapter="french")])
    assert "no adapter named 'french'" in str(refused.error)


def test_cancelled_requests_hold_no_adapter() -> None:
    engine = FedEngine(most=1)
    engine.add_adapter("french", "/anywhere")
    requests = [request_for([n], adapter="french") for n in range(3)]
    engine.submit(requests)
    engine.remove_adapter("french")
    assert len(engine.loaded) == 1
    engine.cancel([request.id for request in requests])
    assert engine.loaded == set()


def test_a_prefix_is_computed_while_others_run() -> None:
    engine = FedEngine()
    other = request_for([1], want=Generate(2, (), 0.0, 0))
    engine.submit([other])
    engine.cache_prefix(request_for([1, 2, 3]).tokens)
    assert [outcome.id for outcome in engine.step()] == [other.id]
    with pytest.raises(PromptFailed, match="token id 256"):
        engine.cache_prefix(request_for([256]).tokens)


def test_an_engine_without_adapters_refuses_them() -> None:
    class Plain(FedEngine):
        load_adapter = ContinuousEngine.load_adapter

    engine = Plain()
    assert isinstance(engine.info, EngineInfo)
    with pytest.raises(AdapterError, match="the mock engine has no adapters"):
        engine.add_adapter("a", "/anywhere")
