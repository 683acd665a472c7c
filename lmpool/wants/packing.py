"""Small answers as they are stored: ``[form, numbers]``, the numbers little-endian.

A form's number stands for one layout of one kind of answer: another layout takes another number.
Ids take as few bytes as the vocabulary needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgpack
import numpy as np
import numpy.typing as npt

from lmpool.errors import AnswerFormatError, JobFormatError
from lmpool.rows import refuse_extension
from lmpool.wants.answers import Logprobs, TokenArray

FLOAT_BYTES: Final = 4


def pack(form: int, *parts: bytes) -> bytes:
    """The numbers of one answer."""
    packed: bytes = msgpack.packb([form, b"".join(parts)])
    return packed


def unpack(form: int, data: bytes, name: str) -> bytes:
    """The numbers that `pack` was given. Raises `AnswerFormatError`: `name` was expected."""
    try:
        found = msgpack.unpackb(data, ext_hook=refuse_extension)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise AnswerFormatError(f"no {name}: {error or type(error).__name__}") from None
    if not isinstance(found, list) or len(found) != 2 or type(found[0]) is not int:
        raise AnswerFormatError(f"no {name}")
    if found[0] != form or not isinstance(found[1], bytes):
        raise AnswerFormatError(f"no {name} of form {form}")
    return found[1]


def alike(form: int, stored: Sequence[bytes], size: int) -> npt.NDArray[np.uint8] | None:
    """The numbers of answers that `pack` wrote with `size` bytes of numbers each: [n, size].

    None unless all are such.
    """
    empty = pack(form, bytes(size))
    head = empty[: len(empty) - size]
    if {*map(len, stored)} != {len(empty)} or not all(data.startswith(head) for data in stored):
        return None
    found = np.frombuffer(b"".join(stored), np.uint8).reshape(len(stored), len(empty))
    return found[:, len(head) :]


def floats_alike(numbers: npt.NDArray[np.uint8]) -> Logprobs | None:
    """float32 numbers [n, count] of bytes [n, 4 * count]; None where one is NaN."""
    values: Logprobs = np.ascontiguousarray(numbers).view("<f4")
    return None if np.isnan(values).any() else values


def ids_alike(numbers: npt.NDArray[np.uint8], vocab_size: int) -> TokenArray | None:
    """Ids [n, count] of their bytes; None where one is out of range."""
    width = id_bytes(vocab_size)
    wide = np.zeros((len(numbers), numbers.shape[1] // width, 4), np.uint8)
    wide[:, :, :width] = numbers.reshape(len(numbers), -1, width)
    found = wide.view("<u4")[:, :, 0]
    return None if found.size and int(found.max()) >= vocab_size else found.astype(np.int32)


def expect_size(data: bytes, size: int, name: str) -> None:
    """Raise `AnswerFormatError` for an answer that was cut or is too long."""
    if len(data) != size:
        raise AnswerFormatError(f"{name} of {len(data)} bytes where {size} were expected")


def floats(values: Logprobs | np.float32) -> bytes:
    """float32 numbers."""
    return np.ascontiguousarray(values, dtype="<f4").tobytes()


def read_floats(data: bytes, start: int, count: int) -> Logprobs:
    """`count` float32 numbers, `start` numbers behind the beginning. None of them is NaN."""
    values: Logprobs = np.frombuffer(data, "<f4", count, start * FLOAT_BYTES)
    if np.isnan(values).any():
        raise AnswerFormatError("an answer of NaN")
    return values


def id_bytes(vocab_size: int) -> int:
    """Bytes of one id."""
    return max(1, (vocab_size - 1).bit_length() + 7 >> 3)


def ids(values: npt.NDArray[np.integer[Any]], vocab_size: int) -> bytes:
    """Ids below `vocab_size`, one after another."""
    wide = np.ascontiguousarray(values, dtype="<u4").view(np.uint8).reshape(-1, 4)
    return wide[:, : id_bytes(vocab_size)].tobytes()


def read_ids(data: bytes, start: int, count: int, vocab_size: int) -> TokenArray:
    """`count` ids, from byte `start` on. Raises `AnswerFormatError` for one out of range."""
    width = id_bytes(vocab_size)
    wide = np.zeros((count, 4), np.uint8)
    wide[:, :width] = np.frombuffer(data, np.uint8, count * width, start).reshape(count, width)
    found = wide.view("<u4")[:, 0]
    if count and int(found.max()) >= vocab_size:
        raise AnswerFormatError(f"token id {int(found.max())}: below {vocab_size} expected")
    read: TokenArray = found.astype(np.int32)
    read.flags.writeable = False
    return read


class Reader:
    """Reads the numbers of an answer one after another; there must be as many as are read."""

    def __init__(self, data: bytes, vocab_size: int) -> None:
        self._data = data
        self._vocab_size = vocab_size
        self._at = 0

    def floats(self, *shape: int) -> Logprobs:
        """float32 numbers of this shape. Raises `AnswerFormatError` where one is NaN."""
        count, start = math.prod(shape), self._at
        self._at += count * FLOAT_BYTES
        values: Logprobs = np.frombuffer(self._data[start : self._at], "<f4", count)
        if np.isnan(values).any():
            raise AnswerFormatError("an answer of NaN")
        return values.reshape(shape)

    def ids(self, *shape: int) -> TokenArray:
        """Ids of this shape. Raises `AnswerFormatError` where one is out of range."""
        count, start = math.prod(shape), self._at
        self._at += count * id_bytes(self._vocab_size)
        return read_ids(self._data, start, count, self._vocab_size).reshape(shape)


def expect(kind: str, fields: Sequence[object], count: int) -> Sequence[Any]:
    """The fields of a want, of which there must be so many. Raises `JobFormatError`."""
    if len(fields) != count:
        raise JobFormatError(f"{kind} wants {count} fields, not {list(fields)!r:.100}")
    return fields


def expect_integer(name: str, found: object, low: int, high: int) -> int:
    """An integer field of a want, `low` to `high`. Raises `JobFormatError`."""
    if type(found) is not int or not low <= found <= high:
        raise JobFormatError(f"{name}={found!r:.40}: an integer from {low} to {high} expected")
    return found


def expect_number(name: str, found: object) -> float:
    """A field of a want that is a finite number of 0 or more. Raises `JobFormatError`."""
    if type(found) not in (float, int) or not 0 <= found < float("inf"):  # type: ignore[operator]
        raise JobFormatError(f"{name}={found!r:.40}: a finite number, 0 or more, expected")
    return plain_zero(float(found))  # type: ignore[arg-type]


def plain_zero(value: float) -> float:
    """-0.0 as 0.0: equal wants travel, and are hashed, in one form."""
    return value + 0.0
