"""Keeps the kernel's collector of huge pages away from the tests' processes."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

PR_SET_THP_DISABLE: Final = 41  # linux/prctl.h


def do_without_huge_pages() -> bool:
    """Neither this process nor any that it starts has huge pages. Whether the kernel agreed.

    khugepaged locks the memory of whom it gathers pages for, and is of the lowest priority: on a
    machine whose cores are all taken, whoever then maps memory, a thread that begins or ends, has
    stood still for 28 seconds. NumPy asks for such pages in arrays of 4 MiB and more.
    """
    if sys.platform != "linux":
        return False
    arguments = [ctypes.c_ulong(value) for value in (1, 0, 0, 0)]
    return bool(ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, *arguments) == 0)
