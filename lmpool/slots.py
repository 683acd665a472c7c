"""The slots of Redis Cluster: which one a key lies in, and names that spread evenly over them."""

from __future__ import annotations

import binascii
from functools import cache
from typing import Final

SLOTS: Final = 16384
NEAR: Final = SLOTS // 256
"""Slots that a name may lie beside the one it was meant for: some 128 tries find one."""
TRIES: Final = 4096


def slot_of(key: str) -> int:
    """The slot of a key: of its hash tag where it has one."""
    opening = key.find("{")
    closing = key.find("}", opening + 1)
    if opening >= 0 and closing > opening + 1:
        key = key[opening + 1 : closing]
    return binascii.crc_hqx(key.encode(), 0) % SLOTS


@cache
def spread_tag(start: str, number: int, count: int) -> str:
    """A hash tag that begins with `start` (brace included), for one of `count` parts.

    They lie evenly spread over the slots: by their numbers alone they would lie twice as thick in
    places, and as many more would lie on one server.
    """
    if count == 1:
        return start + "}"
    meant = (2 * number + 1) * SLOTS // (2 * count)
    tags = (f"{start}.{salt}}}" for salt in range(TRIES))
    return next((tag for tag in tags if abs(slot_of(tag) - meant) <= NEAR), f"{start}.0}}")
