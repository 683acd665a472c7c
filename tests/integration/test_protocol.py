"""The protocol, on fakeredis and on a real server: each script, then the whole path."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import redis

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import (
    ClientClosed,
    LmpoolError,
    NoWorkers,
    PoolBusy,
    PoolMismatch,
    PoolTimeout,
    PromptError,
    PromptFailed,
    SettingsError,
    UnknownAdapter,
    UnknownPool,
)
from lmpool.keys import LaneKeys, PoolKeys
from lmpool.model_info import ModelInfo
from lmpool.scripts import script
from lmpool.wire import pack_job
from tests.support.clients import connected
from tests.support.pools import pending, until_at_rest
from tests.support.pools import pool_lanes as lanes_of
from tests.support.protocol import Caller, Consumer, entries_of, lane_of_pool, new_job
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import in_process_worker

A, B, C = new_job(1), new_job(2), new_job(3)


@pytest.fixture
def lane(pool_name: str, any_server: str) -> LaneKeys:
    return lane_of_pool(pool_name)


@pytest.fixture
def caller(redis_client: redis.Redis, lane: LaneKeys) -> Caller:
    return Caller(redis_client, lane, "first")


@pytest.fixture
def other(redis_client: redis.Redis, lane: LaneKeys) -> Caller:
    return Caller(redis_client, lane, "second")


@pytest.fixture
def worker(redis_client: redis.Redis, lane: LaneKeys) -> Consumer:
    return Consumer(redis_client, lane)


def put_result(server: redis.Redis, lane: LaneKeys, job: Any) -> None:
    server.set(lane.result(job.digest.hex()), b"row")


def told(caller: Caller) -> list[tuple[str, str, str]]:
    """What a caller was told since it last looked: digest, status, error text."""
    return [(n.digest.decode(), n.status, n.error) for n in caller.notices()]


def queued(server: redis.Redis, lane: LaneKeys) -> list[bytes]:
    """The jobs in the stream, in order."""
    return [fields[b"job"] for _, fields in entries_of(server, lane.jobs)]


# --- enqueue -----------------------------------------------------------------------------------


def test_the_first_asks_the_second_joins_and_the_third_finds_it(
    caller: Caller, other: Caller, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    assert caller.enqueue(A, B) == ("qq", True)
    assert other.enqueue(B, C) == ("jq", True)
    assert queued(redis_client, lane) == [pack_job(A), pack_job(B), pack_job(C)]
    put_result(redis_client, lane, A)
    assert other.enqueue(A, B, C) == ("hjj", False)
    assert len(queued(redis_client, lane)) == 3


def test_a_prompt_twice_in_one_request_is_one_job(
    caller: Caller, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    assert caller.enqueue(A, A, B, A) == ("qjqj", True)
    assert len(queued(redis_client, lane)) == 2


def test_a_flight_knows_its_job_and_who_waits(
    caller: Caller, other: Caller, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(A)
    other.enqueue(A)
    ((entry, _),) = entries_of(redis_client, lane.jobs)
    assert caller.flight(A) == {
        b"job": entry,
        b"stream": lane.jobs.encode(),
        b"deadline": b"",
        b"c:first": b"",
        b"c:second": b"",
    }


def test_everything_that_a_client_leaves_has_an_end(
    caller: Caller, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(A, reply_ttl=5000, flight_ttl=7000)
    for key, ttl in ((lane.reply("first"), 5000), (lane.flight(A.digest.hex()), 7000)):
        assert 0 < redis_client.pttl(key) <= ttl  # type: ignore[operator]
    # Asking again renews both.
    caller.enqueue(A, reply_ttl=50_000, flight_ttl=70_000)
    assert redis_client.pttl(lane.reply("first")) > 40_000  # type: ignore[operator]
    assert redis_client.pttl(lane.flight(A.digest.hex())) > 60_000  # type: ignore[operator]


def test_at_the_bound_nothing_more_is_queued(
    caller: Caller, other: Caller, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    put_result(redis_client, lane, new_job(9))
    assert caller.enqueue(A, B, C, new_job(4), bound=3) == ("qqqf", True)
    assert not caller.flight(new_job(4))
    # What is there or under way needs no room.
    assert other.enqueue(A, new_job(9), new_job(5), bound=3) == ("jhf", True)
    assert len(queued(redis_client, lane)) == 3


def test_the_bound_counts_what_workers_hold(caller: Caller, worker: Consumer) -> None:
    caller.enqueue(A, B)
    first, _second = worker.read()
    assert caller.enqueue(C, bound=2) == ("f", False)
    worker.complete([(A, first, "ok", "")])
    assert caller.enqueue(C, bound=2) == ("q", False)


@pytest.mark.parametrize("name", ["mine", "a@b", "with space"])
def test_an_adapter_must_be_the_registered_one(
    name: str, caller: Caller, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    job = new_job(1, adapter=f"{name}@abc")
    assert caller.enqueue(job, A) == ("aq", True)
    redis_client.hset(lane.adapters, name, "abc\n/folder")
    assert caller.enqueue(job) == ("q", False)
    redis_client.hset(lane.adapters, name, "def\n/folder")
    # Even where its row is there: the name means another adapter now.
    put_result(redis_client, lane, job)
    assert caller.enqueue(job) == ("a", False)
    assert caller.enqueue(new_job(1, adapter=f"{name}@")) == ("a", False)


def test_a_reply_stream_that_vanished_is_made_anew_and_told(
    caller: Caller, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    assert caller.enqueue(A)[1] is True
    assert caller.enqueue(A)[1] is False
    caller.vanish()
    assert caller.enqueue(A)[1] is True
    assert told(caller) == []  # it says hello, and no more


@pytest.mark.parametrize(
    ("held", "asked", "expected"),
    [
        (100, 200, b"200"),
        (200, 100, b"200"),
        (100, 100, b"100"),
        (100, None, b""),
        (None, 100, b""),
        (None, None, b""),
    ],
)
def test_a_job_runs_for_whoever_waits_longest(
    held: int | None, asked: int | None, expected: bytes, caller: Caller, other: Caller
) -> None:
    caller.enqueue(new_job(1, deadline=held))
    assert other.enqueue(new_job(1, deadline=asked))[0] == "j"
    assert caller.flight(A)[b"deadline"] == expected


# --- complete ----------------------------------------------------------------------------------


def test_everybody_who_waits_is_told_once_with_all_that_is_theirs(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(A, B)
    other.enqueue(B, C)
    entries = worker.read()
    done = [(job, entry, "ok", "") for job, entry in zip((A, B, C), entries, strict=True)]
    assert worker.complete(done, [("computed", 3), ("batches", 1)]) == 3
    assert told(caller) == [(A.digest.hex(), "ok", ""), (B.digest.hex(), "ok", "")]
    assert told(other) == [(B.digest.hex(), "ok", ""), (C.digest.hex(), "ok", "")]
    assert len(entries_of(redis_client, lane.reply("first"))) == 2  # hello, and one notice
    assert not any(caller.flight(job) for job in (A, B, C))
    assert worker.held() == []
    assert queued(redis_client, lane) == []
    assert redis_client.hgetall(lane.counters) == {b"computed": b"3", b"batches": b"1"}
    assert redis_client.pttl(lane.counters) > 0  # type: ignore[operator]


def test_an_error_is_told_to_everybody_who_waits(
    caller: Caller, other: Caller, worker: Consumer
) -> None:
    caller.enqueue(A, B)
    other.enqueue(A)
    first, second = worker.read()
    worker.complete([(A, first, "failed", "too\r\nodd ü"), (B, second, "ok", "")])
    assert told(caller) == [
        (A.digest.hex(), "failed", "too\r\nodd ü"),
        (B.digest.hex(), "ok", ""),
    ]
    assert told(other) == [(A.digest.hex(), "failed", "too\r\nodd ü")]
    assert not caller.flight(A)
    assert worker.held() == []


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_no_reply_stream_is_made_for_a_client_that_vanished(
    status: str,
    caller: Caller,
    other: Caller,
    worker: Consumer,
    redis_client: redis.Redis,
    lane: LaneKeys,
) -> None:
    caller.enqueue(A)
    other.enqueue(A)
    caller.vanish()
    (entry,) = worker.read()
    worker.complete([(A, entry, status, "")])
    assert not redis_client.exists(lane.reply("first"))
    assert [notice[1] for notice in told(other)] == [status]


def test_the_error_of_an_old_delivery_does_not_fail_the_job_that_is_queued_now(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(A)
    (old,) = worker.read()
    caller.withdraw(A)
    other.enqueue(A)
    assert worker.complete([(A, old, "failed", "out of date")]) == 1
    assert told(other) == []
    assert b"c:second" in other.flight(A)
    assert len(queued(redis_client, lane)) == 1
    (new,) = worker.read()
    worker.complete([(A, new, "failed", "in earnest")])
    assert told(other) == [(A.digest.hex(), "failed", "in earnest")]


def test_the_row_of_an_old_delivery_is_as_good_as_the_new(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(A)
    (old,) = worker.read()
    caller.withdraw(A)
    other.enqueue(A)
    assert worker.complete([(A, old, "ok", "")]) == 2
    assert told(other) == [(A.digest.hex(), "ok", "")]
    assert queued(redis_client, lane) == []  # the second is not run
    assert worker.held() == []


def test_completing_twice_tells_once(caller: Caller, worker: Consumer) -> None:
    caller.enqueue(A)
    (entry,) = worker.read()
    worker.complete([(A, entry, "ok", "")])
    worker.complete([(A, entry, "ok", "")])
    assert len(told(caller)) == 1


def test_a_large_batch_is_completed_whole(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    jobs = [new_job(i, 1) for i in range(2500)]
    for i in range(0, len(jobs), 500):
        caller.enqueue(*jobs[i : i + 500], bound=10_000)
    entries = worker.read(10_000)
    done = [(job, entry, "ok", "") for job, entry in zip(jobs, entries, strict=True)]
    assert worker.complete(done) == 2500
    assert len(told(caller)) == 2500
    assert worker.held() == []
    assert queued(redis_client, lane) == []


# --- withdraw ----------------------------------------------------------------------------------


def test_a_job_is_withdrawn_when_the_last_who_waits_leaves(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(A, B)
    other.enqueue(A)
    assert caller.withdraw(A, B) == 1
    assert queued(redis_client, lane) == [pack_job(A)]
    assert caller.flight(A).keys() == {b"job", b"stream", b"deadline", b"c:second"}
    assert caller.withdraw(A) == 0  # not a second time
    assert other.withdraw(A) == 1
    assert queued(redis_client, lane) == []
    assert not caller.flight(A)
    assert worker.read() == []


def test_only_who_waits_can_withdraw(
    caller: Caller, other: Caller, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(A)
    assert other.withdraw(A, C) == 0
    assert len(queued(redis_client, lane)) == 1
    assert caller.flight(A)


# --- check -------------------------------------------------------------------------------------


def test_looking_after_what_is_there_under_way_and_unknown(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(A, B)
    worker.read(1)  # A is being computed
    put_result(redis_client, lane, C)
    assert caller.check(A, B, C, new_job(4)) == ("jjhu", False)


def test_a_flight_whose_job_is_gone_will_never_land(
    caller: Caller, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(A)
    redis_client.xtrim(lane.jobs, maxlen=0)
    assert caller.check(A) == ("u", False)
    assert not caller.flight(A)
    assert caller.enqueue(A) == ("q", False)


def test_looking_after_renews_the_leases(
    caller: Caller, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(A, reply_ttl=5000, flight_ttl=5000)
    caller.check(A, reply_ttl=60_000, flight_ttl=60_000)
    assert redis_client.pttl(lane.reply("first")) > 50_000  # type: ignore[operator]
    assert redis_client.pttl(lane.flight(A.digest.hex())) > 50_000  # type: ignore[operator]


def test_who_vanished_is_back_after_looking(
    caller: Caller, other: Caller, worker: Consumer
) -> None:
    other.enqueue(A)
    assert caller.check(A) == ("j", True)  # it waits from now on
    (entry,) = worker.read()
    caller.vanish()
    assert caller.check(A) == ("j", True)
    worker.complete([(A, entry, "ok", "")])
    assert told(caller) == told(other) == [(A.digest.hex(), "ok", "")]


def test_waiting_goes_on_while_the_servers_memory_is_full(
    server_binary: str, pool_name: str
) -> None:
    with RealServer() as server, server.client() as client:
        lane = lane_of_pool(pool_name)
        caller = Caller(client, lane)
        caller.enqueue(A)
        client.config_set("maxmemory", 1)
        assert caller.check(A) == ("j", False)
        assert caller.withdraw(A) == 1


# --- admit -------------------------------------------------------------------------------------


def test_a_job_is_run_where_somebody_waits_and_its_row_is_not_there(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(A, B)
    first, second = worker.read()
    put_result(redis_client, lane, B)
    assert worker.admit((A, first), (B, second)) == "rx"
    # Both are still to be completed: the row of the second is only announced.
    assert worker.held() == [first, second]
    assert caller.flight(B)


def test_a_withdrawn_job_is_dropped(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(A)
    (entry,) = worker.read()
    caller.withdraw(A)
    assert worker.admit((A, entry)) == "w"
    assert worker.held() == []
    assert queued(redis_client, lane) == []


def test_a_job_that_only_the_vanished_wait_for_is_dropped(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(A, B)
    other.enqueue(B)
    first, second = worker.read()
    caller.vanish()
    assert worker.admit((A, first), (B, second)) == "wr"
    assert not caller.flight(A)
    assert caller.flight(B)
    assert worker.held() == [second]
    assert len(queued(redis_client, lane)) == 1
    assert not redis_client.exists(lane.reply("first"))


def test_a_delivery_that_was_replaced_is_dropped_and_the_new_one_kept(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(A)
    (old,) = worker.read()
    caller.withdraw(A)
    other.enqueue(A)
    assert worker.admit((A, old)) == "w"
    assert b"c:second" in other.flight(A)
    assert len(queued(redis_client, lane)) == 1


def test_an_expired_job_is_dropped_and_everybody_told(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(new_job(1, deadline=1), new_job(2, deadline=1), new_job(3, deadline=2**52))
    other.enqueue(new_job(1, deadline=2), B)  # B without a deadline
    entries = worker.read()
    assert worker.admit(*zip((A, B, C), entries, strict=True)) == "err"
    for each in (caller, other):
        assert told(each) == [(A.digest.hex(), "expired", "")]
    assert not caller.flight(A)
    assert worker.held() == entries[1:]
    assert len(queued(redis_client, lane)) == 2
    assert redis_client.hgetall(lane.counters) == {b"expired": b"1"}
    assert redis_client.pttl(lane.counters) > 0  # type: ignore[operator]


# --- release, leave, replace -------------------------------------------------------------------


def test_a_job_given_back_is_the_same_flight(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(A, B, C)
    first, second = worker.read(2)
    assert worker.release((A, first), (B, second)) == 2
    assert worker.held() == []
    assert queued(redis_client, lane) == [pack_job(C), pack_job(A), pack_job(B)]
    assert other.enqueue(A) == ("j", True)
    # Somebody else runs it, and everybody is told.
    colleague = Consumer(redis_client, lane, "colleague")
    third, again, _ = colleague.read()
    assert caller.flight(A)[b"job"] == again
    assert colleague.admit((A, again), (C, third)) == "rr"
    colleague.complete([(A, again, "failed", "why")])
    assert told(caller) == told(other) == [(A.digest.hex(), "failed", "why")]
    assert caller.check(B, C) == ("jj", False)


def test_what_was_withdrawn_is_not_given_back(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(A)
    (entry,) = worker.read()
    caller.withdraw(A)
    assert worker.release((A, entry)) == 0
    assert worker.held() == []
    assert queued(redis_client, lane) == []
    assert not caller.flight(A)


def test_an_old_delivery_given_back_does_not_take_the_flight(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    caller.enqueue(A)
    (entry,) = worker.read()
    redis_client.hset(lane.flight(A.digest.hex()), "job", "9-9")
    assert worker.release((A, entry)) == 1
    assert caller.flight(A)[b"job"] == b"9-9"


def test_entries_that_are_no_jobs_can_be_given_back(
    worker: Consumer, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    redis_client.xadd(lane.jobs, {"x": b"\0\xff", "y": "2"})
    (entry,) = worker.read()
    assert worker.release((None, entry)) == 1
    ((again, fields),) = entries_of(redis_client, lane.jobs)
    assert again != entry
    assert fields == {b"x": b"\0\xff", b"y": b"2"}


def test_a_worker_that_leaves_is_forgotten_unless_it_holds_jobs(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, lane: LaneKeys
) -> None:
    redis_client.set(lane.alive("worker"), b"")
    caller.enqueue(A)
    (entry,) = worker.read()
    assert worker.leave() == 0
    assert worker.is_there()
    assert worker.held() == [entry]
    assert not redis_client.exists(lane.alive("worker"))
    worker.complete([(A, entry, "ok", "")])
    assert worker.leave() == 1
    assert not worker.is_there()


def test_a_key_is_replaced_only_if_it_holds_what_was_read(
    redis_client: redis.Redis, pool_name: str, any_server: str
) -> None:
    def replace(read: bytes, write: bytes) -> int:
        answer: int = script("replace")(redis_client, [pool_name], [read, write])  # type: ignore[arg-type]
        return answer

    assert replace(b"", b"first") == 1
    assert replace(b"", b"second") == 0
    assert replace(b"other", b"second") == 0
    assert redis_client.get(pool_name) == b"first"
    assert replace(b"first", b"\0\xff") == 1
    assert replace(b"\0\xff", b"third") == 1
    redis_client.delete(pool_name)


# --- the whole path ----------------------------------------------------------------------------

VOCAB = 256


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    """Different prompts of 1 to 9 tokens."""
    random = np.random.default_rng(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        found[tuple(random.integers(0, VOCAB, random.integers(1, 10)).tolist())] = None
    return [list(prompt) for prompt in found]


def rows_of(prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    return np.stack([mock_row(prompt, VOCAB) for prompt in prompts])


@pytest.fixture
def pool(any_server: str, pool_name: str) -> Iterator[str]:
    """A pool with one fast worker."""
    with in_process_worker(any_server, pool_name):
        yield pool_name


@pytest.fixture
def lm(any_server: str, pool: str) -> Iterator[lmpool.PooledLM]:
    with connected(any_server, pool) as lm:
        yield lm


@pytest.fixture
def start_pool(any_server: str, pool_name: str) -> Iterator[Callable[..., str]]:
    """A pool with one worker of these settings; `delay` is the mock engine's."""
    with ExitStack() as stack:

        def start(delay: float = 0.0, **settings: Any) -> str:
            opts = {"delay": delay, **settings.pop("engine_opts", {})}
            stack.enter_context(
                in_process_worker(any_server, pool_name, engine_opts=opts, **settings)
            )
            return pool_name

        yield start


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """When all is done the streams are empty, and nobody has left a key that does not expire."""
    if not {"any_server", "pool_name"} <= set(request.fixturenames):
        yield
        return
    # Asked for before the workers' fixtures, it looks when they are through.
    url, pool = request.getfixturevalue("any_server"), request.getfixturevalue("pool_name")
    yield
    with redis.Redis.from_url(url, protocol=2) as server:
        if server.exists(PoolKeys(pool).info):
            until_at_rest(server, pool)


def test_every_prompt_gets_its_own_row(lm: lmpool.PooledLM) -> None:
    prompts = prompts_of(20)
    for prompt in prompts:
        assert np.array_equal(lm.next_token_logprobs_sync(prompt), mock_row(prompt, VOCAB))


def test_a_batch_is_answered_in_its_order(lm: lmpool.PooledLM) -> None:
    prompts = prompts_of(300)
    rows = lm.batch_next_token_logprobs_sync(prompts)
    assert rows.shape == (300, VOCAB)
    assert rows.dtype == np.float32
    assert np.array_equal(rows, rows_of(prompts))
    # Backwards, now from the cache.
    assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts[::-1]), rows_of(prompts[::-1]))
    assert lm.batch_next_token_logprobs_sync([]).shape == (0, VOCAB)


def test_a_gather_is_answered_in_its_order(lm: lmpool.PooledLM) -> None:
    prompts = prompts_of(300)

    async def main() -> list[Any]:
        return await asyncio.gather(*(lm.next_token_logprobs(prompt) for prompt in prompts))

    assert np.array_equal(np.stack(asyncio.run(main())), rows_of(prompts))


def test_equal_prompts_are_computed_once(lm: lmpool.PooledLM) -> None:
    few = prompts_of(5)
    prompts = few * 20
    assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts), rows_of(prompts))

    async def main() -> list[Any]:
        return await asyncio.gather(*(lm.next_token_logprobs([*p, 1]) for p in prompts))

    assert np.array_equal(np.stack(asyncio.run(main())), rows_of([[*p, 1] for p in prompts]))
    assert lm.pool_statistics_sync()["computed"] == 10
    statistics = lm.statistics()
    assert statistics["requests"] == 200
    assert statistics["queued"] == 10
    assert statistics["joined"] == 190


def test_clients_share_what_is_computed_and_what_was(
    any_server: str, start_pool: Callable[..., str]
) -> None:
    pool = start_pool(delay=0.2)
    prompts = prompts_of(10)
    with connected(any_server, pool) as first, connected(any_server, pool) as second:
        with ThreadPoolExecutor(2) as threads:
            for rows in threads.map(
                lambda lm: lm.batch_next_token_logprobs_sync(prompts), (first, second)
            ):
                assert np.array_equal(rows, rows_of(prompts))
        assert first.pool_statistics_sync()["computed"] == 10
        counted = [lm.statistics() for lm in (first, second)]
        assert sum(each["queued"] for each in counted) == 10
        assert sum(each["joined"] for each in counted) == 10
        with connected(any_server, pool) as third:
            assert np.array_equal(third.batch_next_token_logprobs_sync(prompts), rows_of(prompts))
            assert third.statistics()["cache_hits"] == 10
        first.batch_next_token_logprobs_sync(prompts)
        assert first.statistics()["local_hits"] == 10
        first.clear_cache()
        first.batch_next_token_logprobs_sync(prompts)
        assert first.statistics()["cache_hits"] == 10
        assert first.pool_statistics_sync()["computed"] == 10


def test_every_request_is_counted_as_answered_in_one_way(
    any_server: str, start_pool: Callable[..., str]
) -> None:
    pool = start_pool(batch_size=8, max_backlog=20, shards=2)
    prompts = prompts_of(60)
    random = np.random.default_rng(1)

    def ask(lm: lmpool.PooledLM) -> None:
        for _ in range(6):
            chosen = [prompts[i] for i in random.integers(0, len(prompts), 15)]
            assert np.array_equal(lm.batch_next_token_logprobs_sync(chosen), rows_of(chosen))

    with (
        connected(any_server, pool, cache_bytes=20_000) as first,
        connected(any_server, pool, cache_bytes=0) as second,
    ):
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(ask, (first, second, first, second)))
        for lm in (first, second):
            statistics = lm.statistics()
            assert statistics["requests"] == 180
            assert statistics["requests"] == sum(
                statistics[name] for name in ("local_hits", "cache_hits", "joined", "queued")
            )
            assert statistics["failed"] == statistics["expired"] == statistics["withdrawn"] == 0
        assert second.statistics()["local_hits"] == 0
        computed = first.pool_statistics_sync()["computed"]
        assert computed == sum(lm.statistics()["queued"] for lm in (first, second))


def test_a_cancelled_call_is_withdrawn_and_its_job_not_run(
    any_server: str, start_pool: Callable[..., str], redis_client: redis.Redis
) -> None:
    pool = start_pool(delay=0.25, batch_size=1)
    with connected(any_server, pool) as lm:

        async def main() -> None:
            running = asyncio.create_task(lm.next_token_logprobs([1]))
            waiting = asyncio.create_task(lm.next_token_logprobs([2]))
            both = asyncio.gather(lm.next_token_logprobs([3]), lm.next_token_logprobs([3]))
            await asyncio.to_thread(until, lambda: lm.statistics()["queued"] == 3)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert np.array_equal(await running, mock_row([1], VOCAB))
            for row in await both:
                assert np.array_equal(row, mock_row([3], VOCAB))

        asyncio.run(main())
        until(lambda: lm.pool_statistics_sync()["backlog"] == 0)
        assert lm.pool_statistics_sync()["computed"] == 2
        assert lm.statistics()["withdrawn"] == 1
        # It can be asked again.
        assert np.array_equal(lm.next_token_logprobs_sync([2]), mock_row([2], VOCAB))


def test_a_call_cancelled_in_the_turn_it_was_made_is_never_sent(lm: lmpool.PooledLM) -> None:
    async def main() -> None:
        task = asyncio.create_task(lm.next_token_logprobs([1]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await lm.next_token_logprobs([2])

    asyncio.run(main())
    assert lm.pool_statistics_sync()["computed"] <= 1 + lm.statistics()["withdrawn"]
    assert lm.statistics()["failed"] == 0


def test_a_wait_ends_at_its_timeout_and_is_withdrawn(
    any_server: str, start_pool: Callable[..., str]
) -> None:
    pool = start_pool(delay=0.4, batch_size=1)
    with connected(any_server, pool) as lm, ThreadPoolExecutor(1) as threads:
        running = threads.submit(lm.next_token_logprobs_sync, [1])
        until(lambda: lm.statistics()["queued"] == 1)
        began = time.monotonic()
        with pytest.raises(PoolTimeout, match=r"2 of 2 rows were not there after 0\.1 s"):
            lm.batch_next_token_logprobs_sync([[2], [3]], timeout=0.1)
        assert time.monotonic() - began < 0.35

        async def main() -> None:
            with pytest.raises(PoolTimeout):
                await lm.next_token_logprobs([4], timeout=0.05)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(lm.next_token_logprobs([5]), 0.05)

        asyncio.run(main())
        assert np.array_equal(running.result(), mock_row([1], VOCAB))
        until(lambda: lm.pool_statistics_sync()["backlog"] == 0)
        assert lm.pool_statistics_sync()["computed"] == 1
        assert lm.statistics()["withdrawn"] == 4


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), True, "5", [5]], ids=repr)
def test_a_timeout_that_is_none_is_refused(timeout: Any, lm: lmpool.PooledLM) -> None:
    with pytest.raises(SettingsError, match=r"timeout=.*: write a positive number of seconds"):
        lm.next_token_logprobs_sync([1], timeout=timeout)
    with pytest.raises(SettingsError):
        asyncio.run(lm.next_token_logprobs([1], timeout=timeout))


@pytest.mark.parametrize("timeout", [float("inf"), 1e18, 10**30, np.float32(9), 9], ids=repr)
def test_a_timeout_may_be_as_long_as_one_likes(timeout: Any, lm: lmpool.PooledLM) -> None:
    assert len(lm.next_token_logprobs_sync([1], timeout=timeout)) == VOCAB
    assert len(asyncio.run(lm.next_token_logprobs([2], timeout=timeout))) == VOCAB


def test_a_timeout_of_the_client_holds_for_calls_that_name_none(
    any_server: str, start_pool: Callable[..., str]
) -> None:
    pool = start_pool(delay=0.3)
    with connected(any_server, pool, request_timeout=0.05) as lm:
        with pytest.raises(PoolTimeout):
            lm.next_token_logprobs_sync([1])
        assert np.array_equal(lm.next_token_logprobs_sync([1], timeout=5), mock_row([1], VOCAB))


def test_a_job_that_comes_too_late_is_not_run(
    any_server: str, pool: str, redis_client: redis.Redis
) -> None:
    (lane,) = lanes_of(redis_client, pool)
    packed: Any = redis_client.get(PoolKeys(pool).info)
    job = new_job(1, 2, fingerprint=ModelInfo.unpack(packed).fingerprint, deadline=1)
    caller = Caller(redis_client, lane)
    caller.enqueue(job)
    assert until(lambda: told(caller)) == [(job.digest.hex(), "expired", "")]
    caller.vanish()
    with connected(any_server, pool) as lm:
        until(lambda: lm.pool_statistics_sync()["expired"] == 1)
        assert lm.pool_statistics_sync()["computed"] == 0


def test_at_the_backlogs_bound_callers_wait(
    any_server: str, start_pool: Callable[..., str]
) -> None:
    pool = start_pool(delay=0.01, batch_size=1, max_backlog=2)
    prompts = prompts_of(12)
    with connected(any_server, pool) as lm:
        assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts), rows_of(prompts))
        assert lm.statistics()["queued"] == 12


def test_at_the_backlogs_bound_callers_can_have_an_error_instead(
    any_server: str, start_pool: Callable[..., str]
) -> None:
    pool = start_pool(delay=0.2, batch_size=1, max_backlog=2)
    with connected(any_server, pool, when_busy="raise") as lm:

        async def main() -> list[Any]:
            return await asyncio.gather(
                *(lm.next_token_logprobs([i]) for i in range(5)), return_exceptions=True
            )

        found = asyncio.run(main())
        refused = [error for error in found if isinstance(error, PoolBusy)]
        assert len(refused) == 3
        assert "2 jobs waiting, its bound" in str(refused[0])
        for i, row in enumerate(found):
            if not isinstance(row, PoolBusy):
                assert np.array_equal(row, mock_row([i], VOCAB))
        statistics = lm.statistics()
        assert (statistics["requests"], statistics["queued"], statistics["failed"]) == (5, 2, 3)


def test_a_pool_that_was_never_served_is_unknown(any_server: str, pool_name: str) -> None:
    lm = lmpool.connect(any_server, pool_name)
    try:
        with pytest.raises(UnknownPool, match=f"no pool '{pool_name}' on .*LMPOOL_POOL="):
            lm.next_token_logprobs_sync([1])
        with pytest.raises(UnknownPool):
            asyncio.run(lm.next_token_logprobs([1]))
        # It is found as soon as it is there.
        with in_process_worker(any_server, pool_name):
            assert len(lm.next_token_logprobs_sync([1])) == VOCAB
    finally:
        lm.close()


def test_a_pool_without_workers_is_told_after_a_while(
    any_server: str, pool_name: str, redis_client: redis.Redis
) -> None:
    with in_process_worker(any_server, pool_name):
        pass
    with connected(any_server, pool_name, workers_timeout=0.4) as lm:
        began = time.monotonic()
        with pytest.raises(NoWorkers, match=r"has had no worker alive for 0\.4 s"):
            lm.next_token_logprobs_sync([1])
        assert 0.2 < time.monotonic() - began < 3
        with in_process_worker(any_server, pool_name):
            assert np.array_equal(lm.next_token_logprobs_sync([1]), mock_row([1], VOCAB))


@pytest.mark.parametrize(
    "other",
    [{"lanes": 1}, {"lanes": 3, "engine_opts": {"vocab_size": 100}}],
    ids=["fewer lanes", "another model"],
)
def test_a_client_of_what_the_pool_served_before_is_told(
    other: dict[str, Any], any_server: str, pool_name: str
) -> None:
    with in_process_worker(any_server, pool_name, shards=3):
        pass
    with (
        connected(any_server, pool_name, workers_timeout=1) as lm,
        in_process_worker(any_server, pool_name, **other),
    ):
        with pytest.raises(PoolMismatch, match="connect again"):
            lm.batch_next_token_logprobs_sync(prompts_of(20), timeout=10)
        with connected(any_server, pool_name) as again:
            assert again.info.lanes == other["lanes"]
            assert len(again.next_token_logprobs_sync([1])) == again.info.vocab_size


@pytest.mark.parametrize("when_replaced", ["raise", "follow"])
def test_a_client_of_what_a_later_release_serves_is_told(
    when_replaced: str, any_server: str, pool_name: str, redis_client: redis.Redis
) -> None:
    with in_process_worker(any_server, pool_name):
        pass
    options = {"workers_timeout": 1, "when_replaced": when_replaced}
    with connected(any_server, pool_name, **options) as lm:
        redis_client.set(PoolKeys(pool_name).info, b"\x81\xa1v\x63")
        with pytest.raises(PoolMismatch, match="connect again"):
            lm.next_token_logprobs_sync([1], timeout=10)
        redis_client.delete(PoolKeys(pool_name).info)


def test_a_worker_that_comes_in_time_is_waited_for(any_server: str, pool_name: str) -> None:
    with in_process_worker(any_server, pool_name):
        pass
    with connected(any_server, pool_name) as lm, ThreadPoolExecutor(1) as threads:
        row = threads.submit(lm.next_token_logprobs_sync, [7])
        until(lambda: lm.statistics()["queued"] == 1)
        with in_process_worker(any_server, pool_name):
            assert np.array_equal(row.result(10), mock_row([7], VOCAB))


def test_lanes_share_the_work(
    any_server: str, start_pool: Callable[..., str], redis_client: redis.Redis
) -> None:
    pool = start_pool(shards=3)
    prompts = prompts_of(90)
    with connected(any_server, pool) as lm:
        assert lm.info.lanes == 3
        assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts), rows_of(prompts))
        each = [
            int(redis_client.hget(lane.counters, "computed") or 0)
            for lane in lanes_of(redis_client, pool)
        ]  # type: ignore[arg-type]
        assert min(each) > 10
        assert lm.pool_statistics_sync()["computed"] == sum(each) == 90
        assert len(lm.pool_statistics_sync()["workers"]) == 1


def test_one_bad_prompt_fails_alone(any_server: str, start_pool: Callable[..., str]) -> None:
    pool = start_pool(engine_opts={"fail_token": 13})
    with connected(any_server, pool) as lm:

        async def main() -> list[Any]:
            return await asyncio.gather(
                *(lm.next_token_logprobs([i, 1]) for i in range(20)), return_exceptions=True
            )

        for i, found in enumerate(asyncio.run(main())):
            if i == 13:
                assert isinstance(found, PromptFailed)
                assert "a prompt contains the token 13" in str(found)
            else:
                assert np.array_equal(found, mock_row([i, 1], VOCAB))
        assert lm.pool_statistics_sync()["failed"] == 1
        assert lm.statistics()["failed"] == 1
        # A failure is nobody's row: it is tried again.
        with pytest.raises(PromptFailed):
            lm.next_token_logprobs_sync([13, 1])
        with pytest.raises(PromptFailed):
            lm.batch_next_token_logprobs_sync([[1, 1], [13, 1], [2, 1]])


def test_nothing_is_sent_where_one_prompt_of_a_batch_is_bad(lm: lmpool.PooledLM) -> None:
    for bad in ([], [VOCAB], [-1], [1.5], "text"):
        with pytest.raises(PromptError):
            lm.batch_next_token_logprobs_sync([[1], bad])  # type: ignore[list-item]
        with pytest.raises(ValueError, match=r"prompt|token"):
            asyncio.run(lm.next_token_logprobs(bad))  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="at most 4096"):
        lm.next_token_logprobs_sync([1] * 4097)
    assert lm.statistics()["requests"] == 0


def test_an_unknown_adapter_is_told_at_once(lm: lmpool.PooledLM) -> None:
    with pytest.raises(UnknownAdapter, match=r"'none'.*known: none"):
        lm.next_token_logprobs_sync([1], lora_name="none")
    with pytest.raises(ValueError, match="add_new_lora"):
        asyncio.run(lm.batch_next_token_logprobs([[1]], lora_name="none"))
    assert lm.statistics()["requests"] == 0


def test_sampling_repeats_with_its_seed_and_differs_without(lm: lmpool.PooledLM) -> None:
    def sample(seed: int | None = None, **options: Any) -> list[int]:
        return lm.sample_sync([1, 2, 3], 12, [VOCAB - 1], seed=seed, **options)

    first = sample(seed=1)
    assert 0 < len(first) <= 12
    assert all(0 <= token < VOCAB - 1 for token in first)
    assert sample(seed=1) == first
    assert sample(seed=2) != first
    assert len({tuple(sample()) for _ in range(4)}) == 4
    assert sample(temperature=0) == sample(temperature=0, seed=5)
    several = lm.batch_sample_sync([[1, 2, 3], [4], [1, 2, 3]], 12, [VOCAB - 1], seed=1)
    assert several[0] == several[2] == first
    assert asyncio.run(lm.sample([1, 2, 3], 12, [VOCAB - 1], seed=1)) == first


def test_a_forgotten_script_is_nobodys_concern(
    lm: lmpool.PooledLM, redis_client: redis.Redis
) -> None:
    for seed in range(4):
        redis_client.script_flush()
        prompts = prompts_of(30, seed=seed)
        assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts), rows_of(prompts))


def test_what_the_server_forgot_is_sent_again(
    any_server: str, start_pool: Callable[..., str], redis_client: redis.Redis
) -> None:
    pool = start_pool(delay=0.15, batch_size=2)
    prompts = prompts_of(6)
    with connected(any_server, pool, workers_timeout=1) as lm, ThreadPoolExecutor(1) as threads:
        rows = threads.submit(lm.batch_next_token_logprobs_sync, prompts)
        until(lambda: lm.statistics()["queued"] == 6)
        (lane,) = lanes_of(redis_client, pool)
        lost = [lane.jobs, *redis_client.scan_iter(f"{lane.prefix}:flight:*", count=1000)]
        lost += redis_client.scan_iter(f"{lane.prefix}:reply:*", count=1000)
        redis_client.delete(*lost)
        assert np.array_equal(rows.result(20), rows_of(prompts))
        assert lm.statistics()["resubmitted"] > 0
        statistics = lm.statistics()
        assert statistics["queued"] == statistics["requests"] == 6


def test_a_client_that_was_taken_for_dead_still_gets_its_rows(
    any_server: str, start_pool: Callable[..., str], redis_client: redis.Redis
) -> None:
    pool = start_pool(delay=0.2, batch_size=1)
    with connected(any_server, pool, workers_timeout=1) as lm, ThreadPoolExecutor(1) as threads:
        rows = threads.submit(lm.batch_next_token_logprobs_sync, [[1], [2], [3]])
        until(lambda: lm.statistics()["queued"] == 3)
        (lane,) = lanes_of(redis_client, pool)
        for reply in redis_client.scan_iter(f"{lane.prefix}:reply:*", count=1000):
            redis_client.delete(reply)
        assert np.array_equal(rows.result(20), rows_of([[1], [2], [3]]))


def test_a_row_that_vanished_before_it_was_read_is_computed_again(
    lm: lmpool.PooledLM, redis_client: redis.Redis, pool: str
) -> None:
    lm.next_token_logprobs_sync([1])
    lm.clear_cache()
    (lane,) = lanes_of(redis_client, pool)
    (result,) = redis_client.scan_iter(f"{lane.prefix}:result:*", count=1000)
    redis_client.delete(result)
    assert np.array_equal(lm.next_token_logprobs_sync([1]), mock_row([1], VOCAB))
    # Nor is a damaged one given out.
    lm.clear_cache()
    redis_client.set(result, b"\x95\x01\xa3f32 damaged")
    assert np.array_equal(lm.next_token_logprobs_sync([1]), mock_row([1], VOCAB))


# --- loops, threads, processes -----------------------------------------------------------------


def test_sync_methods_work_inside_a_running_loop(lm: lmpool.PooledLM) -> None:
    async def main() -> None:
        task = asyncio.create_task(lm.next_token_logprobs([1]))
        await asyncio.sleep(0)
        assert np.array_equal(lm.next_token_logprobs_sync([2]), mock_row([2], VOCAB))
        assert np.array_equal(lm.batch_next_token_logprobs_sync([[3]]), rows_of([[3]]))
        assert lm.pool_statistics_sync()["computed"] >= 2
        assert np.array_equal(await task, mock_row([1], VOCAB))

    asyncio.run(main())


def test_one_loop_after_another(lm: lmpool.PooledLM) -> None:
    async def main(number: int) -> None:
        prompts = prompts_of(20, seed=number)
        rows = await asyncio.gather(*(lm.next_token_logprobs(prompt) for prompt in prompts))
        assert np.array_equal(np.stack(rows), rows_of(prompts))

    for number in range(6):
        asyncio.run(main(number))


def test_a_loop_that_ends_in_the_middle_hurts_nobody(
    any_server: str, start_pool: Callable[..., str]
) -> None:
    pool = start_pool(delay=0.1)
    with connected(any_server, pool) as lm:

        async def main() -> None:
            for i in range(5):
                asyncio.create_task(lm.next_token_logprobs([i])).add_done_callback(lambda _: None)
            await asyncio.to_thread(until, lambda: lm.statistics()["queued"] == 5)

        asyncio.run(main())  # cancels what runs
        assert np.array_equal(lm.next_token_logprobs_sync([9]), mock_row([9], VOCAB))


def test_many_threads_at_once(lm: lmpool.PooledLM) -> None:
    def ask(number: int) -> None:
        prompts = prompts_of(30, seed=number % 3)  # three of each
        if number % 2:

            async def main() -> list[Any]:
                return await asyncio.gather(*(lm.next_token_logprobs(p) for p in prompts))

            rows = np.stack(asyncio.run(main()))
        else:
            rows = np.stack([lm.next_token_logprobs_sync(prompt) for prompt in prompts])
        assert np.array_equal(rows, rows_of(prompts))

    with ThreadPoolExecutor(9) as threads:
        list(threads.map(ask, range(9)))
    statistics = lm.statistics()
    assert statistics["requests"] == 270
    assert lm.pool_statistics_sync()["computed"] == statistics["queued"] == 90


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_goes_on_with_the_same_client(lm: lmpool.PooledLM) -> None:
    lm.next_token_logprobs_sync([1])

    def child(number: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            good = np.array_equal(lm.next_token_logprobs_sync([1]), mock_row([1], VOCAB))
            good &= np.array_equal(
                lm.batch_next_token_logprobs_sync([[2, number], [3]], timeout=20),
                rows_of([[2, number], [3]]),
            )

            async def main() -> Any:
                return await lm.next_token_logprobs([4, number], timeout=20)

            good &= np.array_equal(asyncio.run(main()), mock_row([4, number], VOCAB))
            lm.close()
            os._exit(0 if good else 1)
        finally:
            os._exit(2)

    children = [child(number) for number in range(2)]
    assert np.array_equal(lm.next_token_logprobs_sync([5]), mock_row([5], VOCAB))
    for pid in children:
        ended: list[int] = []

        def has_ended(pid: int = pid, ended: list[int] = ended) -> bool:
            found, status = os.waitpid(pid, os.WNOHANG)
            ended.append(status)
            return found == pid

        until(has_ended, 20, what="the child to end")
        assert os.waitstatus_to_exitcode(ended[-1]) == 0
    assert np.array_equal(lm.next_token_logprobs_sync([6]), mock_row([6], VOCAB))


def test_a_client_that_nobody_closes_leaves_nothing(any_server: str, pool: str) -> None:
    lm = lmpool.connect(any_server, pool)
    lm.next_token_logprobs_sync([1])
    del lm
    gc.collect()
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("lmpool-sender")])


# --- closing, resetting ------------------------------------------------------------------------


def test_closing_ends_every_wait(any_server: str, start_pool: Callable[..., str]) -> None:
    pool = start_pool(delay=0.3, batch_size=1)
    lm = lmpool.connect(any_server, pool, framework="numpy")
    with ThreadPoolExecutor(3) as threads:
        waits = [threads.submit(lm.next_token_logprobs_sync, [i]) for i in range(3)]
        until(lambda: lm.statistics()["queued"] == 3)
        began = time.monotonic()
        lm.close()
        for wait in waits:
            with pytest.raises(ClientClosed):
                wait.result()
        assert time.monotonic() - began < 2
    for _ in range(2):
        with pytest.raises(ClientClosed):
            lm.next_token_logprobs_sync([1])
        with pytest.raises(ClientClosed):
            asyncio.run(lm.next_token_logprobs([1]))
        lm.close()


def test_resetting_withdraws_what_is_waited_for(
    any_server: str, start_pool: Callable[..., str]
) -> None:
    pool = start_pool(delay=0.3, batch_size=1)
    with connected(any_server, pool) as lm:

        async def main() -> list[Any]:
            running = asyncio.create_task(lm.next_token_logprobs([0]))
            await asyncio.to_thread(until, lambda: lm.statistics()["queued"] == 1)
            waiting = [asyncio.create_task(lm.next_token_logprobs([i])) for i in (1, 2, 3)]
            await asyncio.to_thread(until, lambda: lm.statistics()["queued"] == 4)
            lm.reset_async_queries()
            return await asyncio.gather(running, *waiting, return_exceptions=True)

        for error in asyncio.run(main()):
            assert isinstance(error, LmpoolError)
            assert "reset_async_queries" in str(error)
        until(lambda: lm.pool_statistics_sync()["backlog"] == 0)
        assert lm.pool_statistics_sync()["computed"] <= 1
        lm.reset_async_queries()
        assert np.array_equal(lm.next_token_logprobs_sync([2]), mock_row([2], VOCAB))


def test_context_managers(any_server: str, pool: str) -> None:
    with lmpool.connect(any_server, pool, framework="numpy") as lm:
        assert lm.info.vocab_size == VOCAB

    async def main() -> None:
        async with lmpool.connect(any_server, pool, framework="numpy") as lm:
            assert np.array_equal(await lm.next_token_logprobs([1]), mock_row([1], VOCAB))

    asyncio.run(main())


# --- what rows are -----------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["auto", "f32", "bf16", "f16"])
def test_rows_in_every_encoding(encoding: str, any_server: str, pool: str) -> None:
    prompts = prompts_of(20)
    with connected(any_server, pool, encoding=encoding) as lm:
        rows = lm.batch_next_token_logprobs_sync(prompts)
        again = lm.batch_next_token_logprobs_sync(prompts)
    assert np.array_equal(rows, again)
    assert np.allclose(np.exp(rows.astype(np.float64)).sum(1), 1, atol=1e-5)
    if encoding == "f16":
        assert np.allclose(rows, rows_of(prompts), atol=1e-2)
    else:
        assert np.array_equal(rows, rows_of(prompts))


def test_encodings_do_not_share_results(any_server: str, pool: str) -> None:
    with connected(any_server, pool, encoding="f16") as rough:
        rough.next_token_logprobs_sync([1])
    with connected(any_server, pool) as exact:
        assert np.array_equal(exact.next_token_logprobs_sync([1]), mock_row([1], VOCAB))
        assert exact.statistics()["cache_hits"] == 0


@pytest.mark.parametrize("encoding", ["f32", "f16"])
def test_torch_rows_are_the_callers_own(encoding: str, any_server: str, pool: str) -> None:
    torch = pytest.importorskip("torch")
    with connected(any_server, pool, framework="torch", encoding=encoding) as lm:
        expected = lm.next_token_logprobs_sync([1]).clone()
        assert expected.dtype == torch.float32
        for _ in range(2):
            row = lm.next_token_logprobs_sync([1])
            assert torch.equal(row, expected)
            row.fill_(7)
            batch = lm.batch_next_token_logprobs_sync([[1], [1]])
            assert torch.equal(batch, torch.stack([expected, expected]))
            batch[0].fill_(7)
            assert torch.equal(batch[1], expected)

        async def main() -> list[Any]:
            return await asyncio.gather(*(lm.next_token_logprobs([2]) for _ in range(2)))

        first, second = asyncio.run(main())
        kept = second.clone()
        first.fill_(7)
        assert torch.equal(second, kept)


@pytest.mark.parametrize("encoding", ["f32", "f16"])
def test_numpy_rows_are_read_only(encoding: str, any_server: str, pool: str) -> None:
    with connected(any_server, pool, encoding=encoding) as lm:
        for _ in range(2):
            for row in (lm.next_token_logprobs_sync([1]), lm.batch_next_token_logprobs_sync([[1]])):
                assert isinstance(row, np.ndarray)
                with pytest.raises(ValueError, match="read-only"):
                    row[0] = 7


def test_the_vocabulary_comes_from_the_pool(lm: lmpool.PooledLM) -> None:
    assert [bytes(token) for token in lm.byte_vocab] == [bytes([i]) for i in range(VOCAB)]
    assert [token.token_id for token in lm.byte_vocab] == list(range(VOCAB))


def test_a_worker_that_left_is_forgotten(
    any_server: str, pool_name: str, redis_client: redis.Redis
) -> None:
    with in_process_worker(any_server, pool_name, shards=2) as worker:
        lanes = lanes_of(redis_client, pool_name)
        for lane in lanes:
            assert redis_client.exists(lane.alive(worker.id))
            assert pending(redis_client, lane) == {worker.id: 0}
    for lane in lanes:
        assert not redis_client.exists(lane.alive(worker.id))
        assert pending(redis_client, lane) == {}
