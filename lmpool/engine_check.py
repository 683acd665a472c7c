"""The same prompts through a pool of each engine: do they compute the same, and how fast.

::

    from lmpool import engine_check
    from lmpool.backends.load import installed_engines

    found = engine_check.check_engines(installed_engines(), "tiny")
    print(found.comparisons, found.failures)

Every function blocks: an engine takes seconds to minutes to start.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lmpool.errors import LmpoolError
from lmpool.producer import EmbeddedLM, NumpyRows, embedded

TOLERANCE: Final = 1e-4
"""Nats by which two engines' rows of one prompt may differ, in float32."""

PROMPTS: Final = 48
"""Prompts whose rows are compared."""
SAMPLED: Final = 6
"""Prompts whose continuations are compared, too."""
MAX_TOKENS: Final = 12
MEASURED: Final = 128
"""Prompts in each batch whose pace is measured."""
MEASURED_SECONDS: Final = 3.0
LENGTH: Final = 32
"""Tokens in each of those."""
TIMEOUT: Final = 300.0

__all__ = ["Comparison", "EngineCheck", "EngineRun", "check_engines", "compare", "run_engine"]


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What one engine made of the prompts."""

    engine: str
    rows: npt.NDArray[np.float32]
    """Their rows, [prompts, vocab_size]."""
    greedy: list[list[int]]
    """Continuations at temperature 0."""
    drawn: list[list[int]]
    """Continuations at temperature 1, of one seed."""
    repeats: bool
    """Whether that seed drew the same tokens when it was asked again."""
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


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """Each engine that ran against the first that did, and why the others did not run."""

    comparisons: Sequence[Comparison]
    failures: Mapping[str, LmpoolError]

    @property
    def different(self) -> list[str]:
        """The engines that do not compute what the first one does."""
        return [each.engine for each in self.comparisons if not each.good]

    @property
    def good(self) -> bool:
        """Whether there was an engine, all ran, and all compute the same."""
        return bool(self.comparisons) and not self.failures and not self.different


def check_engines(
    engines: Sequence[str],
    model: str = "tiny",
    *,
    revision: str | None = None,
    engine_opts: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
    on_start: Callable[[str], None] = lambda engine: None,
) -> EngineCheck:
    """Run each engine in a private pool of one worker, one after the other, and compare.

    `engine_opts` are each engine's own, by its name. `on_start` is told each engine's name before
    it starts.
    """
    runs: list[EngineRun] = []
    failures: dict[str, LmpoolError] = {}
    for engine in engines:
        on_start(engine)
        try:
            options = engine_opts.get(engine, {})
            runs.append(run_engine(engine, model, revision=revision, engine_opts=options))
        except LmpoolError as error:
            failures[engine] = error
    return EngineCheck(compare(runs), failures)


def run_engine(
    engine: str,
    model: str,
    *,
    revision: str | None = None,
    engine_opts: Mapping[str, object] = MappingProxyType({}),
) -> EngineRun:
    """Start a pool of one worker, ask it, and end it. Raises what `lmpool.embedded` does.

    Revision and options are these, whatever the variables of the environment say.
    """
    with embedded(
        model,
        engine,
        1,
        pool="engine-check",
        dtype="float32",
        framework="numpy",
        cache_bytes=0,
        revision=revision or "",  # None would be what the environment says
        engine_opts=dict(engine_opts),
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
        # A token more, or they would come from the result cache.
        again = [tokens[:MAX_TOKENS] for tokens in sample(1.0, MAX_TOKENS + 1)]
        return EngineRun(engine, rows, sample(0.0), drawn, again == drawn, _rows_per_second(lm))


def make_prompts(vocab_size: int, longest: int) -> list[list[int]]:
    """Prompts of many lengths, some of them prefixes of others, the same in every run."""
    random = np.random.default_rng(0)
    bound = min(longest, 100)
    prompts = [
        random.integers(0, vocab_size, int(n)).tolist()
        for n in random.integers(1, bound + 1, PROMPTS // 2)
    ]
    for prompt in list(prompts):
        kept = prompt[: int(random.integers(1, len(prompt) + 1))]
        prompts.append([*kept, int(random.integers(0, vocab_size))][:bound])
    return prompts


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


def compare(runs: Sequence[EngineRun]) -> list[Comparison]:
    """Each engine, the first among them, against the first."""
    found = []
    for run in runs:
        first = runs[0]
        alike = run.rows.shape == first.rows.shape
        distance = float(np.abs(run.rows - first.rows).max()) if alike else float("inf")
        found.append(
            Comparison(
                run.engine,
                distance,
                run.greedy == first.greedy,
                run.drawn == first.drawn,
                run.repeats,
                run.rows_per_second,
            )
        )
    return found
