"""Log-probabilities as JSON: the same as `json.dumps` writes of plain objects."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lmpool.gateway.prompt_logprobs_json import (
    IMPOSSIBLE,
    chat_content,
    completion_logprobs,
    number_places,
    numbers_json,
    prepare,
    prompt_logprobs,
)
from lmpool.wants import TextScores, TopLogprobs

ODD = ['"', "\\", "\n", "\x00", "\x1f", "\x7f", "  ", ",", "},{", "é", "\ufffd", "🙂", "\u2028", ""]
TEXTS = st.one_of(
    st.sampled_from([*ODD, "\ud800", "a\udfffb", " " * 200, '"' * 97, "\t" * 40]),
    st.text(st.characters(codec=None), max_size=12),
    st.binary(max_size=6).map(lambda data: data.decode("utf-8", "replace")),
)
LOGPROBS = st.one_of(
    st.sampled_from([0.0, -0.0, -math.inf, math.nan, -9998.5, -1e-30, -1.5]),
    st.floats(-40, 0, width=32),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)


class Texts:
    """Words of any texts; without them there are so many tokens."""

    def __init__(self, texts: list[str], has_text: bool = True) -> None:
        self.texts = texts
        self.tokens = [text.encode("utf-8", "surrogatepass") for text in texts]
        self.has_text = has_text


def words(texts: list[str], has_text: bool = True) -> Any:
    return Texts(texts, has_text)


@st.composite
def scored(draw: st.DrawFn) -> tuple[list[str], list[int], TextScores]:
    """A vocabulary, a text of its tokens, and scores as workers give them."""
    texts = draw(st.lists(TEXTS, min_size=2, max_size=24))
    texts += draw(st.lists(st.sampled_from(texts), max_size=8))  # several tokens of one text
    size = len(texts)
    token_ids = draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=12))
    k = draw(st.integers(0, size))
    coarse = draw(st.booleans())
    rows = draw(
        arrays.arrays(np.float32, (len(token_ids) - 1, size), elements=LOGPROBS).map(np.nan_to_num)
    )
    if coarse:
        rows = np.round(np.clip(rows, -4, 0))  # many ties
    if draw(st.booleans()):
        rows[rows < -1e30] = -np.inf
    order = np.argsort(-rows, axis=1, kind="stable")[:, :k].astype(np.int32)
    own = rows[np.arange(len(rows)), token_ids[1:]]
    ranks = (rows >= own[:, None]).sum(axis=1).astype(np.int32)
    likely = np.take_along_axis(rows, order, axis=1)
    top = TopLogprobs(order, likely, np.zeros(len(rows), np.float32)) if k else None
    return texts, token_ids, TextScores(own, ranks, top)


def plain(value: np.float32) -> float:
    return float(value) if np.isfinite(value) else IMPOSSIBLE


def sound(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def reference(texts: list[str], token_ids: list[int], scores: TextScores) -> list[Any]:
    """vLLM's `prompt_logprobs`, by plain objects."""
    found: list[Any] = [None]
    top = scores.top_logprobs
    for at, own in enumerate(token_ids[1:]):
        value, rank = scores.logprobs[at], int(scores.ranks[at])
        entries = {own: (value, rank)}
        if top is not None:
            for token, each in zip(top.token_ids[at].tolist(), top.logprobs[at], strict=True):
                known = int((top.logprobs[at] >= each).sum())
                entries.setdefault(token, (each, rank if each == value else known))
        found.append(
            {
                str(token): {
                    "logprob": plain(each),
                    "rank": number,
                    "decoded_token": sound(texts[token]),
                }
                for token, (each, number) in entries.items()
            }
        )
    return found


def as_float32(found: Any) -> Any:
    """The same with numbers as their readers take them."""
    if isinstance(found, list):
        return [as_float32(each) for each in found]
    if isinstance(found, dict):
        return {key: as_float32(value) for key, value in found.items()}
    return float(np.float32(found)) if isinstance(found, float) else found


@settings(max_examples=300, deadline=None)
@given(scored())
def test_prompt_logprobs_are_those_of_plain_objects(
    given_: tuple[list[str], list[int], TextScores],
) -> None:
    texts, token_ids, scores = given_
    data = prompt_logprobs(words(texts), token_ids, scores)
    expected = reference(texts, token_ids, scores)
    found = json.loads(data)
    assert as_float32(found) == json.loads(json.dumps(expected))
    for entries, own in zip(found[1:], token_ids[1:], strict=True):
        assert next(iter(entries)) == str(own)
    assert data.count(b'"decoded_token"') == sum(map(len, expected[1:]))  # none twice


def test_ends_that_are_known_have_their_ranks() -> None:
    """The token itself lies outside the likeliest and ties with the last of them."""
    top = TopLogprobs(
        np.array([[3, 1]], np.int32), np.array([[-1, -2]], np.float32), np.zeros(1, np.float32)
    )
    scores = TextScores(np.array([-2], np.float32), np.array([7], np.int32), top)
    (_, entries) = json.loads(prompt_logprobs(words(list("abcde")), [0, 4], scores))
    assert {token: entry["rank"] for token, entry in entries.items()} == {"4": 7, "3": 1, "1": 7}


@pytest.mark.parametrize("rank", [1, 1023, 1024, 9_999_999, 10_000_000, 16_777_215])
def test_ranks_of_any_length(rank: int) -> None:
    scores = TextScores(np.array([-1.5], np.float32), np.array([rank], np.int32))
    (_, entries) = json.loads(prompt_logprobs(words(["a", "b"]), [0, 1], scores))
    assert entries == {"1": {"logprob": -1.5, "rank": rank, "decoded_token": "b"}}


def test_a_long_text_is_written_in_parts() -> None:
    count, k, size = 3000, 40, 500
    random = np.random.default_rng(3)
    rows = random.normal(-5, 2, (count, k)).astype(np.float32)
    rows[:] = -np.sort(-rows, axis=1)
    ids = np.stack([random.permutation(size)[:k] for _ in range(count)]).astype(np.int32)
    token_ids = random.integers(0, size, count + 1).tolist()
    inside = ids == np.array(token_ids[1:])[:, None]
    own = np.where(inside.any(1), (rows * inside).sum(1), -30).astype(np.float32)
    ranks = np.where(inside.any(1), inside.argmax(1) + 1, k + 1).astype(np.int32)
    scores = TextScores(own, ranks, TopLogprobs(ids, rows, np.zeros(count, np.float32)))
    texts = [f"t{i}" for i in range(size)]
    found = json.loads(prompt_logprobs(words(texts), token_ids, scores))
    assert as_float32(found) == reference(texts, token_ids, scores)


def test_without_texts_and_without_scores() -> None:
    scores = TextScores(np.array([-1.5], np.float32), np.array([2], np.int32))
    nameless = words([""] * 5, has_text=False)
    prepare(nameless)
    assert json.loads(prompt_logprobs(nameless, [0, 4], scores)) == [
        None,
        {"4": {"logprob": -1.5, "rank": 2, "decoded_token": None}},
    ]
    assert prompt_logprobs(nameless, [0], None) == b"[null]"
    nothing = np.full(2, np.nan, np.float32)
    ids = np.array([0, 4], np.int32)
    found = json.loads(completion_logprobs(nameless, ids, nothing, offsets=[0, 0]))
    assert found == {
        "text_offset": [0, 0],
        "token_logprobs": [None, None],
        "tokens": ["token_id:0", "token_id:4"],
        "top_logprobs": [None, None],
    }
    empty = completion_logprobs(nameless, np.array([], np.int32), np.array([], np.float32))
    assert not any(json.loads(empty).values())


def completion_reference(
    texts: list[str], token_ids: Any, logprobs: Any, top: TopLogprobs | None, offsets: list[int]
) -> dict[str, Any]:
    """The `logprobs` of completions, by plain objects."""
    tokens = [sound(texts[token]) for token in token_ids]
    numbers: list[float | None] = []
    likeliest: list[dict[str, float] | None] = []
    for at, text in enumerate(tokens):
        if np.isnan(logprobs[at]):
            numbers.append(None)
            likeliest.append(None)
            continue
        numbers.append(max(plain(logprobs[at]), IMPOSSIBLE))
        found = {text: max(plain(logprobs[at]), IMPOSSIBLE)}
        if top is not None:
            for token, each in zip(top.token_ids[at], top.logprobs[at], strict=True):
                other = sound(texts[token])
                found[other] = max(found.get(other, IMPOSSIBLE), plain(each), IMPOSSIBLE)
        likeliest.append(found)
    return {
        "text_offset": offsets,
        "token_logprobs": numbers,
        "tokens": tokens,
        "top_logprobs": likeliest,
    }


@settings(max_examples=300, deadline=None)
@given(scored(), st.integers(0, 50), st.sets(st.integers(0, 10)), st.booleans())
def test_completions_logprobs_are_those_of_plain_objects(
    given_: tuple[list[str], list[int], TextScores], offset: int, unknown: set[int], as_ids: bool
) -> None:
    texts, token_ids, scores = given_
    ids, logprobs, top = np.array(token_ids[1:], np.int32), scores.logprobs.copy(), None
    logprobs[[at for at in unknown if at < len(ids)]] = np.nan
    top = scores.top_logprobs
    offsets = list(range(offset, offset + len(ids)))
    data = completion_logprobs(words(texts), ids, logprobs, top, as_ids, offsets)
    if as_ids:
        texts = [f"token_id:{i}" for i in range(len(texts))]
    expected = completion_reference(texts, token_ids[1:], logprobs, top, offsets)
    found = json.loads(data)
    assert as_float32(found) == json.loads(json.dumps(expected))
    # Whether a token is the likeliest is told by equality.
    pairs = zip(found["token_logprobs"], found["top_logprobs"], strict=True)
    for (number, likeliest), rank in zip(pairs, scores.ranks, strict=True):
        if number is not None and rank == 1:
            assert number == max(likeliest.values())


@settings(max_examples=300, deadline=None)
@given(scored(), st.booleans())
def test_a_chats_content_is_that_of_plain_objects(
    given_: tuple[list[str], list[int], TextScores], as_ids: bool
) -> None:
    texts, token_ids, scores = given_
    top, ids = scores.top_logprobs, token_ids[1:]

    def entry(token: int, number: np.float32) -> dict[str, Any]:
        return {
            "token": f"token_id:{token}" if as_ids else sound(texts[token]),
            "bytes": list(texts[token].encode("utf-8", "surrogatepass")),
            "logprob": max(plain(number), IMPOSSIBLE),
        }

    expected = []
    for at, token in enumerate(ids):
        likely = []
        if top is not None:
            likely = list(map(entry, top.token_ids[at].tolist(), top.logprobs[at]))
        expected.append({**entry(token, scores.logprobs[at]), "top_logprobs": likely})
    found = json.loads(chat_content(words(texts), ids, scores.logprobs, top, as_ids))
    assert as_float32(found) == json.loads(json.dumps(expected))


def test_a_long_chat_is_written_in_parts_and_none_is_an_empty_list() -> None:
    count = 70_000
    logprobs = -np.arange(count, dtype=np.float32)
    found = json.loads(chat_content(words(["a", "b"]), [1] * count, logprobs))
    assert len(found) == count
    assert found[0] == {"token": "b", "bytes": [98], "logprob": 0.0, "top_logprobs": []}
    assert found[-1]["logprob"] == IMPOSSIBLE
    assert chat_content(words(["a", "b"]), [], logprobs[:0]) == b"[]"


@settings(max_examples=200, deadline=None)
@given(arrays.arrays(np.uint32, st.integers(0, 64), elements=st.integers(0, 2**32 - 1)))
def test_every_float32_is_given_back(bits: np.ndarray[Any, np.dtype[np.uint32]]) -> None:
    values = bits.view(np.float32)
    places = number_places(values)
    assert places.shape == (values.size, 16)
    found = np.array([float(bytes(place)) for place in places], np.float32)
    expected = np.where(np.isfinite(values), values, np.float32(IMPOSSIBLE))
    assert np.array_equal(found.view(np.uint32), expected.astype(np.float32).view(np.uint32))
    again = json.loads(b"[" + numbers_json(values) + b"]")
    assert np.array_equal(np.array(again, np.float32), expected.astype(np.float32))
