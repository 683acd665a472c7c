"""What is right of a continuation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from lmpool.backends.contract.breaches import expect
from lmpool.backends.contract.draws import Draws, Weights, heated
from lmpool.backends.contract.operations import Asked, Prompt
from lmpool.backends.contract.prompts import Random
from lmpool.backends.contract.subject import Adapter
from lmpool.backends.contract.truth import Rows, Truth
from lmpool.backends.engine import Outcome
from lmpool.backends.sampling import sample_token
from lmpool.uniforms import uniform
from lmpool.wants import Generate, Generation, Reduced

_FOLLOWS: Final = "a continuation is drawn from the model's rows, at its temperature, by its seed"
_REPEATS: Final = "one seed and prompt give one continuation, whatever the company"

TEMPERATURES: Final = (0.0, 0.0, 0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 1.0, 1.0, 1.3, 1.9, 2.5, 20.0)
_BAD_TEMPERATURES: Final = (-1.0, float("nan"), float("inf"))
_TRIES: Final = 3_000
_MAX_SEED: Final = 2**63 - 1

_Item: TypeAlias = tuple[Asked, Adapter | None, Reduced | None]
_Key: TypeAlias = tuple[Prompt, Adapter | None, float]


def draw_generate(
    random: Random, prompt: Prompt, adapter: Adapter | None, truth: Truth
) -> Generate:
    """A continuation that takes few tokens; one in 25 has a temperature that is none."""
    temperature = min(float(random.choice(TEMPERATURES)), truth.suite.most_temperature)
    if random.random() < 0.04:
        temperature = float(random.choice(_BAD_TEMPERATURES))
    most = int(random.choice((0, 1, 1, 2, 3, 4, 6, 9)))
    seed = random_seed(random)
    eos = _end_tokens(random, prompt, adapter, truth, temperature, seed)
    return Generate(most, eos, temperature, seed)


def random_seed(random: Random) -> int | None:
    """Small ones, of 63 and of 64 bits, and some that are alike in their lower 32."""
    kind = random.random()
    if kind < 0.05:
        return None
    low = int(random.integers(5))
    if kind < 0.3:
        return low
    if kind < 0.7:
        return low + (int(random.integers(1, 2**31)) << 32)
    seed = int(random.integers(2**64, dtype=np.uint64)) | (1 << 63)
    if kind < 0.85:
        return seed
    # Any integer is a seed: equal ones modulo 2**64 draw alike.
    return -low - 1 if kind < 0.92 else seed + (low + 1 << 64)


def _end_tokens(
    random: Random,
    prompt: Prompt,
    adapter: Adapter | None,
    truth: Truth,
    temperature: float,
    seed: int | None,
) -> tuple[int, ...] | None:
    """None, no, and some tokens, among which may be those that come first."""
    kind, vocab = random.random(), truth.info.vocab_size
    if kind < 0.2:
        return None
    if kind < 0.55 or not 0 <= temperature < np.inf or len(prompt) > truth.info.max_prompt_tokens:
        return ()
    row = truth.rows([prompt], adapter)[0]
    if kind < 0.75:
        likely = sample_token(row, temperature, 0 if seed is None else seed, 0)
        return tuple({likely, int(random.integers(vocab))})
    count = min(100, vocab // 2)
    return tuple(int(token) for token in np.argpartition(row, -count)[-count:])


def seed_that_draws(
    random: Random, row: npt.NDArray[np.float32], temperature: float, tokens: Collection[int]
) -> int | None:
    """A seed whose first draw from this row is one of `tokens`; None where none is found soon."""
    for _ in range(_TRIES):
        seed = int(random.integers(2**62))
        if sample_token(row, temperature, seed, 0) in tokens:
            return seed
    return None


class ContinuationJudge:
    """Judges continuations by the rows after each of their tokens."""

    def __init__(self) -> None:
        self._draws = Draws()
        self._streams: dict[tuple[_Key, int], tuple[int, ...]] = {}
        self._compared = 0
        self._unlike = 0

    def judge(self, items: Sequence[_Item], truth: Truth) -> None:
        """Raise `BrokenPromise` where one is not right."""
        drawn = [self._tokens(asked, answer, truth) for asked, _, answer in items]
        by_adapter: dict[Adapter | None, list[int]] = {}
        for place, (_, adapter, _) in enumerate(items):
            by_adapter.setdefault(adapter, []).append(place)
        for adapter, places in by_adapter.items():
            prefixes = [
                (*items[place][0].prompt, *drawn[place][:n])
                for place in places
                for n in range(self._rows_needed(items[place][0], drawn[place], truth))
            ]
            if not prefixes:
                continue
            rows, start = truth.rows(prefixes, adapter), 0
            for place in places:
                asked = items[place][0]
                end = start + self._rows_needed(asked, drawn[place], truth)
                self._follow(asked, adapter, drawn[place], rows[start:end], truth)
                start = end
        self._draws.check()
        expect(
            self._unlike <= 1 + self._compared // 40,
            _REPEATS,
            f"{self._unlike} of {self._compared} that were asked for again are others",
        )

    def _tokens(self, asked: Asked, answer: Reduced | None, truth: Truth) -> tuple[int, ...]:
        """The tokens, of which there are no more than asked for, and no end token."""
        expect(
            isinstance(answer, Generation),
            "a continuation is answered with a Generation",
            type(answer),
            asked,
        )
        assert isinstance(answer, Generation)
        ids = answer.token_ids
        expect(
            isinstance(ids, np.ndarray) and str(ids.dtype) == "uint32" and ids.ndim == 1,
            "a continuation's tokens are uint32 [n]",
            getattr(ids, "dtype", type(ids)),
            getattr(ids, "shape", ""),
            asked,
        )
        tokens = tuple(ids.tolist())
        most = _most(asked, truth)
        expect(
            len(tokens) <= most,
            "a continuation ends after max_tokens, and where the model does",
            f"{len(tokens)} tokens, {most} at most:",
            asked,
        )
        ends = _ends(asked, truth)
        expect(
            ends.isdisjoint(tokens),
            "a continuation ends before an end token, which is no part of it",
            tokens,
            asked,
        )
        wrong = [token for token in tokens if token >= truth.info.vocab_size]
        expect(not wrong, "tokens are of the vocabulary", wrong, asked)
        return tokens

    def _rows_needed(self, asked: Asked, drawn: tuple[int, ...], truth: Truth) -> int:
        return len(drawn) + (len(drawn) < _most(asked, truth))

    def _follow(
        self,
        asked: Asked,
        adapter: Adapter | None,
        drawn: tuple[int, ...],
        rows: Rows,
        truth: Truth,
    ) -> None:
        """See each token drawn from its row, and what came after the last."""
        want, ends = asked.want, _ends(asked, truth)
        assert isinstance(want, Generate)
        logprob = 0.0
        self._draws.begin()
        for step, row in enumerate(rows):
            candidates = drawn[step : step + 1] or tuple(sorted(ends))
            said = f"token {drawn[step]}" if step < len(drawn) else "the end"
            where = (f"{said} at step {step} of", drawn, asked)
            if want.temperature == 0.0:
                best = float(row.max()) - 2 * truth.tolerance
                kept = any(row[token] >= best for token in candidates)
                expect(kept, "greedy takes the likeliest token", *where)
                continue
            weights = heated(row, want.temperature)
            if want.seed is not None and not truth.suite.own_draws:
                place = uniform(want.seed, step)
                expect(_drawn_at(weights, candidates, place, want, truth), _FOLLOWS, *where)
                continue
            if ends:
                self._draws.end(weights, ends, step == len(drawn))
            if step < len(drawn):
                kind = f"at temperature {want.temperature:g}"
                if ends:  # what ended it is not known
                    weights[list(ends)] = 0.0
                    weights /= weights.sum()
                logprob += self._draws.draw(weights, drawn[step], kind, want.seed is not None)
        if want.temperature > 0.0 and (want.seed is None or truth.suite.own_draws):
            self._repeat((asked.prompt, adapter, want.temperature), want, drawn, logprob, ends)

    def _repeat(
        self,
        key: _Key,
        want: Generate,
        drawn: tuple[int, ...],
        logprob: float,
        ends: frozenset[int],
    ) -> None:
        """Compare with what was drawn before by the same seed, and by others."""
        seed = None if want.seed is None else want.seed & _MAX_SEED
        if not ends:
            self._draws.stream(key, seed, list(drawn), logprob)
        if seed is None:
            return
        known = self._streams.get((key, seed))
        if known is not None:
            self._compared += 1
            until = next((n for n, token in enumerate(known) if token in ends), len(known))
            common = min(until, len(drawn))
            short = until < len(known) and len(drawn) > until
            self._unlike += known[:common] != drawn[:common] or short
        if known is None or (not ends and len(drawn) > len(known)):
            self._streams[key, seed] = drawn


def _most(asked: Asked, truth: Truth) -> int:
    want = asked.want
    assert isinstance(want, Generate)
    # The last row an engine can compute is that of its longest prompt.
    return max(0, min(want.max_tokens, truth.info.max_prompt_tokens - len(asked.prompt) + 1))


def _ends(asked: Asked, truth: Truth) -> frozenset[int]:
    want = asked.want
    assert isinstance(want, Generate)
    ids = truth.info.eos_token_ids if want.eos_token_ids is None else want.eos_token_ids
    return frozenset(ids)


def _drawn_at(
    weights: Weights, candidates: Sequence[int], place: float, want: Generate, truth: Truth
) -> bool:
    """Whether one of these tokens lies at this place of the cumulative distribution.

    Rounding of rows within the tolerance moves it by this much at most.
    """
    slack = min(0.05, 2 * truth.tolerance / want.temperature)
    cumulative = np.cumsum(weights)
    ids = np.asarray(candidates, dtype=np.int64)
    above = place <= cumulative[ids] + slack
    below = place >= cumulative[ids] - weights[ids] - slack
    return bool((above & below).any())


def is_cut_short(outcome: Outcome, asked: Asked) -> bool:
    """Whether a continuation ended long before it had the tokens that were asked for."""
    want, answer = asked.want, outcome.answer
    if not isinstance(want, Generate) or not isinstance(answer, Generation):
        return True
    return answer.token_ids.size < want.max_tokens // 2
