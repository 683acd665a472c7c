"""Signals that tell a process to end."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Final

TOLD_TO_END: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def hear_no_more() -> None:
    """All is done but to end: one that is told so again at that moment has not been killed, but for
    an instant in which the loop's handler is gone and this is not there yet.

    Where something else runs the worker, in another thread, signals are its own.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()
    for told in TOLD_TO_END:
        loop.remove_signal_handler(told)  # the loop would, as it is closed
        signal.signal(told, signal.SIG_IGN)
