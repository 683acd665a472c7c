"""Which adapters a pool has, as one client knows them."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Final

from lmpool.commands import Fields
from lmpool.errors import UnknownAdapter

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

    def keep(self, found: Fields) -> None:
        """Take over the pool's registry: name to fingerprint and folder.

        An entry that no worker wrote is passed over.
        """
        self._fingerprints = {}
        for name, entry in found.items():
            with contextlib.suppress(UnicodeDecodeError):
                self._fingerprints[name.decode()] = entry.partition(b"\n")[0].decode()
        self._read = time.monotonic()

    def forget(self) -> None:
        """Read again before the next use."""
        self._read = -math.inf

    def reference(self, name: str) -> str:
        """``name@fingerprint``; `UnknownAdapter` (a ValueError) if there is none of that name."""
        fingerprint = self._fingerprints.get(name) if isinstance(name, str) else None
        if fingerprint is None:
            known = ", ".join(sorted(self._fingerprints)) or "none"
            raise UnknownAdapter(
                f"unknown LoRA adapter {name!r}: register it with add_new_lora(); known: {known}"
            )
        return f"{name}@{fingerprint}"
