"""The client's own threads, where a real pool would need luck to show what can go wrong."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import lmpool
from lmpool.errors import LmpoolError, NoWorkers, PoolTimeout, PromptFailed
from lmpool.producer import session as session_module
from lmpool.producer import withdrawal as withdrawal_module
from lmpool.producer.cache import AnswerCache
from lmpool.producer.collector import Collector
from lmpool.producer.flights import Statistics
from lmpool.producer.pending import PendingCall
from lmpool.producer.session import Session
from lmpool.producer.withdrawal import withdraw
from lmpool.servers import Servers
from lmpool.settings import ClientOptions
from lmpool.wants import Digest, Row
from lmpool.wire import Job
from tests.support.clients import connected
from tests.support.hold import Hold
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import InProcessWorker, in_process_worker


@pytest.fixture
def worker(any_server: str, pool_name: str) -> Iterator[InProcessWorker]:
    with in_process_worker(any_server, pool_name) as worker:
        yield worker


def test_a_collector_outlives_a_long_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(ClientOptions(), AnswerCache(0), Statistics())
    session.shards = session.keys.shards("0" * 8, 1)
    pauses: list[float] = []

    def refuse(*_: object) -> None:
        raise redis.exceptions.ConnectionError("refused")

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        if len(pauses) == 1500:
            session.closing.set()
        return False

    monkeypatch.setattr(Collector, "_collect_once", refuse)
    monkeypatch.setattr(session, "closing", _Flag(wait))
    Collector(session).run()
    assert len(pauses) == 1500
    assert max(pauses) <= 1.0


class _Flag:
    """An event whose `wait` is the test's."""

    def __init__(self, wait: Any) -> None:
        self._set = False
        self.wait = wait

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set


def test_a_refused_withdrawal_is_not_tried_again_and_again(
    server_binary: str, pool_name: str
) -> None:
    with (
        RealServer(binary=server_binary) as server,
        in_process_worker(server.url, pool_name),
        server.client() as admin,
    ):
        admin.execute_command("ACL", "SETUSER", "user", "on", ">pw", "~*", "+@all")
        url = server.url.replace("unix://", "unix://user:pw@")
        with connected(url, pool_name) as lm, Hold() as hold:
            waiting = threading.Thread(target=_swallow, args=(lm, [1, 2]))
            waiting.start()
            until(lambda: lm.statistics()["queued"])
            admin.execute_command("ACL", "SETUSER", "user", "-evalsha", "-eval")
            lm.reset_async_queries()
            waiting.join()
            before, began = time.process_time(), time.monotonic()
            time.sleep(0.5)
            took = time.monotonic() - began  # more where this thread stands still
            assert time.process_time() - before < 0.6 * took
            admin.execute_command("ACL", "SETUSER", "user", "+@all")
            hold.open()
            assert lm.next_token_logprobs_sync([3], timeout=60).shape == (256,)


def _swallow(lm: lmpool.PooledLM, prompt: list[int]) -> None:
    with pytest.raises(LmpoolError):
        lm.next_token_logprobs_sync(prompt, timeout=60)


def test_an_answer_that_comes_as_the_time_is_over_is_not_called_late(
    any_server: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed says why, and not that nothing came."""
    with (
        in_process_worker(any_server, pool_name, engine_opts={"fail_token": 7}),
        connected(any_server, pool_name) as lm,
    ):
        forget = lm._client.forget

        def forget_late(call: PendingCall) -> bool:
            until(lambda: call.done)
            return forget(call)

        monkeypatch.setattr(lm._client, "forget", forget_late)
        monkeypatch.setattr(PendingCall, "wait", lambda call, seconds: None)
        with pytest.raises(PromptFailed):
            lm.batch_next_token_logprobs_sync([[7, 1], [7, 2]], timeout=60)


def test_a_clock_that_is_wrong_by_hours_is_set_right(
    any_server: str, pool_name: str, worker: InProcessWorker
) -> None:
    with connected(any_server, pool_name) as lm:
        lm._client._session.clock._offset -= 3600
        assert lm.next_token_logprobs_sync([1, 2], timeout=60).shape == (256,)
        assert lm.statistics()["resubmitted"] < 10


def test_workers_have_their_time_to_appear_however_long_ago_they_were_missed(
    any_server: str, pool_name: str
) -> None:
    with in_process_worker(any_server, pool_name):
        pass
    with connected(any_server, pool_name, workers_timeout=1.5) as lm:
        # The latter where this thread stands still for longer than workers have.
        with pytest.raises((PoolTimeout, NoWorkers)):
            lm.next_token_logprobs_sync([1], timeout=0.3)
        time.sleep(2.0)
        began = time.monotonic()
        with pytest.raises(NoWorkers):
            lm.next_token_logprobs_sync([2], timeout=10)
        assert time.monotonic() - began > 0.9


def test_what_is_asked_again_is_not_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(ClientOptions(), AnswerCache(0), Statistics())
    session.shards = session.keys.shards("0" * 8, 1)
    told: list[str] = []
    monkeypatch.setattr(
        withdrawal_module, "script", lambda name: lambda server, keys, given: told.extend(given[2:])
    )
    servers = Servers(lambda: None)  # type: ignore[arg-type,return-value]
    first, again, other = (PendingCall([job(name)], None) for name in "aab")
    for call in (first, other):
        session.table.add(call, 0.0)
    session.table.take_unsent(10, 1 << 20)
    session.table.forget(first)
    session.table.forget(other)
    session.table.add(again, 0.0)
    withdraw(session, servers)
    assert told == [job("b").digest.hex()]
    session.table.forget(again)  # never sent, but the server knows of its predecessor
    withdraw(session, servers)
    assert told == [job("b").digest.hex(), job("a").digest.hex()]


def job(name: str) -> Job:
    return Job(Row("f32"), Digest(name.encode().rjust(16, b"0")), b"\0" * 4, None)


def test_a_call_may_be_collected_in_a_thread_that_holds_the_lock(
    any_server: str, pool_name: str
) -> None:
    with (
        in_process_worker(any_server, pool_name),
        connected(any_server, pool_name) as lm,
        Hold() as hold,
    ):
        loop = asyncio.new_event_loop()
        waiting = lm.next_token_logprobs([1, 2])

        async def begin() -> None:
            waiting.send(None)
            await asyncio.sleep(0)

        loop.run_until_complete(begin())
        loop.close()
        with lm._client._session.lock:
            waiting.close()  # as the garbage collector does
        until(lambda: lm.statistics()["withdrawn"] == 1)
        hold.open()
        assert lm.next_token_logprobs_sync([3], timeout=60).shape == (256,)


def test_a_client_may_be_collected_in_a_thread_that_holds_its_lock(
    any_server: str, pool_name: str, worker: InProcessWorker
) -> None:
    lm = lmpool.connect(any_server, pool_name, framework="numpy")
    lm.next_token_logprobs_sync([1], timeout=60)
    session = lm._client._session
    with session.lock:
        del lm
        gc.collect()
    until(lambda: session.closed)


def test_a_loop_that_is_closed_while_the_pool_is_looked_up_keeps_no_client(
    worker: InProcessWorker, any_server: str, pool_name: str
) -> None:
    """Its tasks wait for ever, as nobody cancels them."""
    lm = lmpool.connect(any_server, pool_name)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # a task that was pending is destroyed

    async def begin(lm: lmpool.PooledLM) -> None:
        _ = asyncio.get_running_loop().create_task(lm.next_token_logprobs([1]))
        await asyncio.sleep(0)

    loop.run_until_complete(begin(lm))
    loop.close()
    dropped = weakref.ref(lm)
    del lm, loop

    def is_gone() -> bool:
        gc.collect()
        return dropped() is None

    try:
        until(is_gone, what="it to be collected")
    finally:
        if (left := dropped()) is not None:
            left.close()


def test_many_flights_are_all_looked_after() -> None:
    session = Session(ClientOptions(), AnswerCache(0), Statistics())
    for name in "abcde":
        session.table.add(PendingCall([job(name)], None), 0.0)
    session.table.take_unsent(10, 1 << 20)
    seen = [session.table.overdue(now, 2.0, 2) for now in (2.0, 4.0, 6.0)]
    assert {f.job.digest for found in seen for f in found} == {job(n).digest for n in "abcde"}


def test_draws_of_a_cached_row_are_not_kept_and_the_row_stays(
    any_server: str, pool_name: str, worker: InProcessWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is asked once; a row that answers is used as often."""
    monkeypatch.setattr(session_module, "COUNTED_WITHIN", 60.0)
    with connected(any_server, pool_name, cache_bytes=40_000) as lm:
        size = lm.sync.next_token_logprobs([1]).nbytes
        kept = lm.sync.next_token_logprobs([1])
        others = 40_000 // (size + 200) - 1
        for number in range(others):
            lm.sync.next_token_logprobs([2, number % 50, number // 50])
        entries = len(lm._client.cache)
        asked = lm.statistics()["queued"]
        for number in range(300):
            drawn = lm.sync.draw([1], n=3, seed=number)
            assert drawn.logprobs.tolist() == kept[drawn.token_ids].tolist()
        assert lm.statistics()["queued"] == asked
        assert len(lm._client.cache) == entries
        lm.sync.next_token_logprobs([3, 3])  # another has to go
        lm.sync.top_logprobs([1], 2)
        assert lm.statistics()["queued"] == asked + 1


def test_no_prompts_have_answers_of_the_usual_shape(
    any_server: str, pool_name: str, worker: InProcessWorker
) -> None:
    with connected(any_server, pool_name) as lm:
        size = lm.sync.next_token_logprobs([1]).shape[0]
        assert lm.sync.batch_next_token_logprobs([]).shape == (0, size)
        for ids in ([1, 2, 3], iter([1, 2, 3]), range(1, 4)):
            assert lm.sync.batch_token_logprobs([], ids).shape == (0, 3)
            assert lm.sync.batch_token_logprobs([[5]], [1, 2, 3]).shape == (1, 3)
