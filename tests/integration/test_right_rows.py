"""Every row is its own prompt's, against plain transformers that computes one prompt at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

import lmpool
from lmpool.backends import tiny
from lmpool.backends.engine import Request
from lmpool.rows import unpack_row
from lmpool.wants import Digester, Row
from tests.support.clients import connected
from tests.support.pools import pool_shards, until_at_rest
from tests.support.server import RealServer
from tests.support.workers import WorkerProcess

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


LONGEST = 512
VOCAB = 2000

Rows = npt.NDArray[np.float32]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def server(server_binary: str) -> Iterator[RealServer]:
    with RealServer(binary=server_binary) as server:
        yield server


@pytest.fixture(scope="module")
def pools(server: RealServer) -> Iterator[tuple[str, str]]:
    """A pool of two float32 workers and one of a bfloat16 worker; they load side by side."""
    common = {"engine": "hf", "model": "tiny", "engine_opts": {"threads": 1}, "batch_size": 16}
    started = [("rows-float32", "float32"), ("rows-float32", "float32"), ("rows-bf16", "bfloat16")]
    workers = [WorkerProcess(server.url, pool, dtype=dtype, **common) for pool, dtype in started]
    try:
        for worker in workers:
            worker.wait_until_alive()
        yield "rows-float32", "rows-bf16"
        for worker in workers:
            worker.terminate()
        for worker in workers:
            assert worker.wait() == 0, worker.log
    finally:
        for worker in workers:
            worker.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Every length from 1 to the longest is possible; the shortest, the longest and twins occur."""
    random = np.random.default_rng(20)
    lengths = [1, 1, 2, 3, LONGEST - 1, LONGEST, *random.integers(1, LONGEST + 1, 24)]
    lengths += random.integers(1, 20, 24).tolist()
    found = [random.integers(0, VOCAB, length).tolist() for length in lengths]
    # Twins, and prompts that differ from another in their first or their last token alone.
    short, twin = found[3], found[8]
    found += [found[5], twin, twin, [(short[0] + 1) % VOCAB, *short[1:]]]
    found += [[*short[:-1], (short[-1] + 1) % VOCAB], short[:-1]]
    return [found[i] for i in random.permutation(len(found))]


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]]) -> Rows:
    """Each prompt's row, computed alone in float32: float32 [prompts, vocab]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.path(), dtype="float32").eval()
    with torch.inference_mode():
        rows = [
            torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], dim=-1).numpy()
            for prompt in prompts
        ]
    return np.stack(rows)


def assert_same(rows: Rows, reference: Rows, tolerance: float = 1e-5) -> None:
    assert rows.dtype == np.float32
    assert rows.shape == reference.shape
    assert_normalized(rows)
    np.testing.assert_allclose(rows, reference, rtol=0, atol=tolerance)
    # Where the reference's two likeliest are apart, so are the row's.
    top = np.sort(reference, axis=1)
    clear = top[:, -1] - top[:, -2] > 2 * tolerance
    assert clear.sum() > len(rows) * 0.9
    np.testing.assert_array_equal(rows.argmax(axis=1)[clear], reference.argmax(axis=1)[clear])


def assert_normalized(rows: Rows) -> None:
    np.testing.assert_allclose(np.exp(rows.astype("f8")).sum(axis=1), 1.0, rtol=0, atol=1e-5)


def test_rows_are_those_of_a_float32_reference(server, pools, prompts, reference):
    with connected(server.url, pools[0]) as lm:
        assert (lm.info.encoding, lm.info.vocab_size) == ("f32", VOCAB)
        assert lm.info.max_prompt_tokens == LONGEST
        rows = lm.batch_next_token_logprobs_sync(prompts)
        counted = lm.statistics()
        pool = lm.pool_statistics_sync()
    assert_same(rows, reference)
    distinct = len({tuple(prompt) for prompt in prompts})
    assert distinct < len(prompts)
    assert (counted["queued"], counted["requests"]) == (distinct, len(prompts))
    assert pool["computed"] == distinct
    assert pool["batches"] > 2
    with server.client() as client:
        until_at_rest(client, pools[0])


def test_rows_asked_one_by_one_from_many_tasks(server, pools, prompts, reference):
    """The same in another order and another company, from a cache that knows none of them."""
    order = np.random.default_rng(21).permutation(len(prompts))

    async def ask() -> list[Rows]:
        async with lmpool.connect(server.url, pools[0], framework="numpy") as lm:
            # Another encoding, so that nothing is there already.
            lm_rows = asyncio.gather(*(lm.next_token_logprobs(prompts[i]) for i in order))
            async with lmpool.connect(
                server.url, pools[0], framework="numpy", encoding="bf16"
            ) as other:
                other_rows = await asyncio.gather(
                    *(other.next_token_logprobs(prompts[i]) for i in order)
                )
            return [np.stack(await lm_rows), np.stack(other_rows)]

    for rows in asyncio.run(ask()):
        assert_same(rows, reference[order])


def test_half_precision_on_request(server, pools, prompts, reference):
    with connected(server.url, pools[0], encoding="f16") as lm:
        rows = lm.batch_next_token_logprobs_sync(prompts)
    assert_normalized(rows)
    np.testing.assert_allclose(rows, reference, rtol=0, atol=1e-2)
    assert not np.array_equal(rows, reference)


def test_torch_rows(server, pools, prompts, reference):
    with connected(server.url, pools[0], framework="torch") as lm:
        rows = lm.batch_next_token_logprobs_sync(prompts)
        one = lm.next_token_logprobs_sync(prompts[0])
        assert rows.dtype == one.dtype == torch.float32
        assert_same(rows.numpy(), reference)
        assert_same(one.numpy()[None], reference[:1])
        one.fill_(0.0)  # the caller's own
        assert_same(lm.next_token_logprobs_sync(prompts[0]).numpy()[None], reference[:1])


def test_bfloat16_rows_travel_as_they_are(server, pools, prompts, reference):
    """From a head that computes in bfloat16, what arrives is what the engine computed, exactly."""
    from lmpool.backends.hf import HFEngine

    chosen = sorted(prompts, key=len)[::3]
    engine = HFEngine("tiny", dtype="bfloat16", threads=1)
    try:
        with connected(server.url, pools[1]) as lm:
            assert (lm.info.encoding, lm.info.dtype) == ("bf16", "bfloat16")
            # One at a time here and there: rows of batches may be rounded otherwise.
            rows = [lm.next_token_logprobs_sync(prompt) for prompt in chosen]
            own = [_own_row(engine, prompt) for prompt in chosen]
            np.testing.assert_array_equal(np.stack(rows), np.stack(own))
            with server.client() as client:
                _assert_stored_as_bf16(client, pools[1], lm.info.fingerprint, chosen, rows)

            batched = lm.batch_next_token_logprobs_sync(prompts)
    finally:
        engine.close()
    assert_normalized(np.stack(rows))
    assert_normalized(batched)
    # The same model with fewer digits: each row is nearest to that of its own prompt.
    assert np.abs(batched - reference).max() < 1.0
    distances = np.abs(batched[:, None, ::50] - reference[None, :, ::50]).mean(axis=2)
    own_distances = distances[np.arange(len(prompts)), np.arange(len(prompts))]
    np.testing.assert_array_equal(own_distances, distances.min(axis=1))


def _own_row(engine, prompt: Sequence[int]) -> Rows:
    engine.submit([Request(b"1", np.array(prompt, np.uint32))])
    (outcome,) = engine.step()
    assert outcome.row.dtype == np.uint16
    return outcome.logprobs()


def _assert_stored_as_bf16(client, pool, fingerprint, prompts, rows) -> None:
    (shard,) = pool_shards(client, pool)
    digester = Digester(fingerprint)
    for prompt, row in zip(prompts, rows, strict=True):
        digest = digester.digest(Row("bf16"), np.array(prompt, "<u4").tobytes())
        stored = client.get(shard.result(digest))
        assert len(stored) < VOCAB * 2 + 100
        np.testing.assert_array_equal(unpack_row(stored, VOCAB).logprobs(), row)
