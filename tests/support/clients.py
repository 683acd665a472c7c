"""Clients for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lmpool


@contextmanager
def connected(url: str, pool: str, **options: Any) -> Iterator[lmpool.PooledLM]:
    """A client that is closed at the end. Rows are numpy unless `framework` says otherwise."""
    lm = lmpool.connect(url, pool, **{"framework": "numpy", **options})
    try:
        lm.info  # noqa: B018 - connects
        yield lm
    finally:
        lm.close()
