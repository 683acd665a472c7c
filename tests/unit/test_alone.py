"""What callers that ask alone leave to the client's threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmpool.producer.alone import Alone
from lmpool.producer.line import Line
from lmpool.producer.session import GivenUp, Session
from lmpool.producer.stacking import STACKED
from lmpool.rows import LARGE, pack_logprobs
from tests.support.parts import ask, info_of, jobs_of, new_session, some_prompts


def line(session: Session, name: str, exchange: Any) -> Line:
    assert session.info is not None
    return Line(name, session.shards[0], exchange, session.info, None, lambda worker: True)


def test_a_claim_is_heard_before_it_is_withdrawn() -> None:
    """Or else its job would come behind that, and nobody would want it."""
    session = new_session("redis://127.0.0.1:1/0", "pool")
    alone = Alone(session, lambda worker: True)
    done: list[object] = []
    server = SimpleNamespace(
        evalsha=lambda sha, keys, *words: done.append(("withdraw", *words[2:])),
        delete=lambda *keys: done.append(("delete", *keys)),
    )
    servers: Any = SimpleNamespace(for_shard=lambda shard: server)

    async def replies(count: int, until: float) -> list[Any]:
        done.extend(["heard"] * count)
        return [[b"j", 1]] * count

    exchange: Any = SimpleNamespace(replies=replies)
    bell: Any = SimpleNamespace(quiet=lambda: done.append("quiet"))
    shard, (job,) = session.shards[0], jobs_of(some_prompts(1))
    call = ask(session, [job])
    (flight,) = session.table.take_unsent(1, 1 << 20)
    with session.lock:
        session.forget(call)
    alone._bell = bell
    lines = [line(session, f"name-{n}", exchange) for n in (1, 2, 3, 4)]
    for asks in lines[:3]:
        assert asks.begin(job, False)
    lines[0]._passed_over = 2
    session.given_up = [
        GivenUp(lines[0], flight),
        GivenUp(lines[1], None, is_read=True),
        GivenUp(lines[3], None),
    ]
    assert alone.has_work
    alone.look_after(servers)
    assert done == [
        "quiet",
        "heard",
        "heard",
        "heard",
        ("withdraw", "name-1", job.digest.hex()),
        ("delete", shard.reply("name-1")),
        ("delete", shard.reply("name-2")),
        "quiet",
    ]
    assert not alone.has_work
    assert session.table.statistics.joined == 1


@pytest.mark.parametrize("got_it", [False, True])
def test_who_waits_as_well_is_told_where_landing_was_interrupted(got_it: bool) -> None:
    """As by Ctrl-C between a flight's leaving the table and its callers' being told."""
    session = new_session("redis://127.0.0.1:1/0", "pool")
    alone = Alone(session, lambda worker: True)
    session.on_forget = alone.forget
    jobs = jobs_of(some_prompts(1))
    reader, other = ask(session, jobs), ask(session, jobs)
    (flight,) = session.table.take_unsent(1, 1 << 20)
    alone._line = line(session, "name-1", None)
    alone._call, alone._flight, alone._reads = reader, flight, True
    alone._line.claim, alone._line.has_claimed = b"q", True
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
    assert [given.flight for given in session.given_up] == [flight]


@pytest.mark.parametrize("was_usual", [True, False])
@pytest.mark.parametrize("is_hit", [True, False])
def test_what_was_known_before_says_nothing_of_where_rows_come_from(
    was_usual: bool, is_hit: bool
) -> None:
    session = new_session("redis://127.0.0.1:1/0", "pool", info_of(vocab_size=LARGE))
    alone = Alone(session, lambda worker: True)
    jobs = jobs_of(some_prompts(1))
    reader = ask(session, jobs)
    (flight,) = session.table.take_unsent(1, 1 << 20)
    alone._line = line(session, "name-1", None)
    alone._line.is_hit, session.near.are_usual = is_hit, was_usual
    row = pack_logprobs(np.zeros(LARGE, np.float32)).joined()
    with session.lock:
        assert alone._land(flight, row)
    assert reader.done
    assert session.near.are_usual is (was_usual and is_hit)
