"""What the Hugging Face engine reduces on a device, beside the reduction that all engines share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.backends import Outcome, Request
from lmpool.backends.contract import ask
from lmpool.backends.engine import NextToken
from lmpool.wants import Draw, OfRow, Row, Score, Tokens, Top

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from lmpool.backends.hf import HFEngine  # noqa: E402
from lmpool.backends.small_answers import reduce_logits  # noqa: E402
from lmpool.backends.words import alike, outcome_of, word_count  # noqa: E402
from tests.support.hf_texts import save_adapter  # noqa: E402
from tests.support.models import LONGEST, VOCAB, save_model  # noqa: E402
from tests.support.next_tokens import check_generations, check_next, random_next  # noqa: E402
from tests.support.small_answers import compare, random_wants  # noqa: E402

Wants = Sequence[OfRow[Any] | NextToken]

SIZES = (7, 300, 5000)


def request_of(name: bytes, want: OfRow[Any] | NextToken) -> Request:
    if isinstance(want, NextToken):
        return Request(name, np.zeros(1, np.uint32), next=want)
    return Request(name, np.zeros(1, np.uint32), None, want)


def reduced(logits: Any, wants: Wants) -> list[Outcome]:
    """By the device's reduction, which is given those that are alike together."""
    found: list[Outcome | None] = [None] * len(wants)
    kinds = {alike(want) for want in wants}
    for kind in kinds:
        same = [n for n, want in enumerate(wants) if alike(want) == kind]
        words, scales = reduce_logits(logits, torch.tensor(same), [wants[n] for n in same])
        for n, answer, scale in zip(same, words.numpy(), scales.tolist(), strict=True):
            assert answer.size == word_count(wants[n])
            request = request_of(b"%d" % n, wants[n])
            found[n] = outcome_of(request, answer, scale)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [0.5, 4.0, 40.0])
def test_what_a_device_reduces_is_what_all_engines_share(size: int, spread: float) -> None:
    random = np.random.default_rng([size, int(spread)])
    for seed in range(6):
        torch.manual_seed(seed)
        logits = torch.randn(40, size) * spread
        if seed % 3 == 1:
            logits = logits.bfloat16()  # with many that are equal
        if seed % 3 == 2:
            logits[:, 1:][torch.rand(40, size - 1) < 0.4] = -torch.inf
        wants = random_wants(random, size, 40)
        rows = torch.log_softmax(logits.float(), 1).numpy()
        for found, row, want in zip(reduced(logits, wants), rows, wants, strict=True):
            compare(found, row, want)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_make_no_row_fail_alone(bad: float) -> None:
    logits = torch.randn(6, 300)
    logits[1, 7] = logits[3, 0] = bad
    logits[4] = -torch.inf
    logits[5, 0] = -torch.inf  # a row nevertheless
    for want in (Top(3), Tokens(b"\1\0\0\0"), Draw(2, 1), Draw(2, 1, 1.0, False), Draw(1, 1, 0.0)):
        found = reduced(logits, [want] * 6)
        assert ["logsumexp" in str(outcome.error) for outcome in found] == [
            False, True, False, True, True, False,
        ]  # fmt: skip


def test_what_is_left_of_nearly_nothing_is_drawn() -> None:
    logits = torch.full((2, 600), -300.0)
    logits[:, 5] = 0.0
    logits[1, 7] = -120.0
    for seed in range(20):
        wants = [Draw(4, seed, 1.0, False)] * 2
        rows = torch.log_softmax(logits, 1).numpy()
        for found, row in zip(reduced(logits, wants), rows, strict=True):
            compare(found, row, wants[0], 1e-4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_next_tokens_are_drawn_as_they_are_beside_rows(size: int, spread: float) -> None:
    """But where rounding decides."""
    random = np.random.default_rng([size, int(10 * spread)])
    alike = 0
    for seed in range(8):
        torch.manual_seed(seed)
        logits = torch.randn(40, size) * spread
        if seed % 3 == 1:
            logits = logits.bfloat16()  # with many that are equal
        if seed % 3 == 2:
            logits[:, 1:][torch.rand(40, size - 1) < 0.4] = -torch.inf
        wants = [random_next(random, size) for _ in range(40)]
        rows = torch.log_softmax(logits.float(), 1).numpy()
        for found, row, want in zip(reduced(logits, wants), rows, wants, strict=True):
            alike += check_next(found, row, want)
    assert alike >= 8 * 40 - 2


def engines(folder: str, **options: Any) -> tuple[HFEngine, HFEngine]:
    """One that reduces where the logits are, and one that gives rows."""
    both = HFEngine(folder, threads=1, **options), HFEngine(folder, threads=1, **options)
    both[0]._reduce, both[1]._reduce = True, False
    return both


@pytest.mark.parametrize("options", [{}, {"kv_cache_bytes": 0}, {"dtype": "bfloat16"}])
def test_wants_of_all_kinds_in_one_batch(options: dict[str, Any], tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama")
    device, host = engines(folder, max_prompt_tokens=LONGEST, **options)
    adapter = save_adapter(folder, tmp_path / "adapter")
    random = np.random.default_rng(3)
    for engine in (device, host):
        engine.add_adapter("fr", adapter)
    for _ in range(4):
        prompts = [random.integers(0, VOCAB, n).astype(np.uint32) for n in (3, 9, 9, 14)]
        wants: list[Any] = [*random_wants(random, VOCAB, 40), Row(), Row(), Score(), Score(2)]
        requests = [
            Request(b"%d" % n, prompts[n % 4], (None, "fr")[n // 4 % 2], want)
            for n, want in enumerate(wants)
        ]
        rows = [Request(r.id, r.tokens, r.adapter, Row()) for r in requests]
        found, right = ask(device, requests), ask(host, rows)
        for request, one, row in zip(requests, found, right, strict=True):
            if isinstance(request.want, OfRow):
                compare(one, row.logprobs(), request.want, 2e-5)
            elif isinstance(request.want, Row):
                assert np.allclose(one.logprobs(), row.logprobs(), atol=1e-5)
            else:
                assert one.answer is not None
    for engine in (device, host):
        engine.close()


def test_continuations_are_those_drawn_from_rows(tmp_path: Path) -> None:
    engine = HFEngine(save_model(tmp_path, "llama"), threads=1, max_prompt_tokens=LONGEST)
    random = np.random.default_rng(8)
    prompts = [random.integers(0, VOCAB, n).astype(np.uint32) for n in (3, 9, 14)]
    check_generations(engine, prompts, VOCAB)
    engine.close()


def test_rows_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, host = engines(save_model(tmp_path, "llama"))
    copied: list[int] = []
    start = device._copies.start
    for engine in (device, host):
        monkeypatch.setattr(
            engine._copies,
            "start",
            lambda *tensors: copied.extend(t[0].nbytes for t in tensors) or start(*tensors),
        )
    wants = [Top(3), Tokens(b"\1\0\0\0"), Draw(2, 1), Draw(2, 1, 1.0, False)]
    requests = [
        Request(b"%d" % n, np.array([n, 1], np.uint32), None, want) for n, want in enumerate(wants)
    ]
    ask(device, requests)
    assert copied
    assert max(copied) < 50
    ask(host, requests)
    assert max(copied) >= 4 * VOCAB
    for engine in (device, host):
        engine.close()
