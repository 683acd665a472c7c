"""Moving with a pool to other shards or lanes, while the engine goes on with what it has."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import redis.exceptions

from lmpool.errors import LmpoolError, ServerUnreachable
from lmpool.keys import PoolKeys, ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.reasons import Reasons
from lmpool.server import is_lost
from lmpool.servers import Servers
from lmpool.worker.carrying import carry_over, end_lanes, enter, without
from lmpool.worker.engine_thread import spawn
from lmpool.worker.membership import OLD_KEYS_MS
from lmpool.worker.seat import Seat

if TYPE_CHECKING:
    from lmpool.worker.service import Service

logger = logging.getLogger(__name__)

LOOK_EVERY: Final = 0.1
"""Seconds between two looks whether what was begun in the former shards is published."""
PATIENCE: Final = 60.0
"""Seconds for which answers wait that cannot be written in a shard of before, which is away."""
CARRY_AFTER: Final = (0.0, 2.0, 5.0, 15.0, 30.0, 60.0)
"""Seconds after which what the pool left is taken along: other workers may leave it later, and the
last look empties what nobody serves."""
AWAY_PAUSE: Final = 5.0
"""Seconds until a shard that was away is looked at again, for as long as its keys live."""


class _Left:
    """A shard that the pool has left, or that has fewer lanes now, and when it is looked at."""

    def __init__(self, shard: ShardKeys) -> None:
        self.shard = shard
        self.due = self._since = time.monotonic()
        self._until = self._since + OLD_KEYS_MS / 1000
        self._looks = 0

    @property
    def is_last(self) -> bool:
        """Whether the next look is the last."""
        return self._looks == len(CARRY_AFTER) - 1

    def looked(self, found: bool) -> bool:
        """It was looked at, and found or away. Whether it is to be looked at again."""
        now = time.monotonic()
        if not found:
            self.due = now + AWAY_PAUSE
            return now < self._until
        if not self._looks:
            self._since = now  # it may have been away until then
        self._looks += 1
        if self._looks == len(CARRY_AFTER):
            return False
        self.due = self._since + CARRY_AFTER[self._looks]
        return True


def left_on_the_way(info: ModelInfo, keys: PoolKeys) -> Sequence[ShardKeys]:
    """What a pool left that lies so now; and its shards if it is back in them, as something may
    have been set aside there for others."""
    is_back = any(layout.shards == info.shards for layout in info.layouts)
    return [*(info.shard_keys(keys) if is_back else ()), *info.left_shards(keys)]


class Mover:
    """Takes a worker's seat elsewhere. A thread of its own, while there is something to do."""

    def __init__(self, service: Service, open_one: Callable[[], Servers]) -> None:
        self._service = service
        self._open = open_one
        self._lock = threading.Lock()
        self._called = threading.Event()
        self._wanted: ModelInfo | None = None
        self._former: list[Seat] = []
        self._left: dict[str, _Left] = {}
        """By the shards' prefixes."""
        self._brings = False
        """Whether adapters and the layout's name are to be brought."""
        self._bring_from = 0.0
        """When that is done next, on the monotonic clock."""
        self._not_brought = Reasons()
        """Why they could not be, as it was said."""
        self._thread: threading.Thread | None = None

    @property
    def former(self) -> Sequence[Seat]:
        """Seats that the worker still has jobs of, the oldest first."""
        return list(self._former)

    def tell(self, info: ModelInfo) -> None:
        """The pool is served so now. For any thread; returns at once."""
        if self._service.seat is None:
            return  # it has yet to join: the next heartbeat tells it again
        with self._lock:
            self._wanted = info
            self._start()

    def look_after(self, shards: Sequence[ShardKeys]) -> None:
        """The pool was in these shards, or lanes of them, before: some of their workers may have
        died meanwhile. Before it begins, or on its own thread."""
        self._left.update({shard.prefix: _Left(shard) for shard in shards})
        if self._left:
            with self._lock:
                self._start()

    def bring_later(self) -> None:
        """Shards have yet to come into the layout: they are brought what `bring` brings, here, as
        it may have to wait for one that is away. For any thread; told again until they have."""
        with self._lock:
            if time.monotonic() >= self._bring_from:
                self._brings = True
                self._start()

    def bring(self, servers: Servers) -> None:
        """Have adapters and the layout's name come to where the worker serves. For any thread, with
        its own connections; each reason that keeps it from that is said once."""
        now = self._service.seat
        assert now is not None
        try:
            enter(servers, self._service.keys, now.info)
        except (LmpoolError, redis.exceptions.RedisError, OSError) as error:
            if self._not_brought.is_new(error):
                logger.warning("adapters and the layout's name could not be brought: %s", error)
        else:
            self._not_brought.clear()

    def _start(self) -> None:
        self._called.set()
        if self._thread is None and not self._service.status.stopping.is_set():
            self._thread = spawn("mover", self._run, self._service.status)

    def join(self, seconds: float) -> None:
        """Wait until it has ended: the worker is told to stop."""
        self._called.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def _run(self) -> None:
        servers = self._open()
        try:
            while not self._service.status.stopping.is_set():
                self._called.clear()
                info, self._wanted = self._wanted, None
                if info is not None:
                    self._move(servers, info)
                self._leave_former(servers)
                self._carry(servers)
                with self._lock:
                    if not (self._wanted or self._former or self._left or self._brings):
                        self._thread = None
                        return
                self._called.wait(self._pause())
        finally:
            self._service.close_servers(servers)

    def _pause(self) -> float:
        """Seconds until there is something to do, unless it is called."""
        if self._former or not self._left:
            return LOOK_EVERY
        due = min(left.due for left in self._left.values())
        return max(LOOK_EVERY, due - time.monotonic())

    def _move(self, servers: Servers, info: ModelInfo) -> None:
        service = self._service
        before = service.seat
        if before is None or info.mark() == before.info.mark():
            return  # told again while it was moving
        began = time.monotonic()
        try:
            if not service.move(servers, info):
                return
        except (ServerUnreachable, LmpoolError, redis.exceptions.RedisError, OSError) as error:
            if not isinstance(error, LmpoolError) and not is_lost(error):
                raise
            logger.warning("moving to %d shards: trying again (%s)", info.shards, error)
            return  # the next heartbeat tells it again
        before.ended_at = time.monotonic()
        self._former.append(before)
        self.look_after(self._left_by(before))
        logger.info(
            "%s moved from %s to %s in %.1f s; %d jobs of before run",
            *(service.consumer, before.info.in_words(), info.in_words()),
            *(time.monotonic() - began, self._held(before)),
        )

    def _left_by(self, seat: Seat) -> Sequence[ShardKeys]:
        """What the pool left, as far as is known now that a seat has ended."""
        now = self._service.seat
        assert now is not None
        return [*without(seat.shards, now.shards), *left_on_the_way(now.info, self._service.keys)]

    def _leave_former(self, servers: Servers) -> None:
        """Leave those shards whose jobs are all published, or were let go."""
        now = self._service.seat
        assert now is not None
        for seat in self.former:
            gone = without(seat.shards, now.shards)
            reads = not (seat.join("intake", 0) and seat.join("recovery", 0))
            if reads or self._held(seat):
                if time.monotonic() - seat.ended_at > PATIENCE:
                    self._service.wait_no_longer(gone)
                continue
            try:
                seat.leave(servers, gone)  # its consumers, which held jobs before
            except (redis.exceptions.RedisError, OSError) as error:
                logger.debug("they end with their streams: %s", error)
            self._service.close_servers(*seat.opened)
            seat.opened.clear()
            self._former.remove(seat)
            self.look_after(self._left_by(seat))  # it counted until now

    def _held(self, seat: Seat) -> int:
        """How many jobs of a former seat this worker has: running, or to be written."""
        now = self._service.seat
        assert now is not None
        prefixes = tuple(f"{shard.prefix}:" for shard in without(seat.shards, now.shards))
        held = list(self._service.status.held)
        return sum(key.startswith(prefixes) for key, _ in held) if prefixes else 0

    def _carry(self, servers: Servers) -> None:
        """Take along what the pool left, as often as is due."""
        now = self._service.seat
        assert now is not None
        due = [left for left in self._left.values() if left.due <= time.monotonic()]
        if due or self._brings:
            self._brings = False
            self.bring(servers)
            self._bring_from = time.monotonic() + AWAY_PAUSE
        own = {shard.prefix: shard for shard in now.shards}
        for left in due:
            shard, last, found = left.shard, left.is_last, False
            try:
                given = carry_over(servers, shard, now.info, now.shards, empty=last)
                found = given is not None
                if shard.prefix in own:  # or the pool is back
                    found = end_lanes(servers, shard, own[shard.prefix], empty=last) and found
                self._follow(without(given or (), now.shards))
            except (redis.exceptions.RedisError, OSError) as error:
                logger.debug("what was left could not be taken along: %s", error)
            if not left.looked(found):
                del self._left[shard.prefix]

    def _follow(self, given: Sequence[ShardKeys]) -> None:
        """Look again after shards that the pool has left and that were given something: whoever
        had it was away for as long as they were looked after."""
        now = self._service.seat
        if given and now is not None:
            prefixes = {shard.prefix for shard in given}.difference(self._left)
            left = now.info.left_shards(self._service.keys)
            self.look_after([shard for shard in left if shard.prefix in prefixes])
