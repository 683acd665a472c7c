"""Engines whose continuations are not what was asked for."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lmpool.backends import Engine, Outcome, Request
from lmpool.backends.sampling import Sampler, sample_token
from lmpool.wants import Generate, Generation
from tests.engines.mutants.engines import F32, Bent, Model, Wrapper
from tests.engines.mutants.registry import BOTH, mutant
from tests.engines.mutants.witnesses import (
    LONGEST,
    ask,
    ask_rightly,
    check,
    continuations,
    drawn,
    prompt_of,
    prompts_of,
    refused,
    request,
    requests_of,
    run,
    scenario,
)

PLAIN = Generate(8, (), 1.0, 1)


class Asked(Bent):
    """Runs another want than the one that was asked for."""

    def taken(self, request: Request) -> Request:
        want = request.want
        if not isinstance(want, Generate):
            return request
        return replace(request, want=self.instead(want, request))

    def instead(self, want: Generate, request: Request) -> Generate:
        return want


# --- seeds ---------------------------------------------------------------------------------------


@mutant("seeds-cut-to-32-bits", continuations(replace(PLAIN, seed=(1 << 32) + 5)), forms=BOTH)
class SeedsCutTo32Bits(Asked):
    """Seeds that differ in 64 bits draw apart."""

    def instead(self, want, request):
        return replace(want, seed=None if want.seed is None else want.seed & 0xFFFFFFFF)


@mutant("seeds-rounded-to-doubles", continuations(replace(PLAIN, seed=(1 << 62) + 1)), subtle=True)
class SeedsRoundedToDoubles(Asked):
    """All 64 bits of a seed matter, past 2**53 as well."""

    def instead(self, want, request):
        return replace(want, seed=None if want.seed is None else int(float(want.seed)))


@mutant("seeds-past-2-to-the-63-refused", continuations(replace(PLAIN, seed=1 << 63)), forms=BOTH)
class SeedsPast63BitsRefused(Bent):
    """Any integer is a seed."""

    def taken(self, request: Request) -> Request:
        want = request.want
        if isinstance(want, Generate) and (want.seed or 0) >= 1 << 63:
            return replace(request, tokens=np.empty(0, np.uint32))
        return request


@mutant(
    "seeds-past-64-bits-are-the-largest",
    continuations(replace(PLAIN, seed=(1 << 64) + 3)),
    subtle=True,
)
class SeedsClipped(Asked):
    """Seeds that are equal modulo 2**64 draw alike."""

    def instead(self, want, request):
        return replace(want, seed=None if want.seed is None else min(want.seed, (1 << 64) - 1))


@mutant("seeds-lose-their-sign", continuations(replace(PLAIN, seed=-7)), subtle=True)
class SeedsLoseTheirSign(Asked):
    """Any integer is a seed: -7 draws as 2**64 - 7 does."""

    def instead(self, want, request):
        return replace(want, seed=None if want.seed is None else abs(want.seed))


@mutant("seed-0-taken-for-none", continuations(replace(PLAIN, seed=0)), subtle=True)
class SeedZeroTakenForNone(Asked):
    """Zero is a seed as others are."""

    def instead(self, want, request):
        return replace(want, seed=want.seed or 0x5EED)


def _unseeded(engine: Engine) -> None:
    want = Generate(8, (), 1.0, None)
    outcomes = [
        *ask(engine, requests_of([[1, 2]] * 4, want=want)),
        *ask(engine, requests_of([[1, 2]], want=want)),
    ]
    found = {tuple(o.answer.token_ids.tolist()) for o in outcomes}
    assert len(found) == 5


@mutant("no-seed-is-seed-0", scenario(_unseeded), forms=BOTH)
class NoSeedIsZero(Asked):
    """Without a seed every ask draws anew."""

    def instead(self, want, request):
        return replace(want, seed=want.seed or 0)


@mutant("no-seed-is-one-seed-for-all-of-a-batch", scenario(_unseeded), subtle=True)
class NoSeedIsOneSeedABatch(Wrapper):
    """Without a seed every prompt draws on its own."""

    batches = 0

    def submit(self, requests: Sequence[Request]) -> None:
        self.batches += 1
        super().submit(
            [
                replace(r, want=replace(r.want, seed=self.batches))
                if isinstance(r.want, Generate) and r.want.seed is None
                else r
                for r in requests
            ]
        )


@mutant("seeds-plus-the-place-in-the-batch", continuations(PLAIN, prompts=[[1], [2]]), forms=BOTH)
class SeedsPlusPlace(Wrapper):
    """One seed and prompt give one continuation, alone or in company."""

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(
            [
                replace(r, want=replace(r.want, seed=r.want.seed + n))
                if isinstance(r.want, Generate) and r.want.seed is not None
                else r
                for n, r in enumerate(requests)
            ]
        )


@mutant("seeds-mixed-with-the-id", continuations(PLAIN, prompts=[[1], [2]]), subtle=True)
class SeedsMixedWithTheId(Asked):
    """One seed and prompt give one continuation, whatever the request is called."""

    def instead(self, want, request):
        return replace(want, seed=None if want.seed is None else want.seed ^ zlib.crc32(request.id))


# --- draws ---------------------------------------------------------------------------------------


def _tall(engine: Engine) -> None:
    ask_rightly(engine, requests_of(prompts_of(6), want=Generate(30, (), 1.5, 9)))


@mutant("the-same-draw-every-step", continuations(PLAIN), forms=BOTH)
class SameDrawEveryStep(Sampler):
    """Each step has a draw of its own."""

    def draw(self, logprobs, step):
        return super().draw(logprobs, 0)


@mutant("draws-repeat-after-16-tokens", continuations(replace(PLAIN, max_tokens=20)), subtle=True)
class DrawsRepeat(Sampler):
    """Each step has a draw of its own, also the 17th."""

    def draw(self, logprobs, step):
        return super().draw(logprobs, step % 16)


@mutant("draws-counted-by-the-context", continuations(PLAIN), subtle=True)
class DrawsCountedFromOne(Sampler):
    """The first token is drawn at step 0."""

    def draw(self, logprobs, step):
        return super().draw(logprobs, step + 1)


class _Tempered(Sampler):
    """Draws at another temperature."""

    def at(self, step: int) -> float:
        return self.temperature

    def draw(self, logprobs, step):
        token = sample_token(logprobs, self.at(step), self.seed, step)
        return token, token in self.eos_token_ids


@mutant(
    "temperature-for-the-first-token-alone",
    continuations(replace(PLAIN, temperature=0.4)),
    forms=BOTH,
)
class TemperatureForTheFirstToken(_Tempered):
    """A temperature holds for every token."""

    def at(self, step):
        return self.temperature if step == 0 else 1.0


@mutant(
    "temperature-below-0.3-is-greedy",
    continuations(replace(PLAIN, temperature=0.29, max_tokens=30)),
    forms=BOTH,
)
class LowTemperatureIsGreedy(_Tempered):
    """Temperature 0 alone is greedy."""

    def at(self, step):
        return 0.0 if self.temperature < 0.3 else self.temperature


@mutant(
    "temperature-over-2-is-2",
    continuations(replace(PLAIN, temperature=4.0, max_tokens=30)),
    subtle=True,
)
class HighTemperatureIsTwo(_Tempered):
    """A temperature may be any finite number."""

    def at(self, step):
        return min(self.temperature, 2.0)


@mutant("temperature-0-is-1", continuations(replace(PLAIN, temperature=0.0)))
class GreedyDraws(_Tempered):
    """Temperature 0 takes the likeliest token."""

    def at(self, step):
        return self.temperature or 1.0


@mutant(
    "temperature-in-whole-tenths",
    continuations(replace(PLAIN, temperature=0.84, max_tokens=40)),
    subtle=True,
)
class TemperatureRounded(_Tempered):
    """A temperature is taken as it is."""

    def at(self, step):
        return round(self.temperature, 1)


@mutant(
    "temperature-twice-for-adapters",
    continuations(replace(PLAIN, temperature=0.6), adapter="a"),
    forms=BOTH,
)
class TemperatureTwiceForAdapters(Asked):
    """A temperature is applied once, with an adapter, too."""

    def instead(self, want, request):
        return want if request.adapter is None else replace(want, temperature=want.temperature**2)


@mutant(
    "temperature-of-the-first-of-a-batch-for-all",
    scenario(
        lambda engine: ask_rightly(
            engine,
            [
                request(n, [n], None, replace(PLAIN, temperature=t))
                for n, t in enumerate((1.0, 0.1))
            ],
        )
    ),
)
class TemperatureOfTheFirst(Wrapper):
    """Continuations that are submitted at once have temperatures of their own."""

    def submit(self, requests: Sequence[Request]) -> None:
        first = next((r.want.temperature for r in requests if isinstance(r.want, Generate)), 1.0)
        super().submit(
            [
                replace(r, want=replace(r.want, temperature=first))
                if isinstance(r.want, Generate)
                else r
                for r in requests
            ]
        )


def _first(drawing: F32, most: int | float) -> F32:
    """The row with all but the likeliest left out: so many, or so much of the mass."""
    order = np.argsort(-drawing, kind="stable")
    if isinstance(most, float):
        mass = np.cumsum(np.exp(drawing[order].astype(np.float64)))
        most = int(np.searchsorted(mass, most)) + 1
    cut = np.full_like(drawing, -np.inf)
    cut[order[:most]] = drawing[order[:most]]
    return cut


@mutant("top-p-0.95", scenario(_tall), forms=BOTH)
class TopP(Sampler):
    """Every token of the vocabulary may be drawn: there is no top-p."""

    def draw(self, logprobs, step):
        return super().draw(_first(logprobs, 0.95), step)


@mutant("top-k-50", scenario(_tall))
class TopK(Sampler):
    """Every token of the vocabulary may be drawn: there is no top-k."""

    def draw(self, logprobs, step):
        return super().draw(_first(logprobs, 50), step)


@mutant(
    "one-token-continuations-are-greedy",
    continuations(replace(PLAIN, max_tokens=1), prompts=prompts_of(20)),
    subtle=True,
)
class OneTokenIsGreedy(Asked):
    """One token is drawn as the first of many is."""

    def instead(self, want, request):
        return replace(want, temperature=0.0) if want.max_tokens == 1 else want


# --- ends ----------------------------------------------------------------------------------------


def _eos_first(engine: Engine) -> None:
    first = drawn(request(1, [1, 2], None, PLAIN))
    ends = replace(PLAIN, eos_token_ids=(first[0],))
    ask_rightly(engine, requests_of([[1, 2]], want=ends))
    ask_rightly(engine, requests_of([[1, 2]], want=replace(PLAIN, eos_token_ids=(first[3],))))


@mutant("eos-ignored-as-the-first-token", scenario(_eos_first), forms=BOTH)
class EosIgnoredFirst(Sampler):
    """A continuation whose first token is its end is empty."""

    def draw(self, logprobs, step):
        token, ends = super().draw(logprobs, step)
        return token, ends and step > 0


@mutant("eos-masked-in-the-first-step", scenario(_eos_first), subtle=True)
class EosMaskedFirst(Sampler):
    """What ends a continuation may be drawn first."""

    def draw(self, logprobs, step):
        if step == 0:
            logprobs = logprobs.copy()
            logprobs[list(self.eos_token_ids)] = -np.inf
        return super().draw(logprobs, step)


@mutant("eos-is-part-of-the-answer", scenario(_eos_first), forms=BOTH)
class EosIncluded(Wrapper):
    """What ended a continuation is no part of it."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.asked: dict[bytes, Request] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        self.asked |= {r.id: r for r in requests}
        super().submit(requests)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        return [self._longer(outcome, self.asked.pop(outcome.id, None)) for outcome in outcomes]

    def _longer(self, outcome: Outcome, asked: Request | None) -> Outcome:
        if asked is None or outcome.answer is None or not isinstance(asked.want, Generate):
            return outcome
        ids, want = outcome.answer.token_ids, asked.want
        eos = self.info.eos_token_ids if want.eos_token_ids is None else want.eos_token_ids
        room = self.info.max_prompt_tokens + 1 - asked.tokens.size
        if not eos or ids.size == min(want.max_tokens, room):
            return outcome
        return replace(outcome, answer=Generation(np.append(ids, np.uint32(eos[0]))))


@mutant("eos-of-none-is-none", continuations(Generate(60, None, 4.0, 1), prompts=prompts_of(40)))
class EosOfNoneIsNone(Asked):
    """Where no end is named, the model's own ends a continuation."""

    def instead(self, want, request):
        return replace(want, eos_token_ids=want.eos_token_ids or ())


@mutant(
    "no-eos-is-the-models-own",
    continuations(Generate(60, (), 4.0, 1), prompts=prompts_of(40)),
    forms=BOTH,
)
class NoEosIsTheModels(Asked):
    """Where no token is to end it, a continuation goes on behind the model's own end."""

    def instead(self, want, request):
        return replace(want, eos_token_ids=want.eos_token_ids or None)


@mutant(
    "eos-ids-beside-the-models-own",
    continuations(Generate(60, (3,), 4.0, 1), prompts=prompts_of(40)),
    subtle=True,
)
class EosBesideTheModels(Asked):
    """The ends that are named are all."""

    def instead(self, want, request):
        own = self.info.eos_token_ids if want.eos_token_ids else ()
        return replace(
            want, eos_token_ids=None if want.eos_token_ids is None else (*want.eos_token_ids, *own)
        )


@mutant(
    "eos-ids-but-the-first-are-ignored",
    continuations(Generate(60, tuple(range(50)), 1.0, 1), prompts=prompts_of(4)),
)
class EosFirstOnly(Asked):
    """Each of the named tokens ends a continuation."""

    def instead(self, want, request):
        return replace(
            want, eos_token_ids=None if want.eos_token_ids is None else want.eos_token_ids[:1]
        )


@mutant(
    "eos-ids-beyond-16-are-ignored",
    continuations(Generate(60, tuple(range(100)), 1.0, 1), prompts=prompts_of(9)),
    subtle=True,
)
class EosBeyond16(Asked):
    """Each of the named tokens ends a continuation, the last of 256 as well."""

    def instead(self, want, request):
        return replace(
            want, eos_token_ids=None if want.eos_token_ids is None else want.eos_token_ids[:16]
        )


@mutant(
    "continuations-of-32-tokens-at-most", continuations(replace(PLAIN, max_tokens=40)), forms=BOTH
)
class AtMost32(Asked):
    """A continuation has as many tokens as were asked for."""

    def instead(self, want, request):
        return replace(want, max_tokens=min(want.max_tokens, 32))


@mutant(
    "continuations-one-short-at-the-longest-prompt",
    continuations(PLAIN, prompts=[prompt_of(LONGEST), prompt_of(LONGEST - 2)]),
    forms=BOTH,
)
class OneShortAtTheLongest(Asked):
    """A token is drawn even behind the longest prompt: that is the last row there is."""

    def instead(self, want, request):
        room = self.info.max_prompt_tokens - request.tokens.size
        return replace(want, max_tokens=min(want.max_tokens, room))


@mutant("continuations-into-the-limit-fail", continuations(PLAIN, prompts=[prompt_of(LONGEST - 2)]))
class IntoTheLimitFails(Sampler):
    """A continuation that fills the context ends there, with what it has."""

    @classmethod
    def of(cls, want, prompt_tokens, info):
        right = super().of(want, prompt_tokens, info)
        return (
            right
            if prompt_tokens > info.max_prompt_tokens
            else replace(right, max_tokens=want.max_tokens)
        )


def _refuse_temperatures(make) -> None:
    bad = [replace(PLAIN, temperature=t) for t in (float("nan"), float("inf"), -1.0)]
    refused([[1, 2]], wants=bad)(make)


@mutant("temperatures-that-are-no-number-are-1", _refuse_temperatures)
class BadTemperatureIsOne(Asked):
    """A temperature that is negative or not finite is refused."""

    def instead(self, want, request):
        return want if 0 <= want.temperature < np.inf else replace(want, temperature=1.0)


# --- answers -------------------------------------------------------------------------------------


class _Answered(Wrapper):
    """Changes what continuations are answered with."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        return [
            replace(o, answer=Generation(self.answered(o)))
            if isinstance(o.answer, Generation)
            else o
            for o in outcomes
        ]

    def answered(self, outcome: Outcome):
        return outcome.answer.token_ids


@mutant("tokens-as-int64", continuations(PLAIN))
class TokensAsInt64(_Answered):
    """A continuation's tokens are uint32."""

    def answered(self, outcome):
        return outcome.answer.token_ids.astype(np.int64)


@mutant("tokens-as-a-list", continuations(PLAIN), forms="fed")
class TokensAsAList(_Answered):
    """A continuation's tokens are an array."""

    def answered(self, outcome):
        return outcome.answer.token_ids.tolist()


@mutant(
    "tokens-that-are-overwritten-later", scenario(lambda engine: _keep_answers(engine)), forms=BOTH
)
class TokensOverwritten(_Answered):
    """An answer that was handed out stays as it is."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.buffer = np.zeros(self.info.max_prompt_tokens + 1, np.uint32)

    def answered(self, outcome):
        ids = outcome.answer.token_ids
        self.buffer[: ids.size] = ids
        return self.buffer[: ids.size]


def _keep_answers(engine: Engine) -> None:
    asked = [request(n, [n + 1], None, PLAIN) for n in range(2)]
    outcomes = [ask(engine, [each])[0] for each in asked]
    for each, outcome in zip(asked, outcomes, strict=True):
        check(each, outcome)


@mutant("tokens-with-the-prompt-before-them", continuations(PLAIN))
class TokensWithThePrompt(_Answered):
    """A continuation's tokens are without the prompt."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.prompts: dict[bytes, np.ndarray] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        self.prompts = {**self.prompts, **{r.id: r.tokens for r in requests}}
        super().submit(requests)

    def answered(self, outcome):
        return np.concatenate([self.prompts.pop(outcome.id), outcome.answer.token_ids])


@mutant("continuations-that-end-at-once-are-rows", scenario(_eos_first), subtle=True)
class EmptyContinuationsAreRows(Wrapper):
    """A continuation is answered with tokens, also with none."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        row = np.full(self.info.vocab_size, -np.log(self.info.vocab_size), np.float32)
        return [
            Outcome(o.id, row=row) if o.answer is not None and not o.answer.token_ids.size else o
            for o in outcomes
        ]


@mutant(
    "continuations-forget-what-lies-64-tokens-back",
    continuations(replace(PLAIN, max_tokens=70)),
    subtle=True,
)
class ContinuationsForget(Model):
    """Every token is drawn behind the whole prompt and all the others."""

    def __init__(self, info) -> None:
        super().__init__(info)
        self.began: dict[bytes, int] = {}

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        self.began = {
            r.id: min(self.began.get(r.id, r.tokens.size), r.tokens.size) for r in requests
        }
        return [
            self.row(
                r.tokens[-64:] if r.tokens.size - self.began[r.id] > 60 else r.tokens, r.adapter
            )
            for r in requests
        ]


def _company(engine: Engine) -> None:
    asked = requests_of(prompts_of(9), want=Generate(5, (), 1.0, 8))
    engine.submit(asked)
    engine.step()
    rows = requests_of(prompts_of(40, seed=3), start=100)
    engine.submit(rows)
    found = run(engine, [each.id for each in (*asked, *rows)])
    for each in (*asked, *rows):
        check(each, found[each.id])


@mutant(
    "continuations-swap-contexts-beside-many-rows",
    scenario(_company),
    forms=BOTH,
    subtle=True,
    most=64,
)
class ContinuationsSwapContexts(Model):
    """A continuation's context is its own (wrong: two of them, beside more than 32 rows)."""

    def __init__(self, info) -> None:
        super().__init__(info)
        self.before: set[bytes] = set()

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        found = super().rows(requests)
        going_on = [n for n, r in enumerate(requests) if r.id in self.before]
        self.before = {r.id for r in requests}
        if len(requests) - len(going_on) > 32 and len(going_on) > 1:
            a, b = going_on[:2]
            found[a], found[b] = found[b], found[a]
        return found


@mutant("seeds-plus-how-many-came-before", scenario(lambda engine: _steps_apart(engine)))
class SeedsPlusHowManyCame(Asked):
    """One seed and prompt give one continuation, now and later."""

    came = 0

    def instead(self, want, request):
        self.came += 1
        return replace(want, seed=None if want.seed is None else want.seed + self.came - 1)


def _steps_apart(engine: Engine) -> None:
    for _ in range(2):
        ask_rightly(engine, requests_of([[1, 2]], want=PLAIN))
