"""The bound of what a pool stores: how much room there is, and what makes some."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import redis.exceptions

from lmpool.commands import Server, Value
from lmpool.keys import COUNTERS_TTL_MS, ShardKeys
from lmpool.result_memory import room
from lmpool.scripts import script
from lmpool.servers import Servers
from lmpool.worker.transaction import Call

logger = logging.getLogger(__name__)

LOOK_EVERY: Final = 0.5
"""Seconds between two looks at the server's memory, which others fill too."""
READER_PATIENCE: Final = 5.0
"""Seconds for which a client that takes none of its notices is still expected to read."""
LONGEST_WAIT_MS: Final = 30_000
"""Milliseconds for which a result waits for whoever was told of it, however they get on."""
READER_MEMORY: Final = 3600.0
"""Seconds for which it is known of a client that it takes nothing: nobody waits for it again."""
READERS_MOST: Final = 256
UNLINK_MOST: Final = 4096
LOOK_MOST: Final = 1024
PAUSES: Final = (0.002, 0.05)
"""Seconds between two looks for room while readers catch up, from and to."""


class ResultStore:
    """Keeps what the pool stores within its bound. Owned by the thread that writes results.

    The account, a stream on the server, is all workers' in common: nothing of it is lost with one.
    """

    def __init__(
        self,
        servers: Servers,
        shards: Sequence[ShardKeys],
        most: int | None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._servers = servers
        self._shards = shards
        self._whole = most
        self._most = None if most is None else max(1, most // max(1, len(shards)))
        self._stopping = stopping
        self._due = 0.0
        self._held: dict[str, int] = {}
        self._bounds: dict[str, int] = {}
        """Bytes that each shard may hold, by prefix; none where there is no bound."""
        self._crowded: set[str] = set()
        """Shards in which only what is about to be read was left."""
        self._readers: dict[tuple[str, bytes], tuple[bytes, float]] = {}
        """Clients that were waited for, by shard's prefix and name: the first notice that they have
        not taken, since when."""

    def moved(self, shards: Sequence[ShardKeys]) -> ResultStore:
        """The same bound, of these shards."""
        return ResultStore(self._servers, shards, self._whole, self._stopping)

    def look(self, *, shrink: bool = True) -> None:
        """See how much room the server has, and make some where others need it.

        Raises redis-py's exceptions.
        """
        self._due = time.monotonic() + LOOK_EVERY
        for _, shards in self._servers.by_connection(self._shards):
            there = [
                shard
                for shard in shards
                if self._servers.apart([shard], partial(self._forget_ended, shard)) is not None
            ]
            if there:
                self._servers.apart(there[:1], partial(self._look_at, there, shrink))

    def _forget_ended(self, shard: ShardKeys, server: Server) -> int:
        return self._evict(shard, None)

    def _look_at(self, shards: Sequence[ShardKeys], shrink: bool, server: Server) -> None:
        """The same of what lies on one server."""
        held = sum(self._held[shard.prefix] for shard in shards)
        try:
            left = room(server.info("memory"), held)
        except redis.exceptions.ResponseError as error:
            logger.debug("the server does not show its memory: %s", error)
            left = None
        for shard in shards:
            mine = self._held[shard.prefix]
            bound = self._most
            if left is not None:
                share = left / len(shards) if left > 0 else left * mine / max(1, held)
                bound = max(0, min(mine + int(share), bound or mine + int(share)))
            if bound is None:
                self._bounds.pop(shard.prefix, None)
                continue
            self._bounds[shard.prefix] = bound
            if shrink and mine > bound:
                self._evict(shard, bound)

    def look_now_and_then(self) -> None:
        """The same where it is due; a server that does not answer is looked at later."""
        if time.monotonic() >= self._due:
            try:
                with self._servers.in_step():
                    self.look()
            except (redis.exceptions.RedisError, OSError) as error:
                logger.debug("the server's memory cannot be looked at: %s", error)

    def has_room(self, shard: ShardKeys, size: int) -> bool:
        """Whether `size` bytes may be written with nothing before them."""
        target = self._target(shard, size)
        fits = target is None or self._held.get(shard.prefix, 0) <= target
        return fits and time.monotonic() < self._due

    def before_writing(self, shard: ShardKeys, size: int) -> Call | None:
        """What is to be called together with writing `size` bytes, so that they have room.

        Where only what clients are about to read is left, waits until they have read some.
        """
        self.look_now_and_then()
        while True:
            target = self._target(shard, size)
            if target is None or self._held.get(shard.prefix, 0) <= target:
                self._crowded.discard(shard.prefix)
                return None
            if shard.prefix not in self._crowded or self._stopping():
                return self._call(shard, target)
            self._wait_for_readers(shard, size)

    def evicted(self, shard: ShardKeys, answer: Sequence[Any], size: int) -> None:
        """Take what that call answered."""
        held = self._take(shard, answer)
        target = self._target(shard, size)
        if target is not None and held > target:
            self._note_crowd(shard, answer)

    def holds(self, shard: ShardKeys, held: int) -> None:
        """So many bytes a shard's account has."""
        self._held[shard.prefix] = held

    def bound(self, shard: ShardKeys) -> int | None:
        """How many bytes a shard may hold, as was last seen; None where there is no bound."""
        return self._bounds.get(shard.prefix)

    def relieve(self, shard: ShardKeys, size: int) -> bool:
        """The server has no memory for `size` bytes: free some. Whether there was any to free.

        Raises redis-py's exceptions.
        """
        self.look(shrink=False)
        held = self._evict(shard, None)
        bound = min(held - size, self._bounds.get(shard.prefix, held) - size)
        return self._evict(shard, max(0, min(bound, held - held // 16))) < held

    def free(self, shard: ShardKeys) -> None:
        """Unlink what a shard holds that nobody serves any more, but for what somebody is about to
        read. Raises redis-py's exceptions."""
        self._evict(shard, 0)

    def _target(self, shard: ShardKeys, size: int) -> int | None:
        bound = self.bound(shard)
        return None if bound is None else max(0, bound - size)

    def _wait_for_readers(self, shard: ShardKeys, size: int) -> None:
        pause, longest = PAUSES
        while not self._stopping():
            target = self._target(shard, size)
            if target is None:  # there is no bound any more
                self._crowded.discard(shard.prefix)
                return
            before = self._held.get(shard.prefix)
            held = self._evict(shard, target)
            if shard.prefix not in self._crowded:
                return
            if held == before:
                time.sleep(pause)
                pause = min(longest, 2 * pause)
            self.look_now_and_then()

    def _evict(self, shard: ShardKeys, target: int | None) -> int:
        """Unlink the oldest until `target` bytes are held, and forget what ended by itself. Without
        a target only that. Returns the bytes that are held."""
        while True:
            before = self._held.get(shard.prefix)
            call = self._call(shard, target)
            answer = call.script(self._servers.for_shard(shard), call.keys, call.arguments)
            held = self._take(shard, answer)
            if target is not None and held <= target:
                self._crowded.discard(shard.prefix)
                return held
            if held == before:
                if target is not None:
                    self._note_crowd(shard, answer)
                return held

    def _note_crowd(self, shard: ShardKeys, answer: Sequence[Any]) -> None:
        if len(answer) > 2:
            self._crowded.add(shard.prefix)
        else:
            self._crowded.discard(shard.prefix)

    def _call(self, shard: ShardKeys, target: int | None) -> Call:
        arguments: list[Value] = [
            shard.prefix,
            COUNTERS_TTL_MS,
            (1 << 53) if target is None else target,
            UNLINK_MOST,
            LOOK_MOST,
            LONGEST_WAIT_MS,
        ]
        late = time.monotonic() - READER_PATIENCE
        for (prefix, client), (first, since) in self._readers.items():
            if prefix == shard.prefix and since < late:
                arguments += (client, first)
        return Call(script("evict"), [shard.account], arguments)

    def _take(self, shard: ShardKeys, answer: Sequence[Any]) -> int:
        held = self._held[shard.prefix] = int(answer[0])
        now = time.monotonic()
        for client, first in zip(answer[2::2], answer[3::2], strict=True):
            reader = (shard.prefix, client)
            if self._readers.get(reader, (None,))[0] != first:
                self._readers.pop(reader, None)
                self._readers[reader] = (first, now)
        while self._readers:  # they stand in the order of their times
            oldest, (_, since) = next(iter(self._readers.items()))
            if len(self._readers) <= READERS_MOST and since > now - READER_MEMORY:
                break
            del self._readers[oldest]
        return held
