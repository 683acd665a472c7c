"""Constrained decoding by draws: each token is drawn on the worker among those that are allowed.

    python examples/constrained.py                                 # a private pool, the tiny model
    python examples/constrained.py --url redis://server:6379/0 --pool llama --samples 100

A grammar says which tokens may follow; here it is a choice of whole texts, kept as a trie of
tokens. Every step sends those ids and gets one token, its log-probability, and the mass of what was
allowed (`log_mass`): the sum of these is what a particle is weighted by, so that the samples can be
reweighted to the model's own distribution over the texts. A row is never fetched.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

import lmpool
from lmpool.wants import Draw, Draws

PROMPT = "The method returns"
CHOICES = (" a list.", " a string.", " the value.", " None.", " a new dictionary.")


class Grammar:
    """The texts that may come, as a trie of token ids; 'end' is where one is complete."""

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        self._next: dict[tuple[int, ...], set[int]] = {}
        self._ends = {tuple(text) for text in texts}
        for text in self._ends:
            for length in range(len(text)):
                self._next.setdefault(text[:length], set()).add(text[length])

    def allowed(self, drawn: tuple[int, ...]) -> list[int]:
        """The tokens that may follow; none at the end."""
        return sorted(self._next.get(drawn, ()))


async def sample(
    lm: lmpool.PooledLM[object], prompt: Sequence[int], grammar: Grammar, samples: int, seed: int
) -> list[tuple[tuple[int, ...], float]]:
    """So many texts of the grammar, each with the log of its weight."""
    drawn: list[tuple[int, ...]] = [()] * samples
    weights = np.zeros(samples)
    step = 0
    while True:
        going_on = [n for n, tokens in enumerate(drawn) if grammar.allowed(tokens)]
        if not going_on:
            return [(tokens, float(w)) for tokens, w in zip(drawn, weights, strict=True)]
        wants = [
            Draw(seed=seed + step * samples + n, allowed=grammar.allowed(drawn[n]))
            for n in going_on
        ]
        asks = [([*prompt, *drawn[n]], want) for n, want in zip(going_on, wants, strict=True)]
        for n, found in zip(going_on, await lm.ask_many(asks), strict=True):
            assert isinstance(found, Draws)
            drawn[n] = (*drawn[n], int(found.token_ids[0]))
            weights[n] += float(found.log_mass)
        step += 1


def estimate(found: Sequence[tuple[tuple[int, ...], float]]) -> dict[tuple[int, ...], float]:
    """The model's probability of each text, given that one of them comes: by the weights."""
    total: Counter[tuple[int, ...]] = Counter()
    largest = max(weight for _, weight in found)
    for tokens, weight in found:
        total[tokens] += np.exp(weight - largest)
    everything = sum(total.values())
    return {tokens: share / everything for tokens, share in total.most_common()}


async def run(given: argparse.Namespace) -> None:
    """Sample, and print how likely the texts are."""
    lm = lmpool.connect(given.url, given.pool) if given.url else lmpool.embedded("tiny", "hf")
    async with lm:
        prompt = lm.encode(given.prompt)
        texts = {tuple(lm.encode(text, bos=False)): text for text in given.choices}
        found = await sample(lm, prompt, Grammar(texts), given.samples, given.seed)
    for tokens, share in estimate(found).items():
        print(f"{100 * share:5.1f} %  {given.prompt}{texts[tokens]}")


def main() -> None:
    """Sample what the command line says."""
    parser = argparse.ArgumentParser(description="Constrained decoding by draws.")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--choices", nargs="+", default=CHOICES)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", help="of a pool's server; without one a private pool is started")
    parser.add_argument("--pool")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
