from __future__ import annotations

import time

from lmpool.errors import EngineBroken
from lmpool.worker.status import WorkerStatus
from lmpool.worker.watchdog import Watchdog


def test_a_step_that_takes_too_long_ends_the_worker() -> None:
    ended: list[int] = []
    state = WorkerStatus({}, lambda: ended.append(1))
    with state.step():
        time.sleep(0.25)
        Watchdog(state, 0.2).run()
    assert ended == [1]
    assert isinstance(state.failure, EngineBroken)
    assert "LMPOOL_ENGINE_TIMEOUT" in str(state.failure)


def test_waiting_between_steps_is_not_hanging() -> None:
    """As where the server's memory is full, and nothing can be written for minutes."""
    state = WorkerStatus({}, lambda: None)
    with state.step():
        pass
    time.sleep(0.3)
    state.stopping.set()
    Watchdog(state, 0.2).run()
    assert state.failure is None
