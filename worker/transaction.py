"""Rows and the script that announces them, as one MULTI written by hand.

redis-py's pipeline spends five times as long on a small row as the server does, and joins a large
one into its command. Here a command is formatted once, and large values go to the socket from where
they are, together with what is around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis.exceptions

from lmpool.bulk import Gathered
from lmpool.commands import Server, Value
from lmpool.rows import LARGE, PackedRow
from lmpool.scripts import Script


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A script with what it is called with."""

    script: Script
    keys: Sequence[str]
    arguments: Sequence[Value]


def set_and_call(
    server: Server,
    rows: Sequence[tuple[str, bytes | PackedRow]],
    ttl_ms: int,
    call: Call,
    before: Call | None = None,
) -> tuple[Any, Any]:
    """Call `before`, SET each row (key, value) with its TTL unless one is there, then `call`.

    All of it is done or nothing. Returns what `before` and `call` returned. Raises redis-py's
    exceptions, the first one where several commands were refused.
    """
    calls = [call] if before is None else [before, call]
    pool = server.connection_pool
    connection = pool.get_connection()
    try:
        pieces = _packed(connection, rows, ttl_ms, call, before)
        connection.send_packed_command(Gathered(connection, pieces))
        refused: list[Exception] = []
        answers: list[Any] = []
        for _ in range(len(rows) + len(calls) + 2):
            try:
                answers.append(connection.read_response())
            except redis.exceptions.ResponseError as error:
                refused.append(error)
    except BaseException:
        connection.disconnect()  # answers that nobody read must not answer the next command
        raise
    finally:
        pool.release(connection)
    if refused:
        raise refused[0]
    # EXEC answers with what each command answered, errors among them.
    outcomes: list[Any] = answers[-1]
    first = None if before is None else _made_up_for(server, before, outcomes[0])
    last = _made_up_for(server, call, outcomes[-1])
    written = outcomes[len(calls) - 1 : -1]
    if written.count(b"OK") < len(rows):
        for (key, value), outcome in zip(rows, written, strict=True):
            if isinstance(outcome, Exception):
                raise outcome
            if outcome is None:
                _replace_what_is_none(server, key, value, ttl_ms)
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
    pieces: list[bytes | memoryview] = []
    small: list[bytes | memoryview] = [b"*1\r\n$5\r\nMULTI\r\n"]
    if before is not None:
        small += _evalsha(connection, before)
    for name, value in rows:
        key = name.encode()
        header, numbers = value if isinstance(value, PackedRow) else (b"", value)
        size = len(header) + len(numbers)
        small += (
            b"*6\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, size),
            header,
        )
        if size >= LARGE:
            pieces += (b"".join(small), numbers)
            small = [tail]
        else:
            small += (numbers, tail)
    small += _evalsha(connection, call)
    small.append(b"*1\r\n$4\r\nEXEC\r\n")
    pieces.append(b"".join(small))
    return pieces


def _evalsha(connection: Any, call: Call) -> list[bytes]:
    packed: list[bytes] = connection.pack_command(
        "EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.arguments
    )
    return packed
