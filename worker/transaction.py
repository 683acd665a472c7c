"""Rows and the script that announces them, as one MULTI written by hand.

redis-py's pipeline spends five times as long on a small row as the server does, and joins a large
one into its command. Here a command is formatted once, and large values go to the socket from where
they are, together with what is around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import redis.exceptions

from lmpool.bulk import Gathered
from lmpool.commands import Server, Value
from lmpool.connections import packed
from lmpool.rows import LARGE, PackedRow
from lmpool.scripts import Script

_BEGUN: Final = b"+OK\r\n"
_QUEUED: Final = b"+QUEUED\r\n"


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A script with what it is called with."""

    script: Script
    keys: Sequence[str]
    arguments: Sequence[Value]


class Transaction:
    """SET each row (key, value) with its TTL unless one is there, then `call`, and `before` all of
    that another: all is done or nothing.

    It is sent as it is made, after a PING where redis-py's `check_health` is due; until its
    `answers` were read its connection serves for nothing else. Raises redis-py's exceptions.
    """

    def __init__(
        self,
        server: Server,
        rows: Sequence[tuple[str, bytes | PackedRow]],
        ttl_ms: int,
        call: Call,
        before: Call | None = None,
        *,
        check_health: bool = True,
    ) -> None:
        self._server = server
        self._rows = rows
        self._ttl_ms = ttl_ms
        self._call = call
        self._before = before
        self._outcomes: list[Any] | None = None
        """What each command answered, once that was read."""
        calls = self._calls = 1 if before is None else 2
        self._before_exec = len(_BEGUN) + len(_QUEUED) * (len(rows) + calls)
        """Bytes of the replies that say nothing yet."""
        connection = self._connection = server.connection_pool.get_connection()
        try:
            pieces = _packed(connection, rows, ttl_ms, call, before)
            connection.send_packed_command(Gathered(connection, pieces), check_health=check_health)
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        # Answers that nobody read must not answer the next command.
        self._connection.disconnect()
        self._server.connection_pool.release(self._connection)

    def is_answered_within(self, seconds: float) -> bool:
        """Whether the answer to all of it begins to come in that time, as far as can be told."""
        return bool(self._connection._parser.comes_within(seconds, self._before_exec + 1))

    def read(self) -> bool:
        """Read the replies. Whether all was done as it was sent, and `answers` asks for no more.

        Raises redis-py's exceptions, the first one where several commands were refused.
        """
        try:
            self._connection._parser.expect_several(len(self._rows) + self._calls + 2)
            # EXEC answers with what each command answered, errors among them.
            outcomes = self._outcomes = self._connection.read_response()[-1]
        except redis.exceptions.ResponseError:  # the first of them; all were read
            self._server.connection_pool.release(self._connection)
            raise
        except BaseException:
            self._give_up()
            raise
        self._server.connection_pool.release(self._connection)
        refused = any(isinstance(outcome, Exception) for outcome in outcomes)
        return not refused and outcomes[self._calls - 1 : -1].count(b"OK") == len(self._rows)

    def answers(self) -> tuple[Any, Any]:
        """What `before` and `call` returned, once a script that was unknown was sent, too, and a
        value that is none replaced. Raises what `read` raises."""
        if self._outcomes is None:
            self.read()
        outcomes = self._outcomes
        assert outcomes is not None
        server, rows, call = self._server, self._rows, self._call
        first = None if self._before is None else _made_up_for(server, self._before, outcomes[0])
        last = _made_up_for(server, call, outcomes[-1])
        written = outcomes[self._calls - 1 : -1]
        if written.count(b"OK") < len(rows):
            for (key, value), outcome in zip(rows, written, strict=True):
                if isinstance(outcome, Exception):
                    raise outcome
                if outcome is None:
                    _replace_what_is_none(server, key, value, self._ttl_ms)
        return first, last


def _made_up_for(server: Server, call: Call, outcome: Any) -> Any:
    if isinstance(outcome, redis.exceptions.NoScriptError):
        return call.script(server, call.keys, call.arguments)  # the rest was done
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _replace_what_is_none(server: Server, key: str, value: bytes | PackedRow, ttl_ms: int) -> None:
    """A result that was there already stays; nothing, or a key of another type, is none."""
    try:
        there = server.strlen(key) > 0
    except redis.exceptions.ResponseError:
        there = False
    if not there:
        server.set(key, value.joined() if isinstance(value, PackedRow) else value, px=ttl_ms)


def _packed(
    connection: Any,
    rows: Sequence[tuple[str, bytes | PackedRow]],
    ttl_ms: int,
    call: Call,
    before: Call | None,
) -> list[bytes | memoryview]:
    ttl = str(ttl_ms).encode()
    tail = b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n$2\r\nNX\r\n" % (len(ttl), ttl)
    keys = [name.encode() for name, _ in rows]
    values = [value for _, value in rows]
    sizes = [v.nbytes if isinstance(v, PackedRow) else len(v) for v in values]
    # Five parts of each row, and what rows have in common is made once: no steps for each.
    sets: list[Any] = [tail] * (5 * len(rows))
    sets[0::5] = map(_set_head, map(len, keys))
    sets[1::5] = keys
    sets[2::5] = map(_value_head, sizes)
    sets[3::5] = values
    parts: list[Any] = [b"*1\r\n$5\r\nMULTI\r\n"]
    if before is not None:
        parts += _evalsha(connection, before)
    begun = len(parts)
    parts += sets
    parts += _evalsha(connection, call)
    parts.append(b"*1\r\n$4\r\nEXEC\r\n")
    pieces: list[bytes | memoryview] = []
    at = 0
    for number, (value, size) in enumerate(zip(values, sizes, strict=True)):
        if size >= LARGE or isinstance(value, PackedRow):
            header, numbers = value if isinstance(value, PackedRow) else (b"", value)
            place = begun + 5 * number + 3
            pieces += (b"".join((*parts[at:place], header)), numbers)
            at = place + 1
    pieces.append(b"".join(parts[at:]))
    return pieces


@lru_cache(maxsize=1024)
def _set_head(key_bytes: int) -> bytes:
    """What a SET of six arguments begins with, up to a key of so many bytes."""
    return b"*6\r\n$3\r\nSET\r\n$%d\r\n" % key_bytes


@lru_cache(maxsize=1024)
def _value_head(size: int) -> bytes:
    """What stands between the key and a value of so many bytes."""
    return b"\r\n$%d\r\n" % size


def _evalsha(connection: Any, call: Call) -> list[bytes]:
    return packed(
        connection, ("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.arguments)
    )
