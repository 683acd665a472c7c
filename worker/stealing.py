"""Taking jobs of other workers' lanes that have waited long enough, so that no worker idles."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import redis.exceptions

from lmpool.affinity import Waiting, steals
from lmpool.commands import NewEntry, Pipeline, Server, Value, fields_of
from lmpool.keys import GROUP, JobStream, Priority, ShardKeys
from lmpool.scripts import script
from lmpool.servers import Servers
from lmpool.worker.homes import Homes
from lmpool.worker.status import WorkerStatus

BUSY_LOOK: Final = 0.02
"""Seconds between two looks of a worker that nobody has called, while its engine is at work."""
IDLE_LOOK: Final = 1.0
"""The same while it is idle, as a call may be lost with whom it reached; and of one that has all
lanes in use, as others may have been."""
FOLLOW_MOST: Final = 0.02
"""The same while it follows a call, and finds nothing again and again."""
VAIN_MOST: Final = 3
"""Looks in vain, in succession, with which a call ends where nothing waits."""
READ_MOST: Final = 64
"""Lanes that are read together."""

Lost: TypeAlias = Callable[[ShardKeys, Exception], None]
Does: TypeAlias = Literal["on", "end", "pass", "list"]
"""See `waiting.lua`."""


class Thief:
    """What a worker knows of the waiting lanes of one shard. Owned by the intake's thread.

    An idle worker is called over a stream that all of them wait at: one of them gets the call,
    looks again when the lane is anyone's, and calls the next one when it leaves some.
    """

    def __init__(self, shard: ShardKeys, homes: Homes, consumer: str, status: WorkerStatus) -> None:
        self.shard = shard
        self.homes = homes
        self.consumer = consumer
        self._status = status
        self._calls: list[bytes] = []
        """Those that this worker follows."""
        self._due = math.inf
        self._looked = -math.inf
        self._vain = 0
        """Looks in succession that found nothing to take."""

    def called(self, calls: Sequence[NewEntry]) -> None:
        """Entries of the shard's `wake` came."""
        now = time.monotonic()
        if not self._calls:
            self._vain = 0
        for call, fields in calls:
            self._calls.append(call)
            at_once = fields is not None and fields_of(fields).get(b"at_once") == b"1"
            self._due = min(self._due, now if at_once else now + self._status.patience())

    @property
    def is_called(self) -> bool:
        """Whether it is to look, now or later."""
        return bool(self._calls)

    def due_in(self, idle: bool) -> float:
        """Seconds until the next look: 0 when it is due."""
        idle = idle or not self.homes.has_others(self.shard)
        usual = self._looked + (IDLE_LOOK if idle else BUSY_LOOK)
        return max(0.0, min(self._due, usual) - time.monotonic())

    @property
    def seeks(self) -> Does:
        """How it looks for something to take."""
        return "end" if self._vain >= VAIN_MOST else "on"

    @property
    def keys(self) -> list[str]:
        """What `waiting.lua` reads."""
        return [self.shard.waiting, self.shard.wake]

    def arguments(self, does: Does) -> list[Value]:
        """What `waiting.lua` is told."""
        patience, calls = 0.0, self._calls
        if does == "list":
            calls = []
        else:
            patience = self._status.patience()
        shard, ms = self.shard, math.ceil(patience * 1000)
        return [shard.prefix, GROUP, self.consumer, ms, does, shard.lanes, *calls]

    def told(self, does: Does, answer: Sequence[Any]) -> list[tuple[JobStream, Waiting]]:
        """The lanes of an answer, and what follows from it for the calls."""
        shard = self.shard
        soonest, *found = answer
        lanes = []
        for name, since, jobs in zip(found[::3], found[1::3], found[2::3], strict=True):
            priority: Priority = "batch" if name.startswith(b"b") else "interactive"
            lane = int(name.lstrip(b"b"))
            if lane < shard.lanes:
                stream = shard.stream(priority, lane)
                lanes.append((stream, Waiting(lane, since / 1000, jobs)))
        if does != "list":
            self._looked_for(does, soonest, bool(lanes))
        return lanes

    def _looked_for(self, does: Does, soonest: int, found: bool) -> None:
        """`soonest` are the milliseconds until more lanes are anyone's, -1 if none waits."""
        self._looked = now = time.monotonic()
        if found or does == "pass" or (does == "end" and soonest < 0):
            self._calls.clear()
        self._vain = 0 if found else self._vain + 1
        self._due = math.inf
        if self._calls or (soonest >= 0 and does != "pass"):
            pause = min(FOLLOW_MOST, self._status.patience() * 2**self._vain)
            self._due = now + max(soonest / 1000, pause)


def look(
    servers: Servers, thieves: Iterable[Thief], does: Does | None, lost: Lost
) -> list[tuple[JobStream, Waiting]]:
    """The lanes of all their shards that are anyone's, `seeks` where nothing is said; with ``list``
    all lanes that have jobs which nobody took, own ones too."""
    asked: dict[ShardKeys, tuple[Thief, Does]] = {
        thief.shard: (thief, does or thief.seeks) for thief in thieves
    }

    def ask(thief: Thief, does: Does, pipeline: Pipeline) -> None:
        keys, arguments = thief.keys, thief.arguments(does)
        pipeline.evalsha(script("waiting").sha, len(keys), *keys, *arguments)

    def ask_whole(thief: Thief, does: Does, server: Server) -> Any:
        return script("waiting")(server, thief.keys, thief.arguments(does))

    asks = {shard: partial(ask, *of) for shard, of in asked.items()}
    found: list[tuple[JobStream, Waiting]] = []
    for shard, (answer,) in servers.together(asks, lost).items():
        if isinstance(answer, redis.exceptions.NoScriptError):
            answer = servers.apart([shard], partial(ask_whole, *asked[shard]), lost)
        if answer is not None:
            thief, done = asked[shard]
            found += thief.told(done, answer)
    return found


def steal(
    servers: Servers, thieves: Sequence[Thief], rooms: Mapping[Priority, int], lost: Lost
) -> list[tuple[JobStream, Sequence[NewEntry]]]:
    """Jobs of others' lanes, no more of each priority than there is room."""
    own = {stream.key for thief in thieves for stream in thief.homes.read(thief.shard)}
    waiting = [each for each in look(servers, thieves, None, lost) if each[0].key not in own]
    chosen: list[tuple[JobStream, int]] = []
    for priority, room in rooms.items():
        # Of two shards they may be alike.
        of_it = {id(lane): stream for stream, lane in waiting if stream.priority == priority}
        lanes = [lane for _, lane in waiting if id(lane) in of_it]
        chosen += [(of_it[id(lane)], count) for lane, count in steals(lanes, room, 0.0)]
    return read_counts(servers, thieves[0].consumer, chosen[: READ_MOST * len(thieves)], lost)


def read_counts(
    servers: Servers, consumer: str, counts: Iterable[tuple[JobStream, int]], lost: Lost
) -> list[tuple[JobStream, Sequence[NewEntry]]]:
    """Read so many new entries of each stream, together."""
    wanted: dict[ShardKeys, list[tuple[JobStream, int]]] = {}
    for stream, count in counts:
        wanted.setdefault(stream.shard, []).append((stream, count))

    def ask(some: Sequence[tuple[JobStream, int]], pipeline: Pipeline) -> None:
        for stream, count in some:
            pipeline.xreadgroup(GROUP, consumer, {stream.key: ">"}, count=count)

    asks = {shard: partial(ask, some) for shard, some in wanted.items()}
    return [
        (stream, answer[0][1])
        for shard, answers in servers.together(asks, lost).items()
        for (stream, _), answer in zip(wanted[shard], answers, strict=True)
        if answer
    ]
