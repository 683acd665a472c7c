"""Texts scored inside SGLang's forward passes, beside transformers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.sglang_engine import SMALL, WARNINGS, OneAtATime

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from lmpool.backends import Request, tiny  # noqa: E402
from lmpool.backends.contract import Reference, ask, write_adapter  # noqa: E402
from lmpool.wants import Generate, Score, TextScores  # noqa: E402
from tests.support.engines import drawn, requests_of  # noqa: E402
from tests.support.hf_texts import logits_by, reference_model, save_adapter  # noqa: E402
from tests.support.scores import check_scores, random_score, score_all  # noqa: E402

pytestmark = [pytest.mark.engine, *WARNINGS]

VOCAB = 2000
NAN = 13
Ids = npt.NDArray[np.uint32]
WITHIN = 5e-4


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Any]:
    """Models of transformers by adapter, and their folders: SGLang changes how they are loaded."""
    base = Reference.of("tiny").model
    folder = tmp_path_factory.mktemp("adapters")
    plain = write_adapter(folder / "plain", seed=1)
    head = save_adapter(
        tiny.path(), folder / "head", target_modules=["lm_head", "q_proj"],
        save_embedding_layers=True,
    )  # fmt: skip
    paths = {"plain": plain, "head": head}
    return {None: (base, ""), **{n: (reference_model(tiny.path(), f), f) for n, f in paths.items()}}


@pytest.fixture(scope="module")
def engines(right: object) -> Iterator[OneAtATime]:
    made = OneAtATime()
    yield made
    made.close()


def texts_of(seed: int, count: int, longest: int, shared: int = 0) -> list[Ids]:
    rng = np.random.default_rng(seed)
    start = rng.integers(20, VOCAB, shared)
    sizes = rng.integers(2, longest + 1, count)
    return [np.append(start, rng.integers(20, VOCAB, n)).astype(np.uint32) for n in sizes]


def check(right: dict[str | None, Any], request: Request, outcome: Any) -> None:
    logits = logits_by(right[request.adapter][0], request.tokens)
    check_scores(outcome, request, logits, WITHIN)


def ask_all(
    engine: Any,
    right: dict[str | None, Any],
    texts: Sequence[Ids],
    wants: Sequence[Score] | None = None,
    adapter: str | None = None,
) -> None:
    logits_of = functools.partial(logits_by, right[adapter][0])
    score_all(engine, texts, wants, logits_of, adapter, WITHIN)


def computed(engine: Any) -> list[int]:
    """The tokens of each batch from now on."""
    counts: list[int] = []
    scheduler = engine._open()._scheduler
    run = scheduler.run_batch

    def counted(batch: Any, *given: Any, **named: Any) -> Any:
        counts.append(sum(request.extend_len for request in batch.reqs))
        return run(batch, *given, **named)

    scheduler.run_batch = counted
    return counts


def test_a_text_is_one_pass_and_a_context_is_computed_once(
    engines: OneAtATime, right: dict[str | None, Any]
) -> None:
    engine = engines.make()
    counts = computed(engine)
    (text,) = texts_of(1, 1, 2, shared=150)
    ask_all(engine, right, [text], [Score(1, 3)])
    assert sum(counts) == text.size - 1
    context = texts_of(2, 1, 2, shared=200)[0]
    engine.cache_prefix(context)
    counts.clear()
    choices = [np.append(context, more).astype(np.uint32) for more in texts_of(3, 8, 6)]
    ask_all(engine, right, choices, [Score(start=context.size)] * 8)
    assert sum(counts) <= 8 * 6
    for start in (1, 40, 200, context.size - 1):
        ask_all(engine, right, [context], [Score(start, 2)])


def test_in_chunks_beside_rows_and_continuations(
    engines: OneAtATime, right: dict[str | None, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines.make(**SMALL)
    monkeypatch.setattr(engine._open()._scorer, "block_rows", 7)
    texts = texts_of(4, 12, 150) + texts_of(5, 8, 9, shared=100)
    rng = np.random.default_rng(6)
    scored = [
        Request(b"s%d" % n, text, want=random_score(rng, text.size, VOCAB).checked(engine.info))
        for n, text in enumerate(texts)
    ]
    sampled = Generate(max_tokens=5, eos_token_ids=(), temperature=0.8, seed=1)
    requests = [*scored, *requests_of(texts), *requests_of(texts[:3], 100, want=sampled)]
    outcomes = {outcome.id: outcome for outcome in ask(engine, requests)}
    for request in scored:
        check(right, request, outcomes[request.id])
    rows = np.stack([outcomes[b"%d" % n].logprobs() for n in range(len(texts))])
    assert np.abs(rows - Reference.of("tiny").rows(texts)).max() < 1e-4
    assert all(len(drawn(outcomes[b"%d" % n])) == 5 for n in range(100, 103))
    engine.submit(requests_of(texts, want=Score()))
    engine.step()
    engine.cancel([b"%d" % n for n in range(len(texts))])
    engine.clear_cache()
    ask_all(engine, right, texts[:2])
    assert len(engine._open()._scorer) == 0


def test_the_longest_text_is_one_token_longer_than_the_longest_prompt(
    engines: OneAtATime, right: dict[str | None, Any]
) -> None:
    engine = engines.make(max_prompt_tokens=60)
    (text,) = texts_of(7, 1, 2, shared=60)
    ask_all(engine, right, [text[:61], text[:2]])
    (wrong,) = ask(engine, [Request(b"b", text[:62], want=Score())])
    assert "1 to 61 expected" in str(wrong.error)


def test_texts_that_are_not_numbers_spoil_no_others(
    engines: OneAtATime, right: dict[str | None, Any]
) -> None:
    engine = engines.make()
    engine._open()._runner.model.model.embed_tokens.register_forward_hook(
        lambda _, inputs, states: states.masked_fill((inputs[0] == NAN)[:, None], float("nan"))
    )
    good = texts_of(8, 4, 40)
    bad = [np.append(text, [NAN, 30, 31]).astype(np.uint32) for text in good]
    for _ in range(2):
        outcomes = ask(engine, requests_of([*bad, *good], want=Score(1, 2)))
        assert all("logsumexp nan" in str(outcome.error) for outcome in outcomes[:4])
        for text, outcome in zip(good, outcomes[4:], strict=True):
            check(right, Request(b"", text, want=Score(1, 2)), outcome)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_and_those_of_the_head(engines: OneAtATime, right: dict[str | None, Any]) -> None:
    texts = texts_of(9, 5, 40)
    engine = engines.make(max_loras=2, max_lora_rank=16)
    engine.add_adapter("plain", right["plain"][1])
    requests = [
        Request(b"%d" % n, text, [None, "plain"][n % 2], Score(1, 2))
        for n, text in enumerate(texts)
    ]
    for request, outcome in zip(requests, ask(engine, requests), strict=True):
        assert isinstance(outcome.answer, TextScores)
        check(right, request, outcome)
    engine = engines.make(max_loras=2, max_lora_rank=16, lora_targets=["q_proj", "lm_head"])
    engine.add_adapter("head", right["head"][1])
    assert not engine.scores(None)
    for name in ("head", None):
        ask_all(engine, right, texts, [Score(1, 2)] * 5, name)
