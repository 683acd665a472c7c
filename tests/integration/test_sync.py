"""`lm.sync`: the same client, blocking, from wherever it is called."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import ClientClosed, PoolTimeout, PromptError
from tests.support.clients import connected
from tests.support.hold import Hold
from tests.support.waiting import until
from tests.support.workers import in_process_worker


@pytest.fixture
def lm(any_server: str, pool_name: str) -> Iterator[lmpool.PooledLM]:
    with in_process_worker(any_server, pool_name), connected(any_server, pool_name) as lm:
        yield lm


def test_it_is_the_same_client(lm: lmpool.PooledLM) -> None:
    sync = lm.sync
    row = sync.next_token_logprobs([1, 2], timeout=60)
    np.testing.assert_array_equal(row, mock_row([1, 2], 256))
    np.testing.assert_array_equal(lm.next_token_logprobs_sync([1, 2]), row)
    assert sync.statistics() == lm.statistics()
    assert sync.statistics()["local_hits"] == 1
    assert sync.info is lm.info
    rows = sync.batch_next_token_logprobs([[3], [4]], progress=True)
    np.testing.assert_array_equal(rows, [mock_row([3], 256), mock_row([4], 256)])
    assert sync.batch_next_token_logprobs([]).shape == (0, 256)
    assert sync.sample([1], 5, [0], seed=3) == lm.sample_sync([1], 5, [0], seed=3)
    assert sync.batch_sample([[1], [2]], 5, [0], seed=3)[0] == sync.sample([1], 5, [0], seed=3)
    assert len(sync.pool_statistics()["workers"]) == 1
    sync.wait_for_workers(5)
    with pytest.raises(PromptError, match="prompt 1: empty"):
        sync.batch_next_token_logprobs([[1], []])
    with sync:
        pass
    with pytest.raises(ClientClosed):
        lm.next_token_logprobs_sync([9])


def test_it_works_while_an_event_loop_runs(lm: lmpool.PooledLM) -> None:
    async def both() -> None:
        awaited = asyncio.ensure_future(lm.next_token_logprobs([5, 5]))
        await asyncio.sleep(0)
        blocked = lm.sync.next_token_logprobs([6, 6], timeout=20)
        np.testing.assert_array_equal(blocked, mock_row([6, 6], 256))
        np.testing.assert_array_equal(await awaited, mock_row([5, 5], 256))

    asyncio.run(both())


def test_many_threads_block_at_once(lm: lmpool.PooledLM) -> None:
    rows: dict[int, np.ndarray] = {}

    def ask(number: int) -> None:
        rows[number] = lm.sync.next_token_logprobs([number, 7], timeout=60)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(16):
        np.testing.assert_array_equal(rows[number], mock_row([number, 7], 256))


def test_whoever_gives_up_withdraws(any_server: str, pool_name: str) -> None:
    with (
        in_process_worker(any_server, pool_name),
        connected(any_server, pool_name) as lm,
        Hold(),
    ):

        async def ask(timeout: float, progress: bool) -> None:
            await lm.batch_next_token_logprobs([[5]], timeout=timeout, progress=progress)

        for progress in (False, True):
            with pytest.raises(PoolTimeout, match="1 of 1 answers"):
                asyncio.run(ask(0.05, progress))
        with pytest.raises(PoolTimeout, match=r"1 of 1 answers were not there after 0\.05 s"):
            lm.sync.next_token_logprobs([1, 1], timeout=0.05)
        with pytest.raises(PoolTimeout, match="3 of 3 answers"):
            lm.sync.batch_next_token_logprobs([[2], [3], [4]], timeout=0.15, progress=True)
        statistics = lm.statistics()
        assert statistics["withdrawn"] + statistics["expired"] == 6


@pytest.mark.parametrize("progress", [False, True], ids=["silent", "with a bar"])
def test_ctrl_c_withdraws(any_server: str, pool_name: str, progress: bool) -> None:
    with (
        in_process_worker(any_server, pool_name),
        connected(any_server, pool_name) as lm,
        Hold(),
    ):

        def interrupt() -> None:
            until(lambda: lm.statistics()["queued"] == 1, what="the job to be queued")
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            lm.sync.batch_next_token_logprobs([[1]], timeout=60, progress=progress)
        thread.join(60)
        assert lm.statistics()["withdrawn"] == 1
