"""Engines that use a prefix which they were told to keep where they must not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmpool.backends import Engine, EngineInfo, Outcome
from lmpool.backends.engine import Tokens
from lmpool.errors import EngineBroken, PromptFailed
from tests.engines.mutants.caching import as_ints
from tests.engines.mutants.engines import F32, Ids, Model, Wrapper
from tests.engines.mutants.registry import BOTH, Witness, mutant
from tests.engines.mutants.witnesses import (
    LONGEST,
    VOCAB,
    Prompt,
    ask_rightly,
    check,
    prompt_of,
    prompts_of,
    requests_of,
    run,
    scenario,
)


class Prefixes(Model):
    """Knows the prefixes that it was told to keep."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self.prefixes: list[list[int]] = []

    def cache_prefix(self, tokens: Tokens) -> None:
        self.prefixes = [*self.prefixes[-15:], as_ints(tokens)]

    def clear_cache(self) -> None:
        self.prefixes = []

    def row(self, tokens: Ids, adapter: str | None) -> F32:
        ids = as_ints(tokens)
        for prefix in self.prefixes:
            if ids[: len(prefix)] == prefix:
                return self.behind(prefix, ids, adapter)
        return super().row(ids, adapter)

    def behind(self, prefix: list[int], tokens: list[int], adapter: str | None) -> F32:
        """The row of a prompt that begins with a prefix that is kept."""
        raise NotImplementedError


def _after_prefix(prefix: Prompt, *prompts: Prompt, adapter: str | None = None) -> Witness:
    def play(engine: Engine) -> None:
        engine.add_adapter("a", "/adapters/a")
        engine.cache_prefix(np.array(prefix, np.uint32))
        ask_rightly(engine, requests_of(prompts, adapter))
        ask_rightly(engine, requests_of(prompts))

    return scenario(play)


@mutant(
    "cache-prefix-makes-rows-of-the-rest-alone", _after_prefix([1, 2, 3], [1, 2, 3, 4]), forms=BOTH
)
class PrefixForgotten(Prefixes):
    """A prompt that begins with a kept prefix has the row of the whole prompt."""

    def behind(self, prefix: list[int], tokens: list[int], adapter: str | None) -> F32:
        return Model.row(self, tokens[len(prefix) :] or tokens, adapter)


@mutant(
    "cache-prefix-makes-its-own-row-that-of-a-token-less",
    _after_prefix([1, 2, 3], [1, 2, 3]),
    subtle=True,
)
class PrefixItself(Prefixes):
    """A prompt that is the kept prefix itself has its row."""

    def behind(self, prefix: list[int], tokens: list[int], adapter: str | None) -> F32:
        same = prefix == tokens and len(tokens) > 1
        return Model.row(self, tokens[:-1] if same else tokens, adapter)


@mutant(
    "cache-prefix-leaks-into-adapters",
    _after_prefix([1, 2, 3], [1, 2, 3, 4], adapter="a"),
    forms=BOTH,
)
class PrefixLeaksIntoAdapters(Prefixes):
    """A prefix is kept of the model itself; an adapter's prompts are computed with the adapter."""

    def behind(self, prefix: list[int], tokens: list[int], adapter: str | None) -> F32:
        return Model.row(self, tokens, None)


@mutant(
    "cache-prefix-matches-all-but-its-last-token",
    _after_prefix([1, 2, 3], [1, 2, 7, 4]),
    subtle=True,
)
class PrefixMatchesNearly(Prefixes):
    """A prefix is used for prompts that begin with all of it."""

    def row(self, tokens: Ids, adapter: str | None) -> F32:
        ids = as_ints(tokens)
        for prefix in self.prefixes:
            if len(ids) > len(prefix) > 2 and ids[: len(prefix) - 1] == prefix[:-1]:
                return super(Prefixes, self).row([*prefix, *ids[len(prefix) :]], adapter)
        return super(Prefixes, self).row(ids, adapter)


def _two_prefixes(engine: Engine) -> None:
    for prefix in ([1, 2], [5, 6, 7]):
        engine.cache_prefix(np.array(prefix, np.uint32))
    ask_rightly(engine, requests_of([[1, 2, 40], [5, 6, 7, 40]]))


@mutant("cache-prefix-of-two-gives-equal-ends-one-row", scenario(_two_prefixes))
class PrefixesOfEqualEnds(Prefixes):
    """Behind two kept prefixes, equal ends have rows of their own."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self.ends: dict[tuple[int, ...], F32] = {}

    def behind(self, prefix: list[int], tokens: list[int], adapter: str | None) -> F32:
        end = tuple(tokens[len(prefix) :])
        row = Model.row(self, tokens, adapter)
        return self.ends.setdefault(end, row) if end and adapter is None else row

    def clear_cache(self) -> None:
        super().clear_cache()
        self.ends = {}


def _only_what_was_asked(engine: Engine) -> None:
    asked = requests_of(prompts_of(3))
    engine.submit(asked)
    engine.cache_prefix(np.array([4, 5, 6], np.uint32))
    found = run(engine, [each.id for each in asked])
    for each in asked:
        check(each, found[each.id])


@mutant("cache-prefix-hands-out-an-outcome", scenario(_only_what_was_asked), forms=BOTH)
class PrefixHandedOut(Wrapper):
    """Outcomes are those of requests; a prefix has none."""

    prefixes = 0

    def cache_prefix(self, tokens: Tokens) -> None:
        super().cache_prefix(tokens)
        self.prefixes += 1

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        row = np.zeros(self.info.vocab_size, np.float32)
        extra = [Outcome(b"lmpool-prefix", row=row)] * self.prefixes
        self.prefixes = 0
        return [*outcomes, *extra]


@mutant("cache-prefix-swallows-what-waits", scenario(_only_what_was_asked), forms=BOTH)
class PrefixSwallows(Wrapper):
    """What is in flight while a prefix is computed is answered afterwards."""

    def cache_prefix(self, tokens: Tokens) -> None:
        super().cache_prefix(tokens)
        while self.inner.in_flight():
            self.inner.step()


@mutant("cache-prefix-counts-as-in-flight", scenario(_only_what_was_asked))
class PrefixInFlight(Wrapper):
    """`in_flight` counts what was submitted, and a prefix was not."""

    prefixes = 0

    def cache_prefix(self, tokens: Tokens) -> None:
        super().cache_prefix(tokens)
        self.prefixes += 1

    def in_flight(self) -> int:
        return super().in_flight() + self.prefixes


def _bad_prefix(engine: Engine) -> None:
    for bad in (prompt_of(LONGEST + 1), [VOCAB]):
        try:
            engine.cache_prefix(np.array(bad, np.uint32))
        except PromptFailed:
            pass  # as fed engines do
    ask_rightly(engine, requests_of(prompts_of(2)))


@mutant("cache-prefix-of-no-prompt-breaks-the-engine", scenario(_bad_prefix), subtle=True)
class BadPrefixBreaks(Wrapper):
    """A prefix that is too long, or has an id that there is not, harms nobody."""

    broken = False

    def cache_prefix(self, tokens: Tokens) -> None:
        info = self.info
        self.broken |= tokens.size > info.max_prompt_tokens or tokens.max() >= info.vocab_size
        super().cache_prefix(tokens)

    def step(self) -> Sequence[Outcome]:
        if self.broken:
            raise EngineBroken("index out of range in self")
        return super().step()
