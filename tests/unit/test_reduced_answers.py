"""What rows answer, as it is stored and read: sound, small, and refused where it was damaged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.backends.engine import Outcome
from lmpool.errors import AnswerFormatError, PromptFailed
from lmpool.wants import Draw, OfRow, Tokens, Top
from tests.support.parts import info_of
from tests.support.strategies import TOKENS as ANY_TOKENS
from tests.support.strategies import TOPS as ANY_TOPS
from tests.support.strategies import VOCABULARY, draws, token_bytes

VOCAB = 300
INFO = info_of(vocab_size=VOCAB)


def held_by(answer: Any) -> Sequence[Any]:
    """The arrays of an answer."""
    if isinstance(answer, np.ndarray):
        return [answer]
    return [getattr(answer, field.name) for field in fields(answer)]


def parts(answer: Any) -> list[tuple[str, bytes]]:
    """Their dtypes and bytes."""
    return [(str(part.dtype), part.tobytes()) for part in held_by(answer)]


@given(
    want=ANY_TOPS | ANY_TOKENS | draws(),
    size=st.integers(2, VOCABULARY),
)
def test_a_want_fits_a_row_or_says_why_not(want: OfRow[Any], size: int) -> None:
    row = np.full(size, -math.log(size), np.float32)
    wrong = want.misfit(size)
    if wrong is not None:
        assert 0 < len(wrong) < 200
        return
    try:
        answer = want.reduce(row)
    except PromptFailed as error:  # too few are left for as many draws
        refusal = str(error)
        assert "of the tokens that may be drawn" in refusal
    else:
        stored = want.encode(Outcome(b"", answer=answer), size)
        found = want.decode(stored, replace(INFO, vocab_size=size))
        assert parts(found) == parts(answer)


# --- what is stored ----------------------------------------------------------------------------


def row_of(size: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    logits = np.random.default_rng(seed).normal(size=size) * 3
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


STORED: list[OfRow[Any]] = [
    Top(20),
    Top(300),
    Tokens(token_bytes(3, 299, 3)),
    Draw(8, 1),
    Draw(5, 1, 0.0, False),
]


@pytest.mark.parametrize("want", STORED, ids=str)
def test_an_answer_that_was_stored_is_read_and_is_nobodys_to_write(want: OfRow[Any]) -> None:
    answer = want.reduce(row_of(VOCAB))
    found = want.decode(want.encode(Outcome(b"", answer=answer), VOCAB), INFO)
    assert parts(found) == parts(answer)
    held = held_by(found)
    assert not any(part.flags.writeable for part in held if isinstance(part, np.ndarray))
    assert found.nbytes == sum(part.nbytes for part in held)


@pytest.mark.parametrize("size", [2, 256, 257, 65_536, 65_537, 128_256])
def test_ids_of_every_size_of_vocabulary_are_read(size: int) -> None:
    want, row = Top(2), np.full(size, -30, np.float32)
    row[[size - 1, 0]] = -0.7, -0.8
    stored = want.encode(Outcome(b"", answer=want.reduce(row)), size)
    found = want.decode(stored, replace(INFO, vocab_size=size))
    assert found.token_ids.tolist() == [size - 1, 0]


def test_answers_are_small() -> None:
    row = row_of(128_256)
    sizes = {
        want: len(want.encode(Outcome(b"", answer=want.reduce(row)), row.size))
        for want in (Top(20), Draw(8, 1), Tokens(token_bytes(1, 2)))
    }
    assert sizes[Top(20)] <= 200
    assert sizes[Draw(8, 1)] <= 100
    assert sizes[Tokens(token_bytes(1, 2))] <= 16


@pytest.mark.parametrize("want", STORED, ids=str)
@pytest.mark.parametrize("given", [None, "text", Outcome(b"", np.zeros(VOCAB, np.float32))])
def test_another_answer_is_none(want: OfRow[Any], given: Any) -> None:
    computed = given if isinstance(given, Outcome) else Outcome(b"", answer=given)
    with pytest.raises(PromptFailed, match=f"no answer to {want.kind}"):
        want.encode(computed, VOCAB)


def test_a_row_of_nan_has_no_answer() -> None:
    for want in STORED:
        with pytest.raises(PromptFailed, match="NaN for this prompt"):
            want.reduce(np.full(VOCAB, np.nan, np.float32))


@pytest.mark.parametrize("want", STORED, ids=str)
def test_answers_of_another_layout_are_none(want: OfRow[Any]) -> None:
    stored = want.encode(Outcome(b"", answer=want.reduce(row_of(VOCAB))), VOCAB)
    form, numbers = msgpack.unpackb(stored)
    wrong: list[Any] = [
        None, [], [form], [form, numbers, 1], [form + 1, numbers], [str(form), numbers],
        [form, numbers[:-1]], [form, numbers + b"0"], [form, "text"], [True, numbers],
        {form: numbers}, [form, b"\xff\xff\xff\xff" + numbers[4:]],
        [form, b"\0\0\xc0\x7f" + numbers[4:]], msgpack.Timestamp(1), [form, [numbers]],
    ]  # fmt: skip
    for found in wrong:
        with pytest.raises(AnswerFormatError):
            want.decode(msgpack.packb(found), INFO)
    with pytest.raises(AnswerFormatError):
        want.decode(b"\x91" * 10_000, INFO)
    for other in STORED:
        if other.form != want.form:  # type: ignore[attr-defined]
            with pytest.raises(AnswerFormatError):
                other.decode(stored, INFO)


def test_an_id_past_the_vocabulary_is_no_answer() -> None:
    stored = Top(1).encode(Outcome(b"", answer=Top(1).reduce(row_of(VOCAB)[::-1].copy())), VOCAB)
    form, numbers = msgpack.unpackb(stored)
    with pytest.raises(AnswerFormatError, match="token id 300: below 300 expected"):
        Top(1).decode(msgpack.packb([form, numbers[:-2] + b"\x2c\x01"]), INFO)


@given(
    want=st.sampled_from(STORED),
    cut=st.integers(0, 400),
    swaps=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=4),
    more=st.binary(max_size=5),
)
def test_damaged_answers_are_read_or_refused(
    want: OfRow[Any], cut: int, swaps: list[tuple[int, int]], more: bytes
) -> None:
    data = bytearray(want.encode(Outcome(b"", answer=want.reduce(row_of(VOCAB))), VOCAB))
    for place, value in swaps:
        data[place % len(data)] = value
    for damaged in (bytes(data), bytes(data[: -cut or None]) + more, more):
        try:
            found = want.decode(damaged, INFO)
        except AnswerFormatError as error:
            refusal = str(error)
            assert 0 < len(refusal) < 300
        else:
            assert all(
                not np.isnan(np.frombuffer(raw, "f4")).any()
                for k, raw in parts(found)
                if k == "float32"
            )
