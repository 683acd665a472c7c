"""One thread's connections to the nodes of a Redis Cluster."""

from __future__ import annotations

import logging
import random
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

import redis.exceptions

from lmpool.address import Address, Cluster, in_url
from lmpool.cluster import (
    BoundedClusterParser,
    ClusterParser,
    NodeConnection,
    SlotMoved,
    TLSNodeConnection,
    slot_map,
)
from lmpool.commands import Pipeline, Server
from lmpool.connections import OneConnectionClient, OneConnectionPool, OwnWordsPipeline
from lmpool.keys import ShardKeys
from lmpool.server import REFUSALS, connection_options, is_full, is_lost
from lmpool.servers import Servers, accepted, gathered
from lmpool.slots import slot_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_WITHIN: Final = 2.0
"""Seconds without an answer after which a node is given up: what it serves is soon served by
another, and this is most of what a caller waits for beyond that."""
SILENT_FOR: Final = 1.5
"""Seconds for which a node that let a command time out is left alone, and then asked whether it is
back: a command would take as long again, in which others are not served. Meanwhile the map is
looked at: who takes over is asked."""
SETTLES_WITHIN_MS: Final = 200
"""Milliseconds for which a replica is waited for that is to have what was written."""
PAUSES: Final = (0.02, 0.5)
"""Seconds until a shard is asked again that was lost, at first and at most."""


class ReadingClient(OneConnectionClient):
    """Sends a command and leaves its reply for later: `execute_command` returns nothing."""

    def __init__(self, pool: OneConnectionPool, address: Address) -> None:
        super().__init__(connection_pool=pool)
        self.address = address
        self.asked: tuple[str, dict[str, Any]] | None = None
        """The command whose reply is awaited."""
        self.since = 0.0

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send it."""
        pool: Any = self.connection_pool
        self.drop()
        pool.get_connection().send_command(*args)
        self.asked, self.since = (args[0], options), time.monotonic()

    xread = redis.Redis.xread  # of which nothing is awaited here, either

    def fileno(self) -> int:
        """Of its socket, while a reply is awaited."""
        pool: Any = self.connection_pool
        found = pool._one._sock
        if found is None:
            raise redis.exceptions.ConnectionError("the connection was ended")
        return int(found.fileno())

    def finish(self) -> Any:
        """The reply, which is about to come. Raises redis-py's exceptions."""
        assert self.asked is not None
        (name, options), self.asked = self.asked, None
        pool: Any = self.connection_pool
        try:
            return self.parse_response(pool._one, name, **options)  # type: ignore[no-untyped-call]
        except redis.exceptions.ResponseError:
            raise  # which was the reply
        except BaseException:
            pool.disconnect()
            raise

    def drop(self) -> None:
        """Await no reply any more; its connection is of no further use."""
        if self.asked is not None:
            self.asked = None
            self.connection_pool.disconnect()


class ClusterServers(Servers):
    """Connections to each node that is asked, and one for the blocking read of each shard.

    What is lost or has moved is an error that puts the slot map right: whoever tries again, as
    after a lost connection, is led to the right node.
    """

    fails_apart = True
    longest_block = 1.0

    def __init__(
        self, url: str, blocks_for: float, name: str, bounded: bool, answers_within: float
    ) -> None:
        known = Cluster.parse(url)
        self._slots = slot_map(url)
        self._within = min(answers_within, ANSWER_WITHIN)
        self._blocks_for = min(blocks_for, self.longest_block)
        self._options: dict[str, Any] = {
            **known.options,
            **connection_options(name, 0.0, self._within),
            "slots": self._slots,
            "note_silence": self._note_silence,
            "parser_class": BoundedClusterParser if bounded else ClusterParser,
        }
        self._class = TLSNodeConnection if known.tls else NodeConnection
        self._nodes: dict[Address, Server] = {}
        self._reads: dict[str, ReadingClient] = {}
        """Whose blocking reads are under way, or were, by shard's prefix."""
        self._lost: dict[str, tuple[int, float]] = {}
        """How often in succession a shard's read was lost, and when it is asked again."""
        self._silent: dict[Address, float] = {}
        """Nodes that let a command time out, and until when they are asked for nothing."""
        self._begin()

    @property
    def anywhere(self) -> Server:
        """A node that answers."""
        nodes = self._slots.nodes()
        for address in nodes:
            server = self._node(address)
            try:
                if not self._is_silent(address):
                    server.ping()
                    return server
            except (redis.exceptions.RedisError, OSError) as error:
                if not is_lost(error):
                    return server  # it answers: whoever asks more is told what it refuses
        return self._node(nodes[0])

    def for_key(self, key: str) -> Server:
        return self._node(self._owner(slot_of(key)))

    def for_shard(self, shard: ShardKeys) -> Server:
        return self._node(self._owner(shard.slot))

    def _owner(self, slot: int) -> Address:
        """Who serves a slot. Raises redis-py's exceptions, at once for one that is silent."""
        owner = self._slots.owner(slot)
        if self._is_silent(owner):
            former = owner
            self._slots.suspect(former)
            owner = self._slots.owner(slot)
            if owner == former:
                raise redis.exceptions.ConnectionError(f"{owner[0]}:{owner[1]} does not answer")
        return owner

    def _is_silent(self, address: Address) -> bool:
        until = self._silent.get(address)
        if until is None:
            return False
        if time.monotonic() >= until:
            if self._slots.answers(address):
                del self._silent[address]
                return False
            self._note_silence(address)
        return True

    def _note_silence(self, address: Address) -> None:
        self._silent[address] = time.monotonic() + SILENT_FOR

    def everywhere(self) -> list[Server]:
        return [self._node(address) for address in self._slots.nodes()]

    def at(self, address: Address) -> Server:
        """A node, a replica for example."""
        return self._node(address)

    def place(self, shard: ShardKeys) -> str:
        found = self._slots.known_owner(shard.slot)
        return "" if found is None else in_url(found)

    def settle(self, server: Server) -> None:
        if not server.wait(1, SETTLES_WITHIN_MS):
            logger.debug("no replica has what was written within %d ms", SETTLES_WITHIN_MS)

    def read_together(self, shards: Sequence[ShardKeys]) -> list[list[ShardKeys]]:
        return [[shard] for shard in shards]  # a blocking read is of one slot

    def read(
        self,
        shards: Sequence[ShardKeys],
        ask: Callable[[Server, Sequence[ShardKeys]], T],
        seconds: float,
        lost: Callable[[ShardKeys, Exception], None],
    ) -> Iterator[tuple[Sequence[ShardKeys], T]]:
        for shard in shards:
            if self._is_under_way(shard, lost) or self.is_away(shard):
                continue
            try:
                ask(cast(Server, self._reading(shard)), [shard])
            except (redis.exceptions.RedisError, OSError) as error:
                self._note_lost(shard, error, lost)
        awaited = {
            client.fileno(): shard
            for shard in shards
            if (client := self._reads.get(shard.prefix)) is not None and client.asked
        }
        if not awaited:
            time.sleep(min(seconds, PAUSES[0]))  # all are away
            return
        for shard in self._ready(awaited, seconds):
            client = self._reads[shard.prefix]
            try:
                found = client.finish()
            except (redis.exceptions.RedisError, OSError) as error:
                self._note_lost(shard, error, lost)
                continue
            self._lost.pop(shard.prefix, None)
            yield [shard], found

    def apart(
        self,
        shards: Sequence[ShardKeys],
        do: Callable[[Server], T],
        lost: Callable[[ShardKeys, Exception], None] | None = None,
    ) -> T | None:
        if any(map(self.is_away, shards)):
            return None
        try:
            found = do(self.for_shard(shards[0]))
        except (redis.exceptions.RedisError, OSError) as error:
            for shard in shards:
                self._note_lost(shard, error, lost)
            return None
        for shard in shards:
            self._lost.pop(shard.prefix, None)
        return found

    def together(
        self,
        asks: Mapping[ShardKeys, Callable[[Pipeline], object]],
        lost: Callable[[ShardKeys, Exception], None] | None = None,
    ) -> dict[ShardKeys, list[Any]]:
        found: dict[ShardKeys, list[Any]] = {}
        sent: list[tuple[OwnWordsPipeline, list[ShardKeys], list[slice]]] = []
        try:
            for server, some in self._there([*asks], lost):
                pipeline, places = gathered(server, [asks[shard] for shard in some])
                own = cast(OwnWordsPipeline, pipeline)
                with self._losing(some, lost):
                    own.send()
                    sent.append((own, some, places))
            while sent:
                own, some, places = sent.pop(0)
                answers: list[Any] = []
                with self._losing(some, lost):
                    answers = own.answers(REFUSALS)
                for shard, place in zip(some, places if answers else (), strict=False):
                    with self._losing([shard], lost):
                        found[shard] = accepted(answers[place])
                        self._lost.pop(shard.prefix, None)
        finally:
            for own, *_ in sent:
                own.drop()
        return found

    def _there(
        self,
        shards: Sequence[ShardKeys],
        lost: Callable[[ShardKeys, Exception], None] | None,
    ) -> list[tuple[Server, list[ShardKeys]]]:
        """Those that are not away, by the connection that they are reached by."""
        found: dict[int, tuple[Server, list[ShardKeys]]] = {}
        for shard in shards:
            if not self.is_away(shard):
                with self._losing([shard], lost):
                    server = self.for_shard(shard)
                    found.setdefault(id(server), (server, []))[1].append(shard)
        return list(found.values())

    @contextmanager
    def _losing(
        self,
        shards: Sequence[ShardKeys],
        lost: Callable[[ShardKeys, Exception], None] | None,
    ) -> Iterator[None]:
        """What goes wrong is noted of these shards."""
        try:
            yield
        except (redis.exceptions.RedisError, OSError) as error:
            for shard in shards:
                self._note_lost(shard, error, lost)

    def under_way(self, shard: ShardKeys) -> bool:
        """Whether a blocking read of this shard has yet to be answered."""
        client = self._reads.get(shard.prefix)
        return client is not None and client.asked is not None

    def forget(self, shards: Sequence[ShardKeys]) -> None:
        for shard in shards:
            client = self._reads.pop(shard.prefix, None)
            if client is not None:
                client.asked = None
                client.connection_pool.disconnect()
            self._lost.pop(shard.prefix, None)

    def _ready(self, awaited: dict[int, ShardKeys], seconds: float) -> list[ShardKeys]:
        poll = select.poll()
        for number in awaited:
            poll.register(number, select.POLLIN)
        return [awaited[number] for number, _ in poll.poll(max(0, seconds) * 1000)]

    def _is_under_way(self, shard: ShardKeys, lost: Callable[[ShardKeys, Exception], None]) -> bool:
        """Whether its read goes on. One at a node that serves the shard no longer, or that should
        have answered, is ended."""
        client = self._reads.get(shard.prefix)
        if client is None or client.asked is None:
            return False
        self._refuse_if_cut()
        late = time.monotonic() - client.since - self._blocks_for
        if late > self._within:
            self._slots.suspect(client.address)
            self._note_silence(client.address)
            error: Exception = redis.exceptions.TimeoutError(f"no answer for {late:.1f} s")
        else:
            try:
                if self._slots.owner(shard.slot) == client.address:
                    return True
                error = redis.exceptions.ConnectionError("another node serves it")
            except (redis.exceptions.RedisError, OSError) as found:
                error = found
        client.drop()
        self._note_lost(shard, error, lost)
        return False

    def may_return(self) -> bool:
        return self._slots.is_known

    def is_away(self, shard: ShardKeys) -> bool:
        now = time.monotonic()
        if now < self._lost.get(shard.prefix, (0, 0.0))[1]:
            return True
        if not self._silent:
            return False
        try:
            self._owner(shard.slot)
        except (redis.exceptions.RedisError, OSError):
            return True
        return False

    def _note_lost(
        self,
        shard: ShardKeys,
        error: Exception,
        lost: Callable[[ShardKeys, Exception], None] | None,
    ) -> None:
        """Leave a shard alone for a while. Raises `error` if it is not that it is away, or that its
        node is full, which takes nothing then: others are served meanwhile."""
        if not (is_lost(error) or is_full(error)) or self._is_cut:
            raise error
        times = self._lost.get(shard.prefix, (0, 0.0))[0]
        first, most = PAUSES
        moved = isinstance(error, SlotMoved) and not times  # two may name each other
        pause = 0.0 if moved else min(most, first * 2**times)
        again = time.monotonic() + pause * random.uniform(0.5, 1.0)
        self._lost[shard.prefix] = (min(times + 1, 16), again)
        logger.debug("shard %d is away: %s", shard.number, error)
        if lost is not None:
            lost(shard, error)

    def _reading(self, shard: ShardKeys) -> ReadingClient:
        self._refuse_if_cut()
        address = self._owner(shard.slot)
        client = self._reads.get(shard.prefix)
        if client is None or client.address != address:
            if client is not None:
                client.connection_pool.disconnect()
            client = self._reads[shard.prefix] = ReadingClient(
                self._pool(address, self._blocks_for), address
            )
        return client

    def _node(self, address: Address) -> Server:
        self._refuse_if_cut()
        server = self._nodes.get(address)
        if server is None:
            for former in [node for node in self._nodes if not self._slots.serves(node)]:
                self._nodes.pop(former).connection_pool.disconnect()
            client = OneConnectionClient(connection_pool=self._pool(address, 0.0))
            server = self._nodes[address] = cast(Server, client)
        return server

    def _pool(self, address: Address, blocks_for: float) -> OneConnectionPool:
        host, port = address
        options: dict[str, Any] = {**self._options, "socket_timeout": self._within + blocks_for}
        return OneConnectionPool(connection_class=self._class, host=host, port=port, **options)

    def _opened(self) -> Sequence[Server]:
        # Lists first: another thread may ask, which cuts.
        return [*list(self._nodes.values()), *cast(list[Server], list(self._reads.values()))]

    def renew(self) -> None:
        for client in self._reads.values():
            client.asked = None
        super().renew()

    def on_move(self, tell: Callable[[Address], None]) -> None:
        """Of a cluster each thread learns by itself: the map is all threads'."""

    def follow(self) -> None:
        """The map follows whatever is heard."""

    def go_to(self, primary: Address) -> None:
        """There is no one primary."""
