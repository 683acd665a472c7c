"""Large rows that a worker of the same machine lays in shared memory, from end to end."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import redis

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.connections import OneConnectionClient
from lmpool.near_notices import NearNotice, NoticeWriter
from lmpool.neighbours import Kind, Neighbourhood
from lmpool.producer import session as session_module
from lmpool.producer.near_rows import NearRows
from lmpool.row_ring import IS_ORDERED, RowRing, RowRingReader
from lmpool.rows import PackedRow
from lmpool.wants import Digest, Row
from lmpool.worker.publishing import Done, Finished, Publisher
from lmpool.worker.transaction import Transaction
from tests.support.hold import Hold
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import in_process_worker, worker_process

pytestmark = pytest.mark.skipif(
    not (IS_ORDERED and os.path.isdir("/dev/shm")), reason="no memory that is shared in order"
)

VOCAB = 8192
"""Rows of 32 KiB."""
OPTS = {"vocab_size": VOCAB}


class Reads:
    """Where large rows came from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: Counter[str] = Counter()
        copy, values, mget = (
            RowRingReader.copy,
            OneConnectionClient.values,
            OneConnectionClient.mget,
        )

        self.workers: Counter[str] = Counter()
        """Whose rows were found near."""

        def copied(ring: RowRingReader, *given: Any) -> Any:
            row = copy(ring, *given)
            self.found["near" if row is not None else "gone"] += 1
            self.workers[ring.owner] += row is not None
            return row

        def fetched(client: OneConnectionClient, keys: Any, *given: Any) -> Any:
            self.found["server"] += len(keys)
            return values(client, keys, *given)

        def got(client: OneConnectionClient, keys: Any, *given: Any) -> Any:
            self.found["server"] += len(keys)
            return mget(client, keys, *given)

        # What takes long is looked after, and read by who looks, too.
        monkeypatch.setattr(session_module, "CHECK_EVERY", 60.0)
        monkeypatch.setattr(RowRingReader, "copy", copied)
        monkeypatch.setattr(OneConnectionClient, "values", fetched)
        monkeypatch.setattr(OneConnectionClient, "mget", got)

    def since(self, before: Counter[str]) -> Counter[str]:
        return self.found - before


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.fixture
def lm(any_server: str, pool_name: str) -> Iterator[lmpool.PooledLM[Any]]:
    with (
        in_process_worker(any_server, pool_name, engine_opts=OPTS),
        lmpool.connect(any_server, pool_name, framework="numpy", cache_bytes=0) as lm,
    ):
        yield lm


def folder_of(lm: lmpool.PooledLM[Any]) -> Neighbourhood:
    return Neighbourhood.of_pool(lm.pool, lm.info.fingerprint8)


def some(count: int, seed: int) -> list[list[int]]:
    prompts: list[list[int]] = np.random.default_rng(seed).integers(0, VOCAB, (count, 6)).tolist()
    return prompts


def right(prompts: list[list[int]]) -> Any:
    return np.stack([mock_row(prompt, VOCAB) for prompt in prompts])


def until_all_come_near(lm: lmpool.PooledLM[Any], reads: Reads) -> None:
    """The first rows may be written before the worker has seen who is there."""
    seeds = iter(range(10**6, 2 * 10**6))

    def all_near() -> bool:
        before = reads.found.copy()
        lm.sync.next_token_logprobs(some(1, next(seeds))[0])
        return reads.since(before) == Counter(near=1)

    until(all_near)


@contextmanager
def stored_late(*lms: lmpool.PooledLM[Any]) -> Iterator[None]:
    """What is laid meanwhile is stored once these clients, who are told, have it: a busy machine
    may let their threads wait."""
    laid: list[Digest] = []
    lay, begin = RowRing.lay, Transaction.__init__

    def noted(ring: RowRing, digest: Digest, row: PackedRow) -> bool:
        laid.append(digest)
        return lay(ring, digest, row)

    def waits(digest: Digest) -> bool:
        return any(digest in lm._client._session.table.flights for lm in lms)

    def late(transaction: Transaction, *given: Any, **options: Any) -> None:
        with suppress(AssertionError):  # then a test finds that rows came from the server
            until(lambda: not any(map(waits, laid)))
        laid.clear()
        begin(transaction, *given, **options)

    with patch.object(RowRing, "lay", noted), patch.object(Transaction, "__init__", late):
        yield


def test_rows_come_from_the_workers_memory(lm: lmpool.PooledLM[Any], reads: Reads) -> None:
    until_all_come_near(lm, reads)
    with stored_late(lm):
        for seed, count in enumerate((1, 40, 2)):
            before, prompts = reads.found.copy(), some(count, seed)
            assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts), right(prompts))
            assert reads.since(before) == Counter(near=count)


@pytest.mark.parametrize("cache_bytes", [0, 1 << 30])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_rows_of_a_worker_process_are_right_in_every_way_to_ask(
    any_server: str, pool_name: str, cache_bytes: int, framework: Any, reads: Reads
) -> None:
    pytest.importorskip(framework)
    options: dict[str, Any] = {"framework": framework, "cache_bytes": cache_bytes}
    with (
        worker_process(any_server, pool_name, engine_opts=OPTS),
        lmpool.connect(any_server, pool_name, **options) as lm,
    ):
        until_all_come_near(lm, reads)

        async def gathered(prompts: list[list[int]]) -> Any:
            return np.stack(
                [
                    np.asarray(row)
                    for row in await asyncio.gather(*map(lm.next_token_logprobs, prompts))
                ]
            )

        prompts = some(80, 1)
        assert np.array_equal(
            np.asarray(lm.batch_next_token_logprobs_sync(prompts)), right(prompts)
        )
        prompts = some(80, 2)
        assert np.array_equal(asyncio.run(gathered(prompts)), right(prompts))
        assert np.array_equal(asyncio.run(gathered(prompts)), right(prompts))
        text = some(1, 3)[0] * 10
        found = lm.sync.logprobs_at(text, [3, 9, 60])
        assert np.array_equal(np.asarray(found), right([text[:3], text[:9], text]))
        asks = [(prompt, Row()) for prompt in some(40, 4)]
        for (prompt, _), row in zip(asks, lm.sync.ask_many(asks), strict=True):
            assert np.array_equal(np.asarray(row), mock_row(prompt, VOCAB))

        def threaded(seed: int) -> bool:
            prompts = some(20, seed // 2)  # which two threads ask for
            return np.array_equal(np.asarray(lm.sync.batch_next_token_logprobs(prompts)),
                                  right(prompts))  # fmt: skip

        with ThreadPoolExecutor(6) as threads:
            assert all(threads.map(threaded, range(10, 22)))
        seeds = iter(range(100, 10**6, 2))

        def many_were_near() -> bool:
            """Those that its thread is late to hear of come from the server."""
            assert threaded(next(seeds))
            return reads.found["near"] > 200

        until(many_were_near)


@pytest.mark.one_shard
def test_a_row_is_there_before_it_is_stored(
    lm: lmpool.PooledLM[Any],
    reads: Reads,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    until_all_come_near(lm, reads)
    (shard,) = lm._client.shards
    store, began = threading.Event(), threading.Event()
    begin = Transaction.__init__

    def held(transaction: Transaction, *given: Any, **options: Any) -> None:
        began.set()
        store.wait(60)
        begin(transaction, *given, **options)

    def stored() -> int:
        return len(redis_client.keys(f"{shard.prefix}:result:*"))  # type: ignore[arg-type]

    until(lambda: not redis_client.keys(f"{shard.prefix}:flight:*"))
    known, prompts = stored(), some(3, 1)
    monkeypatch.setattr(Transaction, "__init__", held)
    try:
        rows = lm.batch_next_token_logprobs_sync(prompts, timeout=60)
        assert np.array_equal(rows, right(prompts))
        assert began.wait(60)
        assert stored() == known
        # Who asks now waits with the job that is on its way, and finds the row when it is told.
        again = threading.Thread(
            target=lambda: lm.batch_next_token_logprobs_sync(prompts, timeout=60)
        )
        again.start()
        until(lambda: lm.statistics()["joined"] == 3)
    finally:
        store.set()
    again.join(60)
    until(lambda: stored() == known + 3)
    until(lambda: not redis_client.keys(f"{shard.prefix}:flight:*"))
    before = reads.found.copy()
    assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts), right(prompts))
    assert reads.since(before) == Counter(server=3)  # which alone knows what is stored
    assert lm.statistics()["cache_hits"] == 3


def test_rows_are_there_however_long_others_take_to_be_stored(
    any_server: str, pool_name: str, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_store, is_held = threading.Event(), threading.Event()
    write, put, batches = Publisher._write, Publisher.put, itertools.count()

    def held(publisher: Publisher, chunk: Sequence[Done]) -> None:
        is_held.set()
        may_store.wait(60)
        write(publisher, chunk)

    def behind_it(
        publisher: Publisher, finished: Sequence[Finished], at_leisure: bool = False
    ) -> bool:
        # Or the engine's thread would send one, or leave it to the publisher's before that is held.
        assert next(batches) == 0 or is_held.wait(60)
        return put(publisher, finished, at_leisure)

    prompts = some(8, 3)
    with (
        # Of one shard: the rows of one are laid once those of another are stored.
        in_process_worker(
            any_server, pool_name, engine_opts=OPTS, batch_size=4, shards=1
        ) as worker,
        lmpool.connect(any_server, pool_name, framework="numpy", cache_bytes=0) as lm,
        ThreadPoolExecutor(1) as callers,
    ):
        until_all_come_near(lm, reads)
        monkeypatch.setattr(Publisher, "_write", held)
        monkeypatch.setattr(Publisher, "put", behind_it)
        before = reads.found.copy()
        try:
            with Hold() as engine:
                asked = callers.submit(lm.batch_next_token_logprobs_sync, prompts, timeout=60)
                assert engine.begun.wait(60)
                until(lambda: worker.service.waiting() > 0)  # the publisher's is the first batch
            np.testing.assert_array_equal(asked.result(30), right(prompts))
            assert not may_store.is_set()
        finally:
            may_store.set()
        assert reads.since(before) == Counter(near=8)


def test_all_that_wait_for_a_row_find_it_near(
    any_server: str, pool_name: str, lm: lmpool.PooledLM[Any], reads: Reads
) -> None:
    prompts = some(5, 1)
    with lmpool.connect(any_server, pool_name, framework="numpy", cache_bytes=0) as other:

        def joined() -> int:
            return sum(each.statistics()["joined"] for each in (lm, other))

        until_all_come_near(lm, reads)
        until_all_come_near(other, reads)
        # What is told before it is stored may be asked, and waited for, once more.
        already, before = joined(), reads.found.copy()
        with Hold() as hold:
            found: list[Any] = []
            asking = [
                threading.Thread(
                    target=lambda lm=lm: found.append(lm.sync.batch_next_token_logprobs(prompts))
                )
                for lm in (lm, other)
            ]
            for thread in asking:
                thread.start()
            until(lambda: joined() == already + 5)
            with stored_late(lm, other):
                hold.open()
                for thread in asking:
                    thread.join(60)
        assert len(found) == 2
        assert all(np.array_equal(rows, right(prompts)) for rows in found)
        assert reads.since(before) == Counter(near=10)


def test_what_was_written_over_comes_from_the_server(
    any_server: str, pool_name: str, reads: Reads
) -> None:
    with (
        in_process_worker(any_server, pool_name, engine_opts=OPTS, near_bytes="512KiB"),
        lmpool.connect(any_server, pool_name, framework="numpy", cache_bytes=0) as lm,
    ):
        until_all_come_near(lm, reads)
        prompts = some(200, 1)
        assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts), right(prompts))
        # The oldest of them cannot be there any more.
        before = reads.found.copy()
        assert np.array_equal(
            lm.batch_next_token_logprobs_sync(prompts[:100]), right(prompts[:100])
        )
        assert reads.since(before)["server"] == 100


def test_a_worker_that_is_to_lay_nothing_takes_no_memory(
    any_server: str, pool_name: str, reads: Reads
) -> None:
    with (
        in_process_worker(any_server, pool_name, engine_opts=OPTS, near_bytes=0),
        lmpool.connect(any_server, pool_name, framework="numpy", cache_bytes=0) as lm,
    ):
        prompts = some(20, 1)
        assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts), right(prompts))
        assert folder_of(lm).look("rows") == {}
        assert set(reads.found) == {"server"}


def test_a_worker_that_is_killed_leaves_nothing(
    any_server: str, pool_name: str, reads: Reads
) -> None:
    with (
        worker_process(any_server, pool_name, engine_opts=OPTS) as worker,
        lmpool.connect(any_server, pool_name, framework="numpy", cache_bytes=0) as lm,
    ):
        until_all_come_near(lm, reads)
        (ring,) = folder_of(lm).look("rows").values()
        worker.kill()
        with worker_process(any_server, pool_name, engine_opts=OPTS):
            until_all_come_near(lm, reads)
            assert folder_of(lm).look("rows")
            assert not os.path.exists(ring)
        folder = folder_of(lm).folder
    assert not os.path.exists(folder)


CLIENT = """
import sys, lmpool
lm = lmpool.connect(sys.argv[1], sys.argv[2], framework="numpy")
lm.next_token_logprobs_sync([1, 2, 3])
print("here", flush=True)
sys.stdin.read()
"""


def test_a_client_that_is_killed_leaves_nothing(
    any_server: str, pool_name: str, lm: lmpool.PooledLM[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmpool.neighbours.LOOK_EVERY", 0.05)
    lm.sync.next_token_logprobs([1])
    neighbourhood = folder_of(lm)
    (mine,) = neighbourhood.look("client")
    command = [sys.executable, "-c", CLIENT, any_server, pool_name]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "here\n"
        assert len(neighbourhood.look("client")) == 2
        (gone,) = [path for name, path in neighbourhood.look("client").items() if name != mine]
        other.send_signal(signal.SIGKILL)
        other.wait(60)
    # The worker takes its file away, which nobody else looks for here.
    seeds = iter(range(10**6))
    until(
        lambda: (
            lm.sync.next_token_logprobs(some(1, next(seeds))[0]) is not None
            and not os.path.exists(gone)
        )
    )
    assert list(neighbourhood.look("client")) == [mine]


FORK = """
import os, sys, lmpool
from lmpool.neighbours import Neighbourhood
from lmpool.row_ring import RowRingReader
lm = lmpool.connect(sys.argv[1], sys.argv[2], framework="numpy", cache_bytes=0)
parent = lm.next_token_logprobs_sync([1, 2, 3])
there = Neighbourhood.of_pool(lm.pool, lm.info.fingerprint8)
before = set(there.look("client"))
child = os.fork()
if not child:
    same = (lm.next_token_logprobs_sync([1, 2, 3]) == parent).all()
    both = before < set(there.look("client"))
    near, copy = [], RowRingReader.copy
    RowRingReader.copy = lambda *given: near.append(copy(*given)) or near[-1]
    for n in range(1000):  # until the worker has seen who is there
        lm.next_token_logprobs_sync([n, 7])
        if any(row is not None for row in near):
            break
    lm.close()
    sys.exit(0 if same and both and n < 999 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert set(there.look("client")) == before, "the child took its parent's file along"
mine = {name for name in before if name.startswith(lm._client._session.id)}
lm.close()
assert len(mine) == 1 and set(there.look("client")) == before - mine
"""


def test_a_forked_child_is_a_client_of_its_own(
    any_server: str, pool_name: str, lm: lmpool.PooledLM[Any]
) -> None:
    lm.sync.next_token_logprobs([1])
    command = [sys.executable, "-W", "ignore", "-c", FORK, any_server, pool_name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_notice_of_what_was_never_laid_is_nothing(lm: lmpool.PooledLM[Any], reads: Reads) -> None:
    until_all_come_near(lm, reads)
    prompt, here = some(1, 1)[0], folder_of(lm)
    (name,) = here.look("notices")
    pipe = NoticeWriter(here.path("notices", name))
    with Hold() as hold:
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.append(lm.sync.next_token_logprobs(prompt)))
        asking.start()
        assert hold.begun.wait(60)
        (digest,) = lm._client._session.table.flights
        (ring,) = here.look("rows")
        before = reads.found.copy()
        for digests in ([], [Digest(bytes(16))], [digest]):
            for named in ("", "../rows", "0" * 16, ring):
                pipe.tell(NearNotice(named, digests))
        with open(here.path("notices", name), "wb") as garbage:
            garbage.write(b"rows" * 100)

        def is_heard_again() -> bool:  # what came together with garbage was not
            pipe.tell(NearNotice(ring, [digest]))
            return reads.since(before)["gone"] > 1

        until(is_heard_again)
        assert set(reads.since(before)) == {"gone"}
        assert not found
        hold.open()
        asking.join(60)
    assert np.array_equal(found[0], mock_row(prompt, VOCAB))


def test_a_worker_of_another_server_is_not_read(pool_name: str, reads: Reads) -> None:
    """Though its pool has the name, the model and the system's user of this one."""
    with (
        RealServer() as mine,
        RealServer() as other,
        worker_process(mine.url, pool_name, engine_opts=OPTS) as worker,
        worker_process(other.url, pool_name, engine_opts=OPTS),
        lmpool.connect(mine.url, pool_name, framework="numpy", cache_bytes=0) as lm,
        lmpool.connect(other.url, pool_name, framework="numpy", cache_bytes=0) as their_lm,
    ):
        prompts, found = some(3, 1), list[Any]()
        lm.sync.next_token_logprobs([1])
        until_all_come_near(their_lm, reads)  # whose worker has seen both, as this one came later
        worker.pause()
        asking = threading.Thread(
            target=lambda: found.append(lm.sync.batch_next_token_logprobs(prompts))
        )
        asking.start()
        until(lambda: lm.statistics()["queued"] == 4)
        answers: Any = lm._client._session.near.hear.__self__  # type: ignore[attr-defined]
        asked = len(answers._asked)
        assert np.array_equal(their_lm.sync.batch_next_token_logprobs(prompts), right(prompts))
        until(lambda: len(answers._asked) > asked)
        for _ in range(3):  # and once the server was asked
            their_lm.sync.batch_next_token_logprobs(some(3, 2))
        lm._client.any_worker().result(60)
        assert len(lm._client._session.table.flights) == 3
        worker.resume()
        asking.join(60)
        assert np.array_equal(found[0], right(prompts))
        assert len(answers._ours) <= 1


def test_a_worker_that_comes_later_is_read(
    any_server: str, pool_name: str, lm: lmpool.PooledLM[Any], reads: Reads
) -> None:
    until_all_come_near(lm, reads)
    (first,), seeds = reads.workers, iter(range(10**6))
    with in_process_worker(any_server, pool_name, engine_opts=OPTS) as second:

        def are_both_read() -> bool:
            prompts = some(60, next(seeds))
            assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts), right(prompts))
            return min(reads.workers[first], reads.workers[second.id]) > 100

        until(are_both_read)


def test_a_client_whose_files_were_taken_away_is_told_again(
    lm: lmpool.PooledLM[Any], reads: Reads
) -> None:
    until_all_come_near(lm, reads)
    there = folder_of(lm)
    taken: list[tuple[Kind, ...]] = [("client", "notices"), ("client",), ("notices",)]
    for kinds in taken:
        for kind in kinds:
            os.unlink(*there.look(kind).values())
        lm._client._session.confirmed = -math.inf  # it looks before it asks
        until_all_come_near(lm, reads)
        assert len(there.look("client")) == len(there.look("notices")) == 1


def test_a_client_whose_thread_ended_has_its_rows(lm: lmpool.PooledLM[Any], reads: Reads) -> None:
    until_all_come_near(lm, reads)
    near = lm._client._session.near
    assert near._place is not None
    assert near._thread is not None
    near._place.pipe.close()
    near._thread.join(60)
    for seed in range(3):
        prompts, before = some(40, seed), reads.found.copy()
        assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts), right(prompts))
        assert reads.since(before) == Counter(server=40)


def test_a_client_that_nobody_has_any_more_leaves_nothing(
    any_server: str, pool_name: str, reads: Reads
) -> None:
    with in_process_worker(any_server, pool_name, engine_opts=OPTS):
        before = near_threads()
        lm = lmpool.connect(any_server, pool_name, framework="numpy")
        until_all_come_near(lm, reads)
        there = folder_of(lm)
        assert near_threads() == before + 1
        del lm
        gc.collect()
        until(lambda: near_threads() == before)
        assert there.look("client") == there.look("notices") == {}


def test_a_client_that_follows_its_pool_is_told_of_the_new_ones_rows(
    any_server: str, pool_name: str, reads: Reads
) -> None:
    options: Any = {"framework": "numpy", "cache_bytes": 0, "when_replaced": "follow"}
    new: dict[str, Any] = {"engine_opts": {"vocab_size": 2 * VOCAB}, "model": "new"}
    before = near_threads()
    with ExitStack() as stack:
        with in_process_worker(any_server, pool_name, engine_opts=OPTS):
            lm = stack.enter_context(lmpool.connect(any_server, pool_name, **options))
            until_all_come_near(lm, reads)
            old = folder_of(lm)
        with in_process_worker(any_server, pool_name, **new) as worker:
            seeds = iter(range(10**6))

            def is_read() -> bool:
                prompt = some(1, next(seeds))[0]
                row = lm.sync.next_token_logprobs(prompt, timeout=60)
                assert np.array_equal(row, mock_row(prompt, 2 * VOCAB))
                return reads.workers[worker.id] > 0

            until(is_read)
            until(lambda: near_threads() == before + 1)  # the old one's ends at its own pace
            assert not os.path.exists(old.folder)
            assert len(folder_of(lm).look("notices")) == 1


def test_a_client_that_does_not_read_its_pipe_has_its_rows(
    lm: lmpool.PooledLM[Any], reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    until_all_come_near(lm, reads)
    heard, goes_on = threading.Event(), threading.Event()

    def deaf(notice: NearNotice) -> None:
        heard.set()
        goes_on.wait(60)

    monkeypatch.setattr(lm._client._session.near, "hear", deaf)
    try:
        for seed in range(40):
            prompts = some(200, seed)
            before = reads.found.copy()
            assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts), right(prompts))
            assert reads.since(before) == Counter(server=200)
        assert heard.is_set()
    finally:
        goes_on.set()


def near_threads() -> int:
    return sum(thread.name.startswith("lmpool-near") for thread in threading.enumerate())


def test_nothing_is_left_of_those_that_leave(any_server: str, pool_name: str) -> None:
    with (
        in_process_worker(any_server, pool_name, engine_opts=OPTS),
        closing(lmpool.connect(any_server, pool_name, framework="numpy")) as lm,
    ):
        before = near_threads()
        lm.sync.next_token_logprobs([1])
        folder = folder_of(lm).folder
        assert os.path.isdir(folder)
        assert near_threads() == before + 1
    assert not os.path.exists(folder)
    until(lambda: near_threads() == before)


def test_clients_of_small_vocabularies_are_not_there(any_server: str, pool: str) -> None:
    with lmpool.connect(any_server, pool) as lm:
        lm.sync.next_token_logprobs([1])
        assert not os.path.exists(folder_of(lm).folder)


def test_a_client_whose_closing_is_interrupted_leaves_nothing(
    any_server: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(near: NearRows) -> None:
        patched.undo()
        raise KeyboardInterrupt

    with in_process_worker(any_server, pool_name, engine_opts=OPTS):
        before = near_threads()
        lm = lmpool.connect(any_server, pool_name, framework="numpy")
        lm.sync.next_token_logprobs([1])
        assert near_threads() == before + 1
        with monkeypatch.context() as patched:
            patched.setattr(NearRows, "leave", interrupt)
            with pytest.raises(KeyboardInterrupt):
                lm._client.close()
        lm.close()
        until(lambda: near_threads() == before)
        assert folder_of(lm).look("client") == {}


def test_a_client_that_ends_in_the_thread_that_is_told_is_closed_by_another(
    lm: lmpool.PooledLM[Any], reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the garbage collector, in the midst of rows that the collector waits for."""
    until_all_come_near(lm, reads)
    session, by = lm._client._session, list[str]()
    close = lm._client.close

    def note(*given: Any) -> None:
        by.append(threading.current_thread().name)
        close(*given)

    monkeypatch.setattr(lm._client, "close", note)
    monkeypatch.setattr(session.near, "hear", lambda notice: lm._client.close_soon())
    seeds = iter(range(1000))

    def is_closed() -> bool:
        with suppress(lmpool.errors.ClientClosed):
            lm.sync.next_token_logprobs(some(1, next(seeds))[0])
        return bool(by)

    until(is_closed)
    assert by[0] == "lmpool-close"
