"""Whether a batch is worth waiting with, as what comes is watched."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lmpool.worker.batching import Delivery
from lmpool.worker.company import LONE_MOST, TRIES_AGAIN, Company
from tests.support.protocol import new_job, shard_of_pool

TIMEOUT = 0.01
STREAM = shard_of_pool("p").stream()


def came(seconds: float, job: int = 1) -> Delivery:
    """A job that was sent, and came, at that time."""
    sent = replace(new_job(job), sent=round(1000 * seconds))
    return Delivery(sent, b"1-0", STREAM, seconds)


def is_lone(company: Company, seconds: float) -> bool:
    return not company.is_likely(came(seconds))


def after(batches: int) -> Company:
    """One that has seen so many lone batches, a second apart, the last one at their number."""
    company = Company(TIMEOUT)
    for number in range(1, batches + 1):
        company.is_likely(came(number))
    return company


def test_after_a_few_in_vain_batches_leave_at_once_and_a_few_try_again() -> None:
    company = Company(TIMEOUT)
    waited = [company.is_likely(came(number)) for number in range(1, 4 * TRIES_AGAIN)]
    tried = [number for number, waits in enumerate(waited, 1) if waits]
    assert tried == [*range(1, LONE_MOST + 1), *range(TRIES_AGAIN, 4 * TRIES_AGAIN, TRIES_AGAIN)]


def test_company_that_came_is_waited_for_again() -> None:
    company = after(50)
    company.came()
    assert not any(is_lone(company, 60 + number) for number in range(LONE_MOST))
    assert is_lone(company, 70)


@given(late=st.floats(0, 0.05))
def test_what_would_have_been_company_is_waited_for(late: float) -> None:
    company = after(50)
    company.came_late([came(70), came(50 + late)])
    assert is_lone(company, 51) == (round(1000 * late) > 1000 * TIMEOUT + 1)


def test_what_was_sent_long_before_and_found_now_is_no_company() -> None:
    company = after(50)
    company.came_late([came(20)])
    assert is_lone(company, 51)


@given(apart=st.floats(0.001, 0.05))
def test_batches_that_follow_faster_than_they_could_wait_are_company(apart: float) -> None:
    company = after(50)
    assert is_lone(company, 50 + apart) == (50 + apart - 50 >= TIMEOUT / 2)
