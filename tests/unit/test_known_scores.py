"""Scores of texts that were scored a moment ago, against a model that keeps everything."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lmpool.backends.vllm.known_scores import CHUNK, MOST_OF_ONE, KnownScores, ScoredText
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
        begun = known.begin(adapter, tokens, want)
        if begun is None:
            assert right(tokens, want).nbytes > most_bytes // MOST_OF_ONE
            continue
        pending.append((begun, tokens, want))
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
        begun = known.begin(None, tokens, want)
        assert begun is not None
        known.end(begun, right(tokens, want))
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


def test_a_text_waits_where_that_saves_half_of_it_and_takes_no_long_time() -> None:
    known, want = KnownScores(), Score(1, 2)
    begun = np.arange(100, dtype=np.uint32)
    assert known.begin(None, begun, want) is not None

    def waits(like: int, more: int) -> bool:
        text = np.append(begun[:like], np.full(more, 7)).astype(np.uint32)
        found = known.beginning(None, text, want)
        return found is not None and found.is_worth_waiting_for(text, want)

    assert waits(80, 20)
    assert waits(60, 40)
    assert not waits(40, 10)  # the other one is long
    assert not waits(60, 80)  # little is saved
    known.end(next(iter(known._found_by.values())), None)
    assert not waits(80, 20)


def test_what_would_not_be_kept_is_not_waited_for() -> None:
    known = KnownScores(8 * 1000)
    assert known.begin(None, np.arange(100, dtype=np.uint32), Score(1, 2)) is None
    assert known.begin(None, np.arange(30, dtype=np.uint32), Score(1, 2)) is not None


def test_beginnings_in_use_outlast_others() -> None:
    known, want = KnownScores(40_000), Score(1, 2)
    head = np.arange(64, dtype=np.uint32)

    def keep(tokens: Any) -> None:
        begun = known.begin(None, tokens, want)
        assert begun is not None
        known.end(begun, right(tokens, want))

    keep(np.append(head, [1, 2]).astype(np.uint32))
    for number in range(100):
        assert known.beginning(None, np.append(head, [3] * 20).astype(np.uint32), want)
        keep(np.append(head, np.full(40, 100 + number)).astype(np.uint32))


def test_a_text_that_is_scored_from_earlier_on_is_found_in_place_of_another() -> None:
    known = KnownScores()
    tokens = np.arange(100, dtype=np.uint32)
    for start in (30, 1):
        want = Score(start, 2)
        begun = known.begin(None, tokens, want)
        assert begun is not None
        known.end(begun, right(tokens, want))
    found = known.beginning(None, tokens, Score(1, 2))
    assert found is not None
    assert found.parts_at == 99
    assert known._bytes == sum(text.nbytes for text in known._kept.values())
