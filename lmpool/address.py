"""Where the server is: connection pools from the URL forms that lmpool takes.

``redis://``, ``rediss://`` (TLS) and ``unix://`` as redis-py reads them, and
``redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/db]`` for a primary that
Sentinels know (``rediss+sentinel://`` speaks TLS to both), and
``redis+cluster://[user:password@]host[:port][,host[:port]...]`` for a Redis Cluster that any of
these nodes leads to (``rediss+cluster://`` speaks TLS to all).
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import unquote

# redis-py is imported where it is used: settings are read by commands that start quickly.
if TYPE_CHECKING:
    from redis import ConnectionPool

    from lmpool.commands import Server

Address: TypeAlias = tuple[str, int]
"""Host and port."""

CLUSTER_SCHEMES: Final = ("redis+cluster", "rediss+cluster")
CLUSTER_PORT: Final = 6379
SENTINEL_SCHEMES: Final = ("redis+sentinel", "rediss+sentinel")
SENTINEL_PORT: Final = 26379
SENTINEL_TIMEOUT: Final = 2.0
"""Seconds that one Sentinel may take before the next is asked."""


@dataclass(frozen=True)
class Sentinels:
    """Who knows the primary, what the service is called, and how the primary is spoken to."""

    hosts: tuple[Address, ...]
    service: str
    options: dict[str, Any]
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Sentinels:
        """Read such a URL. Raises `ValueError` with the reason (and without the password)."""
        scheme, login, hosts, path, query = _parts(url)
        service, _, database = path.strip("/").partition("/")
        if not service:
            raise ValueError("it names no service")
        if database and not database.isdecimal():
            raise ValueError("its database is no number")
        return cls(
            tuple(_host(host, SENTINEL_PORT) for host in hosts.split(",")),
            unquote(service),
            _options(scheme, login, database or "0", query),
            scheme.startswith("rediss"),
        )

    @property
    def tls_options(self) -> dict[str, Any]:
        """What both the Sentinels and the primary are told about TLS."""
        if not self.tls:
            return {}
        return {"ssl": True, **{k: v for k, v in self.options.items() if k.startswith("ssl_")}}


@dataclass(frozen=True)
class Cluster:
    """Nodes that lead to the others, and how all are spoken to."""

    hosts: tuple[Address, ...]
    options: dict[str, Any]
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Cluster:
        """Read such a URL. Raises `ValueError` with the reason (and without the password)."""
        scheme, login, hosts, path, query = _parts(url)
        if path.strip("/") not in ("", "0"):
            raise ValueError("a Redis Cluster has the database 0 alone")
        options = _options(scheme, login, "0", query)
        if options.pop("db", 0):
            raise ValueError("a Redis Cluster has the database 0 alone")
        return cls(
            tuple(_host(host, CLUSTER_PORT) for host in hosts.split(",")),
            options,
            scheme.startswith("rediss"),
        )


def _parts(url: str) -> tuple[str, str, str, str, str]:
    """Scheme, user and password, hosts, path and query of a URL of several hosts."""
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    netloc, _, path = rest.partition("/")
    login, _, hosts = netloc.rpartition("@")
    return scheme, login, hosts, path, query


def _options(scheme: str, login: str, database: str, query: str) -> dict[str, Any]:
    """What a URL of one server would say, as redis-py reads it."""
    from redis.connection import parse_url

    plain = "rediss" if scheme.startswith("rediss") else "redis"
    options = dict(parse_url(f"{plain}://{login}@h/{database}" + (f"?{query}" if query else "")))
    for name in ("host", "port", "connection_class"):
        options.pop(name, None)
    return options


def _host(text: str, usual: int) -> Address:
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]"):
        host, port = text, str(usual)
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"{text!r:.60} is no host and port")
    if ":" in host:
        ipaddress.IPv6Address(host)  # a ValueError says what is wrong with it
    return host, int(port)


def in_url(address: Address) -> str:
    """``host:port``, as a URL has it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(server: Server) -> Address:
    """Where a connection leads, as far as that is a host and a port."""
    options = server.connection_pool.connection_kwargs
    return options.get("host", ""), options.get("port", 0)


def is_sentinel(url: str) -> bool:
    """Whether the URL names Sentinels instead of a server."""
    return url.partition("://")[0] in SENTINEL_SCHEMES


def is_cluster(url: str) -> bool:
    """Whether the URL names nodes of a Redis Cluster."""
    return url.partition("://")[0] in CLUSTER_SCHEMES


def username(url: str) -> str:
    """The user that the URL names, or ''."""
    from redis.connection import parse_url

    if is_cluster(url):
        options = Cluster.parse(url).options
    else:
        options = Sentinels.parse(url).options if is_sentinel(url) else parse_url(url)
    return str(options.get("username") or "")


def connection_pool(url: str, **options: Any) -> ConnectionPool:
    """A synchronous connection to the server, or to the primary of the moment."""
    from redis.connection import Connection, parse_url
    from redis.sentinel import Sentinel

    from lmpool.connections import OneConnectionPool
    from lmpool.primary_pool import PrimaryPool

    if not is_sentinel(url):
        found = {**parse_url(url), **options}
        return OneConnectionPool(
            connection_class=found.pop("connection_class", Connection), **found
        )
    known = Sentinels.parse(url)
    sentinel = Sentinel(known.hosts, sentinel_kwargs=to_sentinels(known))
    given = {**known.options, **known.tls_options, **options}
    return PrimaryPool(known.service, sentinel, **given)


def to_sentinels(known: Sentinels) -> dict[str, Any]:
    """The URL's user and password are the primary's: Sentinels are asked without."""
    return {
        "socket_timeout": SENTINEL_TIMEOUT,
        "socket_connect_timeout": SENTINEL_TIMEOUT,
        **known.tls_options,
    }
