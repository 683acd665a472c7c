"""What a call says whose time is over, of whichever of its jobs a worker or the caller saw late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from lmpool.errors import JobExpired, LmpoolError, PoolMismatch, PoolTimeout, PromptFailed
from lmpool.producer.call_options import CallOptions
from lmpool.producer.caller import Caller
from lmpool.producer.client import Client
from lmpool.producer.deadline import Deadline
from lmpool.producer.pending import LoneCall, PendingCall
from tests.support.protocol import new_job

ROW = np.zeros(4, np.float32)
MESSAGE = "{} of {} answers were not there after 0.5 s; they were withdrawn (pool 'p')"


@pytest.fixture
def caller() -> Caller:
    client = SimpleNamespace(
        forget=lambda call: bool(call.left), pool_for=lambda deadline: "pool 'p'"
    )
    made = Caller.__new__(Caller)
    made._client = cast(Client, client)
    return made


def options(keeps: bool) -> CallOptions:
    return CallOptions(Deadline(0.5), "interactive", False, keeps)


def call_of(count: int, keeps: bool) -> PendingCall:
    return PendingCall([new_job([n + 1]) for n in range(count)], 0.0, keeps_errors=keeps)


def kinds(found: list[object]) -> list[type]:
    return [type(each) for each in found]


def test_what_is_kept_has_the_same_words_and_says_who_saw_it(caller: Caller) -> None:
    call = call_of(5, keeps=True)
    call.take(0, ROW)
    call.fail(1, JobExpired("told"))
    call.fail(2, PromptFailed("boom"))
    found = caller.end(call, options(True))
    assert kinds(list(found)) == [np.ndarray, JobExpired, PromptFailed, PoolTimeout, PoolTimeout]
    said = MESSAGE.format(3, 5)
    assert [str(each) for each in found[1:]] == [said, "boom", said, said]
    assert [each.index for each in found[1:] if isinstance(each, LmpoolError)] == [1, 2, 3, 4]


def test_what_only_workers_saw_is_told_with_the_same_words(caller: Caller) -> None:
    call = call_of(3, keeps=True)
    call.fail(0, JobExpired("told"))
    call.take(1, ROW)
    call.fail(2, JobExpired("told"))
    assert call.done
    found = caller.end(call, options(True))
    assert kinds(list(found)) == [JobExpired, np.ndarray, JobExpired]
    assert [str(found[0]), str(found[2])] == [MESSAGE.format(2, 3)] * 2


@pytest.mark.parametrize("kind", [JobExpired, PoolTimeout])
def test_the_first_that_is_late_ends_a_call_that_keeps_none(
    kind: type[PoolTimeout], caller: Caller
) -> None:
    call = call_of(3, keeps=False)
    call.take(1, ROW)
    if kind is JobExpired:
        call.fail(2, JobExpired("told"))
    with pytest.raises(PoolTimeout) as caught:
        caller.end(call, options(False))
    assert type(caught.value) is kind
    assert str(caught.value) == MESSAGE.format(2, 3)
    assert caught.value.index is None  # it is about the whole call


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("kind", [JobExpired, PoolTimeout])
def test_a_call_of_one_says_so_too(kind: type[PoolTimeout], keeps: bool, caller: Caller) -> None:
    call = LoneCall(new_job([1]), 0.0, "interactive", None, keeps)
    if kind is JobExpired:
        call.fail(0, JobExpired("told"))
    try:
        (error,) = caller.end(call, options(keeps))
        assert keeps
    except PoolTimeout as raised:
        assert not keeps
        error = raised
    assert type(error) is kind
    assert str(error) == MESSAGE.format(1, 1)


@pytest.mark.parametrize("keeps", [False, True])
def test_another_error_stays_what_it_is(keeps: bool, caller: Caller) -> None:
    call = call_of(2, keeps)
    call.error = PoolMismatch("another model")
    if keeps:
        call.answers[0] = JobExpired("told")
        assert [str(each) for each in caller.end(call, options(True))] == ["told", "another model"]
    else:
        with pytest.raises(PoolMismatch, match="another model"):
            caller.end(call, options(False))


def test_answers_that_are_all_there_are_no_error(caller: Caller) -> None:
    call = call_of(2, keeps=True)
    call.take(0, ROW)
    call.take(1, ROW)
    assert kinds(list(caller.end(call, options(True)))) == [np.ndarray] * 2
