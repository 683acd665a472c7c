"""Which adapters a pool has, as one client knows them."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import redis.exceptions

from lmpool.checks import is_text, quoted
from lmpool.commands import Fields, Server
from lmpool.errors import AdapterError, UnknownAdapter
from lmpool.keys import ShardKeys
from lmpool.registry import Change
from lmpool.servers import Servers

FRESH: Final = 1.0
"""Seconds for which what was read is trusted."""


class KnownAdapters:
    """Adapter names with their fingerprints, as last read."""

    def __init__(self) -> None:
        self._fingerprints: dict[str, str] = {}
        self._read = -math.inf

    def knows(self, name: str) -> bool:
        """Whether `name` was there a moment ago."""
        return name in self._fingerprints and time.monotonic() - self._read < FRESH

    def keep(self, registry: Mapping[str, str]) -> None:
        """Take over what `read_registry` read."""
        self._fingerprints = dict(registry)
        self._read = time.monotonic()

    def forget(self) -> None:
        """Read again before the next use."""
        self._read = -math.inf

    def reference(self, name: str) -> str:
        """``name@fingerprint``; `UnknownAdapter` (a ValueError) if there is none of that name."""
        fingerprint = self._fingerprints.get(name)
        if fingerprint is None:
            known = ", ".join(sorted(self._fingerprints)) or "none"
            raise UnknownAdapter(
                f"unknown LoRA adapter {quoted(name)}: register it with add_new_lora(); "
                f"known: {known}"
            )
        return f"{name}@{fingerprint}"


def read_registry(
    servers: Servers, shards: Sequence[ShardKeys], name: str | None = None
) -> dict[str, str]:
    """The adapters that a pool has: name to fingerprint. What no worker wrote is passed over.

    Each shard has them all, but one that has come back may have yet to be told: all are asked, and
    the newest of each name counts, unless the first that answers has the only one called for,
    `name`. Raises redis-py's exceptions where none can be asked.
    """
    newest: dict[bytes, Change] = {}
    heard = False
    for shard in shards:
        found = servers.apart([shard], partial(_read, shard.adapters))
        if found is None:
            continue
        heard = True
        for each, entry in found.items():
            change = Change.parse(entry)
            newest[each] = max(change, newest.get(each, change))
        if name is not None:
            there = newest.get(name.encode("utf-8", "replace"))
            if there is not None and not there.removed:
                break
    if not heard:
        raise redis.exceptions.ConnectionError("all shards are away")
    registry = {}
    for each, change in newest.items():
        with contextlib.suppress(UnicodeDecodeError):
            if not change.removed:
                registry[each.decode()] = change.fingerprint.decode()
    return registry


def _read(registry: str, server: Server) -> Fields:
    return server.hgetall(registry)


def check_lora_name(name: object) -> str:
    """What a call gives as `lora_name`, or `UnknownAdapter` for what can be no adapter's name."""
    if is_text(name):
        return name
    raise UnknownAdapter(
        f"lora_name={quoted(name)}: write an adapter's name, or leave it out for the base model"
    )


def check_new_name(name: object) -> str:
    """The name of an adapter to be registered, or `AdapterError`."""
    if is_text(name) and 0 < len(name) <= 256 and "@" not in name and "\n" not in name:
        return name
    raise AdapterError(
        f"lora_name={quoted(name)}: write 1 to 256 characters of text, none of them '@' or a line "
        "break"
    )


def check_folder(path: object) -> str:
    """An adapter's folder as text, or `AdapterError`."""
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
    except Exception:  # no path, or one that cannot tell
        text = None
    if is_text(text) and text and "\0" not in text:
        return text
    raise AdapterError(
        f"lora_path={quoted(path)}: write the path of the adapter's folder on the workers, as text"
    )
