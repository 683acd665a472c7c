"""From a shard to its server: one way, which everything takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import numpy as np
import pytest
import redis

from lmpool.backends.mock import mock_row
from lmpool.errors import UnknownAdapter
from lmpool.keys import GROUP, PoolKeys
from lmpool.primary_pool import PrimaryPool
from lmpool.producer import collector as collector_module
from lmpool.server import ANSWER_TIMEOUT, is_lost
from lmpool.servers import NONSENSE_MOST, Servers
from tests.support.clients import connected
from tests.support.fake import FakeServer
from tests.support.mock_rows import VOCAB, prompts_of, rows_of
from tests.support.parts import Guarded, SplitServers, new_session, split_over
from tests.support.waiting import until
from tests.support.workers import in_process_worker

SHARDS = PoolKeys("p").shards("0" * 8, 4, lanes=2)


@pytest.fixture
def two() -> Iterator[list[FakeServer]]:
    with FakeServer() as first, FakeServer() as second:
        yield [first, second]


def test_nothing_connects_before_its_first_command() -> None:
    servers = Servers.of_url("redis://127.0.0.1:1/0", blocks_for=3.0, name="somebody")
    options = servers.anywhere.connection_pool.connection_kwargs
    assert options["socket_timeout"] == ANSWER_TIMEOUT + 3.0
    assert options["client_name"] == "somebody"
    servers.close()


def test_a_server_that_answers_nothing_is_given_up_when_it_is_said() -> None:
    servers = Servers.of_url("redis://127.0.0.1:1/0", answers_within=1.5)
    options = servers.anywhere.connection_pool.connection_kwargs
    assert (options["socket_timeout"], options["socket_connect_timeout"]) == (1.5, 1.5)
    servers.close()


def test_every_shard_lies_on_the_one_server() -> None:
    servers = Servers.of_url("redis://127.0.0.1:1/0")
    assert {id(servers.for_shard(shard)) for shard in SHARDS} == {id(servers.anywhere)}
    assert servers.by_connection(SHARDS) == [(servers.anywhere, list(SHARDS))]
    assert servers.by_connection([]) == []
    servers.close()


def test_shards_are_grouped_by_the_connection_that_reads_them() -> None:
    opened = [object(), object(), object()]
    servers = SplitServers(opened)
    found = servers.by_connection(SHARDS)
    assert [server for server, _ in found] == opened
    numbers = [[shard.number for shard in shards] for _, shards in found]
    assert numbers == [[0, 3], [1], [2]]


def test_what_makes_no_sense_is_tried_again_on_another_connection(fake_url: str) -> None:
    servers = Servers.of_url(fake_url)

    def misread() -> None:
        with servers.in_step():
            servers.anywhere.ping().decode()  # type: ignore[attr-defined]

    with servers.in_step():
        before = servers.anywhere.execute_command("CLIENT", "ID")  # type: ignore[attr-defined]
    for _ in range(NONSENSE_MOST):
        with pytest.raises(redis.exceptions.InvalidResponse, match="AttributeError") as found:
            misread()
        assert is_lost(found.value)
    assert servers.anywhere.execute_command("CLIENT", "ID") != before  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):  # that is a defect of ours
        misread()
    with servers.in_step():
        servers.anywhere.ping()
    with pytest.raises(redis.exceptions.InvalidResponse):
        misread()
    with pytest.raises(UnknownAdapter), servers.in_step():
        raise UnknownAdapter("a ValueError that is an error of ours")
    servers.close()


def test_a_step_within_another_does_not_end_its_succession_of_nonsense(fake_url: str) -> None:
    servers = Servers.of_url(fake_url)

    def misread() -> None:
        with servers.in_step():
            with servers.in_step():
                servers.anywhere.ping()  # this one makes sense, each time
            servers.anywhere.ping().decode()  # type: ignore[attr-defined]

    for _ in range(NONSENSE_MOST):
        with pytest.raises(redis.exceptions.InvalidResponse):
            misread()
    with pytest.raises(AttributeError):
        misread()
    servers.close()


def test_another_thread_closes_no_socket(fake_url: str) -> None:
    """Its number would be another connection's at once, whose answers a read would then take."""
    servers = Servers.of_url(fake_url)
    assert servers.anywhere.ping()
    found = servers.anywhere.connection_pool.get_connection()._sock
    servers.cut()
    assert found.fileno() != -1
    assert found.recv(1) == b""
    servers.close()
    assert found.fileno() == -1


def test_a_read_that_is_blocked_ends_when_it_is_cut(fake_url: str) -> None:
    servers = Servers.of_url(fake_url, blocks_for=60.0)
    reading = threading.Event()

    def read() -> None:
        servers.anywhere.ping()
        reading.set()
        with pytest.raises(redis.exceptions.ConnectionError):
            servers.anywhere.xread({"nothing-here": "0-0"}, block=60_000)

    thread = Guarded(read)
    assert reading.wait(60)

    def ended() -> bool:
        servers.cut()  # again where it was only about to read
        return not thread.is_alive()

    until(ended)
    thread.end()
    servers.close()


def test_a_pool_whose_shards_lie_on_several_servers_serves(
    two: list[FakeServer], pool_name: str, tmp_path: Path
) -> None:
    """Whatever asked a shard's key of another server than the shard's would find nothing."""
    prompts = prompts_of(60)
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_bytes(b"{}")
    with (
        patch.object(collector_module, "BLOCK", 0.02),
        split_over([server.url for server in two]),
        in_process_worker(
            two[0].url, pool_name, shards=3, batch_size=8, adapter_dirs=[str(tmp_path)]
        ) as worker,
        connected(two[0].url, pool_name) as lm,
    ):
        rows = lm.batch_next_token_logprobs_sync(prompts, timeout=60)
        assert np.array_equal(rows, rows_of(prompts))
        assert lm.sync.sample([1, 2], 5, [], seed=3, timeout=60) == lm.sync.sample(
            [1, 2], 5, [], seed=3, timeout=20
        )
        loop, adapters = worker.service.loop, worker.service.adapters
        assert loop is not None
        assert adapters is not None
        fingerprint = loop.call(lambda: adapters.add("x", str(folder))).result(60)
        rows = lm.batch_next_token_logprobs_sync(prompts, "x", timeout=60)
        expected = [mock_row(prompt, VOCAB, f"x@{fingerprint}") for prompt in prompts]
        assert np.array_equal(rows, np.stack(expected))
        statistics = lm.pool_statistics_sync()
        assert statistics["computed"] == 121
        assert statistics["backlog"] == 0
        shards = PoolKeys(pool_name).shards(lm.info.fingerprint8, 3)
        clients = [server.client() for server in two]
        for shard in shards:
            here, elsewhere = clients[shard.number % 2], clients[1 - shard.number % 2]
            for stream in shard.streams:
                (group,) = here.xinfo_groups(stream.key)  # type: ignore[misc, union-attr]
                assert group["name"] == GROUP.encode()
            assert int(here.hget(shard.counters, "computed") or 0) > 0  # type: ignore[arg-type]
            assert not list(elsewhere.scan_iter(f"{shard.prefix}:*", count=1000))
        assert lm.info.vocab_size == VOCAB
        lm.close(60)  # one that is slow would leave its streams
    for client in clients:
        left = [key for key in client.keys("*") if b":reply:" in key or b":alive:" in key]
        assert left == []
        client.close()


class Named:
    """Sentinels that name one server."""

    sentinels = ()
    """Connections to them."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server

    def discover_master(self, service: str) -> tuple[str, int]:
        assert service == "main"
        url = urlsplit(self.server.url)
        return str(url.hostname), int(url.port or 0)


def both(first: Callable[[Any], None], then: Callable[[Any], None], given: Any) -> None:
    first(given)
    then(given)


def ended(servers: Servers) -> None:
    servers.renew()  # as where the server ends a connection, or says nothing in time


@pytest.mark.parametrize("found_by", [Servers.follow, ended])
def test_who_belongs_together_goes_to_another_primary_together(
    two: list[FakeServer],
    found_by: Callable[[Servers], None],
    pool_name: str,
) -> None:
    """Whether the Sentinels were asked after it, or where a connection that ended is made anew."""
    named: Any = Named(two[0])

    def open_one() -> Any:
        return redis.Redis(connection_pool=PrimaryPool("main", named, protocol=2))

    several = first, *others = [Servers(open_one) for _ in range(3)]
    session = new_session(two[0].url, pool_name)
    moves: list[object] = []
    for servers in several:
        session.owned(servers)
        pool: Any = servers.anywhere.connection_pool
        pool.on_move = partial(both, moves.append, pool.on_move)
        servers.follow()  # it has no connection yet
        servers.anywhere.set("here", b"the first")
    first.follow()
    named.server = two[1]
    assert first.anywhere.get("here") == b"the first"  # as if nothing had happened
    assert moves == []
    found_by(first)
    assert first.anywhere.get("here") is None
    for servers in others:
        assert servers.for_shard(SHARDS[0]).get("here") is None
        servers.follow()
    assert moves == [named.discover_master("main")]
    for servers in several:
        servers.close()


def test_without_sentinels_there_is_nothing_to_follow(two: list[FakeServer]) -> None:
    servers = Servers.of_url(two[0].url)
    servers.on_move(lambda primary: pytest.fail(f"to {primary}"))
    assert servers.anywhere.ping()
    servers.follow()
    servers.go_to(("127.0.0.1", 1))
    assert servers.anywhere.ping()
    servers.close()
