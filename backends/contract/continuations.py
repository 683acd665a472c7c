"""Continuations: drawn from the model, by seed, alone and in company."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lmpool.backends.contract.adapters import ATTENTION, MLP, loaded
from lmpool.backends.contract.asking import ask, request_for
from lmpool.backends.contract.reference import PromptTokens
from lmpool.backends.contract.subject import Subject
from lmpool.backends.engine import Engine, Request
from lmpool.errors import PromptFailed
from lmpool.wants import Generate, Generation


class ContinuationContract(Subject):
    """What `Generate` is answered with."""

    def sample(
        self,
        engine: Engine,
        prompts: Sequence[PromptTokens],
        *,
        max_tokens: int = 10,
        eos: tuple[int, ...] = (),
        temperature: float = 0.0,
        seeds: Sequence[int] | None = None,
        company: Sequence[Request] = (),
    ) -> list[list[int]]:
        """The prompts' continuations, drawn together with `company`."""
        requests = [
            request_for(
                prompt,
                want=Generate(
                    max_tokens=max_tokens,
                    eos_token_ids=eos,
                    temperature=temperature,
                    seed=17 if seeds is None else seeds[i],
                ),
            )
            for i, prompt in enumerate(prompts)
        ]
        outcomes = ask(engine, [*requests, *company])[: len(requests)]
        continuations = []
        for outcome in outcomes:
            assert outcome.error is None, outcome.error
            assert isinstance(outcome.answer, Generation), "a row, where tokens were asked for"
            drawn = outcome.answer.token_ids
            assert drawn.dtype == np.uint32
            assert drawn.ndim == 1
            continuations.append(drawn.tolist())
        return continuations

    def test_greedy_takes_the_likeliest_token(self, opened: Engine) -> None:
        prompts = self.mixed_prompts(opened, 5, seed=16)
        company = [request_for(p) for p in self.mixed_prompts(opened, 9, seed=17)]
        drawn = self.sample(opened, prompts, max_tokens=8, company=company)
        for prompt, tokens in zip(prompts, drawn, strict=True):
            assert len(tokens) == 8
            rows = self.reference([[*prompt, *tokens[:n]] for n in range(8)])
            for row, token in zip(rows, tokens, strict=True):
                # A tie within the tolerance may go either way.
                assert row[token] >= row.max() - 2 * self.tolerance
        assert self.sample(opened, prompts[:1], max_tokens=8) == drawn[:1]

    def test_a_seed_repeats_alone_and_in_company(self, opened: Engine) -> None:
        prompts = self.mixed_prompts(opened, 4, seed=18)
        company = [request_for(p) for p in self.mixed_prompts(opened, 20, seed=19)]
        drawn = self.sample(opened, prompts, temperature=1.0, company=company)
        for prompt, tokens in zip(prompts, drawn, strict=True):
            assert self.sample(opened, [prompt], temperature=1.0) == [tokens]
        again = self.sample(opened, prompts[:1] * 3, temperature=1.0, seeds=[17, 18, 2**62 + 1])
        assert again[0] == drawn[0]
        assert len({tuple(tokens) for tokens in again}) > 1, "all seeds draw alike"

    def test_draws_follow_the_model(self, opened: Engine) -> None:
        """The mean log-probability of many draws is that of the model at this temperature."""
        temperature, count = 0.7, 400
        prompt = self.mixed_prompts(opened, 1, seed=20)[0]
        drawn = self.sample(
            opened, [prompt] * count, max_tokens=1, temperature=temperature, seeds=range(count)
        )
        logprobs = self.reference([prompt])[0].astype(np.float64)
        heated = logprobs / temperature - np.logaddexp.reduce(logprobs / temperature)
        weights = np.exp(heated)
        mean = float(weights @ heated)
        spread = float(np.sqrt(weights @ (heated - mean) ** 2 / count))
        found = float(np.mean([heated[tokens[0]] for tokens in drawn]))
        assert abs(found - mean) < 4 * spread, "draws of another distribution"

    def test_a_continuation_ends_before_an_end_token(self, opened: Engine) -> None:
        prompt = self.mixed_prompts(opened, 1, seed=21)[0]
        (tokens,) = self.sample(opened, [prompt], max_tokens=10, temperature=1.0)
        unused = next(t for t in range(opened.info.vocab_size) if t not in tokens)
        end = tokens[4]
        (ended,) = self.sample(opened, [prompt], max_tokens=10, temperature=1.0, eos=(unused, end))
        assert ended == tokens[: tokens.index(end)]

    def test_a_continuation_ends_where_the_model_does(self, opened: Engine) -> None:
        longest = opened.info.max_prompt_tokens
        prompt = np.random.default_rng(22).integers(0, opened.info.vocab_size, longest).tolist()
        drawn = self.sample(opened, [prompt, prompt[:-2], [1]], max_tokens=6)
        assert [len(tokens) for tokens in drawn] == [1, 3, 6]
        assert self.sample(opened, [[1], prompt], max_tokens=0) == [[], []]

    @pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
    def test_a_bad_temperature_fails_alone(self, opened: Engine, temperature: float) -> None:
        bad = request_for([1, 2], want=Generate(3, (), temperature, 1))
        requests = [request_for([1, 2, 3]), bad, request_for([4])]
        outcomes = ask(opened, requests)
        assert isinstance(outcomes[1].error, PromptFailed)
        self.check_rows(opened, [[1, 2, 3], [4]], [outcomes[0], outcomes[2]])

    @pytest.mark.usefixtures("needs_adapters")
    def test_a_continuation_by_an_adapter(self, opened: Engine, tmp_path: Path) -> None:
        adapter = self.make_adapter("x", tmp_path, 8, rank=8, targets=(*ATTENTION, *MLP))
        prompt = self.mixed_prompts(opened, 1, seed=23)[0]
        with loaded(opened, [adapter]):
            want = Generate(6, (), 0.0, 0)
            (outcome,) = ask(opened, [request_for(prompt, adapter="x", want=want)])
        assert isinstance(outcome.answer, Generation), outcome.error
        drawn = outcome.answer.token_ids
        rows = self.reference([[*prompt, *drawn[:n]] for n in range(6)], adapter)
        for row, token in zip(rows, drawn, strict=True):
            assert row[token] >= row.max() - 2 * self.tolerance
