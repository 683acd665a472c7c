# pyright: strict
"""What pipelines write. Read by type checkers, never run: see test_typing.py."""

from __future__ import annotations

import asyncio
from typing import assert_type

import numpy as np
import numpy.typing as npt
import torch

import lmpool
from lmpool import EmbeddedLM, NumpyRows, PooledLM, SyncPooledLM, TorchRows
from lmpool.errors import PoolTimeout, PromptError
from lmpool.producer.heads import Head
from lmpool.producer.statistics import PoolStatistics
from lmpool.producer.tokens import ByteToken
from lmpool.wants import (
    Draw,
    Draws,
    FinishReason,
    Generate,
    Generation,
    Hidden,
    Row,
    Score,
    TextScores,
    Tokens,
    Top,
    TopLogprobs,
)

PROMPT = [1, 5, 9]


async def asked_in_an_event_loop() -> None:
    async with lmpool.connect("redis://localhost:6379/0", pool="llama", framework="numpy") as lm:
        assert_type(lm, PooledLM[npt.NDArray[np.float32]])
        row = await lm.next_token_logprobs(PROMPT, timeout=3.0, priority="batch")
        assert_type(row, npt.NDArray[np.float32])
        rows = await asyncio.gather(*(lm.next_token_logprobs([i]) for i in range(3)))
        assert_type(rows, list[npt.NDArray[np.float32]])
        batch = await lm.batch_next_token_logprobs([PROMPT, (1, 2)], "adapter", progress=True)
        print(batch.argmax(axis=1), row.astype(np.float64))
        assert_type(await lm.sample(PROMPT, 20, [2], temperature=0.8, seed=1), list[int])
        assert_type(await lm.batch_sample([PROMPT], 20, [2], 0.8), list[list[int]])
        assert_type(await lm.pool_statistics(), PoolStatistics)
        assert_type(lm.statistics()["requests"], int)


async def less_than_rows(lm: PooledLM[NumpyRows]) -> None:
    assert_type(await lm.top_logprobs(PROMPT, 5), TopLogprobs)
    assert_type(await lm.ask(PROMPT, Row()), npt.NDArray[np.float32])
    assert_type(await lm.ask(PROMPT, Top(5)), TopLogprobs)
    assert_type(await lm.ask(PROMPT, Generate(5)), Generation)
    assert_type((await lm.score(PROMPT, top_logprobs=2)).total, float)
    assert_type(lm.sync.ask(PROMPT, Score()), TextScores)
    assert_type(lm.sync.batch_score([PROMPT], start=2), list[TextScores])
    assert_type(lm.sync.ask(PROMPT, Draw(n=3, allowed=[1, 2])), Draws)
    assert_type(lm.sync.ask(PROMPT, Tokens([3])), npt.NDArray[np.float32])
    assert_type(await lm.batch_draw([PROMPT], n=2), list[Draws])
    state = await lm.last_hidden_state(PROMPT)
    assert_type(state, npt.NDArray[np.float32])
    assert_type(await lm.ask(PROMPT, Hidden()), npt.NDArray[np.float32])
    head = await lm.head("cuda")
    assert_type(head, Head[npt.NDArray[np.float32]])
    assert_type(head.logprobs(state), npt.NDArray[np.float32])
    assert_type(await lm.logprobs_at(PROMPT, [1, 3]), npt.NDArray[np.float32])
    assert_type(lm.sync.logprobs_at(PROMPT, range(1, 4)), npt.NDArray[np.float32])
    assert_type((await lm.generate(PROMPT, 5, stop=[[2]])).text_ids, npt.NDArray[np.int32])
    assert_type(lm.sync.batch_generate([PROMPT], top_p=0.9, logprobs=True), list[Generation])
    assert_type(lm.sync.generate(PROMPT).finish_reason, FinishReason)
    async for piece in lm.stream(PROMPT, 5, stop=[[2]], logprobs=True):
        assert_type(piece, lmpool.Piece)
    for piece in lm.sync.stream(PROMPT, temperature=0.5):
        assert_type(piece.finish_reason, FinishReason | None)
    for found in lm.sync.ask_many([(PROMPT, Top(2)), lmpool.Ask(PROMPT, lora_name="fr")]):
        if isinstance(found, TopLogprobs):
            assert_type(found.token_ids, npt.NDArray[np.int32])
    for each in await lm.ask_many([(PROMPT, Top(2))], errors="return"):
        if isinstance(each, lmpool.LmpoolError):
            assert_type(each.index, int | None)
    async for number, _ in lm.ask_iter((PROMPT, Top(2)) for _ in range(10)):
        assert_type(number, int)
    for number, _ in lm.sync.ask_iter([(PROMPT, Top(2))], in_flight=10, ordered=True):
        assert_type(number, int)


def asked_in_a_thread() -> None:
    with lmpool.connect() as lm:
        assert_type(lm.sync.head(torch.device("cpu")).logprobs(torch.zeros(8)), torch.Tensor)
        assert_type(lm, PooledLM[torch.Tensor])
        assert_type(lm.sync, SyncPooledLM[torch.Tensor])
        row = lm.sync.next_token_logprobs(np.array(PROMPT), timeout=3.0)
        assert_type(row, torch.Tensor)
        assert_type(lm.next_token_logprobs_sync(torch.tensor(PROMPT)), torch.Tensor)
        assert_type(lm.sync.batch_next_token_logprobs([PROMPT], progress=True), torch.Tensor)
        assert_type(lm.batch_next_token_logprobs_sync([PROMPT]).softmax(-1), torch.Tensor)
        assert_type(lm.sync.sample(PROMPT, max_tokens=20, eos_token_ids=[2]), list[int])
        assert_type(lm.sample_sync(PROMPT, max_tokens=20, eos_token_ids=[2]), list[int])
        assert_type(lm.sync.batch_sample([PROMPT], 20, [2], seed=3), list[list[int]])
        assert_type(lm.sync.pool_statistics()["backlog"], int)
        lm.sync.wait_for_workers(timeout=10)
        lm.wait_for_workers_sync(10)
    with lmpool.connect("redis://localhost", framework="torch").sync as blocking:
        assert_type(blocking, SyncPooledLM[torch.Tensor])
        assert_type(blocking.info.vocab_size, int)
        blocking.clear_cache()


def a_private_pool() -> None:
    with lmpool.embedded(
        "tiny", "hf", workers=2, framework="numpy", batch_size=16, cache_bytes="512MiB"
    ) as lm:
        assert_type(lm, EmbeddedLM[npt.NDArray[np.float32]])
        assert_type(lm.sync.next_token_logprobs(PROMPT), npt.NDArray[np.float32])
        assert_type(lm.processes()["server"], int)
    assert_type(lmpool.embedded(engine_opts={"device": "cpu"}), EmbeddedLM[torch.Tensor])


def vocabulary(lm: PooledLM[object]) -> bytes:
    ids = lm.tokenizer.encode("text")
    assert_type(ids, list[int])
    assert_type(lm.tokenizer.decode(ids), str)
    assert_type(lm.byte_vocab, list[ByteToken])
    assert_type(lm.byte_vocab[0].token_id, int)
    assert_type(lm.str_vocab, list[str])
    return b"".join(lm.byte_vocab)


def entropy(lm: PooledLM[NumpyRows], prompt: list[int]) -> float:
    row = lm.sync.next_token_logprobs(prompt)
    return float(-(np.exp(row) * row).sum())


def surprise(lm: PooledLM, prompt: list[int], token: int) -> float:
    """A `PooledLM` of nothing in particular is one whose rows are tensors."""
    row: TorchRows = lm.sync.next_token_logprobs(prompt)
    return -float(row[token])


def errors(lm: PooledLM[NumpyRows]) -> float:
    try:
        return entropy(lm, [])
    except (PromptError, PoolTimeout) as error:
        print(error)
        return 0.0


def together() -> None:
    lm = lmpool.embedded(framework="numpy")
    print(vocabulary(lm), entropy(lm, PROMPT), errors(lm))
    print(surprise(lmpool.connect(when_busy="raise"), PROMPT, 3))
