"""Connections to the Redis-compatible server, and what its refusals mean."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, cast

import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from lmpool.address import connection_pool, is_cluster, is_sentinel
from lmpool.checks import said
from lmpool.clock import ServerClock
from lmpool.commands import Server
from lmpool.connections import OneConnectionClient
from lmpool.errors import (
    LmpoolError,
    ServerError,
    ServerRefused,
    ServerTooOld,
    ServerUnreachable,
)
from lmpool.replies import BoundedParser, Parser
from lmpool.server_url import mask_url

logger = logging.getLogger(__name__)

# Sockets would import it at the first name, on whichever thread.
importlib.import_module("encodings.idna")

CONNECT_TIMEOUT: Final = 5.0
ANSWER_TIMEOUT: Final = 15.0
"""Seconds without an answer after which a connection is given up (blocking reads add theirs)."""

READ_BYTES: Final = 1 << 20
"""Read size of a socket: rows are hundreds of kilobytes, and each read is a system call."""

OLDEST: Final = (7, 0)

LOST = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)
"""Exceptions after which a command may be sent again on a new connection.

`redis.exceptions.AuthenticationError` is one of them by class but not by meaning: see `is_lost`.
"""


NONSENSE: Final = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
"""What redis-py, or who reads its answers, raises of an answer that no such server gives."""

NODE: Final = "a node of a Redis Cluster: write redis+cluster://[user:password@]host:port"

NOT_READY: Final = (
    "BUSY ",
    "CLUSTERDOWN",
    "MASTERDOWN",
    "MISCONF",
    "NOREPLICAS",
    "NOSCRIPT",
    "TRYAGAIN",
)
"""How refusals begin that end by themselves: a long script, a failover, a disk that is full,
scripts that a worker will load."""


class SlotRefused(redis.exceptions.ConnectionError):
    """A node of a cluster is there, and does not serve a slot, or not now."""


REFUSALS: Final = (redis.exceptions.ResponseError, SlotRefused)
"""What a server that is there answers instead of what was asked."""


def is_full(error: BaseException) -> bool:
    """Whether the server's memory is full: there is room again when rows have ended."""
    return isinstance(error, redis.exceptions.OutOfMemoryError)


def why_not_now(error: BaseException) -> str:
    """Why a server refuses for now, and what helps where that does not pass by itself."""
    if is_full(error):
        return "its memory is full: raise maxmemory, or move other data elsewhere"
    if isinstance(error, SlotRefused):
        return (
            f"a slot is moved, or another node takes its primary's place ({error}): try again once "
            "that is over"
        )
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return (
            "it is a replica, which takes no writes: write its primary's URL, or where Sentinels "
            "name that redis+sentinel://host:port/service"
        )
    return str(error)


def is_wrong_type(error: BaseException) -> bool:
    """Whether a key holds something of another type than its command is for."""
    return str(error).startswith("WRONGTYPE")


def is_cut_short(refusal: str) -> bool:
    """Whether a blocked read ended as its server became a replica, or somebody ended it. One whose
    stream was deleted ends so too, which is another matter."""
    return refusal.startswith("UNBLOCKED ") and "longer" not in refusal


def is_lost(error: BaseException) -> bool:
    """Whether the connection is lost or the server is not ready: a reason to try again later."""
    if isinstance(error, redis.exceptions.AuthenticationError):
        return False
    if isinstance(error, (redis.exceptions.AuthorizationError, redis.exceptions.NoPermissionError)):
        return False
    # BusyLoading, a ConnectionError, and ReadOnly: a server that restarts or fails over.
    # An invalid response: a connection that is out of step.
    passing = (redis.exceptions.ReadOnlyError, redis.exceptions.InvalidResponse)
    if isinstance(error, (*LOST, *passing, OSError)):
        return True
    if not isinstance(error, redis.exceptions.ResponseError):
        return False
    return str(error).startswith(NOT_READY) or is_cut_short(str(error))


def open_server(
    url: str,
    *,
    blocks_for: float = 0.0,
    name: str = "lmpool",
    bounded: bool = False,
    answers_within: float = ANSWER_TIMEOUT,
) -> Server:
    """A synchronous connection of its own to the server at `url`; connects at its first command.

    `blocks_for` is how long, in seconds, its blocking reads may wait. A `bounded` one reads no
    reply beyond `lmpool.replies.REPLY_BYTES`. One that hears nothing for `answers_within` seconds
    is given up.
    """
    options = connection_options(name, blocks_for, answers_within)
    options["parser_class"] = BoundedParser if bounded else Parser
    if url.startswith("unix:"):
        del options["socket_connect_timeout"], options["socket_keepalive"]
    pool = connection_pool(url, max_connections=1, **options)
    return cast(Server, OneConnectionClient(connection_pool=pool))


def connection_options(name: str, blocks_for: float, answers_within: float) -> dict[str, Any]:
    """What redis-py is told of every connection."""
    return {
        "protocol": 2,
        "client_name": name,
        "socket_timeout": answers_within + blocks_for,
        "socket_read_size": READ_BYTES,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": min(CONNECT_TIMEOUT, answers_within),
        "socket_keepalive": True,
    }


def remedy(url: str) -> str:
    """What to look at where nobody answers: clients of a cluster go to what its nodes announce."""
    if is_cluster(url):
        return (
            "Do its nodes run, and announce what is reached from here (cluster-announce-ip with "
            "cluster-announce-port, or cluster-announce-hostname with "
            "cluster-preferred-endpoint-type hostname)? `lmpool doctor` tries each address"
        )
    return "Is the server running, and is this its address?"


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Turn redis-py's exceptions into ours, with the server named and its password not."""
    shown = mask_url(url)
    try:
        yield
    except redis.exceptions.AuthenticationError:
        raise ServerRefused(
            f"{shown} refused the user or password: check the URL's user:password@ part"
        ) from None
    except redis.exceptions.NoPermissionError as error:
        raise ServerRefused(
            f"{shown} does not permit this user: {error}. Use a URL with a user of another role: "
            "`lmpool doctor` and deploy/redis/users.acl say what each may"
        ) from None
    except SlotRefused as error:
        raise ServerUnreachable(f"{shown} is not ready: {why_not_now(error)}") from None
    except LOST as error:
        reason = str(error).strip().rstrip(".") or type(error).__name__
        raise ServerUnreachable(f"no answer from {shown}: {reason}. {remedy(url)}") from None
    except redis.exceptions.InvalidResponse as error:
        raise ServerUnreachable(
            f"no Redis-compatible server answers at {shown}: {error}. Is this its address?"
        ) from None
    except redis.exceptions.ResponseError as error:
        if "NOAUTH" in str(error) or "WRONGPASS" in str(error) or "AUTH" in str(error)[:40]:
            raise ServerRefused(
                f"{shown} refused the user or password: write them as "
                "redis://user:password@host:port/db"
            ) from None
        if str(error).startswith("MOVED "):
            raise ServerRefused(f"{shown} is {NODE}") from None
        if "cluster support disabled" in str(error):
            raise ServerRefused(
                f"{shown} is no node of a Redis Cluster: write redis://host:port/db"
            ) from None
        if is_sentinel(url) and "unknown command" in str(error) and "SENTINEL" in str(error):
            raise ServerRefused(
                f"{shown} is no Sentinel: write redis://[user:password@]host:port/db for a server, "
                "or the port of its Sentinels, mostly 26379"
            ) from None
        if "unknown command" in str(error):
            raise ServerTooOld(
                f"{shown} lacks a command: {error}. lmpool needs Redis 7.0 or Valkey 8"
            ) from None
        if is_full(error) or is_lost(error):  # refused for now: no reason to give up for good
            raise ServerUnreachable(f"{shown} is not ready: {why_not_now(error)}") from None
        raise ServerRefused(f"{shown}: {error}") from None


@contextmanager
def understood(url: str) -> Iterator[None]:
    """`explained`, for what does nothing but read from the server: whatever it stumbles over then
    is an answer that makes no sense."""
    with explained(url):
        try:
            yield
        except NONSENSE as error:
            if isinstance(error, LmpoolError):
                raise
            raise senseless(url, error) from error


def senseless(url: str, error: BaseException) -> ServerError:
    """The error of an answer that could not be read: `error` is what that stumbled over."""
    if isinstance(error, MemoryError):
        return ServerError(
            f"this process has no memory left for an answer ({said(error)}): ask for fewer at "
            "once, or for less of each (top_logprobs, token_logprobs), or let go of rows"
        )
    return ServerError(
        f"what came from {mask_url(url)} could not be read ({said(error)}): is that a "
        "Redis-compatible server, and the keys lmpool's? If so, it is a defect of lmpool's"
    )


def greet(server: Server, url: str, clock: ServerClock | None = None) -> str:
    """Connect, refuse a server that is too old, take its time. Returns its name and version."""
    with understood(url):
        server.ping()
        try:
            found = server.info("server")
        except redis.exceptions.NoPermissionError:
            found = {}  # A narrow ACL user: the commands themselves will tell.
        except redis.exceptions.ResponseError:
            _refuse_fakeredis(server, url)
            raise
        if clock is not None:
            clock.set(*server.time())
    if not found:
        return "unknown"
    refuse_node(found, url)
    return check_version(found, url)


def refuse_node(info: Mapping[str, Any], url: str) -> None:
    """Raise `ServerRefused` where ``INFO server`` is of a Sentinel, or of a node of a cluster,
    that a URL of one server names."""
    mode = info.get("redis_mode") or info.get("server_mode")
    if mode == "sentinel":
        raise ServerRefused(
            f"{mask_url(url)} is a Sentinel: write redis+sentinel://[user:password@]host:port/"
            "service/db"
        )
    if mode == "cluster" and not is_cluster(url):
        raise ServerRefused(f"{mask_url(url)} is {NODE}")


def _refuse_fakeredis(server: Server, url: str) -> None:
    """Raise `ServerError` where it is fakeredis's own server, which is of no age."""
    found = ""
    for _ in range(2):  # an error before it may have ended the connection
        try:
            found = str(cast(redis.Redis, server).execute_command("HELLO"))
            break
        except (redis.exceptions.RedisError, OSError):
            continue
    if "fakeredis" in found:
        raise ServerError(
            f"{mask_url(url)} is fakeredis's own server, which is none for lmpool: it has no INFO. "
            "Test with lmpool.testing, which makes up for that: the fixture lmpool_fake, MockPool, "
            "FakeServer"
        )


def check_version(info: dict[str, Any], url: str) -> str:
    """The server's name and version from ``INFO server``; `ServerTooOld` below Redis 7.0."""
    # Valkey says in redis_version which Redis it stands in for.
    version = str(info.get("redis_version", ""))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers and numbers < OLDEST:
        raise ServerTooOld(
            f"{mask_url(url)} runs Redis {version}: lmpool needs Redis 7.0 or Valkey 8; "
            "upgrade the server"
        )
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {version}"


def get_string(server: Server, key: str) -> bytes | None:
    """What a key holds; None where there is none, or it holds something else than a string."""
    try:
        return server.get(key)
    except redis.exceptions.ResponseError as error:
        if not is_wrong_type(error):
            raise
        return None
