"""What a client does when its pool serves another model than it did."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial

from lmpool.clock import to_ms
from lmpool.commands import Server
from lmpool.errors import PoolMismatch, WireError
from lmpool.keys import ShardKeys
from lmpool.liveness import as_served
from lmpool.model_info import ModelInfo
from lmpool.producer.pending import wake
from lmpool.producer.session import REPLY_TTL, Session
from lmpool.producer.withdrawal import withdraw, withdraw_these
from lmpool.servers import Servers
from lmpool.settings import ClientOptions

logger = logging.getLogger(__name__)


def look_at(session: Session, servers: Servers, current: bytes) -> bool:
    """Compare the pool's model info with what the client knows. True if the pool was replaced.

    Then the client moves to the new pool, or fails what it waits for, as its options say. Whoever
    waited gets `PoolMismatch` in both cases: after a move the prompts have to be checked anew, and
    asked under other names. A pool of the same model in other shards or lanes is moved to without a
    word to anyone, once workers have: what is waited for is asked for there. On the sender's
    thread.
    """
    known = session.info
    assert known is not None
    if is_known(session, current):
        return False
    try:
        info = ModelInfo.unpack(current)
    except WireError as error:  # of another version of lmpool
        _end(session, replaced(session.options, known, f" ({error})"))
        return True
    if info.gives_the_same_as(known):
        info = as_served(servers, session.keys, info, known)
        if is_known(session, info.pack()):
            return False  # nobody has moved there yet
        left = session.shards
        if info.shards != known.shards:
            _withdraw_sent(session, servers)
        session.spread(info)
        logger.info("pool %s is now in %d shards", session.options.pool, info.shards)
        wake_collector(session, servers, left)
    elif session.options.when_replaced == "follow":
        _move(session, servers, known, as_served(servers, session.keys, info))
    else:
        _end(session, replaced(session.options, known))
    return True


def _end(session: Session, error: PoolMismatch) -> None:
    session.confirmed = -math.inf  # nor does the client's cache answer who asks again
    session.fail_everything(error)


def is_known(session: Session, current: bytes) -> bool:
    """Whether the pool's model info is what the client knows, as far as it matters."""
    try:
        info, known = ModelInfo.unpack(current), session.info
    except WireError:
        return False
    assert known is not None
    keys = session.keys
    return (
        info.shard_keys(keys) == known.shard_keys(keys)
        and info.placement() == known.placement()
        and info.fingerprint == known.fingerprint
    )


def lies_elsewhere(session: Session, current: bytes) -> bool:
    """Whether the pool is to serve the same in other shards or lanes than the client knows: workers
    may have yet to move there, or are between the two."""
    try:
        info, known = ModelInfo.unpack(current), session.info
    except WireError:
        return False
    return known is not None and info.gives_the_same_as(known) and not is_known(session, current)


def _withdraw_sent(session: Session, servers: Servers) -> None:
    """Take off what was asked in shards that are left: it is asked for elsewhere."""
    with session.lock:
        sent = [
            (flight.shard, digest)
            for digest, flight in session.table.flights.items()
            if flight.sent
        ]
    withdraw_these(session, servers, sent)


def replaced(options: ClientOptions, known: ModelInfo, detail: str = "") -> PoolMismatch:
    """The error of who asks a pool that was replaced."""
    return PoolMismatch(
        f"pool {options.pool!r} now serves another model than the {known.model!r} this client "
        f"knows{detail}: connect again, or with when_replaced='follow'"
    )


def _move(session: Session, servers: Servers, known: ModelInfo, info: ModelInfo) -> None:
    logger.warning(
        "pool %s now serves %s instead of %s: it is asked from now on",
        session.options.pool,
        info.model,
        known.model,
    )
    left = session.shards
    error = replaced(session.options, known)
    with session.lock:
        ended = session.end_all(error)
    try:
        withdraw(session, servers)
    finally:
        session.near.enter(session.options.pool, info)
        ended += session.move(info, error)
        wake(ended)
    wake_collector(session, servers, left)


def wake_collector(session: Session, servers: Servers, shards: Sequence[ShardKeys]) -> None:
    """End the blocking reads of streams that nobody writes to any longer."""
    for together in servers.read_together(shards):
        servers.apart(together, partial(_wake, together[0].reply(session.id)))


def _wake(reply: str, server: Server) -> None:
    with server.pipeline(transaction=True) as pipeline:
        pipeline.execute_command("XADD", reply, "*", "bye", "1")
        pipeline.execute_command("PEXPIRE", reply, to_ms(REPLY_TTL))
        pipeline.execute()
