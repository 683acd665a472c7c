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
    """A worker's signs of life, renewed as a living one's are; they are gone at the end."""
    with renewed(client, shard.alive(worker), beat):
        yield


@contextmanager
def renewed(client: redis.Redis, key: str, value: bytes) -> Iterator[None]:
    """A sign of life under a key, renewed for as long as this goes on.

    One that nobody renews counts for a heartbeat's life at most, and not if it was set for ever.
    """
    over = threading.Event()

    def renew() -> None:
        client.set(key, value, px=LIFE_MS)

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
        client.delete(key)
