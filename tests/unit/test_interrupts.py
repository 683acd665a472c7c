"""Locks that are free again behind whatever a signal's handler raises."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lmpool import interrupts


@pytest.fixture
def thing(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(interrupts, "MAY_LEAK", True)

    class Owner:
        def __init__(self) -> None:
            self.lock = threading.RLock()

    class Thing:
        def __init__(self) -> None:
            self.owner = Owner()

        @interrupts.frees("owner.lock")
        def leak(self, times: int = 1, error: type[BaseException] = KeyboardInterrupt) -> None:
            """As if that came between the lock and its block."""
            for _ in range(times):
                self.owner.lock.acquire()
            raise error

        @interrupts.frees("owner.lock")
        def around(self) -> None:
            """One locked method within another."""
            self.owner.lock.acquire()
            self.leak()

        @interrupts.frees("owner.lock")
        def answer(self, first: int, *, second: int) -> tuple[int, int]:
            """What it gives."""
            with self.owner.lock:
                return first, second

    return Thing()


def is_free(lock: Any) -> bool:
    """For another thread."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("times", [0, 1, 3])
def test_it_is_free_behind_an_error(thing: Any, times: int, error: type[BaseException]) -> None:
    with pytest.raises(error):
        thing.leak(times, error)
    assert is_free(thing.owner.lock)


def test_it_is_free_behind_several_methods(thing: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        thing.around()
    assert is_free(thing.owner.lock)


def test_who_held_it_before_holds_it_still(thing: Any) -> None:
    """A signal's handler may have interrupted them."""
    with thing.owner.lock:
        with pytest.raises(KeyboardInterrupt):
            thing.leak(0)
        assert not is_free(thing.owner.lock)
    assert is_free(thing.owner.lock)


def test_a_method_is_called_as_before(thing: Any) -> None:
    assert thing.answer(1, second=2) == (1, 2)
    assert thing.answer.__doc__ == "What it gives."
    assert is_free(thing.owner.lock)


def test_where_nothing_leaks_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "MAY_LEAK", False)

    def method(self: Any) -> None:
        """Anything."""

    assert interrupts.frees("lock")(method) is method
