"""One token after a text that is scored: it comes with the scores, in the same forward pass.

lm-evaluation-harness and teachers ask for a text's log-probabilities and, as the API makes them,
for one token more. The scores of the text with any token behind it have the distribution of that
place as their last position: its likeliest is the greedy token, and a draw at temperature 1 falls
among the likeliest, or else, rarely, is made among all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from lmpool.gateway.drawing import Part, told
from lmpool.gateway.pools import Model
from lmpool.gateway.sampling import Drawing
from lmpool.gateway.state import Gateway
from lmpool.producer.deadline import Deadline
from lmpool.wants import Draw, Draws, Generation, Score, TextScores, TopLogprobs

DRAWN_FROM: Final = 20
"""How many of the likeliest are asked for at least where the token is drawn among them."""
TARGET: Final = 0
"""The token behind the text: what it is does not matter."""


class _Prompt(Protocol):
    @property
    def ids(self) -> list[int]: ...


class FirstToken:
    """Answers prompts with their scores and one token each."""

    def __init__(
        self, gateway: Gateway, model: Model, drawing: Drawing, tops: int, deadline: Deadline
    ) -> None:
        self._gateway = gateway
        self._model = model
        self._drawing = drawing
        self._tops = tops
        self._deadline = deadline
        self._chance = np.random.default_rng()

    @classmethod
    def of(
        cls, gateway: Gateway, model: Model, drawing: Drawing, tops: int, deadline: Deadline
    ) -> FirstToken | None:
        """For scores with so many of the likeliest; None where the token has to be drawn apart."""
        greedy = not drawing.temperature
        plain = drawing.top_p == 1 and not drawing.top_k and not drawing.min_p
        free = drawing.temperature == 1 and drawing.seed is None and plain
        if drawing.max_tokens != 1 or drawing.stops is not None or not (greedy or free):
            return None
        return cls(gateway, model, drawing, tops, deadline)

    async def answered(self, prompts: Sequence[_Prompt]) -> list[tuple[TextScores | None, Part]]:
        """The scores of each prompt, and the token after it. Raises `ApiError`."""
        least = DRAWN_FROM if self._drawing.temperature else 1
        k = max(self._tops, self._drawing.top_logprobs, min(least, self._model.info.vocab_size))
        asks = [([*prompt.ids, TARGET], Score(1, k)) for prompt in prompts]
        found: list[TextScores] = await self._gateway.answers(self._model, asks, self._deadline)
        chosen = [self._choose(scores) for scores in found]
        others = [i for i, place in enumerate(chosen) if place is None]
        drawn = await self._draw_among_others(prompts, found, others)
        answered = []
        for i, (scores, place) in enumerate(zip(found, chosen, strict=True)):
            top = _tops_of(scores)
            if place is None:
                token, logprob = drawn[i]
            else:
                token, logprob = int(top.token_ids[-1, place]), top.logprobs[-1, place]
            answered.append((self._of_prompt(scores), self._part(token, logprob, top)))
        return answered

    def _choose(self, scores: TextScores) -> int | None:
        """The place of the token among the likeliest; None where it is none of them."""
        if not self._drawing.temperature:
            return 0
        top = _tops_of(scores)
        masses = np.exp(top.logprobs[-1].astype(np.float64))
        rest = math.exp(float(np.asarray(top.rest)[-1]))
        place = int(np.searchsorted(masses.cumsum(), self._chance.random() * (masses.sum() + rest)))
        if place < masses.size:
            return place
        return None if rest else masses.size - 1

    async def _draw_among_others(
        self, prompts: Sequence[_Prompt], found: Sequence[TextScores], numbers: Sequence[int]
    ) -> dict[int, tuple[int, np.float32]]:
        if not numbers:
            return {}
        asks = [
            (prompts[i].ids, Draw(1, excluded=_tops_of(found[i]).token_ids[-1].tolist()))
            for i in numbers
        ]
        draws: list[Draws] = await self._gateway.answers(self._model, asks, self._deadline)
        return {
            i: (int(draw.token_ids[0]), draw.logprobs[0])
            for i, draw in zip(numbers, draws, strict=True)
        }

    def _part(self, token: int, logprob: np.float32, top: TopLogprobs) -> Part:
        """The token as a continuation of its own."""
        drawing, eos = self._drawing, self._drawing.eos_token_ids or ()
        stopped = (token,) in drawing.hints
        likely = None
        if drawing.top_logprobs:
            k = drawing.top_logprobs
            rest = np.zeros(1, np.float32)
            likely = TopLogprobs(top.token_ids[-1:, :k], top.logprobs[-1:, :k], rest)
        generation = Generation(
            np.array([token], np.int32),
            int(token in eos or stopped),
            "eos" if token in eos else "stop" if stopped else "length",
            np.array([logprob], np.float32) if drawing.logprobs else None,
            likely,
        )
        return told(self._model.words, drawing, generation)

    def _of_prompt(self, scores: TextScores) -> TextScores | None:
        """Without the last position, and with as many of the likeliest as were asked for."""
        if scores.logprobs.size == 1:
            return None
        top, k = _tops_of(scores), self._tops
        likely = None
        if k:
            rest = np.asarray(top.rest)[:-1]
            likely = TopLogprobs(top.token_ids[:-1, :k], top.logprobs[:-1, :k], rest)
        return TextScores(scores.logprobs[:-1], scores.ranks[:-1], likely)


def _tops_of(scores: TextScores) -> TopLogprobs:
    assert scores.top_logprobs is not None, "they were asked for"
    return scores.top_logprobs
