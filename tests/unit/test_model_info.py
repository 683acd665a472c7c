from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.errors import WireError
from lmpool.model_info import ModelInfo, fingerprint

INFO = ModelInfo(
    model="tiny",
    revision=None,
    fingerprint="0123456789abcdef" * 2,
    vocab_size=256,
    max_prompt_tokens=100,
    dtype="float32",
    engine="mock",
    encoding="f32",
    bos_token_id=0,
    eos_token_ids=(1, 2),
)

POSITIVE = st.integers(1, 2**40)


@st.composite
def infos(draw: st.DrawFn) -> ModelInfo:
    return ModelInfo(
        model=draw(st.text(max_size=80)),
        revision=draw(st.none() | st.text(max_size=40)),
        fingerprint=draw(st.binary(min_size=16, max_size=16)).hex(),
        vocab_size=draw(POSITIVE),
        max_prompt_tokens=draw(POSITIVE),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        engine=draw(st.text(max_size=20)),
        encoding=draw(st.sampled_from(["f32", "bf16", "f16"])),
        bos_token_id=draw(st.none() | st.integers(0, 2**32)),
        eos_token_ids=tuple(draw(st.lists(st.integers(0, 2**32), max_size=5))),
        pad_token_id=draw(st.none() | st.integers(0, 2**32)),
        shards=draw(st.integers(1, 64)),
        max_backlog=draw(POSITIVE),
        result_ttl_ms=draw(POSITIVE),
    )


@given(info=infos())
def test_model_info_round_trips(info: ModelInfo) -> None:
    assert ModelInfo.unpack(info.pack()) == info


def packed(**changed: Any) -> bytes:
    fields = {"v": 1, **asdict(INFO), **changed}
    data: bytes = msgpack.packb({n: v for n, v in fields.items() if v is not ...})
    return data


def test_fields_of_a_later_release_are_ignored() -> None:
    assert ModelInfo.unpack(packed(colour="blue", more=[1, {"a": None}])) == INFO


def test_fields_with_defaults_may_be_missing() -> None:
    found = ModelInfo.unpack(packed(shards=..., max_backlog=..., eos_token_ids=...))
    assert found == replace(INFO, shards=1, max_backlog=100_000, eos_token_ids=())


def test_key_names_carry_eight_digits_of_the_fingerprint() -> None:
    assert INFO.fingerprint8 == "01234567"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (packed(v=2), "version 2: this lmpool reads version 1; install the lmpool"),
        (packed(v=...), "version None"),
        (packed(vocab_size=...), "incomplete.*vocab_size"),
        (packed(vocab_size=0), "vocab_size=0: a positive integer"),
        (packed(vocab_size="256"), "vocab_size='256'"),
        (packed(vocab_size=True), "vocab_size=True"),
        (packed(vocab_size=None), "vocab_size=None"),
        (packed(max_prompt_tokens=-1), "max_prompt_tokens=-1"),
        (packed(shards=0), "shards=0"),
        (packed(shards=1.0), "shards=1.0"),
        (packed(shards=10**12), "shards=1000000000000: at most 64"),
        (packed(max_backlog=0), "max_backlog=0"),
        (packed(result_ttl_ms=0), "result_ttl_ms=0"),
        (packed(model=None), "model=None: a string"),
        (packed(engine=3), "engine=3"),
        (packed(fingerprint="abc"), "fingerprint='abc'"),
        (packed(fingerprint=b"0" * 32), "fingerprint"),
        (packed(encoding="f64"), "encoding='f64'"),
        (packed(encoding=["f32"]), "encoding"),
        (packed(eos_token_ids=3), "incomplete"),
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (packed()[:-1], "not msgpack"),
        (packed() + b"\0", "not msgpack"),
        (b"\0", "version 'int'"),
        (b"\x90", "version 'list'"),
        (msgpack.packb({1: 2}), "not msgpack"),
        (b"\0" * 70_000, "70000 bytes: at most 65536"),
    ],
)
def test_what_is_no_model_info_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        ModelInfo.unpack(data)


@given(data=st.binary(max_size=300))
def test_random_bytes_do_no_harm(data: bytes) -> None:
    with pytest.raises(WireError):
        ModelInfo.unpack(data)


@given(data=st.data())
def test_damaged_model_info_does_no_harm(data: st.DataObject) -> None:
    damaged = bytearray(packed())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        ModelInfo.unpack(bytes(damaged))
    except WireError:
        pass


def test_fingerprints_do_not_depend_on_the_order_of_names() -> None:
    found = fingerprint({"engine": "hf", "files": [["a", 1], ["b", 2]], "revision": None})
    assert found == fingerprint({"revision": None, "files": [["a", 1], ["b", 2]], "engine": "hf"})
    assert len(found) == 32
    assert int(found, 16) >= 0


def test_whatever_changes_the_numbers_changes_the_fingerprint() -> None:
    identities: list[dict[str, object]] = [
        {},
        {"engine": "hf"},
        {"engine": "vllm"},
        {"engine": "hf", "dtype": "float32"},
        {"engine": "hf", "dtype": "bfloat16"},
        {"engine": "hf", "revision": None},
        {"engine": "hf", "revision": "None"},
        {"engine": "hf", "files": {"a": 1}},
        {"engine": "hf", "files": {"a": 2}},
        {"enginehf": ""},
        {"a": 1},
        {"a": "1"},
        {"a": b"1"},
    ]
    assert len({fingerprint(identity) for identity in identities}) == len(identities)
