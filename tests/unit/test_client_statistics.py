"""Counters of a client whose answers are quicker than the server's word on their claims."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lmpool.producer import session as session_module
from lmpool.producer.alone import Alone
from lmpool.producer.flights import Flight
from lmpool.producer.pending import PendingCall
from lmpool.producer.sender import Sender
from lmpool.producer.session import Session
from lmpool.wants import decode_all
from tests.support.clients import connected
from tests.support.parts import ask, info_of, jobs_of, new_session, row_of, some_prompts
from tests.support.workers import in_process_worker

INFO = info_of(shards=1)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(session_module, "COUNTED_WITHIN", 60.0)
    return new_session("redis://unused.invalid", "pool", INFO)


@pytest.fixture
def answered(session: Session) -> list[Flight]:
    """Two that were sent, of which the first was answered before its claim was."""
    jobs = jobs_of(some_prompts(2), info=INFO)
    ask(session, jobs)
    flights = session.table.take_unsent(2, 1 << 20)
    with session.lock:
        for answer in decode_all(jobs[0].want, [row_of(jobs[0])], INFO):
            session.table.land(jobs[0].digest, answer)
    assert not session.table.is_waiting(flights[0])
    return flights


@pytest.mark.parametrize(("claims", "counter"), [("qh", "queued"), ("jq", "joined")])
def test_the_word_on_a_claim_is_waited_for(
    session: Session, answered: list[Flight], claims: str, counter: str
) -> None:
    sender = Sender(session, Alone(session, lambda worker: False), lambda: None)
    read: list[dict[str, int]] = []
    reader = threading.Thread(target=lambda: read.append(session.read_statistics()))
    reader.start()
    reader.join(0.1)
    assert reader.is_alive()
    sender._take_claims(answered, claims, "interactive")
    reader.join(30)
    assert read[0][counter] == 1
    assert sum(read[0][name] for name in ("queued", "joined", "cache_hits")) == 2
    assert session.read_statistics() == read[0]


def test_it_is_not_waited_for_once_the_client_is_closed(
    session: Session, answered: list[Flight]
) -> None:
    session.closed = True
    assert session.read_statistics()["queued"] == 0


@contextmanager
def reading(session: Session) -> Iterator[None]:
    """Meanwhile somebody waits for the counters, and has them soon after it."""
    read: list[dict[str, int]] = []
    reader = threading.Thread(target=lambda: read.append(session.read_statistics()))
    reader.start()
    reader.join(0.1)
    assert reader.is_alive()
    yield
    reader.join(30)
    assert len(read) == 1


def test_nor_for_claims_that_failed(session: Session, answered: list[Flight]) -> None:
    with reading(session), session.lock:
        session.put_back(answered)


def test_nor_beyond_the_end_of_its_client(any_server: str, pool_name: str) -> None:
    with in_process_worker(any_server, pool_name), connected(any_server, pool_name) as lm:
        session, (job,) = lm._client._session, jobs_of(some_prompts(1), info=INFO)
        lm.sync.next_token_logprobs([1])
        with session.lock:
            flight = Flight(job, PendingCall([job], None), 0, 0.0, 0, 0)
            session.table.uncounted[flight] = time.monotonic() + 60
        with reading(session):
            lm.sync.close()


def test_nor_for_long(
    session: Session, answered: list[Flight], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "COUNTED_WITHIN", 0.05)
    assert session.read_statistics()["queued"] == 0
    monkeypatch.setattr(session_module, "COUNTED_WITHIN", 60.0)
    assert session.read_statistics()["queued"] == 0  # it was given up


def test_nor_by_who_interrupted_a_call(session: Session, answered: list[Flight]) -> None:
    """A signal's handler reads what is counted: the thread it runs in may have to count first."""
    with session.lock:
        assert session.read_statistics()["queued"] == 0


def test_all_that_was_answered_is_counted(
    any_server: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the sender's thread comes to what the server said."""
    monkeypatch.setattr(session_module, "COUNTED_WITHIN", 60.0)
    take_claims = Sender._take_claims

    def late(self: Sender, *arguments: Any) -> Any:
        time.sleep(0.05)
        return take_claims(self, *arguments)

    monkeypatch.setattr(Sender, "_take_claims", late)
    with in_process_worker(any_server, pool_name), connected(any_server, pool_name) as lm:
        for number in range(10):
            lm.sync.next_token_logprobs([number])
            assert lm.statistics()["queued"] == number + 1
