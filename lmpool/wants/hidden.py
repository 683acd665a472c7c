"""The want of the state that a model's head is applied to, and that of the head itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from lmpool.checks import as_integer, quoted
from lmpool.errors import AnswerFormatError, JobFormatError, PromptError, PromptFailed
from lmpool.head_form import NUMBER_BYTES, HeadForm, Numbers
from lmpool.model_info import ModelInfo
from lmpool.rows import bf16_to_f32
from lmpool.wants import packing
from lmpool.wants.answers import Computed, HeadBytes, HiddenState
from lmpool.wants.of_prompt import OfPrompt

MAX_PARTS: Final = 1 << 20
HASH_BYTES: Final = 16
_CODES: Final[tuple[Numbers, ...]] = ("f32", "bf16", "f16")
_NAME: Final = "hidden state"


@dataclass(frozen=True, slots=True)
class Hidden(OfPrompt[HiddenState]):
    """The last hidden state after a prompt: what the model's head is applied to, behind the final
    norm. It travels in two bytes a number where that loses nothing.
    """

    kind: ClassVar[str] = "hidden"
    cached: ClassVar[bool] = True
    """Whether a client keeps the answer in its local cache."""
    form: ClassVar[int] = 16

    def checked(self, info: ModelInfo) -> Hidden:
        """Itself. Raises `PromptError` where the model that is served gives none."""
        head_of(info)
        return self

    def stored_bytes(self, info: ModelInfo) -> int:
        """What a checked one's answer takes, about."""
        return 0 if info.head is None else 4 * info.head.hidden_size

    def fields(self) -> list[object]:
        """As it travels, and as the digest covers it."""
        return []

    @classmethod
    def from_fields(cls, fields: Sequence[object]) -> Hidden:
        """Read `fields`. Raises `JobFormatError`."""
        packing.expect(cls.kind, fields, 0)
        return cls()

    def encode(self, computed: Computed, vocab_size: int) -> bytes:
        """What is stored of a state. Raises `PromptFailed` where the engine gave another answer."""
        state = computed.answer
        if not isinstance(state, np.ndarray) or state.ndim != 1 or state.dtype != np.float32:
            raise PromptFailed("the engine gave no hidden state for this prompt")
        if not np.isfinite(state).all():
            raise PromptFailed("the model's hidden state overflows; another dtype may help")
        numbers, data = narrowed(state)
        return packing.pack(self.form, bytes([_CODES.index(numbers)]), data)

    def decode(self, data: bytes, info: ModelInfo) -> HiddenState:
        """Read what `encode` wrote. Raises `AnswerFormatError`."""
        found = packing.unpack(self.form, data, _NAME)
        size = 0 if info.head is None else info.head.hidden_size
        code = found[0] if found else len(_CODES)
        if code >= len(_CODES):
            raise AnswerFormatError(f"a {_NAME} in no form that is known")
        numbers = _CODES[code]
        packing.expect_size(found, 1 + size * NUMBER_BYTES[numbers], _NAME)
        state = widened(numbers, found[1:])
        if not np.isfinite(state).all():
            raise AnswerFormatError(f"a {_NAME} with what is no number")
        state.flags.writeable = False
        return state


@dataclass(frozen=True, slots=True)
class HeadPart(OfPrompt[HeadBytes]):
    """A part of the model's head, as `HeadForm` numbers them; whatever prompt is asked.

    ``hashed``: its blake2b-128 alone, for whoever has it and wants to know that.
    """

    kind: ClassVar[str] = "head"
    cached: ClassVar[bool] = False
    form: ClassVar[int] = 17

    number: int
    hashed: bool = False

    def checked(self, info: ModelInfo) -> HeadPart:
        """With its number as int. Raises `PromptError` where the head has no such part."""
        number, parts = as_integer(self.number), head_of(info).parts(info.vocab_size)
        if number is None or not 0 <= number < parts:
            raise PromptError(f"number={quoted(self.number)}: write an integer below {parts}")
        if type(self.hashed) is not bool:
            raise PromptError(f"hashed={quoted(self.hashed)}: write True or False")
        return HeadPart(number, self.hashed)

    def stored_bytes(self, info: ModelInfo) -> int:
        """What a checked one's answer takes, about."""
        if self.hashed or info.head is None:
            return HASH_BYTES
        return info.head.part_bytes(self.number, info.vocab_size)

    def fields(self) -> list[object]:
        """As it travels, and as the digest covers it."""
        return [self.number, self.hashed]

    @classmethod
    def from_fields(cls, fields: Sequence[object]) -> HeadPart:
        """Read `fields`. Raises `JobFormatError`."""
        number, hashed = packing.expect(cls.kind, fields, 2)
        if type(hashed) is not bool:
            raise JobFormatError(f"hashed={hashed!r:.40}: true or false expected")
        return cls(packing.expect_integer("number", number, 0, MAX_PARTS), hashed)

    def of_part(self, data: npt.NDArray[np.uint8]) -> HeadBytes:
        """The answer of the part itself, uint8 [bytes]."""
        if self.hashed:
            digest = hashlib.blake2b(data.data, digest_size=HASH_BYTES).digest()
            return HeadBytes(np.frombuffer(digest, np.uint8))
        return HeadBytes(data)

    def encode(self, computed: Computed, vocab_size: int) -> bytes:
        """What is stored of a part. Raises `PromptFailed` where the engine gave another answer."""
        answer = computed.answer
        if not isinstance(answer, HeadBytes):
            raise PromptFailed("the engine gave no part of its head")
        return packing.pack(self.form, answer.data.tobytes())

    def decode(self, data: bytes, info: ModelInfo) -> HeadBytes:
        """Read what `encode` wrote. Raises `AnswerFormatError`."""
        found = packing.unpack(self.form, data, "part of a head")
        packing.expect_size(found, self.stored_bytes(info), "part of a head")
        return HeadBytes(np.frombuffer(found, np.uint8))


def head_of(info: ModelInfo) -> HeadForm:
    """The head of the model that is served. Raises `PromptError` where it gives none."""
    if info.head is None:
        raise PromptError(f"{info.model} is served without hidden states: {info.no_head}")
    return info.head


def narrowed(state: HiddenState) -> tuple[Numbers, bytes]:
    """float32 numbers in the fewest bytes that lose nothing, and what they are then."""
    bits = np.ascontiguousarray(state, "<f4").view("<u4")
    if not (bits & 0xFFFF).any():
        return "bf16", (bits >> 16).astype("<u2").tobytes()
    with np.errstate(over="ignore"):
        half = state.astype("<f2")
    if np.array_equal(half.astype(np.float32), state):
        return "f16", half.tobytes()
    return "f32", bits.tobytes()


def widened(numbers: Numbers, data: bytes) -> HiddenState:
    """The float32 numbers of what `narrowed` gave, or of a part of a head."""
    if numbers == "bf16":
        return bf16_to_f32(np.frombuffer(data, "<u2"))
    kind = "<f2" if numbers == "f16" else "<f4"
    return np.frombuffer(data, kind).astype(np.float32)
