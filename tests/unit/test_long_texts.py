"""Windows over texts that are longer than a model takes."""

from __future__ import annotations

import pytest

from lmpool.long_texts import windows

SIZES = [(2, 5, 2), (5, 5, 1), (50, 7, 3), (9, 2, 1)]


@pytest.mark.parametrize(("length", "window", "stride"), SIZES)
def test_windows_score_each_token_once_behind_as_many_as_they_can(
    length: int, window: int, stride: int
) -> None:
    scored: list[int] = []
    for part, start in windows(range(length), window, stride):
        assert len(part) <= window
        assert start >= min(part[start], window - stride)
        scored += part[start:]
    assert scored == list(range(1, length))
