"""The want of a continuation."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar, Final, Self

import msgpack
import numpy as np

from lmpool.checks import as_integer, as_number, quoted
from lmpool.errors import AnswerFormatError, JobFormatError, PromptError, PromptFailed
from lmpool.model_info import ModelInfo
from lmpool.rows import refuse_extension
from lmpool.wants.answers import Computed, Generation
from lmpool.wants.of_prompt import OfPrompt
from lmpool.wants.packing import expect, plain_zero

MAX_EOS_IDS: Final = 256
EOS_READ: Final = 1 << 16
"""How many of those that a caller gives are looked at."""
MAX_SEED: Final = 2**63 - 1
GENERATION_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Generate(OfPrompt):
    """A continuation of the prompt, drawn on the worker.

    At most `max_tokens` tokens, ended by any of `eos_token_ids` (None: the model's own).
    `temperature` 0 is greedy. One `seed` and prompt give one continuation, alone or in company;
    without a seed every ask draws anew.
    """

    kind: ClassVar[str] = "generate"
    cached: ClassVar[bool] = False

    max_tokens: int
    eos_token_ids: Sequence[int] | None = None
    temperature: float = 1.0
    seed: int | None = None

    def checked(self, info: ModelInfo) -> Self:
        """With every default but the seed resolved for a model. Raises `PromptError`."""
        most = as_integer(self.max_tokens)
        if most is None or not 0 <= most < 2**31:
            raise PromptError(
                f"max_tokens={quoted(self.max_tokens)}: write an integer, 0 or more, below 2**31"
            )
        temperature = as_number(self.temperature)
        if temperature is None or not 0 <= temperature < math.inf:
            raise PromptError(
                f"temperature={quoted(self.temperature)}: write a number of 0 (greedy) or more"
            )
        seed = None if self.seed is None else as_integer(self.seed)
        if seed is None and self.seed is not None:
            raise PromptError(f"seed={quoted(self.seed)}: write an integer, or None")
        return replace(
            self,
            max_tokens=most,
            eos_token_ids=_eos(self.eos_token_ids, info),
            temperature=plain_zero(temperature),
            seed=None if seed is None else seed & MAX_SEED,
        )

    @property
    def repeats(self) -> bool:
        """Whether asked again it is answered alike: with a seed."""
        return self.seed is not None

    def each(self, count: int) -> Sequence[Self]:
        """This want for `count` prompts: without a seed, each has a fresh one of its own."""
        if self.repeats:
            return (self,) * count
        return [replace(self, seed=secrets.randbits(63)) for _ in range(count)]

    def stored_bytes(self, info: ModelInfo) -> int:
        """What a checked one's answer takes at most, about."""
        return 4 * self.max_tokens

    def fields(self) -> list[object]:
        """As it travels, and as the digest covers it."""
        return [self.max_tokens, list(self.eos_token_ids or ()), self.temperature, self.seed]

    @classmethod
    def from_fields(cls, fields: Sequence[object]) -> Generate:
        """Read `fields`. Raises `JobFormatError`."""
        most, eos, temperature, seed = expect(cls.kind, fields, 4)
        if type(most) is not int or type(seed) is not int:
            raise JobFormatError(f"max_tokens={most!r:.40}, seed={seed!r:.40}: integers expected")
        if type(temperature) not in (float, int):
            raise JobFormatError(f"temperature={temperature!r:.40} of the wrong type")
        if not isinstance(eos, list) or len(eos) > MAX_EOS_IDS:
            raise JobFormatError(f"eos is not a list of at most {MAX_EOS_IDS} integers")
        if any(type(token) is not int for token in eos):
            raise JobFormatError(f"eos is not a list of at most {MAX_EOS_IDS} integers")
        return cls(most, tuple(eos), plain_zero(float(temperature)), seed)

    def encode(self, computed: Computed, vocab_size: int) -> bytes:
        """What is stored of the continuation. Raises `PromptFailed` where there is none."""
        if not isinstance(computed.answer, Generation):
            raise PromptFailed("the engine gave no tokens for this prompt")
        tokens = np.ascontiguousarray(computed.answer.token_ids, dtype="<u4")
        packed: bytes = msgpack.packb([GENERATION_VERSION, self.kind, tokens.tobytes()])
        return packed

    def decode(self, data: bytes, info: ModelInfo) -> Generation:
        """Read what `encode` wrote. Raises `AnswerFormatError`."""
        try:
            found = msgpack.unpackb(data, ext_hook=refuse_extension)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise AnswerFormatError(f"no continuation: {error or type(error).__name__}") from None
        if not isinstance(found, list) or found[:2] != [GENERATION_VERSION, self.kind]:
            raise AnswerFormatError(f"no continuation of version {GENERATION_VERSION}")
        if len(found) != 3 or not isinstance(found[2], bytes) or len(found[2]) % 4:
            raise AnswerFormatError("a continuation without its tokens")
        return Generation(np.frombuffer(found[2], dtype="<u4"))


def _eos(given: Iterable[int] | None, info: ModelInfo) -> tuple[int, ...]:
    """The ids that end a continuation, in order, each once.

    One that the vocabulary does not have ends none: genlm-backend's ``AsyncLM`` takes it, too.
    """
    if given is None:
        return info.eos_token_ids
    ids: set[int | None] = {None}
    try:
        if not isinstance(given, (str, bytes)):
            ids = {as_integer(token) for token in islice(given, EOS_READ)}
    except Exception:  # nothing that can be gone through, or of its own
        pass
    if None in ids or len(ids) > MAX_EOS_IDS:
        raise PromptError(
            f"eos_token_ids={quoted(given)}: write a list of at most {MAX_EOS_IDS} token ids"
        )
    return tuple(sorted(i for i in ids if i is not None and 0 <= i < info.vocab_size))
