"""When logits of one forward pass are those of another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from lmpool.backends.hf import HFEngine  # noqa: E402
from lmpool.backends.hf.forward import Forward  # noqa: E402

INFINITE = float("inf")


@pytest.fixture
def forward() -> Iterator[Forward]:
    engine = HFEngine("tiny")
    yield engine._open()
    engine.close()


def test_entries_are_compared_where_the_plain_ones_are_finite(forward: Forward) -> None:
    plain = torch.tensor([[1.0, -INFINITE, 2.0], [float("nan"), 0.5, INFINITE]])
    other = plain.clone()
    other[0, 1], other[1, 0] = 7.0, 7.0
    assert forward.difference(other, plain) is None
    other[1, 1] = 0.75
    assert forward.difference(other, plain) == 0.25
    other[1, 1] = float("nan")
    assert forward.difference(other, plain) == INFINITE
    assert forward.difference(other, torch.full_like(plain, -INFINITE)) is None


def test_the_logits_compared_stay_as_they_are(forward: Forward) -> None:
    plain, other = torch.tensor([[-1.0, 2.0]]), torch.tensor([[-1.0, 1.0]])
    assert forward.difference(other, plain) == 1.0
    assert (plain.tolist(), other.tolist()) == ([[-1.0, 2.0]], [[-1.0, 1.0]])
