"""The want of a continuation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar, Final, Self, TypeAlias, cast

import numpy as np

from lmpool.checks import as_integer, as_number, is_integer, quoted, said
from lmpool.errors import AnswerFormatError, JobFormatError, PromptError, PromptFailed
from lmpool.model_info import ModelInfo
from lmpool.token_ids import TokenIds, listed, packed
from lmpool.wants import packing
from lmpool.wants.answers import FINISH_REASONS, Computed, Generation, TopLogprobs
from lmpool.wants.drawing import checked_seed, checked_temperature, seeds_of
from lmpool.wants.held import hold
from lmpool.wants.of_prompt import OfPrompt
from lmpool.wants.score import MAX_NUMBERS

MAX_TOKENS: Final = 2**31 - 1
MAX_EOS_IDS: Final = 256
EOS_READ: Final = 1 << 16
"""How many of those that a caller gives are looked at."""
MAX_STOPS: Final = 64
MAX_STOP_TOKENS: Final = 256
"""Of one stop sequence."""
_ANSWER: Final = "a continuation"

StopSequences: TypeAlias = Sequence[TokenIds] | Iterable[TokenIds]
"""Sequences of token ids, each of which ends a continuation."""

_RANGES: Final[Mapping[str, tuple[Callable[[float], bool], str]]] = {
    "temperature": (lambda it: 0 <= it < math.inf, "a number of 0 (greedy) or more"),
    "top_p": (lambda it: 0 < it <= 1, "a number above 0, up to 1, which leaves nothing out"),
    "min_p": (lambda it: 0 <= it <= 1, "a number from 0, which leaves nothing out, to 1"),
}


@dataclass(frozen=True, slots=True)
class Generate(OfPrompt[Generation]):
    """A continuation of the prompt, drawn on the worker.

    At most `max_tokens` tokens, ended by any of `eos_token_ids` (None: the model's own), or by any
    of the token sequences in `stop`; what ends it is part of it. At `temperature` 0 each is the
    likeliest. Else each is drawn at that temperature from what is left: first of the tokens that
    are at least `min_p` times as likely as the likeliest, of those the `top_k` likeliest (0: all)
    and those as likely as the last of them, of those the fewest, likeliest first, that have `top_p`
    of the mass. vLLM has that order; transformers applies `min_p` last.

    `logprobs` asks for the log-probability of each token, `top_logprobs` for so many of the
    likeliest at each step: both are the model's, at temperature 1 and with nothing left out.

    One `seed` and prompt give one continuation, alone or in company; in a batch, prompt i has
    `seed` + i. Without a seed every ask draws anew.
    """

    kind: ClassVar[str] = "generate"
    cached: ClassVar[bool] = False
    form: ClassVar[int] = 1

    max_tokens: int = 20
    eos_token_ids: Sequence[int] | None = None
    temperature: float = 1.0
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: StopSequences = ()
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        hold(self, eos_token_ids=EOS_READ, stop=MAX_STOP_TOKENS)

    def checked(self, info: ModelInfo) -> Self:
        """With every default but the seed resolved for a model. Raises `PromptError`.

        `max_tokens` is no more than the model has room for, and one: who wants more than there is
        room for is told so.
        """
        size, given = info.vocab_size, self._numbers()
        given["max_tokens"] = min(given["max_tokens"], info.max_prompt_tokens + 1)
        given["top_k"] = min(given["top_k"], size)
        found = replace(
            self,
            eos_token_ids=_eos(self.eos_token_ids, info),
            stop=_stops(self.stop, size),
            **given,
        )
        wrong = found.misfit(size)
        if wrong is not None:
            raise PromptError(wrong)
        return found

    def check_numbers(self) -> None:
        """Refuse what can be, before a model is known. Raises `PromptError`."""
        self._numbers()

    def _numbers(self) -> dict[str, Any]:
        if type(self.logprobs) is not bool:
            raise PromptError(f"logprobs={quoted(self.logprobs)}: write True or False")
        return {
            "max_tokens": _integer("max_tokens", self.max_tokens),
            "temperature": checked_temperature(self.temperature),
            "seed": checked_seed(self.seed),
            "top_p": _number("top_p", self.top_p),
            "top_k": _integer("top_k", self.top_k, "; 0 leaves nothing out"),
            "min_p": _number("min_p", self.min_p),
            "top_logprobs": _integer("top_logprobs", self.top_logprobs),
        }

    @property
    def repeats(self) -> bool:
        """False: in a batch each prompt has a seed of its own."""
        return False

    def each(self, count: int) -> Sequence[Self]:
        """This want for `count` prompts: by a seed and those that follow, or by fresh ones."""
        return [replace(self, seed=seed) for seed in seeds_of(self.seed, count)]

    def stored_bytes(self, info: ModelInfo) -> int:
        """What a checked one's answer takes at most, about."""
        return self.max_tokens * self._token_bytes(info.vocab_size)

    def travelling_bytes(self) -> int:
        """That of what ends it."""
        return 5 * (len(self.eos_token_ids or ()) + sum(map(len, self.stop_sequences)))

    def fields(self) -> list[object]:
        """As it travels, and as the digest covers it."""
        eos, stop = list(self.eos_token_ids or ()), [list(ids) for ids in self.stop_sequences]
        drawn = [self.temperature, self.seed, self.top_p, self.top_k, self.min_p]
        return [self.max_tokens, eos, *drawn, stop, self.logprobs, self.top_logprobs]

    @classmethod
    def from_fields(cls, fields: Sequence[object]) -> Self:
        """Read `fields`. Raises `JobFormatError`."""
        most, eos, temperature, seed, top_p, top_k, min_p, stop, logprobs, top_logprobs = (
            packing.expect(cls.kind, fields, 10)
        )
        if type(seed) is not int:
            raise JobFormatError(f"seed={seed!r:.40}: an integer expected")
        if type(logprobs) is not bool:
            raise JobFormatError(f"logprobs={logprobs!r:.40}: true or false expected")
        if not isinstance(stop, list) or len(stop) > MAX_STOPS:
            raise JobFormatError(f"stop is not a list of at most {MAX_STOPS} sequences")
        found = cls(
            packing.expect_integer("max_tokens", most, 0, MAX_TOKENS),
            _read_ids("eos", eos, MAX_EOS_IDS),
            packing.expect_number("temperature", temperature),
            seed,
            packing.expect_number("top_p", top_p),
            packing.expect_integer("top_k", top_k, 0, MAX_TOKENS),
            packing.expect_number("min_p", min_p),
            tuple(_read_ids("a stop sequence", ids, MAX_STOP_TOKENS) for ids in stop),
            logprobs,
            packing.expect_integer("top_logprobs", top_logprobs, 0, MAX_TOKENS),
        )
        wrong = found._out_of_range()
        if wrong is not None:
            raise JobFormatError(wrong)
        return found

    def misfit(self, vocab_size: int) -> str | None:
        """Why no continuation can be drawn so from rows of this size; None where one can."""
        if self.top_logprobs > vocab_size:
            return (
                f"top_logprobs={self.top_logprobs}: write an integer from 0 to {vocab_size}, the "
                "size of the vocabulary"
            )
        return self._out_of_range()

    def _out_of_range(self) -> str | None:
        """What is wrong whatever the vocabulary."""
        for name, (sound, expected) in _RANGES.items():
            if not sound(getattr(self, name)):
                return f"{name}={getattr(self, name)!r}: write {expected}"
        if self.max_tokens < 0 or self.top_k < 0 or self.top_logprobs < 0:
            return "max_tokens, top_k and top_logprobs: write integers of 0 or more"
        if not all(self.stop_sequences):
            return "stop has an empty sequence, which would end everything: leave it out"
        if 2 * self.max_tokens * self.top_logprobs > MAX_NUMBERS:
            return (
                f"top_logprobs={self.top_logprobs} of up to {self.max_tokens} tokens: at most "
                f"{MAX_NUMBERS // 2} in one answer; ask for fewer, or set max_tokens"
            )
        return None

    @property
    def stop_sequences(self) -> tuple[tuple[int, ...], ...]:
        """The stop sequences of a want as it travels."""
        return tuple(tuple(cast(Iterable[int], ids)) for ids in self.stop)

    def encode(self, computed: Computed, vocab_size: int) -> bytes:
        """What is stored of the continuation. Raises `PromptFailed` where there is none."""
        answer = computed.answer
        if not isinstance(answer, Generation):
            raise PromptFailed("the engine gave no tokens for this prompt")
        top, logprobs = answer.top_logprobs, answer.logprobs
        if (logprobs is None) == self.logprobs or (top is None) != (not self.top_logprobs):
            raise PromptFailed("the engine gave other log-probabilities than were asked for")
        end = [FINISH_REASONS.index(answer.finish_reason), answer.ending]
        parts = [np.array(end, "<u2").tobytes(), packing.ids(answer.token_ids, vocab_size)]
        if logprobs is not None:
            parts.append(packing.floats(logprobs))
        if top is not None:
            parts += [packing.floats(top.rest), packing.floats(top.logprobs)]
            parts.append(packing.ids(top.token_ids, vocab_size))
        return packing.pack(self.form, *parts)

    def decode(self, data: bytes, info: ModelInfo) -> Generation:
        """Read what `encode` wrote. Raises `AnswerFormatError`."""
        numbers, k = packing.unpack(self.form, data, _ANSWER), self.top_logprobs
        each = self._token_bytes(info.vocab_size)
        count = max(0, len(numbers) - 4) // each
        packing.expect_size(numbers, 4 + count * each, _ANSWER)
        reason, ending = np.frombuffer(numbers, "<u2", 2).tolist()
        if count > self.max_tokens or reason >= len(FINISH_REASONS) or ending > count:
            raise AnswerFormatError(f"{_ANSWER} of {count} tokens that ends by no known reason")
        read = packing.Reader(numbers[4:], info.vocab_size)
        ids = read.ids(count)
        logprobs = read.floats(count) if self.logprobs else None
        top = None
        if k:
            rest, likely = read.floats(count), read.floats(count, k)
            top = TopLogprobs(read.ids(count, k), likely, rest)
        return Generation(ids, ending, FINISH_REASONS[reason], logprobs, top)

    def _token_bytes(self, vocab_size: int) -> int:
        """Of a stored answer."""
        ids, floats, k = packing.id_bytes(vocab_size), packing.FLOAT_BYTES, self.top_logprobs
        return ids + self.logprobs * floats + (floats + k * (floats + ids) if k else 0)


def _number(name: str, given: object) -> float:
    """A caller's number. Raises `PromptError`."""
    found, (sound, expected) = as_number(given), _RANGES[name]
    if found is None or not sound(found):
        raise PromptError(f"{name}={quoted(given)}: write {expected}")
    return packing.plain_zero(found)


def _integer(name: str, given: object, hint: str = "") -> int:
    """A caller's integer of 0 or more. Raises `PromptError`."""
    found = as_integer(given)
    if found is None or not 0 <= found <= MAX_TOKENS:
        raise PromptError(f"{name}={quoted(given)}: write an integer, 0 or more, below 2**31{hint}")
    return found


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


def _stops(given: Any, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """A caller's stop sequences, in order, each once. Raises `PromptError`."""
    if isinstance(given, (str, bytes, bytearray)):
        raise PromptError(f"stop={quoted(given)}: write token ids, such as [lm.encode(text)]")
    if type(given) is tuple and not given:  # most often
        return ()
    try:
        sequences = list(islice(given, MAX_STOPS + 1))
    except Exception as error:  # nothing that can be gone through, or of its own
        raise PromptError(
            f"stop={quoted(given)}: write a list of token sequences, such as [[13], [10, 10]] "
            f"({said(error)})"
        ) from None
    if len(sequences) > MAX_STOPS:
        raise PromptError(f"stop has more than {MAX_STOPS} sequences: write at most so many")
    return tuple(
        sorted({_sequence(ids, f"stop[{i}]", vocab_size) for i, ids in enumerate(sequences)})
    )


def _sequence(given: Any, name: str, vocab_size: int) -> tuple[int, ...]:
    if is_integer(given):
        raise PromptError(
            f"{name}={quoted(given)}: write a sequence of token ids; stop=[[13]] has one of one"
        )
    ids = listed(given, MAX_STOP_TOKENS, name)
    if not 0 < len(ids) <= MAX_STOP_TOKENS:
        raise PromptError(
            f"{name} of {len(ids)} token ids: write 1 to {MAX_STOP_TOKENS}; without stop sequences "
            "leave stop out"
        )
    return tuple(np.frombuffer(packed(ids, vocab_size, f"{name}: "), "<u4").tolist())


def _read_ids(name: str, found: object, most: int) -> tuple[int, ...]:
    """Ids as they travel. Raises `JobFormatError`."""
    if not isinstance(found, list) or len(found) > most:
        raise JobFormatError(f"{name} is not a list of at most {most} integers")
    if any(type(token) is not int for token in found):
        raise JobFormatError(f"{name} is not a list of at most {most} integers")
    return tuple(found)
