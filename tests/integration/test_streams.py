"""Continuations that are read piece by piece as they are drawn."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import redis

import lmpool
from lmpool.backends.engine import Outcome, Request
from lmpool.backends.mock import MockEngine
from lmpool.errors import PoolTimeout, PromptError, UnknownAdapter
from lmpool.wants import Generate
from tests.support.clients import connected
from tests.support.hold import Hold
from tests.support.pools import pool_shards, until_at_rest
from tests.support.proxy import Proxy
from tests.support.redis_client import open_redis
from tests.support.sentinels import sentinels
from tests.support.server import RealServer
from tests.support.streams import Reader, continuation, tokens_of
from tests.support.waiting import until
from tests.support.workers import in_process_worker, worker_process

PROMPT = [1, 5, 9]
SLOWLY = {"delay": 0.01}
"""Seconds that the mock engine takes for a token."""


def steps(log: Path) -> list[dict[str, Any]]:
    """What a worker has computed, a line each."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@contextmanager
def drawn_as_read(read: Callable[[], int], patience: float = math.inf) -> Iterator[None]:
    """A token is drawn once as many were read as were drawn before it: they come one by one,
    at whatever pace that is. Or `patience` seconds later, where it takes another one to be read.
    Of prompts of one length; what is drawn over, as after a move, was read before."""
    compute, shortest = MockEngine.compute, math.inf

    def next_one(engine: MockEngine, requests: Sequence[Request]) -> Iterable[Outcome]:
        nonlocal shortest
        longest = max(request.tokens.size for request in requests)
        shortest = min(shortest, longest)
        drawn = longest - shortest
        late = time.monotonic() + patience
        until(
            lambda: read() >= drawn or time.monotonic() > late,
            what=f"{drawn} tokens to be read",
            every=0.001,
        )
        return compute(engine, requests)

    with patch.object(MockEngine, "compute", next_one):
        yield


# --- what is read ------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_is_left")
def test_the_pieces_are_the_continuation(any_server: str, pool_name: str) -> None:
    expected = continuation(PROMPT, 30, 7)
    with (
        in_process_worker(any_server, pool_name),
        connected(any_server, pool_name) as lm,
    ):
        pieces: list[lmpool.Piece] = []

        def note(piece: lmpool.Piece) -> None:
            pieces.append(piece)

        def drawn() -> int:
            return sum(piece.token_ids.size for piece in pieces)

        with drawn_as_read(drawn):
            for piece in lm.sync.stream(PROMPT, 30, seed=7, eos_token_ids=[]):
                note(piece)
        assert tokens_of(pieces) == expected
        assert len(pieces) > 5
        assert pieces[-1].finish_reason == "length"

        async def read() -> None:
            async for piece in lm.stream(PROMPT, 30, seed=8, eos_token_ids=[]):
                note(piece)

        pieces.clear()
        with drawn_as_read(drawn):
            asyncio.run(read())
        assert tokens_of(pieces) == continuation(PROMPT, 30, 8)
        assert len(pieces) > 5
        # Who asks later has all of it at once.
        (piece,) = lm.sync.stream(PROMPT, 30, seed=7, eos_token_ids=[])
        assert piece.token_ids.tolist() == expected
        assert lm.statistics()["cache_hits"] == 1


def test_pieces_have_what_was_asked_for(any_server: str, pool_name: str) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "temperature": 0.7, "top_k": 9}
    drawn = continuation(PROMPT, 12, 1)
    with (
        in_process_worker(any_server, pool_name, engine_opts=SLOWLY),
        connected(any_server, pool_name) as lm,
    ):
        want = Generate(12, (), seed=5, **asked)
        whole = lm.sync.ask(PROMPT, want)
        pieces = list(lm.sync.stream(PROMPT, 12, seed=5, eos_token_ids=[], **asked))
        assert tokens_of(pieces) == whole.token_ids.tolist()
        tops = [piece.top_logprobs for piece in pieces]
        assert whole.top_logprobs is not None
        for found, right in (
            ([piece.logprobs for piece in pieces], whole.logprobs),
            ([top and top.token_ids for top in tops], whole.top_logprobs.token_ids),
            ([top and top.logprobs for top in tops], whole.top_logprobs.logprobs),
            ([top and top.rest for top in tops], whole.top_logprobs.rest),
        ):
            np.testing.assert_array_equal(np.concatenate(found), right)

        # Of a stop sequence earlier pieces may have a part.
        pieces = list(
            lm.sync.stream(PROMPT, 12, seed=1, eos_token_ids=[], stop=[drawn[4:7], [300]][:1])
        )
        assert tokens_of(pieces) == drawn[:7]
        assert (pieces[-1].finish_reason, pieces[-1].ending) == ("stop", 3)
        pieces = list(lm.sync.stream(PROMPT, 12, seed=1, eos_token_ids=[drawn[2]]))
        assert tokens_of(pieces) == drawn[:3]
        assert (pieces[-1].finish_reason, pieces[-1].ending) == ("eos", 1)
        (piece,) = lm.sync.stream(PROMPT, 0, seed=1)
        assert (piece.number, piece.token_ids.size, piece.finish_reason) == (0, 0, "length")


def test_bad_asks_fail_before_anything_is_sent(lm: lmpool.PooledLM) -> None:
    async def first(*arguments: Any, **options: Any) -> None:
        async with aclosing(lm.stream(*arguments, **options)) as pieces:  # type: ignore[type-var]
            await anext(pieces)

    for error, arguments, options in (
        (PromptError, ([],), {}),
        (PromptError, ([1],), {"max_tokens": -1}),
        (PromptError, ([1],), {"temperature": float("nan")}),
        (PromptError, ([1],), {"stop": [[]]}),
        (UnknownAdapter, ([1],), {"lora_name": "nobody"}),
    ):
        with pytest.raises(error):
            next(lm.sync.stream(*arguments, **options))
        with pytest.raises(error):
            asyncio.run(first(*arguments, **options))
    assert lm.statistics()["queued"] == 0


# --- readers -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_is_left")
def test_readers_of_one_seed_share_one_job(any_server: str, pool_name: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    asked = {"max_tokens": 60, "seed": 3, "eos_token_ids": []}
    readers: list[Reader] = []
    with (
        in_process_worker(any_server, pool_name, engine_opts={"log": str(log)}),
        connected(any_server, pool_name) as lm,
        connected(any_server, pool_name) as other,
        drawn_as_read(lambda: min((reader.drawn for reader in readers), default=0)),
        Hold(after=30) as hold,
    ):
        readers += [Reader(lm, PROMPT, **asked)]
        until(lambda: readers[0].drawn > 10)
        readers += [Reader(lm, PROMPT, **asked), Reader(other, PROMPT, **asked)]
        until(lambda: all(reader.drawn > 10 for reader in readers))
        hold.open()
        expected = continuation(PROMPT, 60, 3)
        assert [reader.tokens() for reader in readers] == [expected] * 3
        # Those who came later have what came before, and go on piece by piece.
        assert all(len(reader.pieces) > 5 for reader in readers)
        assert len(steps(log)) == 60
        assert lm.statistics()["joined"] == other.statistics()["joined"] == 1


@pytest.mark.usefixtures("nothing_is_left")
def test_a_reader_that_leaves_ends_the_work(
    any_server: str, pool_name: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    opts = {"delay": 0.005, "log": str(log)}
    asked: dict[str, Any] = {"max_tokens": 4000, "eos_token_ids": []}

    async def breaks(lm: lmpool.PooledLM) -> None:
        async for piece in lm.stream(PROMPT, **asked):
            if piece.number > 5:
                break

    async def is_cancelled(lm: lmpool.PooledLM) -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in lm.stream(PROMPT, **asked):
                begun.set()

        reading = asyncio.create_task(read())
        await begun.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    def stops(lm: lmpool.PooledLM) -> None:
        for piece in lm.sync.stream(PROMPT, **asked):
            if piece.number > 5:
                break

    with (
        in_process_worker(any_server, pool_name, engine_opts=opts) as worker,
        connected(any_server, pool_name) as lm,
    ):
        engine = worker.service.engine
        assert engine is not None
        for number, leave in enumerate((breaks, is_cancelled, stops), start=1):
            found = leave(lm)
            if found is not None:
                asyncio.run(found)
            until(lambda: not engine.in_flight(), what="the engine to be idle")
            until(lambda number=number: lm.statistics()["withdrawn"] == number)
        assert len(steps(log)) < 4000  # none of them was drawn to its end


def test_a_slow_reader_hinders_nobody(any_server: str, pool_name: str) -> None:
    with (
        in_process_worker(any_server, pool_name),
        connected(any_server, pool_name) as lm,
    ):
        slow = iter(lm.sync.stream(PROMPT, 200, seed=1, eos_token_ids=[]))
        pieces = [next(slow)]
        assert tokens_of(lm.sync.stream(PROMPT, 200, seed=2, eos_token_ids=[])) == continuation(
            PROMPT, 200, 2
        )
        until(lambda: lm.pool_statistics_sync()["answers"].get("stream") == 2)
        assert tokens_of([*pieces, *slow]) == continuation(PROMPT, 200, 1)


def test_the_time_is_that_of_the_whole(any_server: str, pool_name: str) -> None:
    with (
        in_process_worker(any_server, pool_name, engine_opts={"delay": 0.02}) as worker,
        connected(any_server, pool_name) as lm,
    ):
        pieces: list[lmpool.Piece] = []
        reading = lm.sync.stream(PROMPT, 4000, eos_token_ids=[], timeout=5.0)
        with pytest.raises(PoolTimeout, match=r"\d+ tokens and no end after 5 s"):
            pieces.extend(reading)
        assert pieces
        engine = worker.service.engine
        assert engine is not None
        until(lambda: not engine.in_flight(), what="the engine to be idle")


# --- workers and servers that go ---------------------------------------------------------------


@pytest.mark.one_shard
def test_who_takes_over_goes_on_where_the_last_one_ended(
    server_url: str, redis_client: redis.Redis, pool_name: str, tmp_path: Path
) -> None:
    logs = [tmp_path / str(number) for number in range(3)]
    # Long enough for each to be killed in the midst of it, however late that is.
    expected = continuation(PROMPT, 500, 4)
    asked: dict[str, Any] = {"max_tokens": 500, "seed": 4, "eos_token_ids": [], "logprobs": True}
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                worker_process(
                    server_url,
                    pool_name,
                    alive=False,
                    engine_opts={"delay": 0.02, "log": str(log)},
                )
            )
            for log in logs
        ]
        for worker in workers:
            worker.wait_until_alive()
        lm, late = (
            stack.enter_context(connected(server_url, pool_name, workers_timeout=60))
            for _ in range(2)
        )
        reader = Reader(lm, PROMPT, **asked)
        ran: list[int] = []
        for number in range(3):

            def at_work(number: int = number) -> list[int]:
                """Who goes on, once it has: the last one may have drawn more before it died."""
                began = [n for n, log in enumerate(logs) if steps(log) and n not in ran]
                return began if reader.drawn > 30 * (number + 1) else []

            (running,) = until(at_work, what="one of them to go on")
            ran.append(running)
            if number < 2:
                workers[running].kill()
        second = Reader(late, PROMPT, **asked)
        assert reader.tokens() == expected
        assert second.tokens() == expected
        for mine in (reader, second):  # also what was asked for of those that others drew
            parts = [piece.logprobs for piece in mine.pieces]
            whole = lm.sync.ask(PROMPT, Generate(500, (), seed=4, logprobs=True))
            np.testing.assert_array_equal(np.concatenate(parts), whole.logprobs)
        # Nothing was computed twice, but for what was drawn and not told.
        firsts = [steps(logs[number])[0]["tokens"] for number in ran]
        assert firsts[0] == len(PROMPT)
        assert firsts[1] > len(PROMPT) + 30
        assert firsts[2] > len(PROMPT) + 60
        lm.close()
        late.close()
        until_at_rest(redis_client, pool_name)
        (shard,) = pool_shards(redis_client, pool_name)
        assert not list(redis_client.scan_iter(f"{shard.prefix}:result:*:pieces"))


def test_a_frozen_worker_that_wakes_tells_nothing_twice(server_url: str, pool_name: str) -> None:
    with (
        # Who is frozen in the midst of it would take a quarter of a minute for all.
        worker_process(server_url, pool_name, engine_opts={"delay": 0.03}) as frozen,
        connected(server_url, pool_name, workers_timeout=60) as lm,
    ):
        reader = Reader(lm, PROMPT, max_tokens=500, seed=6, eos_token_ids=[])
        until(lambda: reader.drawn > 10)
        frozen.pause()
        before = reader.drawn
        with worker_process(server_url, pool_name, engine_opts={"delay": 0.01}) as other:
            until(lambda: reader.drawn > before + 10, what="the other to go on")
            frozen.resume()
            assert reader.tokens() == continuation(PROMPT, 500, 6)
            assert "Traceback" not in frozen.log + other.log


def test_a_connection_that_is_cut_costs_no_piece(server_binary: str, pool_name: str) -> None:
    with (
        RealServer(binary=server_binary, tcp=True) as server,
        worker_process(server.url, pool_name, engine_opts={"delay": 0.01}),
        Proxy(server.port) as proxy,
        connected(proxy.url, pool_name) as lm,
    ):
        reader = Reader(lm, PROMPT, max_tokens=150, seed=9, eos_token_ids=[])
        for number in range(1, 5):
            until(lambda n=number: reader.drawn > 25 * n)
            if number % 2:
                proxy.cut()
            else:
                proxy.hold()
                proxy.cut()
                proxy.release()
        assert reader.tokens() == continuation(PROMPT, 150, 9)


def test_a_server_that_loses_everything_costs_no_piece(server_binary: str, pool_name: str) -> None:
    with (
        RealServer(binary=server_binary, tcp=True) as server,
        worker_process(server.url, pool_name, engine_opts={"delay": 0.02}),
        connected(server.url, pool_name, workers_timeout=60) as lm,
    ):
        asked: dict[str, Any] = {"max_tokens": 200, "seed": 2, "eos_token_ids": []}
        reader = Reader(lm, PROMPT, **asked)
        until(lambda: reader.drawn > 20)
        server.kill()
        server.start()
        until(lambda: reader.drawn > 40, what="the stream to go on")
        with connected(server.url, pool_name) as late:
            assert tokens_of(late.sync.stream(PROMPT, timeout=150, **asked)) == reader.tokens()
        assert reader.tokens() == continuation(PROMPT, 200, 2)


def test_a_failover_costs_no_piece(server_binary: str, pool_name: str) -> None:
    with ExitStack() as stack:
        primary = stack.enter_context(RealServer(binary=server_binary, tcp=True))
        stack.enter_context(
            RealServer(binary=server_binary, tcp=True, replicaof=f"127.0.0.1 {primary.port}")
        )
        url = stack.enter_context(sentinels(primary))
        stack.enter_context(in_process_worker(url, pool_name, engine_opts={"delay": 0.03}))
        lm = stack.enter_context(connected(url, pool_name, workers_timeout=60))
        reader = Reader(lm, PROMPT, max_tokens=400, seed=3, eos_token_ids=[])
        until(lambda: reader.drawn > 20)
        primary.kill()
        before = reader.drawn
        until(lambda: reader.drawn > before + 20, what="the stream to go on")
        assert reader.tokens() == continuation(PROMPT, 400, 3)


def test_a_server_that_becomes_a_replica_for_a_moment_leaves_a_stream_its_pieces(
    server_binary: str, pool_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends reads that are blocked, and says why: what was read piece by piece goes on so."""
    readers: list[Reader] = []
    with (
        RealServer(binary=server_binary) as server,
        in_process_worker(server.url, pool_name),
        connected(server.url, pool_name) as lm,
        server.client() as client,
        # Where no piece is read, the rest is drawn all the same.
        drawn_as_read(lambda: readers[0].drawn if readers else 0, patience=1.0),
        Hold(after=10) as hold,
    ):
        readers.append(Reader(lm, PROMPT, max_tokens=30, seed=3, eos_token_ids=[]))
        reader = readers[0]
        until(lambda: reader.drawn == 10, what="what is drawn to be read")
        until(
            lambda: any(c["cmd"] == "xread" and "b" in c["flags"] for c in client.client_list()),
            what="more to be waited for",
        )
        client.replicaof("127.0.0.1", 1)
        client.replicaof("NO", "ONE")
        hold.open()
        assert reader.tokens() == continuation(PROMPT, 30, 3)
        assert len([piece for piece in reader.pieces if piece.number >= 10]) > 5
    assert "UNBLOCKED" not in caplog.text


# --- what others may have written --------------------------------------------------------------


@pytest.mark.one_shard
@pytest.mark.parametrize("kind", ["string", "garbage", "gap", "gone"])
def test_damaged_pieces_cost_no_token(server_url: str, pool_name: str, kind: str) -> None:
    damage: dict[str, Callable[[redis.Redis, str], object]] = {
        "string": lambda client, key: client.set(key, "in the way"),
        "garbage": lambda client, key: client.xadd(key, {"piece": b"garbage"}, id="0-3000"),
        "gap": lambda client, key: client.xadd(key, {"other": b""}, id="0-75"),
        "gone": lambda client, key: client.delete(key),
    }
    with (
        in_process_worker(server_url, pool_name, engine_opts=SLOWLY),
        connected(server_url, pool_name) as lm,
        open_redis(server_url) as client,
        Hold(after=30) as hold,
    ):
        reader = Reader(lm, PROMPT, max_tokens=80, seed=1, eos_token_ids=[])
        until(lambda: reader.drawn > 10)
        assert hold.begun.wait(60)
        (shard,) = pool_shards(client, pool_name)
        (key,) = client.scan_iter(f"{shard.prefix}:result:*:pieces")
        damage[kind](client, key.decode())
        hold.open()
        assert reader.tokens() == continuation(PROMPT, 80, 1)
