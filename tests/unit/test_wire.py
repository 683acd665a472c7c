from __future__ import annotations

import struct
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lmpool.errors import JobFormatError, RowFormatError
from lmpool.wire import (
    ROW_HEADER_BYTES,
    Digester,
    Job,
    Notice,
    RefusedJob,
    bf16_to_f32,
    pack_job,
    pack_logprobs,
    pack_tokens,
    pack_values,
    read_notices,
    unpack_job,
    unpack_row,
)

FINGERPRINT = "0123456789abcdef" * 2
SCALE_BYTES = range(14, 19)
"""Where the scale is in a header that we write, with the byte that says that it is a float32."""


def token_bytes(*ids: int) -> bytes:
    return np.array(ids, dtype="<u4").tobytes()


# --- jobs --------------------------------------------------------------------------------------

INT64 = st.integers(-(2**63), 2**63 - 1)
LOGPROBS = st.tuples(
    st.just("logprobs"),
    st.fixed_dictionaries({"encoding": st.sampled_from(["f32", "bf16", "f16"])}),
)
SAMPLE = st.tuples(
    st.just("sample"),
    st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 10_000),
            "eos": st.lists(st.integers(0, 2**32 - 1), max_size=256),
            "temperature": st.floats(0, 100),
            "seed": INT64,
        }
    ),
)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    op, want = draw(LOGPROBS | SAMPLE)
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
    return Job(
        op=op,
        digest=draw(st.binary(min_size=16, max_size=16)),  # type: ignore[arg-type]
        tokens=token_bytes(*tokens),
        adapter=draw(st.none() | st.text(min_size=1, max_size=512)),
        want=want,
        deadline=draw(st.none() | INT64),
        sent=draw(INT64),
    )


@given(job=jobs())
def test_jobs_round_trip(job: Job) -> None:
    assert unpack_job(pack_job(job)) == job


def test_a_job_is_a_msgpack_map_of_the_design() -> None:
    job = Job("logprobs", b"d" * 16, token_bytes(1, 2), None, {"encoding": "f32"}, None, 5)  # type: ignore[arg-type]
    assert msgpack.unpackb(pack_job(job)) == {
        "v": 1,
        "op": "logprobs",
        "digest": b"d" * 16,
        "tokens": b"\1\0\0\0\2\0\0\0",
        "adapter": None,
        "want": {"encoding": "f32"},
        "deadline": None,
        "sent": 5,
    }
    assert job.token_ids().tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        job.token_ids()[0] = 3


def plain_job(**changed: Any) -> bytes:
    """A job's bytes with some fields replaced (`...` leaves one out)."""
    fields = {
        "v": 1,
        "op": "logprobs",
        "digest": b"d" * 16,
        "tokens": token_bytes(1, 2),
        "adapter": None,
        "want": {"encoding": "f32"},
        "deadline": None,
        "sent": 5,
        **changed,
    }
    packed: bytes = msgpack.packb({n: v for n, v in fields.items() if v is not ...})
    return packed


def sample_want(**changed: Any) -> dict[str, Any]:
    return {"max_tokens": 3, "eos": [0], "temperature": 1.0, "seed": 1, **changed}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"v": 2}, "job version 2: this worker reads version 1"),
        ({"v": ...}, "job version None"),
        ({"v": "1"}, "job version '1'"),
        ({"op": "embed"}, "unknown operation 'embed'"),
        ({"op": None}, "unknown operation None"),
        ({"op": ["logprobs"]}, "unknown operation"),
        ({"tokens": b""}, "tokens"),
        ({"tokens": b"\1\0\0"}, "tokens"),
        ({"tokens": [1, 2]}, "tokens"),
        ({"tokens": ...}, "tokens"),
        ({"want": {}}, "wants exactly"),
        ({"want": {"encoding": "f32", "more": 1}}, "wants exactly"),
        ({"want": None}, "wants exactly"),
        ({"want": {"encoding": 3}}, "encoding=3"),
        ({"want": {"encoding": "f64"}}, "unknown encoding 'f64'"),
        ({"want": {"encoding": "u32"}}, "unknown encoding 'u32'"),
        ({"adapter": ""}, "adapter"),
        ({"adapter": 3}, "adapter"),
        ({"adapter": "a" * 513}, "adapter"),
        ({"adapter": ...}, "adapter"),
        ({"deadline": 1.5}, "deadline"),
        ({"deadline": True}, "deadline"),
        ({"deadline": ...}, "deadline"),
        ({"sent": None}, "sent"),
        ({"op": "sample"}, "wants exactly"),
        ({"op": "sample", "want": sample_want(seed=1.0)}, "seed"),
        ({"op": "sample", "want": sample_want(max_tokens=True)}, "max_tokens"),
        ({"op": "sample", "want": sample_want(eos=[1.0])}, "eos"),
        ({"op": "sample", "want": sample_want(eos=[True])}, "eos"),
        ({"op": "sample", "want": sample_want(eos=[0] * 257)}, "eos"),
        ({"op": "sample", "want": sample_want(temperature="hot")}, "temperature"),
    ],
)
def test_a_job_with_a_digest_is_refused_with_its_reason(changed: Any, reason: str) -> None:
    with pytest.raises(RefusedJob, match=reason) as refused:
        unpack_job(plain_job(**changed))
    assert refused.value.digest == b"d" * 16


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb([]),
        msgpack.packb(None),
        msgpack.packb({}),
        plain_job(digest=...),
        plain_job(digest=b"d" * 15),
        plain_job(digest="d" * 16),
        plain_job() + b"\0",
        plain_job()[:-1],
        plain_job(adapter=msgpack.ExtType(5, b"x")),
        msgpack.packb({1: 2, "digest": b"d" * 16}),
        b"\x91" * 100_000,
        b"x" * ((8 << 20) + 1),
    ],
    ids=repr,
)
def test_what_has_no_digest_is_no_job(data: bytes) -> None:
    with pytest.raises(JobFormatError) as refused:
        unpack_job(data)
    assert not isinstance(refused.value, RefusedJob)
    assert str(refused.value)


@given(data=st.binary(max_size=200))
def test_random_bytes_are_no_job_and_do_no_harm(data: bytes) -> None:
    with pytest.raises(JobFormatError):
        unpack_job(data)


@given(data=st.data(), job=jobs())
def test_damaged_jobs_do_no_harm(data: st.DataObject, job: Job) -> None:
    packed = bytearray(pack_job(job))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        unpack_job(bytes(packed))
    except JobFormatError:
        pass


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | INT64
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=20)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4))
    | st.builds(msgpack.Timestamp, st.integers(0, 2**31)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(
    changed=st.dictionaries(
        st.sampled_from(["v", "op", "tokens", "adapter", "want", "deadline", "sent", "extra"]),
        ANYTHING,
    )
)
def test_any_value_in_any_field_is_read_or_refused(changed: dict[str, Any]) -> None:
    try:
        job = unpack_job(plain_job(**changed))
    except JobFormatError:
        return
    assert len(job.tokens) % 4 == 0
    assert isinstance(job.adapter, (str, type(None)))


# --- digests -----------------------------------------------------------------------------------


def test_everything_that_changes_the_result_changes_the_digest() -> None:
    digests = set()
    wants = [{"encoding": e} for e in ("f32", "bf16", "f16")]
    samples = [
        sample_want(),
        sample_want(seed=2),
        sample_want(max_tokens=4),
        sample_want(eos=[1]),
        sample_want(eos=[]),
        sample_want(temperature=0.5),
    ]
    count = 0
    for fingerprint in (FINGERPRINT, FINGERPRINT[::-1]):
        digester = Digester(fingerprint)
        for tokens in (token_bytes(1), token_bytes(2), token_bytes(1, 2), token_bytes(2, 1)):
            for adapter in (None, "a@1", "a@2"):
                for op, want in [("logprobs", w) for w in wants] + [("sample", w) for w in samples]:
                    digests.add(digester.job(op, tokens, want, adapter))
                    count += 1
    assert len(digests) == count
    assert {len(digest) for digest in digests} == {16}


def test_two_names_of_one_adapter_share_results() -> None:
    digester = Digester(FINGERPRINT)
    assert digester.digest(Row("f32"), token_bytes(1), "a@77") == digester.digest(
        Row("f32"), token_bytes(1), "b@77"
    )
    assert digester.digest(Row("f32"), token_bytes(1), "a@b@77") == digester.digest(
        Row("f32"), token_bytes(1), "a@77"
    )
    # An adapter without a fingerprint is not the base model.
    assert digester.digest(Row("f32"), token_bytes(1), "a@") != digester.logprobs(
        token_bytes(1), "f32"
    )


@given(
    first=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6),
    second=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6),
)
def test_prompts_have_the_same_digest_only_if_they_are_the_same(
    first: list[int], second: list[int]
) -> None:
    digester = Digester(FINGERPRINT)
    same = digester.digest(Row("f32"), token_bytes(*first)) == digester.logprobs(
        token_bytes(*second), "f32"
    )
    assert same == (first == second)


def test_bytes_do_not_move_between_one_token_and_the_next() -> None:
    # The same digits, grouped in other ways.
    prompts = [[1, 11], [11, 1], [111], [1, 1, 1], [0, 1], [1, 0], [1], [256], [1, 256], [257]]
    digester = Digester(FINGERPRINT)
    digests = {digester.digest(Row("f32"), token_bytes(*prompt)) for prompt in prompts}
    assert len(digests) == len(prompts)


def test_tokens_cannot_be_taken_for_what_precedes_them() -> None:
    digester = Digester(FINGERPRINT)
    head = msgpack.packb([FINGERPRINT, None, "logprobs", [["encoding", "f32"]]])
    padded = head + b"\0" * (-len(head) % 4)
    assert digester.digest(Row("f32"), padded + token_bytes(1)) != digester.logprobs(
        token_bytes(1), "f32"
    )


def test_digests_are_the_same_in_every_release() -> None:
    # A change here makes every cached result unreachable: raise the fingerprint instead.
    digester = Digester(FINGERPRINT)
    assert (
        digester.digest(Row("f32"), token_bytes(1, 5, 9)).hex()
        == "446f9043f73ccdfdde9ef0ef8b73fc3d"
    )
    assert (
        digester.job("sample", token_bytes(7), sample_want(), "x@1f").hex()
        == "bc60e662b28cf4fe24356184c5fb1b54"
    )


@given(tokens=st.binary(min_size=4, max_size=40), adapters=st.lists(st.text(max_size=3)))
def test_what_a_digester_keeps_changes_no_digest(tokens: bytes, adapters: list[str]) -> None:
    used = Digester(FINGERPRINT)
    for adapter in adapters:
        used.logprobs(b"other", "bf16", adapter)
    for adapter in (None, "a@1"):
        assert used.job("logprobs", tokens, {"encoding": "bf16"}, adapter) == Digester(
            FINGERPRINT
        ).digest(Row("bf16"), tokens, adapter)


# --- rows --------------------------------------------------------------------------------------

FLOATS = st.floats(width=32, allow_nan=False)
F32_ROWS = hnp.arrays(np.float32, st.integers(1, 200), elements=FLOATS)
BITS = hnp.arrays(np.uint16, st.integers(1, 200))


def log_softmax(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    wide = values.astype(np.float64)
    wide -= wide.max()
    result: npt.NDArray[np.float32] = (wide - np.log(np.exp(wide).sum())).astype(np.float32)
    return result


@given(row=F32_ROWS)
def test_f32_rows_round_trip_exactly_and_without_a_copy(row: npt.NDArray[np.float32]) -> None:
    data = pack_logprobs(row)
    found = unpack_row(data, row.size)
    values = found.logprobs()
    assert values.dtype == np.float32
    assert values.tobytes() == row.tobytes()
    assert np.shares_memory(values, np.frombuffer(data, np.uint8))
    assert not values.flags.writeable


@given(bits=BITS, scale=st.floats(-100, 100, width=32))
def test_bf16_rows_are_the_logits_less_their_logsumexp(
    bits: npt.NDArray[np.uint16], scale: float
) -> None:
    row = unpack_row(pack_values("bf16", bits, scale), bits.size)
    assert row.data.tobytes() == bits.tobytes()
    with np.errstate(all="ignore"):
        expected = (bits.astype(np.uint32) << 16).view(np.float32) - np.float32(scale)
        found = row.logprobs()
    assert found.dtype == np.float32
    assert np.array_equal(found, expected, equal_nan=True)
    assert found.flags.writeable  # a fresh array, the caller's own


def test_bf16_is_what_torch_means_by_it() -> None:
    torch = pytest.importorskip("torch")
    bits = np.arange(2**16, dtype=np.uint16)
    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(bf16_to_f32(bits), expected, equal_nan=True)
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = float(torch.logsumexp(logits.float(), 0))
    data = pack_values("bf16", logits.view(torch.int16).numpy().view(np.uint16), scale)
    assert torch.allclose(
        torch.from_numpy(unpack_row(data).logprobs()),
        torch.log_softmax(logits.float(), 0),
        atol=1e-6,
    )


@given(values=hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-60, 60, width=32)))
def test_f16_rows_are_near_and_normalized(values: npt.NDArray[np.float32]) -> None:
    row = log_softmax(values)
    found = unpack_row(pack_logprobs(row, "f16"), row.size).logprobs()
    assert found.dtype == np.float32
    assert np.allclose(found, row, rtol=2e-3, atol=2e-3)
    assert abs(np.exp(found.astype(np.float64)).sum() - 1) < 1e-5


def test_f16_rows_may_hold_impossible_tokens() -> None:
    row = np.array([0.0, -np.inf, -1e9], np.float32)
    found = unpack_row(pack_logprobs(row, "f16")).logprobs()
    assert found.tolist() == [0.0, -np.inf, -np.inf]


@given(ids=st.lists(st.integers(0, 2**32 - 1), max_size=100))
def test_sampled_tokens_round_trip(ids: list[int]) -> None:
    row = unpack_row(pack_tokens(np.array(ids, dtype=np.uint32)), 256)
    assert row.token_ids() == ids
    with pytest.raises(RowFormatError, match="sampled tokens"):
        row.logprobs()


def test_a_row_is_no_list_of_sampled_tokens() -> None:
    with pytest.raises(RowFormatError, match="f32"):
        unpack_row(pack_logprobs(np.zeros(3, np.float32))).token_ids()


def written(encoding: str, size: int = 7) -> bytes:
    if encoding == "f32":
        return pack_logprobs(log_softmax(np.arange(size)))
    if encoding == "f16":
        return pack_logprobs(log_softmax(np.arange(size)), "f16")
    if encoding == "bf16":
        return pack_values("bf16", np.arange(16000, 16000 + size, dtype=np.uint16), 2.5)
    return pack_tokens(np.arange(size, dtype=np.uint32))


ENCODINGS = ["f32", "f16", "bf16", "u32"]
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "u32": 4}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", [1, 7, 300, 50_000])
def test_the_header_is_small_aligned_and_msgpack(encoding: str, size: int) -> None:
    data = written(encoding, size)
    assert ROW_HEADER_BYTES == 24
    assert len(data) == 24 + size * ITEM_BYTES[encoding]
    version, name, found, scale, numbers = msgpack.unpackb(data)
    assert (version, name, found) == (1, encoding, size)
    assert data[24:] == numbers
    assert scale == unpack_row(data).scale
    assert struct.unpack(">f", data[SCALE_BYTES.start + 1 : SCALE_BYTES.stop]) == (scale,)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", [0, 1, 255, 256, 70_000])
def test_rows_that_others_wrote_are_read(encoding: str, size: int) -> None:
    dtypes = {"f32": "<f4", "f16": "<f2", "bf16": "<u2", "u32": "<u4"}
    numbers = (np.arange(size) % 1000).astype(dtypes[encoding])
    for scale in (0.0, 0, 1.5):
        row = unpack_row(msgpack.packb([1, encoding, size, scale, numbers.tobytes()]), size)
        assert (row.encoding, row.size, row.scale) == (encoding, size, scale)
        assert row.data.tobytes() == numbers.tobytes()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_flipped_bit_in_the_header_is_refused_or_changes_nothing(encoding: str) -> None:
    data = written(encoding)
    whole = unpack_row(data, 7)
    accepted = 0
    for bit in range(ROW_HEADER_BYTES * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            row = unpack_row(bytes(flipped), 7)
        except RowFormatError:
            continue
        accepted += 1
        assert (row.encoding, row.size) == (encoding, 7)
        assert row.data.tobytes() == whole.data.tobytes()
        if bit // 8 not in SCALE_BYTES:
            assert row.scale == whole.scale
    assert accepted < 64


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_cut_and_overlong_rows_are_refused(encoding: str) -> None:
    data = written(encoding)
    for length in range(len(data)):
        with pytest.raises(RowFormatError):
            unpack_row(data[:length], 7)
    for more in (b"\0", b"\0" * 4, data):
        with pytest.raises(RowFormatError, match="cut short or overlong"):
            unpack_row(data + more, 7)


@pytest.mark.parametrize("encoding", ["f32", "f16", "bf16"])
def test_rows_of_another_size_are_refused(encoding: str) -> None:
    with pytest.raises(RowFormatError, match="7 entries where 8 were expected"):
        unpack_row(written(encoding), 8)
    unpack_row(written(encoding))


@pytest.mark.parametrize("version", [0, 2, 300, -1, "1", None, True, [1], 1.0])
def test_another_version_is_refused_with_the_remedy(version: Any) -> None:
    data = msgpack.packb([version, "f32", 1, 0.0, b"\0" * 4])
    with pytest.raises(RowFormatError, match=r"version .*: this lmpool reads version 1; install"):
        unpack_row(data)


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [1],
        [1, "f32", 1, 0.0],
        [1, "f32", 1, 0.0, b"\0" * 4, 0],
        [1, "f64", 1, 0.0, b"\0" * 8],
        [1, b"f32", 1, 0.0, b"\0" * 4],
        [1, ["f32"], 1, 0.0, b"\0" * 4],
        [1, "f32", 1.0, 0.0, b"\0" * 4],
        [1, "f32", True, 0.0, b"\0" * 4],
        [1, "f32", -1, 0.0, b""],
        [1, "f32", 1, "0", b"\0" * 4],
        [1, "f32", 1, True, b"\0" * 4],
        [1, "f32", 1, 0.0, "abcd"],
        [1, "f32", 1, 0.0, [0.0]],
        [1, "f32", 1, 0.0, None],
        [1, "f32", 1, msgpack.ExtType(1, b"x"), b"\0" * 4],
        {"v": 1},
        "a row",
    ],
    ids=repr,
)
def test_what_is_no_row_is_refused(fields: Any) -> None:
    with pytest.raises(RowFormatError):
        unpack_row(msgpack.packb(fields))


@given(data=st.binary(max_size=120), size=st.none() | st.integers(1, 30))
def test_random_bytes_are_no_row_and_do_no_harm(data: bytes, size: int | None) -> None:
    with pytest.raises(RowFormatError):
        unpack_row(data, size)


@given(fields=st.lists(ANYTHING, max_size=4), size=st.none() | st.integers(0, 30))
def test_any_fields_behind_the_version_do_no_harm(fields: list[Any], size: int | None) -> None:
    try:
        unpack_row(msgpack.packb([1, *fields]), size)
    except RowFormatError:
        pass


@given(data=st.data(), encoding=st.sampled_from(ENCODINGS))
def test_damaged_rows_do_no_harm(data: st.DataObject, encoding: str) -> None:
    packed = bytearray(written(encoding))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        row = unpack_row(bytes(packed), 7)
    except RowFormatError:
        return
    assert row.data.size == row.size


# --- notices -----------------------------------------------------------------------------------

FIRST, SECOND = b"a" * 32, b"b" * 32


def test_notices() -> None:
    assert read_notices({b"ok": FIRST + SECOND}) == [Notice(FIRST, "ok"), Notice(SECOND, "ok")]
    assert read_notices({b"digest": FIRST, b"status": b"failed", b"error": "zu groß".encode()}) == [
        Notice(FIRST, "failed", "zu groß")
    ]
    assert read_notices({b"digest": FIRST, b"status": b"expired"}) == [Notice(FIRST, "expired")]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"hello": b"1"},
        {b"bye": b"1"},
        {b"ok": b""},
        {b"ok": b"short"},
        {b"digest": FIRST},
        {b"digest": b"short", b"status": b"failed"},
        {b"status": b"failed"},
    ],
    ids=repr,
)
def test_what_is_no_notice_gives_none(fields: dict[bytes, bytes]) -> None:
    assert read_notices(fields) == []


def test_a_notice_that_was_cut_gives_what_is_whole() -> None:
    assert read_notices({b"ok": FIRST + b"b" * 31}) == [Notice(FIRST, "ok")]


@given(
    fields=st.dictionaries(st.sampled_from([b"ok", b"digest", b"status", b"error"]), st.binary())
)
def test_random_notices_do_no_harm(fields: dict[bytes, bytes]) -> None:
    for notice in read_notices(fields):
        assert len(notice.digest) == 32


@pytest.mark.parametrize("depth", [10, 400, 1000, 5000])
@pytest.mark.parametrize("field", ["v", "op", "want"])
def test_nesting_and_size_of_a_job_do_no_harm(field: str, depth: int) -> None:
    job = {"v": 1, "digest": b"0" * 16, "op": "logprobs", "want": {}}
    packed = msgpack.packb({**job, field: "XX"}).replace(b"\xa2XX", b"\x91" * depth + b"\x01")
    with pytest.raises(JobFormatError) as refused:
        unpack_job(packed)
    assert len(str(refused.value)) < 300
    with pytest.raises(JobFormatError) as refused:
        unpack_job(msgpack.packb({**job, field: "x" * 1_000_000}))
    assert len(str(refused.value)) < 300
