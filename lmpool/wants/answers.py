"""What wants are answered with: frozen, of NumPy arrays that are nobody's to write."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from lmpool.rows import EncodedRow

TokenArray = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
HiddenState = npt.NDArray[np.float32]
"""float32 [hidden_size]."""


class _OfArrays:
    """An answer whose bytes are those of its arrays."""

    __slots__ = ()

    def arrays(self) -> list[npt.NDArray[Any]]:
        """All that it has, those of an answer in it too."""
        found: list[npt.NDArray[Any]] = []
        for part in fields(self):  # type: ignore[arg-type]
            value = getattr(self, part.name)
            if isinstance(value, np.ndarray):
                found.append(value)
            elif isinstance(value, _OfArrays):
                found += value.arrays()
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        held = (getattr(self, part.name) for part in fields(self))  # type: ignore[arg-type]
        return sum(getattr(value, "nbytes", 0) for value in held)


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs(_OfArrays):
    """The likeliest next tokens.

    `token_ids` int32 [k], likeliest first, equally likely ones by id; `logprobs` float32 [k],
    natural log, normalized over the whole vocabulary; `rest`: the log of the mass of all others,
    summed over them, -inf where there are none.

    Of a text's positions, all three have a first axis for these: [T, k], [T, k] and [T].
    """

    token_ids: TokenArray
    logprobs: Logprobs
    rest: np.float32 | Logprobs

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return self.token_ids.nbytes + self.logprobs.nbytes + self.rest.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class TextScores(_OfArrays):
    """What the model makes of a text's tokens, each given those before it.

    For the T positions from `start` to the text's end: `logprobs` float32 [T] of the given tokens,
    natural log, normalized over the whole vocabulary; `ranks` int32 [T], how many tokens have at
    least that log-probability (1: the likeliest, which ties with none). Where asked for,
    `top_logprobs`, the likeliest tokens of each position, and `token_logprobs` float32 [T, n].
    """

    logprobs: Logprobs
    ranks: npt.NDArray[np.int32]
    top_logprobs: TopLogprobs | None = None
    token_logprobs: Logprobs | None = None

    def arrays(self) -> list[npt.NDArray[Any]]:
        """All that it has, each with a first axis for the positions."""
        top = self.top_logprobs
        found: list[Any] = [self.logprobs, self.ranks, self.token_logprobs]
        if top is not None:
            found += [top.token_ids, top.logprobs, top.rest]
        return [array for array in found if array is not None]

    @property
    def total(self) -> float:
        """The log-probability of all scored tokens together."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def is_greedy(self) -> bool:
        """Whether each token was the likeliest, and none as likely."""
        return bool((self.ranks == 1).all())


@dataclass(frozen=True, slots=True, eq=False)
class Draws(_OfArrays):
    """Tokens drawn from what follows a prompt.

    `token_ids` int32 [n] in the order drawn; `logprobs` float32 [n] under the model: temperature
    1, nothing excluded; `proposal_logprobs` float32 [n] under what each was drawn from; `log_mass`:
    the log of the mass, at that temperature, of what may be drawn.
    """

    token_ids: TokenArray
    logprobs: Logprobs
    proposal_logprobs: Logprobs
    log_mass: np.float32


FinishReason: TypeAlias = Literal["eos", "stop", "length", "context"]
"""Why a continuation ended: at an EOS token, at a stop sequence, after as many tokens as were asked
for, or where the model takes no more."""
FINISH_REASONS: Final[tuple[FinishReason, ...]] = ("eos", "stop", "length", "context")


@dataclass(frozen=True, slots=True, eq=False)
class Generation(_OfArrays):
    """A continuation drawn on the worker.

    `token_ids` int32 [n]: all that was drawn, its ending included, of which the last `ending` are
    the EOS token or the stop sequence that `finish_reason` speaks of (0 of any other). Where asked
    for, `logprobs` float32 [n], the model's log-probability of each, at temperature 1 and with
    nothing left out, and `top_logprobs`, the likeliest tokens of each step: [n, k], [n, k], [n].
    """

    token_ids: TokenArray
    ending: int
    finish_reason: FinishReason
    logprobs: Logprobs | None = None
    top_logprobs: TopLogprobs | None = None

    def behind(self, start: int) -> Generation:
        """What it has behind its first `start` tokens."""
        top = self.top_logprobs
        return Generation(
            self.token_ids[start:],
            self.ending,
            self.finish_reason,
            None if self.logprobs is None else self.logprobs[start:],
            None if top is None else _behind(top, start),
        )

    @property
    def text_ids(self) -> TokenArray:
        """What it says: `token_ids` without the ending."""
        return self.token_ids[: self.token_ids.size - self.ending]


def _behind(top: TopLogprobs, start: int) -> TopLogprobs:
    rest = np.asarray(top.rest, np.float32)[start:]
    return TopLogprobs(top.token_ids[start:], top.logprobs[start:], rest)


@dataclass(frozen=True, slots=True, eq=False)
class HeadBytes(_OfArrays):
    """A part of a model's head as it lies in memory, or its digest: `data` uint8 [bytes]."""

    data: npt.NDArray[np.uint8]


def freeze(answer: Reduced) -> None:
    """Make the arrays of an answer read-only: several may come to share it."""
    if isinstance(answer, np.ndarray):
        answer.flags.writeable = False
    elif isinstance(answer, _OfArrays):
        for array in answer.arrays():
            array.flags.writeable = False


Reduced: TypeAlias = Generation | TopLogprobs | Logprobs | Draws | TextScores | HeadBytes
"""Answers that an engine hands over as they are: to every want but `Row`. An array is that to
`Tokens` and to `Hidden`."""

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
