"""Engines that hand out something else than the tokens of a continuation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lmpool.backends import Engine, EngineInfo, Outcome, Request
from lmpool.wants import Generate, Generation
from tests.engines.mutants.engines import F32, Inner, Model, Remembering, Wrapper
from tests.engines.mutants.registry import BOTH, mutant
from tests.engines.mutants.seeds import PLAIN, Asked
from tests.engines.mutants.witnesses import (
    ask,
    ask_rightly,
    check,
    continuations,
    prompts_of,
    request,
    requests_of,
    run,
    scenario,
)


class _Answered(Wrapper):
    """Changes what continuations are answered with."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        return [
            replace(o, answer=replace(o.answer, token_ids=self.answered(o)))
            if isinstance(o.answer, Generation)
            else o
            for o in outcomes
        ]

    def answered(self, outcome: Outcome) -> Any:
        return outcome.answer.token_ids


@mutant("tokens-as-int64", continuations(PLAIN))
class TokensAsInt64(_Answered):
    """A continuation's tokens are int32."""

    def answered(self, outcome: Outcome) -> Any:
        return outcome.answer.token_ids.astype(np.int64)


@mutant("tokens-as-a-list", continuations(PLAIN), forms="fed")
class TokensAsAList(_Answered):
    """A continuation's tokens are an array."""

    def answered(self, outcome: Outcome) -> Any:
        return outcome.answer.token_ids.tolist()


@mutant(
    "tokens-that-are-overwritten-later", scenario(lambda engine: _keep_answers(engine)), forms=BOTH
)
class TokensOverwritten(_Answered):
    """An answer that was handed out stays as it is."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.buffer = np.zeros(self.info.max_prompt_tokens + 1, np.int32)

    def answered(self, outcome: Outcome) -> Any:
        ids = outcome.answer.token_ids
        self.buffer[: ids.size] = ids
        return self.buffer[: ids.size]


def _keep_answers(engine: Engine) -> None:
    asked = [request(n, [n + 1], None, PLAIN) for n in range(2)]
    outcomes = [ask(engine, [each])[0] for each in asked]
    for each, outcome in zip(asked, outcomes, strict=True):
        check(each, outcome)


@mutant("tokens-with-the-prompt-before-them", continuations(PLAIN))
class TokensWithThePrompt(Remembering):
    """A continuation's tokens are without the prompt."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        whole = [
            o if o.answer is None else replace(o, answer=self._whole(o.id, o.answer))
            for o in outcomes
        ]
        super().handed(outcomes)
        return whole

    def _whole(self, name: bytes, answer: Generation) -> Generation:
        whole = np.concatenate([self.asked[name].tokens.astype(np.int32), answer.token_ids])
        return replace(answer, token_ids=whole)


@mutant(
    "continuations-of-no-token-are-rows", continuations(replace(PLAIN, max_tokens=0)), subtle=True
)
class EmptyContinuationsAreRows(Wrapper):
    """A continuation is answered with tokens, also with none."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        row = np.full(self.info.vocab_size, -np.log(self.info.vocab_size), np.float32)
        return [
            Outcome(o.id, row=row)
            if isinstance(o.answer, Generation) and not o.answer.token_ids.size
            else o
            for o in outcomes
        ]


@mutant(
    "continuations-forget-what-lies-64-tokens-back",
    continuations(replace(PLAIN, max_tokens=70)),
    subtle=True,
)
class ContinuationsForget(Model):
    """Every token is drawn behind the whole prompt and all the others."""

    def __init__(self, info: EngineInfo) -> None:
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

    def __init__(self, info: EngineInfo) -> None:
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

    def instead(self, want: Generate, request: Request) -> Generate:
        self.came += 1
        return replace(want, seed=None if want.seed is None else want.seed + self.came - 1)


def _steps_apart(engine: Engine) -> None:
    for _ in range(2):
        ask_rightly(engine, requests_of([[1, 2]], want=PLAIN))
