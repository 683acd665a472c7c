"""Texts scored by the MLX engine in one pass, beside transformers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmpool.backends import Request
from lmpool.wants import Score, TextScores

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from lmpool.backends.contract import ask, write_adapter  # noqa: E402
from lmpool.backends.mlx import MLXEngine, texts  # noqa: E402
from lmpool.backends.mlx.model import Forward  # noqa: E402
from tests.support.engines import requests_of  # noqa: E402
from tests.support.hf_texts import right_logits  # noqa: E402
from tests.support.models import LONGEST, VOCAB, save_model, without_prefix  # noqa: E402
from tests.support.scores import random_score, score_all  # noqa: E402

pytestmark = [pytest.mark.engine]

Ids = npt.NDArray[np.uint32]
WITHIN = 5e-4


def save(folder: Path, name: str) -> str:
    more = {"n_ctx": LONGEST} if name == "gpt2" else {}
    saved = save_model(folder, name, hidden=64, scale=2.0, **more)
    return without_prefix(saved, "transformer.") if name == "gpt2" else saved


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), "llama")


def texts_of(rng: np.random.Generator, count: int, longest: int = LONGEST + 1) -> list[Ids]:
    """Texts of which many begin alike."""
    found: list[Ids] = []
    for _ in range(count):
        new = rng.integers(0, VOCAB, int(rng.integers(2, longest + 1))).astype(np.uint32)
        if found and rng.random() < 0.7:
            other = found[int(rng.integers(len(found)))]
            new = np.concatenate([other[: int(rng.integers(1, other.size + 1))], new])[:longest]
        found.append(new)
    return found


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions that forward passes take in, padding among them."""
    sizes: list[int] = []
    run = Forward._run

    def counted(self: Any, prompts: Sequence[Ids], *given: Any) -> Any:
        sizes.append(len(prompts) * max(prompt.size for prompt in prompts))
        return run(self, prompts, *given)

    monkeypatch.setattr(Forward, "_run", counted)
    return sizes


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mamba"])
def test_every_kind_of_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "BLOCK_BYTES", 7 * 4 * VOCAB)
    folder = save(tmp_path, name)
    engine = MLXEngine(folder, max_prompt_tokens=LONGEST, forward_tokens=40)
    assert engine.score_tokens == 40
    rng, right = np.random.default_rng(1), right_logits(folder)
    for _ in range(3):
        given = texts_of(rng, 8)
        score_all(
            engine,
            given,
            [random_score(rng, t.size, VOCAB) for t in given],
            right,
            tolerance=WITHIN,
        )
    score_all(engine, given, [Score(start=t.size - 1) for t in given], right, tolerance=WITHIN)
    engine.close()


def test_a_text_is_one_pass_and_what_texts_share_is_computed_once(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MLXEngine(llama, max_prompt_tokens=LONGEST)
    sizes = watched(monkeypatch)
    rng, right = np.random.default_rng(2), right_logits(llama)
    text = rng.integers(0, VOCAB, 80).astype(np.uint32)
    score_all(engine, [text], [Score()], right, tolerance=WITHIN)
    assert sorted(sizes)[-1] == 79
    assert sum(sizes) <= 79 + 2  # the head runs after a token that nobody computes
    sizes.clear()
    context = rng.integers(0, VOCAB, 60).astype(np.uint32)
    choices = [np.append(context, rng.integers(0, VOCAB, 6)).astype(np.uint32) for _ in range(8)]
    for most in (60 + 8 * 6, 8 * 6):
        score_all(engine, choices, [Score(start=60)] * 8, right, tolerance=WITHIN)
        assert sum(sizes) <= most + 8  # a head for each
        sizes.clear()
    engine.close()


def test_long_texts_run_in_pieces_and_others_get_in_between(llama: str) -> None:
    engine = MLXEngine(llama, max_prompt_tokens=LONGEST)
    engine.score_tokens = 10
    rng = np.random.default_rng(3)
    long = Request(b"long", rng.integers(0, VOCAB, 90).astype(np.uint32), want=Score())
    engine.submit([long])
    assert engine.step() == []
    engine.submit(requests_of([[1, 2]]))
    assert [outcome.id for outcome in engine.step()] == [b"0"]
    while engine.in_flight():
        found = engine.step()
    (scored,) = found
    assert isinstance(scored.answer, TextScores)
    score_all(engine, [long.tokens], [Score(40, 2)], right_logits(llama), tolerance=WITHIN)
    engine.close()


def test_texts_that_are_kept_nowhere(llama: str) -> None:
    engine = MLXEngine(llama, max_prompt_tokens=LONGEST, cache_bytes=0)
    rng = np.random.default_rng(4)
    given = texts_of(rng, 8)
    wants = [random_score(rng, text.size, VOCAB) for text in given]
    score_all(engine, given, wants, right_logits(llama), tolerance=WITHIN)
    engine.close()


def test_adapters(llama: str, tmp_path: Path) -> None:
    engine = MLXEngine(llama, max_prompt_tokens=LONGEST)
    folder = write_adapter(tmp_path / "a", llama, seed=1)
    engine.add_adapter("a", folder)
    rng = np.random.default_rng(5)
    given = texts_of(rng, 6)
    for adapter, right in (("a", right_logits(llama, folder)), (None, right_logits(llama))):
        score_all(engine, given, [Score(1, 3)] * 6, right, adapter, WITHIN)
    engine.close()


def test_a_text_that_is_not_a_number_spoils_no_other(llama: str) -> None:
    engine = MLXEngine(llama, max_prompt_tokens=LONGEST)
    forward = engine._open()
    embedding = forward.model.model.embed_tokens
    embedding.weight[3] = float("nan")
    rng = np.random.default_rng(6)
    good = [rng.integers(4, VOCAB, 30).astype(np.uint32) for _ in range(4)]
    bad = [np.concatenate([text[:10], [3], text[10:]]).astype(np.uint32) for text in good]
    for _ in range(2):
        outcomes = ask(engine, requests_of([*good, *bad], want=Score()))
        for outcome in outcomes[:4]:
            assert isinstance(outcome.answer, TextScores)
            assert np.isfinite(outcome.answer.logprobs).all()
        assert all("NaN" in str(outcome.error) for outcome in outcomes[4:])
    engine.close()


def test_a_model_whose_head_is_not_found_gives_rows(
    llama: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def states_plainly(*_: Any) -> Any:
        raise ValueError("the model applies 0 heads")

    monkeypatch.setattr(Forward, "states_plainly", states_plainly)
    with caplog.at_level(logging.WARNING, logger="lmpool"):
        engine = MLXEngine(llama, max_prompt_tokens=LONGEST)
    assert "the model applies 0 heads" in caplog.text
    assert engine.score_tokens == 0
    given = texts_of(np.random.default_rng(7), 3, 20)
    score_all(engine, given, [Score(1, 2)] * 3, right_logits(llama), tolerance=WITHIN)
    engine.close()
