"""Rows that workers of the client's machine have laid in memory that it reads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final

from lmpool.interrupts import frees
from lmpool.model_info import ModelInfo
from lmpool.near_notices import NearNotice, NoticeReader
from lmpool.neighbours import Neighbourhood
from lmpool.producer.flights import Flight
from lmpool.producer.near_place import NearPlace, are_laid
from lmpool.producer.waits import Event
from lmpool.row_ring import RowRingReader
from lmpool.rows import LARGE
from lmpool.wants import Digest, Row, Want

logger = logging.getLogger(__name__)

FAREWELL: Final = 0.2
"""Seconds in which the thread ends that is told to."""


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
        self._place: NearPlace | None = None
        self._thread: threading.Thread | None = None
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
            place = self._place
            if self._closed.is_set() or (knows and (place is None or place.is_there)):
                return
            self._leave()
            self._info = info
            if not are_laid(info.vocab_size):
                return
            try:
                self._begin(Neighbourhood.of_pool(pool, info.fingerprint8))
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
        place = self._place = NearPlace(neighbourhood, self._name)
        thread = threading.Thread(
            target=self._listen,
            args=(place.pipe,),
            name=f"lmpool-near-{self._name[:6]}",
            daemon=True,
        )
        try:
            thread.start()
        except BaseException:
            place.leave()
            place.pipe.read()  # nobody else will
            raise
        self._thread = thread

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
        """In a forked child, which is another client."""
        place, self._place = self._place, None
        if place is not None:
            place.after_fork()

    def _leave(self) -> None:
        self._info = None
        # Forgotten once they are let go of, and held here: Ctrl-C or another call may come between.
        place, thread = self._place, self._thread
        if place is not None:
            place.leave()
        if thread is not None and thread is not threading.current_thread():
            thread.join(FAREWELL)
        self._thread = self._place = None
        self.are_usual = False

    def expect(self, flights: Iterable[Flight]) -> None:
        """These are about to be asked for: workers of this machine are to know it."""
        place, info = self._place, self._info
        if place is None or info is None:
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
            place.waits.add(large)

    def settle(self) -> int:
        """How many bytes were copied since this was last asked. Under `reading`."""
        read, self.read_bytes = self.read_bytes, 0
        return read

    def ring(self, name: str) -> RowRingReader | None:
        """The memory that a notice names. For one thread at a time. None where it is not there."""
        place = self._place
        return None if place is None else place.ring(name)
