"""The want of a whole row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, TypeGuard

import numpy as np
import numpy.typing as npt

from lmpool.checks import quoted
from lmpool.errors import JobFormatError, PromptError, PromptFailed, RowFormatError
from lmpool.model_info import Encoding, ModelInfo
from lmpool.rows import (
    ENTRY_BYTES,
    EncodedRow,
    PackedRow,
    bf16_to_f32,
    joined_f32,
    pack_logprobs,
    pack_values,
    packed_f32,
    unpack_f32_rows,
    unpack_row,
)
from lmpool.wants.answers import Computed
from lmpool.wants.of_prompt import OfPrompt
from lmpool.wants.packing import expect

_FLOAT32, _UINT16 = np.dtype(np.float32), np.dtype(np.uint16)
_STORED: Final = np.dtype("<f4")
NO_NUMBERS: Final = "the model computed infinities or NaN for this prompt; another dtype may help"


@dataclass(frozen=True, slots=True)
class Row(OfPrompt[EncodedRow]):
    """The log-probability of every token of the vocabulary coming next.

    `encoding` is how the row travels: None is the smallest lossless one of the model.
    """

    kind: ClassVar[str] = "row"
    cached: ClassVar[bool] = True
    """Whether a client keeps the answer in its local cache."""

    encoding: Encoding | None = None

    def checked(self, info: ModelInfo) -> Row:
        """With every default resolved for a model. Raises `PromptError`."""
        if self.encoding is None:
            return _ROWS[info.encoding]
        if not isinstance(self.encoding, str) or self.encoding not in ENTRY_BYTES:
            raise PromptError(
                f"encoding={quoted(self.encoding)}: write one of {', '.join(ENTRY_BYTES)}"
            )
        return self

    def stored_bytes(self, info: ModelInfo) -> int:
        """What a checked one's answer takes, about."""
        return info.vocab_size * ENTRY_BYTES[self.encoding or info.encoding]

    def fields(self) -> list[object]:
        """As it travels, and as the digest covers it."""
        return [self.encoding]

    @classmethod
    def from_fields(cls, fields: Sequence[object]) -> Row:
        """Read `fields`. Raises `JobFormatError`."""
        (encoding,) = expect(cls.kind, fields, 1)
        if not isinstance(encoding, str) or encoding not in _ROWS:
            raise JobFormatError(f"unknown encoding {encoding!r:.40}")
        return _ROWS[encoding]

    def encode(self, computed: Computed, vocab_size: int) -> bytes:
        """What is stored of the row. Raises `PromptFailed` for what no client could use.

        That is a row of another shape or type, and one whose first number is none, or infinite, if
        no other shows that it may be: such as overflow leaves. The others are not all looked at,
        which would take a worker a tenth more for a large row: a single NaN among them, as only an
        engine can give that does not normalize, is stored.
        """
        row = computed.row
        if self._is_stored_so(row, vocab_size):
            return joined_f32(row)
        return self.packed(computed, vocab_size).joined()

    def _is_stored_so(self, row: object, vocab_size: int) -> TypeGuard[npt.NDArray[np.float32]]:
        """Whether a row's own memory is what is stored. Nearly every row is so, and of many the
        other steps take longer than their copying."""
        return (
            type(row) is np.ndarray
            and self.encoding == "f32"
            and row.dtype is _STORED
            and row.shape == (vocab_size,)
            and -math.inf < row.item(0) < math.inf
        )

    def packed(self, computed: Computed, vocab_size: int) -> PackedRow:
        """The same, its numbers where they are as far as they can be stored as they are."""
        row = computed.row
        if self._is_stored_so(row, vocab_size) and row.flags.c_contiguous:
            return packed_f32(row)
        if row is None:
            raise PromptFailed("the engine gave no row for this prompt")
        kind = getattr(row, "dtype", None)
        if getattr(row, "shape", None) != (vocab_size,) or kind not in (_FLOAT32, _UINT16):
            raise PromptFailed(
                f"the engine gave a row of shape {getattr(row, 'shape', None)}, "
                f"{kind or type(row).__name__}: {(vocab_size,)} was expected"
            )
        if kind == _UINT16:
            if not math.isfinite(computed.logsumexp):
                raise PromptFailed(NO_NUMBERS)
            if self.encoding == "bf16":
                return pack_values("bf16", row, computed.logsumexp)
            row = bf16_to_f32(row.view(np.uint16)) - np.float32(computed.logsumexp)
        # Normalizing spreads one NaN to all entries, and an overflow leaves none that is finite:
        # the first one tells, unless it is of a token that is ruled out.
        if not math.isfinite(row[0]) and not math.isfinite(row.max()):
            raise PromptFailed(NO_NUMBERS)
        return pack_logprobs(row.view(np.float32), "f16" if self.encoding == "f16" else "f32")

    def decode(self, data: bytes | memoryview, info: ModelInfo) -> EncodedRow:
        """Read what `encode` wrote. Raises `RowFormatError`."""
        row = unpack_row(data, info.vocab_size)
        # As above. The first of bfloat16's bits is a logit, which its scale was taken from.
        first = row.scale if row.encoding == "bf16" else row.data.item(0)
        if first != first or row.scale != row.scale:
            raise RowFormatError("a row of NaN")
        return row

    def decode_alike(
        self, stored: Sequence[bytes | memoryview], info: ModelInfo
    ) -> list[EncodedRow] | None:
        """What `decode` reads of several, where that costs less together; None where it does not,
        and where one of them is no row."""
        return unpack_f32_rows(stored, info.vocab_size) if self.encoding == "f32" else None


_ROWS: Final[dict[str, Row]] = {encoding: Row(encoding) for encoding in ENTRY_BYTES}
