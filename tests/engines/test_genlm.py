"""genlm-backend's callers run on a pool unchanged, and get what its own model gives them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import lmpool
from lmpool.errors import UnknownAdapter

torch = pytest.importorskip("torch")
backend = pytest.importorskip("genlm.backend.llm")
control = pytest.importorskip("genlm.control")

from lmpool.backends import tiny  # noqa: E402

pytestmark = [
    pytest.mark.genlm,
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),  # genlm-bytes' own
    # genlm-backend's own, in this process: lmpool's engines run in others.
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]

PROMPT = "The function returns"


@pytest.fixture(scope="module")
def pool() -> Iterator[lmpool.PooledLM]:
    with lmpool.embedded("tiny", engine="hf", workers=2) as lm:
        yield lm


@pytest.fixture(scope="module")
def peer() -> Any:
    """The same model, loaded by genlm-backend in this process."""
    return backend.AsyncTransformer.from_name(tiny.path(), hf_opts={"dtype": torch.float32})


def test_every_public_name_of_async_lm_is_there_with_its_arguments(pool: lmpool.PooledLM) -> None:
    for name, theirs in inspect.getmembers(backend.AsyncLM):
        if name.startswith("_") or not callable(theirs):
            continue
        ours = getattr(pool, name)
        wanted = [p for p in inspect.signature(theirs).parameters if p != "self"]
        given = list(inspect.signature(ours).parameters)
        assert given[: len(wanted)] == wanted, name
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs), name


def test_vocabularies_are_genlms_own(pool: lmpool.PooledLM, peer: Any) -> None:
    assert pool.byte_vocab == peer.byte_vocab
    assert [type(t) for t in pool.byte_vocab] == [type(t) for t in peer.byte_vocab]
    assert [bytes(t) for t in pool.byte_vocab] == [bytes(t) for t in peer.byte_vocab]
    assert pool.str_vocab == peer.str_vocab
    text = "naïve: déjà vu, 日本 🎉\n"
    assert pool.tokenizer.encode(text) == peer.tokenizer.encode(text)
    assert pool.tokenizer.eos_token_id == peer.tokenizer.eos_token_id


def test_rows_are_genlms_rows(pool: lmpool.PooledLM, peer: Any) -> None:
    prompts = [pool.tokenizer.encode(text) for text in (PROMPT, "Return a new", "x", PROMPT)]

    async def both() -> tuple[Any, Any]:
        return (
            await pool.batch_next_token_logprobs(prompts),
            await peer.batch_next_token_logprobs(prompts),
        )

    ours, theirs = asyncio.run(both())
    assert ours.dtype == torch.float32
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-4


def test_errors_are_of_the_kind_callers_catch(pool: lmpool.PooledLM) -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        pool.next_token_logprobs_sync([])
    with pytest.raises(UnknownAdapter) as unknown:
        pool.next_token_logprobs_sync([1], lora_name="nobody")
    assert isinstance(unknown.value, ValueError)


def test_sampling_takes_what_genlms_does(pool: lmpool.PooledLM, peer: Any) -> None:
    ids = pool.tokenizer.encode(PROMPT)
    for lm in (pool, peer):
        assert asyncio.run(lm.sample(ids, 0, [0])) == []
        assert asyncio.run(lm.batch_sample([ids, ids], 0, [])) == [[], []]
        assert len(asyncio.run(lm.sample(ids, 3, [10**6, -1]))) == 3  # which end nothing


def test_prompted_llm_weighs_as_on_genlms_model(pool: lmpool.PooledLM, peer: Any) -> None:
    async def weigh(lm: Any) -> tuple[float, float, Any]:
        llm = control.PromptedLLM(lm)
        llm.set_prompt_from_str(PROMPT)
        context = llm.tokenize(" the value")
        weights = await llm.logw_next(context)
        return await llm.prefix(context), await llm.complete(context), weights.weights

    ours, theirs = asyncio.run(weigh(pool)), asyncio.run(weigh(peer))
    assert ours[:2] == pytest.approx(theirs[:2], abs=1e-3)
    np.testing.assert_allclose(ours[2], theirs[2], atol=1e-3)


def test_smc_sampler_runs_unchanged(pool: lmpool.PooledLM) -> None:
    async def sample() -> Any:
        llm = control.PromptedLLM(pool)
        llm.set_prompt_from_str(PROMPT)
        letters = control.BoolFSA.from_regex(r" [a-z ]+")
        sampler = control.direct_token_sampler(llm * letters.coerce(llm, f=b"".join))
        return await sampler.smc(n_particles=8, ess_threshold=0.5, max_tokens=6)

    before = pool.statistics()
    sequences = asyncio.run(sample())
    assert len(sequences.contexts) == 8
    assert any(weight > -np.inf for weight in sequences.log_weights)
    for context, weight in zip(sequences.contexts, sequences.log_weights, strict=True):
        if weight > -np.inf:
            text = b"".join(bytes(t) for t in context if isinstance(t, bytes))
            assert text.startswith(b" ")
            assert text.decode().replace(" ", "").isalpha()
    after = pool.statistics()
    assert after["requests"] > before["requests"]
    assert after["failed"] == 0


def test_awrs_sampler_runs_unchanged(pool: lmpool.PooledLM) -> None:
    async def sample() -> Any:
        llm = control.PromptedLLM(pool)
        llm.set_prompt_from_str(PROMPT)
        letters = control.BoolFSA.from_regex(r" [a-z ]+")
        sampler = control.AWRS(llm, letters.coerce(llm, f=b"".join))
        return await sampler.smc(n_particles=4, ess_threshold=0.5, max_tokens=5)

    sequences = asyncio.run(sample())
    assert len(sequences.contexts) == 4


def test_byte_llm_runs_unchanged(pool: lmpool.PooledLM, peer: Any) -> None:
    from genlm.bytes import BeamParams

    async def weigh(lm: Any) -> float:
        async with control.ByteLLM(lm, BeamParams(K=3)) as llm:
            llm.set_prompt_from_str(PROMPT)
            return float(await llm.prefix([bytes([b]) for b in b" the"]))

    assert asyncio.run(weigh(pool)) == pytest.approx(asyncio.run(weigh(peer)), abs=1e-3)
