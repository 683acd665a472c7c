"""Jobs that were given up: read, asked for again, dropped."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
import redis

from lmpool import PooledLM, dead_letters
from lmpool.backends.mock import mock_row
from lmpool.errors import PromptError, PromptFailed
from lmpool.keys import PoolKeys, ShardKeys
from lmpool.wire import pack_job
from tests.support.clients import connected
from tests.support.pools import pool_shards
from tests.support.protocol import new_job
from tests.support.workers import in_process_worker


@pytest.fixture(params=[1, 2])
def lm(request: pytest.FixtureRequest, fake_url: str, pool_name: str) -> Iterator[PooledLM]:
    options = {"fail_token": 7}
    with (
        in_process_worker(fake_url, pool_name, shards=request.param, engine_opts=options),
        connected(fake_url, pool_name) as lm,
    ):
        yield lm


@pytest.fixture
def server(fake_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


@pytest.fixture
def shard(lm: PooledLM, server: redis.Redis, pool_name: str) -> ShardKeys:
    """The last one, so that what is true of it is not so by its number."""
    return pool_shards(server, pool_name)[-1]


def bury(server: redis.Redis, shard: ShardKeys, lm: PooledLM, *tokens: int) -> None:
    job = pack_job(new_job(*tokens, fingerprint=lm.info.fingerprint))
    server.xadd(shard.dead, {"job": job, "reason": "it died", "deliveries": 3, "worker": "w-1"})


def test_nothing_was_given_up(lm: PooledLM) -> None:
    assert dead_letters.read(lm) == []
    assert dead_letters.drop(lm, []) == 0


def test_all_that_is_kept_is_read(lm: PooledLM, server: redis.Redis, shard: ShardKeys) -> None:
    bury(server, shard, lm, 5, 6)
    (letter,) = dead_letters.read(lm)
    assert (letter.reason, letter.deliveries, letter.worker) == ("it died", 3, "w-1")
    assert letter.job is not None
    assert letter.job.token_ids().tolist() == [5, 6]
    assert letter.shard == shard.number
    several = len(lm.shards) > 1
    assert letter.name == (f"{len(lm.shards) - 1}/" if several else "") + letter.entry
    assert letter.given_up.tzinfo is UTC
    assert abs((datetime.now(UTC) - letter.given_up).total_seconds()) < 60


def test_garbage_is_read_as_such(lm: PooledLM, server: redis.Redis, shard: ShardKeys) -> None:
    server.xadd(shard.dead, {"job": b"garbage", "reason": b"\xff", "deliveries": "many"})
    server.xadd(shard.dead, {"nothing": "known"})
    garbage, unknown = dead_letters.read(lm)
    assert (garbage.job, garbage.data, garbage.deliveries) == (None, b"garbage", 0)
    assert garbage.reason == "\ufffd"
    assert (unknown.job, unknown.data, unknown.worker) == (None, b"", "")
    with pytest.raises(PromptError, match="drop it"):
        dead_letters.retry(lm, garbage)
    assert len(dead_letters.read(lm)) == 2


def test_what_is_answered_is_dropped(lm: PooledLM, server: redis.Redis, shard: ShardKeys) -> None:
    bury(server, shard, lm, 5, 6)
    bury(server, shard, lm, 8)
    first, second = dead_letters.read(lm)
    row = dead_letters.retry(lm, first, timeout=60)
    np.testing.assert_array_equal(row.logprobs(), mock_row([5, 6], 256))
    assert dead_letters.read(lm) == [second]


def test_what_fails_by_itself_is_kept(lm: PooledLM, server: redis.Redis, shard: ShardKeys) -> None:
    bury(server, shard, lm, 7)
    (letter,) = dead_letters.read(lm)
    with pytest.raises(PromptFailed, match="the token 7"):
        dead_letters.retry(lm, letter, timeout=60)
    assert dead_letters.read(lm) == [letter]


def test_what_is_given_up_again_has_a_new_letter(
    lm: PooledLM, server: redis.Redis, shard: ShardKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(server, shard, lm, 5)
    (letter,) = dead_letters.read(lm)

    def give_up_again(*_: object, **__: object) -> None:
        bury(server, shard, lm, 5)
        raise PromptFailed("given up after 3 deliveries")

    monkeypatch.setattr(lm, "ask_again", give_up_again)
    with pytest.raises(PromptFailed, match="given up"):
        dead_letters.retry(lm, letter)
    (newer,) = dead_letters.read(lm)
    assert newer.entry != letter.entry


def test_dropping_counts_what_there_was(
    lm: PooledLM, server: redis.Redis, shard: ShardKeys
) -> None:
    for token in (1, 2, 3):
        bury(server, shard, lm, token)
    first, second, third = dead_letters.read(lm)
    assert dead_letters.drop(lm, [first, third]) == 2
    assert dead_letters.read(lm) == [second]
    assert dead_letters.drop(lm, [first, second]) == 1


def test_many_are_read_page_by_page(lm: PooledLM, server: redis.Redis, shard: ShardKeys) -> None:
    with server.pipeline(transaction=False) as pipeline:
        for _ in range(1001):
            pipeline.xadd(shard.dead, {"job": b"garbage"})
        pipeline.execute()
    letters = dead_letters.read(lm)
    assert len({letter.name for letter in letters}) == 1001
    assert dead_letters.drop(lm, letters) == 1001


def test_what_came_along_with_a_pool_is_dropped_where_it_is(
    lm: PooledLM, server: redis.Redis, shard: ShardKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(server, shard, lm, 5)
    (letter,) = dead_letters.read(lm)
    heirs = PoolKeys(lm.pool).shards(lm.info.fingerprint8, 3)

    def come_along(*_: object, **__: object) -> str:
        """As the pool moves while a job is asked for again."""
        ((entry, fields),) = server.xrange(shard.dead)
        other = {**fields, b"reason": b"of the same name"}
        server.xadd(heirs[shard.number].dead, other, id=entry)
        given_up = int(entry.partition(b"-")[0])
        for number, reason in ((given_up + 1, b"of another time"), (given_up, fields[b"reason"])):
            came_from = f"{shard.dead}/{number}-{entry.partition(b'-')[2].decode()}"
            server.xadd(heirs[1].dead, {**fields, b"came_from": came_from, b"reason": reason})
        server.delete(shard.dead)
        monkeypatch.setattr(type(lm), "shards", heirs)
        return "the answer"

    monkeypatch.setattr(lm, "ask_again", come_along)
    assert dead_letters.retry(lm, letter) == "the answer"
    kept = {letter.reason for letter in dead_letters.read(lm)}
    assert kept == {"of the same name", "of another time"}


def test_what_went_and_came_back_has_another_name_and_is_dropped(
    lm: PooledLM, server: Any, shard: ShardKeys
) -> None:
    bury(server, shard, lm, 5)
    (letter,) = dead_letters.read(lm)
    ((entry, fields),) = server.xrange(shard.dead)
    server.xdel(shard.dead, entry)
    for name, reason in ((b"1-1", b"another"), (entry, fields[b"reason"])):
        came_from = f"{shard.dead}/{name.decode()}"
        server.xadd(shard.dead, {**fields, b"came_from": came_from, b"reason": reason})
    assert dead_letters.drop(lm, [letter]) == 1
    assert [kept.reason for kept in dead_letters.read(lm)] == ["another"]
    assert dead_letters.drop(lm, [letter]) == 0


def test_one_that_is_gone_takes_no_equal_one_with_it(
    lm: PooledLM, server: Any, shard: ShardKeys
) -> None:
    """What was no job may have come several times within a millisecond."""
    for number in (1, 2):
        server.xadd(
            shard.dead, {"job": "junk", "reason": "none", "worker": "w"}, id=f"5000-{number}"
        )
    first, second = dead_letters.read(lm)
    assert dead_letters.drop(lm, [first]) == 1
    assert dead_letters.drop(lm, [first]) == 0
    # Nor where the other has come along with the pool.
    ((entry, fields),) = server.xrange(shard.dead)
    server.delete(shard.dead)
    server.xadd(shard.dead, {**fields, "came_from": f"{shard.dead}/{entry.decode()}"})
    assert dead_letters.drop(lm, [first]) == 0
    (kept,) = dead_letters.read(lm)
    assert kept.given_up == second.given_up == datetime.fromtimestamp(5, UTC)
    assert dead_letters.drop(lm, [second, second]) == 1
    assert dead_letters.read(lm) == []
