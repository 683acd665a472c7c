"""Rows as they are stored: a small fixed header, then raw little-endian numbers.

Written once by a worker, read by every client without a copy of its numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from lmpool.errors import RowFormatError
from lmpool.model_info import Encoding

__all__ = [
    "EncodedRow", "PackedRow", "bf16_to_f32", "pack_logprobs", "pack_values", "unpack_f32_rows",
    "unpack_row",
]  # fmt: skip

ROW_VERSION: Final = 1

ENTRY_BYTES: Final[dict[Encoding, int]] = {"f32": 4, "bf16": 2, "f16": 2}
"""Bytes of one entry, by encoding."""

_MAX_HEADER: Final = 64


def refuse_extension(code: int, _data: bytes) -> Any:
    """For msgpack's `ext_hook`: nothing of ours has extension types."""
    raise ValueError(f"extension type {code}")


LARGE: Final = 16 << 10
"""Bytes from which a value is sent from where it is, instead of being copied beside others."""
ROW_HEADER_BYTES: Final = 24
"""Length of the header we write. Its msgpack forms are chosen so that the numbers after it are
aligned to their size, and a row can be used in place."""


# Nobody changes one; but there is one for each row, and one that is frozen takes longer to make.
@dataclass(slots=True, eq=False)
class EncodedRow:
    """A decoded header and the numbers behind it, not copied: ``float32(data) - scale``."""

    encoding: Encoding
    size: int
    scale: float
    data: npt.NDArray[Any] = field(repr=False)

    def logprobs(self) -> npt.NDArray[np.float32]:
        """Log-probabilities, float32 [vocab_size], normalized.

        Read-only and without a copy for ``f32``; a fresh array otherwise.
        """
        if self.encoding == "f32":
            return self.data
        bf16 = self.encoding == "bf16"
        values = bf16_to_f32(self.data) if bf16 else self.data.astype(np.float32)
        values -= np.float32(self.scale)
        return values

    def logprobs_into(self, out: npt.NDArray[np.float32]) -> None:
        """Write them to `out`, float32 [vocab_size], C-contiguous."""
        # Nothing is made on the way: memory that is as large costs more than the arithmetic.
        if self.encoding == "bf16":
            wide = out.view(np.uint32)
            wide[:] = self.data
            wide <<= 16
        else:
            out[:] = self.data
        if self.encoding != "f32":
            out -= np.float32(self.scale)

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return self.data.nbytes

    def copy(self) -> EncodedRow:
        """The same in memory of its own, read-only."""
        data = np.frombuffer(self.data.tobytes(), self.data.dtype)
        return EncodedRow(self.encoding, self.size, self.scale, data)


def bf16_to_f32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The float32 values of bfloat16 bits: uint16 [n] -> float32 [n], exact."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


_HEADERS: Final[dict[str, bytes]] = {
    # array16 of 5, version, encoding: 9 bytes in either spelling.
    "f32": b"\xdc\x00\x05\xcc\x01\xa3f32",
    "f16": b"\xdc\x00\x05\xcc\x01\xa3f16",
    "bf16": b"\xdc\x00\x05\x01\xa4bf16",
}
_NUMBERS: Final = struct.Struct(">BIBfBI")  # uint32 size, float32 scale, bin32 length


@cache
def f32_header(size: int) -> bytes:
    """What stands before the numbers of a row in f32 of so many entries, as we write it."""
    return _HEADERS["f32"] + _NUMBERS.pack(0xCE, size, 0xCA, 0.0, 0xC6, 4 * size)


class PackedRow(NamedTuple):
    """A row as it is stored, in two pieces: its numbers stay where they are.

    `numbers` are bytes, of memory that nobody writes again.
    """

    header: bytes
    numbers: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return len(self.header) + len(self.numbers)

    def joined(self) -> bytes:
        """Both in one piece, which holds on to no array."""
        return b"".join(self)


def packed_f32(row: npt.NDArray[Any]) -> PackedRow:
    """``pack_logprobs(row)`` of a C-contiguous row of ``<f4``, in fewer steps."""
    return PackedRow(f32_header(row.size), row.data.cast("B"))


def joined_f32(row: npt.NDArray[Any]) -> bytes:
    """``pack_logprobs(row).joined()`` of a row of ``<f4``, in fewer steps: for small rows."""
    return f32_header(row.size) + row.tobytes()


def pack_values(encoding: Encoding, values: npt.NDArray[Any], scale: float = 0.0) -> PackedRow:
    """A row of raw numbers: `values` is [size], of the encoding's dtype, C-contiguous."""
    header = _HEADERS[encoding] + _NUMBERS.pack(0xCE, values.size, 0xCA, scale, 0xC6, values.nbytes)
    return PackedRow(header, values.data.cast("B"))


def pack_logprobs(
    row: npt.NDArray[np.float32], encoding: Literal["f32", "f16"] = "f32"
) -> PackedRow:
    """Log-probabilities, float32 [vocab_size], as a row. ``f16`` loses precision."""
    if encoding == "f32":
        return packed_f32(np.ascontiguousarray(row, dtype="<f4"))
    with np.errstate(over="ignore"):  # what is below its range is impossible anyway: -inf
        narrow = np.ascontiguousarray(row, dtype="<f2")
    # Rounding moves the sum: the scale puts the row back on exp sums to 1.
    return pack_values("f16", narrow, _logsumexp(narrow.astype(np.float32)))


def _logsumexp(values: npt.NDArray[np.float32]) -> float:
    top = float(values.max())
    return top + float(np.log(np.exp(values - np.float32(top), dtype=np.float32).sum(dtype="f8")))


_DTYPES: Final[dict[Encoding, str]] = {"f32": "<f4", "bf16": "<u2", "f16": "<f2"}
_F32: Final = np.dtype("<f4")


def unpack_row(data: bytes | memoryview | PackedRow, size: int | None = None) -> EncodedRow:
    """Read a row without copying its numbers; `size` is the vocabulary size it must have.

    Raises `RowFormatError` for another version, a cut or overlong row, or one of another size.
    """
    if isinstance(data, PackedRow):
        header, numbers = data
        if size is not None and header == f32_header(size) and len(numbers) == 4 * size:
            return EncodedRow("f32", size, 0.0, np.frombuffer(numbers, _F32))
        data = data.joined()
    # Nearly every row has the header we write: one comparison instead of eight steps.
    whole = size is not None and len(data) == ROW_HEADER_BYTES + 4 * size
    if size is not None and whole and data[:ROW_HEADER_BYTES] == f32_header(size):
        return EncodedRow("f32", size, 0.0, np.frombuffer(data, _F32, size, ROW_HEADER_BYTES))
    unpacker = msgpack.Unpacker(max_buffer_size=_MAX_HEADER, ext_hook=refuse_extension)
    unpacker.feed(data[:_MAX_HEADER])
    try:
        fields = unpacker.read_array_header()
        version = unpacker.unpack() if fields else None
        if type(version) is not int or version != ROW_VERSION:
            raise RowFormatError(
                f"a row of version {version!r}: this lmpool reads version {ROW_VERSION}; "
                "install the lmpool that the pool's workers run"
            )
        encoding, found, scale = unpacker.unpack(), unpacker.unpack(), unpacker.unpack()
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        if isinstance(error, RowFormatError):
            raise
        raise RowFormatError(f"not a row: {error or type(error).__name__}") from None
    if fields != 5 or not isinstance(encoding, str) or encoding not in _DTYPES:
        raise RowFormatError(f"a row of {fields} fields in encoding {encoding!r:.40}")
    if type(found) is not int or (size is not None and found != size):
        raise RowFormatError(f"a row of {found!r:.40} entries where {size} were expected")
    if type(scale) not in (float, int):
        raise RowFormatError(f"a row with scale {scale!r:.40}")
    start, length = _bin_header(data, unpacker.tell())
    dtype = np.dtype(_DTYPES[encoding])
    _check_length(data, start, found, encoding, dtype)
    if length != found * dtype.itemsize:
        raise RowFormatError(f"a row of {found} entries that says to take {length} bytes")
    values = np.frombuffer(data, dtype=dtype, count=found, offset=start)
    return EncodedRow(encoding, found, float(scale), values)


def unpack_f32_rows(
    stored: Sequence[bytes | memoryview | PackedRow], size: int
) -> list[EncodedRow] | None:
    """What `unpack_row` reads of rows in f32, in fewer steps; None where one is another, or of NaN.

    Normalizing spreads one NaN to all entries: the first one tells.
    """
    header, length = f32_header(size), ROW_HEADER_BYTES + 4 * size
    read, rows = np.frombuffer, []
    for data in stored:
        if isinstance(data, PackedRow):
            if data.header != header or data.nbytes != length:
                return None
            values = read(data.numbers, _F32)
        elif len(data) != length or data[:ROW_HEADER_BYTES] != header:
            return None
        else:
            values = read(data, _F32, size, ROW_HEADER_BYTES)
        first = values.item(0)
        if first != first:
            return None
        rows.append(EncodedRow("f32", size, 0.0, values))
    return rows


def _check_length(
    data: bytes | memoryview, start: int, entries: int, encoding: str, dtype: np.dtype[Any]
) -> None:
    if len(data) != start + entries * dtype.itemsize:
        raise RowFormatError(
            f"a row cut short or overlong: {len(data) - start} bytes behind the header where "
            f"{entries} entries in {encoding} take {entries * dtype.itemsize}"
        )


def _bin_header(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Where a msgpack bin at offset `at` starts, and its length."""
    kind = bytes(data[at : at + 1])
    width = {b"\xc4": 1, b"\xc5": 2, b"\xc6": 4}.get(kind)
    if width is None or len(data) < at + 1 + width:
        raise RowFormatError("a row without its numbers")
    return at + 1 + width, int.from_bytes(data[at + 1 : at + 1 + width], "big")
