from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import pytest
import redis

import lmpool
from lmpool.backends.engine import Outcome
from lmpool.backends.mock import mock_row
from lmpool.errors import EngineBroken, PromptFailed, ServerRefused, ServerUnreachable
from lmpool.keys import ShardKeys
from lmpool.rows import LARGE, PackedRow, bf16_to_f32, pack_logprobs, unpack_row
from lmpool.scripts import script
from lmpool.server import open_server
from lmpool.servers import Servers
from lmpool.wants import Digest, Generate, Generation, Row
from lmpool.wire import Job
from lmpool.worker import publishing, result_store, transaction
from lmpool.worker.batching import Delivery
from lmpool.worker.publishing import Done, Finished, Publisher, encode
from lmpool.worker.result_store import ResultStore
from lmpool.worker.status import WorkerStatus
from tests.support.parts import info_of
from tests.support.protocol import Caller, Consumer, entries_of, new_job, shard_of_pool
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import in_process_worker

VOCAB = 16


def log_softmax(seed: int = 0, size: int = VOCAB) -> npt.NDArray[np.float32]:
    values = np.random.default_rng(seed).normal(size=size)
    result: npt.NDArray[np.float32] = (values - np.log(np.exp(values).sum())).astype(np.float32)
    return result


def bf16_logits(seed: int = 0) -> tuple[npt.NDArray[np.uint16], float]:
    """The bits of bfloat16 logits, and their logsumexp."""
    wide = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32)
    bits = (wide.view(np.uint32) >> 16).astype(np.uint16)
    return bits, float(np.log(np.exp(bf16_to_f32(bits).astype(np.float64)).sum()))


def delivery(job: Job, entry: bytes = b"1-0", shard: ShardKeys | None = None) -> Delivery:
    return Delivery(job, entry, (shard or shard_of_pool("p")).stream(), 0.0)


def generating(job: Job) -> Job:
    """The same prompt, continued."""
    return replace(job, want=Generate(5, (), 1.0, 1))


# --- what is stored ----------------------------------------------------------------------------


def test_f32_rows_are_stored_as_they_are() -> None:
    job, row = new_job(1), log_softmax()
    done = encode(delivery(job), Outcome(job.digest, row), VOCAB)
    assert done.value is not None
    assert done.status == "ok"
    found = unpack_row(done.value, VOCAB)
    assert found.encoding == "f32"
    assert found.logprobs().tobytes() == row.tobytes()


@pytest.mark.parametrize(("encoding", "dtype"), [("f32", np.float32), ("bf16", np.uint16)])
def test_a_large_rows_numbers_stay_where_they_are(encoding: str, dtype: type) -> None:
    job, width = new_job(1, encoding=encoding), np.dtype(dtype).itemsize
    for size, stays in ((LARGE // width, True), (LARGE // width - 1, False)):
        block = np.stack([log_softmax(i, size) for i in range(2)])
        rows = block if dtype is np.float32 else (block.view(np.uint32) >> 16).astype(dtype)
        done = encode(delivery(job), Outcome(job.digest, rows[1]), size)
        assert isinstance(done.value, PackedRow) is stays
        if isinstance(done.value, PackedRow):
            assert np.shares_memory(np.frombuffer(done.value.numbers, dtype), rows[1])
            assert done.size == done.value.nbytes >= LARGE
            stored = done.value.joined()
        else:
            stored = done.value or b""
        found = unpack_row(stored, size)
        assert found.encoding == encoding
        assert found.data.tobytes() == rows[1].tobytes()


def test_what_is_set_aside_holds_on_to_no_batch(
    start: Callable[..., Writer], fake_url: str
) -> None:
    """A shard may be away for long, and others' batches go on."""
    writer, shard = start(fake_url), shard_of_pool("p")
    job, row = new_job(1), log_softmax(size=LARGE)
    done = encode(delivery(job), Outcome(job.digest, row), LARGE)
    assert isinstance(done.value, PackedRow)
    whole = done.value.joined()
    writer.finish()
    writer.publisher._set_aside(shard, [done])
    assert done.value == whole
    assert writer.publisher._aside_bytes > len(whole)


def test_a_view_of_a_batchs_block_is_stored_as_its_own_row() -> None:
    block = np.stack([log_softmax(i) for i in range(4)], axis=1)  # rows are columns
    job = new_job(1)
    done = encode(delivery(job), Outcome(job.digest, block[:, 2]), VOCAB)
    assert done.value is not None
    assert unpack_row(done.value, VOCAB).logprobs().tobytes() == log_softmax(2).tobytes()


@pytest.mark.parametrize("step", [1, 2, -1])
def test_small_rows_are_stored_as_large_ones_are(step: int) -> None:
    rows = np.stack([log_softmax(i, 2 * VOCAB) for i in range(2)])[:, ::step][:, :VOCAB]
    rows[1, 3:] = -np.inf
    rows.flags.writeable = False
    for row in rows:
        want = new_job(1).want
        stored = want.encode(Outcome(b"", row), VOCAB)
        assert stored == pack_logprobs(row).joined()
        done = encode(delivery(new_job(1)), Outcome(b"", row), VOCAB)
        assert (done.value, done.size) == (stored, len(stored))


def test_f16_rows_are_stored_where_they_are_wanted() -> None:
    job, row = new_job(1, encoding="f16"), log_softmax()
    done = encode(delivery(job), Outcome(job.digest, row), VOCAB)
    assert done.value is not None
    found = unpack_row(done.value, VOCAB)
    assert found.encoding == "f16"
    assert np.allclose(found.logprobs(), row, atol=5e-3)


@pytest.mark.parametrize("wanted", ["bf16", "f32", "f16"])
def test_bfloat16_logits_are_stored_as_is_wanted(wanted: str) -> None:
    bits, logsumexp = bf16_logits()
    job = new_job(1, encoding=wanted)
    done = encode(delivery(job), Outcome(job.digest, bits, logsumexp), VOCAB)
    assert done.value is not None
    found = unpack_row(done.value, VOCAB)
    assert found.encoding == wanted
    exact = bf16_to_f32(bits) - np.float32(logsumexp)
    assert np.allclose(found.logprobs(), exact, atol=5e-3 if wanted == "f16" else 0)


def test_a_float32_row_cannot_be_stored_as_bfloat16() -> None:
    job = new_job(1, encoding="bf16")
    done = encode(delivery(job), Outcome(job.digest, log_softmax()), VOCAB)
    assert done.value is not None
    assert unpack_row(done.value).encoding == "f32"  # rather more than less


def test_sampled_tokens_are_stored() -> None:
    for ids in ([3, 1, 2], []):
        job = generating(new_job(1))
        outcome = Outcome(b"", answer=Generation(np.array(ids, np.int32), 0, "length"))
        done = encode(delivery(job), outcome, VOCAB)
        assert done.value is not None
        assert job.want.decode(done.value, info_of(vocab_size=VOCAB)).token_ids.tolist() == ids  # type: ignore


def nan_row(*places: int) -> npt.NDArray[np.float32]:
    row = log_softmax()
    row[list(places)] = np.nan
    return row


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(b"", nan_row(*range(VOCAB))),
        Outcome(b"", nan_row(0)),
        Outcome(b"", bf16_logits()[0], float("nan")),
        Outcome(b"", bf16_logits()[0], float("inf")),
        Outcome(b"", np.full(VOCAB, np.inf, np.float32)),
        Outcome(b"", np.full(VOCAB, -np.inf, np.float32)),
        Outcome(b"", np.array([-np.inf] * (VOCAB - 1) + [np.nan], np.float32)),
    ],
    ids=[
        "every entry",
        "the first entry",
        "bfloat16",
        "bfloat16 of infinity",
        "infinity",
        "minus infinity",
        "an overflow",
    ],
)
@pytest.mark.parametrize("wanted", ["f32", "f16", "bf16"])
def test_rows_that_are_no_numbers_fail_with_a_hint(outcome: Outcome, wanted: str) -> None:
    done = encode(delivery(new_job(1, encoding=wanted)), outcome, VOCAB)
    assert done.value is None
    assert done.status == "failed"
    assert "NaN" in done.error
    assert "another dtype" in done.error


@pytest.mark.parametrize("wanted", ["f32", "f16"])
def test_a_row_whose_first_token_is_ruled_out_is_stored(wanted: str) -> None:
    row = log_softmax()
    row[0] = -np.inf
    done = encode(delivery(new_job(1, encoding=wanted)), Outcome(b"", row), VOCAB)
    assert done.value is not None
    found = unpack_row(done.value, VOCAB).logprobs()
    assert found[0] == -np.inf
    assert np.isfinite(found[1:]).all()


def test_errors_are_told_and_cut() -> None:
    done = encode(delivery(new_job(1)), Outcome(b"", error=PromptFailed("why " * 10_000)), VOCAB)
    assert (done.value, done.status) == (None, "failed")
    assert done.error.startswith("why why")
    assert len(done.error) <= publishing.MAX_ERROR_CHARS
    assert (
        encode(delivery(new_job(1)), Outcome(b"", error=EngineBroken("")), VOCAB).error
        == "EngineBroken"
    )
    assert "gave no row" in encode(delivery(new_job(1)), Outcome(b""), VOCAB).error
    assert "gave no tokens" in encode(delivery(generating(new_job(1))), Outcome(b""), VOCAB).error


# --- writing -----------------------------------------------------------------------------------


@pytest.fixture
def shard(pool_name: str, any_server: str) -> ShardKeys:
    return shard_of_pool(pool_name)


@pytest.fixture(autouse=True)
def _room_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is time to look again, the engine's thread begins nothing."""
    for module in (publishing, result_store):
        monkeypatch.setattr(module, "LOOK_EVERY", 3600.0)


def rest(publisher: Publisher) -> None:
    """Wait until the publisher's thread waits for more, and has nothing left to do."""
    publisher._call()
    until(
        lambda: (
            not publisher._is_called
            and publisher._queue.empty()
            and not publisher._writing.locked()
        )
    )


class Writer:
    """A publisher at work on a thread of its own, and where it `begins` on the engine's, too."""

    def __init__(self, url: str, ttl_ms: int = 60_000, begins: bool = False) -> None:
        self.failed: list[int] = []
        self.status = WorkerStatus({}, lambda: self.failed.append(1))
        self.server: Any = open_server(url)
        self.servers = Servers(lambda: self.server)
        store = ResultStore(self.servers, (), None)
        self.publisher = Publisher(self.servers, VOCAB, ttl_ms, store, self.status)
        self.thread = threading.Thread(target=self.publisher.run)
        self.begins, self.begun = begins, 0
        if begins:
            store.look()
            self.server.script_load(script("complete").source)
        self.thread.start()

    def put(self, finished: Sequence[Finished]) -> None:
        """As the engine's thread does."""
        if self.begins:
            rest(self.publisher)
        if self.publisher.put(finished, at_leisure=self.begins):
            self.begun += 1
            self.publisher.end()

    def finish(self) -> None:
        self.publisher.finish()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.servers.close()


@pytest.fixture(params=[False, True], ids=["publisher", "engine"])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Writer]]:
    """Starts a writer whose small batches leave in that thread."""
    writers: list[Writer] = []

    def start(url: str, ttl_ms: int = 60_000) -> Writer:
        writers.append(Writer(url, ttl_ms, request.param))
        return writers[-1]

    yield start
    for writer in writers:
        if writer.thread.is_alive():
            writer.status.stopping.set()
            writer.finish()


def prepare(
    server: redis.Redis, shard: ShardKeys, count: int, **options: Any
) -> tuple[Caller, Consumer, list[Finished]]:
    """A caller who waits for `count` rows, the worker that holds their jobs, and the rows."""
    caller, consumer = Caller(server, shard), Consumer(server, shard)
    jobs = [new_job(i, 7, **options) for i in range(count)]
    caller.enqueue(*jobs, bound=10_000)
    entries = consumer.read(10_000)
    finished: list[Finished] = [
        (delivery(job, entry, shard), Outcome(job.digest, log_softmax(i)))
        for i, (job, entry) in enumerate(zip(jobs, entries, strict=True))
    ]
    return caller, consumer, finished


def value_of(server: redis.Redis, shard: ShardKeys, item: Finished) -> Any:
    delivery = item.delivery if isinstance(item, Done) else item[0]
    return server.get(shard.result(delivery.job.digest))


def test_a_batch_is_written_told_and_acknowledged(
    start: Callable[..., Writer], any_server: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller, consumer, finished = prepare(redis_client, shard, 5)
    writer = start(any_server, 50_000)
    writer.put(finished)
    writer.finish()
    for i, item in enumerate(finished):
        digest = item[0].job.digest  # type: ignore[index]
        assert unpack_row(value_of(redis_client, shard, item)).logprobs().tolist() == (
            log_softmax(i).tolist()
        )
        assert 0 < redis_client.pttl(shard.result(digest)) <= 50_000  # type: ignore[operator]
        assert not redis_client.exists(shard.flight(digest))
    assert {n.digest for n in caller.notices() if n.status == "ok"} == {
        item[0].job.digest  # type: ignore[index]
        for item in finished
    }
    assert consumer.held() == []
    assert entries_of(redis_client, shard.stream().key) == []
    assert redis_client.hgetall(shard.counters) == {b"computed": b"5", b"batches": b"1"}


def test_an_error_is_told_and_no_row_written(
    start: Callable[..., Writer], any_server: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller, consumer, ((first, _), second) = prepare(redis_client, shard, 2)  # type: ignore[misc]
    writer = start(any_server)
    writer.put([(first, Outcome(b"", error=PromptFailed("too odd"))), second])
    writer.finish()
    told = {n.digest: (n.status, n.error) for n in caller.notices()}
    assert told[first.job.digest] == ("failed", "too odd")
    assert sorted(status for status, _ in told.values()) == ["failed", "ok"]
    assert not redis_client.exists(shard.result(first.job.digest))
    assert consumer.held() == []
    assert redis_client.hgetall(shard.counters) == {
        b"computed": b"1",
        b"failed": b"1",
        b"batches": b"1",
    }
    (failure,) = msgpack.unpackb(writer.status.heartbeat())["failures"]
    assert (failure["reason"], failure["jobs"]) == ("too odd", 1)


class Speechless(PromptFailed):
    """An error that cannot even be worded."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "words"),
    [(PromptFailed("no file mod\udce8le"), "no file mod\\udce8le"), (Speechless(), "Speechless")],
    ids=["no UTF-8", "no words"],
)
def test_an_error_that_cannot_travel_as_it_is_is_told(
    error: PromptFailed,
    words: str,
    start: Callable[..., Writer],
    any_server: str,
    redis_client: redis.Redis,
    shard: ShardKeys,
) -> None:
    caller, consumer, ((first, _), second) = prepare(redis_client, shard, 2)  # type: ignore[misc]
    writer = start(any_server)
    writer.put([(first, Outcome(b"", error=error)), second])
    writer.finish()
    told = {n.digest: (n.status, n.error) for n in caller.notices()}
    assert told[first.job.digest] == ("failed", words)
    assert sorted(status for status, _ in told.values()) == ["failed", "ok"]
    assert consumer.held() == []
    assert not writer.failed
    (failure,) = msgpack.unpackb(writer.status.heartbeat())["failures"]
    assert failure["reason"] == words


def test_what_is_there_already_is_only_announced(
    start: Callable[..., Writer], any_server: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller, consumer, ((item, _),) = prepare(redis_client, shard, 1)  # type: ignore[misc]
    redis_client.set(shard.result(item.job.digest), b"there")
    writer = start(any_server)
    writer.put([Done(item, None)])
    writer.finish()
    assert [notice.status for notice in caller.notices()] == ["ok"]
    assert redis_client.get(shard.result(item.job.digest)) == b"there"
    assert redis_client.ttl(shard.result(item.job.digest)) == -1
    assert consumer.held() == []


@pytest.mark.parametrize(("most", "most_bytes"), [(3, 1 << 20), (1000, 200)])
def test_a_large_batch_is_written_in_portions(
    most: int,
    most_bytes: int,
    start: Callable[..., Writer],
    any_server: str,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishing, "CHUNK_MOST", most)
    monkeypatch.setattr(publishing, "CHUNK_BYTES", most_bytes)
    caller, consumer, finished = prepare(redis_client, shard, 10)
    writer = start(any_server)
    writer.put(finished)
    writer.finish()
    # Three rows of 88 bytes are the first to reach 200 bytes.
    told = [
        fields for _, fields in entries_of(redis_client, shard.reply(caller.id)) if b"ok" in fields
    ]
    assert [len(fields[b"ok"]) // 32 for fields in told] == [3, 3, 3, 1]
    assert len(caller.notices()) == 10
    assert consumer.held() == []
    # It is one batch all the same.
    assert redis_client.hgetall(shard.counters) == {b"computed": b"10", b"batches": b"1"}


def test_jobs_of_several_shards_go_where_they_came_from(
    start: Callable[..., Writer], any_server: str, redis_client: redis.Redis, pool_name: str
) -> None:
    shards = [shard_of_pool(pool_name, shard=number) for number in range(3)]
    prepared = [prepare(redis_client, shard, 2) for shard in shards]
    finished = [item for _, _, items in prepared for item in items]
    writer = start(any_server)
    writer.put(finished[::2] + finished[1::2])
    writer.finish()
    for shard, (caller, consumer, items) in zip(shards, prepared, strict=True):
        assert len(caller.notices()) == 2
        assert consumer.held() == []
        assert all(value_of(redis_client, shard, item) for item in items)
    batches = sum(int(redis_client.hget(shard.counters, "batches") or 0) for shard in shards)  # type: ignore[arg-type]
    assert batches == 1


def test_a_forgotten_script_is_sent_again(
    start: Callable[..., Writer], any_server: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller, consumer, finished = prepare(redis_client, shard, 3)
    redis_client.script_flush()
    writer = start(any_server)
    writer.put(finished)
    writer.finish()
    assert len(caller.notices()) == 3
    assert consumer.held() == []
    assert redis_client.hget(shard.counters, "computed") == b"3"


def test_batches_are_written_in_their_order_and_only_two_may_wait(
    start: Callable[..., Writer], any_server: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller, _, finished = prepare(redis_client, shard, 6)
    servers = Servers.of_url(any_server)
    store = ResultStore(servers, (), None)
    publisher = Publisher(servers, VOCAB, 1000, store, WorkerStatus({}, lambda: None))
    put: list[int] = []

    def put_all() -> None:
        for i, item in enumerate(finished):
            publisher.put([item])
            put.append(i)
        publisher.finish()

    thread = threading.Thread(target=put_all)
    thread.start()
    until(lambda: len(put) == publishing.QUEUE_MOST)
    assert not until_or_not(lambda: len(put) > publishing.QUEUE_MOST)
    publisher.run()
    thread.join(60)
    assert [n.digest for n in caller.notices()] == [
        item[0].job.digest  # type: ignore[index]
        for item in finished
    ]
    publisher._servers.close()


@pytest.mark.parametrize(
    "bad",
    [
        Outcome(b"", np.zeros((2, 2))),  # type: ignore[arg-type]
        Outcome(b"", np.zeros(VOCAB - 1, np.float32)),
        Outcome(b"", answer=Generation("text", 0, "length")),  # type: ignore[arg-type]
    ],
)
def test_an_outcome_that_is_none_fails_alone(
    bad: Outcome,
    start: Callable[..., Writer],
    any_server: str,
    redis_client: redis.Redis,
    shard: ShardKeys,
) -> None:
    caller, consumer, ((first, _), second) = prepare(redis_client, shard, 2)  # type: ignore[misc]
    writer = start(any_server)
    writer.put([(first, bad), second])
    writer.finish()
    assert sorted(notice.status for notice in caller.notices()) == ["failed", "ok"]
    assert consumer.held() == []


def test_nobody_waits_for_a_publisher_that_has_ended(
    any_server: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    _, consumer, finished = prepare(redis_client, shard, 1)
    servers = Servers.of_url(any_server)
    store = ResultStore(servers, (), None)
    publisher = Publisher(servers, VOCAB, 1000, store, WorkerStatus({}, lambda: None))
    publisher._write = None  # type: ignore[assignment, method-assign]
    publisher.put(finished)
    with pytest.raises(TypeError):
        publisher.run()
    for _ in range(publishing.QUEUE_MOST + 2):
        publisher.put(finished)
    publisher.finish()
    assert len(consumer.held()) == 1
    publisher._servers.close()


def until_or_not(condition: Callable[[], bool], timeout: float = 0.1) -> bool:
    try:
        return until(condition, timeout)
    except AssertionError:
        return False


# --- in the engine's thread --------------------------------------------------------------------


@contextmanager
def begins_at(url: str) -> Iterator[Writer]:
    writer = Writer(url, begins=True)
    try:
        yield writer
    finally:
        writer.finish()


@pytest.fixture
def beginner(any_server: str) -> Iterator[Writer]:
    with begins_at(any_server) as writer:
        yield writer


def test_a_small_batch_is_written_while_the_publisher_rests(
    beginner: Writer,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishing, "LEISURE", 60.0)
    monkeypatch.setattr(beginner.publisher, "_take_over", None)
    most = publishing.BEGIN_MOST
    caller, consumer, finished = prepare(redis_client, shard, 1 + most)
    beginner.put(finished[:1])
    assert len(caller.notices()) == 1
    assert len(consumer.held()) == most
    beginner.put(finished[1:])
    assert len(caller.notices()) == most
    assert consumer.held() == []
    assert beginner.begun == 2
    assert redis_client.hget(shard.counters, "batches") == b"2"


def test_what_is_more_than_a_little_is_the_publishers(
    beginner: Writer,
    redis_client: redis.Redis,
    shard: ShardKeys,
    pool_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = publishing.BEGIN_MOST
    caller, consumer, finished = prepare(redis_client, shard, most + 4)

    def is_the_publishers(items: Sequence[Finished]) -> None:
        before = len(consumer.held())
        beginner.put(items)
        until(lambda: len(consumer.held()) == before - len(items))
        assert beginner.begun == 0

    is_the_publishers(finished[: most + 1])
    with monkeypatch.context() as patch:
        patch.setattr(publishing, "BEGIN_BYTES_NEAR", 4 * VOCAB - 1)
        is_the_publishers(finished[most + 1 : most + 2])
    beginner.publisher._store._due = 0.0  # room is to be looked for
    is_the_publishers(finished[most + 2 : most + 3])
    others = [shard_of_pool(pool_name, shard=number) for number in (1, 2)]
    prepared = [prepare(redis_client, other, 1) for other in others]
    beginner.put([item for _, _, items in prepared for item in items])
    assert beginner.begun == 0
    for _, other, _ in prepared:
        until(lambda other=other: other.held() == [])
    until(lambda: beginner.publisher._store.has_room(shard, 1))
    beginner.put(finished[most + 3 :])
    assert beginner.begun == 1
    until(lambda: consumer.held() == [])
    assert len(caller.notices()) == most + 4


def test_an_answer_that_is_long_in_coming_keeps_no_engine_waiting(
    server_url: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = shard_of_pool(pool_name)
    with (
        begins_at(server_url) as writer,
        redis.Redis.from_url(server_url, protocol=2) as client,
    ):
        caller, consumer, finished = prepare(client, shard, 3)
        client.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
        try:
            writer.put(finished[:1])
            assert writer.publisher._begun is not None  # the engine goes on
            assert len(consumer.held()) == 3
            assert not writer.publisher.put(finished[1:2], at_leisure=True)
            time.sleep(2 * publishing.LEISURE)
        finally:
            client.execute_command("CLIENT", "UNPAUSE")
        until(lambda: len(consumer.held()) == 1)
        assert writer.publisher._is_far
        assert writer.begun == 1
        monkeypatch.setattr(publishing, "LEISURE", 60.0)
        writer.put(finished[2:])  # nor does it wait for the next one, but sees that it came soon
        until(lambda: consumer.held() == [])
        until(lambda: not writer.publisher._is_far)
        assert writer.begun == 2
        assert len(caller.notices()) == 3
        assert client.hget(shard.counters, "batches") == b"3"


def test_one_batch_at_a_time_is_begun(
    any_server: str,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the publisher's thread has yet to wake up for the one before."""
    monkeypatch.setattr(publishing.Transaction, "is_answered_within", lambda *_: False)
    caller, consumer, finished = prepare(redis_client, shard, 2)
    servers = Servers.of_url(any_server)
    store = ResultStore(servers, (), None)
    store.look()
    servers.anywhere.ping()
    publisher = Publisher(servers, VOCAB, 1000, store, WorkerStatus({}, lambda: None))
    assert publisher.put(finished[:1], at_leisure=True)
    publisher.end()
    first = publisher._begun
    publisher._is_called = False
    assert not publisher.put(finished[1:], at_leisure=True)
    assert publisher._begun is first is not None
    publisher.finish()
    publisher.run()
    assert publisher._begun is None
    assert not publisher.put(finished, at_leisure=True)  # nobody would take the answer over
    assert len(caller.notices()) == 2
    assert consumer.held() == []
    servers.close()


def test_nothing_but_the_sending_is_the_engines_threads(
    beginner: Writer,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Room, values that are there already and scripts that are unknown take round trips."""
    _, consumer, finished = prepare(redis_client, shard, 5)
    here = threading.current_thread()
    monkeypatch.setattr(publishing, "LEISURE", 60.0)
    for owner, name in (
        (beginner.publisher._store, "before_writing"),
        (transaction, "_made_up_for"),
        (transaction, "_replace_what_is_none"),
    ):
        function = getattr(owner, name)

        def elsewhere(*arguments: Any, function: Any = function, name: str = name) -> Any:
            if threading.current_thread() is here and name != "_made_up_for":
                raise AssertionError(name)
            called.append((name, threading.current_thread() is here))
            return function(*arguments)

        monkeypatch.setattr(owner, name, elsewhere)
    called: list[tuple[str, bool]] = []
    beginner.put(finished[:1])
    assert called == [("_made_up_for", True)]  # which has nothing to do
    assert consumer.held() != []
    called.clear()
    redis_client.script_flush()
    beginner.put(finished[1:2])
    until(lambda: ("_made_up_for", False) in called)
    assert ("_made_up_for", True) not in called
    redis_client.set(shard.result(finished[2][0].job.digest), b"there")  # type: ignore[index]
    beginner.put(finished[2:3])
    until(lambda: ("_replace_what_is_none", False) in called)
    rest(beginner.publisher)
    assert beginner.begun == 3
    monkeypatch.setattr(beginner.publisher._store, "_target", lambda *_: 0)
    monkeypatch.setattr(beginner.publisher._store, "_stopping", lambda: True)
    beginner.put(finished[3:4])
    until(lambda: ("before_writing", False) in called)
    until(lambda: len(consumer.held()) == 1)
    assert beginner.begun == 3


def test_long_answers_are_the_publishers(
    beginner: Writer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller, consumer = Caller(redis_client, shard), Consumer(redis_client, shard)
    jobs = [generating(new_job(number)) for number in range(2)]
    caller.enqueue(*jobs)
    finished: list[Finished] = [
        (delivery(job, entry, shard), Outcome(job.digest, answer=Generation(tokens, 0, "length")))
        for job, entry, tokens in zip(
            jobs,
            consumer.read(2),
            (np.zeros(3, np.int32), np.zeros(publishing.BEGIN_BYTES_NEAR, np.int32)),
            strict=True,
        )
    ]
    beginner.put(finished[:1])
    assert beginner.begun == 1
    beginner.put(finished)
    until(lambda: consumer.held() == [])
    assert beginner.begun == 1


def test_of_large_rows_fewer_are_sent_to_a_server_elsewhere(
    beginner: Writer, redis_client: redis.Redis, shard: ShardKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket may not hold them; of those to this machine it is known."""
    monkeypatch.setattr(publishing, "BEGIN_BYTES", 4 * VOCAB - 1)
    caller, consumer, finished = prepare(redis_client, shard, 2)
    beginner.put(finished[:1])
    assert beginner.begun == 1
    monkeypatch.setattr(type(beginner.server), "is_near", False)
    beginner.put(finished[1:])
    until(lambda: consumer.held() == [])
    assert beginner.begun == 1
    assert len(caller.notices()) == 2


def test_no_ping_is_waited_for_in_the_engines_thread(
    server_url: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = shard_of_pool(pool_name)
    joint = "&" if "?" in server_url else "?"
    with (
        begins_at(f"{server_url}{joint}health_check_interval=1") as writer,
        redis.Redis.from_url(server_url, protocol=2) as client,
    ):
        _, consumer, finished = prepare(client, shard, 1)
        connection = writer.server.connection_pool._one
        monkeypatch.setattr(connection, "check_health", None)
        writer.put(finished)
        assert writer.begun == 1
        until(lambda: consumer.held() == [])


@pytest.mark.parametrize("when", ["sent", "answered"])
def test_what_was_begun_on_a_connection_that_ends_is_written_again(
    when: str, beginner: Writer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller, consumer, finished = prepare(redis_client, shard, 1)
    rest(beginner.publisher)
    assert beginner.publisher.put(finished, at_leisure=True)
    begun = beginner.publisher._begun
    assert begun is not None
    if when == "answered":
        assert begun.transaction.is_answered_within(60)
    begun.transaction._connection._sock.shutdown(socket.SHUT_RDWR)
    beginner.publisher.end()
    until(lambda: consumer.held() == [])
    assert len(caller.notices()) == 1  # told once


def test_a_lone_prompt_is_written_in_the_engines_thread(
    any_server: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    put = Publisher.put

    def note_and_put(*arguments: Any) -> bool:
        begun.append(put(*arguments))
        return begun[-1]

    monkeypatch.setattr(Publisher, "put", note_and_put)
    with (
        in_process_worker(any_server, pool_name, engine_opts={"vocab_size": VOCAB}) as worker,
        lmpool.connect(any_server, pool_name, framework="numpy", cache_bytes=0) as lm,
    ):
        prompts = ([n, m] for n in range(VOCAB) for m in range(VOCAB))
        publisher = worker.service._publisher
        assert publisher is not None

        def is_written_there() -> bool:
            prompt, before = next(prompts), len(begun)
            rest(publisher)
            row = lm.sync.next_token_logprobs(prompt)
            np.testing.assert_array_equal(row, mock_row(prompt, VOCAB))
            until(lambda: len(begun) > before)  # the answer may be quicker
            return begun[before]

        assert not is_written_there()  # room is looked for
        assert all(is_written_there() for _ in range(20))


# --- rows that are laid near -------------------------------------------------------------------


@pytest.fixture(autouse=True)
def at_any_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "AHEAD_FOR", 3600.0)


class Laid:
    """In the place of a worker's laying: what was laid, in which thread, before what was stored."""

    def __init__(self, publisher: Publisher, server: redis.Redis, shard: ShardKeys) -> None:
        self.calls: list[tuple[bool, int]] = []
        """Whether it was this thread, and how many rows that were."""
        self.stored = 0
        """Rows that were there by then."""
        self._publisher, self._server, self._shard = publisher, server, shard
        self._here = threading.current_thread()
        self.closed_by: list[threading.Thread] = []
        self.ahead: set[Digest] = set()
        """What may be laid ahead of others."""
        self.size = 4 * VOCAB
        """Bytes of a row's numbers."""
        publisher._laying = self  # type: ignore[assignment]

    def may_be_ahead(self, digests: Sequence[Digest], size: int) -> list[bool]:
        assert size == self.size
        return [digest in self.ahead for digest in digests]

    def lay(self, digests: Sequence[Digest], values: Sequence[object]) -> None:
        is_here = threading.current_thread() is self._here
        assert self._publisher._writing.locked() or is_here
        assert len(digests) == len(values)
        keys = [self._shard.result(digest) for digest in digests]
        self.stored += self._server.exists(*keys)
        self.calls.append((is_here, len(digests)))

    def close(self) -> None:
        assert self._publisher._writing.locked()
        self.closed_by.append(threading.current_thread())


def test_rows_are_laid_before_they_are_stored_and_once(
    start: Callable[..., Writer], any_server: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    writer = start(any_server)
    laid = Laid(writer.publisher, redis_client, shard)
    caller, consumer, finished = prepare(redis_client, shard, 30)
    fail_first(writer, [redis.exceptions.ConnectionError("gone")])
    for items in (finished[:3], finished[3:]):
        writer.put(items)
        until(lambda: writer.publisher._queue.empty())
    until(lambda: consumer.held() == [])
    assert len(caller.notices()) == 30
    assert laid.stored == 0
    assert laid.calls == [(writer.begins, 3), (writer.begins, 27)]
    writer.finish()
    assert laid.closed_by == [writer.thread]


def test_more_than_is_written_at_once_is_laid_by_the_publisher(
    beginner: Writer,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ring is not to be written over before the first of it was read."""
    monkeypatch.setattr(publishing, "CHUNK_BYTES", 4 * 4 * VOCAB)
    laid = Laid(beginner.publisher, redis_client, shard)
    _, consumer, finished = prepare(redis_client, shard, 14)
    beginner.put(finished[:4])
    beginner.put(finished[4:])
    until(lambda: consumer.held() == [])
    assert laid.calls[0] == (True, 4)
    assert {there for there, _ in laid.calls[1:]} == {False}
    assert sum(count for _, count in laid.calls) == 14
    assert len(laid.calls) > 3


def bits_of(digest: bytes) -> Outcome:
    return Outcome(digest, np.zeros(VOCAB, np.uint16), 1.0)


def test_a_wrong_row_fails_its_prompt_alone_also_where_rows_are_laid_ahead(
    beginner: Writer,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is known of a row before it was looked at: an engine of another package made it."""
    monkeypatch.setattr(publishing, "CHUNK_BYTES", 4 * 4 * VOCAB)
    laid = Laid(beginner.publisher, redis_client, shard)
    caller, consumer, finished = prepare(redis_client, shard, 14)
    wrong: list[Any] = [[0.0] * VOCAB, np.empty(0, np.float32), "row", None]
    for place, row in enumerate(wrong, 5):
        held, outcome = finished[place]  # type: ignore[misc]
        finished[place] = held, Outcome(outcome.id, row)
    laid.ahead = {item[0].job.digest for item in finished}  # type: ignore[index,union-attr]
    rest(beginner.publisher)
    assert not beginner.publisher.put(finished, at_leisure=True)
    until(lambda: consumer.held() == [])
    assert len(caller.notices()) == 14
    stored = [value_of(redis_client, shard, item) is not None for item in finished]
    assert stored == [True] * 5 + [False] * 4 + [True] * 5


@pytest.mark.parametrize("may", ["11111111111111", "11110000111100"])
def test_rows_of_an_engine_at_leisure_are_laid_before_any_is_stored(
    beginner: Writer,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
    may: str,
) -> None:
    """By its own thread, few at a time by their size as they travel, as far as clients keep up."""
    monkeypatch.setattr(publishing, "CHUNK_BYTES", 4 * 2 * VOCAB)
    monkeypatch.setattr(publishing, "TOLD_BYTES", 4 * 2 * VOCAB)
    laid = Laid(beginner.publisher, redis_client, shard)
    laid.size = 2 * VOCAB
    _, consumer, items = prepare(redis_client, shard, 14)
    finished: list[Finished] = [
        (replace(item[0], job=replace(item[0].job, want=Row("bf16"))), bits_of(item[1].id))  # type: ignore[index,union-attr]
        for item in items
    ]
    digests = [item[0].job.digest for item in items]  # type: ignore[index,union-attr]
    laid.ahead = {digest for digest, way in zip(digests, may, strict=True) if way == "1"}
    rest(beginner.publisher)
    assert not beginner.publisher.put(finished, at_leisure=True)
    counts = [may[n : n + 4].count("1") for n in range(0, 14, 4)]
    assert [count for here, count in laid.calls if here] == [count for count in counts if count]
    until(lambda: consumer.held() == [])
    assert laid.stored == 0
    assert sum(count for _, count in laid.calls) == 14


def test_the_engine_is_not_kept_long_by_what_it_lays(
    beginner: Writer,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows in float16 take long to encode; who asks meanwhile waits for the engine."""
    monkeypatch.setattr(publishing, "CHUNK_BYTES", 4 * 4 * VOCAB)
    monkeypatch.setattr(publishing, "TOLD_BYTES", 3 * 4 * VOCAB)
    monkeypatch.setattr(publishing, "AHEAD_FOR", -1.0)
    laid = Laid(beginner.publisher, redis_client, shard)
    _, consumer, finished = prepare(redis_client, shard, 14)
    laid.ahead = {item[0].job.digest for item in finished}  # type: ignore[index,union-attr]
    rest(beginner.publisher)
    assert not beginner.publisher.put(finished, at_leisure=True)
    assert [count for here, count in laid.calls if here] == [3]
    until(lambda: consumer.held() == [])
    assert sum(count for _, count in laid.calls) == 14


def test_rows_of_an_engine_that_goes_on_are_laid_by_the_publisher(
    beginner: Writer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    laid = Laid(beginner.publisher, redis_client, shard)
    _, consumer, finished = prepare(redis_client, shard, 3)
    laid.ahead = {item[0].job.digest for item in finished}  # type: ignore[index,union-attr]
    rest(beginner.publisher)
    assert not beginner.publisher.put(finished)
    until(lambda: consumer.held() == [])
    assert laid.calls == [(False, 3)]


@contextmanager
def at_work(writer: Writer, finished: Sequence[Finished]) -> Iterator[None]:
    """The publisher's thread is at these meanwhile, and not at anything behind them."""
    began, may_go_on = threading.Event(), threading.Event()
    write = writer.publisher._write

    def held(chunk: Sequence[Done]) -> None:
        began.set()
        assert may_go_on.wait(60)
        write(chunk)

    writer.publisher._write = held  # type: ignore[method-assign]
    writer.publisher.put(finished)
    assert began.wait(60)
    try:
        yield
    finally:
        may_go_on.set()


@pytest.mark.parametrize("may", ["111111111", "110111101", "000000100", "000000000"])
def test_while_the_publisher_is_at_work_rows_are_laid_by_who_computed_them(
    beginner: Writer,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
    may: str,
) -> None:
    """Few at a time, for which clients are ready; what is left is laid as it is stored."""
    monkeypatch.setattr(publishing, "TOLD_BYTES", 3 * 4 * VOCAB)
    laid = Laid(beginner.publisher, redis_client, shard)
    caller, consumer, finished = prepare(redis_client, shard, 14)
    digests = [item[0].job.digest for item in finished[5:]]  # type: ignore[index,union-attr]
    laid.ahead = {digest for digest, way in zip(digests, may, strict=True) if way == "1"}
    rest(beginner.publisher)
    with at_work(beginner, finished[:5]):
        assert not beginner.publisher.put(finished[5:], at_leisure=True)
        counts = [may[n : n + 3].count("1") for n in range(0, 9, 3)]
        assert laid.calls == [(False, 5), *((True, count) for count in counts if count)]
    until(lambda: consumer.held() == [])
    assert sum(count for _, count in laid.calls) == 14
    assert sum(count for here, count in laid.calls if here) == may.count("1")
    assert laid.stored == 0
    assert len(caller.notices()) == 14
    assert all(value_of(redis_client, shard, item) for item in finished)


@pytest.mark.parametrize(
    ("part", "chunks"),
    [(None, [8, 4]), (100, [8, 4]), (6, [6, 6]), (1, [4, 4, 4])],
)
def test_what_is_laid_is_stored_in_larger_portions_as_far_as_there_is_room(
    beginner: Writer,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
    part: int | None,
    chunks: list[int],
) -> None:
    """Those who wait for it have it; a server has all of a portion in hand before it makes room."""
    _, _, finished = prepare(redis_client, shard, 16)
    size = encode(*finished[0], VOCAB).size  # type: ignore[misc]
    monkeypatch.setattr(publishing, "CHUNK_BYTES", 4 * size)
    monkeypatch.setattr(publishing, "LAID_CHUNK_BYTES", 8 * size)
    laid = Laid(beginner.publisher, redis_client, shard)
    laid.ahead = {item[0].job.digest for item in finished[4:]}  # type: ignore[index,union-attr]
    rest(beginner.publisher)
    store = beginner.publisher._store
    bound = None if part is None else part * size * publishing.LAID_CHUNK_PART
    monkeypatch.setattr(store, "bound", lambda _: bound)
    written = list[int]()
    with at_work(beginner, finished[:4]):
        held = beginner.publisher._write

        def noted(chunk: Sequence[Done]) -> None:
            written.append(len(chunk))
            held(chunk)

        monkeypatch.setattr(beginner.publisher, "_write", noted)
        beginner.publisher.put(finished[4:])
    until(lambda: sum(written) == 12)
    assert written == chunks


def test_what_nobody_waits_for_is_left_to_the_publisher(
    beginner: Writer,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's thread does not even encode it, nor what is no row."""
    laid = Laid(beginner.publisher, redis_client, shard)
    _, consumer, finished = prepare(redis_client, shard, 14)
    rows, others = finished[:10], list[Finished]()
    for item in finished[10:]:
        held, outcome = item  # type: ignore[misc]
        other = replace(held, job=generating(held.job))
        others.append((other, Outcome(outcome.id, error=PromptFailed("no"))))
    encoded = list[bool]()
    here, usual = threading.current_thread(), publishing.encode

    def noted(*given: Any) -> Done:
        encoded.append(threading.current_thread() is here)
        return usual(*given)

    monkeypatch.setattr(publishing, "encode", noted)
    laid.ahead = {item[0].job.digest for item in others}  # type: ignore[index,union-attr]
    rest(beginner.publisher)
    with at_work(beginner, rows[:5]):
        beginner.publisher.put([*rows[5:], *others])
    until(lambda: consumer.held() == [])
    assert encoded == [False] * 14
    assert {there for there, _ in laid.calls} == {False}
    assert sum(count for _, count in laid.calls) == 14


def test_what_is_no_row_wakes_the_publisher_unless_it_is_little(
    beginner: Writer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    laid = Laid(beginner.publisher, redis_client, shard)
    _, consumer, finished = prepare(redis_client, shard, publishing.BEGIN_MOST + 1)
    failed: list[Finished] = [
        (item[0], Outcome(item[1].id, error=PromptFailed("no")))  # type: ignore[index,union-attr]
        for item in finished
    ]
    beginner.put(failed)
    until(lambda: consumer.held() == [])
    assert [there for there, _ in laid.calls] == [False]


# --- when the server does not take it ----------------------------------------------------------


def fail_first(writer: Writer, errors: list[Exception]) -> None:
    """Let the first writes fail with these errors."""
    pool = writer.server.connection_pool
    get_connection = pool.get_connection

    def failing(*arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return get_connection(*arguments, **options)

    pool.get_connection = failing


def test_a_lost_server_is_tried_again_until_it_takes_the_rows(
    start: Callable[..., Writer],
    any_server: str,
    redis_client: redis.Redis,
    shard: ShardKeys,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caller, consumer, finished = prepare(redis_client, shard, 2)
    writer = start(any_server)
    errors: list[Exception] = [redis.exceptions.ConnectionError("gone")] * 3
    fail_first(writer, errors)
    writer.put(finished)
    writer.finish()
    assert not errors
    assert len(caller.notices()) == 2
    assert consumer.held() == []
    assert not writer.failed
    assert "rows cannot be written (2 rows wait" in caplog.text


def test_a_write_that_was_done_but_not_answered_is_done_again_without_harm(
    start: Callable[..., Writer], any_server: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller, consumer, finished = prepare(redis_client, shard, 2)
    writer = start(any_server)
    take_answer = writer.publisher._take_answer
    lost: list[Exception] = [redis.exceptions.TimeoutError("no answer")]

    def take_and_lose(writing: Any) -> None:
        take_answer(writing)
        if lost:
            raise lost.pop()

    writer.publisher._take_answer = take_and_lose  # type: ignore[method-assign]
    writer.put(finished)
    writer.finish()
    assert not lost
    assert len(caller.notices()) == 2  # told once
    assert consumer.held() == []


def test_a_server_that_refuses_for_good_ends_the_worker(
    start: Callable[..., Writer],
    any_server: str,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, consumer, finished = prepare(redis_client, shard, 1)
    writer = start(any_server)
    monkeypatch.setattr(writer.status.stopping, "wait", lambda _: False)  # no back-off here
    fail_first(writer, [redis.exceptions.NoPermissionError("no permissions")] * 100)
    writer.put(finished)
    until(lambda: writer.failed)
    assert isinstance(writer.status.failure, ServerRefused)
    assert str(writer.status.failure) == "rows cannot be written: no permissions"
    assert len(consumer.held()) == 1  # the job stays with the pool


def test_a_worker_whose_heartbeats_alone_reach_the_server_ends(
    start: Callable[..., Writer],
    any_server: str,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its jobs are for others, whose rows may pass."""
    _, consumer, finished = prepare(redis_client, shard, 1)
    writer = start(any_server)
    monkeypatch.setattr(publishing, "CUT_OFF_AFTER", 0.0)
    monkeypatch.setattr(writer.status.stopping, "wait", lambda _: False)  # no back-off here
    writer.status.metrics.beat_at = time.monotonic() + 3600  # as if it had just been
    fail_first(writer, [redis.exceptions.ConnectionError("reset")] * 1000)
    writer.put(finished)
    until(lambda: writer.failed)
    assert isinstance(writer.status.failure, ServerUnreachable)
    assert "while heartbeats reach the server: reset" in str(writer.status.failure)
    assert len(consumer.held()) == 1


@pytest.mark.parametrize(
    ("error", "beats"),
    [
        (redis.exceptions.ConnectionError("reset"), False),
        (redis.exceptions.BusyLoadingError("loading"), True),
        (redis.exceptions.ReadOnlyError("a replica"), True),
    ],
    ids=["away", "loading", "a replica"],
)
def test_a_server_that_is_away_or_not_ready_is_waited_for_however_long(
    error: Exception,
    beats: bool,
    start: Callable[..., Writer],
    any_server: str,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller, _, finished = prepare(redis_client, shard, 1)
    writer = start(any_server)
    monkeypatch.setattr(publishing, "CUT_OFF_AFTER", 0.0)
    monkeypatch.setattr(writer.status.stopping, "wait", lambda _: False)  # no back-off here
    writer.status.metrics.beat_at = time.monotonic() + (3600 if beats else -3600)
    fail_first(writer, [error] * 20)
    writer.put(finished)
    writer.finish()
    assert [notice.status for notice in caller.notices()] == ["ok"]
    assert not writer.failed


def refuse(writer: Writer, refused: Callable[[Sequence[Done]], bool]) -> None:
    """Let the server refuse what is written, and not who writes it."""
    send = writer.publisher._send

    def refusing(shard: Any, chunk: Sequence[Done], *others: Any, **options: Any) -> Any:
        if refused(chunk):
            raise redis.exceptions.ResponseError("WRONGTYPE")
        return send(shard, chunk, *others, **options)

    writer.publisher._send = refusing  # type: ignore[method-assign]


def test_jobs_that_are_refused_alone_go_and_the_batch_counts_once(
    start: Callable[..., Writer], any_server: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller, consumer, finished = prepare(redis_client, shard, 8)
    bad = finished[2][0].job.digest  # type: ignore[index]
    writer = start(any_server)
    refuse(writer, lambda chunk: any(done.delivery.job.digest == bad for done in chunk))
    writer.put(finished)
    writer.finish()
    told = {notice.digest for notice in caller.notices()}
    assert told == {item[0].job.digest for item in finished} - {bad}  # type: ignore[index]
    assert consumer.held() == []
    assert redis_client.hgetall(shard.counters) == {b"computed": b"7", b"batches": b"1"}
    assert not writer.failed


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_what_refuses_all_jobs_alike_ends_the_worker_and_not_the_jobs(
    start: Callable[..., Writer],
    any_server: str,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
    at_once: int,
) -> None:
    _, consumer, finished = prepare(redis_client, shard, 3 * publishing.LEFT_OUT_MOST)
    writer = start(any_server)
    monkeypatch.setattr(publishing, "CHUNK_MOST", at_once)
    monkeypatch.setattr(writer.status.stopping, "wait", lambda _: False)  # no back-off here
    refuse(writer, lambda _: True)
    writer.put(finished)
    until(lambda: writer.failed)
    assert len(consumer.held()) >= 2 * publishing.LEFT_OUT_MOST


def test_refusals_that_others_come_between_end_nobody(
    start: Callable[..., Writer],
    any_server: str,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller, consumer, finished = prepare(redis_client, shard, 4 * publishing.LEFT_OUT_MOST)
    bad = {item[0].job.digest for item in finished[::2]}  # type: ignore[index]
    writer = start(any_server)
    monkeypatch.setattr(publishing, "CHUNK_MOST", 1)
    refuse(writer, lambda chunk: chunk[0].delivery.job.digest in bad)
    writer.put(finished)
    writer.finish()
    assert len(caller.notices()) == 2 * publishing.LEFT_OUT_MOST
    assert consumer.held() == []
    assert not writer.failed


def test_a_worker_that_stops_does_not_wait_for_a_lost_server_for_ever(
    start: Callable[..., Writer], any_server: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    _, consumer, finished = prepare(redis_client, shard, 1)
    writer = start(any_server)
    writer.status.stopping.set()
    fail_first(writer, [redis.exceptions.ConnectionError("gone")] * 1000)
    writer.put(finished)
    writer.finish()
    assert len(consumer.held()) == 1


def test_a_full_server_gets_nothing_acknowledged_until_there_is_room(
    server_binary: str,
    start: Callable[..., Writer],
    pool_name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shard = shard_of_pool(pool_name)
    with RealServer() as server, server.client() as client:
        caller, consumer, finished = prepare(client, shard, 3)
        writer = start(server.url)
        client.config_set("maxmemory", 1)
        writer.put(finished)
        # More failures than an error for good would be given.
        until(lambda: "memory is full" in caplog.text)
        until(lambda: client.info("errorstats").get("errorstat_OOM", {}).get("count", 0) > 6)  # type: ignore[union-attr]
        assert not writer.failed
        assert len(consumer.held()) == 3
        assert caller.notices() == []
        client.config_set("maxmemory", 0)
        writer.finish()
        assert len(caller.notices()) == 3
        assert consumer.held() == []
        assert "raise maxmemory or lower result_ttl" in caplog.text
        assert "f32" not in caplog.text  # no rows in the log
