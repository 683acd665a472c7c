"""Clients for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lmpool


@contextmanager
def connected(url: str, pool: str, **options: Any) -> Iterator[lmpool.PooledLM]:
    """A client that is closed at the end. Rows are numpy unless `framework` says otherwise.

    It waits for workers for long: on a busy machine a living one may be late to say so.
    """
    lm = lmpool.connect(url, pool, **{"framework": "numpy", "workers_timeout": 60.0, **options})
    try:
        lm.info  # noqa: B018 - connects
        yield lm
    finally:
        lm.close()
