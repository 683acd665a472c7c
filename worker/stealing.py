"""Taking jobs of other workers' lanes that have waited long enough, so that no worker idles."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final

from lmpool.affinity import Waiting, steals
from lmpool.commands import Fields, Server, Value
from lmpool.keys import GROUP, JobStream, Priority, ShardKeys
from lmpool.scripts import script
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

Entry = tuple[bytes, Fields | None]


class Thief:
    """Looks at the waiting lanes of one shard. Owned by the intake's thread.

    An idle worker is called over a stream that all of them wait at: one of them gets the call,
    looks again when the lane is anyone's, and calls the next one when it leaves some.
    """

    def __init__(self, shard: ShardKeys, homes: Homes, consumer: str, status: WorkerStatus) -> None:
        self.shard = shard
        self._homes = homes
        self._consumer = consumer
        self._status = status
        self._calls: list[bytes] = []
        """Those that this worker follows."""
        self._due = math.inf
        self._looked = -math.inf
        self._vain = 0
        """Looks in succession that found nothing to take."""

    def called(self, calls: Sequence[Entry]) -> None:
        """Entries of the shard's `wake` came."""
        now = time.monotonic()
        if not self._calls:
            self._vain = 0
        for call, fields in calls:
            self._calls.append(call)
            at_once = fields is not None and fields.get(b"at_once") == b"1"
            self._due = min(self._due, now if at_once else now + self._status.patience())

    @property
    def is_called(self) -> bool:
        """Whether it is to look, now or later."""
        return bool(self._calls)

    def due_in(self, idle: bool) -> float:
        """Seconds until the next look: 0 when it is due."""
        idle = idle or not self._homes.has_others(self.shard)
        usual = self._looked + (IDLE_LOOK if idle else BUSY_LOOK)
        return max(0.0, min(self._due, usual) - time.monotonic())

    def pass_on(self, server: Server) -> None:
        """Let another follow the calls that came: this worker has jobs of its own."""
        self._look(server, self._status.patience(), "pass")

    def steal(
        self, server: Server, rooms: dict[Priority, int]
    ) -> list[tuple[JobStream, Sequence[Entry]]]:
        """Jobs of others' lanes, no more of each priority than there is room."""
        own = {stream.key for stream in self._homes.read(self.shard)}
        waiting = [
            (stream, lane)
            for stream, lane in self._look(
                server, self._status.patience(), "end" if self._vain >= VAIN_MOST else "on"
            )
            if stream.key not in own
        ]
        chosen: list[tuple[JobStream, int]] = []
        for priority, room in rooms.items():
            of_it = {lane: stream for stream, lane in waiting if stream.priority == priority}
            chosen += [(of_it[lane], n) for lane, n in steals(of_it, room, 0.0)]
        found = read_counts(server, self._consumer, chosen[:READ_MOST])
        self._status.stole(found)
        return found

    def waiting(self, server: Server) -> list[tuple[JobStream, Waiting]]:
        """All lanes that have jobs which nobody took, own ones too."""
        _, found = self._ask(server, 0.0, "list", [])
        return found

    def _look(self, server: Server, patience: float, does: str) -> list[tuple[JobStream, Waiting]]:
        """The lanes that are anyone's; what it does with the calls stands in `waiting.lua`."""
        soonest, found = self._ask(server, patience, does, self._calls)
        self._looked = now = time.monotonic()
        if found or does == "pass" or (does == "end" and soonest < 0):
            self._calls.clear()
        self._vain = 0 if found else self._vain + 1
        self._due = math.inf
        if self._calls or (soonest >= 0 and does != "pass"):
            pause = min(FOLLOW_MOST, self._status.patience() * 2**self._vain)
            self._due = now + max(soonest / 1000, pause)
        return found

    def _ask(
        self, server: Server, patience: float, does: str, calls: Sequence[bytes]
    ) -> tuple[int, list[tuple[JobStream, Waiting]]]:
        """Milliseconds until more lanes are anyone's, -1 if none waits, and those that are."""
        shard = self.shard
        arguments: list[Value] = [
            *(shard.prefix, GROUP, self._consumer, math.ceil(patience * 1000), does, shard.lanes),
            *calls,
        ]
        soonest, *found = script("waiting")(server, [shard.waiting, shard.wake], arguments)
        lanes = []
        for name, since, jobs in zip(found[::3], found[1::3], found[2::3], strict=True):
            priority: Priority = "batch" if name.startswith(b"b") else "interactive"
            lane = int(name.lstrip(b"b"))
            if lane < shard.lanes:
                stream = shard.stream(priority, lane)
                lanes.append((stream, Waiting(lane, since / 1000, jobs)))
        return soonest, lanes


def read_counts(
    server: Server, consumer: str, counts: Sequence[tuple[JobStream, int]]
) -> list[tuple[JobStream, Sequence[Entry]]]:
    """Read so many new entries of each stream, together."""
    if not counts:
        return []
    with server.pipeline(transaction=False) as pipeline:
        for stream, count in counts:
            pipeline.xreadgroup(GROUP, consumer, {stream.key: ">"}, count=count)
        answers = pipeline.execute(raise_on_error=False)  # it would word the errors anew
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return [
        (stream, answer[0][1])
        for (stream, _), answer in zip(counts, answers, strict=True)
        if answer
    ]
