"""Telling the server what nobody here waits for any longer."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import redis.exceptions

from lmpool.commands import Server
from lmpool.isolation import isolate
from lmpool.keys import ShardKeys
from lmpool.producer.session import CLAIM_MOST, Session
from lmpool.scripts import script
from lmpool.server import is_lost
from lmpool.servers import Servers
from lmpool.wants import Digest

logger = logging.getLogger(__name__)


def withdraw(session: Session, servers: Servers) -> list[tuple[int, Digest]]:
    """Withdraw what the session has withdrawn; what could not be told is kept for the next time.

    Returns what is of shards that are away while others are served.
    """
    with session.lock:
        withdrawn = session.table.take_withdrawn()
    try:
        return withdraw_these(session, servers, withdrawn)
    except Exception as error:
        if is_lost(error):  # what is refused now would be refused again, at once
            with session.lock:
                session.table.withdrawn = withdrawn + session.table.withdrawn
        raise


def withdraw_these(
    session: Session, servers: Servers, withdrawn: Sequence[tuple[int, Digest]]
) -> list[tuple[int, Digest]]:
    """Withdraw these, by the number of their shard. Returns those whose shards are away while
    others are served."""
    by_shard: dict[int, list[Digest]] = defaultdict(list)
    for number, digest in withdrawn:
        by_shard[number].append(digest)
    away: list[tuple[int, Digest]] = []
    for number, digests in by_shard.items():
        shard = session.shards[number]
        if not servers.apart([shard], partial(withdraw_in, shard, session.id, digests)):
            away += [(number, digest) for digest in digests]
    return away


def withdraw_in(shard: ShardKeys, client: str, digests: Sequence[Digest], server: Server) -> bool:
    """Say that this client waits no longer for these, of one shard. Returns true."""

    def withdraw_some(some: Sequence[str]) -> None:
        keys = [shard.stream().key]
        script("withdraw")(server, keys, [shard.prefix, client, *some])

    names = [digest.hex() for digest in digests]
    for i in range(0, len(names), CLAIM_MOST):
        isolate(names[i : i + CLAIM_MOST], withdraw_some, _left)
    return True


def _left(digest: str, error: redis.exceptions.RedisError) -> None:
    logger.debug("%s is not withdrawn: %s", digest, error)  # its flight ends by itself
