"""Engines that leave other tokens out, stop elsewhere, or tell other numbers than asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lmpool.backends import Engine, Outcome, Request
from lmpool.backends.engine import Tokens
from lmpool.backends.sampling import Sampler
from lmpool.wants import FinishReason, Generate, Generation
from tests.engines.mutants.engines import F32, Remembering
from tests.engines.mutants.registry import BOTH, mutant
from tests.engines.mutants.seeds import PLAIN, Asked
from tests.engines.mutants.witnesses import (
    LONGEST,
    ask_rightly,
    continuations,
    drawn,
    prompt_of,
    prompts_of,
    request,
    requests_of,
    scenario,
)

LONG = replace(PLAIN, max_tokens=40, temperature=1.2)
TOLD = replace(PLAIN, temperature=0.6, top_k=9, logprobs=True, top_logprobs=4)

# --- what is left out ----------------------------------------------------------------------------


@mutant("top-k-takes-one-more", continuations(replace(LONG, top_k=3)), forms=BOTH)
class TopKOneMore(Asked):
    """top_k leaves so many tokens, and not one more."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return replace(want, top_k=want.top_k + 1 if want.top_k > 0 else want.top_k)


@mutant("top-k-is-ignored", continuations(replace(LONG, top_k=20)))
class TopKIgnored(Asked):
    """top_k leaves the likeliest alone."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return replace(want, top_k=min(0, want.top_k))


@mutant("top-p-one-token-short", continuations(replace(LONG, top_p=0.6)), forms=BOTH)
class TopPOneShort(Sampler):
    """The last token that top_p leaves is the one that reaches the mass."""

    def draw(self, logprobs: F32, step: int) -> int:
        if self.top_p == 1.0 or not self.temperature:
            return super().draw(logprobs, step)
        weights = np.exp((logprobs - logprobs.max()).astype(np.float64) / self.temperature)
        order = np.argsort(-weights, kind="stable")
        kept = int(np.searchsorted(np.cumsum(weights[order]), self.top_p * weights.sum()))
        cut = np.full_like(logprobs, -np.inf)
        cut[order[: max(1, kept)]] = logprobs[order[: max(1, kept)]]
        return replace(self, top_p=1.0).draw(cut, step)


@mutant("top-p-of-the-mass-at-temperature-1", continuations(replace(LONG, top_p=0.6)))
class TopPColdMass(Sampler):
    """top_p is of the mass at the temperature of the draw."""

    def draw(self, logprobs: F32, step: int) -> int:
        if self.top_p == 1.0 or not self.temperature:
            return super().draw(logprobs, step)
        order = np.argsort(-logprobs, kind="stable")
        mass = np.exp(logprobs[order].astype(np.float64))
        kept = np.cumsum(mass) - mass < self.top_p * mass.sum()
        cut = np.full_like(logprobs, -np.inf)
        cut[order[kept]] = logprobs[order[kept]]
        return replace(self, top_p=1.0).draw(cut, step)


@mutant("top-p-before-top-k", continuations(replace(LONG, top_p=0.5, top_k=12)), subtle=True)
class TopPBeforeTopK(Sampler):
    """top_p is of the mass that min_p and top_k leave."""

    def draw(self, logprobs: F32, step: int) -> int:
        if self.top_p == 1.0 or not self.temperature:
            return super().draw(logprobs, step)
        weights = np.exp((logprobs - logprobs.max()).astype(np.float64) / self.temperature)
        order = np.argsort(-weights, kind="stable")
        mass = np.cumsum(weights[order]) - weights[order]
        kept = order[mass < self.top_p * weights.sum()]
        cut = np.full_like(logprobs, -np.inf)
        cut[kept] = logprobs[kept]
        return replace(self, top_p=1.0).draw(cut, step)


@mutant("min-p-of-all-the-mass", continuations(replace(LONG, min_p=0.2)), forms=BOTH)
class MinPOfAll(Sampler):
    """min_p is relative to the likeliest token's probability."""

    def draw(self, logprobs: F32, step: int) -> int:
        if not self.min_p or not self.temperature:
            return super().draw(logprobs, step)
        weights = np.exp((logprobs - logprobs.max()).astype(np.float64) / self.temperature)
        kept = (weights / weights.sum() >= self.min_p) | (weights == 1.0)
        cut = np.where(kept, logprobs, np.float32(-np.inf))
        return replace(self, min_p=0.0).draw(cut, step)


@mutant("min-p-at-temperature-1", continuations(replace(LONG, temperature=1.6, min_p=0.2)))
class MinPColdest(Sampler):
    """min_p holds at the temperature of the draw."""

    def draw(self, logprobs: F32, step: int) -> int:
        if not self.min_p or not self.temperature:
            return super().draw(logprobs, step)
        kept = logprobs >= logprobs.max() + np.log(self.min_p)
        cut = np.where(kept, logprobs, np.float32(-np.inf))
        return replace(self, min_p=0.0).draw(cut, step)


@mutant("top-p-of-0-takes-everything", scenario(lambda engine: _tiny_top_p(engine)))
class TinyTopP(Asked):
    """However little top_p is, the likeliest token is left, and it alone."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return replace(want, top_p=1.0) if 0 < want.top_p < 1e-3 else want


def _tiny_top_p(engine: Engine) -> None:
    ask_rightly(engine, requests_of(prompts_of(6), want=replace(PLAIN, top_p=1e-6)))


# --- where it stops ------------------------------------------------------------------------------


def stop_across_steps(engine: Engine) -> None:
    first = drawn(request(1, [1, 2], None, PLAIN))
    for stop in ((first[2:4],), (first[:1],), (first[1:4], first[5:6]), ((2, first[0]),)):
        want = replace(PLAIN, stop=tuple(tuple(ids) for ids in stop))
        ask_rightly(engine, requests_of([[1, 2]], want=want))


@mutant("stop-is-ignored", scenario(stop_across_steps), forms=BOTH)
class StopIgnored(Asked):
    """A stop sequence ends a continuation."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return replace(want, stop=tuple(ids for ids in want.stop_sequences if not ids))


@mutant("stop-of-one-token-alone", scenario(stop_across_steps))
class StopOfOneToken(Asked):
    """A stop sequence of several tokens ends a continuation."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return replace(want, stop=tuple(ids for ids in want.stop_sequences if len(ids) < 2))


@mutant("stop-at-its-last-token", scenario(stop_across_steps))
class StopAtItsLastToken(Sampler):
    """All of a stop sequence is to come, in its order."""

    def end(self, drawn: Tokens) -> tuple[FinishReason, int] | None:
        for ids in self.stop:
            if len(drawn) and int(drawn[-1]) == ids[-1]:
                return "stop", min(len(ids), len(drawn))
        return super().end(drawn)


@mutant("stop-across-the-prompts-end", scenario(stop_across_steps), subtle=True)
class StopAcrossThePrompt(Remembering):
    """What the prompt ends with is no part of a stop sequence."""

    def submit(self, requests: list[Request]) -> None:  # type: ignore[override]
        super().submit([self._with_rest(each) for each in requests])

    def _with_rest(self, asked: Request) -> Request:
        want = asked.want
        if not isinstance(want, Generate) or not asked.tokens.size:
            return asked
        last = int(asked.tokens[-1])
        rests = [ids[1:] for ids in want.stop_sequences if len(ids) > 1 and ids[0] == last]
        return replace(asked, want=replace(want, stop=(*want.stop_sequences, *rests)))


class _Said(Remembering):
    """Tells something else of a continuation."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        asked = [self.asked.get(outcome.id) for outcome in outcomes]
        super().handed(outcomes)
        return [
            replace(o, answer=self.told(o.answer, a))
            if isinstance(o.answer, Generation) and a is not None
            else o
            for o, a in zip(outcomes, asked, strict=True)
        ]

    def told(self, answer: Generation, asked: Request) -> Generation:
        return answer


@mutant("stop-counted-as-one-token", scenario(stop_across_steps), forms=BOTH)
class StopCountedAsOne(_Said):
    """`ending` is how many tokens the stop sequence has."""

    def told(self, answer: Generation, asked: Request) -> Generation:
        return replace(answer, ending=min(1, answer.ending))


@mutant("stop-is-cut-off", scenario(stop_across_steps))
class StopCutOff(_Said):
    """What was drawn of a stop sequence is there."""

    def told(self, answer: Generation, asked: Request) -> Generation:
        cut = answer.finish_reason == "stop"
        return replace(answer, token_ids=answer.text_ids, ending=0) if cut else answer


@mutant("context-is-said-to-be-length", continuations(PLAIN, prompts=[prompt_of(LONGEST - 2)]))
class ContextIsLength(_Said):
    """Where the model's length ends a continuation, it is said."""

    def told(self, answer: Generation, asked: Request) -> Generation:
        cut = answer.finish_reason == "context"
        return replace(answer, finish_reason="length") if cut else answer


@mutant("stop-is-said-to-be-eos", scenario(stop_across_steps))
class StopIsEos(_Said):
    """An EOS token and a stop sequence are told apart."""

    def told(self, answer: Generation, asked: Request) -> Generation:
        stopped = answer.finish_reason == "stop"
        return replace(answer, finish_reason="eos") if stopped else answer


@mutant("full-length-is-said-to-be-context", continuations(PLAIN))
class LengthIsContext(_Said):
    """A continuation as long as it was to be ends by its length."""

    def told(self, answer: Generation, asked: Request) -> Generation:
        full = answer.finish_reason == "length"
        return replace(answer, finish_reason="context") if full else answer


# --- what is told --------------------------------------------------------------------------------


@mutant("logprobs-at-the-temperature", continuations(TOLD), forms=BOTH)
class LogprobsAtTheTemperature(_Said):
    """The log-probabilities of a continuation are the model's, at temperature 1."""

    def told(self, answer: Generation, asked: Request) -> Generation:
        want = asked.want
        assert isinstance(want, Generate)
        if answer.logprobs is None or want.temperature in (0.0, 1.0):
            return answer
        warmer = (answer.logprobs / np.float32(want.temperature)).astype(np.float32)
        return replace(answer, logprobs=warmer)


@mutant("logprobs-of-the-next-token", continuations(TOLD))
class LogprobsShifted(_Said):
    """Each log-probability is that of its own token."""

    def told(self, answer: Generation, asked: Request) -> Generation:
        if answer.logprobs is None:
            return answer
        return replace(answer, logprobs=np.roll(answer.logprobs, 1))


@mutant("logprobs-that-nobody-asked-for", continuations(PLAIN))
class LogprobsUnasked(_Said):
    """What was not asked for is not told."""

    def told(self, answer: Generation, asked: Request) -> Generation:
        if answer.logprobs is not None:
            return answer
        return replace(answer, logprobs=np.zeros(answer.token_ids.size, np.float32))


@mutant("top-logprobs-left-out", continuations(TOLD))
class TopLeftOut(_Said):
    """The likeliest tokens of each step are told where they were asked for."""

    def told(self, answer: Generation, asked: Request) -> Generation:
        return replace(answer, top_logprobs=None)


@mutant("top-logprobs-of-what-is-left", continuations(TOLD))
class TopOfWhatIsLeft(_Said):
    """The likeliest tokens are told as the model has them, with nothing left out."""

    def told(self, answer: Generation, asked: Request) -> Generation:
        want, top = asked.want, answer.top_logprobs
        assert isinstance(want, Generate)
        if top is None or not want.top_k or want.temperature == 0.0:
            return answer
        rest = np.full(answer.token_ids.size, -np.inf, np.float32)
        return replace(answer, top_logprobs=replace(top, rest=rest))
