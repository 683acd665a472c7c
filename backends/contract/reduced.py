"""What is right of what follows from a row: likeliest tokens, and those that are named."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic

import numpy as np
import numpy.typing as npt

from lmpool.backends.contract.breaches import expect
from lmpool.backends.contract.operations import Asked, Prompt
from lmpool.backends.contract.prompts import Random
from lmpool.backends.contract.subject import Adapter
from lmpool.backends.contract.truth import Truth
from lmpool.backends.contract.want_reference import Answered, W, WantReference
from lmpool.backends.engine import EngineInfo
from lmpool.wants import Tokens, Top, TopLogprobs

Probabilities = npt.NDArray[np.float64]
TokenArray = npt.NDArray[np.int32]

SAME: Final = "the log-probabilities of an answer are those of the prompt's own row"
_LIKELIEST: Final = "the likeliest tokens come, likeliest first"
_TIES: Final = "equally likely tokens come by their ids"
_REST: Final = "rest is the mass of all others"


@dataclass(frozen=True, slots=True)
class Within:
    """How far an answer may be off: its log-probabilities, and what decides between two tokens."""

    values: float
    order: float


class ReducedReference(WantReference[W], Generic[W]):
    """Judges each answer by the row of its prompt."""

    answer_type: type
    bad: float = 0.04
    """The share of wants that an engine must refuse."""

    def judge(self, answered: Sequence[Answered], truth: Truth) -> None:
        within = Within(truth.tolerance, 2 * truth.tolerance)
        by_adapter: dict[Adapter | None, list[Answered]] = {}
        for each in answered:
            by_adapter.setdefault(each.adapter, []).append(each)
        most = max(1, (32 << 20) // truth.info.vocab_size // 4)
        for adapter, alike in by_adapter.items():
            for start in range(0, len(alike), most):
                part = alike[start : start + most]
                rows = truth.rows([each.asked.prompt for each in part], adapter)
                for each, row in zip(part, rows, strict=True):
                    self.judge_one(each, row.astype(np.float64), within)

    def judge_one(self, answered: Answered, row: Probabilities, within: Within) -> None:
        """Raise `BrokenPromise` unless this is the answer of `row`, float64 [vocab]."""
        asked, answer = answered.asked, answered.outcome.answer
        expect(
            isinstance(answer, self.answer_type),
            f"{asked.want.kind} is answered with {self.answer_type.__name__}",
            f"{type(answer)}:",
            asked,
        )
        self.check(asked, answer, row, within)

    @abstractmethod
    def check(self, asked: Asked, answer: Any, row: Probabilities, within: Within) -> None:
        """Raise `BrokenPromise` unless `answer`, an `answer_type`, is that of `row`."""


class TopReference(ReducedReference[Top]):
    """The `k` likeliest, in order, and the mass of all others."""

    answer_type = TopLogprobs

    def draw(self, random: Random, prompt: Prompt, adapter: Adapter | None, truth: Truth) -> Top:
        vocab = truth.info.vocab_size
        if random.random() < self.bad:
            return Top(vocab + int(random.choice((1, 2, vocab, 2**23))))
        if prompt and random.random() < 0.3:
            return Top(_between_equals(random, truth.rows([prompt], adapter)[0]))
        return Top(int(random.choice((1, 2, 3, 5, 20, 20, vocab // 2, vocab - 1, vocab))))

    def refuses(self, want: Top, info: EngineInfo) -> bool:
        return want.k > info.vocab_size

    def check(self, asked: Asked, answer: Any, row: Probabilities, within: Within) -> None:
        assert isinstance(answer, TopLogprobs)
        assert isinstance(asked.want, Top)
        check_top(answer, asked.want.k, row, within, asked)


class TokensReference(ReducedReference[Tokens]):
    """The log-probabilities of given tokens, in their order, as often as each is given."""

    answer_type = np.ndarray

    def draw(self, random: Random, prompt: Prompt, adapter: Adapter | None, truth: Truth) -> Tokens:
        vocab = truth.info.vocab_size
        ids = random.integers(0, vocab, int(random.choice((1, 1, 2, 5, 40, 3 * vocab))))
        kind = random.random()
        if kind < 0.2:
            ids[-1] = vocab - 1
        elif kind < 0.4:
            ids[-1] = ids[0]
        if random.random() < self.bad:
            ids[int(random.integers(ids.size))] = random.choice((vocab, vocab + 1, 2**32 - 1))
        return Tokens(ids.astype("<u4").tobytes())

    def refuses(self, want: Tokens, info: EngineInfo) -> bool:
        return int(given_ids(want).max()) >= info.vocab_size

    def check(self, asked: Asked, answer: Any, row: Probabilities, within: Within) -> None:
        assert isinstance(asked.want, Tokens)
        ids = given_ids(asked.want)
        check_values(checked_numbers(answer, ids.size, asked), row[ids], within.values, SAME, asked)


def given_ids(want: Tokens) -> npt.NDArray[np.uint32]:
    """The ids of a want, as it travels."""
    assert isinstance(want.token_ids, bytes)
    return np.frombuffer(want.token_ids, "<u4")


def _between_equals(random: Random, row: npt.NDArray[np.float32]) -> int:
    """How many to ask for so that of equally likely tokens one comes and the next does not."""
    descending = np.sort(row)[::-1]
    places = np.flatnonzero(descending[1:] == descending[:-1]) + 1
    return int(random.choice(places)) if places.size else 1


# --- forms and numbers -------------------------------------------------------------------------


def checked_ids(found: Any, count: int, vocab: int, asked: Asked) -> TokenArray:
    """The ids of an answer, which are int32 [count] of the vocabulary."""
    expect(
        isinstance(found, np.ndarray) and str(found.dtype) == "int32" and found.shape == (count,),
        "the token ids of an answer are int32, as many as were asked for",
        (getattr(found, "dtype", type(found)), getattr(found, "shape", ""), asked),
    )
    ids: TokenArray = found
    wrong = ids[(ids < 0) | (ids >= vocab)]
    expect(not wrong.size, "tokens are of the vocabulary", wrong, asked)
    return ids


def checked_numbers(found: Any, count: int, asked: Asked) -> npt.NDArray[np.float32]:
    """The log-probabilities of an answer, which are float32 [count]."""
    expect(
        isinstance(found, np.ndarray) and str(found.dtype) == "float32" and found.shape == (count,),
        "the log-probabilities of an answer are float32, as many as were asked for",
        (getattr(found, "dtype", type(found)), getattr(found, "shape", ""), asked),
    )
    numbers: npt.NDArray[np.float32] = found
    return numbers


def check_values(
    found: npt.NDArray[Any],
    right: Probabilities,
    slack: float | Probabilities,
    promise: str,
    asked: Asked,
) -> None:
    """See to it that these are the numbers, of which one may be -inf."""
    with np.errstate(invalid="ignore"):
        kept = (found == right) | (np.abs(found - right) <= slack)
    if not kept.all():
        place = int(np.argmin(kept))
        expect(False, promise, f"{found[place]} for {right[place]} at {place} of", asked)


def check_top(
    answer: TopLogprobs, k: int, row: Probabilities, within: Within, asked: Asked
) -> None:
    """See to it that these are the `k` likeliest tokens of a row, in order, and what they leave."""
    ids = checked_ids(answer.token_ids, k, row.size, asked)
    logprobs = checked_numbers(answer.logprobs, ids.size, asked)
    check_values(logprobs, row[ids], within.values, SAME, asked)
    check_likeliest(ids, row, within.order, asked)
    _check_ties(ids, logprobs, row, asked)
    expect(type(answer.rest) is np.float32, "rest is a float32", type(answer.rest), asked)
    others = row.copy()
    others[ids] = -np.inf
    rest = np.float64(log_sum(others))
    check_values(np.atleast_1d(answer.rest), np.atleast_1d(rest), within.values, _REST, asked)


def check_likeliest(ids: TokenArray, row: Probabilities, slack: float, asked: Asked) -> None:
    """See to it that no other token is likelier than one of these, nor a later one of them."""
    found, others = row[ids], row.copy()
    others[ids] = -np.inf
    expect(np.unique(ids).size == ids.size, _LIKELIEST, "one comes twice:", asked)
    likelier = np.flatnonzero(found[1:] > found[:-1] + slack)
    expect(not likelier.size, _LIKELIEST, f"at {likelier[:3]} is one that comes later:", asked)
    left = float(others.max())
    expect(left <= float(found.min()) + slack, _LIKELIEST, f"one of {left:.6g} is left out:", asked)


def _check_ties(
    ids: TokenArray, logprobs: npt.NDArray[np.float32], row: Probabilities, asked: Asked
) -> None:
    """See to it that ids decide between equals: as the engine has them, and where it is exact."""
    expect(bool((logprobs[1:] <= logprobs[:-1]).all()), _LIKELIEST, "by what is said:", asked)
    swapped = (logprobs[1:] == logprobs[:-1]) & (ids[1:] < ids[:-1])
    expect(not swapped.any(), _TIES, f"at {np.flatnonzero(swapped)[:3]}:", asked)
    if np.array_equal(logprobs, row[ids]):  # a reduced row that was computed just as the reference
        last = logprobs[-1]
        alike = np.flatnonzero(row == last)
        kept = np.isin(alike, ids)
        first = alike[: int(kept.sum())]
        expect(bool(np.isin(first, ids).all()), _TIES, f"of those of {last}:", asked)


def log_sum(logprobs: Probabilities) -> float:
    """The log of the summed probability, -inf of none."""
    top = float(logprobs.max())
    return top if top == -np.inf else top + float(np.log(np.exp(logprobs - top).sum()))
