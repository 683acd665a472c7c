"""The text of a continuation as ``lmpool generate`` tells it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmpool import Piece
from lmpool.cli.generate import Told

TOKENS = [*(bytes([i]) for i in range(256)), "né".encode(), b"ab", b""]
STOPS = st.lists(st.text("abné", min_size=1, max_size=4), max_size=3)


@given(
    text=st.text("abné€", max_size=30),
    cuts=st.lists(st.integers(1, 5)),
    stops=STOPS,
    ending=st.sampled_from(((), (258,))),
)
def test_parts_are_the_text_before_the_stop_that_ends_first(
    text: str, cuts: list[int], stops: list[str], ending: tuple[int, ...]
) -> None:
    ids = [*text.encode(), *ending]
    pieces, start = [], 0
    for size in cuts:
        if start + size >= len(ids):
            break
        pieces.append(Piece(start, np.array(ids[start : start + size], np.int32)))
        start += size
    last = np.array(ids[start:], np.int32)
    reason = "eos" if ending else "length"
    pieces.append(Piece(start, last, finish_reason=reason, ending=len(ending)))

    told = Told(TOKENS, stops)
    parts = list(told.parts(iter(pieces)))
    places = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(places)[1]] if places else text
    assert "".join(parts) == told.text == expected
    assert told.finish_reason == ("stop" if places else reason)
    if not places:
        assert told.token_ids == ids


def test_a_part_is_told_as_soon_as_it_can_begin_no_stop() -> None:
    told = Told(TOKENS, ["ab!"])
    pieces = [Piece(n, np.array([ord(c)], np.int32)) for n, c in enumerate("xabc")]
    assert list(told.parts(iter(pieces))) == ["x", "abc"]
