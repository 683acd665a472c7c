"""Replies as they come, in few steps, and of a bounded size where others wrote them."""

from __future__ import annotations

import re
import select
import ssl
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import redis.exceptions
import redis.utils
from redis._parsers import _HiredisParser
from redis._parsers.hiredis import NOT_ENOUGH_DATA

from lmpool.bulk import receive_values
from lmpool.rows import PackedRow
from lmpool.sockets import reads

REPLY_BYTES: Final = 64 << 20
_USUAL: Final = getattr(redis.utils, "SENTINEL", None)
"""What redis-py says, from its release 8 on, where a read has no timeout of its own."""


_OF_CLUSTERS: Final = frozenset(
    ("ASK", "CLUSTERDOWN", "CROSSSLOT", "MASTERDOWN", "MOVED", "TRYAGAIN")
)
"""Refusals, by their first words, of which redis-py makes classes from its release 6 on, without
these words: here they are the same in all releases."""


_IN_SCRIPTS: Final = ("ERR ACL failure in script", "ERR The user executing the script can't")
"""How refusals of what a script's user may not do begin: as if they were about its arguments."""
_PLACE: Final = re.compile(r" script: [^:]*on @user_script:\d+\.?$")
"""How they end, in Redis with the script's hash, in Valkey without."""


class RefusedInScript(redis.exceptions.NoPermissionError):
    """The user may run the script, and not all that it does."""


class ReplyTooLong(redis.exceptions.ConnectionError):
    """A reply was longer than `REPLY_BYTES`: it was not read to its end, its connection closed."""


class Parser(_HiredisParser):
    """redis-py's reader of replies, for a connection that one thread uses.

    redis-py looks for what nobody asked for by a read that fails, and reads a reply in layers: with
    several threads at work both take longer than a small reply's own cost.
    """

    most: ClassVar[int | None] = None
    """Bytes that a reply may have; None is no bound."""
    _sizes: Sequence[int] = ()
    _rooms: Sequence[PackedRow | None] = ()
    _count = 0
    _takes_first = False
    _taken = 0
    """Bytes that were received before their reply was read."""

    def expect_values(self, sizes: Sequence[int], rooms: Sequence[PackedRow | None] = ()) -> None:
        """The next reply is, if all is well, an array of values of these sizes; see
        `receive_values`."""
        self._sizes, self._rooms = sizes, rooms

    def expect_several(self, count: int) -> None:
        """The next that is read are so many replies, as one list, or in its place the first
        refusal: all of them are read."""
        self._count = count

    @classmethod
    def parse_error(cls, response: str) -> Any:
        """A refusal, with all of the server's words where releases of redis-py differ."""
        if response.partition(" ")[0] in _OF_CLUSTERS:
            return redis.exceptions.ResponseError(response)
        if response.startswith(_IN_SCRIPTS):
            words = _PLACE.sub("", response.removeprefix("ERR "))
            return RefusedInScript(words if " the '" in words else f"{words} (ACL LOG says which)")
        return super().parse_error(response)  # type: ignore[no-untyped-call]

    def on_connect(self, connection: Any, **options: Any) -> None:
        """A new connection."""
        super().on_connect(connection, **options)  # type: ignore[no-untyped-call]
        self._poll: Any = None
        self._takes_first = hasattr(self, "_next_response")
        self._sizes, self._rooms, self._count, self._taken = (), (), 0, 0
        end: Any = self._sock
        self._receive = reads(end)
        # TLS keeps what it decrypted to itself, and what comes may be its own.
        if hasattr(select, "poll") and not isinstance(end, ssl.SSLSocket):
            self._poll = select.poll()
            self._poll.register(end, select.POLLIN)

    def can_read(self, timeout: float) -> bool:
        """Whether there is anything to be read, or the connection was closed."""
        if timeout or self._poll is None or self._reader is None:
            return bool(super().can_read(timeout))  # type: ignore[no-untyped-call]
        return self._holds_some() or self._reader.has_data() or bool(self._poll.poll(0))

    @property
    def is_plain(self) -> bool:
        """Whether other threads may write to the connection: TLS's state is its own thread's."""
        return self._poll is not None

    def comes_within(self, seconds: float, least: int) -> bool:
        """Whether there is something to be read within that time, and then at `least` so many
        bytes, as far as that is known. Raises what the socket raises."""
        if self._taken < least and self._poll is not None and self._poll.poll(1000 * seconds):
            self.take_in()
        return self._taken >= least

    def take_in(self) -> None:
        """Receive what is there, for `read_response` to find. Raises what the socket raises."""
        count = self._receive[1]((self._buffer,))
        reader: Any = self._reader
        reader.feed(self._buffer, 0, count)
        self._taken += count

    def _holds_some(self) -> bool:
        """Whether redis-py, before its release 8, has taken a reply that nobody has read."""
        return self._takes_first and self._next_response is not NOT_ENOUGH_DATA

    def read_response(self, disable_decoding: bool = False, **options: Any) -> Any:
        """The next reply."""
        count, self._count = self._count, 0
        if count:
            return self._read_several(count, disable_decoding, options)
        reader: Any = self._reader
        sizes, rooms = self._sizes, self._rooms
        self._sizes, self._rooms = (), ()
        if (
            disable_decoding
            or reader is None
            or self._holds_some()
            or (options and _says_more(options))
        ):
            return super().read_response(disable_decoding, **options)  # type: ignore[no-untyped-call]
        if sizes:
            values = receive_values(self._receive, sizes, reader.feed, rooms)
            if values is not None:
                return values
        response, came, self._taken = reader.gets(), self._taken, 0
        socket: Any = self._sock
        while response is NOT_ENOUGH_DATA:
            # The first of it may be long in coming, and is slept for.
            count = self._receive[1]((self._buffer,)) if came else socket.recv_into(self._buffer)
            if not count:
                raise redis.exceptions.ConnectionError("Connection closed by server.")
            came += count
            if self.most is not None and came > self.most:
                raise ReplyTooLong(f"a reply of more than {self.most} bytes")
            reader.feed(self._buffer, 0, count)
            response = reader.gets()
        _raise_what_ends(response)
        return response

    def _read_several(self, count: int, disable_decoding: bool, options: dict[str, Any]) -> Any:
        found: list[Any] = []
        reader: Any = self._reader
        while len(found) < count:
            found.append(self.read_response(disable_decoding, **options))
            while len(found) < count and (more := reader.gets()) is not NOT_ENOUGH_DATA:
                if type(more) is not bytes:
                    _raise_what_ends(more)
                found.append(more)
        # By itself: the connection raises it, and whoever follows primaries hears of it.
        refused = (one for one in found if isinstance(one, redis.exceptions.ResponseError))
        return next(refused, found)


def _raise_what_ends(response: Any) -> None:
    """Raise a reply that is about the connection."""
    refusal = response[0] if response and isinstance(response, list) else response
    if isinstance(refusal, redis.exceptions.ConnectionError):
        raise refusal


def _says_more(options: dict[str, Any]) -> bool:
    """Whether redis-py, from its release 8 on, asks for a timeout of this read's own, or pushes."""
    return bool(options.get("push_request")) or options.get("timeout", _USUAL) is not _USUAL


class BoundedParser(Parser):
    """The same for a connection that reads what others wrote: it must not fill the memory."""

    most = REPLY_BYTES
