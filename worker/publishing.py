"""Writing rows and telling who waits, while the engine works on the next batch."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeGuard

import redis.exceptions
import redis.sentinel

from lmpool.backends.engine import AdapterGone, Outcome, Part
from lmpool.checks import said, words
from lmpool.commands import Server, Value
from lmpool.counters import BATCHES, COMPUTED, FAILED, answers
from lmpool.errors import PromptFailed, ServerRefused, ServerUnreachable
from lmpool.isolation import isolate
from lmpool.keys import COUNTERS_TTL_MS, GROUP, JobStream, ShardKeys
from lmpool.liveness import LIFE_MS
from lmpool.logs import about
from lmpool.result_memory import footprint
from lmpool.rows import ENTRY_BYTES, LARGE, PackedRow
from lmpool.scripts import script
from lmpool.server import LOST, is_full, is_lost
from lmpool.servers import Servers
from lmpool.wants import Row, Stream
from lmpool.worker.batching import Delivery
from lmpool.worker.by_stream import by_shard
from lmpool.worker.laying import TOLD_BYTES, Laying
from lmpool.worker.pieces import PieceWriter, Telling
from lmpool.worker.result_store import LOOK_EVERY, ResultStore
from lmpool.worker.status import WorkerStatus
from lmpool.worker.transaction import Call, Transaction

logger = logging.getLogger(__name__)

QUEUE_MOST: Final = 2
"""Finished batches that may wait to be written; then the engine waits."""
CHUNK_BYTES: Final = 2 << 20
CHUNK_MOST: Final = 512
LAID_CHUNK_BYTES: Final = 8 << 20
"""The same of rows that clients of this machine have already: between two chunks a server waits."""
LAID_CHUNK_PART: Final = 64
"""But no more than one part in so many of what a shard may hold: its server has them all in hand
before it makes room."""
AHEAD_FOR: Final = 0.02
"""Seconds for which the engine's thread lays rows at most: others may wait for it. In that time it
lays hundreds, but for those that lose precision on their way, which take longer to encode."""
BEGIN_MOST: Final = 8
"""Jobs that the engine's thread writes itself, at most."""
BEGIN_BYTES: Final = 8 << 10
"""Of their outcomes, and of what is stored: a server takes in as much in one step."""
BEGIN_BYTES_NEAR: Final = 256 << 10
"""The same for a server on this machine, which a socket holds as much for."""
LEISURE: Final = 0.0005
"""Seconds for which it waits for the answer."""
ASIDE_BYTES: Final = 64 << 20
"""Bytes of rows that wait for shards that are away."""
ASIDE_PAUSE: Final = 0.05
"""Seconds between two attempts to write them."""
ASIDE_FAREWELL: Final = 10.0
"""Seconds for which a worker that leaves waits for their shards."""
CUT_OFF_AFTER: Final = 60.0
"""Seconds for which rows may be lost on their way to a server that heartbeats reach. What lies
between may let small commands pass alone; other workers may be better off."""
CUT_OFF_FAILURES: Final = 4
"""Attempts to write them in that time, at least."""
MAX_ERROR_CHARS: Final = 2000
LEFT_OUT_MOST: Final = 32
"""Jobs refused in succession, in one call or many: after so many it is not the jobs."""
FULL: Final = "the server's memory is full: raise maxmemory or lower result_ttl"


# Nobody changes one; but there is one for each prompt, and one that is frozen takes longer to make.
@dataclass(slots=True, eq=False)
class Done:
    """One job and what became of it: a row's bytes, or a status and an error's text.

    A row that is there already (`value` None, status ok) is only announced. `size` is how many
    bytes are stored.
    """

    delivery: Delivery
    value: bytes | PackedRow | None
    status: Literal["ok", "failed", "unknown_adapter"] = "ok"
    error: str = ""
    size: int = 0
    is_laid: bool = False
    """Whether clients of this machine have had their turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """One job that was told as it was drawn, and what became of it."""

    delivery: Delivery
    outcome: Outcome
    telling: Telling


Finished = tuple[Delivery, Outcome] | Told | Done


_PIECES: Final[Sequence[Finished]] = []
"""In the queue: there are pieces to be told, or an answer is to be taken."""


@dataclass(slots=True, eq=False)
class _Writing:
    """A chunk that was sent, and is to be answered."""

    shard: ShardKeys
    chunk: Sequence[Done]
    size: int
    kinds: dict[str, int]
    """How many of each kind of answer are stored."""
    evicts: bool
    transaction: Transaction
    began: float
    has_failed: bool = False
    """Whether it is to be written again."""


def _row_bytes(want: Row, vocab_size: int) -> int:
    """Of the numbers of a row as it is stored."""
    return vocab_size * ENTRY_BYTES[want.encoding or "f32"]


def encode(delivery: Delivery, outcome: Outcome, vocab_size: int) -> Done:
    """An outcome as it is stored: the answer to the job's want, or the error."""
    if outcome.error is not None:
        text = words(outcome.error) or type(outcome.error).__name__
        is_gone = isinstance(outcome.error, AdapterGone)
        return Done(
            delivery, None, "unknown_adapter" if is_gone else "failed", text[:MAX_ERROR_CHARS]
        )
    try:
        want = delivery.job.want
        if isinstance(want, Row) and _row_bytes(want, vocab_size) >= LARGE:
            packed = want.packed(outcome, vocab_size)
            return Done(delivery, packed, size=packed.nbytes)
        value = want.encode(outcome, vocab_size)
        return Done(delivery, value, "ok", "", len(value))
    except PromptFailed as error:
        return Done(delivery, None, "failed", words(error)[:MAX_ERROR_CHARS])
    except Exception as error:
        # One outcome that makes no sense must not keep the others from being written.
        logger.exception(
            "an outcome of the engine cannot be stored", extra=about(delivery.job.want.kind)
        )
        return Done(delivery, None, "failed", said(error, MAX_ERROR_CHARS))


def _is_row(item: Finished) -> TypeGuard[tuple[Delivery, Outcome]]:
    return isinstance(item, tuple) and isinstance(item[0].job.want, Row)


def _stream_of(done: Done) -> JobStream:
    return done.delivery.stream


class Publisher:
    """Writes finished batches in order. Owned by one thread, which `run` is; while that rests the
    engine's may begin to write."""

    def __init__(
        self,
        servers: Servers,
        vocab_size: int,
        result_ttl_ms: int,
        store: ResultStore,
        status: WorkerStatus,
        laying: Laying | None = None,
    ) -> None:
        self._servers = servers
        self._vocab_size = vocab_size
        self._result_ttl_ms = result_ttl_ms
        self._store = store
        self._status = status
        self._metrics = status.metrics
        self._laying = laying
        self._queue: queue.SimpleQueue[Sequence[Finished] | None] = queue.SimpleQueue()
        self._pieces = PieceWriter(servers, vocab_size)
        self._is_called = False
        """Whether the queue has `_PIECES` in it."""
        self._room = threading.Semaphore(QUEUE_MOST)
        self._writing = threading.Lock()
        """Of whoever writes: of its own thread, but while that waits for more."""
        self._begun: _Writing | None = None
        """What the engine's thread has sent, and is to be answered."""
        self._is_far = False
        """Whether the last answer to such was not worth waiting for."""
        self._ended = False
        self._uncounted = 0
        """1 until the batch that is being written has been counted."""
        self._aside: list[Sequence[Done]] = []
        """Of shards that are away: written once they are back."""
        self._aside_bytes = 0
        self._tried_aside = 0.0
        self._away: set[int] = set()
        """Shards, by number, that were away when they were last written to."""
        self._left_out = 0
        """Jobs that the server refused in succession, none taken between them."""
        self._left: frozenset[str] = frozenset()
        """Shards, by prefix, that the worker has left for good."""

    def move(self, shards: Sequence[ShardKeys]) -> None:
        """The pool lies in these shards now: its bound is theirs. For any thread."""
        self._store = self._store.moved(shards)
        self._left -= {shard.prefix for shard in shards}

    def leave(self, shards: Sequence[ShardKeys]) -> None:
        """Wait no longer for these, if they are away: nobody reads there. For any thread."""
        self._left |= {shard.prefix for shard in shards}

    def put(self, finished: Sequence[Finished], at_leisure: bool = False) -> bool:
        """Hand over one batch; blocks while two are waiting to be written.

        Of an engine that has nothing else to do a small one is sent `at_leisure`, in its thread,
        while the publisher's rests: that would have to wake up first. Then it is True, and `end`
        is next. Large rows are laid there, too, and while the publisher is at work all of them.
        """
        is_worth_it = len(finished) <= BEGIN_MOST or self._laying is not None
        if at_leisure and is_worth_it and self._writing.acquire(blocking=False):
            begun: _Writing | None = None
            try:
                if self._begun is None and not self._ended:
                    finished, ready = self._prepare(finished)
                    if ready is not None:
                        begun = self._begun = self._begin(*ready)
            except (redis.exceptions.RedisError, OSError) as error:
                logger.debug("the publisher writes it: %s", error)
            finally:
                if begun is None:
                    self._writing.release()
            if begun is not None:
                return True
        if at_leisure or self._writing.locked() or not self._queue.empty():
            # Or clients would wait for the server, which takes longer over rows than anybody.
            finished = self._lay_ahead(finished)
        self._put(finished)
        return False

    def end(self) -> None:
        """Take the answer to what was sent at leisure, or leave it to the publisher's thread."""
        begun = self._begun
        assert begun is not None
        try:
            if begun.transaction.is_answered_within(0.0 if self._is_far else LEISURE):
                with self._servers.in_step():
                    is_done = begun.transaction.read()
                if is_done:
                    self._end_begun(begun)
        except (redis.exceptions.RedisError, OSError) as error:
            logger.debug("the publisher writes it again: %s", error)
            begun.has_failed = True
        finally:
            if self._begun is not None:
                self._call()
            self._writing.release()

    def _prepare(
        self, finished: Sequence[Finished]
    ) -> tuple[Sequence[Finished], tuple[Sequence[Done], int] | None]:
        """What is to be written, some of it encoded and laid already; and the same again with its
        size where the engine's thread may send it, as that is soon done."""
        if self._aside or self._is_called or not self._queue.empty():
            return finished, None
        ended = [item for item in finished if isinstance(item, tuple)]
        if len(ended) < len(finished):  # others were told as they were drawn
            return finished, None
        rows = 4 * self._vocab_size * len([1 for _, outcome in ended if outcome.row is not None])
        most = self._begins_with(ended)
        if rows > most and (self._laying is None or not 0 < rows <= CHUNK_BYTES):
            return finished, None
        chunk = [encode(delivery, outcome, self._vocab_size) for delivery, outcome in ended]
        self._lay(chunk)
        if max(rows, sum([done.size for done in chunk])) > most:
            return chunk, None
        size = _size(chunk)
        has_room = self._store.has_room(ended[0][0].stream.shard, size)
        return chunk, (chunk, size) if has_room else None

    def _begin(self, chunk: Sequence[Done], size: int) -> _Writing:
        """Send what was prepared."""
        self._uncounted = 1
        with self._servers.in_step():
            return self._send(chunk[0].delivery.stream.shard, chunk, size, at_leisure=True)

    def _begins_with(self, ended: Sequence[tuple[Delivery, Outcome]]) -> int:
        """How many bytes of these the engine's thread may send; less than 0 where it may not."""
        if not 0 < len(ended) <= BEGIN_MOST:
            return -1
        shard = ended[0][0].stream.shard
        if any(delivery.stream.shard is not shard for delivery, _ in ended):
            return -1
        server = self._servers.at_hand(shard)
        if server is None or not server.may_go_ahead():
            return -1
        return BEGIN_BYTES_NEAR if server.is_near else BEGIN_BYTES

    def _lay(self, chunk: Sequence[Done]) -> None:
        """Let clients of this machine have the large rows, before all of it is stored."""
        if self._laying is None:
            return
        fresh = [done for done in chunk if not done.is_laid]
        if fresh:
            self._laying.lay(
                [done.delivery.job.digest for done in fresh], [done.value for done in fresh]
            )
            for done in fresh:
                done.is_laid = True

    def _lay_ahead(self, finished: Sequence[Finished]) -> Sequence[Finished]:
        """Let clients of this machine have the large rows of a batch before any of it is stored, as
        far as they keep up."""
        if self._laying is None:
            return finished
        rows = [(place, item) for place, item in enumerate(finished) if _is_row(item)]
        wants = [want for _, (held, _) in rows if isinstance(want := held.job.want, Row)]
        if not rows:
            return finished
        ahead = [*finished]
        size = max(_row_bytes(want, self._vocab_size) for want in wants)
        each = max(1, TOLD_BYTES // size)  # clients copy some while others are laid
        until = time.monotonic() + AHEAD_FOR
        for begin in range(0, len(rows), each):
            if begin and time.monotonic() > until:
                break
            some = rows[begin : begin + each]
            may = self._laying.may_be_ahead([item[0].job.digest for _, item in some], size)
            laid = {
                place: encode(*item, self._vocab_size)
                for (place, item), may_be in zip(some, may, strict=True)
                if may_be
            }
            self._lay([*laid.values()])
            for place, done in laid.items():
                ahead[place] = done
        return ahead

    def _end_begun(self, begun: _Writing) -> None:
        with self._servers.in_step():
            self._take_answer(begun)
        self._begun = None
        took = time.monotonic() - begun.began
        self._is_far = took > LEISURE
        self._metrics.publish.add(took)
        self._settle(begun.chunk)

    def _take_over(self, begun: _Writing) -> None:
        """What was sent at leisure is answered late, was refused, or leads to more."""
        try:
            if not begun.has_failed:
                self._end_begun(begun)
                return
        except (redis.exceptions.RedisError, OSError) as error:
            logger.debug("it is written again: %s", error)
        self._begun = None
        self._write(begun.chunk)

    def tell(self, parts: Sequence[tuple[Telling, Part]]) -> None:
        """Hand over what was drawn of continuations that go on; never blocks."""
        self._pieces.add(parts)
        self._call()

    def _call(self) -> None:
        if not self._is_called:
            self._is_called = True
            self._queue.put(_PIECES)

    def finish(self) -> None:
        """No more will come: `run` ends once all is written."""
        self._put(None)

    def _put(self, finished: Sequence[Finished] | None) -> None:
        # Where nobody writes any more nobody must wait: the jobs stay with the pool.
        while not self._ended:
            if self._room.acquire(timeout=0.5):
                self._queue.put(finished)
                break

    def run(self) -> None:
        """Write until told to finish."""
        try:
            with self._writing:
                while (finished := self._next()) is not None:
                    self._uncounted = 1
                    began = time.monotonic()
                    for chunk in self._chunks(finished):
                        self._lay(chunk)
                        self._write(chunk)
                    self._metrics.publish.add(time.monotonic() - began)
                until = time.monotonic() + ASIDE_FAREWELL
                while self._aside and time.monotonic() < until:
                    time.sleep(ASIDE_PAUSE)
                    self._write_aside()
                if self._aside:
                    left = sum(len(chunk) for chunk in self._aside)
                    logger.error("%d jobs were not written and stay with the pool", left)
        finally:
            self._ended = True
            if self._laying is not None:
                with self._writing:  # whoever may begin to write has done so, or sees the end
                    self._laying.close()

    def _next(self) -> Sequence[Finished] | None:
        """What is to be written next. Meanwhile others may need what was stored's room."""
        while True:
            if self._aside and time.monotonic() - self._tried_aside > ASIDE_PAUSE:
                self._write_aside()
            try:
                finished = self._wait(ASIDE_PAUSE if self._aside else LOOK_EVERY)
            except queue.Empty:
                self._store.look_now_and_then()
            else:
                self._is_called = False  # before they are taken: who comes later calls again
                self._pieces.write()  # before the whole, of which others may have told a part
                if finished is not _PIECES:
                    self._room.release()
                    return finished

    def _wait(self, seconds: float) -> Sequence[Finished] | None:
        """What comes next in the queue. Raises `queue.Empty` where nothing does."""
        self._writing.release()
        try:
            return self._queue.get(timeout=seconds)
        finally:
            self._writing.acquire()
            if self._begun is not None:
                self._take_over(self._begun)

    def _chunks(self, finished: Sequence[Finished]) -> Iterator[list[Done]]:
        """Few large rows or many small ones at a time: the first are read while others follow."""
        chunk: list[Done] = []
        size = 0
        for item in finished:
            if isinstance(item, tuple):
                delivery, outcome = item
                done = encode(delivery, outcome, self._vocab_size)
            elif isinstance(item, Done):
                done = item
            elif item.telling.is_lost:
                self._status.let_go([item.delivery])
                continue
            else:
                done = encode(item.delivery, item.outcome, self._vocab_size)
            chunk.append(done)
            size += done.size
            most = self._most_laid(done) if done.is_laid else CHUNK_BYTES
            if size >= most or len(chunk) >= CHUNK_MOST:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    def _most_laid(self, done: Done) -> int:
        """How many bytes are written at once of rows that are laid."""
        bound = self._store.bound(done.delivery.stream.shard)
        if bound is None:
            return LAID_CHUNK_BYTES
        return max(CHUNK_BYTES, min(LAID_CHUNK_BYTES, bound // LAID_CHUNK_PART))

    def _write(self, chunk: Sequence[Done]) -> None:
        """Write one chunk, again and again until the server takes it: results are idempotent."""
        failures = 0
        began = beaten_since = time.monotonic()
        left = by_shard(chunk, _stream_of)
        while True:
            try:
                with self._servers.in_step():
                    while left:
                        shard, mine = left[0]
                        write = partial(self._write_all, shard, mine)
                        if not self._servers.apart([shard], write, self._say_full):
                            self._set_aside(shard, mine)
                        elif shard.number in self._away:
                            self._away.discard(shard.number)
                            logger.info("shard %d is back", shard.number)
                        left.pop(0)
                return
            except (redis.exceptions.RedisError, OSError) as error:
                full = is_full(error)
                if full and self._relieve(*left[0]):
                    continue
                failures += 1
                reason = str(error)[:MAX_ERROR_CHARS]
                if failures in (1, 10) or failures % 100 == 0:
                    logger.warning(
                        "%s (%d rows wait, %.0f s): %s",
                        FULL if full else "rows cannot be written",
                        len(chunk),
                        time.monotonic() - began,
                        reason,
                    )
                if self._status.stopping.is_set() and failures > 5:
                    logger.error("%d jobs were not written and stay with the pool", len(chunk))
                    return
                if not (full or is_lost(error)) and failures > 5:
                    self._status.fail(ServerRefused(f"rows cannot be written: {reason}"))
                    return
                now = time.monotonic()
                if not (self._beats(now) and _is_lost_on_the_way(error)):
                    beaten_since = now
                elif now - beaten_since > CUT_OFF_AFTER and failures >= CUT_OFF_FAILURES:
                    self._status.fail(
                        ServerUnreachable(
                            f"rows cannot be written for {now - beaten_since:.0f} s, while "
                            f"heartbeats reach the server: {reason}. Does something between let "
                            "only small packets pass?"
                        )
                    )
                    return
                pause = min(2.0, 0.05 * 2 ** min(failures, 6))
                self._status.stopping.wait(pause * random.uniform(0.5, 1.0))

    def _beats(self, now: float) -> bool:
        """Whether the server knows that this worker lives."""
        beat_at = self._metrics.beat_at
        return beat_at is not None and now - beat_at < LIFE_MS / 1000

    def _write_all(self, shard: ShardKeys, chunk: Sequence[Done], server: Server) -> bool:
        """Write what is of one shard."""
        write = partial(self._write_in, shard)
        try:
            isolate(chunk, write, self._leave_out)
        except redis.exceptions.OutOfMemoryError:
            # One server is written to again by who waits for it; a shard would be set aside.
            if not (self._servers.fails_apart and self._relieve(shard, chunk)):
                raise
            isolate(chunk, write, self._leave_out)
        self._settle(chunk)
        return True

    def _settle(self, chunk: Sequence[Done]) -> None:
        """All of it is with the server."""
        self._status.let_go(done.delivery for done in chunk)
        for done in chunk:
            if done.status != "ok":
                self._status.note_failure(done.status, done.error or done.status)

    def _say_full(self, shard: ShardKeys, error: Exception) -> None:
        """A node is full, of what is not for workers to evict: its shard is as if it were away."""
        if is_full(error) and shard.number not in self._away:
            logger.warning("%s (shard %d): %s", FULL, shard.number, str(error)[:MAX_ERROR_CHARS])

    def _set_aside(self, shard: ShardKeys, chunk: Sequence[Done]) -> None:
        """A shard is away: its rows wait while others are written, as many as there is room for.

        What is beyond that is run again once the shard is back.
        """
        for done in chunk:
            if done.delivery.settled is not None:
                done.delivery.settled.set()  # the next that is to run alone does not wait for it
        if shard.prefix in self._left:
            self._status.let_go(done.delivery for done in chunk)
            return
        size = _size(chunk)
        if self._aside and self._aside_bytes + size > ASIDE_BYTES:
            logger.warning("%d rows are let go, to be computed again", len(chunk))
            self._status.let_go(done.delivery for done in chunk)
            return
        if shard.number not in self._away:
            self._away.add(shard.number)
            logger.warning("shard %d is away: rows wait for it", shard.number)
        for done in chunk:
            if isinstance(done.value, PackedRow):  # which holds on to its whole batch
                done.value = done.value.joined()
        self._aside.append(chunk)
        self._aside_bytes += size

    def _write_aside(self) -> None:
        """Write what was set aside, as far as its shards are back."""
        aside, self._aside, self._aside_bytes = self._aside, [], 0
        for chunk in aside:
            self._write(chunk)
        self._tried_aside = time.monotonic()

    def _leave_out(self, done: Done, error: redis.exceptions.RedisError) -> None:
        """The server takes this one in no company: whoever waits for it asks again.

        Raises `error` where so many were refused in succession that it is not the jobs.
        """
        self._left_out += 1
        self._status.note_failure("unwritable", str(error))
        if self._left_out > LEFT_OUT_MOST:
            raise error
        place = done.delivery.stream
        logger.error(
            "%s of %s cannot be told: %s",
            *(done.delivery.entry.decode(), place.key, error),
            extra=about(done.delivery.job.want.kind),
        )
        server = self._servers.for_shard(place.shard)
        server.xack(place.key, GROUP, done.delivery.entry)
        server.xdel(place.key, done.delivery.entry)

    def _relieve(self, shard: ShardKeys, chunk: Sequence[Done]) -> bool:
        """Make room where the server has no memory left. Whether there was any to make."""
        try:
            with self._servers.in_step():
                return self._store.relieve(shard, _size(chunk))
        except (redis.exceptions.RedisError, OSError) as error:
            logger.debug("no room could be made: %s", error)
            return False

    def _write_in(self, shard: ShardKeys, chunk: Sequence[Done]) -> None:
        size = _size(chunk)
        before = self._store.before_writing(shard, size) if size else None
        self._take_answer(self._send(shard, chunk, size, before))

    def _send(
        self,
        shard: ShardKeys,
        chunk: Sequence[Done],
        size: int,
        before: Call | None = None,
        *,
        at_leisure: bool = False,
    ) -> _Writing:
        """One transaction: room, every row with its TTL, then the notices and acknowledgements."""
        streams: dict[str, list[Done]] = {}
        last: JobStream | None = None
        mine: list[Done] = []
        for done in chunk:
            stream = done.delivery.stream
            if stream is not last:
                last = stream
                mine = streams.setdefault(stream.key, [])
            mine.append(done)
        stored: list[Done] = []
        jobs: list[Value] = []
        failed = 0
        for mine in streams.values():
            there = [done for done in mine if done.value is not None]
            stored += there
            jobs.append(len(there))
            jobs += [done.delivery.entry for done in there]
            jobs.append(len(mine) - len(there))
            if len(there) < len(mine):
                for done in mine:
                    if done.value is None:
                        failed += done.status != "ok"
                        jobs += _told(done)
        values = [done.value for done in stored if done.value is not None]
        digests = [done.delivery.job.digest for done in stored]
        kinds: dict[str, int] = {}
        for done in stored:
            kind = done.delivery.job.want.kind
            kinds[kind] = kinds.get(kind, 0) + 1
        counters: list[Value] = []
        if stored:
            counters += (COMPUTED.field, len(stored))
        if failed:
            counters += (FAILED.field, failed)
        if self._uncounted:
            counters += (BATCHES.field, self._uncounted)
        for kind, number in kinds.items():
            if kind != Row.kind:
                counters += (answers(kind), number)
        arguments: list[Value] = [
            *(shard.prefix, GROUP, COUNTERS_TTL_MS, size, self._result_ttl_ms),
            *(b"".join(digests).hex(), len(counters) // 2, *counters, *jobs),
        ]
        began = time.monotonic()
        transaction = Transaction(
            self._servers.for_shard(shard),
            [*zip(shard.results(digests), values, strict=True)],
            self._result_ttl_ms,
            Call(script("complete"), [shard.account, *streams], arguments),
            before,
            check_health=not at_leisure,  # the answer to a PING would have to be waited for
        )
        return _Writing(shard, chunk, size, kinds, before is not None, transaction, began)

    def _take_answer(self, writing: _Writing) -> None:
        made, told = writing.transaction.answers()
        self._uncounted = self._left_out = 0
        for kind, number in writing.kinds.items():
            self._metrics.answers[kind] += number
        shard, size = writing.shard, writing.size
        if writing.evicts:
            self._store.evicted(shard, made, size)
        if size:
            self._store.holds(shard, told[1])
        streamed = [
            done.delivery.job.digest
            for done in writing.chunk
            if isinstance(done.delivery.job.want, Stream)
        ]
        if streamed:
            self._pieces.forget(shard, streamed)


def _is_lost_on_the_way(error: Exception) -> bool:
    """Whether nothing was heard of the server: not even that it is not ready."""
    if isinstance(error, (redis.exceptions.BusyLoadingError, redis.sentinel.MasterNotFoundError)):
        return False
    return isinstance(error, (*LOST, OSError))


def _told(done: Done) -> tuple[Value, ...]:
    """What `complete.lua` is told of a job of which nothing is stored."""
    return done.delivery.job.digest.hex(), done.delivery.entry, done.status, done.error


def _size(chunk: Sequence[Done]) -> int:
    """The memory that what is stored of a chunk takes."""
    return sum([footprint(done.size) for done in chunk if done.value is not None])
