"""Coroutines that an event loop goes on with as there is something to be read, without tasks."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from lmpool.bell import CAN_WAIT
from lmpool.exchange import NOTHING, Exchange, waited_for
from lmpool.producer import loop_ear as loop_ear_module
from lmpool.producer.loop_ear import LoopEar, can_hear
from tests.support.exchange_ends import Ends

pytestmark = pytest.mark.skipif(not CAN_WAIT, reason="no loop tells of sockets here")

LONG = 20.0


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with closing(asyncio.new_event_loop()) as loop:
        yield loop


@pytest.fixture
def pipes() -> Iterator[list[tuple[int, int]]]:
    made = [os.pipe() for _ in range(2)]
    yield made
    for ends in made:
        for end in ends:
            with suppress(OSError):
                os.close(end)


class Heard:
    """What comes of coroutines that an ear goes on with."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ear = LoopEar(loop)
        self.loop = loop
        self.ends: list[Any] = []
        self.came_to_its_end = True
        """Whether the last one did."""

    def begin(self, coroutine: Any) -> None:
        def end(found: Any, came_to_its_end: bool) -> None:
            self.ear.leave()
            self.ends.append(found)
            self.came_to_its_end = came_to_its_end

        self.ear.take(coroutine, end)
        self.ear.begin()

    def run(self, coroutine: Any) -> Any:
        """What comes of this one, while the loop runs."""
        before = len(self.ends)

        async def wait() -> None:
            self.begin(coroutine)
            over = time.monotonic() + LONG
            while len(self.ends) == before and time.monotonic() < over:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

        self.loop.run_until_complete(wait())
        assert not is_listening(self.loop)
        (found,) = self.ends[before:]
        return found


def is_listening(loop: Any) -> bool:
    """Whether it has more to hear than its own pipe."""
    return len(loop._selector.get_map()) > 1


async def first(ear: LoopEar, *given: Any) -> int | None:
    return await ear.first_of(*given)


def test_what_there_is_to_be_read_is_told(
    loop: asyncio.AbstractEventLoop, pipes: list[tuple[int, int]]
) -> None:
    heard = Heard(loop)
    (here, there), (other_here, other_there) = pipes

    async def several() -> list[int | None]:
        each = ((here,), (here, other_here), (other_here,), (other_here, here))
        return [await heard.ear.first_of(LONG, *numbers) for numbers in each]

    os.write(there, b"x")
    loop.call_later(0.05, os.write, other_there, b"x")
    loop.call_later(0.02, os.read, here, 1)
    assert heard.run(first(heard.ear, LONG, here)) == here
    os.write(there, b"x")
    assert heard.run(several())[2:] == [other_here, other_here]


def test_time_that_is_over_is_told_and_no_sooner(
    loop: asyncio.AbstractEventLoop, pipes: list[tuple[int, int]]
) -> None:
    heard, here = Heard(loop), pipes[0][0]
    for seconds in (0.2, 0.05, 0.1, 0.01, 0.01, 0.3):
        began = time.monotonic()
        assert heard.run(first(heard.ear, seconds, here)) is None
        assert heard.came_to_its_end
        assert seconds <= time.monotonic() - began < seconds + LONG / 2


def test_a_look_at_the_time_is_for_many(
    loop: asyncio.AbstractEventLoop,
    pipes: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard, (here, there) = Heard(loop), pipes[0]
    timers: list[float] = []
    usual = loop.call_later

    def call_later(delay: float, *given: Any, **also: Any) -> asyncio.TimerHandle:
        timers.append(delay)
        return usual(delay, *given, **also)

    os.write(there, b"x")
    monkeypatch.setattr(loop, "call_later", call_later)
    for _ in range(50):
        assert heard.run(first(heard.ear, LONG, here)) == here
    assert sum(delay > 1 for delay in timers) == 1


def test_a_look_that_was_lost_is_made_up_for(
    loop: asyncio.AbstractEventLoop,
    pipes: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by Ctrl-C, which came twice."""
    monkeypatch.setattr(loop_ear_module, "LATE", 0.0)
    heard, here = Heard(loop), pipes[0][0]
    with monkeypatch.context() as patch:
        patch.setattr(LoopEar, "_ring", lambda ear, at: None)
        heard.begin(first(heard.ear, 0.05, here))
        loop.run_until_complete(asyncio.sleep(0.1))
        assert heard.ear.is_busy
        heard.ear.leave()
    assert heard.run(first(heard.ear, 0.05, here)) is None


@pytest.mark.parametrize("where", ["here", "another thread", "no loop runs", "the loop is closed"])
def test_who_waits_is_called_away(pipes: list[tuple[int, int]], where: str) -> None:
    loop = asyncio.new_event_loop()
    heard, here = Heard(loop), pipes[0][0]
    if where in ("no loop runs", "the loop is closed"):
        loop.call_soon(lambda: heard.begin(first(heard.ear, LONG, here)))
        loop.run_until_complete(asyncio.sleep(0.01))
        assert heard.ear.is_busy
        assert is_listening(loop)
        if where == "the loop is closed":
            loop.close()
        heard.ear.call_away()
        assert heard.ends == [None]
        assert loop.is_closed() or not is_listening(loop)
    else:
        threads: list[threading.Thread] = []

        def call_away() -> None:
            if where == "here":
                heard.ear.call_away()
                return
            threads.append(threading.Thread(target=heard.ear.call_away))
            threads[0].start()

        loop.call_later(0.05, call_away)
        assert heard.run(first(heard.ear, LONG, here)) is None
        for thread in threads:
            thread.join()
    assert not heard.ear.is_busy
    assert not heard.came_to_its_end
    loop.close()


def test_who_goes_on_is_ended_by_no_other_thread(
    loop: asyncio.AbstractEventLoop,
    pipes: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that saw the loop at rest, which has just begun to run."""
    heard, (here, there), (other, _) = Heard(loop), *pipes
    inside, seen = threading.Event(), threading.Event()

    async def steps() -> int | None:
        await heard.ear.first_of(LONG, here)
        inside.set()
        assert seen.wait(LONG)
        return await heard.ear.first_of(LONG, other)

    def call_away() -> None:
        assert inside.wait(LONG)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "is_running", lambda: False)
            assert not heard.ear.stop_at_rest()
            heard.ear.call_away()
        seen.set()

    thread = threading.Thread(target=call_away)
    thread.start()
    os.write(there, b"x")
    assert heard.run(steps()) is None
    thread.join()
    assert len(heard.ends) == 1
    assert not heard.came_to_its_end
    assert not heard.ear.is_busy


def test_what_a_handler_leaves_in_the_midst_is_listened_to_no_more(
    loop: asyncio.AbstractEventLoop, pipes: list[tuple[int, int]]
) -> None:
    heard, here = Heard(loop), pipes[0][0]

    async def is_left() -> None:
        heard.ear.leave()
        await heard.ear.first_of(LONG, here)

    heard.begin(is_left())
    assert not heard.ear.is_busy
    assert not is_listening(loop)


def test_who_was_called_away_before_ends_nothing_that_came_since(
    loop: asyncio.AbstractEventLoop, pipes: list[tuple[int, int]]
) -> None:
    heard, (here, there) = Heard(loop), pipes[0]

    async def one_after_another() -> int | None:
        heard.begin(first(heard.ear, LONG, here))
        heard.ear.call_away()  # soon
        heard.ear.leave()
        heard.begin(first(heard.ear, LONG, here))
        await asyncio.sleep(0.05)
        assert heard.ear.is_busy
        os.write(there, b"x")
        await asyncio.sleep(0.05)
        return heard.ends[-1]

    assert loop.run_until_complete(one_after_another()) == here


def test_what_is_raised_ends_it(
    loop: asyncio.AbstractEventLoop, pipes: list[tuple[int, int]]
) -> None:
    heard, (here, there) = Heard(loop), pipes[0]
    told: list[Any] = []
    loop.set_exception_handler(lambda loop, context: told.append(context["exception"]))

    async def fails() -> None:
        await heard.ear.first_of(LONG, here)
        raise ValueError("on its way")

    os.write(there, b"x")
    assert heard.run(fails()) is None
    assert not heard.came_to_its_end
    assert [str(error) for error in told] == ["on its way"]


def test_what_was_left_is_let_go_of(
    loop: asyncio.AbstractEventLoop, pipes: list[tuple[int, int]]
) -> None:
    heard, closed = Heard(loop), list[bool]()

    async def waits() -> None:
        try:
            await heard.ear.first_of(LONG, pipes[0][0])
        finally:
            closed.append(True)

    heard.begin(waits())
    heard.ear.leave()
    gc.collect()
    assert closed == [True]
    assert not heard.ends
    assert not is_listening(loop)


def test_loops_that_tell_of_nothing_are_known() -> None:
    class Deaf(asyncio.SelectorEventLoop):
        add_reader = asyncio.AbstractEventLoop.add_reader

    for kind, hears in ((Deaf, False), (asyncio.SelectorEventLoop, True)):
        with closing(kind()) as loop:
            assert can_hear(loop) is hears
    with closing(asyncio.SelectorEventLoop(selectors.SelectSelector())) as loop:
        assert not can_hear(loop)  # of few descriptors


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_loop_that_refuses_to_hear_is_listened_to_no_more(
    loop: asyncio.AbstractEventLoop,
    pipes: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    fails_at: int,
) -> None:
    heard, numbers = Heard(loop), [here for here, _ in pipes]

    def refuse(name: str) -> None:
        usual = getattr(loop, name)

        def speak(number: int, *given: Any) -> Any:
            if number == numbers[fails_at]:
                raise OSError("no room")
            return usual(number, *given)

        monkeypatch.setattr(loop, name, speak)

    refuse("add_reader")
    refuse("remove_reader")
    assert heard.run(first(heard.ear, LONG, *numbers)) is None
    assert heard.came_to_its_end
    assert not heard.ear.is_busy


def some_replies(chance: random.Random) -> tuple[bytes, list[int]]:
    """What a server says, and in pieces of which sizes; some of it makes no sense."""
    said = []
    for _ in range(chance.randrange(1, 8)):
        text = chance.randbytes(chance.randrange(200))
        said.append(
            chance.choice(
                (
                    b"$%d\r\n%b\r\n" % (len(text), text),
                    b":5\r\n",
                    b"*2\r\n+a\r\n:1\r\n",
                    b"-ERR x\r\n",
                )
            )
        )
        if chance.random() < 0.1:
            said.append(chance.choice((b"?\r\n", b"$9\r\nab")))
    whole = b"".join(said)
    sizes = []
    while sum(sizes) < len(whole):
        sizes.append(chance.choice((1, 3, 50, 300)))
    return whole, sizes


def feed(ends: Ends, whole: bytes, sizes: list[int], ends_it: bool) -> Callable[[], None]:
    def run() -> None:
        at = 0
        for size in sizes:
            with suppress(OSError):
                ends.there.sendall(whole[at : at + size])
            at += size
            time.sleep(0.001)
        if ends_it:
            ends.there.close()

    return run


def tell_again(heard: Heard) -> None:
    """Now and then, of what there may be nothing to be read from."""
    for number in heard.ear._numbers:
        heard.ear._heard(number)
    heard.loop.call_later(0.0002, tell_again, heard)


@pytest.mark.parametrize("seed", range(60))
def test_replies_are_the_same_in_a_loop_as_in_a_thread(
    loop: asyncio.AbstractEventLoop, seed: int
) -> None:
    """Whatever the server says, however it comes, and where the loop tells of it once more, as one
    that Ctrl-C ended does."""
    chance = random.Random(seed)
    whole, sizes = some_replies(chance)
    counts = [chance.randrange(1, 4) for _ in range(4)]
    ends_it, wait = chance.random() < 0.5, 0.3

    async def read(exchange: Exchange, ear: LoopEar | None) -> list[Any]:
        found = []
        for count in counts:
            found += await exchange.replies(count, time.monotonic() + wait, ear)
            if found[-1] is NOTHING:
                break
        return [str(each) if isinstance(each, Exception) else each for each in found]

    results = []
    for in_loop in (False, True):
        ends = Ends(buffer=64)
        feeder = threading.Thread(target=feed(ends, whole, sizes, ends_it))
        feeder.start()
        if in_loop:
            heard = Heard(loop)
            tell_again(heard)
            results.append(heard.run(read(ends.exchange, heard.ear)))
        else:
            results.append(waited_for(read(ends.exchange, None)))
        feeder.join()
        ends.close()
    assert results[0] == results[1]
    assert results[0]
