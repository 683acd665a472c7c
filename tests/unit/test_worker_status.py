from __future__ import annotations

import threading

import msgpack
import pytest

from lmpool.keys import PoolKeys
from lmpool.worker import status as status_module
from lmpool.worker.status import FAILURES_MOST, RATE_WINDOW, REASON_CHARS, WorkerStatus


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(status_module, "time", clock)
    return clock


def new_status() -> WorkerStatus:
    return WorkerStatus({"id": "w", "pid": 1}, lambda: None)


def test_rows_per_second_are_those_of_the_last_ten_seconds(clock: Clock) -> None:
    status = new_status()
    assert status.rows_per_second() == 0.0
    status.end_batch(300, took=1.0)
    clock.now += 4
    status.end_batch(200, took=1.0)
    assert status.rows_per_second() == pytest.approx(500 / RATE_WINDOW)
    clock.now += RATE_WINDOW - 3
    assert status.rows_per_second() == pytest.approx(200 / RATE_WINDOW)
    clock.now += RATE_WINDOW
    assert status.rows_per_second() == 0.0


def test_how_long_a_batch_will_take_goes_by_the_last_ones() -> None:
    status = new_status()
    assert status.batch_seconds == 0.0
    status.end_batch(1, took=2.0)
    assert status.batch_seconds == pytest.approx(2.0)
    for _ in range(30):
        status.end_batch(1, took=1.0)
    assert status.batch_seconds == pytest.approx(1.0, rel=1e-2)


def test_the_heartbeat_says_who_it_is_and_how_fast(clock: Clock) -> None:
    status = new_status()
    status.end_batch(123, took=1.0)
    assert msgpack.unpackb(status.heartbeat()) == {
        "id": "w",
        "pid": 1,
        "rows_per_second": 12.3,
        "lanes": 0,
        **dict.fromkeys(("own_jobs", "stolen_jobs", "prompt_tokens", "computed_tokens"), 0),
        "stolen_per_second": 0.0,
    }


def test_the_heartbeat_says_what_it_is_home_of_and_what_it_took(clock: Clock) -> None:
    status = new_status()
    stream = PoolKeys("p").shard("0" * 8, 0, lanes=2).stream()
    status.heartbeat()
    status.own_jobs += 6
    status.stole([(stream, [b"1", b"2"])])
    status.note_tokens(300, 40)
    clock.now += 4
    beat = msgpack.unpackb(status.heartbeat(lanes=16))
    told = {
        "lanes": 16,
        "own_jobs": 6,
        "stolen_jobs": 2,
        "stolen_per_second": 0.5,
        "prompt_tokens": 300,
        "computed_tokens": 40,
    }
    assert {name: beat[name] for name in told} == told
    clock.now += RATE_WINDOW
    beat = msgpack.unpackb(status.heartbeat())
    assert (beat["stolen_jobs"], beat["stolen_per_second"]) == (2, 0.0)


def test_the_heartbeat_tells_the_latest_failures_and_those_alike_once() -> None:
    status = new_status()
    status.clock.set(1_700_000_000, 0)
    for _ in range(3):
        status.note_failure("failed", "x" * 1000)
    for number in range(FAILURES_MOST - 1):
        status.note_failure("failed", f"why {number}")
    first, *others = msgpack.unpackb(status.heartbeat())["failures"]
    assert (first["reason"], first["jobs"]) == ("x" * REASON_CHARS, 3)
    assert first["at"] == pytest.approx(1_700_000_000, abs=60)
    assert [each["reason"] for each in others] == [f"why {n}" for n in range(FAILURES_MOST - 1)]
    status.note_failure("failed", "one more")
    reasons = [each["reason"] for each in msgpack.unpackb(status.heartbeat())["failures"]]
    assert reasons == [*(f"why {n}" for n in range(FAILURES_MOST - 1)), "one more"]


def test_a_heartbeat_tells_what_is_no_utf8_as_well() -> None:
    status = new_status()
    status.description["execution"] = "not compiled: /mod\udce8le"
    status.note_failure("failed", "no file \udce8")
    beat = msgpack.unpackb(status.heartbeat())
    assert beat["execution"] == "not compiled: /mod\\udce8le"
    assert [each["reason"] for each in beat["failures"]] == ["no file \\udce8"]


def test_the_first_failure_is_the_workers(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[int] = []
    status = WorkerStatus({}, lambda: failures.append(1))
    first = RuntimeError("the first")
    status.fail(first)
    status.fail(RuntimeError("the second"))
    assert status.failure is first
    assert failures == [1]
    assert "the first" in caplog.text
    assert "the second" not in caplog.text


def test_threads_that_fail_together_end_the_worker_once() -> None:
    failures: list[int] = []
    status = WorkerStatus({}, lambda: failures.append(1))
    start = threading.Barrier(8)

    def fail() -> None:
        start.wait()
        status.fail(RuntimeError("broken"))

    threads = [threading.Thread(target=fail) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [1]


def test_one_that_fails_ends_also_where_there_is_no_memory_to_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or it would be alive, with a thread less."""
    ended: list[bool] = []
    status = WorkerStatus({"id": "w", "pid": 1}, lambda: ended.append(True))

    def has_no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(status_module.logger, "error", has_no_memory)
    with pytest.raises(MemoryError):
        status.fail(MemoryError())
    assert ended == [True]
