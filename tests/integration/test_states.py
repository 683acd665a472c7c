"""Rows of every beginning of a text, through a pool."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import lmpool
from lmpool.backends.hf import HFEngine
from lmpool.backends.mock import mock_row
from lmpool.errors import PromptError
from tests.support.clients import connected
from tests.support.workers import in_process_worker

TEXT = [3, 1, 4, 1, 5, 9]


@pytest.fixture
def lm(any_server: str, pool_name: str) -> Iterator[lmpool.PooledLM]:
    with (
        in_process_worker(any_server, pool_name, shards=2),
        connected(any_server, pool_name, request_timeout=20) as lm,
    ):
        yield lm


def test_rows_at_positions_are_those_of_prefixes_and_cached_as_such(lm: lmpool.PooledLM) -> None:
    positions = [4, 1, 6, 4]
    rows = lm.sync.logprobs_at(TEXT, np.array(positions))
    right = np.stack([mock_row(TEXT[:p], 256) for p in positions])
    np.testing.assert_array_equal(rows, right)
    assert rows.dtype == np.float32
    computed = lm.sync.pool_statistics()["computed"]
    assert computed == 3
    np.testing.assert_array_equal(lm.sync.next_token_logprobs(TEXT[:4]), right[0])
    lm.clear_cache()
    lm.sync.batch_next_token_logprobs([TEXT[:p] for p in positions])
    assert lm.sync.pool_statistics()["computed"] == computed
    assert lm.sync.logprobs_at(TEXT, []).shape == (0, 256)
    longest = lm.info.max_prompt_tokens
    assert lm.sync.logprobs_at([7] * (longest + 1), [longest]).shape == (1, 256)


def test_rows_at_positions_follow_the_framework(lm: lmpool.PooledLM) -> None:
    with lmpool.connect(lm.url, lm.pool, framework="torch") as other:
        rows = other.sync.logprobs_at(torch.tensor(TEXT), [2, 3])
        assert isinstance(rows, torch.Tensor)
        assert rows.shape == (2, 256)


@pytest.mark.parametrize(
    ("positions", "named", "index"),
    [
        ([1, 0], r"positions\[1\]=0: .* from 1 .* to 6", 1),
        ([7], r"positions\[0\]=7", 0),
        ([1, 2, -1], r"positions\[2\]=-1", 2),
        ([1.0], r"positions\[0\]=1.0", 0),
        ([True], r"positions\[0\]=True", 0),
        ("12", "positions of type str: integers are needed", None),
        (3, "positions of type int", None),
        (np.array([[1]]), r"positions of shape \(1, 1\)", None),
    ],
)
def test_positions_that_cannot_be_are_named(
    lm: lmpool.PooledLM, positions: object, named: str, index: int | None
) -> None:
    requests = lm.statistics()["requests"]
    with pytest.raises(PromptError, match=named) as caught:
        lm.sync.logprobs_at(TEXT, positions)  # type: ignore[arg-type]
    assert caught.value.index == index
    with pytest.raises(PromptError, match="token id 256"):
        lm.sync.logprobs_at([1, 256], [1])
    assert lm.statistics()["requests"] == requests


@pytest.mark.engine
@pytest.mark.timeout(120)
def test_a_text_is_taken_in_once_for_all_of_its_positions(server_url: str, pool_name: str) -> None:
    text = [int(t) for t in np.random.default_rng(1).integers(3, 300, 200)]
    with (
        in_process_worker(server_url, pool_name, engine="hf", model="tiny") as worker,
        connected(server_url, pool_name, request_timeout=60) as lm,
    ):
        engine = worker.service.engine
        assert isinstance(engine, HFEngine)
        tokens: list[int] = []
        embeddings = engine._forward._model.get_input_embeddings()  # type: ignore[union-attr]
        embeddings.register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0].numel()))
        rows = lm.sync.logprobs_at(text, range(1, len(text) + 1))
        assert len(text) <= sum(tokens) < 1.5 * len(text)
        alone = lm.sync.next_token_logprobs(text[:77])
        np.testing.assert_array_equal(rows[76], alone)
