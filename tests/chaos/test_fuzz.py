"""Bytes that were jobs, rows or notices once, and what becomes of those who read them."""

from __future__ import annotations

import random

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmpool.backends.mock import mock_row
from lmpool.errors import JobFormatError, RowFormatError
from lmpool.keys import GROUP
from lmpool.rows import pack_logprobs, unpack_row
from lmpool.wire import MAX_JOB_BYTES, pack_job, read_notices, unpack_job
from tests.support.clients import connected
from tests.support.pools import pool_shards, until_at_rest
from tests.support.protocol import new_job
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import in_process_worker

pytestmark = pytest.mark.server

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
            row = lm.next_token_logprobs_sync(prompt, timeout=60)
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


ROW = pack_logprobs(mock_row([1], 256)).joined()


@settings(max_examples=200)
@given(st.binary(max_size=300) | mutations(ROW))
def test_a_row_is_read_or_refused(data: bytes) -> None:
    try:
        row = unpack_row(data, 256)
    except RowFormatError:
        return
    assert row.logprobs().shape == (256,)


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
        assert len(notice.digest) == 16
