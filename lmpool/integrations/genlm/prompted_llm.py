"""The potential of a language model behind a prompt, which asks a pool for scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import genlm.control as control
import numpy as np

from lmpool import PooledLM
from lmpool.integrations.genlm.token_mask import packed_mask
from lmpool.wants import TextScores


class PromptedLLM(control.PromptedLLM):  # type: ignore[misc]
    """genlm-control's `PromptedLLM` on a `PooledLM`, with the same arguments and results.

    `prefix`, `complete`, `score`, `log_probability` and `logw_eos` are one score each, of a few
    bytes a token, where the other asks for a whole row at every position. `logw_next` is still the
    row: samplers that need all of it (`direct_token_sampler`, say) run as before, and `AWRS` of
    this package needs none.

    Raises `TypeError` for a model that is no `PooledLM`, and what `PooledLM.score` raises.
    """

    def __init__(self, llm: PooledLM[Any], *args: Any, **options: Any) -> None:
        if not isinstance(llm, PooledLM):
            raise TypeError(f"a PooledLM is needed, not {type(llm).__name__}: see lmpool.connect")
        super().__init__(llm, *args, **options)
        tokens = len(self.token_maps.decode)
        # A model may have more logits than its tokenizer has tokens; genlm leaves those out.
        self._padded = tokens < llm.info.vocab_size
        self._known = packed_mask(range(tokens), llm.info.vocab_size) if self._padded else None

    def spawn(
        self,
        prompt_ids: Sequence[int] | None = None,
        eos_byte_strings: Sequence[bytes] | None = None,
        temperature: float | None = None,
        **options: Any,
    ) -> PromptedLLM:
        """Another one of the same pool, with what is not named as this one has it."""
        other = super().spawn(prompt_ids, eos_byte_strings, temperature, **options)
        return type(self)(
            other.model,
            prompt_ids=other.prompt_ids,
            temperature=other.temperature,
            token_maps=other.token_maps,
            lora_name=other.lora_name,
        )

    async def _log_probability(self, context_ids: Sequence[int]) -> float:
        if not context_ids:
            return 0.0
        scores: TextScores = await self.model.score(
            [*self.prompt_ids, *context_ids],
            len(self.prompt_ids),
            temperature=self.temperature,
            lora_name=self.lora_name,
        )
        return scores.total

    async def complete(self, context: Sequence[Any]) -> float:
        """The log-probability of `context` and an ending, as one score."""
        scores = await self._ended(self.prompt_of(context), len(self.prompt_ids))
        return float(scores.logprobs[:-1].sum(dtype=np.float64)) + _ending(scores)

    async def logw_eos(self, context: Sequence[Any]) -> float:
        """The log-weight of ending after `context`: that of `logw_next`, of a few bytes."""
        prompt = self.prompt_of(context)
        scores = await self._ended(prompt, len(prompt))
        return _ending(scores) - await self.log_known(prompt)

    async def logw_token(self, context: Sequence[Any], token: Any) -> float:
        """The log-weight of one token, or `EOS`, after `context`: that of `logw_next`."""
        if token is self.eos:
            return await self.logw_eos(context)
        prompt = self.prompt_of(context)
        scores: TextScores = await self.model.score(
            [*prompt, *self.encode_tokens([token])],
            len(prompt),
            temperature=self.temperature,
            lora_name=self.lora_name,
        )
        return scores.total - await self.log_known(prompt)

    def prompt_of(self, context: Sequence[Any]) -> list[int]:
        """The token ids of the prompt and a context."""
        return [*self.prompt_ids, *self.encode_tokens(context)]

    async def log_known(self, prompt: Sequence[int]) -> float:
        """The log of the mass, after these ids, of all tokens that the tokenizer has."""
        if not self._padded:
            return 0.0
        drawn = await self.model.draw(
            prompt, 1, 0, self.temperature, allowed=self._known, lora_name=self.lora_name
        )
        return float(drawn.log_mass)

    async def _ended(self, prompt: Sequence[int], start: int) -> TextScores:
        """The scores of a prompt and an ending; the last has all endings' log-probabilities."""
        endings = self.token_maps.eos_idxs
        scores: TextScores = await self.model.score(
            [*prompt, endings[0]],
            start,
            token_ids=endings,
            temperature=self.temperature,
            lora_name=self.lora_name,
        )
        return scores


def _ending(scores: TextScores) -> float:
    assert scores.token_logprobs is not None
    return float(np.logaddexp.reduce(scores.token_logprobs[-1].astype(np.float64)))
