"""From a shard to the server that holds it."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, ClassVar, Final, TypeVar

import redis.exceptions

from lmpool.address import Address, is_cluster
from lmpool.commands import Pipeline, Server
from lmpool.connections import OneConnectionClient
from lmpool.errors import LmpoolError
from lmpool.keys import ShardKeys
from lmpool.primary_pool import PrimaryPool
from lmpool.server import ANSWER_TIMEOUT, NONSENSE, open_server

logger = logging.getLogger(__name__)

T = TypeVar("T")

NONSENSE_MOST: Final = 5
"""Answers in succession that may make no sense."""


def gathered(
    server: Server, asks: Sequence[Callable[[Pipeline], object]]
) -> tuple[Pipeline, list[slice]]:
    """The commands of all of them in one pipeline, and where the answers to each are."""
    pipeline = server.pipeline(transaction=False)
    places: list[slice] = []
    for ask in asks:
        began = len(pipeline)
        ask(pipeline)
        places.append(slice(began, len(pipeline)))
    return pipeline, places


def accepted(answers: list[Any]) -> list[Any]:
    """The answers. Raises the first error that is not about a script which the server forgot."""
    for answer in answers:
        if isinstance(answer, Exception) and not isinstance(answer, redis.exceptions.NoScriptError):
            raise answer
    return answers


class _Step:
    """`Servers.in_step`, which every prompt goes through: a generator would cost several times as
    much."""

    __slots__ = ("_servers",)

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    def __enter__(self) -> None:
        self._servers._steps += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        servers = self._servers
        servers._steps -= 1
        if error is not None:
            servers._fail_step(error)
        elif not servers._steps:
            servers._nonsense = 0


class Servers:
    """One thread's connections to the servers of a pool; each connects at its first command.

    `for_shard` is the only way from a shard to a connection. Here every shard lies on one server;
    see `lmpool.cluster_servers` for more of them.
    """

    fails_apart: ClassVar[bool] = False
    """Whether one shard may be away while others are served."""
    longest_block: ClassVar[float] = math.inf
    """Seconds that a blocking read may wait."""

    def __init__(self, open_one: Callable[[], Server]) -> None:
        self._server = open_one()
        self._begin()

    def _begin(self) -> None:
        self._is_cut = False
        self._is_left = False
        self._nonsense = 0
        """How many answers in succession made no sense."""
        self._steps = 0
        """Of `in_step`, one within another: the outermost one ends a succession."""
        self._step = _Step(self)

    @classmethod
    def of_url(
        cls,
        url: str,
        *,
        blocks_for: float = 0.0,
        name: str = "lmpool",
        bounded: bool = False,
        answers_within: float = ANSWER_TIMEOUT,
    ) -> Servers:
        """Those of `url`; see `open_server`."""
        if is_cluster(url):
            from lmpool.cluster_servers import ClusterServers

            return ClusterServers(url, blocks_for, name, bounded, answers_within)
        return cls(
            lambda: open_server(
                url,
                blocks_for=blocks_for,
                name=name,
                bounded=bounded,
                answers_within=answers_within,
            )
        )

    @property
    def anywhere(self) -> Server:
        """Any server, for what is about no key."""
        return self._connected()

    def everywhere(self) -> list[Server]:
        """Every server that keys lie on."""
        return [self._connected()]

    def for_key(self, key: str) -> Server:
        """Where a key lies that belongs to the pool and to no shard."""
        return self._connected()

    def for_shard(self, shard: ShardKeys) -> Server:
        """Where a shard lies."""
        return self._connected()

    def at_hand(self, shard: ShardKeys) -> OneConnectionClient | None:
        """Where a shard lies, for another thread than the one whose these are, which rests; None
        where that would have to be looked for."""
        if self.fails_apart or self._is_cut or self._is_left:
            return None
        server: object = self._server
        return server if isinstance(server, OneConnectionClient) else None

    def _connected(self) -> Server:
        if self._is_cut:
            self._refuse_if_cut()
        if self._is_left:
            self._is_left = False
            self.renew()
        return self._server

    def _refuse_if_cut(self) -> None:
        if self._is_cut:
            raise redis.exceptions.ConnectionError("the connection was cut")

    def settle(self, server: Server) -> None:
        """Wait until what this thread wrote there last survives a failover, where a failover loses
        writes: for what nobody would write again. Not for long, and in vain without replicas.

        Raises redis-py's exceptions where the server is lost.
        """

    def place(self, shard: ShardKeys) -> str:
        """Where a shard lies, as ``host:port``, as far as is known; '' for one server, which a URL
        says."""
        return ""

    def by_connection(self, shards: Sequence[ShardKeys]) -> list[tuple[Server, list[ShardKeys]]]:
        """The shards by the connection that they are reached by."""
        if len(shards) == 1:
            return [(self.for_shard(shards[0]), [*shards])]
        found: dict[int, tuple[Server, list[ShardKeys]]] = {}
        for shard in shards:
            server = self.for_shard(shard)
            found.setdefault(id(server), (server, []))[1].append(shard)
        return list(found.values())

    def read_together(self, shards: Sequence[ShardKeys]) -> list[list[ShardKeys]]:
        """The shards by the blocking read that covers them."""
        return [some for _, some in self.by_connection(shards)]

    def read(
        self,
        shards: Sequence[ShardKeys],
        ask: Callable[[Server, Sequence[ShardKeys]], T],
        seconds: float,
        lost: Callable[[ShardKeys, Exception], None],
    ) -> Iterator[tuple[Sequence[ShardKeys], T]]:
        """What blocking reads of these shards bring, as it comes: each is one command that `ask`
        sends, and covers some of them.

        Where shards fail apart it waits for `seconds` at most until anything has come, and `lost`
        is told whose read failed. Raises redis-py's exceptions.
        """
        for server, some in self.by_connection(shards):
            yield some, ask(server, some)

    def apart(
        self,
        shards: Sequence[ShardKeys],
        do: Callable[[Server], T],
        lost: Callable[[ShardKeys, Exception], None] | None = None,
    ) -> T | None:
        """What `do` returns with the connection of these shards, which lie together.

        Where shards fail apart and these are away it is nothing, and `lost` is told of each: others
        are not kept waiting. Raises redis-py's exceptions.
        """
        return do(self.for_shard(shards[0]))

    def together(
        self,
        asks: Mapping[ShardKeys, Callable[[Pipeline], object]],
        lost: Callable[[ShardKeys, Exception], None] | None = None,
    ) -> dict[ShardKeys, list[Any]]:
        """What is answered to the commands that each of `asks` puts into a pipeline, by shard: all
        of them are waited for once, wherever the shards lie.

        Of the servers' refusals a script's that is not known is among the answers. As with `apart`
        the others are raised, or `lost` is told, and that shard's answers are left out.
        """
        found: dict[ShardKeys, list[Any]] = {}
        for server, some in self.by_connection([*asks]):
            pipeline, places = gathered(server, [asks[shard] for shard in some])
            answers = pipeline.execute(raise_on_error=False)
            for shard, place in zip(some, places, strict=True):
                found[shard] = accepted(answers[place])
        return found

    def may_return(self) -> bool:
        """Whether a server that is away was there, and others are that may take its place."""
        return False

    def is_away(self, shard: ShardKeys) -> bool:
        """Whether a shard was lost a moment ago and is not to be asked again yet."""
        return False

    def under_way(self, shard: ShardKeys) -> bool:
        """Whether a blocking read of this shard has yet to be answered."""
        return False

    def forget(self, shards: Sequence[ShardKeys]) -> None:
        """End the blocking reads of shards that are read no more; for the thread that reads."""

    def in_step(self) -> AbstractContextManager[None]:
        """Take answers that make no sense for those of a connection that is out of step: end it.

        Raises redis-py's `InvalidResponse` for what they led to, which is a reason to try again;
        what happens again and again is no server's doing, and is raised as it is.
        """
        return self._step

    def _fail_step(self, error: BaseException) -> None:
        # Some of ours are a ValueError, too.
        if isinstance(error, NONSENSE) and not isinstance(error, LmpoolError):
            self._nonsense += 1
            if self._nonsense > NONSENSE_MOST:
                return
            self.renew()
            logger.debug("an answer of the server made no sense", exc_info=error)
            raise redis.exceptions.InvalidResponse(
                f"an answer made no sense ({type(error).__name__}: {error})"
            ) from None

    def on_move(self, tell: Callable[[Address], None]) -> None:
        """Have `tell` told, on this thread, that the Sentinels named another primary, whether
        `follow` or a connection made anew found it: who belongs together goes there together."""
        pool = self._server.connection_pool
        if isinstance(pool, PrimaryPool):
            pool.on_move = tell

    def follow(self) -> None:
        """Leave a primary that the Sentinels, if there are any, have replaced.

        It may go on for ten seconds as if it still were one, and all that it is told is lost.
        Raises redis-py's exceptions where no Sentinel names a primary.
        """
        pool = self._server.connection_pool
        if isinstance(pool, PrimaryPool) and pool.master_address is not None:
            pool.get_master_address()  # type: ignore[no-untyped-call]  # ends connections to it

    def go_to(self, primary: Address) -> None:
        """Have the thread whose these are connect to `primary` before its next command, unless it
        knows that one. For any thread.

        A read under way ends with an error: who was replaced may never answer.
        """
        pool = self._server.connection_pool
        if isinstance(pool, PrimaryPool) and not pool.knows(primary):
            self._is_left = True
            self._interrupt()

    def cut(self) -> None:
        """End reads that may be blocked on connections that will never answer, and connect no more.

        Whoever reads gets an error, of redis-py or of what it stumbles over.
        """
        self._is_cut = True
        self._interrupt()

    def _interrupt(self) -> None:
        """End what another thread waits for. The sockets are closed by that thread alone: their
        numbers may be others' at once, and a read about to begin would take what these are sent."""
        for server in self._opened():
            pool: Any = server.connection_pool
            for connection in [*pool._in_use_connections, *pool._available_connections]:
                if (found := connection._sock) is not None:
                    with suppress(OSError):  # it is at its end already
                        # TLS's state is its thread's.
                        socket.socket.shutdown(found, socket.SHUT_RDWR)

    def renew(self) -> None:
        """End every connection; the next command makes another. For the thread whose these are."""
        for server in self._opened():
            server.connection_pool.disconnect()

    def close(self) -> None:
        """Close every connection."""
        for server in self._opened():
            server.close()
            server.connection_pool.disconnect()

    def _opened(self) -> Sequence[Server]:
        """Every connection that there is."""
        return (self._server,)
