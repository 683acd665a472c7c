"""Why a process cannot listen where it is told to."""

from __future__ import annotations

import errno
import os

from lmpool.checks import quoted, said
from lmpool.errors import SettingsError


def cannot_listen(host: str, port: int, error: Exception) -> SettingsError:
    """What `error` of a socket means, and what to write instead."""
    number = getattr(error, "errno", None) or 0
    reason = os.strerror(number) if number > 0 else said(error)
    match error:
        case OSError() if number in (errno.EADDRINUSE, errno.EACCES, errno.EPERM):
            taken = number == errno.EADDRINUSE
            remedy = "stop what does, or write another port" if taken else "write another port"
        case OverflowError():
            reason, remedy = "there is no such port", "write one from 0 to 65535"
        case OSError() if number > 0 and number != errno.EADDRNOTAVAIL:
            remedy = "write another host or port"
        case _:
            if number <= 0:
                reason = "no host of that name is known"
            remedy = "write an address of this machine as the host, such as 127.0.0.1, or 0.0.0.0"
    return SettingsError(
        f"host={quoted(host)}, port={port}: cannot listen there ({reason}): {remedy}"
    )
