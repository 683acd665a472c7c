"""Text of a gateway's answers: whole characters, cut exactly at stop texts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.gateway.drawing import Part, Teller, together
from lmpool.gateway.errors import ApiError
from lmpool.gateway.responding import _takes_gzip
from lmpool.gateway.sampling import Drawing, SamplingRequest
from lmpool.gateway.sampling import drawing as drawing_of
from lmpool.gateway.template import model_template, read_template
from lmpool.gateway.text_stops import StopTexts, TextCut
from lmpool.gateway.words import MAX_CHARACTERS, TOGETHER, Words
from lmpool.producer import Piece

ALPHABET = "abä€😀\n"
TEXTS = st.text(ALPHABET, max_size=30)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=6)


def naive(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text up to the stop text that ends first, the longest of those."""
    ends = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not ends:
        return text, None
    _, at, stop = min(ends)
    return text[:at], stop


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 120), max_size=20))
def test_text_is_cut_where_the_first_stop_text_ends_however_its_bytes_come(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    data = text.encode()
    places = sorted({0, len(data), *(cut for cut in cuts if cut <= len(data))})
    cut = TextCut(StopTexts(stops))
    told = ""
    for first, last in pairwise(places):
        told += cut.feed(data[first:last])
        # What was told stays: it is the beginning of the right text at any moment.
        assert naive(text, stops)[0].startswith(told)
    told += cut.feed(b"", final=True)
    assert (told, cut.stop) == naive(text, stops)


@given(text=TEXTS, stops=STOPS)
def test_the_stop_text_may_be_kept(text: str, stops: list[str]) -> None:
    cut = TextCut(StopTexts(stops), include_stop=True)
    told = cut.feed(text.encode()) + cut.feed(b"", final=True)
    before, stop = naive(text, stops)
    assert told == before + (stop or "")


@given(data=st.binary(max_size=40), size=st.integers(1, 5))
def test_bytes_that_are_no_text_are_told_as_python_reads_them(data: bytes, size: int) -> None:
    cut = TextCut()
    parts = [cut.feed(data[i : i + size]) for i in range(0, len(data), size)]
    assert "".join(parts) + cut.feed(b"", final=True) == data.decode("utf-8", "replace")


def test_thousands_of_stop_texts_cost_no_more_than_one() -> None:
    stops = [f"{number:04d}stop" for number in range(4096)]
    made = StopTexts(stops)
    text = ("0123" * 5000 + "4095stop").encode()
    began = time.process_time()
    cut = TextCut(made)
    assert cut.feed(text) == "0123" * 5000
    assert cut.stop == "4095stop"
    assert time.process_time() - began < 1


def drawing(stops: Sequence[str] = (), **more: object) -> Drawing:
    fields: dict[str, object] = {
        "max_tokens": 99, "room": 1000, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "seed": None,
        "eos_token_ids": (255,), "stop_token_ids": frozenset(),
        "stops": StopTexts(stops) if stops else None, "hints": (), "include_stop": False,
        "skip_special": True, "logprobs": False, "top_logprobs": 0, **more,
    }  # fmt: skip
    return Drawing(**fields)  # type: ignore[arg-type]


BYTES = Words([bytes([i]) for i in range(256)], 256, special=[1])


def pieces(data: bytes, reason: str, ending: int = 0, size: int = 1) -> list[Piece]:
    ids = np.frombuffer(data, np.uint8).astype(np.int32)
    logprobs = -ids.astype(np.float32)
    parts = [slice(i, i + size) for i in range(0, len(ids), size)]
    made = [Piece(part.start, ids[part], logprobs[part]) for part in parts[:-1]]
    last = parts[-1]
    return [*made, Piece(last.start, ids[last], logprobs[last], None, reason, ending)]  # type: ignore[arg-type]


def told(drawn: Drawing, all_pieces: Sequence[Piece]) -> Part:
    teller, parts = Teller(BYTES, drawn), []
    for piece in all_pieces:
        parts.append(teller.part(piece))
        if parts[-1].finish_reason is not None:
            break
    return together(parts)


@pytest.mark.parametrize("size", [1, 2, 50])
def test_what_ended_a_continuation_is_among_its_tokens_and_not_in_its_text(size: int) -> None:
    part = told(drawing(), pieces("naïve".encode() + b"\xff", "eos", 1, size))
    assert (part.text, part.finish_reason, part.stop_reason) == ("naïve", "stop", None)
    assert part.token_ids == [*"naïve".encode(), 255]
    assert part.logprobs is not None
    assert part.logprobs.tolist() == [-float(i) for i in part.token_ids]


@pytest.mark.parametrize("size", [1, 3, 50])
def test_tokens_behind_a_stop_text_are_none_of_it(size: int) -> None:
    part = told(drawing(["\n\n", "zz"]), pieces(b"one\n\ntwo", "length", 0, size))
    assert (part.text, part.finish_reason, part.stop_reason) == ("one", "stop", "\n\n")
    assert bytes(part.token_ids) == b"one\n\n"


def test_a_stop_text_that_only_begins_is_told_in_the_end() -> None:
    part = told(drawing(["\n\n"]), pieces(b"one\n", "length"))
    assert (part.text, part.finish_reason) == ("one\n", "length")


def test_special_tokens_are_no_text_unless_they_are_asked_for() -> None:
    assert told(drawing(), pieces(b"a\x01b", "length")).text == "ab"
    assert told(drawing(skip_special=False), pieces(b"a\x01b", "length")).text == "a\x01b"


def test_a_token_that_was_asked_for_as_an_end_is_said() -> None:
    part = told(drawing(stop_token_ids=frozenset({33})), pieces(b"a!", "eos", 1))
    assert (part.text, part.stop_reason) == ("a", 33)


def test_half_a_character_waits_for_its_other_half() -> None:
    teller = Teller(BYTES, drawing())
    parts = [teller.part(piece).text for piece in pieces("€".encode(), "length")]
    assert parts == ["", "", "€"]
    assert told(drawing(), pieces("€".encode()[:2], "length")).text == "�"


def test_texts_are_encoded_in_groups_and_in_their_order() -> None:
    threads: dict[str, str] = {}

    def encode(text: str, special: bool) -> list[int]:
        threads[text[:4]] = threading.current_thread().name
        return [len(text)]

    words = Words([b"ab", b"abc"], 2, encode=encode)
    texts = [f"{i:04}" + "x" * (TOGETHER // 3) for i in range(8)]
    assert asyncio.run(words.encode_all(texts)) == [[len(text)] for text in texts]
    assert all(name.startswith("beside-the-loop") for name in threads.values())
    threads.clear()
    assert asyncio.run(words.encode_all(["0000", "0001"])) == [[4], [4]]
    assert set(threads.values()) == {threading.current_thread().name}
    assert asyncio.run(words.encode_all([])) == []


@pytest.mark.parametrize(("most", "longest"), [(4, 15), (None, MAX_CHARACTERS)])
def test_a_text_is_not_read_that_has_more_characters_than_all_its_tokens_could(
    most: int | None, longest: int
) -> None:
    read: list[int] = []

    def encode(text: str, special: bool) -> list[int]:
        read.append(len(text))
        return [1]

    words = Words([b"ab", b"abc"], 2, encode=encode)
    assert asyncio.run(words.encode("a" * longest, most=most)) == [1]
    said = "maximum context length is 4 tokens" if most else f"send at most {longest}"
    with pytest.raises(ApiError, match=f"{said}|{longest + 1} characters.*{said}"):
        asyncio.run(words.encode_all(["a", "a" * (longest + 1)], most=most))
    assert read == [longest]


@pytest.mark.parametrize("size", [1, 2, 50])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["\x01", "\x01\x01"])
def test_hidden_tokens_that_are_a_stop_text_are_told_as_one(
    stop: str, include: bool, size: int
) -> None:
    data = b"ab" + stop.encode()
    part = told(drawing([stop], include_stop=include), pieces(data, "stop", len(stop), size))
    assert part.text == ("ab" + stop if include else "ab")
    assert (part.finish_reason, part.stop_reason) == ("stop", stop)
    assert part.token_ids == list(data)


@pytest.mark.parametrize("skip", [None, False])
def test_no_worker_ends_at_a_stop_text_that_is_hidden_in_part(skip: bool | None) -> None:
    """Its text would be told up to the hidden token, though the stop text begins before it."""
    stops = ["b\x01", "\x01b", "\x01", "b"]
    words = Words(BYTES.tokens, 256, [1], lambda text, _: list(text.encode()))
    info = SimpleNamespace(max_prompt_tokens=100, eos_token_ids=(255,), vocab_size=256)
    model: Any = SimpleNamespace(words=words, info=info)
    body = SamplingRequest(model=None, stop=stops, skip_special_tokens=skip)
    drawn = asyncio.run(drawing_of(body, model, 9, None, 1))
    ends = ["\x01", "b"] if skip is None else stops
    assert drawn.hints == tuple(tuple(stop.encode()) for stop in ends)


def test_a_byte_order_mark_is_none_of_a_template(tmp_path: Path) -> None:
    file = tmp_path / "template"
    file.write_text("{{ messages }}", "utf-8-sig")
    assert read_template(file) == "{{ messages }}"


@pytest.mark.parametrize(
    ("config", "template"),
    [
        ({"chat_template": "{{ messages }}"}, "{{ messages }}"),
        ({"chat_template": [{"name": "default", "template": "x"}]}, "x"),
        ({"chat_template": [{"name": "other", "template": "x"}]}, None),
        ({"chat_template": ["x"]}, None),
        ({"chat_template": [{}]}, None),
        ({"chat_template": 3}, None),
        ([], None),
    ],
)
def test_a_template_is_found_or_is_not(config: object, template: str | None) -> None:
    assert model_template({"tokenizer_config.json": json.dumps(config).encode()}) == template


@pytest.mark.parametrize(
    ("accepted", "takes"),
    [("gzip", True), ("*", True), ("*;q=0, gzip", True), ("gzip;q=0, *", False), ("br", False)],
)
def test_answers_are_compressed_for_who_accepts_it(accepted: str, takes: bool) -> None:
    assert _takes_gzip(accepted) is takes
