"""What a server does not permit a user whose role needs it, found without changing anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from redis.exceptions import ExecAbortError, NoPermissionError

from lmpool.commands import Server
from lmpool.keys import GROUP, PRIORITIES, PoolKeys
from lmpool.server import REFUSALS

_NO_MODEL: Final = "00000000"
_NO_SCRIPT: Final = "0" * 40

CHANGES: Final = ("EVALSHA", "XADD", "XDEL", "XTRIM", "SET", "DEL", "PEXPIRE", "ZADD")
"""Those of a client's commands that change something."""

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
    for priority in PRIORITIES:
        jobs = shard.stream(priority).key
        commands += [
            *(("EVALSHA", _NO_SCRIPT, 1, jobs), ("XADD", jobs, "*", "job", "")),
            *(("XDEL", jobs, "1-1"), ("XLEN", jobs), ("XRANGE", jobs, "-", "+", "COUNT", 1)),
            *(("XPENDING", jobs, GROUP, "-", "+", 1), ("XINFO", "GROUPS", jobs)),
            ("XINFO", "CONSUMERS", jobs, GROUP),
        ]
    return commands


def harmless_changes(pool: str) -> list[Command]:
    """Some of what clients do that changes something, in a form that changes nothing: no pool is of
    that model, and there is no such script."""
    shard = PoolKeys(pool).shard(_NO_MODEL, 0)
    commands: list[Command] = [("ZADD", shard.waiting, "XX", 1, "0")]
    for priority in PRIORITIES:
        jobs = shard.stream(priority).key
        commands += [
            ("EVALSHA", _NO_SCRIPT, 1, jobs),
            ("XADD", jobs, "NOMKSTREAM", "*", "job", ""),
        ]
    return commands


def watcher_commands(pool: str) -> list[Command]:
    """What ``lmpool exporter`` asks of a server, all of which only reads, of keys of each kind that
    it is about."""
    keys = PoolKeys(pool)
    shard = keys.shard(_NO_MODEL, 0)
    asked = {
        keys.info: "GET %",
        shard.alive("w"): "PTTL %, MGET %",
        shard.bounds: "HGET % used",
        shard.counters: "HGETALL %",
        shard.adapters: "HGETALL %",
        shard.account: "XINFO STREAM %",
        shard.dead: "XLEN %",
    } | {
        shard.stream(priority).key: f"XLEN %, XINFO GROUPS %, XINFO CONSUMERS % {GROUP}, "
        f"XPENDING % {GROUP}, XRANGE % - + COUNT 1"
        for priority in PRIORITIES
    }
    return [("INFO", "server"), ("INFO", "memory"), ("TIME",), *_about(asked)]


# What workers ask of the keys of a shard: each % is the key.
_OF_A_STREAM: Final = f"""
    XINFO STREAM %, EXISTS %, XADD % * job x, XRANGE % - + COUNT 1, XDEL % 1-1, XLEN %,
    XTRIM % MAXLEN 0, UNLINK %, PERSIST %, PEXPIRE % 1, XINFO GROUPS %, XINFO CONSUMERS % {GROUP},
    XGROUP CREATE % {GROUP} 0 MKSTREAM, XGROUP CREATECONSUMER % {GROUP} w,
    XGROUP DELCONSUMER % {GROUP} w, XGROUP SETID % {GROUP} 0,
    XREADGROUP GROUP {GROUP} w STREAMS % >, XPENDING % {GROUP} - + 1 w, XACK % {GROUP} 1-1
"""
_OF_JOBS: Final = f"""
    EVALSHA {_NO_SCRIPT} 1 %, EVAL return 1 %, XCLAIM % {GROUP} w 0 1-1, {_OF_A_STREAM}
"""
_OF_A_HASH: Final = "HLEN %, HGET % f, HGETALL %, HDEL % f, UNLINK %, PEXPIRE % 1"


def worker_commands(pool: str) -> list[Command]:
    """What a worker asks of a server, by itself, within scripts and as arq does: every command of
    theirs, with keys of each kind that it is about."""
    keys = PoolKeys(pool)
    shard = keys.shard(_NO_MODEL, 0)
    asked = {
        keys.info: "GET %, SET % x, SETRANGE % 0 x",
        keys.serving: "GET %, SET % x PX 1, PEXPIRE % 1, PTTL %, DEL %",
        keys.vocabulary(_NO_MODEL): "GET %, STRLEN %, SET % x, PEXPIRE % 1, PERSIST %",
        shard.stream("interactive").key: _OF_JOBS,
        shard.stream("batch").key: _OF_JOBS,
        shard.wake: _OF_A_STREAM,
        shard.dead: "XINFO STREAM %, EXISTS %, XADD % * job x, XRANGE % - + COUNT 1, XDEL % 1-1, "
        "UNLINK %, PERSIST %, PEXPIRE % 1",
        shard.account: "XINFO STREAM %, EXISTS %, XADD % * held 1, XRANGE % - + COUNT 1, "
        "XREVRANGE % + - COUNT 1, XDEL % 1-1, PTTL %, PEXPIRE % 1, DEL %, UNLINK %",
        shard.held: "INCRBY % 1, SET % 1 PX 1, DEL %",
        shard.counters: f"HINCRBY % f 1, DEL %, RENAME % {shard.parted}, {_OF_A_HASH}",
        shard.parted: "EXISTS %, HGET % f, HGETALL %, HSET % f x, PEXPIRE % 1, DEL %",
        shard.inherited: "TYPE %, SADD % x, SISMEMBER % x, PEXPIRE % 1, DEL %",
        shard.adapters: f"HSET % f x, PERSIST %, DEL %, {_OF_A_HASH}",
        shard.bounds: f"HSET % f x, HSETNX % f x, DEL %, {_OF_A_HASH}",
        shard.waiting: "ZADD % 1 0, ZRANGE % 0 1, ZREM % 0, ZCARD %, DEL %, UNLINK %, PERSIST %, "
        "PEXPIRE % 1",
        shard.workers: "TYPE %, ZADD % 1 w, ZINCRBY % 1 w, ZSCORE % w, ZCARD %, ZCOUNT % 0 1, "
        "ZRANGEBYSCORE % 0 1, ZREMRANGEBYSCORE % 0 1, ZREM % w, PEXPIRE % 1, DEL %",
        shard.result(bytes(16)): "SET % x PX 1, STRLEN %, EXISTS %, PTTL %, PEXPIRE % 1, UNLINK %",
        shard.pieces(bytes(16)): "XADD % * f x, XRANGE % - +, XREVRANGE % + -, PEXPIRE % 1, DEL %",
        shard.flight(bytes(16)): "GET %, MGET %, SET % x KEEPTTL, DEL %",
        shard.reply("c"): "EXISTS %, XADD % NOMKSTREAM * ok x, XRANGE % - + COUNT 1",
        shard.steady: "GET %, SET % 1, PEXPIRE % 1",
        shard.alive("w"): "SET % x PX 1, PEXPIRE % 1, PTTL %, DEL %",
    }
    loads = ("SCRIPT", "LOAD", "return"), ("TIME",)
    return [*loads, *_about(asked), *control_commands(pool)]


def control_commands(pool: str) -> list[Command]:
    """What arq asks of a server for calls to every worker, which may be one of its own."""
    keys = PoolKeys(pool)
    job = keys.control_job("0" * 32)
    asked = {
        keys.control_queue("w"): "ZRANGEBYSCORE % 0 1, ZSCORE % x, ZCARD %, ZREM % x",
        keys.health("w"): "PSETEX % 1 x, GET %, DEL %",
        keys.aborted: "ZREM % x",
        f"arq:job:{job}": "GET %, PTTL %, DEL %",
        f"arq:in-progress:{job}": "WATCH %, EXISTS %, PSETEX % 1 x, DEL %",
        f"arq:retry:{job}": "INCRBY % 1, EXPIRE % 1, DEL %",
        f"arq:result:{job}": "GET %, SET % x PX 1",
    }
    return [*_about(asked)]


def _about(asked: Mapping[str, str]) -> Iterable[Command]:
    for key, commands in asked.items():
        for command in commands.split(","):
            yield tuple(key if word == "%" else word for word in command.split())


def not_permitted(
    server: Server, commands: Sequence[Command], *, plainly: bool = False
) -> dict[Command, str]:
    """What the server says to each of these commands that this user may not.

    They are sent in a MULTI that is never run: nobody asks for that. Who may not send MULTI is told
    no more, but of scripts. Commands that change nothing may be asked `plainly`, as they are: who
    watches may need no MULTI.
    """
    pool: Any = server.connection_pool
    connection = pool.get_connection()
    last: Any = None

    def ask(*some: Command) -> list[Any]:
        connection.send_packed_command(connection.pack_commands(some))
        return [_answer(connection) for _ in some]

    try:
        # What MULTI does not take is done, until that ends; EXEC without it does nothing, and
        # there is no such script.
        first = [each for each in commands if plainly or each[0] in ("WATCH", "EVALSHA")]
        first += [] if plainly else [("EXEC",), ("MULTI",)]
        answers = dict(zip(first, ask(*first), strict=True))
        if answers.get(("MULTI",)) == b"OK":  # else what follows would be done
            rest = [each for each in commands if each not in answers]
            *found, last = ask(*rest, ("DISCARD",))
            answers |= zip(rest, found, strict=True)
    finally:
        if last != b"OK":  # what waits to be run ends with its connection
            connection.disconnect()
        pool.release(connection)
    return {each: str(said) for each, said in answers.items() if _is_refusal(said)}


def _answer(connection: Any) -> Any:
    try:
        return connection.read_response(disconnect_on_error=False)
    except REFUSALS as error:  # another node's, or nonsense, says nothing
        return error


def _is_refusal(answer: object) -> bool:
    if isinstance(answer, ExecAbortError):  # of EXEC, as if there had been a MULTI
        return "no permissions" in str(answer)
    return isinstance(answer, NoPermissionError)


def in_words(refused: Mapping[Command, str]) -> dict[str, str]:
    """What was not permitted, each command and each key once, by the key or what was said."""
    found: dict[str, str] = {}
    for (name, *words), said in refused.items():
        if "to access " in said:
            key = next((str(word) for word in words if "lmpool:" in str(word)), "")
            found.setdefault(key, f"{name} {key}: {said}")
        else:
            found.setdefault(said, f"{name}: {said}")
    return found
