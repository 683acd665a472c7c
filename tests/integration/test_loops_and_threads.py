"""One client in event loops, threads and processes, on fakeredis and on a real server."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import LmpoolError, PromptError
from tests.support.clients import connected
from tests.support.hold import Hold
from tests.support.mock_rows import VOCAB, prompts_of, rows_of
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import in_process_worker

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_sync_methods_work_inside_a_running_loop(lm: lmpool.PooledLM) -> None:
    async def main() -> None:
        task = asyncio.create_task(lm.next_token_logprobs([1]))
        await asyncio.sleep(0)
        assert np.array_equal(lm.next_token_logprobs_sync([2]), mock_row([2], VOCAB))
        assert np.array_equal(lm.batch_next_token_logprobs_sync([[3]]), rows_of([[3]]))
        assert lm.pool_statistics_sync()["computed"] >= 2
        assert np.array_equal(await task, mock_row([1], VOCAB))

    asyncio.run(main())


def test_one_loop_after_another(lm: lmpool.PooledLM) -> None:
    async def main(number: int) -> None:
        prompts = prompts_of(20, seed=number)
        rows = await asyncio.gather(*(lm.next_token_logprobs(prompt) for prompt in prompts))
        assert np.array_equal(np.stack(rows), rows_of(prompts))

    for number in range(6):
        asyncio.run(main(number))


def test_a_single_call_that_waits_holds_few_objects(
    any_server: str, start_pool: Callable[..., str]
) -> None:
    """The garbage collector goes through them again and again while thousands of calls wait."""
    pool = start_pool(delay=0.2)
    with connected(any_server, pool) as lm:

        async def each_holds(seed: int) -> float:
            prompts = prompts_of(200, seed=seed)
            calls = [asyncio.ensure_future(lm.next_token_logprobs(p)) for p in prompts]
            gc.collect()
            before = len(gc.get_objects())
            for _ in range(2):  # a turn in which they ask, one in which that was sent
                await asyncio.sleep(0)
            found = (len(gc.get_objects()) - before) / len(calls)
            await asyncio.gather(*calls)
            return found

        # The worker's own are counted, too, where it has read them by then, and the server's.
        assert any(asyncio.run(each_holds(seed)) < 6 for seed in range(30))


def test_prompts_of_one_turn_are_as_they_were_when_they_were_asked(lm: lmpool.PooledLM) -> None:
    prompts = prompts_of(200)
    expected = rows_of(prompts)

    async def main() -> None:
        calls = [asyncio.ensure_future(lm.next_token_logprobs(prompt)) for prompt in prompts]

        def spoil() -> None:
            for prompt in prompts:
                prompt[:] = [1, 2, 3]

        asyncio.get_running_loop().call_soon(spoil)  # in the same turn, behind all of them
        assert np.array_equal(np.stack(await asyncio.gather(*calls)), expected)

    asyncio.run(main())


def test_of_a_turns_prompts_a_bad_one_fails_alone_and_as_by_itself(lm: lmpool.PooledLM) -> None:
    prompts: list[Any] = [*prompts_of(100)]
    bad: list[Any] = [[], [1, VOCAB], [-1], [1.5], [True], "text", [1] * 100_000, None]
    for place, prompt in enumerate(bad):
        prompts.insert(60 + 3 * place, prompt)
    prompts[80] = np.array(prompts[80])
    alone = {}
    for prompt in bad:
        with pytest.raises(PromptError) as caught:
            lm.next_token_logprobs_sync(prompt)
        alone[id(prompt)] = caught.value

    async def main() -> list[Any]:
        calls = map(lm.next_token_logprobs, prompts)
        return await asyncio.gather(*calls, return_exceptions=True)

    for prompt, found in zip(prompts, asyncio.run(main()), strict=True):
        if id(prompt) in alone:
            assert type(found) is PromptError
            assert (str(found), found.index) == (str(alone[id(prompt)]), None)
        else:
            assert np.array_equal(found, mock_row(list(prompt), VOCAB))


def test_calls_that_are_left_in_their_turn_are_not_asked(lm: lmpool.PooledLM) -> None:
    prompts = prompts_of(100)

    async def main() -> None:
        calls = [asyncio.ensure_future(lm.next_token_logprobs(prompt)) for prompt in prompts]

        def leave() -> None:
            for call in calls[70:]:
                call.cancel()

        asyncio.get_running_loop().call_soon(leave)
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert np.array_equal(np.stack(found[:70]), rows_of(prompts[:70]))
        assert all(isinstance(each, asyncio.CancelledError) for each in found[70:])

    asyncio.run(main())
    statistics = lm.statistics()
    assert statistics["requests"] == statistics["queued"] == 70
    assert statistics["withdrawn"] == 0


def test_a_turns_prompts_are_answered_by_the_local_cache(lm: lmpool.PooledLM) -> None:
    prompts = prompts_of(300)
    known = lm.batch_next_token_logprobs_sync(prompts[150:])

    async def main() -> Any:
        return await asyncio.gather(*map(lm.next_token_logprobs, prompts))

    rows = asyncio.run(main())
    assert np.array_equal(np.stack(rows), rows_of(prompts))
    assert np.array_equal(np.stack(rows[150:]), known)
    statistics = lm.statistics()
    assert (statistics["requests"], statistics["local_hits"]) == (450, 150)


def test_a_loop_that_ends_in_the_middle_hurts_nobody(
    any_server: str, start_pool: Callable[..., str]
) -> None:
    pool = start_pool(delay=0.1)
    with connected(any_server, pool) as lm:

        async def main() -> None:
            for i in range(5):
                asyncio.create_task(lm.next_token_logprobs([i])).add_done_callback(lambda _: None)
            await asyncio.to_thread(until, lambda: lm.statistics()["queued"] == 5)

        asyncio.run(main())  # cancels what runs
        assert np.array_equal(lm.next_token_logprobs_sync([9]), mock_row([9], VOCAB))


def test_many_threads_at_once(lm: lmpool.PooledLM) -> None:
    def ask(number: int) -> None:
        prompts = prompts_of(30, seed=number % 3)  # three of each
        if number % 2:

            async def main() -> list[Any]:
                return await asyncio.gather(*(lm.next_token_logprobs(p) for p in prompts))

            rows = np.stack(asyncio.run(main()))
        else:
            rows = np.stack([lm.next_token_logprobs_sync(prompt) for prompt in prompts])
        assert np.array_equal(rows, rows_of(prompts))

    with ThreadPoolExecutor(9) as threads:
        list(threads.map(ask, range(9)))
    statistics = lm.statistics()
    assert statistics["requests"] == 270
    assert lm.pool_statistics_sync()["computed"] == statistics["queued"] == 90


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_goes_on_with_the_same_client(lm: lmpool.PooledLM) -> None:
    lm.next_token_logprobs_sync([1])

    def child(number: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            good = np.array_equal(lm.next_token_logprobs_sync([1]), mock_row([1], VOCAB))
            good &= np.array_equal(
                lm.batch_next_token_logprobs_sync([[2, number], [3]], timeout=60),
                rows_of([[2, number], [3]]),
            )

            async def main() -> Any:
                return await lm.next_token_logprobs([4, number], timeout=60)

            good &= np.array_equal(asyncio.run(main()), mock_row([4, number], VOCAB))
            lm.close()
            os._exit(0 if good else 1)
        finally:
            os._exit(2)

    children = [child(number) for number in range(2)]
    assert np.array_equal(lm.next_token_logprobs_sync([5]), mock_row([5], VOCAB))
    for pid in children:
        ended: list[int] = []

        def has_ended(pid: int = pid, ended: list[int] = ended) -> bool:
            found, status = os.waitpid(pid, os.WNOHANG)
            ended.append(status)
            return found == pid

        until(has_ended, what="the child to end")
        assert os.waitstatus_to_exitcode(ended[-1]) == 0
    assert np.array_equal(lm.next_token_logprobs_sync([6]), mock_row([6], VOCAB))


IMPORTS = """
import sys, threading
import lmpool
found = []
def hear(event, arguments):
    if event == "import" and threading.current_thread().name.startswith("lmpool-"):
        found.append(arguments[0])
lm = lmpool.connect(sys.argv[1], sys.argv[2], framework="numpy")
sys.addaudithook(hear)
lm.next_token_logprobs_sync([1])
lm.batch_next_token_logprobs_sync([[1], [2]])
lm.pool_statistics_sync()
lm.close()
print(found)
"""


def test_a_clients_threads_import_nothing(server_binary: str, pool_name: str) -> None:
    """A child that is forked meanwhile could never import it."""
    with (
        RealServer(binary=server_binary, tcp=True) as server,
        in_process_worker(server.url, pool_name),
    ):
        url = server.url.replace("127.0.0.1", "localhost")
        command = [sys.executable, "-c", IMPORTS, url, pool_name]
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert (found.stdout, found.stderr) == ("[]\n", "")


def test_a_client_that_nobody_closes_leaves_nothing(any_server: str, pool: str) -> None:
    lm = lmpool.connect(any_server, pool)
    lm.next_token_logprobs_sync([1])
    del lm
    gc.collect()
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("lmpool-sender")])


def test_context_managers(any_server: str, pool: str) -> None:
    with lmpool.connect(any_server, pool, framework="numpy") as lm:
        assert lm.info.vocab_size == VOCAB

    async def main() -> None:
        async with lmpool.connect(any_server, pool, framework="numpy") as lm:
            assert np.array_equal(await lm.next_token_logprobs([1]), mock_row([1], VOCAB))

    asyncio.run(main())


def test_ctrl_c_as_a_turn_ends_ends_its_calls(
    lm: lmpool.PooledLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook's loop runs on, and whoever waits must hear of it."""
    submit, pressed = lm._client.submit, threading.Event()

    def interrupted(calls: Any, **how: Any) -> None:
        submit(calls[: len(calls) // 2], **how)
        if not pressed.is_set():
            pressed.set()
            raise KeyboardInterrupt

    async def ask(seed: int) -> list[Any]:
        rows = map(lm.next_token_logprobs, prompts_of(20, seed=seed))
        return await asyncio.wait_for(asyncio.gather(*rows, return_exceptions=True), 20)

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(ask(1))
        monkeypatch.setattr(lm._client, "submit", interrupted)
        asked = loop.create_task(ask(2))
        with Hold():  # else what was sent may have its rows by then
            with pytest.raises(KeyboardInterrupt):
                loop.run_until_complete(asked)
            assert pressed.is_set()
            monkeypatch.undo()
            found = loop.run_until_complete(asked)
        assert {type(each) for each in found} == {LmpoolError}
        assert "KeyboardInterrupt" in str(found[0])
        found = loop.run_until_complete(ask(2))
        assert np.array_equal(np.stack(found), rows_of(prompts_of(20, seed=2)))
    finally:
        loop.close()


def test_a_signals_handler_that_interrupts_a_call_is_told_so(lm: lmpool.PooledLM) -> None:
    """It runs in the thread that holds the client's lock, and would wait for itself."""
    lm.sync.next_token_logprobs([1])
    client = lm._client
    with client._session.lock:  # as in the middle of another call
        with pytest.raises(LmpoolError, match="a signal's handler"):
            lm.sync.next_token_logprobs([2, 3], timeout=30)
        with pytest.raises(LmpoolError, match="a signal's handler"):
            lm.reset_async_queries()
        assert lm.statistics()["requests"] == 1
        lm.close()  # by a thread of its own, once this one lets go
    until(lambda: client._session.closed and not any(t.is_alive() for t in client._threads))


def test_loops_that_were_closed_before_their_turn_ended_are_let_go(lm: lmpool.PooledLM) -> None:
    tasks: list[asyncio.Task[Any]] = []

    async def begin() -> None:
        loop = asyncio.get_running_loop()
        tasks.append(loop.create_task(lm.next_token_logprobs([7, 7, 7])))
        loop.call_soon(loop.stop)
        await asyncio.sleep(0)

    async def main(*prompt: int) -> None:
        await lm.next_token_logprobs(prompt)

    asyncio.run(main(8))
    for _ in range(5):
        loop = asyncio.new_event_loop()
        tasks.append(loop.create_task(begin()))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    assert any(loop.is_closed() for loop in lm._caller._turns)
    asyncio.run(main(8, 8))
    assert all(not loop.is_closed() for loop in lm._caller._turns)


def test_jobs_of_a_loop_that_was_closed_are_withdrawn(
    any_server: str, start_pool: Callable[..., str], hold: Hold
) -> None:
    pool = start_pool()
    with connected(any_server, pool) as lm:
        loop = asyncio.new_event_loop()
        tasks = [loop.create_task(lm.next_token_logprobs([9, number])) for number in range(5)]
        loop.run_until_complete(asyncio.wait(tasks, timeout=0.2))
        table = lm._client._session.table
        until(lambda: len(table.flights) == 5)
        loop.close()  # and its tasks are kept
        until(lambda: not table.flights)
        assert lm.statistics()["withdrawn"] == 5
        del tasks
