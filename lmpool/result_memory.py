"""What results take of the server's memory: workers account by it, and plans reckon with it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

KEY_BYTES: Final = 256
"""What a result takes beside its value: its key, when it ends, its place in the account."""
RESERVE: Final = 32 << 20
"""Memory for all but results, at least: streams, and what is on its way to clients."""
CACHED_BYTES: Final = 200
"""What an answer takes of a client's cache beside its numbers, roughly: key and objects."""


@lru_cache(maxsize=1024)
def footprint(size: int) -> int:
    """What a result of `size` bytes takes of the server's memory, about.

    Its allocator (jemalloc) has four sizes to each power of two.
    """
    size += 16
    step = max(16, 1 << max(0, (size - 1).bit_length() - 3))
    return KEY_BYTES + -(-size // step) * step


def reserve(most: int, held: int) -> int:
    """What a pool that holds `held` bytes leaves free of a server's `most`.

    Who holds more gives way earlier, so that pools on one server come to hold alike.
    """
    return int(least_reserve(most) * (1 + min(1.0, held / most)))


def least_reserve(most: int) -> int:
    """The same of one that holds nothing."""
    return max(most // 16, min(RESERVE, most // 4))


def room(memory: Mapping[str, Any], held: int) -> int | None:
    """Bytes that a pool which holds `held` may store besides; negative where it is to give some up.

    `memory` is INFO's section. None where the server has no bound, or does not say.
    """
    most = int(memory.get("maxmemory", 0))
    if not most:
        return None
    used = int(memory.get("used_memory", 0)) - int(memory.get("mem_not_counted_for_evict", 0))
    return most - used - reserve(most, held)
