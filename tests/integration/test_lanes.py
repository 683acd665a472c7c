"""A pool in three lanes: everything that holds for one."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import numpy as np
import pytest

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import PromptFailed, UnknownAdapter
from tests.support.clients import connected
from tests.support.gate import Gate
from tests.support.pools import (
    Asking,
    assert_at_rest,
    in_processes,
    pool_lanes,
    some_prompts,
    until_at_rest,
    worker_processes,
)
from tests.support.waiting import until
from tests.support.workers import worker_process

pytestmark = pytest.mark.timeout(60)

LANES = 3


def rows_of(prompts: list[list[int]], adapter: str | None = None) -> np.ndarray:
    return np.stack([mock_row(prompt, 256, adapter=adapter) for prompt in prompts])


def ask(url: str, pool: str, prompts: list[list[int]]) -> tuple[np.ndarray, dict[str, int]]:
    """One client process."""
    with connected(url, pool) as lm:
        return lm.batch_next_token_logprobs_sync(prompts, timeout=40), lm.statistics()


def test_rows_and_shared_work(server_url, redis_client, pool_name):
    prompts = some_prompts(300, seed=1)
    options = {"lanes": LANES, "batch_size": 16, "engine_opts": {"delay": 0.04}}
    with worker_processes(server_url, pool_name, 2, **options):
        answers = in_processes(
            ask, [(server_url, pool_name, prompts), (server_url, pool_name, prompts[::-1])]
        )
        with connected(server_url, pool_name) as lm:
            assert lm.info.lanes == LANES
            statistics = lm.pool_statistics_sync()
            assert len(statistics["workers"]) == 2
            counted = [found for _, found in answers]

            async def more() -> None:
                async with lmpool.connect(server_url, pool_name, framework="numpy") as one:
                    rows = await asyncio.gather(*(one.next_token_logprobs(p) for p in prompts))
                    np.testing.assert_array_equal(rows, rows_of(prompts))
                    assert one.statistics()["cache_hits"] == len(prompts)

            asyncio.run(more())
            seeded = lm.batch_sample_sync(prompts[:30], 8, [], seed=4)
            assert seeded == [lm.sample_sync(prompt, 8, [], seed=4) for prompt in prompts[:30]]
        lanes = pool_lanes(redis_client, pool_name)
        assert len({lane.prefix for lane in lanes}) == LANES
        computed = [int(redis_client.hget(lane.counters, "computed")) for lane in lanes]
        assert_at_rest(redis_client, pool_name)
    np.testing.assert_array_equal(answers[0][0], rows_of(prompts))
    np.testing.assert_array_equal(answers[1][0], rows_of(prompts[::-1]))
    assert statistics["computed"] == len(prompts)
    assert sum(found["queued"] for found in counted) == len(prompts)
    assert sum(found["joined"] for found in counted) > 0
    # Each lane had its share, of rows and continuations.
    assert sum(computed) == len(prompts) + 30
    assert min(computed) > len(prompts) / LANES / 2


def test_what_goes_wrong_and_who_leaves(server_url, redis_client, pool_name, tmp_path):
    adapter = tmp_path / "adapters" / "one"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_text("one")
    gate = Gate(tmp_path)
    prompts = some_prompts(120, seed=2, vocab_size=255)
    options = {
        "lanes": LANES,
        "batch_size": 8,
        "adapter_dirs": [str(adapter.parent)],
        **gate.settings(fail_token=255),
    }
    with ExitStack() as stack:
        with worker_process(server_url, pool_name, **options) as one:
            lm = stack.enter_context(connected(server_url, pool_name, workers_timeout=60))
            asking = Asking(lm, prompts)
            gate.wait_for_batch()
            # Another number of lanes is another pool.
            other = {**options, "lanes": 2}
            with worker_process(server_url, pool_name, alive=False, **other) as refused:
                assert refused.wait() == 78
                assert "lanes 3 there, 2 here" in refused.log
            with connected(server_url, pool_name) as leaving:
                withdrawn = Asking(leaving, [[7, 7, i] for i in range(60)])
                lanes = pool_lanes(redis_client, pool_name)
                until(
                    lambda: sum(redis_client.xlen(lane.jobs) for lane in lanes) == 180,
                    what="all jobs to be queued",
                )
            assert withdrawn.join(10) is None
            one.terminate()
            gate.open()
            assert one.wait() == 0
        # What it held in each of the lanes is run by another; what was withdrawn is not.
        with worker_process(server_url, pool_name, **options):
            np.testing.assert_array_equal(asking.rows(), rows_of(prompts))
            assert lm.pool_statistics_sync()["computed"] == len(prompts)
            for i in range(6):  # in one lane or another
                with pytest.raises(PromptFailed, match="contains the token 255"):
                    lm.next_token_logprobs_sync([i, 255])
            lm.add_new_lora(str(adapter), "one")
            entries = {redis_client.hget(lane.adapters, "one") for lane in lanes}
            (entry,) = entries
            fingerprint = entry.decode().partition("\n")[0]
            found = lm.batch_next_token_logprobs_sync(prompts[:30], lora_name="one")
            np.testing.assert_array_equal(found, rows_of(prompts[:30], f"one@{fingerprint}"))
            lm.remove_lora("one")
            assert not redis_client.exists(*(lane.adapters for lane in lanes))
            with pytest.raises(UnknownAdapter):
                lm.next_token_logprobs_sync([1], lora_name="one")
            lm.close()
            until_at_rest(redis_client, pool_name)
        for lane in lanes:
            assert redis_client.xinfo_consumers(lane.jobs, "workers") == []
