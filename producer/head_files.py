"""The head's matrix in a model's own files, where this machine has them."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmpool.errors import LmpoolError
from lmpool.head_form import HeadForm
from lmpool.model_info import ModelInfo
from lmpool.tensor_files import StoredTensor, stored_tensors
from lmpool.wants.hidden import HASH_BYTES


def read_parts(
    info: ModelInfo, form: HeadForm, digests: Sequence[bytes], into: npt.NDArray[np.uint8]
) -> set[int]:
    """Read the parts that the model's files have `into` the matrix, and return their numbers.

    They have those with these digests. Any matrix of the right shape may be it: an embedding, where
    a model ties the two.
    """
    found: set[int] = set()
    size = form.part_rows * form.row_bytes
    for tensor in _matrices(info, form):
        for number, digest in enumerate(digests):
            if number not in found:
                rows = form.rows_of(number, info.vocab_size)
                part = tensor.rows(rows.start, rows.stop, form.numbers)
                if hashlib.blake2b(part, digest_size=HASH_BYTES).digest() != digest:
                    break  # another matrix, which differs everywhere
                into[number * size :][: len(part)] = np.frombuffer(part, np.uint8)
                found.add(number)
    return found


def has_matrices(info: ModelInfo, form: HeadForm) -> bool:
    """Whether this machine has files of the model, with a matrix that may be the head."""
    return next(_matrices(info, form), None) is not None


def _matrices(info: ModelInfo, form: HeadForm) -> Iterator[StoredTensor]:
    folder = _folder(info)
    if folder is None or importlib.util.find_spec("safetensors") is None:
        return
    for file in sorted(folder.glob("*.safetensors")):
        try:
            tensors = stored_tensors(file, LmpoolError)
        except LmpoolError:
            continue
        for tensor in tensors.values():
            if tensor.shape == (info.vocab_size, form.hidden_size) and tensor.is_readable():
                yield tensor


def _folder(info: ModelInfo) -> Path | None:
    """The model's folder: as the workers name it, or that in the hub's cache; never a new one."""
    try:
        folder = Path(info.model)
        if folder.is_absolute() and folder.is_dir():
            return folder
        if info.model.count("/") != 1 or folder.is_absolute():
            return None
        from huggingface_hub import snapshot_download

        files = ["*.safetensors"]
        return Path(
            snapshot_download(
                info.model, revision=info.revision, local_files_only=True, allow_patterns=files
            )
        )
    except Exception:  # it is not there, or not to be read, or the package is not installed
        return None
