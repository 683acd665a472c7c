"""A server that is full: pools go on, and what somebody waits for is computed once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import redis

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.keys import COUNTERS_TTL_MS, GROUP
from lmpool.producer.answers import AnswerReader
from lmpool.producer.statistics import PoolStatistics
from lmpool.scripts import script
from lmpool.servers import Servers
from lmpool.wire import MAX_JOB_BYTES, RefusedJob, pack_job
from lmpool.worker.dead_letters import DEAD_MOST, DeadLetters
from tests.support.clients import connected
from tests.support.pools import Asking, pool_shards, some_prompts
from tests.support.protocol import Caller, Consumer, entries_of, new_job, shard_of_pool
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import in_process_worker, worker_process

VOCAB = 4096
ROW_BYTES = 4 * VOCAB
MEMORY = 16 << 20
MOST_ROWS = MEMORY // ROW_BYTES
"""More than the server has room for."""
SERVED: Any = {"engine_opts": {"vocab_size": VOCAB}}


@contextmanager
def small_server(binary: str, memory: int = MEMORY) -> Iterator[tuple[RealServer, redis.Redis]]:
    options = {"maxmemory": str(memory), "maxmemory_policy": "noeviction"}
    with RealServer(binary=binary, **options) as server, server.client() as admin:
        yield server, admin


def refused_for_memory(admin: redis.Redis) -> int:
    found: Any = admin.info("errorstats")
    return int(found.get("errorstat_OOM", {}).get("count", 0))


def fill(admin: redis.Redis) -> None:
    """Write other data until there is no room."""
    try:
        for _ in range(MEMORY // 100_000):
            admin.rpush("others", bytes(100_000))
    except redis.exceptions.OutOfMemoryError:
        return
    raise AssertionError("there was room for all")


def ask_for(lm: lmpool.PooledLM, count: int, *, seed: int, vocab_size: int = VOCAB) -> None:
    """Right rows for so many new prompts, in calls of 500."""
    prompts = some_prompts(count, seed=seed, vocab_size=vocab_size)
    for start in range(0, count, 500):
        part = prompts[start : start + 500]
        rows = lm.batch_next_token_logprobs_sync(part, timeout=60)
        for place in range(0, len(part), 50):
            np.testing.assert_array_equal(rows[place], mock_row(part[place], vocab_size))


def once_all_are_stored(lm: lmpool.PooledLM, count: int) -> PoolStatistics:
    """The pool's counters: rows this large are near a client before they are stored."""
    until(lambda: lm.pool_statistics_sync()["computed"] >= count, what=f"{count} to be stored")
    found: PoolStatistics = lm.pool_statistics_sync()
    assert found["computed"] == count
    return found


def test_a_pool_runs_on_through_a_server_that_holds_a_third_of_its_rows(server_binary, pool_name):
    count = 3 * MOST_ROWS
    with (
        small_server(server_binary) as (server, admin),
        in_process_worker(server.url, pool_name, **SERVED),
        connected(server.url, pool_name, cache_bytes=0) as lm,
    ):
        ask_for(lm, count, seed=1)
        assert lm.statistics()["resubmitted"] == 0
        found = once_all_are_stored(lm, count)
        # Rows on their way to a client that is slow to read them are in the server's memory, too:
        # with one this small a few batches may have to wait for that, and are written again.
        assert refused_for_memory(admin) < count // 10
        assert 0 < count - found["evicted"] < MOST_ROWS
        # Not for nothing either: the memory is used.
        assert MEMORY // 4 < found["held_bytes"] < MEMORY
        assert found["oldest_seconds"] is not None
        assert 0 < found["oldest_seconds"] < 600
        (shard,) = pool_shards(admin, pool_name)
        assert 0 < admin.memory_usage(shard.account) < MEMORY // 50


def test_what_a_slow_client_was_told_of_stays_until_it_was_read(
    server_binary, pool_name, monkeypatch
):
    read = AnswerReader.fetch
    slowly = 0.05

    def fetch_slowly(self: AnswerReader, shard: Any, digests: Any, *known: object) -> int:
        time.sleep(slowly)
        return read(self, shard, digests)

    with (
        small_server(server_binary) as (server, _),
        in_process_worker(server.url, pool_name, batch_size=16, **SERVED),
        connected(server.url, pool_name, cache_bytes=0) as lm,
    ):
        monkeypatch.setattr(AnswerReader, "fetch", fetch_slowly)
        monkeypatch.setattr("lmpool.producer.answers.FETCH_BYTES", 8 * ROW_BYTES)
        prompts = some_prompts(2 * MOST_ROWS, seed=2, vocab_size=VOCAB)
        rows = lm.batch_next_token_logprobs_sync(prompts, timeout=150)
        np.testing.assert_array_equal(rows[-1], mock_row(prompts[-1], VOCAB))
        assert lm.statistics()["resubmitted"] == 0
        assert once_all_are_stored(lm, len(prompts))["evicted"] > MOST_ROWS // 2


def test_a_client_that_reads_nothing_holds_the_others_up_for_seconds_at_most(
    server_binary, pool_name, monkeypatch
):
    patience = 1.0
    monkeypatch.setattr("lmpool.worker.result_store.READER_PATIENCE", patience)
    frozen = threading.Event()
    read = AnswerReader.fetch

    with (
        small_server(server_binary) as (server, _),
        in_process_worker(server.url, pool_name, **SERVED),
        connected(server.url, pool_name, cache_bytes=0) as lm,
        connected(server.url, pool_name, cache_bytes=0) as other,
    ):
        other.next_token_logprobs_sync([1], timeout=60)

        def fetch(self: AnswerReader, shard: Any, digests: Any, *known: object) -> int:
            if self._session is lm._client._session:
                frozen.wait(240)
            return read(self, shard, digests)

        monkeypatch.setattr(AnswerReader, "fetch", fetch)
        asking = Asking(lm, some_prompts(2 * MOST_ROWS, seed=3, vocab_size=VOCAB))
        until(lambda: lm.pool_statistics_sync()["computed"] > MOST_ROWS // 3, every=0.05)
        began = time.monotonic()
        ask_for(other, 500, seed=4)
        assert time.monotonic() - began < 100 * patience
        frozen.set()
        assert len(asking.rows()) == 2 * MOST_ROWS  # what it came too late for is computed again


def test_a_worker_goes_on_with_what_a_dead_one_stored(server_binary, pool_name):
    with small_server(server_binary) as (server, admin):
        with (
            worker_process(server.url, pool_name, **SERVED) as first,
            connected(server.url, pool_name, cache_bytes=0) as lm,
        ):
            ask_for(lm, MOST_ROWS, seed=5)
            before = once_all_are_stored(lm, MOST_ROWS)
            first.kill()
            with in_process_worker(server.url, pool_name, **SERVED):
                ask_for(lm, MOST_ROWS, seed=6)
                after = once_all_are_stored(lm, 2 * MOST_ROWS)
                assert lm.statistics()["resubmitted"] == 0
        assert refused_for_memory(admin) < MOST_ROWS // 5  # as above
        assert before["held_bytes"] > MEMORY // 4
        # More than the second one stored: the first one's went before.
        assert after["evicted"] - before["evicted"] > MOST_ROWS // 2


def test_a_pool_that_fills_the_server_gives_way_to_another(server_binary, pool_name):
    def held(lm: lmpool.PooledLM) -> int:
        found: PoolStatistics = lm.pool_statistics_sync()
        return found["held_bytes"]

    with (
        small_server(server_binary) as (server, _),
        in_process_worker(server.url, f"{pool_name}-a", **SERVED),
        in_process_worker(server.url, f"{pool_name}-b", **SERVED),
        connected(server.url, f"{pool_name}-a", cache_bytes=0) as first,
        connected(server.url, f"{pool_name}-b", cache_bytes=0) as second,
    ):
        ask_for(first, MOST_ROWS, seed=7)
        full = held(first)
        assert full > MEMORY // 4
        number = 0
        deadline = time.monotonic() + 150
        # The first one idles meanwhile.
        # Both as they are looked at here: what was asked last may be stored later.
        while (theirs := held(second)) < (some := 0.6 * held(first)):
            assert time.monotonic() < deadline, (theirs, some)
            number += 1
            ask_for(second, 500, seed=100 + number)
        assert held(first) > full // 4
        assert first.statistics()["resubmitted"] == second.statistics()["resubmitted"] == 0


def test_room_is_made_where_other_data_fill_the_server(server_binary, pool_name, caplog):
    with (
        small_server(server_binary) as (server, admin),
        in_process_worker(server.url, pool_name, **SERVED),
        connected(server.url, pool_name, cache_bytes=0) as lm,
    ):
        ask_for(lm, MOST_ROWS, seed=8)
        # As fast as can be, so that workers meet a full server, too.
        fill(admin)
        ask_for(lm, MOST_ROWS // 2, seed=9)
        assert lm.statistics()["resubmitted"] == 0
        once_all_are_stored(lm, MOST_ROWS + MOST_ROWS // 2)
        assert "memory is full" not in caplog.text


def test_who_waits_is_told_of_what_is_given_up_where_no_memory_is_left(server_binary, pool_name):
    """Or it would be asked for again, with all its deliveries before it."""
    with (
        small_server(server_binary) as (server, admin),
        closing(Servers.of_url(server.url)) as servers,
    ):
        shard, letters = shard_of_pool(pool_name), DeadLetters(servers, "me")
        caller, worker = Caller(admin, shard), Consumer(admin, shard, "me")
        given_up, refused = new_job(1), new_job(2)
        caller.enqueue(given_up, refused)
        first, second = worker.read()
        admin.config_set("maxmemory", 1)
        letters.give_up(shard.stream(), first, pack_job(given_up), given_up, 3, "worker-7")
        why = RefusedJob("no job", refused.digest)
        letters.refuse(shard.stream(), second, pack_job(refused), why)
        told = [(notice.digest, notice.status) for notice in caller.notices()]
        assert told == [(given_up.digest, "failed"), (refused.digest, "refused")]
        assert [fields[b"job"] for _, fields in entries_of(admin, shard.dead)] == [
            pack_job(given_up), pack_job(refused),
        ]  # fmt: skip
        assert worker.held() == []
        assert admin.hget(shard.counters, "failed") == b"2"


def test_what_is_too_long_is_kept_among_the_dead_where_no_memory_is_left(server_binary, pool_name):
    with small_server(server_binary, 4 * MEMORY) as (_, admin):
        shard = shard_of_pool(pool_name)
        admin.xadd(shard.stream().key, {"job": bytes(MAX_JOB_BYTES + 1)})
        Consumer(admin, shard, "me").read()
        admin.config_set("maxmemory", 1)
        keys, arguments = [shard.stream().key, shard.dead], [shard.prefix, GROUP, "me", "0-0"]
        sifted = script("sift")(admin, keys, [*arguments, COUNTERS_TTL_MS, DEAD_MOST])
        assert sifted == [1, b""]
        assert admin.xlen(shard.dead) == 1


def test_what_is_served_is_replaced_where_no_memory_is_left(server_binary):
    with small_server(server_binary) as (_, admin):
        admin.mset({"info": b"old", "serving": b"mark"})
        admin.config_set("maxmemory", 1)
        arguments = [b"old", b"new", b"mark", b"other", 1000]
        assert script("replace")(admin, ["info", "serving"], arguments) == 1
        assert admin.mget("info", "serving") == [b"new", b"other"]


def test_small_results_and_adapters_are_kept_within_the_memory(server_binary, pool_name, tmp_path):
    adapter = tmp_path / "adapters" / "one"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_text("one")
    memory, size, count = 4 << 20, 16, 8_000
    settings: Any = {"adapter_dirs": [str(tmp_path / "adapters")]}
    with (
        small_server(server_binary, memory) as (server, admin),
        worker_process(server.url, pool_name, engine_opts={"vocab_size": size}, **settings),
        connected(server.url, pool_name, cache_bytes=0) as lm,
    ):
        lm.add_new_lora(str(adapter), "one")
        prompts = some_prompts(count // 2, seed=10, vocab_size=size)
        for name in (None, "one"):
            for start in range(0, len(prompts), 1000):
                part = prompts[start : start + 1000]
                assert len(lm.batch_next_token_logprobs_sync(part, name, timeout=60)) == len(part)
        assert lm.statistics()["resubmitted"] == 0
        assert refused_for_memory(admin) < count // 10  # as above
        found = lm.pool_statistics_sync()
        assert found["computed"] == count
        assert count // 4 < found["evicted"] < count
        (shard,) = pool_shards(admin, pool_name)
        assert admin.memory_usage(shard.account) < memory // 4


def test_a_bound_of_a_pools_own_holds_on_a_server_without_one(server_binary, pool_name):
    most = 8 << 20
    with (
        RealServer(binary=server_binary) as server,
        in_process_worker(server.url, pool_name, result_bytes="8MiB", shards=2, **SERVED),
        connected(server.url, pool_name, cache_bytes=0) as lm,
    ):
        ask_for(lm, 1000, seed=11)
        once_all_are_stored(lm, 1000)
        until(lambda: lm.pool_statistics_sync()["held_bytes"] <= most, every=0.05)
        found = lm.pool_statistics_sync()
        assert found["held_bytes"] > most // 2
        assert found["evicted"] > 1000 - most // ROW_BYTES


def test_results_that_ended_leave_the_account_of_an_idle_pool(server_binary, pool_name):
    with (
        RealServer(binary=server_binary) as server,
        in_process_worker(server.url, pool_name, result_ttl=0.5),
        connected(server.url, pool_name, cache_bytes=0) as lm,
    ):

        def held() -> int:
            ask_for(lm, 10, seed=12, vocab_size=256)
            return lm.pool_statistics_sync()["held_bytes"]

        until(held, what="some to be seen before they end")
        until(lambda: lm.pool_statistics_sync()["held_bytes"] == 0, every=0.05)
        assert lm.pool_statistics_sync()["oldest_seconds"] is None


@pytest.mark.parametrize("times", [1, 3])
def test_a_result_that_is_gone_before_it_was_read_is_asked_for_again(
    times, server_binary, pool_name, monkeypatch
):
    read = AnswerReader.fetch
    dropped: list[int] = []

    with (
        RealServer(binary=server_binary) as server,
        in_process_worker(server.url, pool_name),
        connected(server.url, pool_name, cache_bytes=0) as lm,
        server.client() as admin,
    ):
        lm.next_token_logprobs_sync([0], timeout=60)

        def fetch_too_late(self: AnswerReader, shard: Any, digests: Any, *known: object) -> int:
            if len(dropped) < times:
                dropped.append(len(digests))
                admin.unlink(*(shard.result(digest) for digest in digests))
            return read(self, shard, digests)

        with patch.object(AnswerReader, "fetch", fetch_too_late):
            row = lm.next_token_logprobs_sync([1, 2], timeout=60)
        np.testing.assert_array_equal(row, mock_row([1, 2], 256))
        assert lm.statistics()["resubmitted"] == len(dropped) == times
        assert lm.statistics()["failed"] == 0
