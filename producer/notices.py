"""What notices say, and their ids, which only ever grow."""

from __future__ import annotations

from typing import Final

import redis.exceptions

from lmpool.commands import Server
from lmpool.errors import (
    JobExpired,
    JobFormatError,
    LmpoolError,
    PromptFailed,
    UnknownAdapter,
)
from lmpool.producer.flights import Flight
from lmpool.server import is_full, is_lost
from lmpool.wire import Notice

DOUBTFUL: Final = ("refused", "unknown_adapter")
"""What others' jobs for the same digest may make a worker say: it is asked again."""


def bring_forward(server: Server, reply: str, last: str, newest: str) -> None:
    """Let the next id of a reply stream be greater than `last`, which was read from it.

    Where the stream's latest id, `newest`, is smaller it would not be: the server came back as it
    was some time ago, or its clock was set back. What came then would be taken for read. A stream
    that has gone meanwhile is made by the next check, which gives it a life.
    """
    read = _parts(last)
    if _parts(newest) >= read:
        return
    try:
        server.xadd(reply, {"bye": "1"}, id=f"{read[0]}-{read[1] + 1}", nomkstream=True)
    except redis.exceptions.ResponseError as error:
        if is_full(error) or is_lost(error):
            raise  # else it has come so far meanwhile


def _parts(entry: str) -> tuple[int, int]:
    moment, _, number = entry.partition("-")
    return int(moment), int(number)


def error_of(notice: Notice, flight: Flight) -> LmpoolError:
    """What a notice that no result is there means for who waits."""
    if notice.status == "expired":
        return JobExpired("the job's deadline passed before it was computed")
    if notice.status == "unknown_adapter":
        return UnknownAdapter(notice.error)
    if notice.status == "refused":
        return JobFormatError(notice.error)
    return PromptFailed(notice.error or f"the worker answered {notice.status}")
