"""The tests' own connection to whatever a URL names: one server, or a cluster as if it were one.

Not for faults: it follows a slot that has moved, and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import redis
import redis.client

from tests.support.cluster import slot_of

EVERYWHERE: dict[str, Callable[[list[Any]], Any]] = {
    "CLIENT KILL": sum,
    "CLIENT LIST": lambda found: [client for clients in found for client in clients],
    "CONFIG RESETSTAT": all,
    "CONFIG SET": all,
    "DBSIZE": sum,
    "FLUSHALL": all,
    "KEYS": lambda found: [key for keys in found for key in keys],
    "PING": all,
    "SCRIPT FLUSH": all,
    "SCRIPT LOAD": lambda found: found[0],
}
"""What every primary is asked, and what becomes of their answers."""

ANYWHERE = ("CONFIG GET", "INFO", "TIME")
SEED_TIMEOUT = 5.0
"""Seconds after which another node is asked who has which slot."""
SPLIT = {"DEL": sum, "EXISTS": sum, "UNLINK": sum}
"""Commands of any number of keys, which may lie on different nodes."""


def open_redis(url: str) -> redis.Redis:
    """A connection of the test's own to a server, or to all primaries of a cluster; close it."""
    if url.startswith(("redis+cluster://", "rediss+cluster://")):
        return ClusterClient(url)
    return redis.Redis.from_url(url, protocol=2)


class ClusterClient(redis.Redis):
    """A command goes to the node that holds its key; a transaction has those of one node."""

    def __init__(self, url: str) -> None:
        found = urlsplit(url)
        login, _, named = found.netloc.rpartition("@")
        hosts = [host.rpartition(":") for host in named.split(",")]
        options: dict[str, Any] = {"protocol": 2}
        if login:
            options["username"], _, options["password"] = login.partition(":")
        if found.scheme.startswith("rediss"):
            options |= {"ssl": True, "ssl_ca_certs": found.query.partition("=")[2]}
        self._options = options
        self._nodes: dict[tuple[str, int], redis.Redis] = {}
        self._slots: list[tuple[str, int]] = []
        # One that is frozen does not answer, and is not waited for.
        self._seeds = [
            redis.Redis(host.strip("[]"), int(port), socket_timeout=SEED_TIMEOUT, **options)
            for host, _, port in hosts
        ]
        super().__init__(hosts[0][0].strip("[]"), int(hosts[0][2]), **options)
        self.refresh()

    def refresh(self) -> None:
        """Ask who has which slot."""
        slots = self._ask_seeds()
        self._slots = [("", 0)] * 16_384
        for first, last, (host, port, *_), *_ in slots:
            address = host.decode(), port
            self._slots[first : last + 1] = [address] * (last - first + 1)

    def _ask_seeds(self) -> Any:
        for seed in self._seeds[:-1]:
            with suppress(redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                return seed.execute_command("CLUSTER", "SLOTS")
        return self._seeds[-1].execute_command("CLUSTER", "SLOTS")

    def primaries(self) -> list[redis.Redis]:
        """A connection to each."""
        return [self._at(address) for address in sorted(set(self._slots))]

    def node(self, key: str | bytes) -> redis.Redis:
        """The node that holds a key."""
        return self._at(self._slots[slot_of(key)])

    def _at(self, address: tuple[str, int]) -> redis.Redis:
        if address not in self._nodes:
            self._nodes[address] = redis.Redis(*address, **self._options)
        return self._nodes[address]

    def execute_command(self, *words: Any, **options: Any) -> Any:
        name = str(words[0]).upper()
        if name in EVERYWHERE:
            found = [node.execute_command(*words, **options) for node in self.primaries()]
            return EVERYWHERE[name](found)
        if name in ANYWHERE:
            return self.primaries()[0].execute_command(*words, **options)
        if name in SPLIT and len(words) > 2:
            return SPLIT[name]([self.execute_command(name, key, **options) for key in words[1:]])
        key = key_of(words)
        for _ in range(5):
            try:
                return self.node(key).execute_command(*words, **options)
            except redis.exceptions.ResponseError as error:
                if not str(error).startswith("MOVED"):
                    raise
                self.refresh()
        raise AssertionError(f"the slot of {key!r} moves and moves")

    def scan_iter(self, *words: Any, **options: Any) -> Iterator[Any]:
        for node in self.primaries():
            yield from node.scan_iter(*words, **options)

    def pipeline(self, transaction: Any = True, shard_hint: Any = None) -> redis.client.Pipeline:
        return _Pipeline(self, bool(transaction))

    def close(self) -> None:
        for node in (*self._seeds, *self._nodes.values()):
            node.close()
        super().close()


class _Pipeline(redis.client.Pipeline):
    """Its commands go to their nodes when it is executed."""

    def __init__(self, cluster: ClusterClient, transaction: bool) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            cluster.connection_pool, cluster.response_callbacks, transaction, None
        )
        self._cluster = cluster

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        lines, self.command_stack = self.command_stack, []
        self._cluster.refresh()
        by_node: dict[redis.Redis, list[int]] = defaultdict(list)
        key: str | bytes = ""
        for number, (words, _) in enumerate(lines):
            if words[0] not in ANYWHERE:
                key = key_of(words)
            by_node[self._cluster.node(key)].append(number)
        assert not self.transaction or len(by_node) < 2, "a transaction over several nodes"
        found: dict[int, Any] = {}
        for node, numbers in by_node.items():
            with node.pipeline(transaction=self.transaction) as pipe:
                for number in numbers:
                    words, options = lines[number]
                    pipe.execute_command(*words, **options)
                found.update(zip(numbers, pipe.execute(raise_on_error), strict=True))
        return [found[number] for number in range(len(lines))]


def key_of(words: Any) -> str | bytes:
    """The key of a command, of several the first."""
    name = str(words[0]).upper()
    place = 1
    if name in ("EVAL", "EVALSHA"):
        place = 3  # a script without keys names its slot in its arguments
    elif name in ("XREAD", "XREADGROUP"):
        place = [str(_text(word)).upper() for word in words].index("STREAMS") + 1
    elif name in ("OBJECT", "XINFO", "XGROUP", "MEMORY"):
        place = 2
    with suppress(IndexError):
        key = words[place]
        if isinstance(key, (str, bytes)):
            return key
    raise AssertionError(f"{words[0]} has no key: ask the node that is meant")


def _text(word: Any) -> Any:
    return word.decode("utf-8", "replace") if isinstance(word, bytes) else word
