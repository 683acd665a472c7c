"""How much memory an engine may keep keys and values in."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MOST_POSITIONS: Final = 1 << 20
"""More positions than a worker's prompts have in common: a bound for very small models."""

_GIB: Final = 1 << 30
# On a CPU other processes, and other workers, want memory too; a GPU is the worker's own.
_SHARE_CPU: Final = 1 / 8
_MOST_BYTES_CPU: Final = 4 * _GIB
_SHARE_GPU: Final = 1 / 2
_MOST_BYTES_GPU: Final = 32 * _GIB


def default_cache_bytes(free_on_gpu: int | None = None) -> int:
    """Where nobody says how much: a share of what is free, capped.

    Of a GPU that has `free_on_gpu` bytes, or of this machine's memory.
    """
    if free_on_gpu is not None:
        return min(int(free_on_gpu * _SHARE_GPU), _MOST_BYTES_GPU)
    return min(int(_available_memory() * _SHARE_CPU), _MOST_BYTES_CPU)


def _available_memory() -> int:
    """Bytes that this process may still use, as far as the system says."""
    known = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        known += [int(e.split()[1]) << 10 for e in lines if e.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")
        most = (group / "memory.max").read_text().strip()
        if most != "max":
            known.append(max(0, int(most) - int((group / "memory.current").read_text())))
    except (OSError, ValueError, IndexError):  # another system, or none of its files
        pass
    return min(known, default=16 * _GIB)
