"""``lmpool doctor --engines``: the same prompts through a pool of each engine that is installed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lmpool.backends.load import installed_engines
from lmpool.errors import LmpoolError
from lmpool.producer import EmbeddedLM, NumpyRows, embedded

TOLERANCE: Final = 1e-4
"""Nats by which two engines' rows of one prompt may differ, in float32."""

CHECKED: Final = 48
SAMPLED: Final = 6
MAX_TOKENS: Final = 12
MEASURED: Final = 128
MEASURED_SECONDS: Final = 3.0
LENGTH: Final = 32
TIMEOUT: Final = 300.0


@dataclass(slots=True)
class Answers:
    """What one engine answered."""

    engine: str
    rows: npt.NDArray[np.float32]
    greedy: list[list[int]]
    drawn: list[list[int]]
    repeats: bool
    """Whether a seed drew the same tokens when it was asked again."""
    rows_per_second: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far an engine is from the first one: nats, and whether it takes the same tokens.

    Samplers turn a seed into draws in different ways: what an engine draws may be its own, but has
    to be the same each time.
    """

    engine: str
    distance: float
    same_greedy: bool
    same_drawn: bool
    repeats: bool
    rows_per_second: float

    @property
    def good(self) -> bool:
        """Whether users of the two would see the same, but for the sampler."""
        return self.distance <= TOLERANCE and self.same_greedy and self.repeats


def make_prompts(vocab_size: int, longest: int) -> list[list[int]]:
    """Prompts of many lengths, some of them prefixes of others, the same in every run."""
    random = np.random.default_rng(0)
    bound = min(longest, 100)
    prompts = [
        random.integers(0, vocab_size, int(n)).tolist()
        for n in random.integers(1, bound + 1, CHECKED // 2)
    ]
    for prompt in list(prompts):
        kept = prompt[: int(random.integers(1, len(prompt) + 1))]
        prompts.append([*kept, int(random.integers(0, vocab_size))][:bound])
    return prompts


def ask_engine(engine: str, model: str) -> Answers:
    """Start a pool of one worker, ask it, and end it."""
    with embedded(
        model, engine, 1, pool="engine-check", dtype="float32", framework="numpy", cache_bytes=0
    ) as lm:
        info = lm.info
        # Engines differ by a few tokens in the longest prompt that they take.
        prompts = make_prompts(info.vocab_size, max(1, info.max_prompt_tokens - 64))
        rows: Any = lm.batch_next_token_logprobs_sync(prompts, timeout=TIMEOUT)

        def sample(temperature: float, max_tokens: int = MAX_TOKENS) -> list[list[int]]:
            return lm.batch_sample_sync(
                prompts[:SAMPLED], max_tokens, (), temperature, 1, timeout=TIMEOUT
            )

        drawn = sample(1.0)
        # A token more, or the answer would come from the result cache.
        again = [tokens[:MAX_TOKENS] for tokens in sample(1.0, MAX_TOKENS + 1)]
        return Answers(engine, rows, sample(0.0), drawn, again == drawn, _rows_per_second(lm))


def _rows_per_second(lm: EmbeddedLM[NumpyRows]) -> float:
    random = np.random.default_rng(1)
    length = min(LENGTH, lm.info.max_prompt_tokens)
    paces: list[float] = []
    started = time.perf_counter()
    while not paces or (len(paces) < 3 and time.perf_counter() - started < MEASURED_SECONDS):
        prompts = random.integers(0, lm.info.vocab_size, (MEASURED, length)).tolist()
        began = time.perf_counter()
        lm.batch_next_token_logprobs_sync(prompts, timeout=TIMEOUT)
        paces.append(MEASURED / (time.perf_counter() - began))
    return statistics.median(paces)


def compare(answers: Sequence[Answers]) -> list[Comparison]:
    """Each engine against the first."""
    first = answers[0]
    found = []
    for other in answers:
        alike = other.rows.shape == first.rows.shape
        distance = float(np.abs(other.rows - first.rows).max()) if alike else float("inf")
        found.append(
            Comparison(
                other.engine,
                distance,
                other.greedy == first.greedy,
                other.drawn == first.drawn,
                other.repeats,
                other.rows_per_second,
            )
        )
    return found


def run_engine_check(*, model: str) -> int:
    """Print how the installed engines compare; 1 if two of them differ or one fails, else 0."""
    console = Console(highlight=False, soft_wrap=True)
    names = installed_engines()
    if not names:
        console.print("no engine is installed here: pip install 'lmpool\\[hf]'")
        return 1
    answers: list[Answers] = []
    failed = False
    for name in names:
        try:
            with console.status(f"asking a pool of {name}"):
                answers.append(ask_engine(name, model))
        except LmpoolError as error:
            failed = True
            console.print(f"[bold red]wrong[/]  {name}: {escape(str(error))}")
    if not answers:
        return 1
    found = compare(answers)
    console.print(_table(found, model))
    console.print(
        f"{CHECKED} prompts in float32, {SAMPLED} continuations of {MAX_TOKENS} tokens at "
        f"temperature 0 and 1; rows a second of one worker, {MEASURED} prompts of {LENGTH} tokens."
    )
    different = [each.engine for each in found if not each.good]
    if different:
        console.print(
            f"[bold red]wrong[/]  {', '.join(different)}: not the same tokens and rows within "
            f"{TOLERANCE:g} as {found[0].engine}"
        )
    elif len(found) > 1:
        console.print(f"the same tokens, and rows within {TOLERANCE:g}")
        own = [each.engine for each in found if not each.same_drawn]
        if own:
            console.print(f"{', '.join(own)}: draws with a sampler of its own, the same each time")
    else:
        console.print(f"{found[0].engine} alone is installed here: nothing to compare it with")
    return 1 if failed or different else 0


def _table(found: Sequence[Comparison], model: str) -> Table:
    table = Table(title=f"engines, model {escape(model)}", title_justify="left")
    table.add_column("engine")
    for heading in (f"from {found[0].engine}", "greedy", "drawn", "rows/s"):
        table.add_column(heading, justify="right")
    for each in found:
        table.add_row(
            each.engine,
            f"{each.distance:.1e}",
            "same" if each.same_greedy else "different",
            ("same" if each.same_drawn else "its own") if each.repeats else "unsteady",
            f"{each.rows_per_second:,.0f}",
        )
    return table
