from __future__ import annotations

import zlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool import vocabulary
from lmpool.errors import WireError
from lmpool.vocabulary import TOKENIZER_FILES, Vocabulary


@given(
    tokens=st.lists(st.binary(max_size=8), max_size=30),
    files=st.dictionaries(st.sampled_from(sorted(TOKENIZER_FILES)), st.binary(max_size=50)),
)
def test_a_vocabulary_round_trips(tokens: list[bytes], files: dict[str, bytes]) -> None:
    found = Vocabulary.unpack(Vocabulary(tokens, files).pack())
    assert list(found.tokens) == tokens
    assert dict(found.files) == files


def blob(**changed: Any) -> bytes:
    fields = {"v": 1, "tokens": [b"a"], "files": {"vocab.txt": b"x"}, **changed}
    return zlib.compress(msgpack.packb({n: v for n, v in fields.items() if v is not ...}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no zlib",
        zlib.compress(b""),
        zlib.compress(b"\xc1"),
        zlib.compress(msgpack.packb([1])),
        zlib.compress(msgpack.packb(3)),
        blob()[:-1],
        blob()[:8],
        blob(v=2),
        blob(v=...),
        blob(tokens=...),
        blob(tokens=["a"]),
        blob(tokens=3),
        blob(tokens=None),
        blob(files=...),
        blob(files=None),
        blob(files=[]),
        blob(files={"vocab.txt": "text"}),
        blob(files={"tokenizer.py": b"import os"}),
        blob(files={"../vocab.txt": b"x"}),
        blob(files={"/etc/passwd": b"x"}),
        blob(files={"": b"x"}),
    ],
    ids=range(22),
)
def test_what_is_no_vocabulary_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        Vocabulary.unpack(data)


def test_a_small_blob_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "MAX_BYTES", 1000)
    Vocabulary.unpack(blob(files={"vocab.txt": b"\0" * 800}))
    with pytest.raises(WireError, match="more than 1000 bytes"):
        Vocabulary.unpack(blob(files={"vocab.txt": b"\0" * 100_000}))


def test_a_small_blob_of_many_tokens_does_not_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "MAX_TOKENS", 100)
    Vocabulary.unpack(blob(tokens=[b""] * 100))
    with pytest.raises(WireError, match="no vocabulary"):
        Vocabulary.unpack(blob(tokens=[b""] * 101))


def test_no_file_that_a_client_takes_is_code_or_a_path() -> None:
    for name in TOKENIZER_FILES:
        assert "/" not in name
        assert not name.endswith((".py", ".pkl", ".bin", ".so"))


@given(data=st.binary(max_size=100))
def test_random_bytes_do_no_harm(data: bytes) -> None:
    for attempt in (data, zlib.compress(data)):
        with pytest.raises(WireError):
            Vocabulary.unpack(attempt)
