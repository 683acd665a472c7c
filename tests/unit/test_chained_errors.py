"""Errors behind an error: what went wrong first, and what is in memory for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NoReturn

import pytest

from lmpool.backends.vllm.internals import root_cause
from lmpool.checks import chained

pytestmark = pytest.mark.timeout(20)  # a walk may have no end


class Weights:
    """What a frame holds."""


def fail(words: str, held: list[weakref.ref[Weights]]) -> NoReturn:
    weights = Weights()
    held.append(weakref.ref(weights))
    raise ValueError(words)


def caught(raising: Callable[[], object]) -> BaseException:
    try:
        raising()
    except ValueError as error:
        return error
    raise AssertionError("nothing was raised")


def behind_itself(held: list[weakref.ref[Weights]]) -> BaseException:
    """An error whose cause was raised while it was handled, as one that is raised again has it."""
    saved: list[BaseException] = []

    def handle() -> None:
        try:
            fail("last", held)
        except ValueError as error:
            saved.append(error)
            fail("first", held)

    cause = caught(handle)

    def again() -> NoReturn:
        raise saved[0] from cause

    error = caught(again)
    assert error.__cause__ is cause
    assert cause.__context__ is error
    return error


def of_another(held: list[weakref.ref[Weights]]) -> BaseException:
    """An error that was raised from one while another was handled."""
    first = caught(lambda: fail("first", held))

    def handle() -> NoReturn:
        try:
            fail("hidden", held)
        except ValueError:
            raise ValueError("last") from first

    return caught(handle)


def of_none(held: list[weakref.ref[Weights]]) -> BaseException:
    def handle() -> NoReturn:
        try:
            fail("hidden", held)
        except ValueError:
            raise ValueError("last") from None

    return caught(handle)


def while_handled(held: list[weakref.ref[Weights]]) -> BaseException:
    def handle() -> None:
        try:
            fail("first", held)
        except ValueError:
            fail("last", held)

    return caught(handle)


MAKERS = {
    behind_itself: ["last", "first"],
    of_another: ["last", "first"],
    of_none: ["last"],
    while_handled: ["last", "first"],
}


@pytest.mark.parametrize(("make", "shown"), MAKERS.items())
def test_errors_behind_one_come_once_each(
    make: Callable[[list[weakref.ref[Weights]]], BaseException], shown: list[str]
) -> None:
    held: list[weakref.ref[Weights]] = []
    error = make(held)
    assert [str(one) for one in chained(error)] == shown
    every = [str(one) for one in chained(error, hidden=True)]
    assert [one for one in every if one != "hidden"] == shown
    assert ("hidden" in every) == (make in (of_another, of_none))
    assert [*chained(None)] == []


@pytest.mark.parametrize(("make", "shown"), MAKERS.items())
def test_what_went_wrong_first_in_vllm(
    make: Callable[[list[weakref.ref[Weights]]], BaseException], shown: list[str]
) -> None:
    assert root_cause(make([])) == f"ValueError: {shown[-1]}"


@pytest.mark.parametrize("make", MAKERS)
def test_no_error_holds_what_was_loaded_until_sglang_failed(
    make: Callable[[list[weakref.ref[Weights]]], BaseException],
) -> None:
    """Also those that no traceback shows."""
    pytest.importorskip("torch")
    from lmpool.backends.sglang.scheduler import let_go

    held: list[weakref.ref[Weights]] = []
    error = make(held)
    assert held
    assert all(one() is not None for one in held)
    let_go(error)
    assert [one() for one in held] == [None] * len(held)
    assert isinstance(error, ValueError)  # which is in somebody's hands still
