"""Teachers in the shapes of verl and of Tinker, held to exact rows; neither needs its library."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import lmpool
from lmpool.errors import PromptError

torch = pytest.importorskip("torch")
pytest.importorskip("trl")  # in whose environment this runs

from lmpool.integrations.tinker import PoolSampler  # noqa: E402
from lmpool.integrations.verl import PoolTeacher  # noqa: E402

pytestmark = [pytest.mark.server]

SEQUENCE = [1, 261, 318, 81, 277, 273, 379, 2]


@pytest.fixture(scope="module")
def pool(tiny_pool: lmpool.EmbeddedLM) -> lmpool.EmbeddedLM:
    return tiny_pool


@pytest.fixture(scope="module")
def rows(pool: lmpool.EmbeddedLM) -> Any:
    prefixes = [SEQUENCE[:end] for end in range(1, len(SEQUENCE))]
    return np.asarray(pool.sync.batch_next_token_logprobs(prefixes))


# --- verl ------------------------------------------------------------------------------------


def test_the_likeliest_of_every_position_and_a_last_row_of_zeros(
    pool: lmpool.EmbeddedLM, rows: Any
) -> None:
    teacher = PoolTeacher(pool, topk=5)
    ids, logprobs = asyncio.run(teacher.compute_teacher_logprobs_single(SEQUENCE))
    assert (ids.shape, ids.dtype) == ((len(SEQUENCE), 5), torch.int32)
    assert (logprobs.shape, logprobs.dtype) == ((len(SEQUENCE), 5), torch.float32)
    best = np.argsort(-rows, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(ids[:-1].numpy(), best)
    np.testing.assert_allclose(logprobs[:-1].numpy(), np.take_along_axis(rows, best, 1), atol=5e-5)
    assert not ids[-1].any()
    assert not logprobs[-1].any()


def test_without_topk_the_sequences_own_tokens(pool: lmpool.EmbeddedLM, rows: Any) -> None:
    ids, logprobs = asyncio.run(PoolTeacher(pool).compute_teacher_logprobs_single(SEQUENCE))
    assert ids.tolist() == [[token] for token in [*SEQUENCE[1:], 0]]
    own = rows[np.arange(len(SEQUENCE) - 1), SEQUENCE[1:]]
    np.testing.assert_allclose(logprobs[:-1, 0].numpy(), own, atol=5e-5)
    assert logprobs[-1].tolist() == [0.0]


def test_many_sequences_are_one_request_and_one_may_be_a_token_longer(
    pool: lmpool.EmbeddedLM,
) -> None:
    teacher = PoolTeacher(pool, topk=3)
    sequences = [[1, 5 + n, 9] for n in range(40)] + [[7] * 513, [7]]

    async def ask() -> Any:
        return await asyncio.gather(
            *(teacher.compute_teacher_logprobs_single(each) for each in sequences)
        )

    found = asyncio.run(ask())
    for (ids, logprobs), sequence in zip(found, sequences, strict=True):
        assert ids.shape == logprobs.shape == (len(sequence), 3)
    assert not found[-1][1].any()


def test_teachers_by_routing_key(pool: lmpool.EmbeddedLM) -> None:
    teacher = PoolTeacher({"code": pool, "prose": pool})
    asked = teacher.compute_teacher_logprobs_single
    assert asyncio.run(asked(SEQUENCE, routing_key="code"))[0].shape == (len(SEQUENCE), 1)
    with pytest.raises(PromptError, match=r"routing_key='x': write one of \['code', 'prose'\]"):
        asyncio.run(asked(SEQUENCE, routing_key="x"))
    # One teacher takes every sequence, as verl's do.
    alone = PoolTeacher(pool).compute_teacher_logprobs_single
    assert asyncio.run(alone(SEQUENCE, routing_key="x"))[0].shape == (len(SEQUENCE), 1)


def test_what_it_refuses(pool: lmpool.EmbeddedLM) -> None:
    with pytest.raises(PromptError, match="topk=-1"):
        PoolTeacher(pool, topk=-1)
    with pytest.raises(TypeError, match="not str"):
        PoolTeacher("redis://server")  # type: ignore[arg-type]
    asked = PoolTeacher(pool).compute_teacher_logprobs_single
    with pytest.raises(PromptError, match="multi_modal_data"):
        asyncio.run(asked(SEQUENCE, {"images": ["a picture"]}))
    assert asyncio.run(asked(SEQUENCE, {"images": None}))[0].shape == (len(SEQUENCE), 1)
    with pytest.raises(PromptError, match="514 tokens"):
        asyncio.run(asked([7] * 514))


# --- Tinker ----------------------------------------------------------------------------------


class Input:
    """As Tinker's `ModelInput`."""

    def to_ints(self) -> list[int]:
        return SEQUENCE


def test_each_token_given_those_before_it(pool: lmpool.EmbeddedLM, rows: Any) -> None:
    sampler = PoolSampler(pool)
    own = rows[np.arange(len(SEQUENCE) - 1), SEQUENCE[1:]]
    for prompt in (SEQUENCE, Input()):
        first, *rest = asyncio.run(sampler.compute_logprobs_async(prompt))
        assert first is None
        np.testing.assert_allclose(rest, own, atol=5e-5)
        assert sampler.compute_logprobs(prompt).result() == [None, *rest]
    assert sampler.compute_logprobs([5]).result() == [None]
    with pytest.raises(PromptError):
        sampler.compute_logprobs([1, 99_999]).result()


def test_the_likeliest_of_each_position(pool: lmpool.EmbeddedLM, rows: Any) -> None:
    sampler = PoolSampler(pool)
    first, *rest = asyncio.run(sampler.compute_topk_logprobs_async(Input(), 3))
    assert first is None
    best = np.argsort(-rows, axis=1, kind="stable")[:, :3]
    assert [[token for token, _ in each] for each in rest] == best.tolist()
    np.testing.assert_allclose(
        [[value for _, value in each] for each in rest],
        np.take_along_axis(rows, best, 1),
        atol=5e-5,
    )
    none = asyncio.run(sampler.compute_topk_logprobs_async(SEQUENCE, 0))
    assert none == [None, *([] for _ in SEQUENCE[1:])]
    assert sampler.get_base_model() == pool.info.model
    assert sampler.get_tokenizer().bos_token_id == 1
