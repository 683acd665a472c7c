"""Telling the server what nobody here waits for any longer."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import redis.exceptions

from lmpool.isolation import isolate
from lmpool.keys import ShardKeys
from lmpool.producer.session import CLAIM_MOST, Session
from lmpool.scripts import script
from lmpool.server import is_lost
from lmpool.servers import Servers

logger = logging.getLogger(__name__)


def withdraw(session: Session, servers: Servers) -> None:
    """Withdraw what the session has withdrawn; what could not be told is kept for the next time."""
    with session.lock:
        withdrawn = session.table.take_withdrawn()
    by_shard: dict[int, list[str]] = defaultdict(list)
    for number, digest in withdrawn:
        by_shard[number].append(digest.hex())
    try:
        for number, digests in by_shard.items():
            shard = session.shards[number]
            for i in range(0, len(digests), CLAIM_MOST):
                part = digests[i : i + CLAIM_MOST]
                isolate(part, partial(_withdraw_in, session, servers, shard), _left)
    except Exception as error:
        if is_lost(error):  # what is refused now would be refused again, at once
            with session.lock:
                session.table.withdrawn = withdrawn + session.table.withdrawn
        raise


def _withdraw_in(
    session: Session, servers: Servers, shard: ShardKeys, digests: Sequence[str]
) -> None:
    script("withdraw")(
        servers.for_shard(shard), [shard.stream().key], [shard.prefix, session.id, *digests]
    )


def _left(digest: str, error: redis.exceptions.RedisError) -> None:
    logger.debug("%s is not withdrawn: %s", digest, error)  # its flight ends by itself
