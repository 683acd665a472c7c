"""genlm-control's potential by scores: the same numbers as by rows, and no row asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import lmpool
from lmpool.errors import PromptError
from tests.integration.test_adapters import write_adapter
from tests.support.clients import connected
from tests.support.workers import in_process_worker, worker_process

control = pytest.importorskip("genlm.control")
pytest.importorskip("torch")

from genlm.control.potential.built_in.llm import TokenMappings  # noqa: E402

from lmpool.integrations.genlm import AWRS, PromptedLLM  # noqa: E402

pytestmark = [pytest.mark.genlm, pytest.mark.server]

PROMPT = "The function returns"
TEXTS = (" some value of it", " None.", " x")


@pytest.fixture(scope="module")
def pool() -> Iterator[lmpool.PooledLM[Any]]:
    with lmpool.embedded("tiny", engine="hf", framework="torch") as lm:
        yield lm


def pair(lm: lmpool.PooledLM[Any], **options: Any) -> tuple[Any, Any]:
    """This package's potential and genlm-control's."""
    return PromptedLLM(lm, **options), control.PromptedLLM(lm, **options)


async def numbers(llm: Any, contexts: list[Any]) -> list[float]:
    """All that it says of contexts without a row's worth of numbers."""
    found = []
    for context in contexts:
        found += [await llm.prefix(context), await llm.complete(context)]
        found += [await llm.logw_eos(context), await llm.score([*context, llm.eos])]
    for name in ("batch_prefix", "batch_complete", "batch_score"):
        found += (await getattr(llm, name)(contexts)).tolist()
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("endings", [None, [b" the", b" a", b"\n"]], ids=["one", "three"])
def test_numbers_are_those_by_rows(
    pool: lmpool.PooledLM[Any], temperature: float, endings: list[bytes] | None
) -> None:
    async def both() -> list[list[float]]:
        found = []
        for llm in pair(pool, temperature=temperature, eos_byte_strings=endings):
            llm.set_prompt_from_str(PROMPT)
            ended = set(llm.token_maps.eos_token_objs)
            texts = [[t for t in llm.tokenize(text) if t not in ended] for text in TEXTS]
            found.append(await numbers(llm, [[], *texts]))
        return found

    ours, theirs = asyncio.run(both())
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_no_row_is_asked(server_url: str, pool_name: str) -> None:
    with in_process_worker(server_url, pool_name), connected(server_url, pool_name) as lm:
        maps = TokenMappings.create(lm.byte_vocab, [b"."])
        llm = PromptedLLM(lm, prompt_ids=[1, 2], token_maps=maps)
        asyncio.run(numbers(llm, [llm.tokenize("ab"), llm.tokenize("abc")]))
        assert lm.pool_statistics_sync()["answers"].keys() == {"score"}


def test_contexts_of_a_batch_travel_together(server_url: str, pool_name: str) -> None:
    with in_process_worker(server_url, pool_name), connected(server_url, pool_name) as lm:
        llm = PromptedLLM(
            lm, prompt_ids=[1], token_maps=TokenMappings.create(lm.byte_vocab, [b"."])
        )
        asyncio.run(llm.batch_prefix([llm.tokenize("ab" + chr(n)) for n in range(60, 100)]))
        assert lm.pool_statistics_sync()["batches"] <= 2


def test_a_tokenizer_of_fewer_tokens_than_the_model(server_url: str, pool_name: str) -> None:
    async def both(lm: lmpool.PooledLM[Any]) -> list[list[float]]:
        found = []
        for temperature in (1.0, 0.5):
            maps = TokenMappings.create(lm.byte_vocab[:10], [b"\x02", b"\x05"])
            for llm in pair(lm, prompt_ids=[1], temperature=temperature, token_maps=maps):
                context = llm.decode_tokens([3, 4])
                weights = await llm.logw_next(context)
                token = llm.vocab[1]
                by_token = (
                    await llm.logw_token(context, token)
                    if isinstance(llm, PromptedLLM)
                    else weights[token]
                )
                found.append([await llm.logw_eos(context), by_token, await llm.complete(context)])
        return found

    size = {"vocab_size": 12}
    with (
        in_process_worker(server_url, pool_name, engine_opts=size),
        connected(server_url, pool_name, framework="torch") as lm,
    ):
        found = asyncio.run(both(lm))
    for ours, theirs in zip(found[::2], found[1::2], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_adapters_are_asked_for(server_url: str, pool_name: str, tmp_path: Any) -> None:
    folder = write_adapter(tmp_path / "fr")
    with (
        worker_process(server_url, pool_name, adapter_dirs=[str(tmp_path)]),
        connected(server_url, pool_name, framework="torch") as lm,
    ):
        lm.add_new_lora(folder, "fr")
        maps = TokenMappings.create(lm.byte_vocab, [b"."])

        async def all_of(name: str | None) -> list[list[float]]:
            llms = pair(lm, prompt_ids=[1], token_maps=maps, lora_name=name)
            return [await numbers(llm, [llm.tokenize("ab")]) for llm in llms]

        ours, theirs = asyncio.run(all_of("fr"))
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
        assert not np.allclose(ours, asyncio.run(all_of(None))[0], atol=0.01)

        async def drawn() -> set[float]:
            llm = PromptedLLM(lm, prompt_ids=[1], token_maps=maps, lora_name="fr")
            sampler = AWRS(llm, _anything(llm), seed=1, max_accepts=3)
            return {round((await sampler.sample([]))[1], 4) for _ in range(3)}

        assert asyncio.run(drawn()) == {0.0}


def _anything(llm: Any) -> Any:
    class Anything(control.Potential):  # type: ignore[misc, name-defined]
        async def prefix(self, context: Any) -> float:
            return 0.0

        complete = prefix

    return Anything(llm.vocab, tables=llm.tables)


def test_what_is_spawned_asks_for_scores_too(pool: lmpool.PooledLM[Any]) -> None:
    llm = PromptedLLM(pool, prompt_ids=[5, 6], temperature=0.5)
    other = llm.spawn(temperature=0.7)
    assert type(other) is PromptedLLM
    assert (other.prompt_ids, other.temperature, other.model) == ([5, 6], 0.7, pool)
    assert other.token_maps is llm.token_maps
    ended = llm.spawn_new_eos([b" the"])
    assert type(ended) is PromptedLLM
    assert ended.eos_byte_strings == [b" the"]


def test_what_cannot_be_asked_is_refused(pool: lmpool.PooledLM[Any]) -> None:
    with pytest.raises(TypeError, match="a PooledLM is needed, not SyncPooledLM"):
        PromptedLLM(pool.sync)  # type: ignore[arg-type]
    for llm in pair(pool):  # neither has a row before the first token
        context = llm.tokenize("x")
        with pytest.raises(ValueError, match=r"start=0|empty prompt"):
            asyncio.run(llm.prefix(context))
    with pytest.raises(PromptError, match="temperature"):
        asyncio.run(PromptedLLM(pool, [5], temperature=0.0).prefix(context))
