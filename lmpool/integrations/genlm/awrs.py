"""Adaptive weighted rejection sampling, by draws of a pool."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import genlm.control as control
import numpy as np
from genlm.control.potential.autobatch import AutoBatchedPotential

from lmpool.integrations.genlm.next_tokens import NextTokens, Source
from lmpool.integrations.genlm.prompted_llm import PromptedLLM
from lmpool.integrations.genlm.token_mask import packed_mask

PEAK: Final = math.log(2 / 3)
"""From this log-probability of the likeliest token on, the geometric form looks at fewer tokens."""
_NOTHING: Final = 1e-5
"""A mass that is taken for none."""

Accept = Callable[[int], Awaitable[bool]]
Sampled = tuple[int | None, float]
"""A token id and the log of its weight, relative to the mass of what may be drawn."""


class AWRS(control.AWRS):  # type: ignore[misc]
    """genlm-control's `AWRS` by draws without replacement: its arguments, law and weights, no rows.

    What is drawn from, the `proposal` or else the `potential`, is a `PromptedLLM` of this package:
    anything else is a `TypeError`. One job of 8 draws suffices for most tokens; where the condition
    rejects all of them, twice as many follow, and so on. Arguments are those of genlm-control's:
    the method is that of "Fast Controlled Generation from Language Models with Adaptive Weighted
    Rejection Sampling", https://arxiv.org/abs/2504.05410.

    A `seed` gives the same samples again; they are others than genlm-control's own of that seed.
    """

    def __init__(self, potential: Any, condition: Any, *args: Any, **options: Any) -> None:
        super().__init__(potential, condition, *args, **options)
        drawn_from = _bare(self.potential if self.proposal is None else self.proposal)
        if not isinstance(drawn_from, PromptedLLM):
            raise TypeError(
                f"tokens can be drawn from a PromptedLLM of lmpool.integrations.genlm, not from "
                f"{drawn_from!r:.80}: genlm.control.AWRS takes any potential"
            )
        self._llm = drawn_from
        maps, size = drawn_from.token_maps, drawn_from.model.info.vocab_size
        self._endings = [token for token in maps.eos_idxs if token < size]
        ids = self._shared_ids() if self.prune_logws else range(len(maps.decode))
        self._ids = sorted({token for token in ids if token < size})
        self._mask = None if len(self._ids) == size else packed_mask(self._ids, size)
        self._restricted = len(self._ids) < min(size, len(maps.decode))

    def _shared_ids(self) -> list[int]:
        """The tokens that both potential and condition know, and the endings."""
        vocab = self.potential.vocab
        shared = (index for index in self.valid_idxs.tolist() if index < len(vocab))
        return [*self._endings, *(vocab[index].token_id for index in shared)]

    async def sample(
        self, context: Sequence[Any], draw: Any = None, verbosity: int = 0
    ) -> tuple[Any, float, float]:
        """A token and the log of its weight, properly weighted for the target's `logw_next`.

        As genlm-control's `AWRS.sample`, the third being NaN. Raises what `PooledLM.draw` raises.
        """
        if draw is not None:
            raise ValueError("AWRS draws by rejection: it has no draw to be replaced")
        llm, prompt = self._llm, self._llm.prompt_of(context)
        source = Source(
            llm.model, llm.temperature, llm.lora_name, self._mask, len(self._ids), self._endings
        )
        # Of this sample's own: the next one's numbers do not depend on when answers come.
        rng = np.random.default_rng(self.rng.integers(1 << 63))
        tokens = NextTokens(source, prompt, rng)
        answers: dict[int, bool] = {}

        async def accept(token: int) -> bool:
            if token not in answers:
                answers[token] = await self._accept(context, self._named(token), verbosity)
            return answers[token]

        found, weight = await self._run(tokens, accept, rng)
        token = None if found is None else self._named(found)
        if found is not None and self.proper_weights and weight > -math.inf:
            everything = 0.0
            if self._restricted:
                everything = tokens.log_mass - await llm.log_known(prompt)
            weight += everything
            if self.proposal is not None:
                weight += await self._target_logw(context, token)
                weight -= tokens.logps[found] + everything
        return token, weight, math.nan

    async def _run(self, tokens: NextTokens, accept: Accept, rng: np.random.Generator) -> Sampled:
        if not self.proper_weights:
            return await first_accepted(tokens, accept, self.max_rejects)
        if self.max_accepts > 2 or await tokens.peaks(PEAK):
            return await geometric_awrs(tokens, accept, self.max_rejects, self.max_accepts, rng)
        return await recursive_awrs(tokens, accept, self.max_rejects)

    async def _target_logw(self, context: Sequence[Any], token: Any) -> float:
        potential = _bare(self.potential)
        if isinstance(potential, PromptedLLM):
            return await potential.logw_token(context, token)
        return float((await self.potential.logw_next(context))[token])

    def _named(self, token: int) -> Any:
        return self.target.eos if token in self._endings else self._llm.token_maps.decode[token]


def _bare(potential: Any) -> Any:
    """A potential without what batches its calls."""
    return potential.potential if isinstance(potential, AutoBatchedPotential) else potential


async def first_accepted(tokens: NextTokens, accept: Accept, max_rejects: float) -> Sampled:
    """The first token that is accepted, without a proper weight."""
    token, rejects = None, 0
    while rejects < max_rejects and (following := await tokens.next()) is not None:
        token = following
        if await accept(token):
            return token, 0.0
        rejects += 1
    return token, -math.inf


async def recursive_awrs(tokens: NextTokens, accept: Accept, max_rejects: float) -> Sampled:
    """The first token that is accepted, and an estimate of the accepted mass by the one after it.

    What is left of the mass once the tokens before it are rejected; times its own share of that,
    where the next one is rejected.
    """
    token, left, rejects = await tokens.next(), 1.0, 0
    while token is not None:
        mass = math.exp(tokens.logps[token])
        if await accept(token):
            if rejects + 1 >= max_rejects:
                return token, _log(left)
            following = await tokens.next()
            doubtful = following is not None and not await accept(following)
            return token, _log(min(mass, left) if doubtful else left)
        left, rejects = left - mass, rejects + 1
        if left <= _NOTHING or rejects >= max_rejects:
            break
        if (following := await tokens.next()) is None:
            break
        token = following
    return token, -math.inf


async def geometric_awrs(
    tokens: NextTokens,
    accept: Accept,
    max_rejects: float,
    max_accepts: int,
    rng: np.random.Generator,
) -> Sampled:
    """The first of `max_accepts` accepted tokens, and an estimate by how many were rejected.

    Tokens that were rejected do not come again; how often draws with replacement would have met
    them is drawn from a geometric distribution before each further token.
    """
    accepts, rejects, rejected_mass = 0, 0, 0.0
    first_accepted = first_rejected = None
    while accepts < max_accepts and rejects < max_rejects:
        if (token := await tokens.next()) is None:
            break
        if rejected_mass >= 1:  # by rounding: what is left is next to nothing
            return first_rejected, -math.inf
        if rejected_mass > 0:
            rejects += int(rng.geometric(1 - rejected_mass)) - 1
            if rejects >= max_rejects:
                break
        if await accept(token):
            accepts += 1
            first_accepted = token if first_accepted is None else first_accepted
            tokens.again()
        else:
            first_rejected = token if first_rejected is None else first_rejected
            rejects += 1
            rejected_mass += math.exp(tokens.logps[token])
            tokens.reject(token)
    if not accepts:
        return first_rejected, -math.inf
    seen = accepts + min(rejects, max_rejects)
    return first_accepted, _log(min(max_accepts - 1, accepts) / (seen - 1))


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf
