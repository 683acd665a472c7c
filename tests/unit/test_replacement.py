"""A pool that comes to serve something else: what a client does with what it waits for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import redis

from lmpool.errors import PoolMismatch
from lmpool.keys import GROUP, PROTOCOL
from lmpool.liveness import LIFE_MS
from lmpool.model_info import ModelInfo
from lmpool.producer.pending import PendingCall
from lmpool.producer.replacement import look_at, wake_collector
from lmpool.producer.session import Session
from lmpool.servers import Servers
from lmpool.wants import Row
from tests.support.fake import FakeServer
from tests.support.parts import (
    SplitServers,
    ask,
    info_of,
    jobs_of,
    new_session,
    row_of,
    some_prompts,
)
from tests.support.protocol import FINGERPRINT, entries_of
from tests.unit.test_withdrawal import claim, left

OTHER = info_of(3, fingerprint="f" * 32, model="other")


@pytest.fixture
def server(fake_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


@pytest.fixture
def servers(server: redis.Redis) -> Servers:
    return Servers(lambda: server)  # type: ignore[arg-type,return-value]


def asking(url: str, pool: str, servers: Servers, **options: Any) -> tuple[Session, PendingCall]:
    """A session whose call waits for jobs in every shard."""
    session = new_session(url, pool, **options)
    call = ask(session, jobs_of(some_prompts(9)))
    claim(session, servers)
    return session, call


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"model": "a copy"},
        {"max_backlog": 7, "client_backlog": 5, "result_ttl_ms": 1},
        {"revision": "abc"},
        {"protocols": (2, PROTOCOL)},
    ],
    ids=str,
)
@pytest.mark.parametrize("when", ["raise", "follow"])
def test_a_pool_that_gives_the_same_answers_in_the_same_places_was_not_replaced(
    changed: dict[str, Any], when: str, fake_url: str, pool_name: str, servers: Servers
) -> None:
    session, call = asking(fake_url, pool_name, servers, when_replaced=when)
    assert look_at(session, servers, replace(info_of(), **changed).pack()) is False
    assert not call.done
    assert session.table.withdrawn == []


REPLACED = [
    OTHER,
    info_of(3, fingerprint=FINGERPRINT[:8] + "f" * 24, model="other"),
    info_of(2, max_prompt_tokens=1),
]
NAMES = ["model", "model in the same keys", "longest prompt"]


@pytest.mark.parametrize("info", REPLACED, ids=NAMES)
def test_a_pool_that_was_replaced_fails_what_is_waited_for(
    info: ModelInfo, fake_url: str, pool_name: str, servers: Servers
) -> None:
    session, call = asking(fake_url, pool_name, servers)
    known = session.info
    assert look_at(session, servers, info.pack()) is True
    assert isinstance(call.error, PoolMismatch)
    assert "'toy' this client knows: connect again" in str(call.error)
    assert call.wait(0)
    assert session.info is known  # whoever asks again is told again
    assert len(session.table.withdrawn) == 9  # the sender tells the old shards


@pytest.mark.parametrize("info", REPLACED, ids=NAMES)
def test_a_client_that_follows_moves_and_tells_those_who_waited(
    info: ModelInfo,
    fake_url: str,
    pool_name: str,
    servers: Servers,
    server: redis.Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    session, call = asking(fake_url, pool_name, servers, when_replaced="follow")
    old = session.shards
    (kept,) = jobs_of([[9]])
    session.cache.put(kept.digest, Row("f32").decode(row_of(kept), info_of()))
    assert left(server, session) == 9
    assert look_at(session, servers, info.pack()) is True
    # Who waited has to ask anew: its prompts have to be checked for the new model.
    assert isinstance(call.error, PoolMismatch)
    assert call.wait(0)
    assert session.info == info
    assert session.shards == info.shard_keys(session.keys)
    assert session.table.withdrawn == []
    for shard in old:
        assert sum(int(server.xlen(stream.key)) for stream in shard.streams) == 0  # type: ignore[arg-type]
    # The same model's answers are as good as they were.
    assert (session.cache.get(kept.digest) is None) == (info.model == "other")
    # The collector waits in a stream that nobody writes to any longer.
    assert b"bye" in entries_of(server, old[0].reply(session.id))[-1][1]
    assert 0 < server.pttl(old[0].reply(session.id)) <= 30_000  # type: ignore[operator]
    assert f"now serves {info.model} instead of toy" in caplog.text


@pytest.mark.parametrize("info", [info_of(2), info_of(5), info_of(3, lanes=2)], ids=lambda i: i)
@pytest.mark.parametrize("when", ["raise", "follow"])
def test_other_shards_of_the_same_model_are_moved_to_without_a_word(
    info: ModelInfo, when: str, fake_url: str, pool_name: str, servers: Servers, server: redis.Redis
) -> None:
    session, call = asking(fake_url, pool_name, servers, when_replaced=when)
    old = session.shards
    (kept,) = jobs_of([[9]])
    session.cache.put(kept.digest, Row("f32").decode(row_of(kept), info_of()))
    session.table.withdrawn.append((0, kept.digest))
    assert look_at(session, servers, info.pack()) is False, "nobody is there"
    assert session.shards == old
    for shard in info.shard_keys(session.keys):
        server.xgroup_create(shard.stream().key, GROUP, "0", mkstream=True)
        server.xgroup_createconsumer(shard.stream().key, GROUP, "one")
        server.set(shard.alive("one"), "", px=LIFE_MS)
    assert look_at(session, servers, info.pack()) is True
    assert not call.done
    assert session.shards == info.shard_keys(session.keys)
    assert session.cache.get(kept.digest) is not None
    assert session.table.withdrawn == []
    unsent = list(session.table.unsent["interactive"])
    assert sorted(map(id, unsent)) == sorted(map(id, session.table.flights.values()))
    assert len(unsent) == 9
    for flight in unsent:
        place = info.placement().of(flight.job.tokens, flight.job.adapter)
        assert (flight.shard, flight.lane) == place
    assert session.table.statistics.resubmitted == 9
    assert b"bye" in entries_of(server, old[0].reply(session.id))[-1][1]


def test_a_client_that_follows_moves_even_where_the_old_shards_cannot_be_told(
    fake_url: str, pool_name: str, servers: Servers
) -> None:
    session, call = asking(fake_url, pool_name, servers, when_replaced="follow")

    class Lost(Servers):
        def for_shard(self, shard: Any) -> Any:
            raise redis.exceptions.ConnectionError("gone")

    with pytest.raises(redis.exceptions.ConnectionError):
        look_at(session, Lost(lambda: None), OTHER.pack())  # type: ignore[arg-type,return-value]
    assert call.wait(0)
    assert session.info == OTHER
    assert session.table.withdrawn == []


@pytest.mark.parametrize("when", ["raise", "follow"])
@pytest.mark.parametrize(
    ("packed", "remedy"),
    [
        (b"garbage", "not msgpack|version"),
        (msgpack.packb({"v": 99}), "version 99: .*upgrade this lmpool"),
        (replace(info_of(), protocols=(7,)).pack(), "protocol 7.*upgrade this lmpool"),
    ],
    ids=["garbage", "later", "another protocol"],
)
def test_a_pool_that_cannot_be_understood_was_replaced(
    packed: bytes, remedy: str, when: str, fake_url: str, pool_name: str, servers: Servers
) -> None:
    session, call = asking(fake_url, pool_name, servers, when_replaced=when)
    assert look_at(session, servers, packed) is True
    with pytest.raises(PoolMismatch, match=remedy):
        raise call.error  # type: ignore[misc]


def test_one_word_a_connection_wakes_the_collector(fake_url: str, pool_name: str) -> None:
    session = new_session(fake_url, pool_name)
    with FakeServer() as first, FakeServer() as second:
        clients = [first.client(), second.client()]
        wake_collector(session, SplitServers(clients), session.shards)
        replies = [shard.reply(session.id) for shard in session.shards]
        found = [[client.xlen(reply) for reply in replies] for client in clients]
        assert found == [[1, 0, 0], [0, 1, 0]]
        # A client that is gone by then leaves nothing for good.
        for client, reply in zip(clients, replies, strict=False):
            assert 0 < client.pttl(reply) <= 30_000
