"""A vLLM whose model two processes share, each with a part of every layer and of the head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lmpool.backends import Request
from lmpool.backends.contract import Reference, ask
from lmpool.wants import Generate, HeadPart, Hidden, OfRow, Row, Score, Top
from tests.support.engines import requests_of
from tests.support.scores import check_scores
from tests.support.small_answers import compare, random_wants
from tests.support.vllm_engine import (
    VOCAB,
    assert_rows,
    need_vllm,
    prompts,
    reducing_engine,
)

need_vllm()

import torch  # noqa: E402
import vllm.envs  # noqa: E402

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.of("tiny")


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        # Else vLLM wants a NUMA node for each of the two. It may have kept the variables.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        vllm.envs.disable_envs_cache()
        with reducing_engine(tensor_parallel_size=2, max_num_seqs=32) as made:
            yield made
    vllm.envs.disable_envs_cache()


def test_rows_are_those_of_the_whole_model(engine, reference):
    given = prompts(20, 60, seed=1)
    assert_rows(ask(engine, requests_of(given)), reference.rows(given))


def test_answers_are_reduced_where_one_of_them_has_all_logits(engine, reference):
    random = np.random.default_rng(4)
    given = prompts(40, 40, seed=2)
    wants: list[Any] = [*random_wants(random, VOCAB, 36), Row(), Row(), Row(), Row()]
    asked = [
        Request(b"%d" % n, prompt, None, want)
        for n, (prompt, want) in enumerate(zip(given, wants, strict=True))
    ]
    rows = [outcome.logprobs() for outcome in ask(engine, requests_of(given))]
    for request, outcome, row in zip(asked, ask(engine, asked), rows, strict=True):
        if isinstance(request.want, OfRow):
            compare(outcome, row, request.want, 1e-4)
        else:
            assert np.abs(outcome.logprobs() - row).max() < 1e-4


def test_the_likeliest_of_each_step(engine, reference):
    (prompt,) = prompts(1, 20, seed=3)
    want = Generate(6, (), 0.9, 3, logprobs=True, top_logprobs=3)
    (outcome,) = ask(engine, [Request(b"0", prompt, None, want)])
    drawn = outcome.answer.token_ids.tolist()
    rows = reference.rows([[*prompt.tolist(), *drawn[:n]] for n in range(6)])
    right = [Top(3).of_row(row) for row in rows]
    top = outcome.answer.top_logprobs
    np.testing.assert_allclose(top.logprobs, [each.logprobs for each in right], atol=1e-4)
    np.testing.assert_allclose(top.rest, [each.rest for each in right], atol=1e-3)
    np.testing.assert_allclose(outcome.answer.logprobs, rows[range(6), drawn], atol=1e-4)


def test_texts_are_scored_by_both(engine, reference):
    (text,) = prompts(1, 1, seed=4, shared=60)
    request = Request(b"0", text, None, Score(start=5, top_logprobs=3))
    (outcome,) = ask(engine, [request])
    with torch.inference_mode():
        logits = reference.model(torch.from_numpy(text.astype(np.int64))[None]).logits[0]
    rows = torch.log_softmax(logits.double(), -1).numpy()
    check_scores(outcome, request, rows[:-1])


def test_hidden_states_and_the_head_are_refused(engine):
    """Nobody has all of the head, and a client could make nothing of a state."""
    assert engine.info.head is None
    reason = "tensor_parallel_size and pipeline_parallel_size part its head"
    assert engine.info.no_head == f"LlamaForCausalLM: {reason}"
    (prompt,) = prompts(1, 20, seed=5)
    wants = (Hidden(), HeadPart(0), Row())
    asked = [Request(b"%d" % n, prompt, None, want) for n, want in enumerate(wants)]
    for refused in (ask(engine, asked)[:2], ask(engine, asked[:2])):
        for outcome in refused:
            assert str(outcome.error) == f"no hidden states: LlamaForCausalLM: {reason}"
    (row,) = ask(engine, asked[2:])
    assert row.error is None
    assert engine.in_flight() == 0
