"""Ctrl-C at each point of each kind of blocking call: whoever catches it goes on with the same
client, and where one was closed nothing is left."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

import lmpool
from lmpool.errors import LmpoolError
from lmpool.producer import alone as alone_module
from lmpool.producer import flights as flights_module
from lmpool.producer import session as session_module
from lmpool.wants import Draw
from tests.support.clients import connected
from tests.support.interrupted import (
    LARGE,
    SIZE,
    ask,
    ask_large,
    leave_a_stream,
    leave_an_iterator,
    prompt,
)
from tests.support.interruptions import Interruption, points_of
from tests.support.redis_client import open_redis
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import worker_process

pytestmark = [
    pytest.mark.server,
    # Ctrl-C comes between a coroutine and its first step, and in the midst of finalizers, too.
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SECONDS = 20
"""For anything that is to be done at once, on a busy machine."""
SHORT = 150
"""Points of each call that are tried where not all are."""

Client = lmpool.PooledLM[Any]


@pytest.fixture(scope="module")
def served(server_binary: str) -> Iterator[tuple[str, str]]:
    with (
        RealServer() as server,
        worker_process(server.url, "one", engine_opts={"vocab_size": SIZE}),
    ):
        yield server.url, "one"


def ask_in_vain(lm: Client) -> None:
    with suppress(LmpoolError):
        lm.sync.next_token_logprobs(prompt(), timeout=1e-4)


CALLS: dict[str, Callable[[Client], object]] = {
    "one prompt": lambda lm: ask(lm, SECONDS),
    "one prompt, in vain": ask_in_vain,
    "a known prompt": lambda lm: lm.sync.next_token_logprobs([0], timeout=SECONDS),
    "several prompts": lambda lm: lm.sync.batch_next_token_logprobs(
        [prompt() for _ in range(3)], timeout=SECONDS
    ),
    "several asks": lambda lm: lm.sync.ask_many(
        [(prompt(), Draw()) for _ in range(3)], timeout=SECONDS
    ),
    "a stream": lambda lm: leave_a_stream(lm, SECONDS),
    "an iterator": lambda lm: leave_an_iterator(lm, SECONDS),
    "the client's statistics": lambda lm: (ask(lm, SECONDS), lm.statistics()),
    "the pool's statistics": lambda lm: lm.sync.pool_statistics(timeout=SECONDS),
    "the pool's shards": lambda lm: lm.shards,
    "its workers": lambda lm: lm.sync.wait_for_workers(timeout=SECONDS),
    "nothing more": lambda lm: lm.reset_async_queries(),
}


def tried(points: int, every: bool) -> range:
    """The points that a call is interrupted at: of another run of it there may be more."""
    return range(1, points + 8, 1 if every else max(1, points // SHORT))


ALONE = ("one prompt", "one prompt, in vain")
"""Those that ask alone, whose callers read the answers by themselves."""


def ask_until_alone(lm: Client) -> None:
    """Until who asks next reads by itself."""
    alone = lm._client._alone
    until(lambda: ask(lm, SECONDS) or alone.is_ready, SECONDS, what="it is ready", every=0)


RAISED = [kind for kind in CALLS if kind not in ("one prompt, in vain", "an iterator")]
"""Those that raise what a handler does. What is raised in an iterator of the caller's own may be
its own error, of which there is a better one."""
OTHER_KINDS = (BlockingIOError, RuntimeError, ValueError)
LENGTHS = pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.chaos)], ids=["short", "each"]
)


@LENGTHS
@pytest.mark.parametrize(
    ("kind", "alone"),
    [*((kind, False) for kind in CALLS), *((kind, True) for kind in ALONE)],
)
def test_a_client_is_as_it_was_behind_each_interrupt(
    served: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    alone: bool,
    every: bool,
) -> None:
    if not alone:
        monkeypatch.setattr(alone_module, "CAN_WAIT", False)
    with connected(*served, cache_bytes=0) as lm:
        ask(lm, SECONDS)
        interrupt_each(lm, CALLS[kind], every, ask_until_alone if alone else always_ready)


@LENGTHS
@pytest.mark.parametrize("timeout", [SECONDS, 1e-4], ids=["one row", "one row, in vain"])
def test_a_client_that_reads_near_is_as_it_was_behind_each_interrupt(
    server_binary: str, timeout: float, every: bool
) -> None:
    def call(lm: Client) -> None:
        with suppress(LmpoolError):
            ask_large(lm, timeout)

    with (
        RealServer() as server,
        worker_process(server.url, "large", engine_opts={"vocab_size": LARGE}),
        connected(server.url, "large", cache_bytes=0) as lm,
    ):
        interrupt_each(lm, call, every, ask_until_near, ask_large)


def always_ready(lm: Client) -> None:
    """Nothing is to be made ready."""


def ask_until_near(lm: Client) -> None:
    """Until who asks next reads a large row by itself."""

    def is_ready() -> bool:
        ask_large(lm, SECONDS)
        line = lm._client._alone._line
        return line is not None and line.place is not None

    until(is_ready, SECONDS, what="rows are read near", every=0)


def interrupt_each(
    lm: Client,
    call: Callable[[Client], object],
    every: bool,
    make_ready: Callable[[Client], None],
    ask_so: Callable[[Client, float], None] = ask,
) -> None:
    """Interrupt a call at its points, one after another: then the client serves as before."""
    make_ready(lm)
    table = lm._client._session.table
    # A call that a busy machine has wait long has points that others do not come to.
    points = min(points_of(lambda: call(lm)) for _ in range(5))
    assert points > 10
    interrupts = 0
    for at in tried(points, every):
        make_ready(lm)
        interruption = Interruption(at)
        raised = interruption.run(lambda: call(lm))
        place = f"point {at}, {interruption.place}"
        assert raised is None or type(raised) is KeyboardInterrupt, (place, raised)
        interrupts += raised is not None
        assert is_well(lm, ask_so), place
        until(lambda: not table.flights, SECONDS, what=f"nothing is waited for: {place}")
        assert not any(table._counts.values()), place
        assert not table.has_unsent(), place
        assert has_not_failed(lm), place
    assert interrupts > len(tried(points, every)) / 2


@pytest.mark.parametrize(
    "kind", [TimeoutError, *(pytest.param(k, marks=pytest.mark.chaos) for k in OTHER_KINDS)]
)
@LENGTHS
@pytest.mark.parametrize("alone", [False, True], ids=["by the client's threads", "alone"])
def test_what_a_handler_raises_is_raised(
    served: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
    alone: bool,
    every: bool,
) -> None:
    """As it is: it is no error of the server, nor of what was given. Many a handler of SIGALRM
    raises a `TimeoutError`, which is an `OSError`."""
    ours = os.path.dirname(lmpool.__file__)
    if not alone:
        monkeypatch.setattr(alone_module, "CAN_WAIT", False)
    with connected(*served, cache_bytes=0) as lm:
        for name in ("one prompt",) if alone else RAISED:

            def call(name: str = name) -> None:
                CALLS[name](lm)

            raised = 0
            for at in tried(points_of(call, ours), every):
                if alone:
                    ask_until_alone(lm)
                interruption = Interruption(at, ours, kind)
                error = interruption.run(call)
                place = f"{name}, point {at}, {interruption.place}"
                if interruption.place != "nowhere":
                    assert type(error) is kind, (place, error)
                    raised += 1
                assert is_well(lm), place
            assert raised > 10


def test_who_waits_for_the_same_prompt_is_told(server_binary: str) -> None:
    """Wherever Ctrl-C comes to the one who reads its answer, among what keeps who waits."""
    kept = flights_module.__file__
    engine = {"vocab_size": SIZE, "delay": 0.02}
    with (
        RealServer() as server,
        worker_process(server.url, "one", engine_opts=engine),
        connected(server.url, "one", cache_bytes=0) as lm,
    ):
        ask_until_alone(lm)
        flights = lm._client._session.table.flights

        def ask_as_well(asked: list[int], begin: float, told: list[bool]) -> None:
            while not flights and time.monotonic() < begin + 0.1:
                time.sleep(0)
            told.append(bool(flights))
            lm.sync.next_token_logprobs(asked, timeout=SECONDS)
            told.append(True)

        together = 0
        points = points_of(lambda: ask(lm, SECONDS), kept)
        assert points > 20
        for at in tried(points, True):
            ask_until_alone(lm)
            asked, told = prompt(), list[bool]()
            other = threading.Thread(target=ask_as_well, args=(asked, time.monotonic(), told))
            interruption = Interruption(at, kept)
            other.start()
            interruption.run(lambda: lm.sync.next_token_logprobs(asked, timeout=SECONDS))  # noqa: B023
            other.join(2 * SECONDS)
            assert len(told) == 2, f"point {at}, {interruption.place}"
            together += told[0]
        assert together > 5


async def ask_by_itself(lm: Client) -> None:
    await lm.next_token_logprobs(prompt(), timeout=SECONDS)


async def ask_together(lm: Client) -> None:
    await asyncio.gather(*(ask_by_itself(lm) for _ in range(10)))


async def ask_in_vain_by_itself(lm: Client) -> None:
    with suppress(LmpoolError):
        await lm.next_token_logprobs(prompt(), timeout=1e-4)


@pytest.fixture
def looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ctrl-C left is looked after in a moment."""
    monkeypatch.setattr(session_module, "CHECK_EVERY", 0.2)


@LENGTHS
@pytest.mark.usefixtures("looks_soon")
@pytest.mark.parametrize(
    ("ask_so", "alone"),
    [
        (ask_by_itself, False),
        (ask_together, False),
        (ask_by_itself, True),
        (ask_in_vain_by_itself, True),
    ],
)
def test_an_event_loop_that_goes_on_leaves_nobody_waiting(
    served: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    ask_so: Callable[[Client], Awaitable[None]],
    alone: bool,
    every: bool,
) -> None:
    """As a notebook's does. What asyncio itself loses by it is not ours."""
    if not alone:
        monkeypatch.setattr(alone_module, "CAN_WAIT", False)
    with connected(*served, cache_bytes=0) as lm:
        go_on_behind_each(lm, ask_so, every, ask_until_alone if alone else always_ready)


@LENGTHS
@pytest.mark.usefixtures("looks_soon")
def test_an_event_loop_that_reads_near_goes_on(server_binary: str, every: bool) -> None:
    async def ask_near(lm: Client) -> None:
        await lm.next_token_logprobs([7, *prompt()], timeout=SECONDS)

    with (
        RealServer() as server,
        worker_process(server.url, "large", engine_opts={"vocab_size": LARGE}),
        connected(server.url, "large", cache_bytes=0) as lm,
    ):
        go_on_behind_each(lm, ask_near, every, ask_until_near, ask_large)


def go_on_behind_each(
    lm: Client,
    ask_in_loop: Callable[[Client], Awaitable[None]],
    every: bool,
    make_ready: Callable[[Client], None],
    ask_so: Callable[[Client, float], None] = ask,
) -> None:
    """Interrupt what an event loop asks at its points: it goes on, and so does the client."""
    ours = os.path.dirname(lmpool.__file__)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # tasks that were ended so have nobody to tell

    async def others(place: str) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=SECONDS / 2)  # no deadline ends them
            assert not left, place

    with closing(loop):

        def call() -> None:
            loop.run_until_complete(loop.create_task(ask_in_loop(lm)))

        def is_at_rest() -> bool:
            loop.run_until_complete(asyncio.sleep(0.001))
            alone = lm._client._alone
            numbers = () if alone._ear is None else alone._ear._numbers
            return not (alone._is_read or numbers or lm._client._session.table.flights)

        call()
        make_ready(lm)
        points = points_of(call, ours)
        assert points > 100
        for at in tried(points, every):
            make_ready(lm)
            interruption = Interruption(at, ours)
            raised = interruption.run(call)
            place = f"point {at}, {interruption.place}"
            assert raised is None or type(raised) is KeyboardInterrupt, (place, raised)
            stop_at_once(loop)
            with suppress(KeyboardInterrupt):  # that of a task, which it ended
                loop.run_until_complete(others(place))
            stop_at_once(loop)
            loop.run_until_complete(asyncio.wait_for(ask_in_loop(lm), SECONDS))
            assert is_well(lm, ask_so), place
            # It may be read for one that was ended between its asking and its waiting.
            until(is_at_rest, SECONDS, what=f"nothing is waited for: {place}")
            assert has_not_failed(lm), place


def stop_at_once(loop: asyncio.AbstractEventLoop) -> None:
    """Where a run was interrupted as its task ended, asyncio stops the next one."""
    loop.call_soon(loop.stop)
    with suppress(KeyboardInterrupt):  # that of a task, which it ended
        loop.run_forever()


def has_not_failed(lm: Client) -> bool:
    """Ctrl-C says nothing about the server: who asks alone tries as soon again as before."""
    return lm._client._alone._needed == alone_module.IN_A_ROW


def is_well(lm: Client, ask_so: Callable[[Client, float], None] = ask) -> bool:
    """Whether another thread is served, which a lock that was left held would keep waiting."""
    done: list[bool] = []

    def use() -> None:
        ask_so(lm, SECONDS)
        lm.sync.pool_statistics(timeout=SECONDS)
        lm.statistics()
        done.append(True)

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(2 * SECONDS)
    return bool(done)


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("lmpool-")}


@LENGTHS
@pytest.mark.parametrize("again", [True, False], ids=["closed again", "forgotten"])
def test_nothing_is_left_of_a_client_whose_closing_was_interrupted(
    served: tuple[str, str], again: bool, every: bool
) -> None:
    """Once it was closed again, or nobody knows of it any more."""
    before = our_threads()
    names: list[str] = []

    def close(at: int) -> Interruption:
        lm = lmpool.connect(*served, framework="numpy", cache_bytes=0)
        names.append(lm._client._session.id)
        ask(lm, SECONDS)
        interruption = Interruption(at)
        raised = interruption.run(lm.close)
        assert raised is None or type(raised) is KeyboardInterrupt, (interruption.place, raised)
        if again:
            lm.close()
        return interruption

    for at in (0, *tried(close(0).points, every)):
        place = close(at).place
        gc.collect()
        until(lambda: our_threads() <= before, SECONDS, what=f"it is closed: {at}, {place}")
    with open_redis(served[0]) as server:
        # Of others a name that Ctrl-C kept from being withdrawn lasts until its lease ends.
        left = [key.decode() for key in server.keys("*:reply:*")]
        assert not [key for key in left if any(name in key for name in names)]
