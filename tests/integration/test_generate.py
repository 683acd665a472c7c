"""`generate` through a pool: what it draws, what ends it, and what it tells."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import PromptError
from lmpool.wants import Generate, Generation, Top
from tests.support.clients import connected
from tests.support.workers import in_process_worker

PROMPT = [1, 2, 3]
LONGEST = 64


@pytest.fixture
def lm(any_server: str, pool_name: str) -> Iterator[lmpool.PooledLM]:
    with (
        in_process_worker(any_server, pool_name, engine_opts={"max_prompt_tokens": LONGEST}),
        connected(any_server, pool_name, request_timeout=60) as lm,
    ):
        yield lm


def ids(generation: Generation) -> list[int]:
    return generation.token_ids.tolist()


def test_why_a_continuation_ends_arrives_with_it(lm: lmpool.PooledLM) -> None:
    free = lm.sync.generate(PROMPT, 12, eos_token_ids=[], seed=5)
    assert (free.token_ids.size, free.ending, free.finish_reason) == (12, 0, "length")
    stop = [ids(free)[3:6], [7] * 9]
    stopped = lm.sync.generate(PROMPT, 12, eos_token_ids=[], seed=5, stop=stop)
    assert (ids(stopped), stopped.ending, stopped.finish_reason) == (ids(free)[:6], 3, "stop")
    assert stopped.text_ids.tolist() == ids(free)[:3]
    ended = lm.sync.generate(PROMPT, 12, eos_token_ids=[ids(free)[2]], seed=5)
    assert (ids(ended), ended.ending, ended.finish_reason) == (ids(free)[:3], 1, "eos")
    assert lm.sync.sample(PROMPT, 12, [ids(free)[2]], seed=5) == ids(free)[:2]
    cut = lm.sync.generate([1] * (LONGEST - 2), 2**31 - 1, eos_token_ids=[])
    assert (cut.token_ids.size, cut.finish_reason) == (3, "context")


def test_log_probabilities_arrive_as_they_were_asked_for(lm: lmpool.PooledLM) -> None:
    found = lm.sync.generate(
        PROMPT, 6, 1.7, top_p=0.9, top_k=30, min_p=0.01, seed=1, logprobs=True, top_logprobs=3
    )
    assert found.logprobs is not None
    assert found.top_logprobs is not None
    for step, token in enumerate(ids(found)):
        row = mock_row([*PROMPT, *ids(found)[:step]], 256)
        assert found.logprobs[step] == row[token]
        assert np.count_nonzero(row > row[token]) < 30
        right = Top(3).of_row(row)
        np.testing.assert_array_equal(found.top_logprobs.token_ids[step], right.token_ids)
        np.testing.assert_array_equal(found.top_logprobs.logprobs[step], right.logprobs)
    assert not found.logprobs.flags.writeable


def test_seeds_of_a_batch_count_up_and_those_of_sample_do_not(lm: lmpool.PooledLM) -> None:
    free: dict[str, Any] = {"max_tokens": 9, "eos_token_ids": []}
    together = [ids(each) for each in lm.sync.batch_generate([PROMPT] * 3, seed=4, **free)]
    assert together == [ids(lm.sync.generate(PROMPT, seed=4 + i, **free)) for i in range(3)]
    assert len({tuple(each) for each in together}) == 3
    assert lm.sync.batch_sample([PROMPT] * 3, 9, [], seed=4) == [together[0]] * 3
    unseeded = lm.sync.batch_generate([PROMPT] * 8, **free)
    assert len({tuple(ids(each)) for each in unseeded}) == 8


def test_it_is_asked_with_other_wants_and_while_a_loop_runs(lm: lmpool.PooledLM) -> None:
    want = Generate(4, (), seed=8, stop=[[1], [9, 9]], logprobs=True)
    _, drawn = lm.sync.ask_many([(PROMPT, Top(2)), (PROMPT, want)])
    assert isinstance(drawn, Generation)

    async def one() -> Generation:
        return await lm.generate(
            PROMPT, 4, seed=8, eos_token_ids=(), stop=((9, 9), (1,)), logprobs=True
        )

    assert ids(asyncio.run(one())) == ids(drawn)
    assert drawn.logprobs is not None
    assert drawn.logprobs.shape == drawn.token_ids.shape


def test_what_cannot_be_is_refused_before_anything_is_sent(lm: lmpool.PooledLM) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"top_p": 0}, "top_p=0: write a number above 0"),
        ({"stop": [[1], []]}, r"stop\[1\] of 0 token ids"),
        ({"top_logprobs": 257}, "top_logprobs=257: write an integer from 0 to 256"),
    ]
    for options, said in bad:
        with pytest.raises(PromptError, match=said):
            lm.sync.generate(PROMPT, **options)
    with pytest.raises(PromptError, match="ask 1: min_p=2") as refused:
        lm.sync.ask_many([(PROMPT, Top(1)), (PROMPT, Generate(1, min_p=2))])
    assert refused.value.index == 1
    with pytest.raises(PromptError, match="prompt 1: ") as refused:
        lm.sync.batch_generate([PROMPT, [1] * (LONGEST + 1)])
    assert refused.value.index == 1
    assert lm.statistics()["queued"] == 0
