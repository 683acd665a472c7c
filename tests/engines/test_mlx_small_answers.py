"""What the MLX engine reduces where MLX has the rows, beside what NumPy makes of the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from lmpool.backends import Outcome, Request  # noqa: E402
from lmpool.backends.contract import ask, write_adapter  # noqa: E402
from lmpool.backends.engine import NextToken  # noqa: E402
from lmpool.backends.mlx import MLXEngine, texts  # noqa: E402
from lmpool.backends.mlx.reduction import to_host  # noqa: E402
from lmpool.backends.mlx.small_answers import reduced  # noqa: E402
from lmpool.wants import Draw, Generate, OfRow, Row, Score, Tokens, Top  # noqa: E402
from lmpool.wants.position_ids import PositionIds  # noqa: E402
from tests.support.models import LONGEST, VOCAB, save_model  # noqa: E402
from tests.support.next_tokens import (  # noqa: E402
    check_generations,
    check_next,
    random_next,
)
from tests.support.small_answers import compare, random_wants  # noqa: E402

pytestmark = [pytest.mark.engine]

Rows = npt.NDArray[np.float32]
SIZES = (7, 300, 5000)


def answers_of(logits: Any, wants: Sequence[Any]) -> tuple[list[Outcome], Rows]:
    """Of each row of logits its own want's answer, and the rows themselves."""
    scales = mx.logsumexp(logits.astype(mx.float32), axis=1)
    asked = []
    for n, want in enumerate(wants):
        other = {"next": want} if isinstance(want, NextToken) else {"want": want}
        asked.append((n, Request(b"%d" % n, np.zeros(1, np.uint32), **other)))
    found = {outcome.id: outcome for outcome in reduced(asked, logits, scales)}
    rows = np.array(logits.astype(mx.float32) - scales[:, None])
    return [found[request.id] for _, request in asked], rows


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [0.5, 4.0, 40.0])
def test_what_mlx_reduces_is_what_a_row_says(size: int, spread: float) -> None:
    random = np.random.default_rng([size, int(spread)])
    for seed in range(6):
        logits = mx.array(random.normal(size=(40, size)) * spread, mx.float32)
        if seed % 3 == 1:
            logits = logits.astype(mx.bfloat16)  # with many that are equal
        if seed % 3 == 2:
            logits[:, 1:] = mx.where(
                mx.array(random.random((40, size - 1)) < 0.4), -mx.inf, logits[:, 1:]
            )
        wants = random_wants(random, size, 40)
        for outcome, row, want in zip(*answers_of(logits, wants), wants, strict=True):
            compare(outcome, row, want)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_make_no_row_fail_alone(bad: float) -> None:
    logits = np.random.default_rng(0).normal(size=(6, 300)).astype(np.float32)
    logits[1, 7] = logits[3, 0] = bad
    logits[4] = -np.inf
    logits[5, 0] = -np.inf  # a row nevertheless
    for want in (Top(3), Tokens(b"\1\0\0\0"), Draw(2, 1), Draw(2, 1, 1.0, False), Draw(1, 1, 0.0)):
        found, _ = answers_of(mx.array(logits), [want] * 6)
        assert ["logsumexp" in str(outcome.error) for outcome in found] == [
            False, True, False, True, True, False,
        ]  # fmt: skip


def test_what_is_left_of_nearly_nothing_is_drawn() -> None:
    logits = np.full((3, 600), -300.0, np.float32)
    logits[:2, 5] = 0.0
    logits[1, 7] = -120.0
    for seed in range(20):
        wants = [Draw(4, seed, 1.0, False)] * 3
        for outcome, row in zip(*answers_of(mx.array(logits), wants), strict=True):
            compare(outcome, row, wants[0], 1e-4)


def test_draws_of_a_large_vocabulary_are_those_of_float64() -> None:
    """But for few that lie within rounding of a boundary; what comes after one was drawn from
    others."""
    random = np.random.default_rng(5)
    logits = mx.array(random.normal(size=(4, 128_256)) * 0.3, mx.float32)
    for replacement in (True, False):
        wants = [Draw(500, seed, 1.0, replacement) for seed in range(4)]
        unlike = 0
        for outcome, row, want in zip(*answers_of(logits, wants), wants, strict=True):
            answer: Any = outcome.answer
            differs = np.flatnonzero(answer.token_ids != want.reduce(row).token_ids)
            unlike += differs.size if replacement else min(1, differs.size)
        assert unlike <= 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_next_tokens_are_drawn_as_they_are_beside_rows(size: int, spread: float) -> None:
    """But where rounding decides."""
    random = np.random.default_rng([size, int(10 * spread)])
    alike = 0
    for seed in range(8):
        logits = mx.array(random.normal(size=(40, size)) * spread, mx.float32)
        if seed % 3 == 1:
            logits = logits.astype(mx.bfloat16)  # with many that are equal
        if seed % 3 == 2:
            logits[:, 1:] = mx.where(
                mx.array(random.random((40, size - 1)) < 0.4), -mx.inf, logits[:, 1:]
            )
        wants = [random_next(random, size) for _ in range(40)]
        for outcome, row, want in zip(*answers_of(logits, wants), wants, strict=True):
            alike += check_next(outcome, row, want)
    assert alike >= 8 * 40 - 4


@pytest.mark.parametrize("temperature", [1.0, 0.25, 7.0, 1e-3])
@pytest.mark.parametrize("spread", [0.5, 4.0, 40.0])
def test_scores_by_mlx_are_those_by_numpy(temperature: float, spread: float) -> None:
    random = np.random.default_rng(int(10 * spread))
    for size in SIZES:
        logits = (random.normal(size=(20, size)) * spread).astype(np.float32)
        logits[5:10] = np.round(logits[5:10])  # with many that are equal
        logits[10:, 1:][random.random((10, size - 1)) < 0.5] = -np.inf
        targets = random.integers(0, size, 20).astype(np.uint32)
        ids = random.integers(0, size, 60).astype("<u4").tobytes()
        for want in (
            Score(1, 0, None, temperature),
            Score(1, min(5, size), PositionIds(3, ids), temperature),
            Score(1, size, None, temperature),
        ):
            found = texts._by_mlx(want, mx.array(logits), targets)
            right = texts._by_numpy(want, mx.array(logits), targets)
            for one, other in zip(found, right, strict=True):
                assert one.dtype == other.dtype
                assert np.allclose(one, other, rtol=1e-6, atol=1e-5 / temperature)


@pytest.fixture
def strayed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is computed of numbers of 64 bits where MLX would use its GPU, from now on."""
    found: list[str] = []
    depth = 0
    stream = mx.stream

    @contextmanager
    def counted(device: Any) -> Iterator[None]:
        nonlocal depth
        assert device == mx.cpu
        depth += 1
        with stream(device):
            yield
        depth -= 1

    def watched(name: str, compute: Any) -> Any:
        def watch(*given: Any, **named: Any) -> Any:
            result = compute(*given, **named)
            arrays = [each for each in (*given, result) if isinstance(each, mx.array)]
            if not depth and any(array.itemsize == 8 for array in arrays):
                found.append(name)
            return result

        return watch

    monkeypatch.setattr(mx, "stream", counted)
    shapes = {"__init__", "__new__", "__getattribute__", "__len__", "__class__", "__hash__"}
    for owner in (mx.array, mx):
        for name in set(dir(owner)) - shapes:
            compute = getattr(owner, name)
            if callable(compute) and not isinstance(compute, type) and name != "stream":
                monkeypatch.setattr(owner, name, watched(name, compute))
    return found


def test_what_has_64_bits_is_computed_on_the_processor(strayed: list[str]) -> None:
    """Apple's GPUs have no float64."""
    random = np.random.default_rng(1)
    logits = mx.array(random.normal(size=(60, 700)), mx.float32)
    logits[55:] = -300.0
    logits[55:, 3] = 0.0
    answers_of(logits, [*random_wants(random, 700, 55), *[Draw(4, 1, 1.0, False)] * 5])
    answers_of(logits, [random_next(random, 700) for _ in range(60)])
    targets = random.integers(0, 700, 60).astype(np.uint32)
    texts._by_mlx(Score(1, 5, PositionIds(1, targets.tobytes()), 0.5), logits, targets)
    assert strayed == []
    assert (mx.array([1 << 40], mx.int64) + 1).item() == (1 << 40) + 1
    assert strayed


def test_wants_of_all_kinds_in_one_batch(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama")
    adapter = write_adapter(tmp_path / "adapter", folder, seed=1)
    random = np.random.default_rng(3)
    for options in ({}, {"cache_bytes": 0}, {"dtype": "bfloat16"}):
        engine = MLXEngine(folder, max_prompt_tokens=LONGEST, **options)
        assert not engine._reduce
        engine._reduce = True
        engine.add_adapter("fr", adapter)
        for _ in range(4):
            prompts = [random.integers(0, VOCAB, n).astype(np.uint32) for n in (3, 9, 9, 14)]
            wants: list[Any] = [*random_wants(random, VOCAB, 40), Row(), Row(), Score(), Score(2)]
            requests = [
                Request(b"%d" % n, prompts[n % 4], (None, "fr")[n // 4 % 2], want)
                for n, want in enumerate(wants)
            ]
            rows = [Request(r.id, r.tokens, r.adapter, Row()) for r in requests]
            found, right = ask(engine, requests), ask(engine, rows)
            for request, one, row in zip(requests, found, right, strict=True):
                if isinstance(request.want, OfRow):
                    compare(one, row.logprobs(), request.want, 2e-5)
                elif isinstance(request.want, Row):
                    assert np.allclose(one.logprobs(), row.logprobs(), atol=1e-5)
                else:
                    assert one.answer is not None
        engine.close()


def test_continuations_are_those_drawn_from_rows(tmp_path: Path) -> None:
    engine = MLXEngine(save_model(tmp_path, "llama", scale=2.0), max_prompt_tokens=LONGEST)
    random = np.random.default_rng(8)
    prompts = [random.integers(0, VOCAB, n).astype(np.uint32) for n in (3, 9, 14)]
    check_generations(engine, prompts, VOCAB)
    engine.close()


def test_rows_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MLXEngine(save_model(tmp_path, "llama"))
    copied: list[int] = []
    for module in ("engine", "small_answers", "texts"):
        name = f"lmpool.backends.mlx.{module}.to_host"
        monkeypatch.setattr(name, lambda array: copied.append(array.nbytes) or to_host(array))
    wants: list[Any] = [
        Top(3), Tokens(b"\1\0\0\0"), Draw(2, 1), Draw(2, 1, 1.0, False), Score(1, 2),
        Generate(3, (), 0.8, 1, logprobs=True, top_logprobs=2),
    ]  # fmt: skip
    requests = [
        Request(b"%d" % n, np.array([n, 1], np.uint32), None, want) for n, want in enumerate(wants)
    ]
    engine._reduce = True
    ask(engine, requests)
    assert copied
    assert max(copied) < 50
    ask(engine, [*requests, Request(b"row", np.array([5], np.uint32))])
    assert sorted(copied)[-2:] == [32, 4 * VOCAB]
    engine.close()
