"""Rows of every beginning of a text, hidden states and the head, through a pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lmpool
from lmpool.backends.hf import HFEngine
from lmpool.backends.mock import mock_row
from lmpool.errors import PromptError, SettingsError
from lmpool.keys import PoolKeys
from lmpool.wants import Digester, HeadPart, Hidden, Row
from tests.support.clients import connected
from tests.support.models import save_model
from tests.support.redis_client import open_redis
from tests.support.strategies import token_bytes
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
@pytest.mark.one_shard
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


# --- hidden states and the head ----------------------------------------------------------------


@contextmanager
def served(url: str, pool: str, model: str, **options: Any) -> Iterator[lmpool.PooledLM]:
    with (
        in_process_worker(url, pool, engine="hf", model=model, shards=2, **options),
        connected(url, pool, request_timeout=60) as lm,
    ):
        yield lm


def small_parts(monkeypatch: pytest.MonkeyPatch) -> list[HeadPart]:
    """Heads come in many parts; those that workers were asked for."""
    monkeypatch.setattr("lmpool.head_form.PART_BYTES", 1 << 10)
    asked: list[HeadPart] = []
    of_part = HeadPart.of_part

    def record(self: HeadPart, data: Any) -> Any:
        asked.append(self)
        return of_part(self, data)

    monkeypatch.setattr(HeadPart, "of_part", record)
    return asked


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "dtype", "changes"),
    [
        ("llama", "float32", {"tie_word_embeddings": False}),
        ("llama", "bfloat16", {"tie_word_embeddings": True}),
        ("phi", "float16", {}),
        ("gemma2", "float32", {"final_logit_softcapping": 3.0}),
    ],
)
def test_the_head_makes_the_row_of_the_hidden_state(
    server_url: str,
    pool_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: str,
    changes: dict[str, Any],
) -> None:
    asked = small_parts(monkeypatch)
    folder = str(save_model(tmp_path / "model", name, **changes))
    monkeypatch.setattr("lmpool.producer.head_files._folder", lambda info: None)
    with served(server_url, pool_name, folder, dtype=dtype) as lm:
        within = 2e-5 if dtype == "float32" else 0.05
        states = np.stack([lm.sync.last_hidden_state(TEXT[:p]) for p in (2, 6)])
        rows = lm.sync.logprobs_at(TEXT, [2, 6])
        head = lm.sync.head()
        made = head.logprobs(states)
        assert isinstance(made, np.ndarray)
        assert made.dtype == np.float32
        np.testing.assert_allclose(made, rows, atol=within)
        np.testing.assert_allclose(head.logprobs(states[0]), rows[0], atol=within)
        form, size = head.form, len(states[0])
        assert form.numbers == {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
        with open_redis(server_url) as client:
            keys = lm.info.shard_keys(PoolKeys(pool_name))
            digest = Digester(lm.info.fingerprint).digest(Hidden(), token_bytes(*TEXT))
            kept = [client.get(shard.result(digest)) for shard in keys]
        (value,) = [value for value in kept if value is not None]
        assert len(value) < size * (4 if dtype == "float32" else 2) + 10
        parts = form.parts(lm.info.vocab_size)
        assert parts > 8
        assert sorted(part.number for part in asked) == list(range(parts))
        again = lm.sync.head("cpu")
        np.testing.assert_allclose(again.logprobs(torch.tensor(states)), made, atol=1e-5)
        assert len(asked) == parts  # once
        with lmpool.connect(server_url, pool_name, framework="torch") as other:
            as_tensors = other.sync.head().logprobs(list(states))
            assert isinstance(as_tensors, torch.Tensor)
            np.testing.assert_allclose(as_tensors.numpy(), made, atol=1e-5)


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_in_the_models_own_files_is_not_sent(
    server_url: str, pool_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    asked = small_parts(monkeypatch)
    folder = str(save_model(tmp_path / "model", "llama", tie_word_embeddings=False))
    with served(server_url, pool_name, folder, dtype=dtype) as lm:
        own = lm.sync.head()
        assert asked
        assert all(part.hashed for part in asked)
        monkeypatch.setattr("lmpool.producer.head_files._folder", lambda info: None)
        with connected(server_url, pool_name) as other:
            sent = other.sync.head()
        assert not all(part.hashed for part in asked)
        state = np.random.default_rng(1).standard_normal(own.form.hidden_size)
        np.testing.assert_array_equal(own.logprobs(state), sent.logprobs(state))
        # Files of another model with matrices of that shape.
        save_model(tmp_path / "other", "llama", tie_word_embeddings=False, scale=2.0)
        monkeypatch.undo()
        small_parts(monkeypatch)
        monkeypatch.setattr("lmpool.producer.head_files._folder", lambda info: tmp_path / "other")
        with connected(server_url, pool_name) as other:
            np.testing.assert_array_equal(other.sync.head().logprobs(state), sent.logprobs(state))


def test_a_pool_without_hidden_states_says_so_before_anything_is_sent(
    lm: lmpool.PooledLM, any_server: str
) -> None:
    requests = lm.statistics()["requests"]
    assert lm.info.head is None
    for ask in (
        lambda: lm.sync.last_hidden_state(TEXT),
        lambda: lm.sync.head(),
        lambda: lm.sync.ask(TEXT, Hidden()),
    ):
        with pytest.raises(PromptError, match="without hidden states: its engine gives none"):
            ask()
    found = lm.sync.ask_many([(TEXT, Hidden()), (TEXT, Row())], errors="return")
    assert isinstance(found[0], PromptError)
    assert isinstance(found[1], np.ndarray)
    assert lm.statistics()["requests"] == requests + 1


@pytest.mark.engine
def test_what_is_no_hidden_state_is_refused(server_url: str, pool_name: str) -> None:
    with served(server_url, pool_name, "tiny") as lm:
        head = lm.sync.head()
        for bad, named in (
            (np.zeros(3, np.float32), r"hidden of shape \(3,\): \[256\] is needed"),
            (np.zeros((2, 2, 256)), r"hidden of shape"),
            ("h", "hidden='h'"),
            (np.zeros(256, bool), "of dtype bool"),
            (None, "hidden=None"),
        ):
            with pytest.raises(PromptError, match=named):
                head.logprobs(bad)
        assert head.logprobs(np.zeros((0, 256), np.float32)).shape == (0, head.vocab_size)
        with pytest.raises(SettingsError, match="device='nowhere'"):
            lm.sync.head("nowhere")
        with pytest.raises(PromptError, match=r"number=\d+: write an integer below"):
            lm.sync.ask([1], HeadPart(10**6))
        with pytest.raises(PromptError, match="hashed=1"):
            lm.sync.ask([1], HeadPart(0, 1))  # type: ignore[arg-type]
