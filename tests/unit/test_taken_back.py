"""What a worker looks at before it does what it was asked a while ago."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lmpool.control_connections import WITHDRAWN
from lmpool.errors import AdapterError
from lmpool.worker import control


class Queue:
    """A server that has this in place of a job's result."""

    def __init__(self, found: bytes | None) -> None:
        self._found = found

    async def get(self, key: str) -> bytes | None:
        assert key == "arq:result:x"
        return self._found


async def checked(found: bytes | None) -> None:
    ctx: dict[str, Any] = {"redis": Queue(found), "job_id": "x"}
    await asyncio.to_thread(control._wanted(ctx))


@pytest.mark.parametrize("found", [None, b"a result: it was put again, and has run"])
def test_what_was_not_taken_back_is_done(found: bytes | None) -> None:
    asyncio.run(checked(found))


def test_what_was_taken_back_is_not_done() -> None:
    with pytest.raises(AdapterError, match="taken for dead"):
        asyncio.run(checked(WITHDRAWN))


def test_what_a_worker_had_begun_before_that_is_forgotten_is_not_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "LONGEST", -1.0)
    with pytest.raises(AdapterError, match="taken for dead"):
        asyncio.run(checked(None))
