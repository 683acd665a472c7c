"""From a shard to the server that holds it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, Final, NoReturn

import redis.exceptions

from lmpool.commands import Server
from lmpool.errors import LmpoolError
from lmpool.keys import ShardKeys
from lmpool.primary_pool import Address, PrimaryPool
from lmpool.server import ANSWER_TIMEOUT, NONSENSE, open_server

logger = logging.getLogger(__name__)

NONSENSE_MOST: Final = 5
"""Answers in succession that may make no sense."""


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
        self._servers._end_step(error)


class Servers:
    """One thread's connections to the servers of a pool; each connects at its first command.

    `for_shard` is the only way from a shard to a connection: today every shard lies on one server.
    """

    def __init__(self, open_one: Callable[[], Server]) -> None:
        self._server = open_one()
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
    def pool(self) -> Server:
        """Where the keys lie that belong to the pool and to no shard."""
        return self._connected()

    def for_shard(self, shard: ShardKeys) -> Server:
        """Where a shard lies."""
        return self._connected()

    def _connected(self) -> Server:
        if self._is_cut:
            _no_server()
        if self._is_left:
            self._is_left = False
            self.renew()
        return self._server

    def by_connection(self, shards: Sequence[ShardKeys]) -> list[tuple[Server, list[ShardKeys]]]:
        """The shards that one blocking read covers, by the connection that it uses."""
        if len(shards) == 1:
            return [(self.for_shard(shards[0]), [*shards])]
        found: dict[int, tuple[Server, list[ShardKeys]]] = {}
        for shard in shards:
            server = self.for_shard(shard)
            found.setdefault(id(server), (server, []))[1].append(shard)
        return list(found.values())

    def in_step(self) -> AbstractContextManager[None]:
        """Take answers that make no sense for those of a connection that is out of step: end it.

        Raises redis-py's `InvalidResponse` for what they led to, which is a reason to try again;
        what happens again and again is no server's doing, and is raised as it is.
        """
        return self._step

    def _end_step(self, error: BaseException | None) -> None:
        self._steps -= 1
        if error is None:
            if not self._steps:
                self._nonsense = 0
        # Some of ours are a ValueError, too.
        elif isinstance(error, NONSENSE) and not isinstance(error, LmpoolError):
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
        pool: Any = self._server.connection_pool
        for connection in [*pool._in_use_connections, *pool._available_connections]:
            if (found := connection._sock) is not None:
                with suppress(OSError):  # it is at its end already
                    socket.socket.shutdown(found, socket.SHUT_RDWR)  # TLS's state is its thread's

    def renew(self) -> None:
        """End every connection; the next command makes another. For the thread whose these are."""
        self._server.connection_pool.disconnect()

    def close(self) -> None:
        """Close every connection."""
        self._server.close()
        self._server.connection_pool.disconnect()


def _no_server() -> NoReturn:
    raise redis.exceptions.ConnectionError("the connection was cut")
