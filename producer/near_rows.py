"""Rows that workers of the client's machine have laid in memory that it reads."""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
from typing import Final

from lmpool.model_info import ModelInfo
from lmpool.neighbours import Membership, Neighbourhood
from lmpool.row_ring import IS_ORDERED, RingError, RowRingReader
from lmpool.rows import ENTRY_BYTES, LARGE

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[0-9a-f]{16}")


class NearRows:
    """Those of one client, `name`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._entering = threading.RLock()  # a finalizer or a signal's handler may close the client
        self._fingerprint = ""
        """Of the model whose rows are read."""
        self._closed = threading.Event()
        self._membership: Membership | None = None
        self._neighbourhood: Neighbourhood | None = None
        self._rings: dict[str, RowRingReader] = {}
        self.are_usual = False
        """Whether the last large row came from there."""

    def enter(self, pool: str, info: ModelInfo) -> None:
        """Let workers of this machine know that somebody reads what they lay, if any rows are worth
        it; once more where the system has taken that away. Where it cannot be, all rows come from
        the server."""
        with self._entering:
            knows = self._fingerprint == info.fingerprint
            if self._closed.is_set() or (
                knows and (self._membership is None or self._membership.is_there)
            ):
                return
            self._leave()
            self._fingerprint = info.fingerprint
            if not IS_ORDERED or max(ENTRY_BYTES.values()) * info.vocab_size < LARGE:
                return
            neighbourhood = Neighbourhood.of_pool(pool, info.fingerprint8)
            try:
                membership = neighbourhood.enter("client", self._name)
            except OSError as error:
                self._fingerprint = ""  # it is tried again
                logger.debug("no rows are read from shared memory: %s", error)
                return
            if self._closed.is_set():
                membership.leave()  # it was closed in the middle of this
                return
            self._membership, self._neighbourhood = membership, neighbourhood

    def leave(self) -> None:
        """Nothing is read any more."""
        with self._entering:
            self._closed.set()
            self._leave()

    def after_fork(self) -> None:
        """In a forked child, which is another client: its parent's memory is let go of now, and not
        once its descriptors may be another's."""
        self._rings = {}

    def _leave(self) -> None:
        if self._membership is not None:
            self._membership.leave()
        self._membership = self._neighbourhood = None
        self._rings = {}
        self.are_usual = False

    def ring(self, name: str) -> RowRingReader | None:
        """The memory that a notice names: those of other servers' pools lie there, too. For one
        thread at a time. None where it is not there."""
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
