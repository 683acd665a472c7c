"""What is logged of an outage."""

from __future__ import annotations

import redis.exceptions

from lmpool.reasons import MOST, Reasons


def lost(words: str) -> redis.exceptions.ConnectionError:
    return redis.exceptions.ConnectionError(words)


def test_a_reason_is_new_once() -> None:
    reasons = Reasons()
    gone = [lost("gone"), lost("full"), redis.exceptions.TimeoutError("gone")]
    assert [reasons.is_new(error) for error in gone * 2] == [True] * 3 + [False] * 3
    reasons.clear()
    assert reasons.is_new(gone[0])


def test_other_numbers_are_no_other_reason() -> None:
    reasons = Reasons()
    assert reasons.is_new(lost("Error 111 connecting to 10.0.0.1:6379"))
    assert not reasons.is_new(lost("Error 111 connecting to 10.0.0.2:7000"))


def test_nonsense_does_not_fill_a_log() -> None:
    reasons = Reasons()
    told = [reasons.is_new(lost("x" * number)) for number in range(2 * MOST)]
    assert told == [True] * MOST + [False] * MOST
