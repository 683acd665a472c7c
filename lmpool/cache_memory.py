"""How much memory an engine of lmpool's own may keep keys and values in.

An engine's part of the machine, and what `lmpool plan` reckons with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

MOST_POSITIONS: Final = 1 << 20
"""More positions than a worker's prompts have in common: a bound for very small models."""

_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Share:
    """One part in `parts` of what is free, and no more than `most` bytes."""

    parts: int
    most: int

    def of(self, free: int) -> int:
        """Bytes, where so many are free."""
        return max(0, min(free // self.parts, self.most))


# On a CPU other processes, and other workers, want memory too; a GPU is the worker's own.
OF_MACHINE: Final = Share(8, 4 * _GIB)
OF_GPU: Final = Share(2, 32 * _GIB)


def default_cache_bytes(free_on_gpu: int | None = None) -> int:
    """Where nobody says how much: a share of what is free, capped.

    Of a GPU that has `free_on_gpu` bytes, or of this machine's memory.
    """
    return OF_MACHINE.of(_available_memory()) if free_on_gpu is None else OF_GPU.of(free_on_gpu)


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
