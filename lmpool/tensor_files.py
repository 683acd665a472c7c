"""Tensors in safetensors files, looked at without a machine-learning library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lmpool.head_form import Numbers

_KINDS: Final[dict[str, type[np.generic]]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
}
_BLOCK: Final = 1 << 22
"""Numbers that are compared at once, so that an embedding is never there twice."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, of a dtype as safetensors calls it."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def is_finite(self) -> bool:
        """Whether it holds floating-point numbers, all of them finite."""
        return self.dtype in _KINDS and all(np.isfinite(b).all() for b in self._blocks())

    def equals(self, other: StoredTensor) -> bool:
        """Whether both hold the same numbers, as far as the narrower dtype of the two tells."""
        if self.shape != other.shape or not {self.dtype, other.dtype} <= _KINDS.keys():
            return False
        narrow = min(self.dtype, other.dtype, key=lambda dtype: np.dtype(_KINDS[dtype]).itemsize)
        pairs = zip(self._blocks(), other._blocks(), strict=True)
        return all(bool((_cast(a, narrow) == _cast(b, narrow)).all()) for a, b in pairs)

    def is_readable(self) -> bool:
        """Whether it holds floating-point numbers that are known here."""
        return self.dtype in _KINDS

    def rows(self, start: int, stop: int, numbers: Numbers) -> bytes:
        """These rows of a matrix, as `numbers`: rounded, where the file has wider ones."""
        width, kind = self.shape[1], np.dtype(_KINDS[self.dtype])
        with self.file.open("rb") as file:
            file.seek(self.start + start * width * kind.itemsize)
            found = np.fromfile(file, kind, (stop - start) * width)
        values = _widened(found.view(np.uint16)) if self.dtype == "BF16" else found
        cast = _cast(values, numbers.upper())
        return cast.astype("<u2" if numbers == "bf16" else cast.dtype.newbyteorder("<")).tobytes()

    def _blocks(self) -> Iterator[npt.NDArray[Any]]:
        count = int(np.prod(self.shape, dtype=np.int64))
        kind = np.dtype(_KINDS[self.dtype])
        with self.file.open("rb") as file:
            file.seek(self.start)
            for begin in range(0, count, _BLOCK):
                block = np.fromfile(file, kind, min(_BLOCK, count - begin))
                yield _widened(block.view(np.uint16)) if self.dtype == "BF16" else block


def _widened(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _cast(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    if dtype != "BF16":
        return values.astype(_KINDS[dtype])
    bits = values.astype(np.float32).view(np.uint32)
    # To the nearest, and to the even one of two: the upper half of a float32.
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def stored_tensors(file: Path, error: type[Exception]) -> dict[str, StoredTensor]:
    """The tensors in a file by name. Raises `error` where it is no whole safetensors file."""
    from safetensors import SafetensorError, safe_open  # a client may do without

    try:
        with safe_open(file, framework="numpy"):
            pass  # it checks the whole header, and the file's length
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
    except (OSError, ValueError, SafetensorError) as reason:
        raise error(
            f"{file.name} in {str(file.parent)!r} is no safetensors file: {reason}"
        ) from reason
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(
            file,
            name,
            t["dtype"],
            tuple(t["shape"]),
            *(8 + size + offset for offset in t["data_offsets"]),
        )
        for name, t in header.items()
    }


def write_tensors(file: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write tensors that lie in other files into one, by these names."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, tensor in tensors.items():
        until = place + tensor.end - tensor.start
        header[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [place, until],
        }
        place = until
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as written:
        written.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            with tensor.file.open("rb") as source:
                source.seek(tensor.start)
                written.write(source.read(tensor.end - tensor.start))


class ModelTensors:
    """The weights in a model's safetensors files."""

    def __init__(self, folder: Path) -> None:
        self.by_name: dict[str, StoredTensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.by_name.update(stored_tensors(file, OSError))

    def same(self, name: str, tensor: StoredTensor) -> bool:
        """Whether the model has this parameter, with these numbers.

        Of a parameter that the files do not name (a head that is the embedding, a model without its
        prefix) it is enough that one of them is the same.
        """
        if name in self.by_name:
            return tensor.equals(self.by_name[name])
        return any(tensor.equals(each) for each in self.by_name.values())
