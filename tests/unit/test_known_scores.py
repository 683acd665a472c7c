"""Scores of texts that were scored a moment ago, against a model that keeps everything."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lmpool.backends.vllm.known_scores import CHUNK, KnownScores, ScoredText
from lmpool.wants import Score, TextScores, TopLogprobs

WANTS = [Score(1, 2), Score(20, 2), Score(1), Score(1, 0, b"\x05\0\0\0"), Score(1, 2, None, 0.5)]


def right(tokens: Any, want: Score) -> TextScores:
    """Scores that say of each position what stands before it, and by which want."""
    kind = WANTS.index(Score(1, want.top_logprobs, want.token_ids, want.temperature))
    before = [hash(tuple(tokens[:at].tolist())) % 1000 for at in range(want.start, tokens.size)]
    numbers = np.array(before, np.float32) + 1000 * kind
    own = numbers + tokens[want.start :] / 1e3
    top = None
    if want.top_logprobs:
        ids = np.stack([numbers, numbers + 1], 1).astype(np.int32)
        top = TopLogprobs(ids, ids.astype(np.float32), numbers.astype(np.float32))
    listed = None if want.token_ids is None else numbers[:, None]
    return TextScores(own.astype(np.float32), own.astype(np.int32), top, listed)


def same(one: TextScores, other: TextScores) -> bool:
    pairs = zip(one.arrays(), other.arrays(), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


PARTS = [np.arange(n, dtype=np.uint32) + 7 * n for n in (5, CHUNK, 20, 3 * CHUNK)]
TEXTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map(np.concatenate)
STEPS = st.tuples(TEXTS, st.integers(0, 4), st.sampled_from([None, "a"]), st.booleans())


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=30), st.sampled_from([1500, 1 << 20]), st.data())
def test_what_is_known_is_right(steps: list[Any], most_bytes: int, data: st.DataObject) -> None:
    known = KnownScores(most_bytes)
    pending: list[tuple[ScoredText, Any, Score]] = []
    for tokens, number, adapter, sound in steps:
        want = WANTS[number]
        if tokens.size <= want.start:
            continue
        found = known.beginning(adapter, tokens, want)
        if found is not None:
            assert want.start + CHUNK <= found.parts_at < tokens.size
            both = found.parts_at
            assert np.array_equal(found.text.tokens[:both], tokens[:both])
            if found.text.scores is not None:
                rest = found.rest(want)
                assert rest.start == both
                whole = found.with_rest(want, right(tokens, rest))
                assert same(whole, right(tokens, want))
        pending.append((known.begin(adapter, tokens, want), tokens, want))
        while pending and data.draw(st.booleans()):
            text, its, asked = pending.pop(data.draw(st.integers(0, len(pending) - 1)))
            known.end(text, right(its, asked) if sound else None)
        assert known._bytes == sum(text.nbytes for text in known._kept.values()) <= most_bytes
    for text, _, _ in pending:
        known.end(text, None)
    known.clear()
    assert not len(known)
    assert not known._found_by


def test_a_text_is_found_by_the_longest_beginning_and_for_its_own_want_alone() -> None:
    known, want = KnownScores(), Score(1, 2)
    short, long = np.arange(40, dtype=np.uint32), np.arange(100, dtype=np.uint32)
    for tokens in (short, long):
        known.end(known.begin(None, tokens, want), right(tokens, want))
    text = np.append(np.arange(80), [5, 6]).astype(np.uint32)
    found = known.beginning(None, text, want)
    assert found is not None
    assert found.parts_at == 80
    assert known.beginning("adapter", text, want) is None
    assert known.beginning(None, text, Score(1, 3)) is None
    assert known.beginning(None, text, Score(70, 2)) is None  # few positions are left
    later = known.beginning(None, long, Score(50, 2))
    assert later is not None
    assert later.parts_at == 99
    assert later.rest(Score(50, 2)).start == 99
