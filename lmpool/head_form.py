"""What a model's head is: how hidden states become logits, and how its matrix is read in parts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final, Literal, cast

from lmpool.errors import WireError

PART_BYTES: Final = 4 << 20
"""What a part takes at most; a single row of the matrix may take more."""
MAX_HIDDEN: Final = 1 << 20

Numbers = Literal["f32", "bf16", "f16"]
NUMBER_BYTES: Final[dict[Numbers, int]] = {"f32": 4, "bf16": 2, "f16": 2}
"""Bytes of one number, by what a matrix holds."""


@dataclass(frozen=True, slots=True)
class HeadForm:
    """A head: its logits are ``scale * (weight @ h + bias)``, and with a `cap`
    ``cap * tanh(logits / cap)`` of those.

    `weight` is [vocab_size, `hidden_size`], of `numbers` as the model holds them; `bias`, where
    there is one, float32 [vocab_size].
    """

    hidden_size: int
    numbers: Numbers
    scale: float = 1.0
    cap: float | None = None
    bias: bool = False

    @classmethod
    def of(cls, found: object) -> HeadForm:
        """Read what a model info says of a head. Raises `WireError`."""
        if not isinstance(found, dict):
            raise WireError(f"model info has head={found!r:.40}: a map expected")
        known = {f.name: found[f.name] for f in fields(cls) if f.name in found}
        hidden, numbers = known.get("hidden_size"), known.get("numbers")
        factors = (known.get("scale", 1.0), known.get("cap") or 1.0)
        if (
            type(hidden) is not int
            or not 1 <= hidden <= MAX_HIDDEN
            or not isinstance(numbers, str)
            or numbers not in NUMBER_BYTES
            or type(known.get("bias", False)) is not bool
            or not all(type(f) is float and 0 < f < math.inf for f in factors)
        ):
            raise WireError(f"model info has head={found!r:.200}")
        return cls(**cast(dict, known))  # type: ignore[type-arg]

    @property
    def row_bytes(self) -> int:
        """Of one token's row of the matrix."""
        size: int = NUMBER_BYTES[self.numbers]
        return self.hidden_size * size

    @property
    def part_rows(self) -> int:
        """Rows of the matrix in one part; the last may have fewer."""
        return max(1, PART_BYTES // self.row_bytes)

    def weight_parts(self, vocab_size: int) -> int:
        """How many parts the matrix has."""
        return -(-vocab_size // self.part_rows)

    def parts(self, vocab_size: int) -> int:
        """How many parts there are: those of the matrix, and the bias as the last."""
        return self.weight_parts(vocab_size) + self.bias

    def rows_of(self, part: int, vocab_size: int) -> slice:
        """Which rows of the matrix a part of it holds."""
        start = part * self.part_rows
        return slice(start, min(start + self.part_rows, vocab_size))

    def part_bytes(self, part: int, vocab_size: int) -> int:
        """What a part takes."""
        if part == self.weight_parts(vocab_size):
            return 4 * vocab_size
        return min(self.part_rows, vocab_size - part * self.part_rows) * self.row_bytes
