"""What an engine keeps of requests that ended: nothing, or what a bound allows.

Python counts the small blocks of memory that are in use, and an object that is kept costs one at
least. So a leak of anything shows after a hundred times, in whatever form it is kept.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import numpy as np
import psutil

from lmpool.backends.contract.asking import ROW, ask, request_for, tokens_of
from lmpool.backends.contract.breaches import expect
from lmpool.backends.contract.operations import AdapterFiles, Asked
from lmpool.backends.contract.script import versioned
from lmpool.backends.contract.truth import Truth
from lmpool.backends.contract.wants import References
from lmpool.backends.engine import Engine, Request
from lmpool.errors import PromptFailed
from lmpool.wants import Generate, Want

PROMISE: Final = "memory does not grow with what was asked before"

_LIFE: Final = 3_500
_WARM_UP: Final = 1_500
_TOGETHER: Final = 100
_PROMPT_TOKENS: Final = 4
_GROWTH: Final = 16 << 20

_EVENTS: Final = 60
_ADAPTERS: Final = 4
_ROUNDS: Final = 45
"""Of the first ones some grow what Python and libraries keep of code that was seldom run: torch
some objects at random of each ``with torch.device(...)``, which are fewer and fewer."""
_LEFT: Final = 1 / 10
"""Objects that may be left of each: less than a leak of a part of them leaves."""
_FILLING: Final = 150


def check_memory(engine: Engine, truth: Truth) -> None:
    """Raise `BrokenPromise` where something is kept that nobody waits for.

    `engine` was opened with small bounds of what it keeps between batches.
    """
    with _counted():
        for kind, cycle in _cycles(engine, truth).items():
            if "adapters" in kind:
                _check_cycle(kind, cycle, _ADAPTERS, max(_LEFT, truth.suite.left_by_adapter))
            else:
                _check_cycle(kind, cycle, _EVENTS, _LEFT)
        _check_clearing(engine, truth)
        _check_life(engine, truth)


_Cycles = dict[str, Callable[[], None]]


def _cycles(engine: Engine, truth: Truth) -> _Cycles:
    """What is done over and over, the same each time but for the ids; `_EVENTS` times a call."""
    random = np.random.default_rng(3)
    prompts = random.integers(0, truth.info.vocab_size, (_EVENTS, _PROMPT_TOKENS)).tolist()
    found = _cycles_of_requests(engine, truth, prompts)
    found |= _cycles_of_prefixes(engine, truth, prompts)
    if "adapters" not in truth.suite.lacks:
        found |= _cycles_of_adapters(engine, truth, prompts[0])
    return found


def _cycles_of_requests(engine: Engine, truth: Truth, prompts: Sequence[list[int]]) -> _Cycles:
    vocab, longest = truth.info.vocab_size, truth.info.max_prompt_tokens

    def requests(want: Want = ROW) -> list[Request]:
        return [request_for(prompt, want=want) for prompt in prompts]

    def continuations() -> None:
        drawn = [Generate(2, (), 1.0, n) for n in range(_EVENTS)]
        ask(engine, [request_for(p, want=w) for p, w in zip(prompts, drawn, strict=True)])

    random, references = np.random.default_rng(4), References().of_rows()
    reduced = [
        references[n % len(references)].draw(random, (), None, truth) for n in range(_EVENTS)
    ]

    def answers() -> list[Request]:
        return [request_for(p, want=w) for p, w in zip(prompts, reduced, strict=True)]

    def refused() -> None:
        bad: list[list[int]] = [[], [vocab], [1] * (longest + 1)]
        if longest > 10_000:
            bad.pop()
        asked = [request_for(bad[n % len(bad)]) for n in range(_EVENTS)]
        asked += [request_for([1], adapter="nobody") for _ in range(_EVENTS)]
        ask(engine, asked)

    def cancelled(steps: int) -> None:
        long = Generate(longest - _PROMPT_TOKENS, (), 1.0, 1)
        asked = requests()[: _EVENTS // 3] + requests(want=long)[: _EVENTS // 3]
        asked += answers()[: _EVENTS // 3]
        engine.submit(asked)
        for _ in range(steps):
            engine.step()
        engine.cancel({request.id for request in asked})
        while engine.in_flight():
            engine.step()
        _ignore(ask(engine, [request_for(prompts[0])]))  # whose steps clear up after them

    def unknown() -> None:
        engine.cancel({request.id for request in requests()})

    def idle() -> None:
        for _ in range(_EVENTS):
            engine.step()
            engine.submit([])

    return {
        "rows": lambda: _ignore(ask(engine, requests())),
        "what follows from rows": lambda: _ignore(ask(engine, answers())),
        "continuations": continuations,
        "refused requests": refused,
        "cancelled requests": partial(cancelled, 0),
        "requests that were cancelled under way": partial(cancelled, 1),
        "unknown ids that were cancelled": unknown,
        "steps with nothing to do": idle,
    }


def _cycles_of_prefixes(engine: Engine, truth: Truth, prompts: Sequence[list[int]]) -> _Cycles:
    random = np.random.default_rng(6)

    def keep(some: Sequence[Sequence[int]]) -> None:
        for prompt in some:
            try:
                engine.cache_prefix(tokens_of(prompt))
            except PromptFailed:
                pass

    def dropped() -> None:
        keep(prompts)
        engine.clear_cache()

    def new_ones() -> None:
        keep(random.integers(0, truth.info.vocab_size, (_EVENTS, 2 * _PROMPT_TOKENS)).tolist())

    return {
        "prefixes that were kept and dropped": dropped,
        "prefixes for which there is no room": new_ones,
    }


def _cycles_of_adapters(engine: Engine, truth: Truth, prompt: list[int]) -> _Cycles:
    names = itertools.count()

    def folder_of(number: int) -> str:
        return truth.adapter(AdapterFiles("", 200 + number, (("rank", 2),))).folder

    def came_and_went() -> None:
        for number in range(_ADAPTERS):
            name = versioned("m", next(names))
            engine.add_adapter(name, folder_of(number))
            ask(engine, [request_for(prompt, adapter=name)])
            engine.remove_adapter(name)

    def replaced() -> None:
        for number in range(_ADAPTERS):
            engine.add_adapter(versioned("r", 1), folder_of(number))
            ask(engine, [request_for(prompt, adapter=versioned("r", 1))])

    return {"adapters that came and went": came_and_went, "adapters that were replaced": replaced}


def _check_cycle(kind: str, cycle: Callable[[], None], events: int, left: float) -> None:
    """Do it until a round leaves no more than `left` of each behind; a leak does so each time."""
    cycle()
    before = _blocks()
    grown: list[int] = []
    for _ in range(_ROUNDS):
        cycle()
        after = _blocks()
        grown.append(after - before)
        if grown[-1] <= events * left:
            return
        before = after
    expect(
        False,
        PROMISE,
        f"each time that there were {events} {kind}, {min(grown)} objects more were left",
    )


def _check_clearing(engine: Engine, truth: Truth) -> None:
    """What is kept of prompts goes when the cache is cleared."""
    random = np.random.default_rng(4)
    prompts = random.integers(0, truth.info.vocab_size, (_FILLING, 2 * _PROMPT_TOKENS))
    engine.clear_cache()
    empty = _blocks()
    _ignore(ask(engine, [request_for(prompt) for prompt in prompts.tolist()]))
    full = _blocks()
    engine.clear_cache()
    left = _blocks() - empty
    kept = full - empty
    expect(
        kept < _FILLING or left < kept / 2,
        "clear_cache drops what is kept between batches",
        f"{kept} objects were kept of {_FILLING} prompts, and {left} are left after it",
    )


def _check_life(engine: Engine, truth: Truth) -> None:
    """Thousands of prompts, all of them right, and no more memory at the end than before."""
    random = np.random.default_rng(5)
    begun = (0, 0)
    for done in range(_TOGETHER, _LIFE + 1, _TOGETHER):
        prompts = random.integers(0, truth.info.vocab_size, (_TOGETHER, _PROMPT_TOKENS)).tolist()
        outcomes = ask(engine, [request_for(prompt) for prompt in prompts])
        failed = next((outcome.error for outcome in outcomes if outcome.error), None)
        expect(failed is None, "an engine answers as long as it lives", f"{failed}")
        if done == _WARM_UP:
            begun = resident_bytes(), _blocks()
        if done == _LIFE:
            grown, blocks = resident_bytes() - begun[0], _blocks() - begun[1]
            _check_growth(grown, blocks, _LIFE - _WARM_UP)
        if done in (_TOGETHER, _LIFE):  # not between: the reference keeps rows as well
            rows = [outcome.logprobs() for outcome in outcomes]
            truth.compare([Asked(n, tuple(p)) for n, p in enumerate(prompts)], rows, None)


def _check_growth(grown: int, blocks: int, asked: int) -> None:
    expect(
        grown < _GROWTH and blocks < asked / 2,
        PROMISE,
        f"{grown / 2**20:.1f} MiB and {blocks} objects more after {asked} prompts",
    )


def _ignore(_: object) -> None:
    pass


@contextmanager
def _counted() -> Iterator[None]:
    """Leave what was there before out of collections, which are quick then."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _blocks() -> int:
    """The objects of Python, open files and threads that there are."""
    gc.collect()
    files = psutil.Process().num_fds() if psutil.POSIX else 0
    return sys.getallocatedblocks() + files + threading.active_count()


def resident_bytes() -> int:
    """The memory of this process and of those that it has started."""
    gc.collect()
    process = psutil.Process()
    total: int = process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
