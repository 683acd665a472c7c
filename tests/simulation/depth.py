"""``python -m tests.simulation.depth``: what prompts are known by, the tables of docs/settings.md.

How many tokens are computed is counted, with the tries of the engines; what all prompts begin with
is tried in virtual time. Takes about two minutes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from lmpool.affinity import Placement, homes, lanes_in_use
from lmpool.backends.trie import TokenTrie
from tests.simulation.pool import Load, Outcome, Pool

WORKERS: Final = 8
LANES: Final = lanes_in_use(WORKERS, 1024)
VOCAB: Final = 50_000
TEMPLATE, LONGER, LONGEST = 40, 100, 200
"""Tokens that every prompt begins with."""
SIZES: Final = (8, 16, 32, 64)
COUNTS: Final = (4, 16, 64)

Prompts = list[list[int]]


class Making:
    """Kinds of prompts, in the order in which they are asked."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._template = self._tokens(TEMPLATE)

    def _tokens(self, count: int) -> list[int]:
        return self._rng.integers(0, VOCAB, count).tolist()  # type: ignore[no-any-return]

    def _mixed(self, series: Sequence[Prompts]) -> Prompts:
        """Each series in its order, all of them in turns."""
        turns = self._rng.permutation([n for n, one in enumerate(series) for _ in one])
        left = [iter(one) for one in series]
        return [next(left[n]) for n in turns]

    def questions(self, template: int = TEMPLATE) -> Prompts:
        """A template and a question of its own, each asked twice."""
        begin = self._tokens(template)
        asked = [[*begin, *self._tokens(int(n))] for n in self._rng.integers(20, 140, 600)]
        return self._mixed([[one, one] for one in asked])

    def growing(self) -> Prompts:
        """Behind the template, token by token: what samples with a pool's rows asks."""
        series = []
        for n in self._rng.integers(10, 60, 48):
            whole = [*self._template, *self._tokens(int(n) + 120)]
            series.append([whole[:end] for end in range(TEMPLATE + int(n), len(whole) + 1)])
        return self._mixed(series)

    def chats(self, template: int = TEMPLATE) -> Prompts:
        """Of eight turns, each with all that was said before."""
        begin = self._tokens(template)
        series = []
        for _ in range(150):
            said, turns = begin, []
            for _ in range(8):
                said = [*said, *self._tokens(int(self._rng.integers(20, 160)))]
                turns.append(said)
            series.append(turns)
        return self._mixed(series)

    def few_shot(self) -> Prompts:
        """48 tasks of 512 tokens of examples, behind the template, each with 25 questions."""
        tasks = [[*self._template, *self._tokens(512)] for _ in range(48)]
        return self._mixed([[[*task, *self._tokens(40)] for _ in range(25)] for task in tasks])


def placed(prompts: Prompts, place: Placement) -> tuple[float, float]:
    """Tokens computed where each prompt meets its home, over the fewest that there can be; and the
    share of prompts that the largest lane has. A worker keeps a quarter of all."""
    best = computed(prompts, [0] * len(prompts), 1 << 22)
    lanes = [place.of(np.array(prompt, "<u4").tobytes(), None)[1] % LANES for prompt in prompts]
    home = homes([f"worker-{n}" for n in range(WORKERS)], 0, LANES)
    tokens = computed(prompts, [int(home[lane]) for lane in lanes], best // 4)
    return tokens / best, max(Counter(lanes).values()) / len(prompts)


def computed(prompts: Prompts, workers: Sequence[int], slots: int) -> int:
    """Tokens that workers compute who are asked in this order, and keep so many positions each."""
    tries = [TokenTrie(slots) for _ in range(max(workers) + 1)]
    for prompt, worker in zip(prompts, workers, strict=True):
        lease = tries[worker].lease(np.array(prompt, np.uint32))
        assert lease is not None, "a prompt is longer than what is kept"
        tries[worker].commit([lease])
        tries[worker].release([lease])
    return sum(trie.added for trie in tries)


def kinds(seed: int) -> dict[str, Callable[[], Prompts]]:
    """The columns."""
    making = Making(seed)
    return {
        "questions": making.questions,
        "questions, a template of 100": lambda: making.questions(LONGER),
        "token by token": making.growing,
        "chats": making.chats,
        "chats, a template of 200": lambda: making.chats(LONGEST),
        "few-shot": making.few_shot,
    }


class Fourfold(Placement):
    """Known by its first 1, 4, 16, ... blocks: it moves half as often."""

    def prefix(self, tokens: bytes) -> bytes:
        size, known = 4 * self.block_tokens, 1
        while 4 * known <= min(self.blocks, len(tokens) // size):
            known *= 4
        return tokens[: size * known] if len(tokens) >= size else tokens


def sizes() -> None:
    """Block sizes and numbers of blocks."""
    made = {name: make() for name, make in kinds(1).items()}
    print(f"| blocks of | known by | {' | '.join(made)} |\n|---|---|{'---|' * len(made)}")
    ways = [
        *((Placement(1, 1024, size, count), "1, 2, 4") for size in SIZES for count in COUNTS),
        *((Fourfold(1, 1024, size, 16), "1, 4") for size in SIZES),
    ]
    for place, steps in ways:
        cells = []
        for prompts in made.values():
            tokens, share = placed(prompts, place)
            cells.append(f"{tokens:.2f}, {share:.0%}")
        known = steps if place.blocks == 4 else f"{steps}, ... {place.blocks}"
        print(f"| {place.block_tokens} | {known} | {' | '.join(cells)} |", flush=True)


def skew(workers: int, utilization: float, *, deep: bool) -> Outcome:
    """All prompts begin with the same 512 tokens."""
    return Pool(Load(workers, utilization, 200 * workers, groups=1, deep=deep)).run()


def depths() -> None:
    """One lane and thieves, or lanes for what follows the common prefix."""
    print("\n| workers | load | known by | rows/s | tokens a job | wait, ms: half, 99 % | stolen |")
    print("|---|---|---|---|---|---|---|")
    for workers in (4, 10, 100):
        for utilization in (0.3, 0.9, 2.0):
            for deep in (False, True):
                found = skew(workers, utilization, deep=deep)
                half, most = (1000 * float(np.quantile(found.waits, part)) for part in (0.5, 0.99))
                print(
                    f"| {workers} | {utilization} | {'all' if deep else 'the prefix'} "
                    f"| {sum(found.jobs) / found.ended:,.0f} | {found.tokens_each:.1f} "
                    f"| {half:.1f}, {most:.1f} | {found.stolen_share:.0%} |",
                    flush=True,
                )


def main() -> int:
    """Both tables."""
    sizes()
    depths()
    return 0


if __name__ == "__main__":
    sys.exit(main())
