"""Rows that workers of the client's machine have laid in memory that it reads."""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterable
from typing import Final

from lmpool.interrupts import frees
from lmpool.model_info import ModelInfo
from lmpool.near_notices import NearNotice, NoticeReader
from lmpool.neighbours import Membership, Neighbourhood
from lmpool.producer.flights import Flight
from lmpool.producer.waits import Event
from lmpool.row_ring import IS_ORDERED, RingError, RowRingReader
from lmpool.rows import ENTRY_BYTES, LARGE
from lmpool.wait_list import WaitList
from lmpool.wants import Digest, Row, Want

logger = logging.getLogger(__name__)

FAREWELL: Final = 0.2
"""Seconds in which the thread ends that is told to."""
_NAME: Final = re.compile(r"[0-9a-f]{16}")


class NearRows:
    """Those of one client, `name`: what it waits for, and the thread that is told of what is
    laid, which calls `hear`, and then `help` for as long as it is told of nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.hear: Callable[[NearNotice], None] = lambda notice: None
        self.help: Callable[[Callable[[], bool]], None] = lambda goes_on: None
        self._entering = threading.RLock()  # a finalizer or a signal's handler may close the client
        self._info: ModelInfo | None = None
        """The model whose rows are read."""
        self._closed = Event()
        self._neighbourhood: Neighbourhood | None = None
        self._memberships: list[Membership] = []
        self._waits: WaitList | None = None
        self._pipe: NoticeReader | None = None
        self._thread: threading.Thread | None = None
        self._rings: dict[str, RowRingReader] = {}
        self.reading = threading.Lock()
        """Held while rows are copied: who is told meanwhile that they are stored need not fetch
        them."""
        self.read_bytes = 0
        """Of what was copied, and is kept by notices of the server yet. Under `reading`."""
        self.are_usual = False
        """Whether the last large row came from there."""

    @frees("_entering")
    def enter(self, pool: str, info: ModelInfo) -> None:
        """Let workers of this machine know what is waited for, if any rows are worth it; once more
        where the system has taken that away. Where it cannot be, all rows come from the server."""
        with self._entering:
            knows = self._info is not None and self._info.fingerprint == info.fingerprint
            if self._closed.is_set() or (knows and all(m.is_there for m in self._memberships)):
                return
            self._leave()
            self._info = info
            if not IS_ORDERED or max(ENTRY_BYTES.values()) * info.vocab_size < LARGE:
                return
            self._neighbourhood = Neighbourhood.of_pool(pool, info.fingerprint8)
            try:
                self._begin(self._neighbourhood)
            except (OSError, RuntimeError) as error:  # no memory, or no thread as the program ends
                self._leave()  # it is tried again
                logger.debug("no rows are read from shared memory: %s", error)
                return
            except BaseException:
                self._leave()
                raise
            if self._closed.is_set():
                self._leave()  # it was closed in the middle of this

    def _begin(self, neighbourhood: Neighbourhood) -> None:
        pipes: list[NoticeReader] = []
        lists: list[WaitList] = []

        def take(pipe: int) -> None:
            pipes.append(NoticeReader(pipe))

        def write(file: int) -> None:
            lists.append(WaitList(file))

        try:
            # The pipe first: by the list workers know who is there.
            name = f"{self._name}.{secrets.token_hex(4)}"  # whose files these are, and no others
            told = neighbourhood.enter("notices", name, take, is_pipe=True)
            self._memberships.append(told)
            self._memberships.append(neighbourhood.enter("client", name, write))
            thread = threading.Thread(
                target=self._listen,
                args=pipes,
                name=f"lmpool-near-{self._name[:6]}",
                daemon=True,
            )
            thread.start()
        except BaseException:
            for pipe in pipes:
                pipe.close()
                pipe.read()  # nobody else will
            raise
        self._thread, self._pipe, self._waits = thread, pipes[0], lists[0]

    def _listen(self, pipe: NoticeReader) -> None:
        while (notices := pipe.read()) is not None:
            for notice in notices:
                try:
                    self.hear(notice)
                except Exception:  # these rows come from the server
                    logger.warning("rows in shared memory could not be read", exc_info=True)
            try:
                self.help(pipe.is_empty)
            except Exception:  # who waits finds it, too
                logger.debug("a row could not be put in its place", exc_info=True)

    @property
    def is_heard_here(self) -> bool:
        """Whether this very thread is the one that is told: it may be in the midst of rows."""
        return threading.current_thread() is self._thread

    @frees("_entering")
    def leave(self) -> None:
        """Nothing is read any more."""
        with self._entering:
            self._closed.set()
            self._leave()

    def after_fork(self) -> None:
        """In a forked child, which is another client: its parent's memory is let go of now, and not
        once its descriptors may be another's."""
        self._rings, self._waits = {}, None
        if self._pipe is not None:
            self._pipe.after_fork()

    def _leave(self) -> None:
        self._waits = self._info = None
        # Forgotten once they are let go of, and held here: Ctrl-C or another call may come between.
        pipe, thread = self._pipe, self._thread
        for membership in reversed(self._memberships):
            membership.leave()
        self._memberships = []
        if pipe is not None:
            pipe.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(FAREWELL)
        self._pipe = self._thread = None
        self._neighbourhood = None
        self._rings = {}
        self.are_usual = False

    def expect(self, flights: Iterable[Flight]) -> None:
        """These are about to be asked for: workers of this machine are to know it."""
        waits, info = self._waits, self._info
        if waits is None or info is None:
            return
        large: list[Digest] = []
        last: Want | None = None
        is_large = False
        for flight in flights:
            want = flight.job.want
            if want is not last:  # which many have in common
                last = want
                is_large = isinstance(want, Row) and want.stored_bytes(info) >= LARGE
            if is_large:
                large.append(flight.job.digest)
        if large:
            waits.add(large)

    def settle(self) -> int:
        """How many bytes were copied since this was last asked. Under `reading`."""
        read, self.read_bytes = self.read_bytes, 0
        return read

    def ring(self, name: str) -> RowRingReader | None:
        """The memory that a notice names. For one thread at a time. None where it is not there."""
        found = self._rings.get(name)
        neighbourhood = self._neighbourhood
        if found is None and neighbourhood is not None and _NAME.fullmatch(name):
            found = _open(neighbourhood.path("rows", name))
            if found is not None:
                # A worker that comes may follow one that is gone, whose memory is let go.
                there = neighbourhood.look("rows")
                rings = {known: ring for known, ring in self._rings.items() if known in there}
                if self._neighbourhood is neighbourhood:  # else it has left meanwhile
                    self._rings = {**rings, name: found}
        return found


def _open(path: str) -> RowRingReader | None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise RingError("it is no file of this user's")
        return RowRingReader(file)
    except (OSError, ValueError, RingError) as error:
        logger.debug("%s is not read: %s", path, error)
        return None
    finally:
        os.close(file)
