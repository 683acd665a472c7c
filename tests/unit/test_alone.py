"""What callers that ask alone leave to the client's threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmpool.producer.alone import Alone
from lmpool.producer.session import GivenUp
from lmpool.producer.stacking import STACKED
from lmpool.wants import Digest
from tests.support.parts import ask, jobs_of, new_session, some_prompts


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


@pytest.mark.parametrize("got_it", [False, True])
def test_who_waits_as_well_is_told_where_landing_was_interrupted(got_it: bool) -> None:
    """As by Ctrl-C between a flight's leaving the table and its callers' being told."""
    session = new_session("redis://127.0.0.1:1/0", "pool")
    alone = Alone(session)
    session.on_forget = alone.forget
    jobs = jobs_of(some_prompts(1))
    reader, other = ask(session, jobs), ask(session, jobs)
    (flight,) = session.table.take_unsent(1, 1 << 20)
    alone._call, alone._flight, alone._shard, alone._reads = reader, flight, session.shards[0], True
    alone._claimed = b"q"
    session.table._pop(jobs[0].digest)
    if got_it:
        other.take(0, STACKED)
    with session.lock:
        session.forget(reader)
    assert session.table.statistics.queued == 1
    if got_it:
        assert other._asleep is not None
        assert not other._asleep.locked()
        assert not session.table.flights
    else:
        assert session.table.is_waiting(flight)
        assert session.table.take_unsent(1, 1 << 20) == [flight]
        assert session.table.land(jobs[0].digest, STACKED) == [other]
    assert [given.digest for given in session.given_up] == [jobs[0].digest]
