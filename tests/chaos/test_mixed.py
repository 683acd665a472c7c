"""Faults drawn from a seeded list, one after another, under one load; and fuzzed streams."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmpool.backends.mock import mock_row
from lmpool.errors import JobFormatError, RowFormatError
from lmpool.keys import GROUP
from lmpool.wire import (
    MAX_JOB_BYTES,
    pack_job,
    pack_logprobs,
    read_notices,
    unpack_job,
    unpack_row,
)
from tests.chaos.faults import FAULTS
from tests.chaos.load import Outcomes
from tests.chaos.pool import ChaosPool
from tests.support.clients import connected
from tests.support.faults import Faults
from tests.support.pools import pool_shards, until_at_rest
from tests.support.protocol import new_job
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import in_process_worker

pytestmark = pytest.mark.server


def check(found: Outcomes) -> None:
    assert found.wrong == 0
    assert found.failed == [], sorted(set(found.failed))
    assert found.right == found.asked


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_hundred_kills_in_twenty_thousand_prompts(server_binary: str, tmp_path: Path) -> None:
    """One after another; what a killed worker held runs one at a time."""
    load = {"most": 20_000, "size": 40, "callers": 4, "timeout": 300.0}
    # So slow that twenty thousand prompts last for a hundred kills. A prompt may well be in the
    # hands of three workers that are killed: it needs more tries than one that kills them.
    slow = {**Faults(tmp_path / "slow").settings(delay=0.06), "batch_size": 4, "max_deliveries": 8}
    with ChaosPool(tmp_path, seed=3, workers=4, load=load, **slow) as pool:
        kills: list[float] = []
        over = threading.Event()

        def kill() -> None:
            while not over.wait(pool.random.uniform(0.3, 0.9)):
                if len(kills) < 100:
                    pool.kill_worker()
                    kills.append(time.monotonic())

        with pool.load() as running:
            killer = threading.Thread(target=kill)
            killer.start()
            running.wait()
            over.set()
            killer.join()
        pool.check_nothing_left()
        check(running.outcomes)
        assert pool.kills == 100
        print(
            f"{pool.kills} kills, {running.outcomes.asked} prompts, longest wait "
            f"{max(end - begin for begin, end, _ in running.outcomes.calls):.1f} s"
        )


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_faults_one_after_another_lose_nothing(
    seed: int, server_binary: str, tmp_path: Path
) -> None:
    options = {"server": {"enable-debug-command": "yes"}, "load": {"timeout": 120.0}}
    with ChaosPool(tmp_path, seed=seed, workers=3, max_deliveries=5, **options) as pool:
        with pool.load() as running:
            time.sleep(1)
            for fault in random.Random(seed).sample([f for f in FAULTS if not f.alone], 8):
                fault.act(pool)
                time.sleep(pool.random.uniform(0, 2))
            time.sleep(3)
        pool.check_nothing_left()
    check(running.outcomes)


# --- fuzzed streams ----------------------------------------------------------------------------

SEEDS = [pack_job(new_job(1, 2, 3)), msgpack.packb({"v": 1, "digest": b"0" * 16})]


def mutated(random: random.Random, value: bytes) -> bytes:
    """Some bytes changed, cut out or put in."""
    data = bytearray(value)
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(data) + 1)
        how = random.random()
        if how < 0.5 and place < len(data):
            data[place] = random.randrange(256)
        elif how < 0.75:
            del data[place : place + random.randint(1, 8)]
        else:
            data[place:place] = random.randbytes(random.randint(1, 8))
    return bytes(data)


def mutations(value: bytes) -> st.SearchStrategy[bytes]:
    """Values that were one once."""
    return st.integers(0, 2**32).map(lambda seed: mutated(random.Random(seed), value))


@pytest.mark.parametrize(
    "count", [2_000, pytest.param(100_000, marks=[pytest.mark.chaos, pytest.mark.timeout(600)])]
)
def test_fuzzed_entries_of_the_job_stream_stop_nobody(
    count: int, server_binary: str, pool_name: str
) -> None:
    rng = random.Random(count)
    with (
        RealServer(binary=server_binary) as server,
        in_process_worker(server.url, pool_name, batch_size=512),
        connected(server.url, pool_name, cache_bytes=0) as lm,
        server.client() as client,
    ):
        (shard,) = pool_shards(client, pool_name)
        for start in range(0, count, 1000):
            with client.pipeline(transaction=False) as pipeline:
                for _ in range(1000):
                    field = rng.choice([b"job", b"job", b"job", b"bob"])
                    pipeline.xadd(shard.stream().key, {field: mutated(rng, rng.choice(SEEDS))})
                pipeline.execute()
            prompt = [3, start % 256, start >> 8 & 255]
            row = lm.next_token_logprobs_sync(prompt, timeout=30)
            np.testing.assert_array_equal(row, mock_row(prompt, 256))
        until(lambda: client.xlen(shard.stream().key) == 0, 60, what="the stream to be empty")
        assert client.xlen(shard.dead) >= 9_000 or client.xlen(shard.dead) == count
        assert client.xlen(shard.dead) <= 11_000
        assert sum(c["pending"] for c in client.xinfo_consumers(shard.stream().key, GROUP)) == 0
        lm.close()
        until_at_rest(client, pool_name)


@settings(max_examples=200)
@given(st.binary(max_size=300) | mutations(SEEDS[0]))
def test_a_job_is_read_or_refused(data: bytes) -> None:
    try:
        job = unpack_job(data)
    except JobFormatError:
        return
    assert len(data) <= MAX_JOB_BYTES
    assert len(job.tokens) % 4 == 0 < len(job.tokens)


ROW = pack_logprobs(mock_row([1], 256))


@settings(max_examples=200)
@given(st.binary(max_size=300) | mutations(ROW))
def test_a_row_is_read_or_refused(data: bytes) -> None:
    try:
        row = unpack_row(data, 256)
    except RowFormatError:
        return
    assert row.encoding == "u32" or row.logprobs().shape == (256,)


@settings(max_examples=150)
@given(
    st.dictionaries(
        st.sampled_from([b"ok", b"digest", b"status", b"error"]) | st.binary(max_size=8),
        st.binary(max_size=100),
        max_size=6,
    )
)
def test_a_notice_is_read_or_ignored(fields: dict[bytes, bytes]) -> None:
    for notice in read_notices(fields):
        assert len(notice.digest) == 32
