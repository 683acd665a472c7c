"""Large bodies are read in parts, and are what `json.loads` makes of the whole."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import pytest

from lmpool.gateway import json_reading

CHARACTERS = 'ab"\\,[]{}:é\n 😀\ud800'


def values(rnd: random.Random, depth: int = 0) -> Any:
    kind = rnd.randrange(9 if depth < 5 else 6)
    if kind == 0:
        return rnd.choice([1, -2.5, 1e300, 0, 12345678901234567890, None, True, False])
    if kind < 6:
        return "".join(rnd.choices(CHARACTERS, k=rnd.randrange(12)))
    if kind < 8:
        return [values(rnd, depth + 1) for _ in range(rnd.randrange(6))]
    names = ("".join(rnd.choices(CHARACTERS, k=rnd.randrange(5))) for _ in range(rnd.randrange(6)))
    return {name: values(rnd, depth + 1) for name in names}


def spoilt(rnd: random.Random, body: bytes) -> bytes:
    found, at = bytearray(body), rnd.randrange(len(body))
    other = rnd.choice(b'[]{},":\\ 1\x0b')
    match rnd.randrange(3):
        case 0:
            del found[at]
        case 1:
            found.insert(at, other)
        case _:
            found[at] = other
    return bytes(found)


def read(loads: Any, body: bytes) -> Any:
    try:
        return loads(body)
    except (ValueError, RecursionError):
        return "refused"


def in_parts(body: bytes) -> Any:
    return json_reading.loads(body, float)


@pytest.mark.parametrize("part", [1, 7, 50])
def test_it_is_as_json_loads_has_it(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_reading, "PART", part)
    rnd, refused = random.Random(part), 0
    for _ in range(1000):
        text = json.dumps(values(rnd), ensure_ascii=rnd.random() < 0.5)
        body = text.encode("utf-8", "surrogatepass")
        for each in (body, spoilt(rnd, body)):
            found = read(json.loads, each)
            assert read(in_parts, each) == found, each
            refused += found == "refused"
    assert 150 < refused < 1000


@pytest.mark.parametrize(
    "body",
    [
        b"", b"  ", b"[" + b" " * 50 + b"]", b"[1," + b" " * 50 + b"]",
        b'{"a":1,' + b" " * 50 + b"}",
        b"[" + b" " * 50 + b",1]", b"[" * 50, b"[]" * 50, b"[1,2,3]" * 9, b"[1,2,3}" + b" " * 50,
        b'{"a":[1,2,3],"a":{"b":[4]}}', b'{"a":1[2,3]}', b'{"a" [2,3]}', b'"' + b"a" * 60,
        '[1,{"a":["é",2,3]}]'.encode("utf-16"), '[1,{"a":["é",2,3]}]'.encode("utf-8-sig"),
    ],
)  # fmt: skip
def test_and_so_are_these(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_reading, "PART", 1)
    assert read(in_parts, body) == read(json.loads, body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[1,2,3', b'{"prompt":[1,2,3]', b'{"prompt":[1,2,3,[4]', b"[1",
        b"[[1]", b"[1,[2]", b"[1]x", b'{"a":[1]}{"b":2}', b"[1,2],3", b"[[1],[2]],3", b"[1]]",
    ],
)  # fmt: skip
def test_what_ends_too_early_or_too_late_is_told_as_json_loads_tells_it(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_reading, "PART", 1)
    with pytest.raises(json.JSONDecodeError) as wanted:
        json.loads(body)
    with pytest.raises(json.JSONDecodeError) as found:
        in_parts(body)
    assert found.value.msg == wanted.value.msg


@pytest.mark.parametrize(
    ("item", "before", "after"),
    [
        ("1", "[", "]"),
        ("[]", '{"a":[', "]}"),
        ("{}", '{"a":{"b":[', "]}}"),
        ('{"a":[1]}', "[", "]"),
        ('"a"', '{"a":[0,[', "]]}"),
        ('"\\\\\\"":1', "{", "}"),
        ("[" * 90 + "]" * 90, "[", "]"),
        ("[" + ",".join("1" * 100_000) + "]", '{"prompt":[', "]}"),
    ],
)
def test_no_call_holds_other_threads_for_long(
    item: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (before + ",".join([item] * (400_000 // len(item))) + after).encode()
    sizes, loads = [], json.loads

    def counted(text: bytes, **how: Any) -> Any:
        sizes.append(len(text))
        return loads(text, **how)

    monkeypatch.setattr(json, "loads", counted)
    assert in_parts(body) == loads(body)
    assert max(sizes) <= json_reading.PART + 2


def test_what_lies_deep_takes_no_more_memory() -> None:
    """Else some bodies at once would have all that there is."""
    peaks = []
    for depth in (1, 100):
        body = b"[" * depth + b"0," * 200_000 + b"0" + b"]" * depth
        in_parts(body)  # what is made once is there
        tracemalloc.start()
        try:
            in_parts(body)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def test_what_is_nested_deeper_than_anything_is_refused() -> None:
    deep = b"[" * 101 + b"1" + b"]" * 101
    with pytest.raises(RecursionError):
        in_parts(deep)
