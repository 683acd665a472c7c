"""What the SGLang engine reduces where the logits are, beside what it says of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.sglang_engine import SMALL, WARNINGS

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from lmpool.backends import Request  # noqa: E402
from lmpool.backends.contract import ask, write_adapter  # noqa: E402
from lmpool.backends.sglang import SGLangEngine  # noqa: E402
from lmpool.wants import Draw, Generate, Generation, OfRow, Row, Tokens, Top  # noqa: E402
from tests.support.next_tokens import check_generations  # noqa: E402
from tests.support.small_answers import judge, random_wants  # noqa: E402

pytestmark = [pytest.mark.engine, *WARNINGS]

VOCAB = 2000
NAN = 13


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """One that reduces where the logits are, as on a GPU."""
    engine = SGLangEngine("tiny", max_loras=2, **SMALL)
    assert not engine._reduce
    engine._reduce = True
    engine.add_adapter("fr", write_adapter(tmp_path_factory.mktemp("adapter") / "a", seed=1))
    yield engine
    engine.close()


def texts_of(seed: int, count: int) -> list[Any]:
    random = np.random.default_rng(seed)
    start = random.integers(20, VOCAB, 30)
    sizes = random.integers(1, 150, count)
    return [np.append(start, random.integers(20, VOCAB, n)).astype(np.uint32) for n in sizes]


def test_wants_of_all_kinds_in_one_batch(engine: SGLangEngine) -> None:
    """Beside rows and continuations, in pieces, by an adapter and without."""
    random = np.random.default_rng(3)
    for seed in range(3):
        prompts = texts_of(seed, 8)
        drawn = random_wants(random, VOCAB, 60)
        usual = [w for w in drawn if not isinstance(w, Draw) or w.temperature in (0, 0.5, 1, 3)]
        wants: list[Any] = [*usual, Row(), Row(), Generate(4, (), 1.0, 1)]
        requests = [
            Request(b"%d" % n, prompts[n % 8], (None, "fr")[n // 8 % 2], want)
            for n, want in enumerate(wants)
        ]
        rows = ask(engine, [replace(request, want=Row()) for request in requests])
        for request, found, row in zip(requests, ask(engine, requests), rows, strict=True):
            if isinstance(request.want, OfRow):
                judge(found, request, row.logprobs())
            elif isinstance(request.want, Row):
                assert np.allclose(found.logprobs(), row.logprobs(), atol=1e-4)
            else:
                assert isinstance(found.answer, Generation)
        assert not engine._open()._wants


def test_continuations_are_those_drawn_from_rows(engine: SGLangEngine) -> None:
    prompts = texts_of(9, 6)
    check_generations(engine, prompts, VOCAB)


def test_rows_stay_where_they_are(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    for copies in (engine._copies, engine._open()._copies):
        start = copies.start
        monkeypatch.setattr(
            copies,
            "start",
            lambda *tensors, start=start: (
                copied.extend(tensor[0].nbytes for tensor in tensors) or start(*tensors)
            ),
        )

    def no_rows(*_: object) -> Any:
        raise AssertionError("rows are copied")

    monkeypatch.setattr("lmpool.backends.sglang.engine.draw_by_rows", no_rows)
    wants: list[Any] = [
        Top(3), Tokens(b"\1\0\0\0"), Draw(2, 1), Draw(2, 1, 1.0, False),
        Generate(3, (), 0.8, 1, logprobs=True, top_logprobs=2),
    ]  # fmt: skip
    requests = [
        Request(b"%d" % n, np.array([n + 30, 40], np.uint32), None, want)
        for n, want in enumerate(wants)
    ]
    outcomes = ask(engine, requests)
    assert all(outcome.row is None and outcome.error is None for outcome in outcomes)
    assert len(copied) == 2 * (4 + 3)
    assert max(copied) < 50


def test_what_is_cancelled_is_forgotten(engine: SGLangEngine) -> None:
    requests = [
        Request(b"%d" % n, prompt, None, want)
        for n, (prompt, want) in enumerate(
            zip(texts_of(5, 20), [Top(3), Generate(9, (), 1.0, 1)] * 10, strict=True)
        )
    ]
    engine.submit(requests)
    engine.step()
    assert engine._open()._wants
    engine.cancel([request.id for request in requests])
    engine.clear_cache()
    assert not engine._open()._wants
    (outcome,) = ask(engine, [Request(b"b", requests[0].tokens, None, Top(2))])
    assert outcome.error is None


def test_a_row_that_is_not_a_number_fails_alone(engine: SGLangEngine) -> None:
    hook = engine._open()._runner.model.model.embed_tokens.register_forward_hook(
        lambda _, inputs, states: states.masked_fill((inputs[0] == NAN)[:, None], float("nan"))
    )
    wants: list[Any] = [Top(3), Draw(2, 1), Generate(3, (), 1.0, 1), Tokens(b"\1\0\0\0")]
    requests = [
        Request(b"%d %d" % (n, bad), np.array([n + 30, bad, 50], np.uint32), None, want)
        for n, want in enumerate(wants)
        for bad in (40, NAN)
    ]
    for _ in range(2):
        for request, outcome in zip(requests, ask(engine, requests), strict=True):
            assert ("logsumexp nan" in str(outcome.error)) == (NAN in request.tokens)
            assert (outcome.answer is None) == (NAN in request.tokens)
    hook.remove()
    engine.clear_cache()
