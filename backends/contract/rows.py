"""Rows: right, normalized, each its own prompt's."""

from __future__ import annotations

import numpy as np
import pytest

from lmpool.backends.contract.asking import ask, request_for
from lmpool.backends.contract.subject import Subject
from lmpool.backends.engine import Engine, Outcome
from lmpool.errors import PromptFailed


class RowContract(Subject):
    """What an engine says of itself, its rows, and prompts that cannot be run."""

    # --- what it says of itself ----------------------------------------------------------------

    def test_info_describes_the_model(self, opened: Engine) -> None:
        info = opened.info
        assert info.vocab_size == self.reference([[0]]).shape[1]
        assert info.max_prompt_tokens >= 1
        assert info.dtype in ("float32", "bfloat16", "float16")
        assert info.encoding in ("f32", "bf16")
        assert info.identity, "an identity of nothing: pools of two models would share their rows"
        special = [info.bos_token_id, info.pad_token_id, *info.eos_token_ids]
        assert all(token is None or 0 <= token < info.vocab_size for token in special)

    def test_the_vocabulary_has_the_bytes_of_tokens(self, opened: Engine) -> None:
        vocabulary = opened.byte_vocabulary()
        if vocabulary is not None:
            assert 0 < len(vocabulary) <= opened.info.vocab_size
            assert all(type(token) is bytes for token in vocabulary)
        files = opened.tokenizer_files()
        assert all(type(content) is bytes for content in files.values())

    # --- rows ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("count", [1, 7, 64, 300])
    def test_rows_of_mixed_prompts(self, opened: Engine, count: int) -> None:
        self.check(opened, self.mixed_prompts(opened, count, seed=1))

    def test_rows_are_normalized(self, opened: Engine) -> None:
        for outcome in self.ask_rows(opened, self.mixed_prompts(opened, 16, seed=2)):
            total = np.exp(outcome.logprobs().astype(np.float64)).sum()
            assert abs(total - 1) < 1e-4

    def test_repeated_prompts(self, opened: Engine) -> None:
        """Equal prompts in one batch, and again in the batches after it."""
        prompts = self.mixed_prompts(opened, 6, seed=3)
        together = [*prompts, *prompts[::-1], prompts[0], prompts[0]]
        self.check(opened, together)
        self.check(opened, prompts)
        self.check(opened, prompts[:1])
        self.check(opened, prompts[:1])

    def test_shared_prefixes(self, opened: Engine) -> None:
        random = np.random.default_rng(4)
        vocab, longest = opened.info.vocab_size, opened.info.max_prompt_tokens
        prefixes = [random.integers(0, vocab, min(n, longest // 2)).tolist() for n in (130, 130, 9)]
        prompts = [
            [*prefixes[i % 3], *random.integers(0, vocab, 1 + i % 5).tolist()] for i in range(36)
        ]
        # The same ends after different beginnings, which a cache by suffix would mistake.
        prompts += [[*prefix, 5, 6, 7] for prefix in prefixes]
        self.check(opened, prompts)
        random.shuffle(prompts)
        self.check(opened, prompts)
        self.check(opened, prefixes)

    def test_nested_prefixes(self, opened: Engine) -> None:
        random = np.random.default_rng(5)
        length = min(40, opened.info.max_prompt_tokens)
        longest = random.integers(0, opened.info.vocab_size, length).tolist()
        prompts = [longest[:n] for n in range(1, length + 1)]
        random.shuffle(prompts)
        self.check(opened, prompts)
        self.check(opened, prompts[::-1][:7])

    def test_prompts_that_grow_by_a_token(self, opened: Engine) -> None:
        """Particles: all begin alike, and each goes its own way."""
        random = np.random.default_rng(6)
        vocab = opened.info.vocab_size
        begin = random.integers(0, vocab, min(40, opened.info.max_prompt_tokens // 2)).tolist()
        particles = [list(begin) for _ in range(8)]
        for step in range(8):
            self.check(opened, particles)
            if step == 4:  # resampled: some are dropped, others go on twice
                particles = [list(particles[i]) for i in (0, 0, 0, 2, 5, 5, 7, 1)]
            for particle in particles:
                particle.append(int(random.integers(0, vocab)))

    def test_the_longest_prompt(self, opened: Engine) -> None:
        random = np.random.default_rng(7)
        vocab, longest = opened.info.vocab_size, opened.info.max_prompt_tokens
        prompts = [random.integers(0, vocab, n).tolist() for n in (longest, 1, longest, 3)]
        prompts.append(prompts[0][:-1])
        self.check(opened, prompts)
        self.check(opened, prompts[:1])

    def test_the_first_and_the_last_token_id(self, opened: Engine) -> None:
        last = opened.info.vocab_size - 1
        self.check(opened, [[0], [last], [0] * 20, [last] * 20, [last, 0]])

    def test_rows_that_were_handed_out_stay_as_they_are(self, opened: Engine) -> None:
        prompts = self.mixed_prompts(opened, 20, seed=8)
        held = self.ask_rows(opened, prompts)
        copies = [outcome.logprobs().copy() for outcome in held]
        self.ask_rows(opened, self.mixed_prompts(opened, 60, seed=9))
        for outcome, copy in zip(held, copies, strict=True):
            assert np.array_equal(outcome.logprobs(), copy)

    def test_requests_that_come_between_steps(self, opened: Engine) -> None:
        prompts = self.mixed_prompts(opened, 48, seed=10)
        requests = [request_for(prompt) for prompt in prompts]
        outcomes: dict[bytes, Outcome] = {}
        for start in range(0, 48, 12):
            opened.submit(requests[start : start + 12])
            outcomes |= {outcome.id: outcome for outcome in opened.step()}
        while opened.in_flight():
            outcomes |= {outcome.id: outcome for outcome in opened.step()}
        self.check_rows(opened, prompts, [outcomes[request.id] for request in requests])

    def test_an_idle_engine_has_nothing_to_say(self, opened: Engine) -> None:
        assert opened.in_flight() == 0
        opened.submit([])
        assert opened.in_flight() == 0
        assert list(opened.step()) == []
        opened.cancel([b"never made"])

    # --- prompts that cannot be run ------------------------------------------------------------

    @pytest.mark.parametrize("wrong", ["empty", "too long", "id", "largest id", "adapter"])
    def test_a_bad_prompt_fails_alone(self, opened: Engine, wrong: str) -> None:
        vocab, longest = opened.info.vocab_size, opened.info.max_prompt_tokens
        bad = {
            "empty": request_for([]),
            "too long": request_for([1] * (longest + 1)),
            "id": request_for([1, vocab, 1]),
            "largest id": request_for([2**32 - 1]),
            "adapter": request_for([1, 2], adapter="nobody@" + "0" * 32),
        }[wrong]
        prompts = self.mixed_prompts(opened, 6, seed=11)
        requests = [request_for(prompt) for prompt in prompts]
        requests.insert(3, bad)
        outcomes = ask(opened, requests)
        assert isinstance(outcomes.pop(3).error, PromptFailed)
        self.check_rows(opened, prompts, outcomes)
        (again,) = ask(opened, [bad])
        assert isinstance(again.error, PromptFailed)
