"""Scores of texts by the Hugging Face engine, against one plain forward pass of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmpool.backends import Outcome, Request
from lmpool.backends.contract import ask
from lmpool.wants import PositionIds, Row, Score, TextScores
from tests.support.engines import drawn, requests_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from lmpool.backends.hf import HFEngine  # noqa: E402
from tests.support.hf_texts import reference_model, save_adapter  # noqa: E402
from tests.support.models import LONGEST, SERVED, UNFIT, VOCAB, save_model  # noqa: E402
from tests.support.scores import check_scores, random_score  # noqa: E402

Ids = npt.NDArray[np.uint32]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def engine(llama: str) -> HFEngine:
    return HFEngine(llama, max_prompt_tokens=LONGEST)


class Reference:
    """The right rows of a text, by a plain forward pass, in float64."""

    def __init__(self, folder: str, adapter: str | None = None, dtype: str = "float32") -> None:
        self._model = reference_model(folder, adapter, dtype)

    def logits(self, text: Ids) -> npt.NDArray[np.float64]:
        """After each token but the last, [len - 1, vocab]."""
        with torch.inference_mode():
            logits = self._model(torch.from_numpy(text[:-1].astype(np.int64))[None]).logits[0]
        found: npt.NDArray[np.float64] = logits.double().numpy()
        return found


def texts_of(rng: np.random.Generator, count: int, longest: int = LONGEST + 1) -> list[Ids]:
    """Texts of which many begin alike, are contained in others, or occur twice."""
    found: list[Ids] = []
    for _ in range(count):
        new = rng.integers(0, VOCAB, int(rng.integers(2, longest + 1))).astype(np.uint32)
        if found and rng.random() < 0.7:
            other = found[int(rng.integers(len(found)))]
            new = np.concatenate([other[: int(rng.integers(1, other.size + 1))], new])[:longest]
        found.append(new[: int(rng.integers(2, new.size + 1))] if rng.random() < 0.2 else new)
    return found


def score_all(
    engine: HFEngine,
    texts: Sequence[Ids],
    wants: Sequence[Score],
    reference: Reference,
    adapter: str | None = None,
    tolerance: float = 1e-4,
) -> None:
    info = replace_info(engine)
    requests = [
        Request(b"%d" % n, text, adapter, want.checked(info))
        for n, (text, want) in enumerate(zip(texts, wants, strict=True))
    ]
    outcomes = ask(engine, requests)
    for request, outcome in zip(requests, outcomes, strict=True):
        check_scores(outcome, request, reference.logits(request.tokens), tolerance)


def replace_info(engine: HFEngine) -> Any:
    """What a client knows of the engine's model."""
    return engine.info


@pytest.mark.parametrize("forward_tokens", [24, 1024])
def test_scores_of_texts_with_much_in_common(llama: str, forward_tokens: int) -> None:
    engine = HFEngine(llama, max_prompt_tokens=LONGEST, forward_tokens=forward_tokens)
    assert engine._packed is not None
    engine._packed.head_rows = 7
    reference, rng = Reference(llama), np.random.default_rng(1)
    for turn in range(12):
        if turn % 4 == 3:
            engine.clear_cache()
        texts = texts_of(rng, 12)
        score_all(engine, texts, [random_score(rng, t.size, VOCAB) for t in texts], reference)
        engine._packed.check()
        statistics = engine.statistics()
        assert statistics is not None
        assert statistics.pinned == 0


@pytest.mark.parametrize("name", SERVED + UNFIT)
def test_every_kind_of_model(name: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, name)
    engine = HFEngine(folder, max_prompt_tokens=min(LONGEST, 40))
    engine._head_rows = 5
    if engine._packed is not None:
        engine._packed.head_rows = 5
    reference, rng = Reference(folder), np.random.default_rng(2)
    texts = texts_of(rng, 8, 41)
    wants = [random_score(rng, t.size, VOCAB) for t in texts]
    score_all(engine, texts, wants, reference)
    assert engine._open().head is not None


def test_the_longest_text_is_one_token_longer_than_the_longest_prompt(engine: HFEngine) -> None:
    rng = np.random.default_rng(3)
    text = rng.integers(0, VOCAB, LONGEST + 2).astype(np.uint32)
    right, wrong = ask(
        engine,
        [Request(b"a", text[:-1], want=Score()), Request(b"b", text, want=Score())],
    )
    assert isinstance(right.answer, TextScores)
    assert right.answer.logprobs.size == LONGEST
    assert f"1 to {LONGEST + 1} expected" in str(wrong.error)
