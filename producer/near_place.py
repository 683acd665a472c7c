"""A client's place among the processes of its machine: how workers tell it of rows, and where
these lie."""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
from typing import Final

from lmpool.near_notices import NoticeReader
from lmpool.neighbours import Membership, Neighbourhood
from lmpool.row_ring import IS_ORDERED, RingError, RowRingReader
from lmpool.rows import ENTRY_BYTES, LARGE
from lmpool.wait_list import WaitList

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[0-9a-f]{16}")


def are_laid(vocab_size: int) -> bool:
    """Whether workers lay any rows of such a model."""
    return IS_ORDERED and max(ENTRY_BYTES.values()) * vocab_size >= LARGE


class NearPlace:
    """Taken by `name` until it leaves: a pipe, a list of what it waits for, and the rings that it
    knows. One thread reads the pipe."""

    def __init__(self, neighbourhood: Neighbourhood, name: str) -> None:
        """Raises `OSError` where that cannot be; then nothing is there."""
        self._neighbourhood = neighbourhood
        self._memberships: list[Membership] = []
        self._rings: dict[str, RowRingReader] = {}
        self._has_left = False
        pipes: list[NoticeReader] = []
        lists: list[WaitList] = []

        def take(pipe: int) -> None:
            pipes.append(NoticeReader(pipe))

        def write(file: int) -> None:
            lists.append(WaitList(file))

        name = f"{name}.{secrets.token_hex(4)}"  # whose files these are, and no others
        try:
            # The pipe first: by the list workers know who is there.
            self._memberships.append(neighbourhood.enter("notices", name, take, is_pipe=True))
            self._memberships.append(neighbourhood.enter("client", name, write))
        except BaseException:
            for membership in self._memberships:
                membership.leave()
            for pipe in pipes:
                pipe.close()
                pipe.read()  # nobody else will
            raise
        self.pipe, self.waits = pipes[0], lists[0]

    @property
    def is_there(self) -> bool:
        """Whether workers find it: a system may take files of shared memory away."""
        return all(membership.is_there for membership in self._memberships)

    def leave(self) -> None:
        """Nothing is read any more. Who reads the pipe is told, and closes it."""
        self._has_left = True
        for membership in reversed(self._memberships):
            membership.leave()
        self.pipe.close()
        self._rings = {}

    def after_fork(self) -> None:
        """In a forked child, which is another client: its parent's memory is let go of now, and not
        once its descriptors may be another's."""
        self._has_left = True
        self._rings = {}
        self.pipe.after_fork()

    def look(self) -> None:
        """Open all rings that are there."""
        for name in self._neighbourhood.look("rows"):
            self.ring(name)

    def known(self, name: str) -> RowRingReader | None:
        """The memory that a notice names, if it is open. For any thread."""
        return self._rings.get(name)

    def ring(self, name: str) -> RowRingReader | None:
        """The same, opened now if need be. For one thread at a time. None where it is not there."""
        found = self._rings.get(name)
        if found is None and not self._has_left and _NAME.fullmatch(name):
            found = _open(self._neighbourhood.path("rows", name))
            if found is not None:
                # A worker that comes may follow one that is gone, whose memory is let go.
                there = self._neighbourhood.look("rows")
                rings = {known: ring for known, ring in self._rings.items() if known in there}
                if not self._has_left:  # meanwhile
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
