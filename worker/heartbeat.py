"""The worker's sign of life, on a thread and a connection of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

import redis.exceptions

from lmpool.affinity import LANES_PER_WORKER
from lmpool.commands import Server, Value
from lmpool.errors import WireError
from lmpool.keys import COUNTERS_TTL_MS, GROUP, PoolKeys, ShardKeys
from lmpool.liveness import BEAT_MS, GAP_MS, LIFE_MS
from lmpool.model_info import ModelInfo, OfLaterRelease
from lmpool.reasons import Reasons
from lmpool.scripts import script
from lmpool.server import get_string, is_lost, is_wrong_type
from lmpool.servers import Servers
from lmpool.worker.homes import Homes
from lmpool.worker.mending import mend
from lmpool.worker.status import WorkerStatus
from lmpool.worker.tally import Tally

logger = logging.getLogger(__name__)

EVERY: Final = BEAT_MS / 1000
AGAIN: Final = EVERY / 4
"""Seconds after which a beat that failed is tried again."""
ANSWER_WITHIN: Final = 2.0
"""Seconds for which a beat waits for the server. The next primary must have one within a life, and
the last beat may have gone to a host that will never answer."""

ANOTHER: Final = 0
MINE_IN_OTHER_WORDS: Final = 2
NOTHING: Final = 3
"""What `serve.lua` found of the pool's model info, where it is not this worker's to the byte."""


class Heartbeat:
    """Renews the heartbeat at a third of its life, whatever the engine and event loop do."""

    def __init__(
        self,
        servers: Servers,
        shards: Sequence[ShardKeys],
        consumer: str,
        status: WorkerStatus,
        keys: PoolKeys,
        info: ModelInfo,
        homes: Homes | None = None,
        on_moved: Callable[[ModelInfo], None] = lambda info: None,
        tally: Tally | None = None,
    ) -> None:
        self._servers = servers
        self._homes = Homes(shards, consumer) if homes is None else homes
        self._shards = shards
        self._consumer = consumer
        self._status = status
        self._info = info
        self._pool = [keys.info, keys.serving]
        self._serves: list[Value] = [info.pack(), info.mark(), LIFE_MS]
        self._on_moved = on_moved
        self._tally = Tally(shards, status) if tally is None else tally
        self._joining = {shard.prefix for shard in shards}
        """Shards whose bounds this worker has yet to say."""
        self.expects: Sequence[str] = ()
        """Keys of the pool that are to be there, and that nobody else makes anew."""
        self._is_replaced = False
        """Whether the pool was last seen to serve another model."""
        self._lost_at: float | None = None
        """Since when that is not there."""

    def beat(self, servers: Servers) -> list[str]:
        """Renew once, publish the model info again where it is none, and mend what was damaged.

        Returns the keys that were, and those that are to be there and are not. Whether the pool has
        moved to other shards or lanes is told to `on_moved`, again and again.
        """
        value = self._status.heartbeat(self._homes.lanes())
        missing: list[str] = []
        for shard in self._shards:
            servers.apart([shard], partial(self._beat_in, shard, value))
        try:
            server = servers.for_key(self._pool[0])
            says_first = int(self._says_first())
            served = script("serve")(server, self._pool, [*self._serves, says_first])
            if served == NOTHING:
                if self._lost_at is None:
                    self._lost_at = time.monotonic()
            else:
                self._lost_at = None
                if served == ANOTHER:
                    self._compare(server)
                else:
                    self._is_replaced = False
                    if served == MINE_IN_OTHER_WORDS:
                        self._mend_info(server)
                    missing += [
                        key for key in self.expects if not _holds(servers.for_key(key), key)
                    ]
        except (redis.exceptions.RedisError, OSError) as error:
            if not (servers.fails_apart and is_lost(error)):
                raise
            logger.debug("what is served could not be said: %s", error)
        self._status.metrics.beat_at = time.monotonic()
        return missing + mend(servers, self._shards, self._info, self._homes, self._joining)

    def _says_first(self) -> bool:
        """Whether to say what the pool serves where nobody has: workers of a model that replaced
        ours say it within a life, or they are gone."""
        if not self._is_replaced:
            return True
        lost_at = self._lost_at
        return lost_at is not None and time.monotonic() - lost_at >= LIFE_MS / 1000

    def _mend_info(self, server: Server) -> None:
        """Publish the model info again where nobody can read what is there."""
        held = get_string(server, self._pool[0]) or b""
        try:
            ModelInfo.unpack(held)
        except OfLaterRelease:
            pass  # others can
        except WireError as error:
            logger.warning("the model info is published again: %s", error)
            mine, mark, life = self._serves
            script("replace")(server, self._pool, [held, mine, mark, mark, life])

    def _compare(self, server: Server) -> None:
        """See whether what the pool serves now is the same in another layout.

        Where ours follows that one, it is ours that counts: a server that was restored, or a worker
        of an older release, may have brought back what was.
        """
        held = get_string(server, self._pool[0])
        if held is None:  # it was another's a moment ago
            self._is_replaced = True
            return
        try:
            found = ModelInfo.unpack(held)
        except OfLaterRelease:
            self._is_replaced = True
            return
        except WireError:
            return
        # Who joined may have brought another placement, too.
        there = replace(
            self._info.laid_as(found), block_tokens=found.block_tokens, blocks=found.blocks
        )
        self._is_replaced = there.mark() != found.mark()
        if self._is_replaced:
            return
        server.pexpire(self._pool[1], LIFE_MS)  # it lives, and says so itself once it has moved
        if there.mark() == self._info.mark():
            return
        if found.follows(self._info) or not self._info.follows(found):
            self._on_moved(there)
            return
        serving = get_string(server, self._pool[1]) or b""
        mine, others = self._serves[0], self._serves[1:]
        script("replace")(server, self._pool, [held, mine, serving, *others])

    def _beat_in(self, shard: ShardKeys, value: bytes, server: Server) -> None:
        known = self._homes.change.get(shard.prefix, b"")
        change, used, *workers = script("alive")(
            server,
            [
                *(shard.stream().key, shard.alive(self._consumer), shard.steady),
                *(shard.workers, shard.bounds),
            ],
            [
                *(GROUP, self._consumer, value, LIFE_MS, GAP_MS, known),
                *(shard.lanes, LANES_PER_WORKER, COUNTERS_TTL_MS),
            ],
        )
        names = [name.decode("utf-8", "replace") for name in workers]
        self._homes.update(shard, change, used, names)

    def run(
        self,
        ended: threading.Event,
        on_damage: Callable[[list[str]], None] = lambda keys: None,
    ) -> None:
        """Renew until `ended` is set; `on_damage` is told which keys were made anew."""
        try:
            self._renew(ended, on_damage)
        finally:
            with suppress(redis.exceptions.RedisError, OSError):
                self._tally.add(self._servers)

    def _renew(self, ended: threading.Event, on_damage: Callable[[list[str]], None]) -> None:
        missed, reasons = False, Reasons()
        while not ended.wait(AGAIN if missed else EVERY):
            with suppress(redis.exceptions.RedisError, OSError):  # the Sentinels may be away
                self._servers.follow()
            try:
                with self._servers.in_step():
                    damaged = self.beat(self._servers)
                    self._tally.add(self._servers)
                missed = False
                reasons.clear()
                if damaged:
                    on_damage(damaged)
            except (redis.exceptions.RedisError, OSError) as error:
                if reasons.is_new(error):
                    logger.warning(
                        "the heartbeat, or what is mended and counted with it, could not be "
                        "written: %s",
                        error,
                    )
                missed = True
                self._lost_at = None  # others may have missed theirs, too


def _holds(server: Server, key: str) -> bool:
    """Whether a key has a string. Unlike EXISTS it counts as a use of the key, which is then not
    what a full server evicts first."""
    try:
        return server.strlen(key) > 0
    except redis.exceptions.ResponseError as error:
        if not is_wrong_type(error):
            raise
        return False
