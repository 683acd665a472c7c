"""The row codec: what is stored, and what is refused as no row."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lmpool.errors import RowFormatError
from lmpool.rows import (
    ROW_HEADER_BYTES,
    EncodedRow,
    bf16_to_f32,
    pack_logprobs,
    pack_values,
    unpack_f32_rows,
    unpack_row,
)
from tests.support.strategies import ANYTHING

SCALE_BYTES = range(14, 19)
"""Where the scale is in a header that we write, with the byte that says that it is a float32."""

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
    data = pack_logprobs(row).joined()
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
    row = unpack_row(pack_values("bf16", bits, scale).joined(), bits.size)
    assert row.data.tobytes() == bits.tobytes()
    with np.errstate(all="ignore"):
        expected = (bits.astype(np.uint32) << 16).view(np.float32) - np.float32(scale)
        found = row.logprobs()
    assert found.dtype == np.float32
    assert np.array_equal(found, expected, equal_nan=True)
    assert found.flags.writeable  # a fresh array, the caller's own


@given(
    bits=st.one_of(BITS, st.just(np.arange(2**16, dtype=np.uint16))),
    encoding=st.sampled_from(["bf16", "f16"]),
    scale=st.floats(width=32, allow_nan=False),
)
def test_rows_are_decoded_bit_for_bit_into_given_memory_and_into_their_own(
    bits: npt.NDArray[np.uint16], encoding: Any, scale: float
) -> None:
    """Infinities, NaN and all: each of the numbers that there are in 16 bits."""
    row = unpack_row(pack_values(encoding, bits, scale).joined(), bits.size)
    with np.errstate(all="ignore"):
        if encoding == "bf16":
            wide = (bits.astype(np.uint32) << 16).view(np.float32)
        else:
            wide = bits.view(np.float16).astype(np.float32)
        expected = (wide - np.float32(scale)).tobytes()
        block = np.full((3, bits.size), 5, np.float32)
        row.logprobs_into(block[1])
        assert block[1].tobytes() == row.logprobs().tobytes() == expected
    assert (block[::2] == 5).all()


@pytest.mark.parametrize("encoding", ["bf16", "f16"])
def test_numbers_of_another_byte_order_are_read_as_numbers(encoding: Any) -> None:
    """What is stored is little-endian; where that is not the machine's own, it is the other."""
    row = unpack_row(written(encoding, 300))
    swapped = EncodedRow(encoding, 300, row.scale, row.data.astype(row.data.dtype.newbyteorder()))
    assert swapped.logprobs().tobytes() == row.logprobs().tobytes()
    out = np.empty(300, np.float32)
    swapped.logprobs_into(out)
    assert out.tobytes() == row.logprobs().tobytes()


@given(row=F32_ROWS)
def test_f32_rows_are_copied_into_given_memory(row: npt.NDArray[np.float32]) -> None:
    out = np.full(row.size, 5, np.float32)
    unpack_row(pack_logprobs(row).joined(), row.size).logprobs_into(out)
    assert out.tobytes() == row.tobytes()


@pytest.mark.parametrize("encoding", ["f32", "f16", "bf16"])
def test_nothing_is_made_on_the_way_into_given_memory(encoding: str) -> None:
    row, out = unpack_row(written(encoding, 50_000)), np.empty(50_000, np.float32)
    with np.errstate(invalid="ignore"):  # some of so many bits are of NaN
        tracemalloc.start()
        try:
            row.logprobs_into(out)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert most < 50_000


def test_bf16_is_what_torch_means_by_it() -> None:
    torch = pytest.importorskip("torch")
    bits = np.arange(2**16, dtype=np.uint16)
    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(bf16_to_f32(bits), expected, equal_nan=True)
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = float(torch.logsumexp(logits.float(), 0))
    data = pack_values("bf16", logits.view(torch.int16).numpy().view(np.uint16), scale).joined()
    assert torch.allclose(
        torch.from_numpy(unpack_row(data).logprobs()),
        torch.log_softmax(logits.float(), 0),
        atol=1e-6,
    )


@given(values=hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-60, 60, width=32)))
def test_f16_rows_are_near_and_normalized(values: npt.NDArray[np.float32]) -> None:
    row = log_softmax(values)
    found = unpack_row(pack_logprobs(row, "f16").joined(), row.size).logprobs()
    assert found.dtype == np.float32
    assert np.allclose(found, row, rtol=2e-3, atol=2e-3)
    assert abs(np.exp(found.astype(np.float64)).sum() - 1) < 1e-5


def test_f16_rows_may_hold_impossible_tokens() -> None:
    row = np.array([0.0, -np.inf, -1e9], np.float32)
    found = unpack_row(pack_logprobs(row, "f16").joined()).logprobs()
    assert found.tolist() == [0.0, -np.inf, -np.inf]


def written(encoding: str, size: int = 7) -> bytes:
    if encoding == "f32":
        return pack_logprobs(log_softmax(np.arange(size))).joined()
    if encoding == "f16":
        return pack_logprobs(log_softmax(np.arange(size)), "f16").joined()
    return pack_values("bf16", np.arange(16000, 16000 + size).astype(np.uint16), 2.5).joined()


ENCODINGS = ["f32", "f16", "bf16"]
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


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
    dtypes = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}
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


@pytest.mark.parametrize("encoding", ENCODINGS)
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
        [1, "u32", 1, 0.0, b"\0" * 4],
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


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 50)), elements=FLOATS))
def test_rows_in_f32_are_read_together_as_alone(values: npt.NDArray[np.float32]) -> None:
    stored = [pack_logprobs(row).joined() for row in values]
    for given_as in (stored, list(map(memoryview, stored))):
        rows = unpack_f32_rows(given_as, values.shape[1])
        assert rows is not None
        for row, data in zip(rows, stored, strict=True):
            alone = unpack_row(data, values.shape[1])
            assert (row.encoding, row.size, row.scale) == (alone.encoding, alone.size, alone.scale)
            assert row.data.tobytes() == alone.data.tobytes()
            assert not row.data.flags.writeable


@pytest.mark.parametrize(
    "other",
    [
        b"",
        pack_logprobs(np.zeros(3, np.float32)).joined(),
        pack_logprobs(np.zeros(4, np.float32)).joined()[:-1],
        pack_logprobs(np.zeros(4, np.float32)).joined() + b"0",
        pack_logprobs(np.zeros(8, np.float32), "f16").joined(),
        b"0" + pack_logprobs(np.zeros(4, np.float32)).joined()[1:],
        pack_logprobs(np.full(4, np.nan, np.float32)).joined(),
    ],
)
def test_rows_of_which_one_is_another_are_not_read_together(other: bytes) -> None:
    usual = pack_logprobs(np.zeros(4, np.float32)).joined()
    assert unpack_f32_rows([usual, usual], 4) is not None
    assert unpack_f32_rows([usual, other], 4) is None
