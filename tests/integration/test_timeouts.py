"""No call waits longer than its timeout, whatever the server does or does not."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import lmpool
from lmpool import PooledLM, SyncPooledLM
from lmpool.errors import LmpoolError, PoolTimeout
from lmpool.producer.asks import Ask
from lmpool.wants import Digest, Row, Top
from lmpool.wire import Job
from tests.support.clients import connected
from tests.support.faults import Faults
from tests.support.server import RealServer
from tests.support.workers import (
    in_process_worker,
    leaked_threads,
    lmpool_threads,
    worker_process,
)

TIMEOUT = 1.0
MORE = 8.0
"""What is late by that waits for something else: this machine may be busy."""

ARGUMENTS: dict[str, Any] = {
    "token_ids": [1],
    "token_ids_list": [[1], [2]],
    "prompt_token_ids": [1],
    "prompt_token_ids_list": [[1]],
    "prompt_tokens": [1],
    "max_tokens": 1,
    "want": Top(1),
    "text_token_ids": [1, 2],
    "text_token_ids_list": [[1, 2], [3, 4]],
    "positions": [1],
    "asks": [Ask([1]), ([1], Top(1)), Ask([1], lora_name="one")],
    "eos_token_ids": [0],
    "lora_path": "/srv/adapters/one",
    "job": Job(Row("f32"), Digest(b"0" * 16), b"\1\0\0\0", None),
}
ENDS = {"close", "aclose", "__exit__", "__aexit__", "__enter__", "__aenter__"}
"""Their clients are closed: each has one of its own."""
NOT_OFFERED = {"set_lora", "clear_lora"}

Call = Callable[[PooledLM], Any]


def calls() -> Iterator[tuple[str, Call, bool]]:
    """Whatever a client can be asked: its name, how it is done, and whether it takes a timeout."""
    for kind in (PooledLM, SyncPooledLM):
        for name, member in inspect.getmembers(kind):
            if (name.startswith("_") and name not in ENDS) or name in NOT_OFFERED:
                continue
            if isinstance(member, property):
                yield f"{kind.__name__}.{name}", reads(kind, name), False
            elif callable(member):
                parameters = inspect.signature(member).parameters
                given = {p: ARGUMENTS[p] for p in parameters if p in ARGUMENTS}
                if name in ("__exit__", "__aexit__"):
                    given = dict.fromkeys(("kind", "error", "traceback"))
                if "timeout" in parameters:
                    given["timeout"] = TIMEOUT
                with_adapter = {**given, "lora_name": "one"}
                for chosen in (given, with_adapter) if "lora_name" in parameters else (given,):
                    if {p.name for p in parameters.values() if p.default is p.empty} <= {
                        *chosen,
                        "self",
                    }:
                        what = f"{kind.__name__}.{name}({', '.join(chosen)})"
                        yield what, asks(kind, name, chosen), "timeout" in parameters
                    else:
                        assert "lora_name" not in chosen, f"{name}: teach ARGUMENTS the rest"


def of_kind(lm: PooledLM, kind: type) -> Any:
    return lm.sync if kind is SyncPooledLM else lm


def reads(kind: type, name: str) -> Call:
    return lambda lm: getattr(of_kind(lm, kind), name)


def asks(kind: type, name: str, given: dict[str, Any]) -> Call:
    def ask(lm: PooledLM) -> Any:
        asked = getattr(of_kind(lm, kind), name)
        if inspect.isasyncgenfunction(asked):
            return asyncio.run(_gone_through(asked(**given)))
        if inspect.isgeneratorfunction(asked):
            return list(asked(**given))
        if not inspect.iscoroutinefunction(asked):
            return asked(**given)
        return asyncio.run(asked(**given))

    return ask


async def _gone_through(answers: AsyncIterator[Any]) -> list[Any]:
    return [answer async for answer in answers]


@contextmanager
def mute_server() -> Iterator[str]:
    """Takes connections, and says nothing for ever."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"


def all_at_once(url: str, pool: str, before: Callable[[list[PooledLM]], None]) -> dict[str, float]:
    """The seconds that each call took, all made in the same moment, most by one client."""
    took: dict[str, float] = {}
    wrong: dict[str, BaseException] = {}
    begin = threading.Event()

    def one(name: str, call: Call, lm: PooledLM) -> None:
        begin.wait()
        began = time.monotonic()
        try:
            call(lm)
        except LmpoolError:
            pass
        except BaseException as error:
            wrong[name] = error
        took[name] = time.monotonic() - began

    others = lmpool_threads()
    # Where a call takes no timeout, the client's own holds.
    clients = {
        True: lmpool.connect(url, pool, framework="numpy"),
        False: lmpool.connect(url, pool, framework="numpy", request_timeout=TIMEOUT),
    }
    threads, opened = [], list(clients.values())
    for name, call, takes_timeout in calls():
        lm = clients[takes_timeout]
        if name.partition(".")[2].partition("(")[0] in ENDS:
            lm = lmpool.connect(url, pool, framework="numpy", request_timeout=TIMEOUT)
            opened.append(lm)
        threads.append(threading.Thread(target=one, args=(name, call, lm), daemon=True))
    before(opened)
    for thread in threads:
        thread.start()
    begin.set()
    for thread in threads:
        thread.join(60)
    for number, lm in enumerate(opened):
        began = time.monotonic()
        lm.close(0.1)
        took[f"the end of client {number}"] = time.monotonic() - began
    left = leaked_threads(others)
    assert not left, f"threads that wait for the server after their clients were closed: {left}"
    assert not wrong, wrong
    assert len(took) == len(threads) + len(opened), "some calls have not ended"
    return took


def assert_in_time(took: dict[str, float]) -> None:
    late = {name: round(seconds, 2) for name, seconds in took.items() if seconds > TIMEOUT + MORE}
    assert not late, late


def test_of_a_server_that_never_answers() -> None:
    with mute_server() as url:
        took = all_at_once(url, "mute", lambda clients: None)
    assert_in_time(took)
    assert len(took) > 50


def test_of_a_server_that_freezes(server_binary: str) -> None:
    with RealServer(binary=server_binary) as server, in_process_worker(server.url, "frozen"):

        def freeze(clients: list[PooledLM]) -> None:
            for lm in clients:
                lm.next_token_logprobs_sync([9], timeout=60)
            server.pause()

        try:
            took = all_at_once(server.url, "frozen", freeze)
        finally:
            server.resume()
    assert_in_time(took)


def test_control_calls_do_not_wait_for_one_another(
    server_url: str, pool_name: str, tmp_path: Path
) -> None:
    """An engine that is slow at one thing: whoever waits for it leaves in time, and what nobody
    waits for any longer is not begun."""
    slow = Faults(tmp_path).settings(prefix_delay=6.0)
    patience = 4.0  # less than the engine takes, and enough for a busy machine to ask
    with worker_process(server_url, pool_name, **slow), connected(server_url, pool_name) as lm:
        took: list[float] = []

        def ask(number: int) -> None:
            began = time.monotonic()
            with pytest.raises(PoolTimeout, match="cache_prefix was not answered by every one of"):
                lm.cache_kv([1, number], timeout=patience)
            took.append(time.monotonic() - began)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(took) == 4
        assert max(took) < patience + MORE, took
        began = time.monotonic()
        assert lm.next_token_logprobs_sync([3], timeout=60).shape == (256,)
        assert time.monotonic() - began < 18.0, "the engine did what nobody waits for"
