"""What a result is called: a hash over all that changes it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NewType

import msgpack

from lmpool.wants.want import Want, want_to_wire

Digest = NewType("Digest", bytes)
"""16 bytes, blake2b-128: the identity of a result. Hex only in the names of keys, and in Lua."""

DIGEST_BYTES: Final = 16
_STARTED_MOST: Final = 1024
_HEAD_MOST: Final = 4096
"""Bytes of a beginning that is kept: a want of many token ids would be kept with it."""


@dataclass(slots=True)
class Digester:
    """Digests of one model's jobs: blake2b-128 over all that changes the result."""

    fingerprint: str
    _started: dict[tuple[str | None, Want], Any] = field(
        default_factory=dict, init=False, repr=False
    )
    _last: tuple[Want, str | None, Any] | None = field(default=None, init=False, repr=False)
    """What was started last: mostly it is asked for again, and then it is not even looked up."""

    def digest(self, want: Want, tokens: bytes, adapter: str | None = None) -> Digest:
        """The digest of one checked want; `adapter` is ``name@fingerprint``."""
        hasher = self._start(want, adapter).copy()
        hasher.update(tokens)
        return Digest(hasher.digest())

    def digests(
        self, want: Want, prompts: Iterable[bytes], adapter: str | None = None
    ) -> list[Digest]:
        """The digests of one want of many prompts."""
        copy = self._start(want, adapter).copy
        found = []
        for tokens in prompts:
            hasher = copy()
            hasher.update(tokens)
            found.append(Digest(hasher.digest()))
        return found

    def _start(self, want: Want, adapter: str | None) -> Any:
        # Prompts differ by their tokens alone: the hash of all else is kept and copied.
        last = self._last
        if last is not None and last[0] is want and last[1] is adapter:
            return last[2]
        started = self._started.get((adapter, want)) if want.cached else None
        if started is None:
            # One msgpack value delimits itself: no choice of fields can run into the tokens.
            adapter_fingerprint = None if adapter is None else adapter.rpartition("@")[2]
            head = [self.fingerprint, adapter_fingerprint, *want_to_wire(want)]
            packed = msgpack.packb(head)
            started = hashlib.blake2b(packed, digest_size=DIGEST_BYTES)
            # Wants that are not cached differ from each other: they would push out what is used.
            if want.cached and len(packed) <= _HEAD_MOST:
                if len(self._started) >= _STARTED_MOST:
                    self._started.clear()
                self._started[adapter, want] = started
        self._last = (want, adapter, started)
        return started
