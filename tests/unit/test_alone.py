"""What callers that ask alone leave to the client's threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lmpool.producer.alone import Alone
from lmpool.producer.session import GivenUp
from lmpool.wants import Digest
from tests.support.parts import new_session


def test_a_claim_is_heard_before_it_is_withdrawn() -> None:
    """Or else its job would come behind that, and nobody would want it."""
    session = new_session("redis://127.0.0.1:1/0", "pool")
    alone = Alone(session)
    done: list[object] = []
    server = SimpleNamespace(
        evalsha=lambda sha, keys, *words: done.append(("withdraw", *words[2:])),
        delete=lambda *keys: done.append(("delete", *keys)),
    )
    servers: Any = SimpleNamespace(for_shard=lambda shard: server)
    exchange: Any = SimpleNamespace(reply=lambda until: done.append("heard"))
    bell: Any = SimpleNamespace(quiet=lambda: done.append("quiet"))
    shard, digest = session.shards[0], Digest(bytes(16))
    alone._bell = bell
    session.given_up = [GivenUp("name-1", shard, digest, exchange), GivenUp("name-2", shard, None)]
    assert alone.has_work
    alone.look_after(servers)
    assert done == [
        "quiet",
        "heard",
        ("withdraw", "name-1", digest.hex()),
        ("delete", shard.reply("name-1")),
        ("delete", shard.reply("name-2")),
    ]
    assert not alone.has_work
