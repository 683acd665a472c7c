"""Batches of prompts with all that engines trip over, around every limit of a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tests.support.models import VOCAB

Prompt = tuple[int, ...]


class Prompts:
    """Draws batches for a model with these `limits`, and of at most `longest` tokens a prompt."""

    def __init__(self, limits: Sequence[int], longest: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._longest = longest
        self._limits = sorted({limit for limit in limits if limit <= longest} | {longest})

    def text(self, length: int) -> Prompt:
        """Random tokens, at most as many as a prompt may have."""
        return tuple(self._rng.integers(0, VOCAB, min(length, self._longest)).tolist())

    def shared(self) -> list[Prompt]:
        """A prefix with many ends, nested prompts, equal ends, and all lengths around limits."""
        head, tail = self.text(min(17, self._longest // 2)), self.text(min(5, self._longest // 4))
        found = [head + self.text(len(tail)) for _ in range(5)]
        found += [head, head[:5], head + tail, self.text(3) + tail, self.text(7) + tail, tail]
        found += [self.text(1), self.text(1)]
        whole = self.text(self._longest)
        for limit in self._limits:
            other = head + self.text(self._longest)
            found += [whole[: limit + more] for more in (-1, 0, 1, 9)]
            found += [other[:limit], other[: limit + 2]]
        return self._bounded(found)

    def longer(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Every other prompt and one token more: what is kept of them is found."""
        return self._bounded([prompt + self.text(1) for prompt in prompts[::2]])

    def beginnings(self, most: int = 48) -> list[Prompt]:
        """All beginnings of a text, or `most` of them and those around limits."""
        whole = self.text(self._longest)
        every = set(range(1, self._longest + 1, -(-self._longest // most)))
        for limit in self._limits:
            every |= {length for length in range(limit - 1, limit + 2) if length >= 1}
        return self._bounded([whole[:length] for length in sorted(every)])

    def steps(self, rounds: int = 5) -> Iterator[list[Prompt]]:
        """Several texts that grow by a token a step, two of them of one beginning."""
        least = [max(1, limit - 2) for limit in self._limits]
        begun = [self.text(length) for length in least]
        begun += [begun[-1][: len(begun[-1]) // 2] + self.text(2), self.text(3)]
        for _ in range(rounds):
            yield self._bounded(begun)
            begun = [prompt + self.text(1) for prompt in begun]

    def _bounded(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return list(dict.fromkeys(p for p in prompts if 1 <= len(p) <= self._longest))
