"""Telling and reading pieces: known by their numbers, whoever told them, in whatever order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import redis

from lmpool.backends.engine import Outcome, Part
from lmpool.errors import AnswerFormatError
from lmpool.keys import PoolKeys, ShardKeys
from lmpool.pieces import PIECE, piece_id, read_piece
from lmpool.producer.pieces import Pieces
from lmpool.servers import Servers
from lmpool.wants import Generation, Stream, TopLogprobs
from lmpool.wire import Job
from lmpool.worker import pieces as pieces_module
from lmpool.worker.batching import Delivery
from lmpool.worker.pieces import PieceWriter, Telling, Tellings
from tests.support.parts import VOCAB, info_of, jobs_of
from tests.support.protocol import put_result, shard_of_pool

WANT = Stream(50, (), 1.0, 7, logprobs=True, top_logprobs=2)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def drawn(tokens: Sequence[int]) -> Generation:
    """An answer to `WANT`."""
    ids = np.array(tokens, np.int32)
    logprobs = -ids.astype(np.float32)
    top = TopLogprobs(np.stack([ids, ids], 1), np.stack([logprobs, logprobs], 1), logprobs)
    return Generation(ids, 0, "length", logprobs, top)


@pytest.fixture
def server(fake_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


@pytest.fixture
def shard(pool_name: str) -> ShardKeys:
    return shard_of_pool(pool_name)


class Worker:
    """What a worker has to do with pieces: both threads' parts of it."""

    def __init__(self, server: redis.Redis, shard: ShardKeys) -> None:
        servers = Servers(lambda: server)  # type: ignore[arg-type,return-value]
        self.job: Job = jobs_of([[1, 2]], WANT)[0]
        self.delivery = Delivery(self.job, b"1-0", shard.stream(), 0.0)
        self.tellings = Tellings(servers, info_of())
        self.writer = PieceWriter(servers, VOCAB)

    def begin(self) -> list[int]:
        """Take the job; what was told of it before."""
        begun = self.tellings.begin([self.delivery]).get(self.job.digest, ())
        return [token for part in begun for token in part.token_ids.tolist()]

    def tell(self, start: int, tokens: Sequence[int]) -> Telling:
        """Draw these, and tell them."""
        parts = self.tellings.of([Part(self.job.digest, start, drawn(tokens))])
        self.writer.add(parts)
        self.writer.write()
        return parts[0][0]


@pytest.fixture
def workers(server: redis.Redis, shard: ShardKeys) -> list[Worker]:
    return [Worker(server, shard) for _ in range(2)]


def stored(server: redis.Redis, shard: ShardKeys, digest: bytes) -> list[int]:
    """What is told, read as a client does."""
    pieces = Pieces(WANT)
    pieces.take(server.xrange(shard.pieces(digest)), info_of())
    return [token for part in pieces.parts for token in part.token_ids.tolist()]


def test_who_takes_over_goes_on_with_all_that_was_told(
    server: redis.Redis, shard: ShardKeys, workers: list[Worker]
) -> None:
    first, second = workers
    digest = first.job.digest
    assert first.begin() == []
    first.tell(0, TOKENS[:2])
    first.tell(2, TOKENS[2:3])
    assert second.begin() == TOKENS[:3]
    second.tell(3, TOKENS[3:5])
    assert stored(server, shard, digest) == TOKENS[:5]
    assert 0 < server.pttl(shard.pieces(digest)) <= pieces_module.PIECES_LIFE_MS

    # The first wakes: what it draws alike is told already, what it draws otherwise is for nobody.
    assert not first.tell(3, TOKENS[3:5]).is_lost
    second.tell(5, TOKENS[5:6])
    assert first.tell(5, [11]).is_lost
    assert first.tellings.lost() == [digest]
    first.tell(6, [12])
    assert stored(server, shard, digest) == TOKENS[:6]
    assert not second.tell(6, TOKENS[6:8]).is_lost


def test_tokens_in_other_pieces_are_others(
    server: redis.Redis, shard: ShardKeys, workers: list[Worker]
) -> None:
    first, second = workers
    for worker in workers:
        worker.begin()
    first.tell(0, TOKENS[:2])
    assert second.tell(0, TOKENS[:3]).is_lost
    assert second.begin() == TOKENS[:2]


def test_what_the_server_lost_is_told_again(
    server: redis.Redis, shard: ShardKeys, workers: list[Worker]
) -> None:
    worker, other = workers
    key = shard.pieces(worker.job.digest)
    worker.begin()
    for start in range(5):
        worker.tell(start, TOKENS[start : start + 1])
    server.delete(key)
    worker.tell(5, TOKENS[5:6])
    assert stored(server, shard, worker.job.digest) == TOKENS[:6]
    server.delete(key)
    assert other.begin() == []
    other.tell(0, TOKENS[:1])
    worker.tell(6, TOKENS[6:7])
    assert stored(server, shard, worker.job.digest) == TOKENS[:7]
    server.set(key, "in the way")
    worker.tell(7, TOKENS[7:8])
    assert stored(server, shard, worker.job.digest) == TOKENS[:8]


def test_a_reader_that_moved_is_told_all_where_it_is(
    server: redis.Redis, shard: ShardKeys, workers: list[Worker]
) -> None:
    worker, _ = workers
    there = info_of(2).shard_keys(PoolKeys("elsewhere"))[1]
    worker.begin()
    worker.tell(0, TOKENS[:2])
    worker.tell(2, TOKENS[2:3])
    worker.tellings.follow(Delivery(worker.job, b"1-0", there.stream(), 0.0))
    worker.tell(3, TOKENS[3:4])
    assert stored(server, there, worker.job.digest) == TOKENS[:4]
    assert stored(server, shard, worker.job.digest) == TOKENS[:3]


def test_pieces_cannot_be_told_and_are_with_the_next(
    server: redis.Redis, shard: ShardKeys, workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers[0]
    worker.begin()
    worker.tell(0, TOKENS[:1])

    def refuse(*_: object) -> Any:
        raise redis.exceptions.ResponseError("a test refuses")

    with monkeypatch.context() as patched:
        patched.setattr(pieces_module, "script", lambda name: refuse)
        assert not worker.tell(1, TOKENS[1:3]).is_lost
    assert stored(server, shard, worker.job.digest) == TOKENS[:1]
    worker.tell(3, TOKENS[3:4])
    assert stored(server, shard, worker.job.digest) == TOKENS[:4]


def test_nothing_is_told_of_what_is_there_as_a_whole(
    server: redis.Redis, shard: ShardKeys, workers: list[Worker]
) -> None:
    worker = workers[0]
    worker.begin()
    worker.tell(0, TOKENS[:1])
    put_result(server, shard, worker.job)
    worker.writer.forget(shard, [worker.job.digest])
    assert not worker.tell(1, TOKENS[1:2]).is_lost
    assert not server.exists(shard.pieces(worker.job.digest))


@pytest.mark.parametrize(
    ("entry_id", "value"),
    [("0-7", b"garbage"), ("0-7", b""), ("0-9", None), ("1-3", None), ("0-2", None)],
)
def test_what_no_worker_told_is_taken_away(
    server: redis.Redis, shard: ShardKeys, workers: list[Worker], entry_id: str, value: bytes | None
) -> None:
    worker, other = workers
    key = shard.pieces(worker.job.digest)
    worker.begin()
    worker.tell(0, TOKENS[:1])
    ((_, fields),) = server.xrange(key)
    server.xadd(key, {"piece": fields[PIECE] if value is None else value}, id=entry_id)
    if entry_id == "0-2":  # a second piece of one token, as a worker tells it
        assert other.begin() == [TOKENS[0]] * 2
        return
    assert other.begin() == []
    other.tell(0, TOKENS[:2])
    assert stored(server, shard, worker.job.digest) == TOKENS[:2]


@pytest.mark.parametrize("damage", ["string", "id"])
def test_damage_to_one_continuation_is_not_that_of_others(
    server: redis.Redis, shard: ShardKeys, damage: str
) -> None:
    worker, job = Worker(server, shard), jobs_of([[3, 4]], WANT)[0]
    other = Delivery(job, b"2-0", shard.stream(), 0.0)
    spoil = {
        "string": lambda key: server.set(key, "in the way"),
        "id": lambda key: server.xadd(key, {"piece": b"x"}, id="7-1"),
    }[damage]
    keys = [shard.pieces(digest) for digest in (worker.job.digest, job.digest)]

    def tell(start: int) -> None:
        part = drawn(TOKENS[start : start + 1])
        worker.writer.add(
            worker.tellings.of([Part(id_, start, part) for id_ in (worker.job.digest, job.digest)])
        )
        worker.writer.write()

    spoil(keys[0])
    assert worker.tellings.begin([worker.delivery, other]) == {}
    tell(0)
    assert [stored(server, shard, d) for d in (worker.job.digest, job.digest)] == [TOKENS[:1]] * 2
    server.delete(keys[0])
    spoil(keys[0])
    tell(1)
    assert [stored(server, shard, d) for d in (worker.job.digest, job.digest)] == [TOKENS[:2]] * 2


def test_a_server_that_goes_away_meanwhile_ends_no_worker(
    server: redis.Redis, shard: ShardKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(server, shard)
    server.xadd(shard.pieces(worker.job.digest), {PIECE: b"no piece"}, id=piece_id(1))

    def delete(*keys: str) -> None:
        raise redis.exceptions.ConnectionError("gone")

    monkeypatch.setattr(server, "delete", delete)
    assert worker.begin() == []


def test_a_reader_takes_each_token_once_and_stops_at_what_is_no_piece() -> None:
    info = info_of()

    def entry(start: int, upto: int) -> tuple[bytes, dict[bytes, bytes]]:
        value = WANT.encode(Outcome(b"", answer=drawn(TOKENS[start:upto])), VOCAB)
        return piece_id(upto).encode(), {PIECE: value}

    pieces = Pieces(WANT)
    assert pieces.take([entry(0, 2), entry(2, 3)], info)
    assert [part.token_ids.tolist() for part in pieces.parts] == [TOKENS[:2], TOKENS[2:3]]
    assert pieces.parts[1].top_logprobs is not None
    for odd in (entry(2, 3), entry(1, 4), entry(4, 5)):  # read before, overlapping, one missing
        with pytest.raises(AnswerFormatError, match="no piece that follows 3 tokens"):
            read_piece(WANT, *odd, 3, info)
    assert pieces.take([entry(3, 4), entry(5, 6), entry(4, 5)], info)
    assert pieces.tokens == 4
    assert not pieces.are_read


def test_a_busy_server_says_nothing_of_what_was_told(
    server: redis.Redis, shard: ShardKeys, workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = workers
    first.begin()
    first.tell(0, TOKENS[:2])
    busy = redis.exceptions.ResponseError("BUSY the server is busy running a script")
    pipeline = type(server.pipeline())
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "execute", lambda *_, **__: [busy])
        assert second.begin() == []
    assert stored(server, shard, first.job.digest) == TOKENS[:2]
    assert second.begin() == TOKENS[:2]
