"""The tokens after a prompt in the order of draws without replacement, fetched as needed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lmpool import PooledLM
from lmpool.errors import PromptFailed
from lmpool.wants import Draws
from lmpool.wants.draw import MAX_DRAWS

FIRST_DRAWS: Final = 8
"""Tokens that are drawn at first; then as many again as there are."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What tokens are drawn from: a model at a temperature, and which tokens may come.

    `allowed` is a packed mask, or None where every token of the `vocab_size` may come; `count` of
    them are allowed. `endings` are those of them that count as one token, the first.
    """

    lm: PooledLM[Any]
    temperature: float
    lora_name: str | None
    allowed: npt.NDArray[np.int32] | None
    count: int
    endings: Sequence[int]

    async def draw(
        self, prompt: Sequence[int], n: int, seed: int, temperature: float, known: Sequence[int]
    ) -> Draws:
        """`n` tokens without replacement, none of those that are known."""
        return await self.lm.draw(
            prompt, n, seed, temperature, False, self.allowed, known or None, self.lora_name
        )

    async def possible(self, prompt: Sequence[int], known: Sequence[int]) -> int:
        """How many tokens may come that are not known, by the row itself."""
        row = np.asarray(await self.lm.next_token_logprobs(prompt, self.lora_name)) > -np.inf
        if self.allowed is not None:
            bits = np.ascontiguousarray(self.allowed, "<i4").view(np.uint8)
            row &= np.unpackbits(bits, count=row.size, bitorder="little").view(bool)
        row[known] = False
        return int(row.sum())


class NextTokens:
    """Rounds of draws without replacement, each until its caller has enough.

    `log_mass` is that of what may come, over which log-probabilities (`logps`, by token id) are
    normalized. The first round has the order in which the pool draws. In each further one a token
    that is known by then is drawn here, and the pool is asked only where one comes that is not.
    Which of the two, their masses tell, so that the law is that of draws from everything.
    """

    def __init__(self, source: Source, prompt: Sequence[int], rng: np.random.Generator) -> None:
        self._source = source
        self._prompt = prompt
        self._rng = rng
        self.log_mass = math.nan
        self.logps: dict[int, float] = {}
        self._known: list[int] = []
        """What the pool is to draw no more: the ids of `logps`, and all endings where one is."""
        self._shift = math.nan
        """What is added to a scaled log-probability of the model's for one of `logps`."""
        self._unknown = 1.0
        """The mass of what is not known."""
        self._open: dict[int, float] = {}
        """The masses of what was known when the round began, and may still come in it."""
        self._fresh: deque[int] = deque()
        """What the pool drew since, in its order."""
        self._rejected: set[int] = set()

    async def next(self) -> int | None:
        """The next token of this round; None where every one has come."""
        while True:
            token = self._drawn_here()
            if token is not None:
                return token
            if self._fresh or await self._fetch():
                return self._fresh.popleft()
            if not self._open:
                return None

    def reject(self, token: int) -> None:
        """Leave a token out of the rounds to come."""
        self._rejected.add(token)

    def again(self) -> None:
        """Begin the next round."""
        self._fresh.clear()
        left = self.logps.keys() - self._rejected
        self._open = {token: math.exp(self.logps[token]) for token in sorted(left)}

    async def peaks(self, logp: float) -> bool:
        """Whether one token is at least as likely as that, of all that may come."""
        if not self.logps:
            await self._fetch()
        if max(self.logps.values()) >= logp:
            return True
        if self._unknown < math.exp(logp):
            return False
        found = await self._source.draw(self._prompt, 1, 0, 0.0, [])
        likeliest = self._scaled(found.logprobs[0])
        if len(self._source.endings) > 1:
            likeliest = max(likeliest, await self._ending())
        return likeliest >= logp

    def _drawn_here(self) -> int | None:
        """One of those that were known when the round began; None where another one comes."""
        if not self._open:
            return None
        others = self._unknown + sum(math.exp(self.logps[token]) for token in self._fresh)
        cumulative = np.cumsum([*self._open.values(), others])
        at = int(np.searchsorted(cumulative, self._rng.random() * cumulative[-1], side="right"))
        if at >= len(self._open):
            if others > 0:
                return None
            at = len(self._open) - 1  # the product may round up to the total
        token = list(self._open)[at]
        del self._open[token]
        return token

    async def _fetch(self) -> bool:
        """Have more tokens drawn; False where there are none."""
        left = self._source.count - len(self._known)
        drawn = await self._draw(min(max(FIRST_DRAWS, len(self._known)), MAX_DRAWS, left))
        if drawn is None:
            self._unknown = 0.0
            return False
        temperature = self._source.temperature
        if not self.logps:
            self.log_mass = float(drawn.log_mass)
            self._shift = float(drawn.proposal_logprobs[0] - drawn.logprobs[0] / temperature)
        self._unknown = math.exp(float(drawn.log_mass) - self.log_mass)
        for token, logprob in zip(drawn.token_ids.tolist(), drawn.logprobs.tolist(), strict=True):
            await self._learn(token, logprob)
        return True

    async def _learn(self, token: int, logprob: float) -> None:
        """Keep one that the pool drew; of several endings, all of them as the first."""
        endings = self._source.endings
        if len(endings) < 2 or token not in endings:
            self._known.append(token)
            logp = self._scaled(logprob)
        elif endings[0] in self.logps:
            return
        else:
            self._known += endings
            token, logp = endings[0], await self._ending()
        self.logps[token] = logp
        self._fresh.append(token)
        self._unknown = max(0.0, self._unknown - math.exp(logp))

    async def _ending(self) -> float:
        """The log-probability of all endings together."""
        source = self._source
        found = await source.lm.token_logprobs(self._prompt, source.endings, source.lora_name)
        return float(np.logaddexp.reduce([self._scaled(logprob) for logprob in found]))

    def _scaled(self, logprob: float) -> float:
        """A log-probability of the model's, at the temperature and over what may come."""
        return float(logprob) / self._source.temperature + self._shift

    async def _draw(self, n: int) -> Draws | None:
        """`n` tokens that are not known, or as many as may come; None where none may."""
        if n < 1:
            return None
        seed = int(self._rng.integers(1 << 63))
        try:
            return await self._source.draw(
                self._prompt, n, seed, self._source.temperature, self._known
            )
        except PromptFailed:
            # Perhaps fewer have a probability at all, which the row tells; or it raises the same.
            possible = await self._source.possible(self._prompt, self._known)
            if possible >= n or not (possible or self.logps):
                raise
        return await self._draw(possible)
