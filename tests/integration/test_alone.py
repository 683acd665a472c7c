"""Prompts that calls ask alone, blocking or awaited, whose callers read the answers by themselves:
as right as all others, whatever comes in between."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import redis

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import (
    ClientClosed,
    LmpoolError,
    PoolBusy,
    PoolTimeout,
    PromptFailed,
    ServerUnreachable,
)
from lmpool.producer import line as line_module
from lmpool.producer import sender as sender_module
from lmpool.producer.line import Line
from lmpool.producer.session import Session
from lmpool.wants import Draw
from tests.support.calling import call, this_loop
from tests.support.clients import connected
from tests.support.proxy import Proxy
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import WorkerProcess, worker_process

pytestmark = [
    pytest.mark.server,
    pytest.mark.one_server,
    pytest.mark.usefixtures("way", "confirmed"),
]

SIZE = 64
FAILS = 63
POOL = "one"
SECONDS = 30
Client = lmpool.PooledLM[Any]


@pytest.fixture(scope="module")
def server(server_binary: str) -> Iterator[RealServer]:
    with RealServer() as server:
        yield server


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A line for each batch that the quick pool's engine ran."""
    return tmp_path_factory.mktemp("alone") / "log"


@pytest.fixture(scope="module")
def quick(server: RealServer, log: Path) -> Iterator[str]:
    engine = {"vocab_size": SIZE, "fail_token": FAILS, "log": str(log)}
    with worker_process(server.url, POOL, engine_opts=engine):
        yield POOL


@pytest.fixture(scope="module")
def slow(server: RealServer) -> Iterator[str]:
    """A pool that takes a second for a batch."""
    with worker_process(server.url, "slow", engine_opts={"vocab_size": SIZE, "delay": 1.0}):
        yield "slow"


NEW = random.Random(7)


def prompt() -> list[int]:
    return [NEW.randrange(SIZE - 1) for _ in range(9)]


def ask(lm: Client, asked: list[int] | None = None, timeout: float = SECONDS) -> None:
    asked = prompt() if asked is None else asked
    row = call(lm, "next_token_logprobs", asked, timeout=timeout)
    np.testing.assert_array_equal(row, mock_row(asked, SIZE))


def is_alone(lm: Client) -> bool:
    return lm._client._alone.is_ready


def line_of(lm: Client) -> Line:
    line = lm._client._alone._line
    assert line is not None
    return line


@contextmanager
def alone(server: RealServer | Proxy, pool: str, **options: Any) -> Iterator[Client]:
    """A client whose next caller reads by itself, if no other asks meanwhile."""
    options = {"cache_bytes": 0, **options}
    with connected(server.url, pool, **options) as lm:
        ask(lm)
        lm._client._alone._needed = 1
        until(lambda: ask(lm) or is_alone(lm), SECONDS, what="callers to read by themselves")
        yield lm


def counted(lm: Client, call: Callable[[], object]) -> dict[str, int]:
    """What a call adds to the statistics."""
    before = lm.statistics()
    call()
    return {name: n - before[name] for name, n in lm.statistics().items() if n != before[name]}


def test_neither_of_the_threads_has_anything_to_do(
    server: RealServer, quick: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alone(server, quick) as lm:
        claims: list[object] = []
        monkeypatch.setattr(
            sender_module, "claim_arguments", lambda *a, **k: claims.append(a) or None
        )
        session = lm._client._session
        read = dict(session.last_ids)
        found = counted(lm, lambda: [ask(lm) for _ in range(50)])
        assert found == {"requests": 50, "queued": 50}
        assert claims == []
        assert session.last_ids == read
        with server.client() as connection:
            name = session.shards[0].reply(line_of(lm).name)
            assert connection.xlen(name) == 0 < connection.pttl(name)


def test_each_way_to_be_answered_is_counted(server: RealServer, quick: str, slow: str) -> None:
    with alone(server, quick, cache_bytes=1 << 20) as lm:
        asked = prompt()
        with connected(server.url, quick) as other:
            ask(other, asked)
        assert counted(lm, lambda: ask(lm, asked)) == {"requests": 1, "cache_hits": 1}
        assert is_alone(lm)
        assert counted(lm, lambda: ask(lm, asked)) == {"requests": 1, "local_hits": 1}
    with alone(server, slow) as lm, connected(server.url, slow) as other:
        asked = prompt()
        thread = threading.Thread(target=ask, args=(other, asked))
        thread.start()
        until(lambda: other.statistics()["queued"] == 1, what="the other to have asked")
        assert counted(lm, lambda: ask(lm, asked)) == {"requests": 1, "joined": 1}
        assert is_alone(lm)
        thread.join()


def test_other_wants_are_answered_so_as_well(server: RealServer, quick: str) -> None:
    with alone(server, quick) as lm:
        asked = prompt()
        top = call(lm, "top_logprobs", asked, 5, timeout=SECONDS)
        row = mock_row(asked, SIZE)
        np.testing.assert_array_equal(np.sort(top.token_ids), np.sort(np.argsort(-row)[:5]))
        drawn = call(lm, "ask", asked, Draw(seed=3), timeout=SECONDS)
        with connected(server.url, quick, cache_bytes=0) as other:
            again = other.sync.ask_many([(asked, Draw(seed=3))] * 2, timeout=SECONDS)[0]
        assert drawn.token_ids.tolist() == again.token_ids.tolist()
        assert is_alone(lm)


def test_a_prompt_that_fails_is_computed_once(server: RealServer, quick: str, log: Path) -> None:
    with alone(server, quick) as lm:
        before = log.read_text()
        asked = [*prompt(), FAILS]

        def fail() -> None:
            with pytest.raises(PromptFailed):
                ask(lm, asked)

        assert counted(lm, fail) == {"requests": 1, "queued": 1, "failed": 1}
        assert is_alone(lm)
        ask(lm)
        new = log.read_text()[len(before) :].splitlines()
        assert len(new) == 2, new


def test_who_waits_no_longer_withdraws(server: RealServer) -> None:
    with (
        worker_process(server.url, "asleep", engine_opts={"vocab_size": SIZE}) as worker,
        alone(server, "asleep") as lm,
        server.client() as connection,
    ):
        shard = lm._client._session.shards[0]
        worker.pause()
        with pytest.raises(PoolTimeout):
            ask(lm, timeout=0.2)
        waiting = shard.stream("interactive").key
        until(lambda: connection.xlen(waiting) == 0, SECONDS, what="the job to be gone")
        assert lm.statistics()["withdrawn"] == 1
        worker.resume()
        ask(lm)
        until(lambda: not connection.keys(f"{shard.prefix}:flight:*"), what="no flight to be left")


@pytest.mark.usefixtures("looks_soon")
def test_what_takes_long_is_looked_after_by_the_threads(server: RealServer, slow: str) -> None:
    """They renew leases, and see whether workers live."""
    with alone(server, slow) as lm:
        assert counted(lm, lambda: ask(lm)) == {"requests": 1, "queued": 1}


@pytest.mark.parametrize("how", ["withdrawn", "closed"])
def test_another_thread_ends_it(
    server: RealServer, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who reads is woken, or waits so long.
    monkeypatch.setattr(Session, "check_every", 2 * SECONDS)
    monkeypatch.setattr(line_module, "BLOCK_MS", str(2000 * SECONDS))
    with (
        worker_process(server.url, "asleep", engine_opts={"vocab_size": SIZE}) as worker,
        alone(server, "asleep") as lm,
    ):
        worker.pause()
        ended: list[BaseException] = []

        def wait() -> None:
            try:
                ask(lm)
            except LmpoolError as error:
                ended.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: lm._client._alone._call, what="it to be read")
        lm.reset_async_queries() if how == "withdrawn" else lm.close()
        thread.join(SECONDS / 2)
        assert not thread.is_alive()
        assert isinstance(ended[0], ClientClosed) == (how == "closed"), ended
        worker.resume()
        if how == "withdrawn":
            ask(lm)
        name = f"*:reply:{lm._client._session.id}*"
    with server.client() as connection:
        until(lambda: not connection.keys(name), what="nothing to be left of it")


def test_a_full_backlog_is_said(server: RealServer) -> None:
    settings = {"engine_opts": {"vocab_size": SIZE, "delay": 0.5}, "max_backlog": 1}
    with (
        worker_process(server.url, "full", batch_size=1, **settings),
        alone(server, "full", when_busy="raise") as lm,
        connected(server.url, "full") as other,
    ):
        threads = [threading.Thread(target=ask, args=(other,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: other.statistics()["queued"] == 2, what="the backlog to be full")
        with pytest.raises(PoolBusy):
            ask(lm, timeout=5)
        for thread in threads:
            thread.join()
        ask(lm)


def test_whatever_a_handler_raises_comes_through(server: RealServer, slow: str) -> None:
    """Also what would be an error of the connection's, if it were its own."""
    for kind in (TimeoutError, ConnectionError, ValueError, redis.exceptions.ConnectionError):

        def raise_it(number: int, frame: FrameType | None, kind: type[Exception] = kind) -> None:
            raise kind("the handler's")

        with alone(server, slow) as lm:
            before = signal.signal(signal.SIGALRM, raise_it)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                with pytest.raises(kind, match="the handler's"):
                    ask(lm)
            finally:
                signal.signal(signal.SIGALRM, before)
            ask(lm)


def test_a_handler_may_ask_the_same_client(server: RealServer, slow: str) -> None:
    with alone(server, slow) as lm:
        asked: list[list[int]] = []

        def ask_as_well(number: int, frame: FrameType | None) -> None:
            asked.append(prompt())
            ask(lm, asked[-1])

        before = signal.signal(signal.SIGALRM, ask_as_well)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            ask(lm)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert len(asked) == 1
        ask(lm)


@pytest.mark.parametrize("how", ["in the handler", "in a thread it waits for"])
def test_a_handler_may_ask_for_the_same_prompt(server: RealServer, slow: str, how: str) -> None:
    """Who reads that goes on only once the handler has its answer, and nobody else is awake."""
    with alone(server, slow) as lm:
        asked, told = prompt(), list[bool]()

        def ask_as_well() -> None:
            ask(lm, asked)
            told.append(True)

        def handle(number: int, frame: FrameType | None) -> None:
            if how == "in the handler":
                ask_as_well()
                return
            thread = threading.Thread(target=ask_as_well, daemon=True)
            thread.start()
            thread.join(SECONDS)

        before = signal.signal(signal.SIGALRM, handle)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            found = counted(lm, lambda: ask(lm, asked))
        finally:
            signal.signal(signal.SIGALRM, before)
        assert told == [True]
        assert found == {"requests": 2, "queued": 1, "joined": 1}


def test_a_hit_is_no_reason_to_give_up(server: RealServer, slow: str) -> None:
    with connected(server.url, slow) as other:
        known = prompt()
        ask(other, known)
    with alone(server, slow) as lm, server.client() as connection:
        connection.delete(lm._client._session.shards[0].reply(line_of(lm).name))
        ask(lm, known)
        ask(lm)
        assert is_alone(lm)


def test_a_server_that_is_away_keeps_nobody_busy(server_binary: str) -> None:
    with (
        RealServer() as server,
        worker_process(server.url, POOL, engine_opts={"vocab_size": SIZE, "delay": 1.0}),
        alone(server, POOL, reconnect_timeout=0.5) as lm,
    ):
        looked: list[float] = []
        usual = lm._client._alone.look_after
        lm._client._alone.look_after = lambda servers: (  # type: ignore[method-assign]
            looked.append(time.monotonic()) or usual(servers)
        )
        thread = threading.Thread(target=server.kill)
        thread.start()
        with pytest.raises(ServerUnreachable):
            ask(lm)
        thread.join()
        time.sleep(0.5)
        assert not lm._client._session.given_up
        assert len(looked) < 100


def _with_all_rights(server: RealServer, connection: redis.Redis) -> str:
    """The URL of a user that keeps all rights."""
    connection.execute_command("ACL", "SETUSER", "worker", "on", ">pw", "~*", "+@all")
    return server.url.replace("unix://", "unix://worker:pw@")


def test_a_server_that_refuses_to_delete_serves_all_the_same(server_binary: str) -> None:
    engine = {"vocab_size": SIZE, "delay": 0.5}
    with (
        RealServer() as server,
        server.client() as connection,
        worker_process(_with_all_rights(server, connection), POOL, engine_opts=engine),
        alone(server, POOL) as lm,
    ):
        connection.execute_command("ACL", "SETUSER", "default", "-del")
        with pytest.raises(PoolTimeout):
            ask(lm, timeout=0.1)
        for _ in range(3):
            ask(lm)
        assert not lm._client._session.given_up


def test_a_third_connection_that_nobody_serves_keeps_nobody_waiting(server_binary: str) -> None:
    """As where a door lets only so many in, and others wait."""

    with (
        RealServer(tcp=True) as server,
        worker_process(server.url, POOL, engine_opts={"vocab_size": SIZE}),
        Proxy(server.port) as door,
        connected(door.url, POOL, cache_bytes=0) as lm,
    ):
        ask(lm)
        holder = socket.create_server(("127.0.0.1", 0))  # who takes none of those that wait there
        door.target = holder.getsockname()[1]
        began = time.monotonic()
        for _ in range(300):
            ask(lm)
        assert time.monotonic() - began < SECONDS
        assert not is_alone(lm)
        holder.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_child_has_a_connection_of_its_own(server: RealServer, quick: str) -> None:
    with alone(server, quick) as lm:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                lm._client._alone._needed = 1
                until(lambda: ask(lm) or is_alone(lm), SECONDS)
                for _ in range(20):
                    ask(lm)
                status = 0
            finally:
                os._exit(status)
        for _ in range(200):
            ask(lm)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert is_alone(lm)


def test_threads_that_ask_by_turns_and_together(server: RealServer, quick: str) -> None:
    """One of them may be alone, at times: whichever it is."""
    chance = random.Random(11)
    orders = [[chance.choice((0, 0, 0.002)) for _ in range(150)] for _ in range(4)]
    wrong: list[BaseException] = []

    with alone(server, quick) as lm:

        def run(pauses: list[float], seed: int) -> None:
            mine = random.Random(seed)
            try:
                for pause in pauses:
                    lm._client._alone._needed = 1
                    ask(lm, [mine.randrange(6) for _ in range(3)])
                    time.sleep(pause)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=run, args=(o, s)) for s, o in enumerate(orders)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SECONDS)
        assert not wrong
        assert not any(thread.is_alive() for thread in threads)
        found = lm.statistics()
        assert not lm._client._session.table.flights
        parts = ("local_hits", "cache_hits", "joined", "queued")
        assert found["requests"] == sum(found[part] for part in parts)


def test_connections_that_are_cut_at_any_time(server_binary: str) -> None:
    chance = random.Random(5)
    over = threading.Event()
    with (
        RealServer(tcp=True) as server,
        worker_process(server.url, POOL, engine_opts={"vocab_size": SIZE}),
        Proxy(server.port) as proxy,
        alone(proxy, POOL) as lm,
    ):

        def cut_now_and_then() -> None:
            while not over.wait(chance.uniform(0.0, 0.02)):
                proxy.cut()

        cutter = threading.Thread(target=cut_now_and_then)
        cutter.start()
        alone_once = 0
        try:
            while alone_once < 40:
                lm._client._alone._needed, lm._client._alone._connects_at = 1, 0.0
                alone_once += is_alone(lm)
                ask(lm)
        finally:
            over.set()
            cutter.join()
        assert not lm._client._session.table.flights


def test_servers_and_workers_that_go_and_come(server_binary: str) -> None:
    with RealServer() as server:
        worker = WorkerProcess(server.url, POOL, engine_opts={"vocab_size": SIZE, "delay": 0.5})
        try:
            worker.wait_until_alive()
            with alone(server, POOL) as lm:
                for change in ("killed", "frozen", "flushed"):
                    lm._client._alone._needed = 1
                    until(lambda: ask(lm) or is_alone(lm), SECONDS)
                    thread = threading.Thread(target=_change, args=(server, change))
                    thread.start()
                    ask(lm, timeout=120)
                    thread.join()
        finally:
            worker.close()


def _change(server: RealServer, change: str) -> None:
    time.sleep(0.2)
    if change == "killed":
        server.kill()
        server.start()
    elif change == "frozen":
        server.pause()
        time.sleep(1.0)
        server.resume()
    else:
        with server.client() as connection:
            connection.flushall()


@pytest.mark.parametrize("what", ["another's notice", "no notice", "another type", "nothing"])
def test_a_reply_stream_that_others_write_to(server: RealServer, quick: str, what: str) -> None:
    with alone(server, quick) as lm, server.client() as connection:
        session = lm._client._session
        reply = session.shards[0].reply(line_of(lm).name)
        if what == "another's notice":
            connection.xadd(reply, {"ok": "00" * 16})
        elif what == "no notice":
            connection.xadd(reply, {"ok": b"\xff", "x": "y"})
        else:
            connection.delete(reply)
        if what == "another type":
            connection.set(reply, "x", px=30_000)
        for _ in range(3):
            ask(lm)


def test_a_result_that_is_gone_before_it_is_read(
    server: RealServer, quick: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alone(server, quick) as lm, server.client() as connection:
        asked = prompt()
        ask(lm, asked)
        key = connection.keys(f"{lm._client._session.shards[0].prefix}:result:*")
        found = line_of(lm)._exchange
        assert key
        usual = found.replies

        async def replies(*given: Any) -> list[Any]:
            values = await usual(*given)
            if isinstance(values[0], list):  # the server's word that it is there
                connection.delete(*key)
            return values

        monkeypatch.setattr(found, "replies", replies)
        ask(lm, asked)
        connection.set(key[0], b"no row")
        monkeypatch.undo()
        lm._client._alone._needed = 1
        until(lambda: ask(lm) or is_alone(lm), SECONDS)
        ask(lm, asked)


# --- in event loops ------------------------------------------------------------------------------


async def asked(lm: Client, given: list[int] | None = None, **options: Any) -> None:
    """`ask` for a task."""
    given = prompt() if given is None else given
    row = await lm.next_token_logprobs(given, **options)
    np.testing.assert_array_equal(row, mock_row(given, SIZE))


def is_read(lm: Client) -> bool:
    return lm._client._alone._is_read


async def one_that_is_read(lm: Client) -> tuple[asyncio.Task[None], list[int]]:
    """A task whose prompt the running loop reads: where the client's threads were just at work,
    they read it, and another is asked."""
    until = time.monotonic() + SECONDS
    while True:
        task = asyncio.create_task(asked(lm, given := prompt(), timeout=SECONDS))
        while not (is_read(lm) or task.done()):  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0)
        if not task.done():
            return task, given
        await task
        assert time.monotonic() < until
        lm._client._alone._needed = 1
        ask(lm)


async def cancel_one_that_is_read(lm: Client) -> None:
    """Nobody reads it then."""
    task, _ = await one_that_is_read(lm)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_read(lm)


in_loops = pytest.mark.parametrize("way", ["awaited"], indirect=True)


@in_loops
def test_tasks_that_ask_by_turns_and_together(server: RealServer, quick: str) -> None:
    """With a deadline and without, and some of them cancelled at any time."""
    chance = random.Random(13)

    async def run(lm: Client, seed: int) -> None:
        mine = random.Random(seed)
        for _ in range(150):
            lm._client._alone._needed = 1
            given = [mine.randrange(6) for _ in range(3)]
            timeout = mine.choice((None, SECONDS))
            task = asyncio.create_task(asked(lm, given, timeout=timeout))
            if mine.random() < 0.2:
                await asyncio.sleep(mine.choice((0, 0.0003, 0.001)))
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await asyncio.sleep(mine.choice((0, 0, 0.002)))

    async def all_of_them(lm: Client) -> None:
        seeds = [chance.randrange(1000) for _ in range(4)]
        await asyncio.wait_for(asyncio.gather(*(run(lm, seed) for seed in seeds)), 2 * SECONDS)
        lm._client._alone._needed = 1
        until(lambda: ask(lm) or is_alone(lm), SECONDS)
        for _ in range(5):
            await asked(lm)
        assert not is_read(lm)

    with alone(server, quick) as lm:
        this_loop().run_until_complete(all_of_them(lm))
        until(lambda: not lm._client._session.table.flights, SECONDS)


@in_loops
def test_a_task_that_is_cancelled_withdraws(server: RealServer, slow: str) -> None:
    with alone(server, slow) as lm, server.client() as connection:
        shard = lm._client._session.shards[0]
        this_loop().run_until_complete(cancel_one_that_is_read(lm))
        until(lambda: not connection.keys(f"{shard.prefix}:flight:*"), what="no flight to be left")
        assert lm.statistics()["withdrawn"] == 1
        ask(lm)


@in_loops
def test_what_the_server_says_of_withdrawn_claims_is_counted(server: RealServer, slow: str) -> None:
    def are_all() -> bool:
        said = lm.statistics()
        ways = ("local_hits", "cache_hits", "joined", "queued")
        return said["requests"] == sum(said[way] for way in ways)

    with alone(server, slow, request_timeout=SECONDS) as lm:
        for _ in range(3):
            this_loop().run_until_complete(cancel_one_that_is_read(lm))
            until(are_all, SECONDS, what="all are counted")


@in_loops
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_loop_that_was_left_before_it_was_called_away(
    server: RealServer, slow: str, is_closed: bool
) -> None:
    """Whose answer is there, while it stood still."""
    with alone(server, slow) as lm:
        loop = asyncio.new_event_loop()
        left: list[asyncio.Task[None]] = []

        async def stand_still() -> None:
            task, given = await one_that_is_read(lm)
            left.append(task)
            other = threading.Thread(target=lm.sync.next_token_logprobs, args=(given,))
            other.start()
            other.join(SECONDS)
            loop.stop()

        loop.run_until_complete(stand_still())
        assert is_read(lm)
        assert not lm._client._session.table.flights
        connection, bell = line_of(lm)._exchange._end, lm._client._alone._bell
        if is_closed:
            loop.close()
            lm._client._alone._needed = 1
            until(lambda: ask(lm) or not is_read(lm), SECONDS, what="it is given up")
            until(lambda: ask(lm) or is_alone(lm), SECONDS, what="others read")
        lm.close()
        assert bell is not None
        assert connection.fileno() == bell._ear.fileno() == -1
        loop.close()


@in_loops
def test_a_loop_that_stands_still_keeps_nobody_waiting(server: RealServer, quick: str) -> None:
    """What it reads by itself others may ask for, too, in other threads or within it."""

    async def stand_still(lm: Client) -> None:
        task, given = await one_that_is_read(lm)
        others = [threading.Thread(target=lm.sync.next_token_logprobs, args=(given,))]
        others.append(threading.Thread(target=lm.sync.next_token_logprobs, args=(prompt(),)))
        for thread in others:
            thread.start()
        lm.sync.next_token_logprobs(prompt(), timeout=SECONDS)
        lm.sync.next_token_logprobs(given, timeout=SECONDS)
        for thread in others:
            thread.join(SECONDS)
            assert not thread.is_alive()
        await task

    with alone(server, quick) as lm:
        for _ in range(20):
            until(lambda: ask(lm) or is_alone(lm), SECONDS)
            this_loop().run_until_complete(stand_still(lm))


@in_loops
@pytest.mark.parametrize("how", ["stopped", "closed", "forgotten"])
def test_a_loop_that_is_left_while_it_reads(server: RealServer, slow: str, how: str) -> None:
    """Whoever asks elsewhere is served, and nothing is left of a client that closes."""
    with alone(server, slow) as lm:
        loop = asyncio.new_event_loop()
        left = [loop.run_until_complete(one_that_is_read(lm))]
        connection, bell = line_of(lm)._exchange._end, lm._client._alone._bell
        assert bell is not None
        if how != "stopped":
            loop.close()
        if how == "forgotten":
            left.clear()
            gc.collect()
        ask(lm)
        until(lambda: how == "stopped" or not is_read(lm), SECONDS, what="it is given up")
        ask(lm)
        name = f"*:reply:{lm._client._session.id}*"
        lm.close()
        assert not is_read(lm)
        with server.client() as looks:
            assert not looks.keys(name)
        assert connection.fileno() == bell._ear.fileno() == -1
        loop.close()


@in_loops
def test_loops_that_tell_of_nothing_ask_as_ever(server: RealServer, quick: str) -> None:
    class Deaf(asyncio.SelectorEventLoop):
        """As that of Windows."""

        add_reader = asyncio.AbstractEventLoop.add_reader

    with alone(server, quick) as lm, closing(Deaf()) as loop:
        until(lambda: ask(lm) or (is_alone(lm) and lm._client._alone._ear), SECONDS)
        line = line_of(lm)
        for _ in range(5):
            loop.run_until_complete(asked(lm))
        assert line_of(lm) is line
        assert lm._client._alone._ear is not None
        assert lm._client._alone._ear.loop is not loop


@in_loops
def test_loops_that_refuse_to_tell_fail_no_call(server: RealServer, quick: str) -> None:
    class Full(asyncio.SelectorEventLoop):
        def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
            raise OSError("no room for another")

    with alone(server, quick) as lm, closing(Full()) as loop:
        for _ in range(6):
            until(lambda: ask(lm) or is_alone(lm), SECONDS)
            loop.run_until_complete(asked(lm))
        assert lm._client._alone._needed > 1


@in_loops
def test_one_client_in_one_loop_after_another(server: RealServer, quick: str) -> None:
    with alone(server, quick) as lm:
        line = line_of(lm)

        async def some() -> None:
            for _ in range(5):
                await asked(lm)

        for _ in range(5):
            asyncio.run(some())
        assert line_of(lm) is line
