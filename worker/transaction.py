"""Rows and the script that announces them, as one MULTI written by hand.

redis-py's pipeline spends five times as long on a small row as the server does, and joins a large
one into its command. Here a command is formatted once, and large values go to the socket as they
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import redis.exceptions

from lmpool.commands import Server, Value
from lmpool.scripts import Script

LARGE: Final = 16 << 10
"""Bytes from which a value is sent by itself instead of being copied beside others."""


def set_and_call(
    server: Server,
    rows: Sequence[tuple[str, bytes]],
    ttl_ms: int,
    script: Script,
    keys: Sequence[str],
    arguments: Sequence[Value],
) -> None:
    """SET each row (key, value) with its TTL, then run `script`: all of it or nothing.

    Raises redis-py's exceptions, the first one where several commands were refused.
    """
    pool = server.connection_pool
    connection = pool.get_connection()
    try:
        connection.send_packed_command(_packed(connection, rows, ttl_ms, script, keys, arguments))
        refused: list[Exception] = []
        answers: list[Any] = []
        for _ in range(len(rows) + 3):
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
    outcome = answers[-1][-1]
    if isinstance(outcome, redis.exceptions.NoScriptError):
        script(server, keys, arguments)  # the rows are set; what is missing is the script's part
    elif isinstance(outcome, Exception):
        raise outcome


def _packed(
    connection: Any,
    rows: Sequence[tuple[str, bytes]],
    ttl_ms: int,
    script: Script,
    keys: Sequence[str],
    arguments: Sequence[Value],
) -> list[bytes]:
    ttl = str(ttl_ms).encode()
    tail = b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)
    pieces: list[bytes] = []
    small = [b"*1\r\n$5\r\nMULTI\r\n"]
    for name, value in rows:
        key = name.encode()
        small.append(b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(value)))
        if len(value) >= LARGE:
            pieces += (b"".join(small), value)
            small = [tail]
        else:
            small += (value, tail)
    small += connection.pack_command("EVALSHA", script.sha, len(keys), *keys, *arguments)
    small.append(b"*1\r\n$4\r\nEXEC\r\n")
    pieces.append(b"".join(small))
    return pieces
