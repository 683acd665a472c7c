"""Pulling jobs off the streams, and no more than will soon be run."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final, TypeAlias

import redis.exceptions

from lmpool.bell import Bell
from lmpool.clock import to_ms
from lmpool.commands import NewEntry, Pipeline, Server, Value
from lmpool.connections import CommandAhead
from lmpool.keys import (
    COUNTERS_TTL_MS,
    GROUP,
    PRIORITIES,
    JobStream,
    Priority,
    ShardKeys,
    streams,
)
from lmpool.reasons import Reasons
from lmpool.replies import REPLY_BYTES, ReplyTooLong
from lmpool.scripts import script
from lmpool.servers import Servers
from lmpool.wants import Digester
from lmpool.wire import MAX_JOB_BYTES, Job, JobReader
from lmpool.worker.batching import Batcher, Delivery
from lmpool.worker.by_stream import by_shard, counted, digest_and_entry, stream_of
from lmpool.worker.company import Company
from lmpool.worker.dead_letters import DEAD_MOST, DeadLetters
from lmpool.worker.holding import streams_held
from lmpool.worker.homes import Homes
from lmpool.worker.reading import job_in, read_jobs
from lmpool.worker.status import WorkerStatus
from lmpool.worker.stealing import FOLLOW_MOST, Thief, look, read_counts, steal

logger = logging.getLogger(__name__)

IDLE_BLOCK_MS: Final = 1000
"""How long an idle worker's read blocks; a worker told to stop notices after that at the latest."""
SHORT_WAIT: Final = 0.002
CLAIMS_LOOK: Final = 0.01
"""Seconds between two looks at what reads have claimed, while the engine is at work."""
AHEAD: Final = 0.02
"""Seconds, at least, before a batch's expected end that jobs are read which are known to wait."""
GIVE_BACK_AFTER: Final = 0.5
"""Seconds, at least, that a batch may take longer than expected before jobs are given back."""
ANSWERS_LATE: Final = 0.25
"""Seconds after its time for which a read of the engine's thread may be answered yet."""

FEW: Final = REPLY_BYTES // MAX_JOB_BYTES - 1
"""Entries that one reply holds whatever they are, once what is no job is taken off."""
MANY: Final = 1 << 20

_Found: TypeAlias = list[tuple[JobStream, Sequence[NewEntry]]]
_Raw: TypeAlias = Sequence[tuple[bytes, Sequence[NewEntry]]] | None


class _CalledAway(Exception):
    """The engine's thread has something else to do than to read on."""


class Intake:
    """Reads the job streams into the batcher. Owned by one thread, or, while that sleeps, by the
    engine's.

    A read blocks only while the engine is idle. While it computes, jobs are taken without
    blocking and about when the batch is expected to end; of a batch that goes on beyond that
    nobody knows when it will end, so what was taken for after it is given back: jobs that an idle
    worker could run do not wait in the hands of a busy one.
    """

    def __init__(
        self,
        servers: Servers,
        shards: Sequence[ShardKeys],
        consumer: str,
        batcher: Batcher,
        status: WorkerStatus,
        digester: Digester,
        dead_letters: DeadLetters,
        continuous: bool,
        restore: Callable[[Servers], None] = lambda servers: None,
        homes: Homes | None = None,
        ended: threading.Event | None = None,
    ) -> None:
        self._servers = servers
        self._shards = shards
        self._homes = Homes(shards, consumer) if homes is None else homes
        self._thieves = {
            shard.wake: Thief(shard, self._homes, consumer, status)
            for shard in shards
            if shard.lanes > 1
        }
        self._streams = {stream.key: stream for stream in streams(shards)}
        self._consumer = consumer
        self._batcher = batcher
        self._status = status
        self._ended = status.stopping if ended is None else ended
        self._digester = digester
        self._dead_letters = dead_letters
        self._continuous = continuous
        self._restore = restore
        self._last: dict[str, str] = {}
        """The last entry handed on, by stream: what is ours beyond it was never looked at."""
        self._unsure: set[str] = set()
        """Shards, by prefix, whose read failed, so that entries may be ours that never arrived."""
        self._too_long = False
        """Whether it failed as the entries were too long to be read at once."""
        self._most = MANY
        """Entries that a read may bring: few after one that was too long, then more and more."""
        self._more_wait = False
        """Whether the last read brought as many jobs as there was room for."""
        self._company = Company(batcher.timeout)
        self._reader = JobReader()
        self._came_whole = False
        """Whether the last read brought all that there was, which leaves at once."""
        self._ahead: CommandAhead | None = None
        """A read that the engine's thread has sent, and that is to be answered."""
        self._failure: Exception | None = None
        """What it met, for the intake's own thread."""

    def run(self) -> None:
        """Read until the worker stops, or has moved to other shards: until `ended` is set."""
        try:
            self._run()
        finally:
            if self._ahead is not None or any(map(self._servers.under_way, self._shards)):
                self._servers.renew()  # what these would claim nobody would run

    def _run(self) -> None:
        failures, reasons = 0, Reasons()
        group_is_gone = False
        while self._ahead is not None or not self._ended.is_set():
            try:
                if self._came_whole and self._may_lend():
                    self._batcher.lend(self, self._ended)
                self._came_whole = False
                if (failure := self._failure) is not None:
                    self._failure = None
                    raise failure
                if group_is_gone:
                    with self._servers.in_step():
                        self._restore(self._servers)
                        create_groups(self._servers, self._shards, self._consumer)
                    self._last.clear()
                    group_is_gone = False
                with self._servers.in_step():
                    self._turn()
                if failures:
                    failures = 0
                    reasons.clear()
            except (redis.exceptions.RedisError, OSError) as error:
                if self._ended.is_set():
                    return  # it was cut: what came with it is given back
                self._unsure.update(shard.prefix for shard in self._shards)
                self._too_long |= isinstance(error, ReplyTooLong)
                failures += 1
                if self._group_is_gone(error):
                    group_is_gone = True
                    if failures == 1:
                        continue
                if reasons.is_new(error):
                    logger.warning("jobs cannot be read: %s", error)
                self._ended.wait(min(2.0, 0.05 * 2 ** min(failures, 6)))

    def _may_lend(self) -> bool:
        """Whether the engine's thread may read what comes next: that will be a batch by itself, as
        far as can be told, and nothing else is to be done meanwhile."""
        if not (self._batcher.baton.is_accepted and self._company.is_missing) or self._continuous:
            return False
        if self._unsure or self._too_long or self._ahead is not None or len(self._shards) > 1:
            return False
        for thief in self._thieves.values():
            if thief.is_called or not thief.due_in(idle=True):
                return False
        server = self._servers.at_hand(self._shards[0])
        return server is not None and server.is_plain

    def read_for_engine(self, bell: Bell) -> bool:
        """Read what comes next, on the engine's thread, while the intake's sleeps; see `Reader`."""
        began = self._status.clock.now_ms()
        try:
            with self._servers.in_step():
                jobs = self._read_until(bell)
        except _CalledAway:
            return False
        except (redis.exceptions.RedisError, OSError) as error:
            self._failure = error
            return False
        self._add(jobs, busy=False)
        came_whole, self._came_whole = self._came_whole, False
        # One that waited for the batch before has company, which an intake would have found.
        waited = any(_queued_ms(found) < began - 1 for found in jobs)
        return came_whole and not waited and self._may_lend()

    def _turn(self) -> None:
        if self._ahead is not None:
            self._add(self._read_in(self._batcher.room(), None), busy=False)
            return
        room = self._batcher.room()
        busy = self._batcher.busy
        pause = self._pause(room, busy)
        if pause > 0:
            if busy and self._is_overdue():
                self._give_back()
            called = [thief for thief in self._thieves.values() if thief.is_called]
            if busy and called:
                pause = min(pause, FOLLOW_MOST)
                if self._batcher.running_for() > FOLLOW_MOST:
                    self._pass_on(called)
            # A read that was begun while the engine was idle claims what comes meanwhile.
            begun = [shard for shard in self._shards if self._servers.under_way(shard)]
            with self._batcher.changed:
                # The engine wakes us when it is done, and when it takes a batch.
                if self._batcher.room() == room and self._batcher.busy == busy:
                    self._batcher.changed.wait(min(pause, CLAIMS_LOOK) if begun else pause)
            if begun and self._batcher.busy:
                self._give_back_claims(begun)
            return
        block = None
        if busy and self._ends_alone():
            self._wait_while(busy, SHORT_WAIT)
            return
        if not busy:
            due = self._batcher.due_in()
            if due is None:
                block = IDLE_BLOCK_MS
            elif due >= SHORT_WAIT:
                block = min(IDLE_BLOCK_MS, int(due * 1000))
            elif due == 0.0:
                self._wait_while(busy, SHORT_WAIT)  # until the engine takes it
                if self._batcher.busy or self._batcher.due_in() != 0.0:
                    return  # it may be done by now
            else:
                # Too short to block for: one look for company shortly before the batch leaves.
                self._wait_while(busy, due * 0.7)
        if self._too_long:
            self._sift()
        self._add(self._read_in(room, block), busy)
        if not self._unsure and block is None:
            self._wait_while(busy, self._poll_seconds())

    def _read_in(self, room: int, block: int | None) -> list[Delivery]:
        """Jobs for so much room; with `block` those that come in so many milliseconds, too."""
        if block is not None:
            block = self._until_look(block)
        return self._take_in(self._reads(block, self._rooms(room)), room)

    def _rooms(self, room: int) -> dict[Priority, int]:
        return {"interactive": room, "batch": self._batcher.room_for_batch_priority()}

    def _until_look(self, block: int) -> int:
        """Milliseconds that a read may block, `block` at most: others' lanes are looked at then."""
        for thief in self._thieves.values():
            look = min(thief.due_in(idle=True), IDLE_BLOCK_MS)
            block = max(1, min(block, math.ceil(look * 1000)))
        return block

    def _take_in(self, reads: Iterable[_Found], room: int) -> list[Delivery]:
        """The jobs that reads bring."""
        deliveries: list[Delivery] = []
        last: dict[str, str] = {}
        for found in reads:
            came = time.monotonic()
            for stream, entries in found:
                deliveries += self._parse(stream, entries, came)
                if entries:
                    last[stream.key] = entries[-1][0].decode()
                    self._status.visited.add(stream.key)
        # Not before all of them are parsed: of a read that fails they are read again.
        self._status.held.update([(each.stream.key, each.entry) for each in deliveries])
        self._most = min(MANY, 2 * self._most)
        self._more_wait = len(deliveries) >= room
        self._last.update(last)
        return deliveries

    def _read_until(self, bell: Bell) -> list[Delivery]:
        """What comes next, on the engine's thread, until that is called away: of one shard, whose
        reads have not failed."""
        shards, room = self._shards, self._batcher.room()
        rooms = self._rooms(room)
        own = self._own(shards, rooms)
        limit = MANY
        found: _Found = []
        if self._are_too_many(own, room, shards):
            found = self._read_few(shards, rooms)
        if not found:
            limit = self._limit(own, room)
            found = self._read_ahead(bell, shards[0], own, limit)
        self._count_own(found)
        came_alone = len(found) == 1 and len(found[0][1]) == 1 < limit
        if came_alone and not self._are_called():
            return self._take_in((found,), room)
        more = self._read_more(shards, rooms, found, limit, idle=True, steals=False)
        return self._take_in(chain(([*found],), more), room)

    def _read_ahead(
        self, bell: Bell, shard: ShardKeys, own: Sequence[JobStream], limit: int
    ) -> _Found:
        server = self._servers.at_hand(shard)
        if server is None or not server.may_go_ahead():
            raise _CalledAway
        block = self._until_look(IDLE_BLOCK_MS)
        keys = [*[stream.key for stream in own], *shard.calls]
        group = ["XREADGROUP", "GROUP", GROUP, self._consumer, "COUNT", limit, "BLOCK", block]
        self._ahead = server.ahead([*group, "STREAMS", *keys, *([">"] * len(keys))])
        self._ahead.send()
        seconds = block / 1000 + ANSWERS_LATE
        if not self._ahead.is_answered(lambda number: bell.lets_wait(number, seconds)):
            raise _CalledAway
        return self._by_stream(self._ahead_answer())

    def _limit(self, own: Sequence[JobStream], room: int) -> int:
        """COUNT, which holds for each stream: with several each gives its share."""
        return min(self._most, -(-2 * room // max(1, len(own))))

    def _are_too_many(
        self, own: Sequence[JobStream], room: int, shards: Iterable[ShardKeys]
    ) -> bool:
        """Whether there is no room for a job of each; who waits is known where several lanes of all
        these shards are in use."""
        return len(own) > 2 * room and all(map(self._homes.has_several, shards))

    def _are_called(self) -> bool:
        """Whether others' lanes are to be looked at, now or later."""
        return any(thief.is_called for thief in self._thieves.values())

    def _add(self, jobs: Sequence[Delivery], busy: bool) -> None:
        """Have them run; `busy`, whether the engine was when they were asked for."""
        if not jobs:
            return
        waits = True
        if busy:
            self._company.came_late(jobs)
        elif len(self._batcher):
            self._company.came()
        else:
            waits = self._company.is_likely(jobs[0])
            self._came_whole = not waits and not self._more_wait
        self._batcher.add(jobs, waits)

    def _ends_alone(self) -> bool:
        """Whether the running batch is over sooner than a look for more is worth."""
        if self._continuous:
            return False  # it is at work for as long as anything is in flight
        fast = max(self._status.batch_seconds, self._batcher.running_for()) < SHORT_WAIT / 2
        return fast and self._company.is_missing and not self._unsure

    def _sift(self) -> None:
        """Take off what came in a reply that was too long and can be no job, unread."""
        self._most = max(1, FEW // len(self._streams))
        for stream in self._streams.values():
            shard, last = stream.shard, self._last.get(stream.key, "0-0")
            while last:
                taken, found = script("sift")(
                    self._servers.for_shard(shard),
                    [stream.key, shard.dead],
                    [shard.prefix, GROUP, self._consumer, last, COUNTERS_TTL_MS, DEAD_MOST],
                )
                last = found.decode()
                if taken:
                    logger.warning("refused %d entries of %s: too long", taken, stream.key)
        self._too_long = False

    def _wait_while(self, busy: bool, seconds: float) -> None:
        """Wait, unless the engine starts or ends meanwhile."""
        with self._batcher.changed:
            if self._batcher.busy == busy and not self._ended.is_set():
                self._batcher.changed.wait(seconds)

    def _pause(self, room: int, busy: bool) -> float:
        """How long to read nothing."""
        if room <= 0:
            return 0.25
        if busy and not self._continuous:
            expected = self._status.batch_seconds
            # A look takes the interpreter from the engine's thread, and is early for who asks again
            # once this batch is answered. Of those who wait in any case there may be many to read.
            about = max(AHEAD if self._more_wait else SHORT_WAIT, expected / 4)
            left = expected - self._batcher.running_for()
            if left < -about or not expected:
                return 0.25  # it takes longer than the last ones did; the engine wakes us
            return min(0.25, left - about)
        return 0.0

    def _is_overdue(self) -> bool:
        """Whether the running batch takes so long that others had better run what waits here."""
        if self._continuous or not len(self._batcher):
            return False
        expected = self._status.batch_seconds
        return self._batcher.running_for() > expected + max(GIVE_BACK_AFTER, 2 * expected)

    def _give_back(self) -> None:
        """Let whoever is idle run what waits here for the engine."""
        left = self._batcher.give_up()
        try:
            for shard, mine in by_shard(left, stream_of):
                keys, mine, jobs = counted(mine, stream_of, digest_and_entry)
                script("release")(
                    self._servers.for_shard(shard), keys, [shard.prefix, GROUP, shard.lanes, *jobs]
                )
                self._status.let_go(mine)
        except (redis.exceptions.RedisError, OSError):
            self._batcher.add(left)  # running one that was given back does no harm
            raise

    def _give_back_claims(self, begun: Sequence[ShardKeys]) -> None:
        """Let whoever is idle run what reads have claimed that are still under way."""
        for _, raw in self._servers.read(begun, _ask_nothing, 0.0, self._note_lost):
            for stream, entries in self._by_stream(raw):
                claimed = self._parse(stream, entries, time.monotonic())
                if claimed:
                    server, shard = self._servers.for_shard(stream.shard), stream.shard
                    keys, _, jobs = counted(claimed, stream_of, digest_and_entry)
                    script("release")(server, keys, [shard.prefix, GROUP, shard.lanes, *jobs])
                if entries:
                    self._last[stream.key] = entries[-1][0].decode()
        self._pass_on(
            thief for thief in self._thieves.values() if thief.is_called and thief.shard in begun
        )

    def _pass_on(self, called: Iterable[Thief]) -> None:
        """Others are to look for waiting lanes, while the engine is at work for longer."""
        look(self._servers, called, "pass", self._note_lost)

    def _poll_seconds(self) -> float:
        due = self._batcher.due_in()
        poll = min(0.02, max(0.0005, self._status.batch_seconds / 16))
        return poll if due is None else max(due, poll) if due < SHORT_WAIT else min(due, poll)

    def _reads(self, block: int | None, rooms: Mapping[Priority, int]) -> Iterator[_Found]:
        """What each read brings, of one shard or of several: of own lanes, then of others'."""
        if self._ahead is not None:
            yield self._count_own(self._by_stream(self._ahead_answer()))
            return
        if self._unsure:
            yield from self._reads_again(rooms)
        servers, room = self._servers, rooms["interactive"]
        sure = [shard for shard in self._shards if shard.prefix not in self._unsure]
        if not sure:
            if servers.fails_apart:
                self._ended.wait(SHORT_WAIT)
            return
        taken: _Found = []
        limit = MANY
        own = self._own(sure, rooms)
        too_many = self._are_too_many(own, room, sure)
        if too_many:
            taken += self._read_few(sure, rooms)
            yield [*taken]
        if not too_many or (block is not None and not taken):
            limit = self._limit(own, room)
            if block is not None and servers.fails_apart:
                # Of several reads under way each may bring so many, while one job is enough.
                limit = min(limit, max(4, limit // 8))
            reads = self._read_now if block is None else partial(self._read_blocking, block)
            for found in reads(sure, rooms, limit):
                taken += found
                yield found
        self._count_own(taken)
        yield from self._read_more(sure, rooms, taken, limit, idle=block is not None)

    def _read_blocking(
        self, block: int, shards: Sequence[ShardKeys], rooms: Mapping[Priority, int], count: int
    ) -> Iterator[_Found]:
        """What comes to own lanes within `block` milliseconds, or calls to look at others'."""
        servers = self._servers
        longest = to_ms(min(block / 1000, servers.longest_block))

        def ask(server: Server, some: Sequence[ShardKeys]) -> _Raw:
            keys = [stream.key for stream in self._own(some, rooms)]
            for shard in some:
                # Also where all lanes in use are its own: others may have joined meanwhile.
                keys += shard.calls
            return self._read_new(longest, server, keys, count)

        for _, raw in servers.read(shards, ask, block / 1000, self._note_lost):
            yield self._by_stream(raw)

    def _read_now(
        self, shards: Sequence[ShardKeys], rooms: Mapping[Priority, int], count: int
    ) -> Iterator[_Found]:
        """What is there in own lanes."""
        servers = self._servers
        begun = [shard for shard in shards if servers.under_way(shard)]
        if begun:
            for _, raw in servers.read(begun, _ask_nothing, 0.0, self._note_lost):
                yield self._by_stream(raw)
        rest = servers.read_together([shard for shard in shards if shard not in begun])
        keys = {some[0]: [stream.key for stream in self._own(some, rooms)] for some in rest}
        yield self._read_new_of({shard: some for shard, some in keys.items() if some}, count)

    def _own(self, shards: Iterable[ShardKeys], rooms: Mapping[Priority, int]) -> list[JobStream]:
        """The streams of this worker's lanes that there is room for jobs of."""
        return [
            stream
            for shard in shards
            for stream in self._homes.read(shard)
            if rooms["batch"] or stream.priority == "interactive"
        ]

    def _read_few(self, shards: Sequence[ShardKeys], rooms: Mapping[Priority, int]) -> _Found:
        """Of this worker's waiting lanes as much as there is room for, the oldest of all shards
        first."""
        left, own = dict(rooms), {stream.key for stream in self._own(shards, rooms)}
        thieves = [self._thieves[shard.wake] for shard in shards]
        waiting = look(self._servers, thieves, "list", self._note_lost)
        counts: list[tuple[JobStream, int]] = []
        for stream, lane in sorted(waiting, key=lambda each: -each[1].since):
            count = min(left[stream.priority], lane.jobs) if stream.key in own else 0
            if count > 0:
                left[stream.priority] -= count
                counts.append((stream, count))
        return read_counts(self._servers, self._consumer, counts, self._note_lost)

    def _read_more(
        self,
        shards: Sequence[ShardKeys],
        rooms: Mapping[Priority, int],
        taken: _Found,
        limit: int,
        *,
        idle: bool,
        steals: bool = True,
    ) -> Iterator[_Found]:
        """What there is still room for: more of lanes that gave their share, and what others' lanes
        have that waits too long. To `taken`, what came until then, each that is yielded is added.
        """
        thieves = [self._thieves[shard.wake] for shard in shards if shard.wake in self._thieves]
        came_alone = len(taken) == 1 and len(taken[0][1]) == 1 < limit
        if idle and thieves and not came_alone:
            beside = self._count_own(self._read_beside(shards, rooms, taken))
            taken += beside
            yield beside
        if not came_alone and (thieves or (idle and self._servers.fails_apart)):
            rest = self._count_own(self._read_rest(rooms, taken, limit))
            taken += rest
            yield rest
        due = [thief for thief in thieves if thief.due_in(idle) == 0] if steals else []
        if due and (left := _left(rooms, taken))["interactive"] > 0:
            found = steal(self._servers, due, left, self._note_lost)
            self._status.stole(found)
            taken += found
            yield found
        called = [thief for thief in thieves if thief.is_called]
        if called and taken and not 0 < self._status.batch_seconds < FOLLOW_MOST:
            self._pass_on(called)  # else it is idle again before another one would look

    def _count_own(self, found: _Found) -> _Found:
        self._status.own_jobs += sum([len(entries) for _, entries in found])
        return found

    def _read_beside(
        self, shards: Sequence[ShardKeys], rooms: Mapping[Priority, int], taken: _Found
    ) -> _Found:
        """What came to other lanes together with what a blocked read brought: servers before 7.2
        answer it of one stream. A job that came alone gets no company from a call of its own."""
        left = _left(rooms, taken)
        room, beside = 2 * left["interactive"], dict[ShardKeys, list[str]]()
        for shard in shards:
            brought = {stream: len(entries) for stream, entries in taken if stream.shard is shard}
            if len(brought) == 1 and sum(brought.values()) >= 2:
                keys = [stream.key for stream in self._own([shard], left) if stream not in brought]
                # One of each is no more than there is room for.
                if len(PRIORITIES) <= len(keys) <= room - sum(map(len, beside.values())):
                    beside[shard] = keys
        count = min(self._most, -(-room // max(1, sum(map(len, beside.values())))))
        return self._read_new_of(beside, count)

    def _read_rest(self, rooms: Mapping[Priority, int], taken: _Found, limit: int) -> _Found:
        """More of lanes that gave their share, as far as there is room."""
        left = _left(rooms, taken)["interactive"]
        full = [stream for stream, entries in taken if len(entries) >= limit] if left > 0 else []
        counts = [(stream, -(-left // len(full))) for stream in full]
        return read_counts(self._servers, self._consumer, counts, self._note_lost)

    def _reads_again(self, rooms: Mapping[Priority, int]) -> Iterator[_Found]:
        """What is ours beyond the last entry that arrived, of shards whose read failed."""
        count = min(self._most, -(-2 * rooms["interactive"] // len(self._streams)))
        for shard in self._shards:
            if shard.prefix in self._unsure:
                wanted = [s for s in shard.streams if rooms["batch"] or s.priority != "batch"]
                read = partial(self._read_again, wanted=wanted, count=count)
                found = self._servers.apart([shard], read, self._note_lost)
                if found is not None:
                    if not any(entries for _, entries in found):
                        self._unsure.discard(shard.prefix)
                    yield found

    def _note_lost(self, shard: ShardKeys, error: Exception) -> None:
        """One shard's read was lost, others go on."""
        self._unsure.add(shard.prefix)
        self._too_long |= isinstance(error, ReplyTooLong)

    def _by_stream(self, raw: _Raw) -> _Found:
        found: _Found = []
        for name, entries in raw or ():
            key = name.decode()
            if key in self._streams:
                found.append((self._streams[key], entries))
            else:
                self._thieves[key].called(entries)
        return found

    def _read_new(self, block: int | None, server: Server, keys: Sequence[str], count: int) -> _Raw:
        """What was never delivered, of each stream that has something."""
        wanted = dict.fromkeys(keys, ">")
        return server.xreadgroup(GROUP, self._consumer, wanted, count=count, block=block)

    def _ahead_answer(self) -> _Raw:
        ahead, self._ahead = self._ahead, None
        assert ahead is not None
        raw: _Raw = ahead.reply()
        return raw

    def _read_new_of(self, keys: Mapping[ShardKeys, Sequence[str]], count: int) -> _Found:
        """The same of several reads, each of keys that lie where that shard does."""

        def ask(some: Sequence[str], pipeline: Pipeline) -> None:
            pipeline.xreadgroup(GROUP, self._consumer, dict.fromkeys(some, ">"), count=count)

        found: list[_Raw] = []
        if len(keys) == 1:  # which costs less by itself
            for shard, some in keys.items():
                read = partial(self._read_new, None, keys=some, count=count)
                found.append(self._servers.apart([shard], read, self._note_lost))
        else:
            asks = {shard: partial(ask, some) for shard, some in keys.items()}
            found += [raw for (raw,) in self._servers.together(asks, self._note_lost).values()]
        return [each for raw in found for each in self._by_stream(raw)]

    def _read_again(self, server: Server, wanted: Sequence[JobStream], count: int) -> _Found:
        """What is ours of each stream, beyond the last entry that arrived."""
        found: _Found = []
        for stream in streams_held(server, wanted, self._consumer):
            last = self._last.get(stream.key, "0-0")
            arguments: list[Value] = [GROUP, self._consumer, last, count]
            entries = script("reread")(server, [stream.key], arguments)
            found.append((stream, entries))
        return found

    def _parse(self, stream: JobStream, entries: Sequence[NewEntry], came: float) -> list[Delivery]:
        key, held = stream.key, self._status.held
        if not held.isdisjoint([(key, entry) for entry, _ in entries]):
            # Read again after a failure: taken over meanwhile, to be run alone.
            entries = [each for each in entries if (key, each[0]) not in held]
        found = [job_in(fields) for _, fields in entries]
        deliveries = []
        jobs = read_jobs(found, self._digester, self._reader)
        for (entry, fields), data, job in zip(entries, found, jobs, strict=True):
            if isinstance(job, Job):
                deliveries.append(Delivery(job, entry, stream, came))
            elif not fields:  # ours, and withdrawn since
                self._servers.for_shard(stream.shard).xack(key, GROUP, entry)
            else:
                self._dead_letters.refuse(stream, entry, data, job)
        return deliveries

    @staticmethod
    def _group_is_gone(error: BaseException) -> bool:
        """Or the stream itself, or what is in its place is none."""
        signs = ("NOGROUP", "WRONGTYPE", "UNBLOCKED")
        return isinstance(error, redis.exceptions.ResponseError) and str(error).startswith(signs)


def _queued_ms(delivery: Delivery) -> int:
    """When it was queued, by the server's clock: clients' may be others."""
    return int(delivery.entry.partition(b"-")[0])


def _left(rooms: Mapping[Priority, int], taken: _Found) -> dict[Priority, int]:
    """The room that there is still."""
    left = dict(rooms)
    for stream, entries in taken:
        left[stream.priority] = max(0, left[stream.priority] - len(entries))
    return left


def _ask_nothing(server: Server, shards: Sequence[ShardKeys]) -> None:
    """What is under way was asked before."""


def create_groups(servers: Servers, shards: Sequence[ShardKeys], consumer: str) -> None:
    """Make each shard's streams and their consumer groups where they are missing, and join them."""
    for shard in shards:
        servers.apart([shard], partial(_create_in, shard, consumer))


def _create_in(shard: ShardKeys, consumer: str, server: Server) -> None:
    with server.pipeline(transaction=False) as pipeline:
        for key in shard.groups:
            pipeline.xgroup_create(key, GROUP, id="0", mkstream=True)
        for answer in pipeline.execute(raise_on_error=False):
            if isinstance(answer, Exception) and "BUSYGROUP" not in str(answer):
                raise answer
    server.xgroup_createconsumer(shard.stream().key, GROUP, consumer)
