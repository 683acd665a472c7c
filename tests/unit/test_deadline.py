from __future__ import annotations

import math

import pytest

from lmpool.errors import SettingsError
from lmpool.producer.deadline import LONGEST_WAIT, Deadline


def test_without_a_timeout_nothing_is_counted() -> None:
    deadline = Deadline.checked(None, None)
    assert (deadline.left(), deadline.at_least(3), deadline.at) == (None, None, None)
    assert str(deadline.error("no worker")) == "no worker"
    assert str(deadline.error("no worker", ": start one")) == "no worker: start one"


def test_what_is_left_goes_down_to_nothing() -> None:
    deadline = Deadline.checked(None, 5.0)
    assert 4.0 < (deadline.left() or 0) <= 5.0
    assert deadline.at_least(60) == 60
    past = Deadline.checked(1e-9, None)
    assert past.left() == 0.0
    assert str(past.error("no row", "!")) == "no row after 1e-09 s!"


@pytest.mark.parametrize("timeout", [LONGEST_WAIT * 2, 10**400, math.inf])
def test_longer_than_anyone_waits_is_for_ever(timeout: object) -> None:
    assert Deadline.checked(timeout, 1.0).left() is None


@pytest.mark.parametrize("timeout", [0, -1, math.nan, "5", [], True, 1j])
def test_what_is_no_timeout_is_refused(timeout: object) -> None:
    with pytest.raises(SettingsError, match="timeout="):
        Deadline.checked(timeout, 1.0)


@pytest.mark.parametrize(
    ("timeout", "said"),
    [(0.25, "0.25"), (14.99983, "15"), (0.09999341, "0.1"), (99.9, "99.9"), (3600.0, "3600")],
)
def test_errors_say_the_seconds_as_people_do(timeout: float, said: str) -> None:
    assert str(Deadline(timeout).error("no row")) == f"no row after {said} s"
