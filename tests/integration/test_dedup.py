"""Equal prompts are computed once, whoever asks; different questions never share a row."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt
import redis

import lmpool
from lmpool.backends.mock import mock_row
from tests.support.clients import connected
from tests.support.gate import Gate
from tests.support.pools import (
    in_processes,
    pool_shards,
    some_prompts,
    until_at_rest,
    worker_processes,
)
from tests.support.waiting import until
from tests.support.workers import worker_process

PROMPTS = 500
GROUPS = 10


def ask_everything(
    url: str, pool: str, prompts: list[list[int]], seed: int
) -> tuple[npt.NDArray[np.float32], dict[str, int]]:
    """One client process: every prompt, in an order of its own and in several requests."""
    order = random.Random(seed).sample(range(len(prompts)), len(prompts))

    async def ask() -> tuple[npt.NDArray[np.float32], dict[str, int]]:
        rows = np.empty((len(prompts), 256), np.float32)
        async with lmpool.connect(url, pool, framework="numpy") as lm:

            async def ask_group(number: int) -> None:
                for _ in range(number):
                    await asyncio.sleep(0)  # a turn of the loop more: a request of its own
                mine = order[number::GROUPS]
                found = await asyncio.gather(
                    *(lm.next_token_logprobs(prompts[i], timeout=60) for i in mine)
                )
                rows[mine] = found

            await asyncio.gather(*(ask_group(number) for number in range(GROUPS)))
            return rows, lm.statistics()

    return asyncio.run(ask())


def waiting(client: redis.Redis, pool: str) -> int:
    """For how many answers somebody waits; one that several wait for counts for each of them."""
    found = 0
    for shard in pool_shards(client, pool):
        keys = list(client.scan_iter(f"{shard.prefix}:flight:*", count=1000))
        for flight in client.mget(keys) if keys else ():
            _, _, _, *clients = (flight or b"1-1 0 0").split()  # its entry, lane and deadline first
            found += len(clients)
    return found


def test_four_processes_that_ask_the_same_share_the_work(
    server_url, redis_client, pool_name, tmp_path
):
    prompts = some_prompts(PROMPTS, seed=1)
    expected = np.stack([mock_row(prompt, 256) for prompt in prompts])
    # Slow enough for the requests of all to overlap: about two seconds of computing.
    gate = Gate(tmp_path)
    slow = {**gate.settings(delay=0.12), "batch_size": 16}
    arguments = [(server_url, pool_name, prompts, seed) for seed in range(4)]
    with worker_processes(server_url, pool_name, 2, **slow), ThreadPoolExecutor(1) as thread:
        asking = thread.submit(in_processes, ask_everything, arguments)
        try:
            # Of those that are slow to begin the last find others' work done.
            enough = 2 * PROMPTS
            until(lambda: asking.done() or waiting(redis_client, pool_name) > enough, every=0.05)
        finally:
            gate.open()
        answers = asking.result()
        with connected(server_url, pool_name) as lm:
            pool = lm.pool_statistics_sync()
        until_at_rest(redis_client, pool_name)

    for rows, _ in answers:
        np.testing.assert_array_equal(rows, expected)
    assert pool["computed"] == PROMPTS
    assert pool["failed"] == pool["expired"] == pool["backlog"] == 0
    counted = [statistics for _, statistics in answers]
    for statistics in counted:
        assert statistics["requests"] == PROMPTS == _answered(statistics)
    assert sum(statistics["queued"] for statistics in counted) == PROMPTS
    # Each prompt was asked three times more, and most of that before it was computed.
    assert sum(statistics["joined"] for statistics in counted) > PROMPTS


def _answered(statistics: dict[str, int]) -> int:
    return sum(statistics[name] for name in ("local_hits", "cache_hits", "joined", "queued"))


def test_a_client_that_asks_again_computes_nothing(server_url, pool_name):
    prompts = some_prompts(40, seed=2)
    expected = np.stack([mock_row(prompt, 256) for prompt in prompts])
    with worker_process(server_url, pool_name):
        with connected(server_url, pool_name) as lm:
            twice = lm.batch_next_token_logprobs_sync(prompts + prompts)
            again = lm.batch_next_token_logprobs_sync(prompts)
            counted = lm.statistics()
        with connected(server_url, pool_name) as lm:
            other = lm.batch_next_token_logprobs_sync(prompts)
            counted_by_other = lm.statistics()
            computed = lm.pool_statistics_sync()["computed"]
    np.testing.assert_array_equal(twice, np.concatenate([expected, expected]))
    np.testing.assert_array_equal(again, expected)
    np.testing.assert_array_equal(other, expected)
    assert computed == 40
    assert counted["queued"] == counted["joined"] == counted["local_hits"] == 40
    assert counted["requests"] == _answered(counted) == 120
    assert counted_by_other["cache_hits"] == counted_by_other["requests"] == 40


def test_encodings_do_not_share(server_url, pool_name):
    prompts = some_prompts(10, seed=3)
    expected = np.stack([mock_row(prompt, 256) for prompt in prompts])
    with worker_process(server_url, pool_name), ExitStack() as stack:
        exact, rounded, automatic = (
            stack.enter_context(connected(server_url, pool_name, encoding=encoding))
            for encoding in ("f32", "f16", "auto")
        )
        rounded_rows = rounded.batch_next_token_logprobs_sync(prompts)
        # Whoever asks for exact rows gets them, though rounded ones are there.
        exact_rows = exact.batch_next_token_logprobs_sync(prompts)
        assert exact.pool_statistics_sync()["computed"] == 20
        # This pool's lossless encoding is f32: those rows are shared.
        automatic_rows = automatic.batch_next_token_logprobs_sync(prompts)
        assert automatic.pool_statistics_sync()["computed"] == 20
        assert automatic.statistics()["cache_hits"] == 10
    np.testing.assert_array_equal(exact_rows, expected)
    np.testing.assert_array_equal(automatic_rows, expected)
    assert not np.array_equal(rounded_rows, expected)
    np.testing.assert_allclose(rounded_rows, expected, atol=1e-2)


def test_adapters_do_not_share(server_url, pool_name, tmp_path):
    prompts = some_prompts(10, seed=4)
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_text(name)
    dirs = [str(tmp_path)]
    with (
        worker_process(server_url, pool_name, adapter_dirs=dirs),
        connected(server_url, pool_name) as lm,
    ):
        for name in ("first", "second"):
            lm.add_new_lora(str(tmp_path / name), name)
        by_adapter = [
            lm.batch_next_token_logprobs_sync(prompts, lora_name=name)
            for name in (None, "first", "second", "first", None)
        ]
        assert lm.pool_statistics_sync()["computed"] == 30
        assert lm.statistics()["local_hits"] == 20
    base, first, second, first_again, base_again = by_adapter
    np.testing.assert_array_equal(base, np.stack([mock_row(p, 256) for p in prompts]))
    np.testing.assert_array_equal(base, base_again)
    np.testing.assert_array_equal(first, first_again)
    for one, other in ((base, first), (base, second), (first, second)):
        assert (one != other).any(axis=1).all()


def test_fingerprints_do_not_share(server_url, pool_name):
    """A rolling upgrade computes its own rows; rolled back, it finds those it had."""
    prompts = some_prompts(10, seed=5)
    expected = np.stack([mock_row(prompt, 256) for prompt in prompts])
    seen = []
    for revision in ("one", "two", "one"):
        with (
            worker_process(server_url, pool_name, revision=revision),
            connected(server_url, pool_name) as lm,
        ):
            rows = lm.batch_next_token_logprobs_sync(prompts)
            np.testing.assert_array_equal(rows, expected)
            counted = lm.statistics()
            seen.append(
                (
                    lm.info.fingerprint,
                    counted["queued"],
                    counted["cache_hits"],
                    lm.pool_statistics_sync()["computed"],
                )
            )
    (one, *first), (two, *upgraded), (back, *third) = seen
    assert one == back != two
    assert first == upgraded == [10, 0, 10]
    assert third == [0, 10, 10]
