"""What a claim says, and one that is sent by the thread of who asks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from lmpool.clock import to_ms
from lmpool.commands import Value
from lmpool.connections import CommandAhead
from lmpool.errors import PoolBusy, UnknownAdapter
from lmpool.keys import GROUP, Priority, ShardKeys
from lmpool.producer.flights import Flight
from lmpool.producer.session import CLAIM_BYTES, CLAIM_MOST, FLIGHT_TTL, REPLY_TTL, Session
from lmpool.scripts import script
from lmpool.servers import Servers
from lmpool.wire import JobPacker, claim_head

AHEAD_MOST: Final = 64
"""Jobs that the thread of who asks packs and sends by itself: it may be an event loop's."""
AHEAD_BYTES: Final = 64 << 10
"""The same of their tokens."""


def by_shard(
    shards: Sequence[ShardKeys], flights: list[Flight]
) -> Iterator[tuple[ShardKeys, list[Flight]]]:
    """The flights of each shard that has any."""
    if len(shards) == 1:
        if flights:
            yield shards[0], flights
        return
    for shard in shards:
        mine = [flight for flight in flights if flight.shard == shard.number]
        if mine:
            yield shard, mine


def claim_arguments(
    session: Session,
    shard: ShardKeys,
    flights: Sequence[Flight],
    priority: Priority,
    most_bytes: float = math.inf,
    client: str | None = None,
) -> list[Value] | None:
    """What ``enqueue.lua`` is told of flights that are claimed now, under another name than the
    session's where one is given; None where their jobs are more than `most_bytes`."""
    assert session.info is not None
    now, now_ms = time.monotonic(), session.clock.now_ms()  # a pause makes no deadline earlier
    arguments: list[Value] = [
        shard.prefix,
        client or session.id,
        to_ms(REPLY_TTL),
        to_ms(FLIGHT_TTL),
        session.info.max_backlog,
        GROUP,
        int(priority == "interactive"),
        shard.lanes,
    ]
    pack = JobPacker(now_ms).pack
    heads: list[str] = []
    packed: list[bytes] = []
    adapters: dict[str, int] = {}
    for flight in flights:
        job, due, adapter = flight.job, flight.deadline, 0
        deadline = None if due is None else now_ms + int((due - now) * 1000)
        if job.adapter is not None:
            adapter = adapters.setdefault(job.adapter, len(adapters) + 1)
        heads.append(claim_head(job.digest, flight.lane, adapter, deadline))
        packed.append(pack(job.want, job.adapter, job.digest, job.tokens, deadline, flight.trace))
        most_bytes -= len(packed[-1])
        if most_bytes < 0:
            return None
    if client is None:
        session.near.expect(flights)
    return [*arguments, "".join(heads), len(adapters), *adapters, *packed]


class ClaimAhead(NamedTuple):
    """A claim whose answer the sender is to read: who asked has sent it, or a part."""

    shard: ShardKeys
    flights: list[Flight]
    priority: Priority
    command: CommandAhead

    def answer(self) -> Any:
        """What ``enqueue.lua`` answered. Raises redis-py's exceptions."""
        return self.command.reply()


def claim_ahead(
    session: Session, servers: Servers, priority: Priority, client: str | None = None
) -> ClaimAhead | None:
    """The claim of what may go now, ready to be sent; None where it is much, or its server would
    have to be waited for. Under the lock, while the thread rests whose the connections are."""
    shards, unsent = session.shards, session.table.unsent[priority]
    if len(shards) != 1 or len(unsent) > AHEAD_MOST:
        return None
    if sum([len(flight.job.tokens) for flight in unsent]) > AHEAD_BYTES:
        return None
    server = servers.at_hand(shards[0])
    if server is None or not server.may_go_ahead():
        return None
    most = min(CLAIM_MOST, session.may_send(priority))
    flights = session.table.take_unsent(most, CLAIM_BYTES, priority)
    if not flights:
        return None
    try:
        enqueue, first = script("enqueue"), shards[0].stream(priority).key
        # What is wanted may be far longer than the tokens: a number for each position.
        arguments = claim_arguments(session, shards[0], flights, priority, 2 * AHEAD_BYTES, client)
        if arguments is None:
            session.put_back(flights)
            return None
        command = server.ahead(["EVALSHA", enqueue.sha, 1, first, *arguments])
        return ClaimAhead(shards[0], flights, priority, command)
    except BaseException:
        session.put_back(flights)
        raise


def pool_busy(session: Session) -> PoolBusy:
    """The error of who does not wait for room in the backlog."""
    bound = session.info.max_backlog if session.info else 0
    return PoolBusy(
        f"pool {session.options.pool!r} has {bound} jobs waiting, its bound: try again later, add "
        "workers, or raise max_backlog"
    )


def adapter_gone(session: Session, name: str) -> UnknownAdapter:
    """The error of who asks an adapter that is not the registered one any more."""
    return UnknownAdapter(
        f"adapter {name!r} was removed or replaced in pool {session.options.pool!r}; register it "
        "with add_new_lora()"
    )
