"""Engines whose continuations end too early, or too late."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lmpool.backends import Engine, EngineInfo, Outcome, Request
from lmpool.backends.engine import Tokens
from lmpool.backends.sampling import Sampler
from lmpool.uniforms import uniform
from lmpool.wants import FinishReason, Generate, Generation
from tests.engines.mutants.engines import F32, Remembering
from tests.engines.mutants.registry import BOTH, Make, mutant
from tests.engines.mutants.seeds import PLAIN, Asked
from tests.engines.mutants.witnesses import (
    LONGEST,
    ask_rightly,
    continuations,
    drawn,
    prompt_of,
    prompts_of,
    refused,
    request,
    requests_of,
    scenario,
)

LAST_AT_3 = next(seed for seed in range(100_000) if uniform(seed, 3) > 0.9995)
"""A seed whose fourth draw, at a high temperature, is the last token: the model's own end."""


def eos_first(engine: Engine) -> None:
    first = drawn(request(1, [1, 2], None, PLAIN))
    ends = replace(PLAIN, eos_token_ids=(first[0],))
    ask_rightly(engine, requests_of([[1, 2]], want=ends))
    ask_rightly(engine, requests_of([[1, 2]], want=replace(PLAIN, eos_token_ids=(first[3],))))


@mutant("eos-ignored-as-the-first-token", scenario(eos_first), forms=BOTH)
class EosIgnoredFirst(Sampler):
    """A continuation whose first token is its end has that alone."""

    def end(self, drawn: Tokens) -> tuple[FinishReason, int] | None:
        found = super().end(drawn)
        return None if len(drawn) == 1 and found == ("eos", 1) else found


@mutant("eos-masked-in-the-first-step", scenario(eos_first), subtle=True)
class EosMaskedFirst(Sampler):
    """What ends a continuation may be drawn first."""

    def draw(self, logprobs: F32, step: int) -> int:
        if step == 0:
            logprobs = logprobs.copy()
            logprobs[list(self.eos_token_ids)] = -np.inf
        return super().draw(logprobs, step)


@mutant("eos-is-no-part-of-the-answer", scenario(eos_first), forms=BOTH)
class EosLeftOut(Remembering):
    """What ended a continuation is part of it."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        super().handed(outcomes)
        return [self._shorter(outcome) for outcome in outcomes]

    def _shorter(self, outcome: Outcome) -> Outcome:
        answer = outcome.answer
        if not isinstance(answer, Generation) or not answer.ending:
            return outcome
        return replace(outcome, answer=replace(answer, token_ids=answer.text_ids))


@mutant("eos-of-none-is-none", continuations(Generate(9, None, 4.0, LAST_AT_3)))
class EosOfNoneIsNone(Asked):
    """Where no end is named, the model's own ends a continuation."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return replace(want, eos_token_ids=want.eos_token_ids or ())


@mutant(
    "no-eos-is-the-models-own",
    continuations(Generate(9, (), 4.0, LAST_AT_3)),
    forms=BOTH,
)
class NoEosIsTheModels(Asked):
    """Where no token is to end it, a continuation goes on behind the model's own end."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return replace(want, eos_token_ids=want.eos_token_ids or None)


@mutant(
    "eos-ids-beside-the-models-own",
    continuations(Generate(9, (3,), 4.0, LAST_AT_3)),
    subtle=True,
)
class EosBesideTheModels(Asked):
    """The ends that are named are all."""

    def instead(self, want: Generate, request: Request) -> Generate:
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

    def instead(self, want: Generate, request: Request) -> Generate:
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

    def instead(self, want: Generate, request: Request) -> Generate:
        return replace(
            want, eos_token_ids=None if want.eos_token_ids is None else want.eos_token_ids[:16]
        )


@mutant(
    "continuations-of-32-tokens-at-most", continuations(replace(PLAIN, max_tokens=40)), forms=BOTH
)
class AtMost32(Asked):
    """A continuation has as many tokens as were asked for."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return replace(want, max_tokens=min(want.max_tokens, 32))


@mutant(
    "continuations-one-short-at-the-longest-prompt",
    continuations(PLAIN, prompts=[prompt_of(LONGEST), prompt_of(LONGEST - 2)]),
    forms=BOTH,
)
class OneShortAtTheLongest(Asked):
    """A token is drawn even behind the longest prompt: that is the last row there is."""

    def instead(self, want: Generate, request: Request) -> Generate:
        room = self.info.max_prompt_tokens - request.tokens.size
        return replace(want, max_tokens=min(want.max_tokens, room))


@mutant("continuations-into-the-limit-fail", continuations(PLAIN, prompts=[prompt_of(LONGEST - 2)]))
class IntoTheLimitFails(Sampler):
    """A continuation that fills the context ends there, with what it has."""

    @classmethod
    def of(cls, want: Generate, prompt_tokens: int, info: EngineInfo) -> Sampler:
        right = super().of(want, prompt_tokens, info)
        return (
            right
            if prompt_tokens > info.max_prompt_tokens
            else replace(right, max_tokens=want.max_tokens)
        )


def _refuse_temperatures(make: Make) -> None:
    bad = [replace(PLAIN, temperature=t) for t in (float("nan"), float("inf"), -1.0)]
    refused([[1, 2]], wants=bad)(make)


@mutant("temperatures-that-are-no-number-are-1", _refuse_temperatures)
class BadTemperatureIsOne(Asked):
    """A temperature that is negative or not finite is refused."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return want if 0 <= want.temperature < np.inf else replace(want, temperature=1.0)
