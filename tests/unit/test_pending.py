from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from lmpool.errors import LmpoolError
from lmpool.producer.pending import LoneCall, PendingCall, wake
from lmpool.rows import pack_logprobs, unpack_row
from lmpool.wants import Digest, Row
from lmpool.wire import Job

ROW = unpack_row(pack_logprobs(np.zeros(3, np.float32)).joined())


def jobs(count: int) -> list[Job]:
    return [Job(Row("f32"), Digest(b"%016d" % i), b"\0" * 4, None) for i in range(count)]


def fill(call: PendingCall) -> PendingCall:
    for place in range(len(call.jobs)):
        call.answers[place] = ROW
    call.left = 0
    return call


def test_a_call_is_done_with_its_last_row_or_an_error() -> None:
    call = PendingCall(jobs(2), None)
    assert (call.done, call.left, call.answers) == (False, 2, [None, None])
    call.left = 1
    assert not call.done
    call.error = LmpoolError("why")
    assert call.done
    assert fill(PendingCall(jobs(1), None)).done
    assert PendingCall([], None).done  # nothing was asked


def test_a_thread_waits_until_it_is_woken() -> None:
    call = PendingCall(jobs(1), None).for_thread()
    assert not call.wait(0.001)
    began = threading.Event()

    def answer() -> None:
        began.wait()
        wake([fill(call)])

    thread = threading.Thread(target=answer)
    thread.start()
    began.set()
    assert call.wait(60)
    thread.join()
    assert call.wait(0)


def test_a_call_that_is_done_does_not_wait() -> None:
    assert fill(PendingCall(jobs(1), None).for_thread()).wait(0)


def test_calls_of_a_loop_are_woken_from_another_thread_in_one_crossing() -> None:
    crossings = 0
    threads: list[threading.Thread] = []

    async def main() -> None:
        nonlocal crossings
        loop = asyncio.get_running_loop()
        original = loop.call_soon_threadsafe

        def counted(*arguments: object, **options: object) -> object:
            nonlocal crossings
            crossings += 1
            return original(*arguments, **options)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign, assignment]
        calls = [PendingCall(jobs(1), None).for_loop(loop) for _ in range(50)]
        thread = threading.Thread(target=lambda: wake([fill(call) for call in calls]))
        thread.start()
        await asyncio.wait_for(asyncio.gather(*(call.future for call in calls)), 60)
        assert crossings == 1
        threads.append(thread)

    asyncio.run(main())
    threads.pop().join()


def test_calls_of_several_loops_and_threads_are_woken_together() -> None:
    done: list[str] = []
    calls: list[PendingCall] = []
    ready = threading.Semaphore(0)

    def in_a_loop() -> None:
        async def main() -> None:
            call = PendingCall(jobs(1), None).for_loop(asyncio.get_running_loop())
            calls.append(call)
            ready.release()
            await asyncio.wait_for(call.future, 60)
            done.append("loop")

        asyncio.run(main())

    def in_a_thread() -> None:
        call = PendingCall(jobs(1), None).for_thread()
        calls.append(call)
        ready.release()
        assert call.wait(60)
        done.append("thread")

    threads = [threading.Thread(target=target) for target in (in_a_loop, in_a_loop, in_a_thread)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert ready.acquire(timeout=60)
    wake([fill(call) for call in calls])
    for thread in threads:
        thread.join(60)
    assert sorted(done) == ["loop", "loop", "thread"]


def test_a_loop_that_was_closed_has_nobody_left_to_wake() -> None:
    loop = asyncio.new_event_loop()
    call = PendingCall(jobs(1), None).for_loop(loop)
    other = PendingCall(jobs(1), None).for_thread()
    loop.close()
    wake([fill(call), fill(other)])
    assert other.wait(0)


def test_waking_twice_does_no_harm() -> None:
    async def main() -> None:
        call = fill(PendingCall(jobs(1), None).for_loop(asyncio.get_running_loop()))
        wake([call])
        wake([call])
        await asyncio.wait_for(call.future, 60)
        await asyncio.sleep(0)

    asyncio.run(main())
    call = fill(PendingCall(jobs(1), None).for_thread())
    wake([call, call])
    assert call.wait(0)
    assert call.wait(None)


def test_a_cancelled_wait_is_not_woken() -> None:
    async def main() -> None:
        call = PendingCall(jobs(1), None).for_loop(asyncio.get_running_loop())
        waiting = asyncio.ensure_future(call.future)
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        wake([fill(call)])
        await asyncio.sleep(0)
        assert waiting.cancelled()

    asyncio.run(main())


def test_waiting_takes_no_longer_than_its_timeout() -> None:
    began = time.monotonic()
    assert not PendingCall(jobs(1), None).for_thread().wait(0.02)
    assert time.monotonic() - began > 0.01


@pytest.mark.parametrize("keeps_errors", [False, True])
def test_a_lone_call_is_as_a_call_of_one_job(keeps_errors: bool) -> None:
    for step in (lambda call: call.take(0, ROW), lambda call: call.fail(0, LmpoolError("why"))):
        (job,) = jobs(1)
        usual = PendingCall([job], 7.0, keeps_errors=keeps_errors)
        lone = LoneCall(job, 7.0, "interactive", None, keeps_errors)
        assert (list(lone.jobs), lone.left, lone.done) == ([job], 1, False)
        assert [step(lone), step(usual)] == [True, True]
        assert [step(lone), step(usual)] == [False, False]  # it is over
        assert [str(each) for each in lone.answers] == [str(each) for each in usual.answers]
        assert (lone.left, lone.done, str(lone.error)) == (usual.left, True, str(usual.error))
        assert (lone.failed, lone.deadline) == (usual.failed, usual.deadline)


def test_a_lone_calls_job_may_come_later() -> None:
    call = LoneCall(None, None, "batch", None)
    assert (list(call.jobs), call.done) == ([], False)
    (job,) = jobs(1)
    call.give(job)
    assert list(call.jobs) == [job]
