"""A Redis Cluster: which node serves which slot, and what nodes say of slots that they do not.

A thin map over plain connections. Who asks the wrong node is told by an error, which puts the map
right before it reaches the caller: whoever tries again, as after a lost connection, goes to the
right one. ASK is never followed: while a slot migrates key by key, half of it is there.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import redis.exceptions
from redis.connection import Connection, SSLConnection

from lmpool.address import Address, Cluster, in_url
from lmpool.replies import BoundedParser, Parser
from lmpool.server import SlotRefused, is_cut_short
from lmpool.slots import SLOTS

logger = logging.getLogger(__name__)

PROBE_WITHIN: Final = 0.3
"""Seconds for which a node that was silent is asked whether it is back."""
ASK_WITHIN: Final = 1.0
"""Seconds for which a node is asked for the map, before another is."""
REFRESH_EVERY: Final = 0.1
"""Seconds between two looks at the map, at least: of all threads of a process."""
LARGE: Final = 64 << 10
"""Bytes from which what is sent may take time of its own."""
SLOWEST_LINK: Final = 500_000
"""Bytes a second that a node must take of it, or else it is given up as silent."""
SUSPECT_FOR: Final = 10.0
"""Seconds for which a node that did not answer is asked after all others."""


class SlotMoved(SlotRefused):
    """MOVED: another node serves this slot. An empty host is the one that was asked."""

    def __init__(self, text: str, slot: int, host: str, port: int) -> None:
        super().__init__(text)
        self.slot, self.host, self.port = slot, host, port


class SlotMigrating(SlotRefused):
    """ASK, or a script that did not find what has gone already: the slot is on its way."""


class SlotLost(SlotRefused):
    """The node serves the slot no longer, and does not say who does."""


def slot_error(text: str) -> SlotRefused | None:
    """What a node's refusal says of a slot; None where it is about something else."""
    if text.startswith("MOVED "):
        slot, _, address = text[6:].partition(" ")
        host, _, port = address.rpartition(":")
        if slot.isdecimal() and int(slot) < SLOTS and port.isdecimal():
            return SlotMoved(text, int(slot), host, int(port))
        return SlotLost(text)
    if text.startswith("ASK ") or "non local key" in text:
        return SlotMigrating(text)
    if text.startswith("READONLY ") or is_cut_short(text):
        return SlotLost(text)
    return None


class SlotErrors:
    """A parser, of redis-py or on top of it, to which refusals about slots are lost connections:
    those of `slot_error`."""

    @classmethod
    def parse_error(cls, response: str) -> Any:
        return slot_error(response) or super().parse_error(response)  # type: ignore[misc]


class ClusterParser(SlotErrors, Parser):
    """`Parser`, to which refusals about slots are those of `slot_error`."""


class BoundedClusterParser(SlotErrors, BoundedParser):
    """`BoundedParser`, the same."""


LOST: Final = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)
_NO_LOSS: Final = (SlotMigrating, redis.exceptions.AuthenticationError)


class SlotMap:
    """Which node serves which slot: one a process and cluster, for all of its threads.

    `ask` gives what ``CLUSTER SLOTS`` answers at an address within so many seconds. The `seeds` are
    asked whenever no other node helps: all addresses may have changed.
    """

    def __init__(self, seeds: Sequence[Address], ask: Callable[[Address, float], Any]) -> None:
        self._seeds = tuple(seeds)
        self._ask = ask
        self._owners: list[Address | None] = [None] * SLOTS
        self._lock = threading.Lock()
        self._doubtful = True
        self._looked = -REFRESH_EVERY
        self._suspects: dict[Address, float] = {}
        self._failure: Exception = SlotLost("no node knows who serves the slots")
        """Why the last look found nothing."""

    @property
    def is_known(self) -> bool:
        """Whether any node has ever answered."""
        return any(self._owners)

    def owner(self, slot: int) -> Address:
        """The node that serves a slot. Raises redis-py's exceptions where nobody says."""
        if self._doubtful:
            self.refresh()
        found = self._owners[slot]
        if found is None:
            self._doubtful = True
            raise SlotLost(f"no node serves slot {slot}")
        return found

    def nodes(self) -> list[Address]:
        """Every node that serves slots, those that answered lately first.

        Raises redis-py's exceptions where none is known.
        """
        if self._doubtful:
            self.refresh()
        if not (known := self._known()):
            raise self._failure
        return sorted(known, key=lambda node: (node in self._suspects, node))

    def answers(self, address: Address) -> bool:
        """Whether a node that did not answer does so now, at once."""
        try:
            self._ask(address, PROBE_WITHIN)
        except (redis.exceptions.RedisError, OSError):
            return False
        return True

    def known_owner(self, slot: int) -> Address | None:
        """The node that serves a slot, as far as is known: nobody is asked."""
        return self._owners[slot]

    def serves(self, address: Address) -> bool:
        """Whether a node has slots, as far as is known."""
        return address in self._owners

    def move(self, slot: int, address: Address) -> None:
        """A node said who serves a slot."""
        self._owners[slot] = address

    def suspect(self, address: Address) -> None:
        """A node did not answer: its slots may be served elsewhere now."""
        self._suspects[address] = time.monotonic()
        self._doubtful = True

    def refresh(self) -> None:
        """Ask the nodes, one after another until one answers; at most every `REFRESH_EVERY`.

        Keeps what it knows where none answers; raises redis-py's exceptions if that is nothing.
        """
        with self._lock:
            now = time.monotonic()
            if not self._doubtful or now - self._looked < REFRESH_EVERY:
                return  # another thread has looked
            failure: Exception | None = None
            for address in self._candidates(now):
                try:
                    ranges = self._ask(address, ASK_WITHIN)
                    owners = _owners(ranges, address)
                except redis.exceptions.AuthenticationError:
                    raise
                except (*LOST, LookupError, TypeError, ValueError) as error:
                    failure = error
                    self._suspects[address] = time.monotonic()
                    logger.debug("%s:%d does not say who serves what: %s", *address, error)
                    continue
                if any(owners):
                    self._owners = owners
                    self._suspects.pop(address, None)
                    self._doubtful = False
                    break
            self._looked = time.monotonic()
            if self._doubtful and not any(self._owners):
                self._failure = failure or self._failure
                raise self._failure

    def _known(self) -> set[Address]:
        return {owner for owner in self._owners if owner is not None}

    def _candidates(self, now: float) -> Iterable[Address]:
        """Whom to ask: known nodes in random order, then the seeds, those that failed last."""
        for address, since in list(self._suspects.items()):
            if now - since > SUSPECT_FOR:
                self._suspects.pop(address, None)
        known = list(self._known())
        random.shuffle(known)
        everyone = dict.fromkeys((*known, *self._seeds))
        return sorted(everyone, key=lambda address: address in self._suspects)


def _owners(ranges: Sequence[Any], asked: Address) -> list[Address | None]:
    """The primary of each slot, from the answer to ``CLUSTER SLOTS``."""
    owners: list[Address | None] = [None] * SLOTS
    for first, last, primary, *_ in ranges:
        address = node_address(primary, asked)
        owners[first : last + 1] = [address] * (last + 1 - first)
    if len(owners) != SLOTS:
        raise ValueError("slots that no cluster has")
    return owners


def node_address(node: Sequence[Any], asked: Address) -> Address:
    """A node of an answer to ``CLUSTER SLOTS``, as it wants to be called; one without a name is at
    the host that was asked."""
    host, port, *more = node
    if host in (b"?", "?"):  # it is to be called by a name, and has none
        about = [text for part in more if isinstance(part, list) for text in part]
        pairs = dict(zip(about[::2], about[1::2], strict=False))
        host = pairs.get(b"ip", b"")
    text = host.decode() if isinstance(host, bytes) else host or ""
    return text or asked[0], int(port)


class SlotListener:
    """A connection to a node, which tells the map what it hears of slots, or that it hears
    nothing."""

    host: str
    port: int

    def __init__(
        self,
        *,
        slots: SlotMap,
        note_silence: Callable[[Address], None] = lambda node: None,
        **options: Any,
    ) -> None:
        self._slots = slots
        self._note_silence = note_silence
        super().__init__(**options)

    def _hear(self, error: Exception) -> None:
        if isinstance(error, SlotMoved):
            self._slots.move(error.slot, (error.host or self.host, error.port))
        elif isinstance(error, LOST) and not isinstance(error, _NO_LOSS):
            self._slots.suspect((self.host, self.port))
            if isinstance(error, redis.exceptions.TimeoutError):
                self._note_silence((self.host, self.port))
        elif str(error).startswith(("CLUSTERDOWN", "MASTERDOWN")):
            # Of one that is cut off from the others: these may know who serves instead.
            self._slots.suspect((self.host, self.port))


class _OfNode(SlotListener):
    socket_timeout: Any
    _sock: Any

    def connect(self) -> None:
        try:
            super().connect()  # type: ignore[misc]
        except Exception as error:
            self._hear(error)
            if isinstance(error, redis.exceptions.TimeoutError):  # which does not say where
                place = in_url((self.host, self.port))
                raise redis.exceptions.TimeoutError(f"{place} does not answer: {error}") from None
            raise

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        size = sum(map(len, command)) if isinstance(command, list) else len(command)
        try:
            if size > LARGE:
                self._send_large(command, check_health, size)
            else:
                super().send_packed_command(command, check_health)  # type: ignore[misc]
        except Exception as error:
            self._hear(error)
            raise

    def _send_large(self, command: Any, check_health: bool, size: int) -> None:
        """The socket's timeout is that of all that is sent: over a slow link that takes longer."""
        self.connect()
        self._sock.settimeout(self.socket_timeout + size / SLOWEST_LINK)
        try:
            super().send_packed_command(command, check_health)  # type: ignore[misc]
        finally:
            if self._sock is not None:
                self._sock.settimeout(self.socket_timeout)

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except Exception as error:
            self._hear(error)
            raise


class NodeConnection(_OfNode, Connection):
    """To one node."""


class TLSNodeConnection(_OfNode, SSLConnection):
    """The same with TLS."""


_MAPS: dict[tuple[int, str], SlotMap] = {}


def slot_map(url: str) -> SlotMap:
    """The map of a cluster, one for all threads of this process (a forked child has its own)."""
    key = (os.getpid(), url)
    found = _MAPS.get(key)
    if found is None:
        known = Cluster.parse(url)
        found = _MAPS.setdefault(key, SlotMap(known.hosts, _Asker(known)))
    return found


class _Asker:
    """Asks a node for the map, on a connection that serves for nothing else."""

    def __init__(self, known: Cluster) -> None:
        self._class = SSLConnection if known.tls else Connection
        self._options: dict[str, Any] = {
            **known.options,
            "protocol": 2,
            "client_name": "lmpool-slots",
        }

    def __call__(self, address: Address, within: float) -> Any:
        (host, port), times = address, ("socket_timeout", "socket_connect_timeout")
        options: dict[str, Any] = {**self._options, **dict.fromkeys(times, within)}
        connection = self._class(host=host, port=port, **options)
        try:
            connection.connect()
            connection.send_command("CLUSTER", "SLOTS")
            return connection.read_response()
        finally:
            connection.disconnect()
