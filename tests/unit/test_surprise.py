"""A scored text as it is printed."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
from rich.console import Console

from lmpool.cli.surprise import LEVELS, UNSCORED, ScoredText
from lmpool.cli.terminal import json_text
from lmpool.wants import TextScores, TopLogprobs

BYTES = [bytes([n]) for n in range(256)]


def console(width: int = 60, encoding: str = "utf-8") -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding)
    return Console(file=file, width=width, soft_wrap=True, highlight=False)


def scored(text: bytes, bits: Sequence[float], top: int = 0, hidden: int = 0) -> ScoredText:
    """Bytes as tokens; `bits` of all but the first."""
    logprobs = np.array([-each * math.log(2) for each in bits], np.float32)
    best = None
    if top:
        ids = np.tile(np.arange(97, 97 + top, dtype=np.int32), (len(bits), 1))
        each = np.full((len(bits), top), np.log(0.1), np.float32)
        best = TopLogprobs(ids, each, np.zeros(len(bits), np.float32))
    ranks = np.arange(1, len(bits) + 1, dtype=np.int32)
    return ScoredText(BYTES, [*text], TextScores(logprobs, ranks, best), hidden)


def test_each_level_has_its_colour() -> None:
    shown = scored(b"abcdef", [0.5, 2, 4, 8, 99]).coloured(console())
    assert shown.plain == "abcdef"
    styles = {span.start: span.style for span in shown.spans}
    expected = [UNSCORED, *(style for _, style in LEVELS)]
    assert [styles.get(place, "") for place in range(6)] == expected


def test_a_character_of_several_tokens_is_coloured_by_all_of_them() -> None:
    shown = scored("aé!".encode(), [2, 3, 0]).coloured(console())
    assert shown.plain == "aé!"
    assert [(span.start, span.end, span.style) for span in shown.spans][1] == (1, 2, LEVELS[2][1])
    assert scored("aé".encode()[:-1], [2]).coloured(console()).plain == "a\ufffd"


def test_ends_of_lines_are_marked_where_they_surprise() -> None:
    assert scored(b"a\nb\nc", [0, 0, 5, 0]).coloured(console()).plain == "a\nb⏎\nc"
    narrow = scored("a\n\u00e9".encode(), [5, 0, 0]).coloured(console(encoding="ascii"))
    assert narrow.plain == "a\\n\n\\xe9"


def test_markup_and_control_characters_mean_nothing() -> None:
    text = b"[bold]\x1b[31m"
    assert scored(text, [0] * 10).coloured(console()).plain == "[bold]\\x1b[31m"


@pytest.mark.parametrize("width", [40, 60, 100])
def test_lines_have_what_is_likeliest_within_the_width(width: int) -> None:
    first, second, *_ = list(scored(b"xyz", [1, 2], top=12).lines(console(width)))[1:]
    assert first.plain.split() == ["-", "-", "x"]
    assert second.plain.split()[:3] == ["1.0", "1", "y"]
    assert second.plain.split()[3::2] == list("abcdefghijkl")
    assert max(map(len, second.plain.splitlines())) <= width


def test_what_begins_every_text_is_not_shown() -> None:
    found = scored(b"\x00ab", [1, 2], hidden=1)
    assert found.coloured(console()).plain == "ab"
    assert len(list(found.lines(console()))) == 3


def test_the_summary_is_of_all_that_is_scored() -> None:
    found = scored(b"abc", [1, 3])
    assert "2 tokens scored: perplexity 4.00, 2.00 bits a token, 2.00 a byte" in found.summary()
    assert found.as_json()["perplexity"] == pytest.approx(4)


def test_json_has_no_infinity() -> None:
    found = json.loads(json_text(scored(b"abc", [1, math.inf], top=1).as_json()))
    assert [each["logprob"] for each in found["tokens"]] == [None, pytest.approx(-0.693147), None]
    assert (found["logprob"], found["perplexity"], found["bits_per_byte"]) == (None, None, None)
    assert found["tokens"][1]["top"] == [
        {"id": 97, "token": "a", "logprob": pytest.approx(math.log(0.1))}
    ]
    assert "inf" in scored(b"abc", [1, math.inf]).summary()
