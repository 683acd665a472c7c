"""Signals that tell a process to end."""

from __future__ import annotations

import asyncio
import signal
from typing import Final

TOLD_TO_END: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def hear_no_more() -> None:
    """All is done but to end: one that is told so again at that moment has not been killed."""
    loop = asyncio.get_running_loop()
    for told in TOLD_TO_END:
        loop.remove_signal_handler(told)  # the loop would, as it is closed
        signal.signal(told, signal.SIG_IGN)
