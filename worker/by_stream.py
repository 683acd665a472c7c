"""Jobs as scripts take them: of one shard in one call, stream by stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lmpool.commands import Value
from lmpool.keys import JobStream, ShardKeys
from lmpool.worker.batching import Delivery

T = TypeVar("T")


def stream_of(delivery: Delivery) -> JobStream:
    """The stream that a job stands in."""
    return delivery.stream


def digest_and_entry(delivery: Delivery) -> tuple[str, bytes]:
    """What most scripts are told of a job."""
    return delivery.job.digest.hex(), delivery.entry


def by_shard(
    items: Iterable[T], stream_of: Callable[[T], JobStream]
) -> list[tuple[ShardKeys, list[T]]]:
    """What belongs to each shard, in the order in which it came."""
    found: dict[str, tuple[ShardKeys, list[T]]] = {}
    last: ShardKeys | None = None
    mine: list[T] = []
    for item in items:
        shard = stream_of(item).shard
        if shard is not last:  # nearly all are of one
            last = shard
            mine = found.setdefault(shard.prefix, (shard, []))[1]
        mine.append(item)
    return list(found.values())


def counted(
    items: Sequence[T],
    stream_of: Callable[[T], JobStream],
    values: Callable[[T], Sequence[Value]],
) -> tuple[list[str], list[T], list[Value]]:
    """What belongs to one shard: its streams, the items in the order of these, and the arguments.

    These are for each stream the number of its items, then the values of each.
    """
    found: dict[str, list[T]] = {}
    for item in items:
        found.setdefault(stream_of(item).key, []).append(item)
    arguments: list[Value] = []
    for mine in found.values():
        arguments.append(len(mine))
        for item in mine:
            arguments += values(item)
    return [*found], [item for mine in found.values() for item in mine], arguments
