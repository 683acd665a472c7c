"""Probabilities as bars of text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.cli.bars import ascii_text, bar, bar_lines, token_text


@pytest.mark.parametrize(
    ("fraction", "drawn"),
    [
        (0.0, ""),
        (0.5, "█████"),
        (1.0, "██████████"),
        (0.55, "█████▌"),
        (1e-9, "▏"),  # what is not nothing shows
        (7.0, "██████████"),
        (-1.0, ""),
    ],
)
def test_a_bar_is_as_long_as_its_fraction(fraction: float, drawn: str) -> None:
    assert bar(fraction, 10) == drawn


def test_bars_can_do_without_unicode() -> None:
    assert bar(0.5, 10, ascii_only=True) == "#####"
    assert bar(1e-9, 10, ascii_only=True) == "#"
    assert bar(0.0, 10, ascii_only=True) == ""


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 200))
def test_bars_grow_with_their_fractions(a: float, b: float, width: int) -> None:
    shorter, longer = (bar(fraction, width) for fraction in sorted((a, b)))
    assert len(shorter) <= len(longer) <= width


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (b" the", "␣the"),
        (b"\n\n", "⏎⏎"),
        (b"\t", "⇥"),
        ("é".encode(), "é"),
        (b"\xc3", "\\xc3"),
        (b"\x00", "\\x00"),
        (b"\x1b[31m", "\\x1b[31m"),  # a terminal must not obey it
        (b"", "(nothing)"),
    ],
)
def test_tokens_are_shown_as_one_visible_word(token: bytes, shown: str) -> None:
    assert token_text(token) == shown


def test_lines_stand_below_each_other() -> None:
    tokens = [b" a", b" longer", "漢字".encode()]
    lines = bar_lines(tokens, [1, 0, 2], [0.5, 0.25, 0.0], width=8)
    assert lines == [
        "␣longer   50.0 %  ████████",
        "␣a        25.0 %  ████",
        "漢字       0.0 %  ",
    ]


def test_lines_without_unicode_are_ascii() -> None:
    lines = bar_lines([b" a", "é\n".encode()], [0, 1], [0.5, 0.1], width=8, ascii_only=True)
    assert all(line.isascii() for line in lines)
    assert ascii_text("␣é") == "_\\xe9"


def test_an_id_without_bytes_has_a_number() -> None:
    assert bar_lines([b"a"], [7], [1.0])[0].startswith("<7>")


def test_no_tokens_give_no_lines() -> None:
    assert bar_lines([], [], []) == []
