from __future__ import annotations

import threading
import time

import pytest

from lmpool.backends.mock import MockEngine
from lmpool.errors import AdapterError, EngineBroken
from lmpool.worker.status import WorkerStatus
from lmpool.worker.watchdog import Watchdog, watched


def test_a_step_that_takes_too_long_ends_the_worker() -> None:
    ended: list[int] = []
    state = WorkerStatus({}, lambda: ended.append(1))
    with state.step():
        time.sleep(0.25)
        Watchdog(state, 0.2).run()
    assert ended == [1]
    assert isinstance(state.failure, EngineBroken)
    assert "LMPOOL_ENGINE_TIMEOUT" in str(state.failure)


def test_a_worker_that_was_frozen_in_the_midst_of_a_step_does_not_hang() -> None:
    """The step began long ago, and others were begun since the watchdog last looked."""
    state = WorkerStatus({}, lambda: None)
    steps = iter([-1000.0, -1000.0, None, *[-500.0] * 10, -400.0])

    class Looks(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout == 1.0
            state.step_since = next(steps, 0.0)
            return state.step_since == 0.0

    state.stopping = Looks()
    Watchdog(state, 10.0).run()
    assert state.failure is None
    steps = iter([-1000.0] * 12)
    Watchdog(state, 10.0).run()
    assert isinstance(state.failure, EngineBroken)
    assert next(steps, None) is None


class Slow(MockEngine):
    """Takes long over one of its calls, and fails at another."""

    def __init__(self, status: WorkerStatus) -> None:
        super().__init__()
        self.status = status

    def clear_cache(self) -> None:
        time.sleep(0.25)
        Watchdog(self.status, 0.2).run()

    def add_adapter(self, name: str, path: str) -> None:
        assert self.status.step_since is not None
        raise AdapterError("no room")


def test_a_call_between_steps_that_takes_too_long_ends_the_worker() -> None:
    state = WorkerStatus({}, lambda: None)
    watched(Slow(state), state).clear_cache()
    assert isinstance(state.failure, EngineBroken)
    assert state.step_since is None


def test_a_call_that_fails_is_over_and_what_is_no_call_is_none() -> None:
    state = WorkerStatus({}, lambda: None)
    engine = watched(Slow(state), state)
    assert engine.info.vocab_size == 256
    with pytest.raises(AdapterError, match="no room"):
        engine.add_adapter("x@1", "/nowhere")
    assert state.step_since is None


def test_waiting_between_steps_is_not_hanging() -> None:
    """As where the server's memory is full, and nothing can be written for minutes."""
    state = WorkerStatus({}, lambda: None)
    with state.step():
        pass
    time.sleep(0.3)
    state.stopping.set()
    Watchdog(state, 0.2).run()
    assert state.failure is None
