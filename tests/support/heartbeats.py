"""Workers that are a heartbeat and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import redis

from lmpool.keys import ShardKeys
from lmpool.liveness import BEAT_MS, LIFE_MS
from tests.support.parts import Guarded


@contextmanager
def beating(
    client: redis.Redis, shard: ShardKeys, worker: str, beat: bytes = b""
) -> Iterator[None]:
    """A worker's signs of life, renewed as a living one's are; they are gone at the end.

    One that nobody renews counts for a heartbeat's life at most, even if it was set for ever: that
    is what living workers see to.
    """
    over = threading.Event()

    def renew() -> None:
        client.set(shard.alive(worker), beat, px=LIFE_MS)

    def renew_until_over() -> None:
        while not over.wait(BEAT_MS / 1000):
            renew()

    renew()
    renewing = Guarded(renew_until_over)
    try:
        yield
    finally:
        over.set()
        renewing.end()
        client.delete(shard.alive(worker))
