"""What things cost, as ``tests/benchmarks/results`` has measured it.

On one AMD EPYC core with Redis 7.0 behind a unix socket: ``jobs.json`` (rows of 1 KiB),
``rows.json`` (256 KiB) and ``answers.json`` (128,256 entries, and top 20). A test derives these
numbers from those files anew, and fails where one is off by a factor of two.
"""

from __future__ import annotations

from typing import Final

SERVER_JOB: Final = 18e-6
"""Seconds of the server's processor for a prompt that is asked, computed, stored and read."""
SERVER_BYTE: Final = 0.36e-9
"""And for each byte of an answer, each time that it comes in or goes out."""
CLIENT_JOB: Final = 20e-6
"""Seconds of a client's processor for a prompt, of those asked in batch calls."""
CLIENT_BYTE: Final = 0.41e-9
"""And for each byte of its answer."""
BUSY: Final = 0.7
"""Of a core: beyond, requests begin to wait for each other."""
