"""What a server does not permit a user that clients need, found without doing any of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from redis.exceptions import NoPermissionError, ResponseError, WatchError

from lmpool.commands import Server
from lmpool.keys import GROUP, PoolKeys
from lmpool.server import SlotRefused

_NO_MODEL: Final = "00000000"
_NO_SCRIPT: Final = "0" * 40

Command = tuple[str | int, ...]


def client_commands(pool: str, client: str) -> list[Command]:
    """What a client of that name asks of a server, by itself and within scripts: every command of
    theirs, with keys of each kind that it is about."""
    keys = PoolKeys(pool)
    shard = keys.shard(_NO_MODEL, 0)
    result, flight, reply = shard.result(bytes(16)), shard.flight(bytes(16)), shard.reply(client)
    commands: list[Command] = [
        *(("INFO", "server"), ("TIME",), ("GET", keys.info), ("GET", keys.serving)),
        *(("GET", result), ("MGET", result), ("STRLEN", result), ("EXISTS", result)),
        *(("DEL", result), ("XREAD", "STREAMS", shard.pieces(bytes(16)), "0")),
        *(("GET", flight), ("MGET", flight), ("DEL", flight), ("PEXPIRE", flight, 1)),
        ("SET", flight, "", "PX", 1),
        *(("XADD", reply, "*", "hello", "1"), ("XREAD", "STREAMS", reply, "0"), ("DEL", reply)),
        *(("XTRIM", reply, "MAXLEN", 0), ("XINFO", "STREAM", reply), ("PEXPIRE", reply, 1)),
        *(("HGET", shard.adapters, "a"), ("HGETALL", shard.adapters)),
        *(("HMGET", shard.bounds, "backlog"), ("HGETALL", shard.counters)),
        *(("EXISTS", shard.alive("a")), ("PTTL", shard.alive("a")), ("GET", shard.steady)),
        ("XINFO", "STREAM", shard.account),
        *(("ZADD", shard.waiting, 1, "0"), ("XLEN", shard.wake)),
        ("XADD", shard.wake, "*", "at_once", "0"),
    ]
    for priority in ("interactive", "batch"):
        jobs = shard.stream(priority).key
        commands += [
            *(("EVALSHA", _NO_SCRIPT, 1, jobs), ("XADD", jobs, "*", "job", "")),
            *(("XDEL", jobs, "1-1"), ("XLEN", jobs), ("XRANGE", jobs, "-", "+", "COUNT", 1)),
            *(("XPENDING", jobs, GROUP, "-", "+", 1), ("XINFO", "GROUPS", jobs)),
            ("XINFO", "CONSUMERS", jobs, GROUP),
        ]
    return commands


def not_permitted(server: Server, pool: str, client: str) -> list[str]:
    """What the server says to each command that a client of that name needs and this user may not.

    Each is sent in a MULTI that a server never runs, as one of its commands is incomplete. Who may
    not send MULTI is told no more.
    """
    try:
        _queue(server, ("PING",))
    except NoPermissionError as error:
        return [str(error)]
    return list(dict.fromkeys(_refusals(server, client_commands(pool, client))))


def _refusals(server: Server, commands: list[Command]) -> Iterator[str]:
    for command in commands:
        try:
            _queue(server, command)
        except NoPermissionError as error:
            yield f"{' '.join(map(str, command[:2]))}: {error}"


def _queue(server: Server, command: Command) -> None:
    pipeline = server.pipeline(transaction=True)
    pipeline.execute_command(*command)
    pipeline.execute_command("ECHO")  # which lacks its word: nothing is run
    try:
        pipeline.execute()
    except NoPermissionError:
        raise
    except (ResponseError, SlotRefused, WatchError):
        pass  # queued, or another node's, and then given up; or nonsense, which says nothing
