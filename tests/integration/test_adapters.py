"""LoRA adapters on the workers of a pool, registered and removed by control jobs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import AdapterError, NoWorkers, UnknownAdapter
from lmpool.registry import Change
from lmpool.worker.adapters import MAX_LOADED, adapter_fingerprint
from tests.support.clients import connected
from tests.support.pools import assert_at_rest, pool_shards, some_prompts, worker_processes
from tests.support.waiting import until
from tests.support.workers import worker_process

PROMPTS = some_prompts(24, seed=1)


def write_adapter(folder: Path, content: str = "one") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_text(content)
    return str(folder)


def registered(client: redis.Redis, pool: str) -> dict[str, str]:
    """Name to fingerprint of the pool's adapters, as its clients read them."""
    first, *others = [client.hgetall(shard.adapters) for shard in pool_shards(client, pool)]
    assert all(other == first for other in others)
    changes = {name.decode(): Change.parse(entry) for name, entry in first.items()}
    return {
        name: change.fingerprint.decode() for name, change in changes.items() if not change.removed
    }


def rows_of(reference: str | None, prompts: list[list[int]] = PROMPTS) -> np.ndarray:
    return np.stack([mock_row(prompt, 256, adapter=reference) for prompt in prompts])


def new_rows(
    lm: lmpool.PooledLM, name: str, prompts: list[list[int]], expected: np.ndarray
) -> Callable[[], bool]:
    """Whether the client gets the rows of a replaced adapter: it may learn of it a second later."""

    def are_there() -> bool:
        rows = lm.batch_next_token_logprobs_sync(prompts, lora_name=name)
        return np.array_equal(rows, expected)

    return are_there


def client_of(url: str, pool: str, **options: Any) -> lmpool.PooledLM:
    """A client, connected or not, that outlives the workers it asks."""
    return lmpool.connect(url, pool, framework="numpy", workers_timeout=60, **options)


@pytest.mark.one_shard
@pytest.mark.usefixtures("unhurried_closing")
def test_adapters_come_are_replaced_and_go(server_url, redis_client, pool_name, tmp_path):
    roots = tmp_path / "adapters"
    style, tone = write_adapter(roots / "style"), write_adapter(roots / "deep" / "tone", "two")
    options = {"adapter_dirs": [str(roots)], "batch_size": 4}
    with (
        worker_processes(server_url, pool_name, 2, **options) as workers,
        connected(server_url, pool_name) as lm,
        connected(server_url, pool_name) as other,
    ):
        lm.add_new_lora(style, "style")
        lm.add_new_lora(tone, "tone")
        prints = registered(redis_client, pool_name)
        assert prints.keys() == {"style", "tone"}
        assert all(re.fullmatch("[0-9a-f]{32}", value) for value in prints.values())
        assert prints["style"] != prints["tone"]

        # Each prompt's row is its own adapter's, whatever shares its batch.
        async def mixed() -> list[np.ndarray]:
            async with lmpool.connect(server_url, pool_name, framework="numpy") as one:
                calls = [
                    one.next_token_logprobs(prompt, lora_name=name)
                    for prompt in PROMPTS
                    for name in (None, "style", "tone")
                ]
                return await asyncio.gather(*calls)

        found = np.stack(asyncio.run(mixed()))
        np.testing.assert_array_equal(found[0::3], rows_of(None))
        np.testing.assert_array_equal(found[1::3], rows_of(f"style@{prints['style']}"))
        np.testing.assert_array_equal(found[2::3], rows_of(f"tone@{prints['tone']}"))

        # Whoever learns the name elsewhere may use it, for continuations too.
        greedy = other.sample_sync(PROMPTS[0], 1, [], temperature=0, lora_name="tone")
        assert greedy == [int(found[2].argmax())]
        message = "unknown LoRA adapter 'stile': register it .* known: style, tone"
        with pytest.raises(UnknownAdapter, match=message):
            other.next_token_logprobs_sync(PROMPTS[0], lora_name="stile")

        # Other files under the same name are another adapter, for everybody.
        write_adapter(roots / "style", "other weights")
        lm.add_new_lora(style, "style")
        replaced = registered(redis_client, pool_name)
        assert replaced["tone"] == prints["tone"]
        assert replaced["style"] != prints["style"]
        expected = rows_of(f"style@{replaced['style']}")
        for client in (lm, other):
            until(new_rows(client, "style", PROMPTS, expected), what="the new adapter's rows")
        assert (expected != found[1::3]).any(axis=1).all()

        lm.remove_lora("style")
        assert registered(redis_client, pool_name).keys() == {"tone"}
        with pytest.raises(UnknownAdapter, match="known: tone"):
            lm.next_token_logprobs_sync([5], lora_name="style")
        with pytest.raises(UnknownAdapter):
            lm.remove_lora("style")
        np.testing.assert_array_equal(
            lm.batch_next_token_logprobs_sync(PROMPTS, lora_name="tone"), found[2::3]
        )
        lm.remove_lora("tone")
        assert registered(redis_client, pool_name) == {}
        assert len(lm.pool_statistics_sync()["workers"]) == 2
        for worker in workers:
            assert "Traceback" not in worker.log
    assert_at_rest(redis_client, pool_name)


def test_who_waits_for_an_adapter_that_is_removed_is_told_so(server_url, pool_name, tmp_path):
    """And not of an engine that failed."""
    asked: dict[str, Any] = {"seed": 1, "eos_token_ids": [], "lora_name": "style", "timeout": 60}
    slow = {"delay": 0.05}
    with (
        worker_process(server_url, pool_name, adapter_dirs=[str(tmp_path)], engine_opts=slow),
        connected(server_url, pool_name) as lm,
        ThreadPoolExecutor(1) as threads,
    ):
        lm.add_new_lora(write_adapter(tmp_path / "style"), "style")
        whole = threads.submit(lm.sync.generate, [1, 2], 1000, **asked)
        pieces = lm.sync.stream([3, 4], 1000, **asked)
        next(pieces)
        lm.remove_lora("style")
        with pytest.raises(UnknownAdapter, match=r"unknown LoRA adapter 'style'"):
            whole.result(60)
        with pytest.raises(UnknownAdapter, match=r"adapter 'style' was removed"):
            list(pieces)


def test_an_adapter_that_another_client_replaced_is_asked_for_anew(
    server_url, redis_client, pool_name, tmp_path, monkeypatch
):
    monkeypatch.setattr("lmpool.producer.adapters.FRESH", 3600.0)  # what it knows is out of date
    style = write_adapter(tmp_path / "style")
    with (
        worker_process(server_url, pool_name, adapter_dirs=[str(tmp_path)]),
        connected(server_url, pool_name) as lm,
        connected(server_url, pool_name) as other,
    ):
        lm.add_new_lora(style, "style")
        (old,) = registered(redis_client, pool_name).values()
        one = [[1, 2], [1, 3]]
        for ask in (other.batch_next_token_logprobs_sync, lambda p, name: asyncio.run(many(p))):
            np.testing.assert_array_equal(ask(one, "style"), rows_of(f"style@{old}", one))
            write_adapter(tmp_path / "style", f"replaces {old}")
            lm.add_new_lora(style, "style")
            (new,) = registered(redis_client, pool_name).values()
            assert new != old
            one = [[int(new[:2], 16), 7], [int(new[:2], 16), 8]]
            # Nobody has told the other client.
            np.testing.assert_array_equal(ask(one, "style"), rows_of(f"style@{new}", one))
            old = new

            async def many(prompts: list[list[int]]) -> np.ndarray:
                return await other.batch_next_token_logprobs(prompts, "style")

        lm.remove_lora("style")
        with pytest.raises(UnknownAdapter, match="unknown LoRA adapter 'style'"):
            other.next_token_logprobs_sync([9, 9, 9], lora_name="style")


@pytest.mark.one_shard
def test_more_adapters_in_one_batch_than_a_worker_keeps_take_turns(
    server_url, redis_client, pool_name, tmp_path
):
    names = [f"style{i}" for i in range(MAX_LOADED + 8)]
    options = {"adapter_dirs": [str(tmp_path)], "batch_size": 256, "timeout": 0.2}
    with (
        worker_process(server_url, pool_name, **options) as worker,
        connected(server_url, pool_name),
    ):
        (shard,) = pool_shards(redis_client, pool_name)
        for name in names:  # as another worker registered them
            folder = Path(write_adapter(tmp_path / name, name))
            redis_client.hset(shard.adapters, name, f"{adapter_fingerprint(folder)}\n{folder}")
        prints = registered(redis_client, pool_name)
        order = names * 2

        async def ask() -> list[np.ndarray]:
            async with lmpool.connect(server_url, pool_name, framework="numpy") as one:
                rows = [one.next_token_logprobs([3, i], lora_name=n) for i, n in enumerate(order)]
                drawn = [one.sample([3], 4, [], 1.0, i, lora_name=n) for i, n in enumerate(order)]
                found = await asyncio.gather(*rows, *drawn)
                assert all(len(ids) == 4 for ids in found[len(rows) :])
                return found[: len(rows)]

        for i, (name, row) in enumerate(zip(order, asyncio.run(ask()), strict=True)):
            np.testing.assert_array_equal(row, rows_of(f"{name}@{prints[name]}", [[3, i]])[0])
        assert "Traceback" not in worker.log


def test_a_worker_that_joins_later_loads_what_is_asked_for(
    server_url, redis_client, pool_name, tmp_path
):
    one = write_adapter(tmp_path / "one")
    options = {"adapter_dirs": [str(tmp_path)]}
    with closing(client_of(server_url, pool_name)) as lm:
        with worker_process(server_url, pool_name, **options):
            lm.add_new_lora(one, "one")
        (fingerprint,) = registered(redis_client, pool_name).values()
        with worker_process(server_url, pool_name, **options) as later:
            rows = lm.batch_next_token_logprobs_sync(PROMPTS, lora_name="one")
            np.testing.assert_array_equal(rows, rows_of(f"one@{fingerprint}"))

            # Files that are not those registered are not what was asked for.
            write_adapter(tmp_path / "one", "changed")
        with worker_process(server_url, pool_name, **options) as later:
            message = "the files of adapter 'one' changed on disk: register it again with add_new"
            with pytest.raises(UnknownAdapter, match=message):
                lm.next_token_logprobs_sync([1, 2], lora_name="one")
            np.testing.assert_array_equal(lm.next_token_logprobs_sync([3]), mock_row([3], 256))
            # What is known already needs no worker's files.
            np.testing.assert_array_equal(
                lm.batch_next_token_logprobs_sync(PROMPTS, lora_name="one"), rows
            )
            lm.add_new_lora(one, "one")
            (again,) = registered(redis_client, pool_name).values()
            assert again != fingerprint
            expected = rows_of(f"one@{again}", [[1, 2]])
            until(new_rows(lm, "one", [[1, 2]], expected), what="the new adapter's row")
            assert "Traceback" not in later.log


def test_adapters_that_cannot_be_loaded(server_url, redis_client, pool_name, tmp_path):
    allowed, outside = tmp_path / "allowed", write_adapter(tmp_path / "outside")
    good = write_adapter(allowed / "good")
    (allowed / "empty").mkdir()
    write_adapter(allowed / "pickled")
    (allowed / "pickled" / "adapter_model.safetensors").rename(
        allowed / "pickled" / "adapter_model.bin"
    )
    (allowed / "link").symlink_to(outside)
    write_adapter(allowed / "half")
    (allowed / "half" / "adapter_model.safetensors").unlink()
    (allowed / "half" / "adapter_model.safetensors").symlink_to(
        Path(outside) / "adapter_model.safetensors"
    )
    bad = [
        (outside, "one", "is not inside one of LMPOOL_ADAPTER_DIRS"),
        (f"{allowed}/../outside", "one", "is not inside one of LMPOOL_ADAPTER_DIRS"),
        (str(allowed), "one", "is not inside one of LMPOOL_ADAPTER_DIRS"),
        (str(allowed / "link"), "one", "is not inside one of LMPOOL_ADAPTER_DIRS"),
        (str(allowed / "nowhere"), "one", "does not exist on this worker"),
        (str(allowed / "empty"), "one", "has no adapter_config.json: save the adapter with PEFT"),
        (str(allowed / "pickled"), "one", "has no adapter_model.safetensors.*safe_serialization"),
        (str(allowed / "half"), "one", "is a link to outside its folder"),
        (good, "na@me", "lora_name='na@me': write 1 to 256 characters of text, none of them '@'"),
        (good, "", "lora_name=''"),
        (good, "n" * 300, "lora_name="),
    ]
    with (
        worker_process(server_url, pool_name, adapter_dirs=[str(allowed)]) as worker,
        connected(server_url, pool_name) as lm,
    ):
        for path, name, message in bad:
            with pytest.raises(AdapterError, match=message) as error:
                lm.add_new_lora(path, name)
            assert isinstance(error.value, ValueError)
            if not message.startswith("lora_name="):  # which nobody is asked about
                assert f"failed on 1 of 1 workers: {lm_worker(lm)}: " in str(error.value)
            assert registered(redis_client, pool_name) == {}
            with pytest.raises(UnknownAdapter):
                lm.next_token_logprobs_sync([1], lora_name="one")
        lm.add_new_lora(good, "one")
        (fingerprint,) = registered(redis_client, pool_name).values()
        np.testing.assert_array_equal(
            lm.next_token_logprobs_sync([1], lora_name="one"),
            mock_row([1], 256, adapter=f"one@{fingerprint}"),
        )
        assert lm.pool_statistics_sync()["failed"] == 0
        assert "Traceback" not in worker.log


def lm_worker(lm: lmpool.PooledLM) -> str:
    (worker,) = lm.pool_statistics_sync()["workers"]
    return worker["id"]


def test_adapters_where_the_operator_allows_none(server_url, pool_name, tmp_path):
    path = write_adapter(tmp_path / "one")
    with worker_process(server_url, pool_name), connected(server_url, pool_name) as lm:
        with pytest.raises(AdapterError, match="the operator must list their folders in LMPOOL_AD"):
            lm.add_new_lora(path, "one")
        np.testing.assert_array_equal(lm.next_token_logprobs_sync([1]), mock_row([1], 256))
        # One active adapter for all calls, as some libraries have it, is not offered.
        for call in (lambda: lm.set_lora(path, "one"), lm.clear_lora):
            with pytest.raises(RuntimeError, match="lora_name="):
                call()


def test_caches_are_kept_and_cleared(server_url, pool_name):
    """Whatever is cached where, rows stay what they are; only this client's cache is its own."""
    with closing(client_of(server_url, pool_name)) as lm:
        with worker_processes(server_url, pool_name, 2):
            expected = rows_of(None)
            np.testing.assert_array_equal(lm.batch_next_token_logprobs_sync(PROMPTS), expected)
            assert lm.cache_kv(PROMPTS[0]) is None
            with pytest.raises(ValueError, match="empty prompt"):
                lm.cache_kv([])
            with pytest.raises(ValueError, match="token id 999"):
                lm.cache_kv([1, 999])
            assert lm.clear_kv_cache() is None
            np.testing.assert_array_equal(lm.batch_next_token_logprobs_sync(PROMPTS), expected)
            assert lm.statistics()["local_hits"] == len(PROMPTS)
            lm.clear_cache()
            np.testing.assert_array_equal(lm.batch_next_token_logprobs_sync(PROMPTS), expected)
            counted = lm.statistics()
            assert (counted["local_hits"], counted["cache_hits"]) == (24, 24)
            assert lm.pool_statistics_sync()["computed"] == len(PROMPTS)
        with pytest.raises(NoWorkers, match="has no worker alive to clear cache"):
            lm.clear_kv_cache()
