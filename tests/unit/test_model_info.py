from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.errors import WireError
from lmpool.keys import PROTOCOL, PoolKeys
from lmpool.model_info import LAYOUTS_MOST, Layout, ModelInfo, fingerprint

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
LAYOUTS = st.builds(Layout, st.text(max_size=16), st.integers(1, 64), st.integers(1, 1024))


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
        protocols=tuple({PROTOCOL, *draw(st.lists(st.integers(0, 9), max_size=3))}),
        shards=draw(st.integers(1, 64)),
        lanes=draw(st.integers(1, 1024)),
        max_backlog=draw(POSITIVE),
        client_backlog=draw(POSITIVE),
        result_ttl_ms=draw(POSITIVE),
        layout=draw(st.text(max_size=16)),
        layouts=tuple(draw(st.lists(LAYOUTS, max_size=LAYOUTS_MOST))),
    )


@given(info=infos())
def test_model_info_round_trips(info: ModelInfo) -> None:
    assert ModelInfo.unpack(info.pack()) == info


def packed(**changed: Any) -> bytes:
    fields = {"v": 2, **asdict(INFO), **changed}
    data: bytes = msgpack.packb({n: v for n, v in fields.items() if v is not ...})
    return data


def test_fields_of_a_later_release_are_ignored() -> None:
    assert ModelInfo.unpack(packed(colour="blue", more=[1, {"a": None}])) == INFO


def test_fields_with_defaults_may_be_missing() -> None:
    left_out = dict.fromkeys(("shards", "lanes", "max_backlog", "eos_token_ids", "protocols"), ...)
    expected = replace(INFO, shards=1, lanes=1, max_backlog=100_000, eos_token_ids=())
    assert ModelInfo.unpack(packed(**left_out)) == expected
    for name in left_out:
        ModelInfo.unpack(packed(**{name: ...}))


def test_key_names_carry_eight_digits_of_the_fingerprint() -> None:
    assert INFO.fingerprint8 == "01234567"


def test_the_shards_of_a_pool_have_its_lanes() -> None:
    info = replace(INFO, shards=2, lanes=3)
    shards = info.shard_keys(PoolKeys("p"))
    assert shards == PoolKeys("p").shards("01234567", 2, 3)
    for number, shard in enumerate(shards):
        assert shard.prefix.startswith(f"{{lmpool:p:01234567:{PROTOCOL}:{number}.")
    assert [len(shard.streams) for shard in shards] == [6, 6]


def test_layouts_are_told_apart_by_their_names() -> None:
    first = replace(INFO, shards=1, lanes=2)
    second = first.moved_to(2, 2)
    third = second.moved_to(1, 2)
    assert (third.shards, third.lanes) == (1, 2)
    assert len({info.mark() for info in (first, second, third)}) == 3
    assert third.layouts == (Layout("", 1, 2), Layout(second.layout, 2, 2))
    assert third.follows(first)
    assert third.follows(second)
    assert not second.follows(third)
    assert not second.follows(first.moved_to(2, 2))
    assert first.laid_as(third) == third
    # A worker of a release that knows of none says what it serves as one that was never moved.
    assert replace(first, layouts=third.layouts).mark() == first.mark()


def test_what_a_pool_left_are_shards_and_lanes_that_it_has_no_more() -> None:
    keys = PoolKeys("p")
    found = replace(INFO, shards=1, lanes=64)
    for shards, lanes in ((3, 8), (1, 2), (3, 4), (1, 16)):
        found = found.moved_to(shards, lanes)
    left = {(shard.prefix, shard.lanes) for shard in found.left_shards(keys)}
    (own,), gone = found.shard_keys(keys), keys.shards(found.fingerprint8, 3)
    assert left == {(own.prefix, 64), *((shard.prefix, 8) for shard in gone)}
    for _ in range(2 * LAYOUTS_MOST):
        found = found.moved_to(1, 16)
    assert len(found.layouts) == LAYOUTS_MOST
    assert found.left_shards(keys) == ()


def test_how_it_lies_in_words() -> None:
    assert replace(INFO, shards=1, lanes=1).in_words() == "1 shard of 1 lane"
    assert replace(INFO, shards=3, lanes=64).in_words() == "3 shards of 64 lanes"


def test_a_pool_in_several_protocols_serves_who_speaks_one_of_them() -> None:
    assert ModelInfo.unpack(packed(protocols=[1, 2, PROTOCOL])).protocols == (1, 2, PROTOCOL)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (packed(v=1), "version 1: this .* version 2; upgrade the lmpool of the pool's workers"),
        (packed(v=3), "version 3: this .* version 2; upgrade this lmpool"),
        (packed(v="1"), "version '1': .*; upgrade this lmpool"),
        (packed(v=...), "version None"),
        (packed(protocols=[]), "served in protocol .*upgrade the lmpool of the pool's workers"),
        (
            packed(protocols=[1]),
            f"served in protocol 1, .* speaks {PROTOCOL}: upgrade the lmpool of the pool",
        ),
        (
            packed(protocols=[PROTOCOL + 1, PROTOCOL + 2]),
            f"served in protocol {PROTOCOL + 1}, {PROTOCOL + 2}, .*: upgrade this lmpool",
        ),
        (packed(protocols=["2"]), "protocols=.*integers expected"),
        (packed(protocols=[True]), "protocols=.*integers expected"),
        (packed(protocols=2), "incomplete"),
        (packed(eos_token_ids=[1.0]), "eos_token_ids=.*integers expected"),
        (packed(vocab_size=...), "incomplete.*vocab_size"),
        (packed(vocab_size=0), "vocab_size=0: a positive integer"),
        (packed(vocab_size="256"), "vocab_size='256'"),
        (packed(vocab_size=True), "vocab_size=True"),
        (packed(vocab_size=None), "vocab_size=None"),
        (packed(max_prompt_tokens=-1), "max_prompt_tokens=-1"),
        (packed(shards=0), "shards=0"),
        (packed(shards=1.0), "shards=1.0"),
        (packed(shards=10**12), "shards=1000000000000: at most 64"),
        (packed(lanes=0), "lanes=0"),
        (packed(lanes=1025), "lanes=1025: at most 1024"),
        (packed(client_backlog=-1), "client_backlog=-1"),
        (packed(max_backlog=0), "max_backlog=0"),
        (packed(result_ttl_ms=0), "result_ttl_ms=0"),
        (packed(layout=3), "layout=3: a string"),
        (packed(layouts=3), "incomplete"),
        (packed(layouts=[["", 1]]), "incomplete"),
        (packed(layouts=[["", 0, 1]]), "layouts=.*former ones expected"),
        (packed(layouts=[["", 65, 1]]), "layouts=.*former ones expected"),
        (packed(layouts=[["", 1, 1025]]), "layouts=.*former ones expected"),
        (packed(layouts=[["", 1, True]]), "layouts=.*former ones expected"),
        (packed(layouts=[[0, 1, 1]]), "layouts=.*former ones expected"),
        (packed(layouts=[["", 1, 1]] * 9), "layouts=.*former ones expected"),
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


@pytest.mark.parametrize("depth", [10, 400, 1000])
@pytest.mark.parametrize("field", ["v", "model", "vocab_size", "eos_token_ids", "encoding"])
def test_nesting_and_size_do_no_harm(field: str, depth: int) -> None:
    nested = packed(**{field: "XX"}).replace(b"\xa2XX", b"\x91" * depth + b"\x01")
    for data in (nested, packed(**{field: ["x" * 50_000]})):
        with pytest.raises(WireError) as refused:
            ModelInfo.unpack(data)
        assert len(str(refused.value)) < 300


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
