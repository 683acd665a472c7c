"""Whatever is wrong is told to whoever did it, in words, and troubles nobody else."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgpack
import numpy as np
import pytest
import redis

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import (
    PromptError,
    PromptFailed,
    UnknownAdapter,
    UnknownPool,
)
from lmpool.keys import GROUP
from lmpool.rows import pack_logprobs, unpack_row
from lmpool.wants import Digester, Row
from lmpool.wire import Job, pack_job
from lmpool.worker.dead_letters import GARBAGE_BYTES
from tests.support.clients import connected
from tests.support.pools import assert_at_rest, pool_shards, some_prompts
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import worker_process

BAD_PROMPTS = [
    # prompt, and what the message must say: the value and where, or what to write instead
    ([], "empty prompt: at least one token id is needed"),
    ((), "empty prompt"),
    (np.array([], np.int64), "empty prompt"),
    ([5, -1, 7], r"token id -1 at position 1 is outside \[0, 256\).*tokenizer"),
    ([5, 256], r"token id 256 at position 1 is outside \[0, 256\)"),
    ([2**40], r"token id 1099511627776 at position 0 is outside"),
    (np.array([3, -7]), r"token id -7 at position 1"),
    ([1, 2.0], r"token id 2\.0 at position 1 is a float, not an integer"),
    ([1, "2"], r"token id '2' at position 1 is a str, not an integer"),
    ([1, None], r"token id None at position 1 is a NoneType"),
    ([True, 1], r"token id True at position 0 is a bool, not an integer"),
    ([np.bool_(True)], r"position 0 is a bool"),
    (np.array([1.0, 2.0]), r"dtype float64: integers are needed"),
    (np.array([True]), r"dtype bool: integers are needed"),
    (np.array([[1, 2]]), r"shape \(1, 2\): one dimension.*batch_next_token_logprobs"),
    ("a text", r"type str: token ids are needed; write lm\.tokenizer\.encode\(text\)"),
    (b"bytes", "type bytes"),
    (7, "type int: a list of token ids is needed"),
    (None, "type NoneType"),
    ([1] * 41, r"a prompt of 41 tokens: this pool takes at most 40; shorten it"),
]


@pytest.fixture(scope="module")
def shared(server_binary: str) -> Iterator[tuple[str, str]]:
    """A server and a pool that many callers here share, as they would: none may disturb another."""
    with RealServer(binary=server_binary) as server:
        options = {"max_prompt_tokens": 40, "engine_opts": {"fail_token": 255}}
        with worker_process(server.url, "shared", **options):
            yield server.url, "shared"


@contextmanager
def undisturbed(shared: tuple[str, str], seed: int) -> Iterator[lmpool.PooledLM]:
    """Another caller gets its rows meanwhile, and the pool has computed those alone."""
    good = some_prompts(20, seed=seed, vocab_size=255)
    url, pool = shared
    with connected(url, pool) as lm, connected(url, pool) as other:
        before = other.pool_statistics_sync()
        rows: list[np.ndarray] = []
        asking = threading.Thread(
            target=lambda: rows.append(other.batch_next_token_logprobs_sync(good))
        )
        asking.start()
        try:
            yield lm
        finally:
            asking.join()
        np.testing.assert_array_equal(rows[0], [mock_row(prompt, 256) for prompt in good])
        after = other.pool_statistics_sync()
        assert after["computed"] - before["computed"] == len(good)
        assert after["failed"] == before["failed"]
        assert after["backlog"] == 0
        assert [w["pid"] for w in after["workers"]] == [w["pid"] for w in before["workers"]]


def test_prompts_that_cannot_be_used(shared):
    with undisturbed(shared, seed=1) as lm:
        for prompt, message in BAD_PROMPTS:
            with pytest.raises(PromptError, match=message):
                lm.next_token_logprobs_sync(prompt)
            with pytest.raises(ValueError, match=message):
                asyncio.run(lm.next_token_logprobs(prompt))
            with pytest.raises(PromptError, match=f"prompt 1: .*{message}"):
                lm.batch_next_token_logprobs_sync([[1], prompt])
            with pytest.raises(PromptError, match=message):
                lm.sample_sync(prompt, 3, [])
        assert lm.statistics()["requests"] == lm.statistics()["queued"] == 0


def test_every_kind_of_integers_is_a_prompt(shared):
    torch = pytest.importorskip("torch")
    url, pool = shared
    expected = mock_row([7, 8, 9], 256)
    kinds = [
        [7, 8, 9],
        (7, 8, 9),
        range(7, 10),
        iter([7, 8, 9]),
        np.array([7, 8, 9], np.uint8),
        np.array([7, 8, 9], np.int64)[::1],
        np.array([9, 8, 7])[::-1],
        [np.int32(7), np.uint64(8), 9],
        torch.tensor([7, 8, 9]),
        torch.tensor([7, 8, 9], dtype=torch.int32),
        list(torch.tensor([7, 8, 9])),
    ]
    with connected(url, pool) as lm:
        before = lm.pool_statistics_sync()["computed"]
        for prompt in kinds:
            np.testing.assert_array_equal(lm.next_token_logprobs_sync(prompt), expected)
        assert lm.pool_statistics_sync()["computed"] == before + 1
        longest = lm.next_token_logprobs_sync([1] * 40)
        np.testing.assert_array_equal(longest, mock_row([1] * 40, 256))


def test_options_of_a_call_that_cannot_be_used(shared):
    with undisturbed(shared, seed=2) as lm:
        for options, message in [
            ({"max_tokens": -1}, r"max_tokens=-1: write an integer, 0 or more"),
            ({"max_tokens": 2.5}, r"max_tokens=2\.5"),
            ({"temperature": -1.0}, r"temperature=-1\.0: write a number of 0 \(greedy\) or more"),
            ({"temperature": float("nan")}, "temperature=nan"),
            ({"seed": "one"}, "seed='one': write an integer"),
            ({"eos_token_ids": [2.5]}, r"eos_token_ids=\[2\.5\]: write a list of at most 256"),
        ]:
            with pytest.raises(ValueError, match=message):
                lm.sample_sync([1], **{"max_tokens": 3, "eos_token_ids": [], **options})
        for name in ([], {}, 5, b"one", "\ud800"):
            with pytest.raises(UnknownAdapter, match=r"lora_name=.*write an adapter's name"):
                lm.next_token_logprobs_sync([1], lora_name=name)
        for timeout in (0, -1, True):
            with pytest.raises(ValueError, match=f"timeout={timeout!r}: write a positive number"):
                lm.next_token_logprobs_sync([1], timeout=timeout)


def test_numbers_of_any_library_mean_the_same(shared):
    torch = pytest.importorskip("torch")
    url, pool = shared
    with connected(url, pool) as lm:
        expected = lm.sample_sync([1], 5, [2], 0.8, seed=7)
        for kind in (np.int64, np.uint8, np.array, torch.tensor):
            assert lm.sample_sync([kind(1)], kind(5), [kind(2)], 0.8, seed=kind(7)) == expected
        for temperature in (np.float64(0.8), np.array(0.8), torch.tensor(0.8).double()):
            assert lm.sample_sync([1], 5, [2], temperature, seed=7) == expected


def test_what_genlm_backend_takes_is_taken(shared):
    """Its loop ends at no token outside the vocabulary, and draws nothing where none is wanted."""
    url, pool = shared
    with connected(url, pool) as lm:
        expected = lm.sample_sync([1], 5, [2], seed=7)
        assert lm.sample_sync([1], 5, [2, -1, 256, 2**70], seed=7) == expected
        before = lm.statistics()["requests"]
        assert lm.sample_sync([1], 0, []) == []
        assert asyncio.run(lm.batch_sample([[1], [2]], np.int64(0), [])) == [[], []]
        with pytest.raises(PromptError, match="prompt 1: empty"):
            lm.batch_sample_sync([[1], []], 0, [])
        assert lm.statistics()["requests"] == before


def test_unknown_adapters(shared):
    with undisturbed(shared, seed=3) as lm:
        message = r"unknown LoRA adapter 'nobody': register it with add_new_lora\(\); known: none"
        with pytest.raises(UnknownAdapter, match=message):
            lm.next_token_logprobs_sync([1], lora_name="nobody")
        with pytest.raises(ValueError, match=message):
            asyncio.run(lm.sample([1], 3, [], lora_name="nobody"))
        with pytest.raises(UnknownAdapter, match=message):
            lm.remove_lora("nobody")
        assert lm.statistics()["queued"] == 0


def test_one_bad_prompt_fails_alone(shared):
    """Of a batch of 50, one fails in the engine: 49 rows and one error."""
    prompts = some_prompts(50, seed=4, vocab_size=255)
    prompts[23][-1] = 255
    url, pool = shared

    async def ask() -> list[object]:
        async with lmpool.connect(url, pool, framework="numpy") as lm:
            calls = [lm.next_token_logprobs(prompt) for prompt in prompts]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            # Its error was its own: it may be asked again, and fails again.
            with pytest.raises(PromptFailed):
                await lm.next_token_logprobs(prompts[23])
            assert lm.statistics()["failed"] == 2
            return answers

    with connected(url, pool) as lm:
        before = lm.pool_statistics_sync()
        answers = asyncio.run(ask())
        after = lm.pool_statistics_sync()
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if i == 23:
            assert isinstance(answer, PromptFailed)
            assert "RuntimeError: a prompt contains the token 255" in str(answer)
        else:
            np.testing.assert_array_equal(answer, mock_row(prompt, 256))
    assert after["computed"] - before["computed"] == 49
    assert after["failed"] - before["failed"] == 2


def test_a_prompt_that_failed_is_tried_again_when_it_is_asked_again(shared):
    """No error of before is given out again: every ask is one attempt."""
    url, pool = shared
    with connected(url, pool) as lm:
        before = lm.pool_statistics_sync()["failed"]
        for number in range(50):
            with connected(url, pool) as new:
                for _ in range(3):
                    with pytest.raises(PromptFailed):
                        new.next_token_logprobs_sync([number, 255])
        assert lm.pool_statistics_sync()["failed"] == before + 150


def test_unknown_pool(shared):
    url, _ = shared
    lm = lmpool.connect(url, "nobodys", workers_timeout=0.2)
    with pytest.raises(UnknownPool, match=r"no pool 'nobodys' on unix://.*--pool nobodys"), lm:
        pass


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.mark.usefixtures("unhurried_closing")
def test_garbage_in_the_job_stream(server_url, redis_client, pool_name, tmp_path):
    """The worker lives, the garbage ends among the dead with a reason, and others are answered."""
    good = some_prompts(30, seed=5)
    tokens = np.array([1, 2, 3], "<u4").tobytes()
    trap = tmp_path / "unpickled"
    with worker_process(server_url, pool_name) as worker, connected(server_url, pool_name) as lm:
        digester = Digester(lm.info.fingerprint)
        want = Row("f32")
        others = digester.digest(want, np.array([9, 9], "<u4").tobytes())
        own = digester.digest(want, tokens)
        sound = msgpack.unpackb(pack_job(Job(want, own, tokens, None)))
        garbage: list[tuple[dict[str, bytes], str]] = [
            ({"job": os.urandom(100)}, ""),
            ({"job": b""}, "not msgpack"),
            ({"jobs": b"of another field"}, "not msgpack"),
            ({"job": b"\xc1" * 10}, "not msgpack"),
            ({"job": b"\x91" * 5000}, "not msgpack"),  # lists in lists in lists
            ({"job": msgpack.packb([1, 2, 3])}, "a list instead of a map"),
            ({"job": msgpack.packb({"v": 1})}, "no digest of 16 bytes"),
            ({"job": pickle.dumps(_Bomb(str(trap)))}, ""),
            ({"job": msgpack.packb(msgpack.ExtType(5, b"code"))}, "extension type 5"),
            ({"job": msgpack.packb({**sound, "v": 1})}, "job version 1: this worker reads version"),
            ({"job": msgpack.packb({**sound, "want": ["exec"]})}, "unknown want 'exec'"),
            ({"job": msgpack.packb({**sound, "tokens": b"123"})}, "tokens are not"),
            ({"job": msgpack.packb({**sound, "digest": others})}, "digest is not the one of this"),
            (
                {"job": pack_job(Job(want, others, tokens, None))},
                "digest is not the one",
            ),
            ({"job": msgpack.packb({**sound, "want": ["row", "f64"]})}, "unknown encoding"),
        ]
        shard = pool_shards(redis_client, pool_name)[0]
        answers = []
        for number, (fields, _) in enumerate(garbage):  # good prompts in between
            redis_client.xadd(shard.stream().key, fields)
            answers.append(lm.batch_next_token_logprobs_sync(good[2 * number : 2 * number + 2]))
        np.testing.assert_array_equal(np.concatenate(answers), [mock_row(p, 256) for p in good])
        until(
            lambda: redis_client.xlen(shard.dead) == len(garbage), what="all garbage to be refused"
        )
        dead = [fields for _, fields in redis_client.xrange(shard.dead)]
        for (fields, reason), found in zip(garbage, dead, strict=True):
            assert reason in found[b"reason"].decode()
            assert found[b"reason"]
            assert found[b"job"] == fields.get("job", b"")[:GARBAGE_BYTES]
        assert redis_client.xpending(shard.stream().key, GROUP)["pending"] == 0
        statistics = lm.pool_statistics_sync()
        assert (statistics["computed"], statistics["failed"]) == (len(good), len(garbage))
        assert [found["pid"] for found in statistics["workers"]] == [worker.pid]
        # Nothing was computed under another prompt's key, and nothing was run.
        assert not redis_client.exists(shard.result(others), shard.result(own))
        assert not trap.exists()
        assert "Traceback" not in worker.log
        lm.close()
        assert_at_rest(redis_client, pool_name)


@pytest.mark.usefixtures("unhurried_closing")
def test_garbage_in_the_result_cache(shared, caplog):
    url, pool = shared
    row = pack_logprobs(mock_row([1], 256)).joined()
    planted = [
        (
            row.replace(b"\xcc\x01", b"\xcc\x02", 1),
            r"a row of version 2: this lmpool reads version 1",
        ),
        (row[:-4], r"cut short or overlong: 1020 bytes behind the header where 256 entries"),
        (row + b"\0", "cut short or overlong"),
        (row[:10], "not a row"),
        (b"", ""),  # nothing is there: the worker writes its row
        (pickle.dumps([0.0] * 256), "a row of|not a row"),
        (
            pack_logprobs(mock_row([1], 128)).joined(),
            "a row of 128 entries where 256 were expected",
        ),
    ]
    with connected(url, pool) as lm, redis.Redis.from_url(url, protocol=2) as client:
        (shard,) = pool_shards(client, pool)
        digester = Digester(lm.info.fingerprint)
        for number, (value, message) in enumerate(planted):
            prompt, good = [200, number], [201, number]
            tokens = np.array(prompt, "<u4").tobytes()
            key = shard.result(digester.digest(Row("f32"), tokens))
            client.set(key, value, px=60_000)

            async def ask(prompt: list[int] = prompt, good: list[int] = good) -> list[object]:
                calls = [lm.next_token_logprobs(prompt), lm.next_token_logprobs(good)]
                return await asyncio.gather(*calls, return_exceptions=True)

            caplog.clear()
            found, right = asyncio.run(ask())
            # It is refused, deleted, and computed again.
            np.testing.assert_array_equal(found, mock_row(prompt, 256))
            np.testing.assert_array_equal(right, mock_row(good, 256))
            assert re.search(message, caplog.text), (number, caplog.text)
            assert unpack_row(client.get(key), 256).logprobs().tolist() == found.tolist()
    with redis.Redis.from_url(url, protocol=2) as client:
        assert_at_rest(client, pool)
