"""Where tokens begin in the text that is told of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.gateway.drawing import Part, Teller, together
from lmpool.gateway.sampling import Drawing
from lmpool.gateway.text_offsets import prompt_offsets
from lmpool.gateway.text_stops import StopTexts
from lmpool.gateway.words import Words
from lmpool.producer import Piece

BOS, EOS = 256, 257
WORDS = Words(
    [*(bytes([i]) for i in range(256)), b"<s>", b"</s>", b" The", b" quick"], 260, [BOS, EOS]
)
THE, QUICK = 258, 259


def told(ids: Sequence[int], size: int, reason: str = "length", stop: str = "") -> Part:
    """A continuation that comes in pieces of so many tokens."""
    drawing = Drawing(
        max_tokens=99, room=999, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=1,
        eos_token_ids=(EOS,), stop_token_ids=frozenset(), stops=StopTexts([stop]) if stop else None,
        hints=(), include_stop=False, skip_special=True, logprobs=True, top_logprobs=0,
    )  # fmt: skip
    teller, parts = Teller(WORDS, drawing), list[Part]()
    for at in range(0, len(ids), size):
        some = np.array(ids[at : at + size], np.int32)
        last = at + size >= len(ids)
        end = (reason, int(reason == "eos")) if last else (None, 0)
        parts.append(teller.part(Piece(at, some, -some.astype(np.float32), None, *end)))  # type: ignore[arg-type]
        if parts[-1].finish_reason is not None:
            break
    return together(parts)


@given(text=st.text(max_size=12), size=st.integers(1, 5))
def test_each_byte_of_a_character_begins_where_it_does(text: str, size: int) -> None:
    ids = list(text.encode("utf-8", "replace"))
    text = bytes(ids).decode()
    expected = [at for at, each in enumerate(text) for _ in each.encode()]
    assert prompt_offsets(WORDS, ids, text) == expected
    if ids:
        part = told(ids, size)
        assert (part.text, part.text_offsets) == (text, expected)


@pytest.mark.parametrize("size", [1, 2, 9])
def test_tokens_that_the_text_leaves_out_have_the_place_where_they_would_be(size: int) -> None:
    part = told([*"é".encode(), BOS, ord("x"), EOS], size, "eos")
    assert (part.text, part.text_offsets) == ("éx", [0, 0, 1, 1, 2])


@pytest.mark.parametrize("size", [1, 2, 9])
def test_those_of_a_stop_text_go_on_behind_the_end_however_they_come(size: int) -> None:
    part = told(list(b"abSTOPcd"), size, stop="STOP")
    assert (part.text, part.text_offsets) == ("ab", [0, 1, 2, 3, 4, 5])


def test_what_is_no_text_has_a_place_of_its_own() -> None:
    part = told([0xE2, ord("a"), 0xE2, 0x82, 0xAC, 0xFF, ord("b")], 1)
    assert (part.text, part.text_offsets) == ("\ufffda€\ufffdb", [0, 1, 2, 2, 2, 3, 4])


@pytest.mark.parametrize(
    ("ids", "text", "offsets"),
    [
        ([BOS, ord("a"), ord("b")], "ab", [0, 0, 1]),  # which the tokenizer put there
        ([BOS, ord("a"), ord("b")], "<s>ab", [0, 3, 4]),  # and one that was given as an id
        ([BOS, THE, QUICK, EOS], " The quick", [0, 0, 4, 10]),
        ([BOS, THE, QUICK], "The quick", [0, 0, 3]),  # a blank that the text has not
        ([BOS, BOS, ord("a")], "<s>a", [0, 3, 3]),
        ([ord(" "), THE, QUICK], " The quick", [0, 0, 4]),  # nor that, where it begins with one
    ],
)
def test_a_prompts_offsets_are_those_of_its_text(
    ids: list[int], text: str, offsets: list[int]
) -> None:
    assert prompt_offsets(WORDS, ids, text) == offsets
