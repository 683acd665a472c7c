"""What may be asked of a prompt: one closed set of wants, and everything that a want decides.

For each want this module has its check, what its digest covers, its wire form, how a worker
stores the answer and how a client reads it. A new want is a class here, one more member of `Want`,
what each engine does for it (a type checker finds the places: `typing.assert_never`), and a public
method of the client.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar, Final, NewType, Protocol, Self, TypeAlias, get_args

import msgpack
import numpy as np
import numpy.typing as npt

from lmpool.checks import as_integer, as_number, quoted
from lmpool.errors import (
    AnswerFormatError,
    JobFormatError,
    PromptError,
    PromptFailed,
    RowFormatError,
)
from lmpool.model_info import Encoding, ModelInfo
from lmpool.rows import (
    ENTRY_BYTES,
    EncodedRow,
    bf16_to_f32,
    pack_logprobs,
    pack_values,
    refuse_extension,
    unpack_row,
)

__all__ = [
    "Answer", "Digest", "Digester", "Generate", "Generation", "Row", "Want", "want_from_wire",
    "want_to_wire",
]  # fmt: skip

Digest = NewType("Digest", bytes)
"""16 bytes, blake2b-128: the identity of a result. Hex only in the names of keys, and in Lua."""

DIGEST_BYTES: Final = 16
MAX_EOS_IDS: Final = 256
EOS_READ: Final = 1 << 16
"""How many of those that a caller gives are looked at."""
MAX_SEED: Final = 2**63 - 1
GENERATION_VERSION: Final = 1

_NOT_A_NUMBER: Final = "the model computed NaN for this prompt; another dtype may help"


# --- answers -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """A continuation drawn on the worker: `token_ids`, uint32 [n], without the EOS token."""

    token_ids: npt.NDArray[np.uint32]

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return self.token_ids.nbytes


Reduced: TypeAlias = Generation
"""Answers that an engine hands over as they are: to every want but `Row`."""

Answer: TypeAlias = EncodedRow | Reduced
"""What a want is answered with, as a client decodes it."""


class Computed(Protocol):
    """What an engine computed for one request; `lmpool.backends.Outcome` is one."""

    @property
    def row(self) -> npt.NDArray[np.float32] | npt.NDArray[np.uint16] | None:
        """float32 [vocab_size] log-probabilities, or uint16: the bits of bfloat16 logits."""
        ...

    @property
    def logsumexp(self) -> float:
        """Of the bfloat16 logits, in float32."""
        ...

    @property
    def answer(self) -> Reduced | None:
        """The answer to a want other than `Row`."""
        ...


# --- wants -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
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

    @property
    def repeats(self) -> bool:
        """Whether asked again it is answered alike."""
        return True

    def each(self, count: int) -> Sequence[Self]:
        """This want for `count` prompts."""
        return (self,) * count

    def fields(self) -> list[object]:
        """As it travels, and as the digest covers it."""
        return [self.encoding]

    @classmethod
    def from_fields(cls, fields: Sequence[object]) -> Row:
        """Read `fields`. Raises `JobFormatError`."""
        (encoding,) = _expect(cls.kind, fields, 1)
        if not isinstance(encoding, str) or encoding not in _ROWS:
            raise JobFormatError(f"unknown encoding {encoding!r:.40}")
        return _ROWS[encoding]

    def encode(self, computed: Computed, vocab_size: int) -> bytes:
        """What is stored of the row. Raises `PromptFailed` for what no client could use."""
        row = computed.row
        if row is None:
            raise PromptFailed("the engine gave no row for this prompt")
        kind = getattr(row, "dtype", None)
        if getattr(row, "shape", None) != (vocab_size,) or kind not in (_FLOAT32, _UINT16):
            raise PromptFailed(
                f"the engine gave a row of shape {getattr(row, 'shape', None)}, "
                f"{kind or type(row).__name__}: {(vocab_size,)} was expected"
            )
        if kind == _UINT16:
            if math.isnan(computed.logsumexp):
                raise PromptFailed(_NOT_A_NUMBER)
            if self.encoding == "bf16":
                return pack_values("bf16", row, computed.logsumexp)
            row = bf16_to_f32(row.view(np.uint16)) - np.float32(computed.logsumexp)
        # Normalizing spreads one NaN to all entries: the first one tells.
        if row[0] != row[0]:
            raise PromptFailed(_NOT_A_NUMBER)
        return pack_logprobs(row.view(np.float32), "f16" if self.encoding == "f16" else "f32")

    def decode(self, data: bytes, info: ModelInfo) -> EncodedRow:
        """Read what `encode` wrote. Raises `RowFormatError`."""
        row = unpack_row(data, info.vocab_size)
        # As above. The first of bfloat16's bits is a logit, which its scale was taken from.
        if row.scale != row.scale or (row.encoding != "bf16" and row.data[0] != row.data[0]):
            raise RowFormatError("a row of NaN")
        return row


@dataclass(frozen=True, slots=True)
class Generate:
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
            temperature=_plain_zero(temperature),
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

    def fields(self) -> list[object]:
        """As it travels, and as the digest covers it."""
        return [self.max_tokens, list(self.eos_token_ids or ()), self.temperature, self.seed]

    @classmethod
    def from_fields(cls, fields: Sequence[object]) -> Generate:
        """Read `fields`. Raises `JobFormatError`."""
        most, eos, temperature, seed = _expect(cls.kind, fields, 4)
        if type(most) is not int or type(seed) is not int:
            raise JobFormatError(f"max_tokens={most!r:.40}, seed={seed!r:.40}: integers expected")
        if type(temperature) not in (float, int):
            raise JobFormatError(f"temperature={temperature!r:.40} of the wrong type")
        if not isinstance(eos, list) or len(eos) > MAX_EOS_IDS:
            raise JobFormatError(f"eos is not a list of at most {MAX_EOS_IDS} integers")
        if any(type(token) is not int for token in eos):
            raise JobFormatError(f"eos is not a list of at most {MAX_EOS_IDS} integers")
        return cls(most, tuple(eos), _plain_zero(float(temperature)), seed)

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


Want: TypeAlias = Row | Generate
"""Every kind of question."""

_KINDS: Final[dict[str, type[Want]]] = {want.kind: want for want in get_args(Want)}
_ROWS: Final[dict[str, Row]] = {encoding: Row(encoding) for encoding in ENTRY_BYTES}
_FLOAT32, _UINT16 = np.dtype(np.float32), np.dtype(np.uint16)


def _expect(kind: str, fields: Sequence[Any], count: int) -> Sequence[Any]:
    if len(fields) != count:
        raise JobFormatError(f"{kind} wants {count} fields, not {list(fields)!r:.100}")
    return fields


def _plain_zero(value: float) -> float:
    """-0.0 as 0.0: equal wants travel, and are hashed, in one form."""
    return value + 0.0


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


# --- wire form ---------------------------------------------------------------------------------


def want_to_wire(want: Want) -> list[object]:
    """A want as it travels: ``[kind, fields...]``."""
    return [want.kind, *want.fields()]


def want_from_wire(found: object) -> Want:
    """Read `want_to_wire`'s form, strictly. Raises `JobFormatError`."""
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise JobFormatError(f"no want: {found!r:.100}")
    kind = _KINDS.get(found[0])
    if kind is None:
        raise JobFormatError(f"unknown want {found[0]!r:.40}; there are {', '.join(_KINDS)}")
    return kind.from_fields(found[1:])


# --- digests -----------------------------------------------------------------------------------

_STARTED_MOST: Final = 1024


@dataclass(slots=True)
class Digester:
    """Digests of one model's jobs: blake2b-128 over all that changes the result."""

    fingerprint: str
    _started: dict[tuple[str | None, Want], Any] = field(
        default_factory=dict, init=False, repr=False
    )
    _last: tuple[Want, str | None, Any] | None = field(default=None, init=False, repr=False)
    """What was started last: mostly it is asked for again, and then it is not even looked up."""

    def digest(self, want: Want, tokens: bytes, adapter: str | None = None) -> Digest:
        """The digest of one checked want; `adapter` is ``name@fingerprint``."""
        hasher = self._start(want, adapter).copy()
        hasher.update(tokens)
        return Digest(hasher.digest())

    def digests(
        self, want: Want, prompts: Iterable[bytes], adapter: str | None = None
    ) -> list[Digest]:
        """The digests of one want of many prompts."""
        copy = self._start(want, adapter).copy
        found = []
        for tokens in prompts:
            hasher = copy()
            hasher.update(tokens)
            found.append(Digest(hasher.digest()))
        return found

    def _start(self, want: Want, adapter: str | None) -> Any:
        # Prompts differ by their tokens alone: the hash of all else is kept and copied.
        last = self._last
        if last is not None and last[0] is want and last[1] is adapter:
            return last[2]
        started = self._started.get((adapter, want)) if want.cached else None
        if started is None:
            # One msgpack value delimits itself: no choice of fields can run into the tokens.
            adapter_fingerprint = None if adapter is None else adapter.rpartition("@")[2]
            head = [self.fingerprint, adapter_fingerprint, *want_to_wire(want)]
            started = hashlib.blake2b(msgpack.packb(head), digest_size=DIGEST_BYTES)
            if want.cached:  # others differ from each other: they would push out what is used
                if len(self._started) >= _STARTED_MOST:
                    self._started.clear()
                self._started[adapter, want] = started
        self._last = (want, adapter, started)
        return started
