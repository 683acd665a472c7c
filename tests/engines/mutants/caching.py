"""Engines that take one prompt's state or row for another's, or lose what is no cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np

from lmpool.backends import Engine, Outcome, Request
from lmpool.backends.engine import Tokens
from lmpool.errors import EngineBroken, EngineError, PromptFailed
from lmpool.wants import Generate
from tests.engines.mutants.engines import F32, Bent, Model, Wrapper
from tests.engines.mutants.registry import BOTH, mutant
from tests.engines.mutants.witnesses import (
    LONGEST,
    VOCAB,
    ask,
    ask_rightly,
    check,
    prompt_of,
    prompts_of,
    request,
    requests_of,
    rows,
    run,
    scenario,
)


def as_ints(tokens) -> list[int]:
    return [int(token) for token in tokens]


class Cache(Model):
    """Keeps the last 512 rows by a key, which `clear_cache` drops; right, if the key is."""

    most = 512

    def __init__(self, info) -> None:
        super().__init__(info)
        self.kept: dict[Hashable, F32] = {}

    def key(self, tokens: Sequence[int], adapter: str | None) -> Hashable:
        return tuple(tokens), adapter

    def row(self, tokens, adapter) -> F32:
        key = self.key(as_ints(tokens), adapter)
        if key not in self.kept:
            if len(self.kept) >= self.most:
                del self.kept[next(iter(self.kept))]
            self.kept[key] = super().row(tokens, adapter)
        return self.kept[key]

    def clear_cache(self) -> None:
        self.kept.clear()


LONG = prompt_of(130)


@mutant("cache-keyed-by-the-last-64-tokens", rows([LONG, [9, *LONG[1:]]]), forms=BOTH)
class CacheByTheLast64(Cache):
    """Prompts that differ more than 64 tokens before their end have rows of their own."""

    def key(self, tokens, adapter):
        return tuple(tokens[-64:]), adapter


@mutant("cache-keyed-by-the-first-96-tokens-and-the-length", rows([LONG, [*LONG[:-1], 9]]))
class CacheByTheFirst96(Cache):
    """Prompts that differ behind 96 tokens have rows of their own."""

    def key(self, tokens, adapter):
        return tuple(tokens[:96]), len(tokens), adapter


@mutant(
    "cache-keyed-by-length-head-and-tail", rows([LONG, [*LONG[:60], 9, *LONG[61:]]]), forms=BOTH
)
class CacheByLengthHeadAndTail(Cache):
    """Prompts that differ in their middle alone have rows of their own."""

    def key(self, tokens, adapter):
        return len(tokens), tuple(tokens[:16]), tuple(tokens[-16:]), adapter


@mutant("cache-keyed-by-the-multiset-of-tokens", rows([[1, 2, 3], [2, 1, 3]]), forms=BOTH)
class CacheByTheMultiset(Cache):
    """The order of tokens matters."""

    def key(self, tokens, adapter):
        return tuple(sorted(tokens)), adapter


@mutant("cache-keyed-by-the-set-of-tokens", rows([[1, 2, 2], [1, 1, 2]]), subtle=True)
class CacheByTheSet(Cache):
    """How often a token comes matters."""

    def key(self, tokens, adapter):
        return frozenset(tokens), len(tokens), tokens[-1], adapter


@mutant("cache-keyed-up-to-rotation", rows([[1, 2, 3, 4], [3, 4, 1, 2]]), subtle=True)
class CacheUpToRotation(Cache):
    """A prompt that is another one turned has a row of its own."""

    def key(self, tokens, adapter):
        start = tokens.index(min(tokens))
        return tuple(tokens[start:] + tokens[:start]), adapter


@mutant("cache-keyed-by-ids-mod-1024", lambda make: _wide(make))
class CacheByIdsMod1024(Cache):
    """Ids that are equal in ten bits are different tokens (in vocabularies of more than 1,024)."""

    def key(self, tokens, adapter):
        return tuple(token % 1024 for token in tokens), adapter


def _wide(make) -> None:
    engine = make(vocab_size=2000, max_prompt_tokens=64)
    asked = requests_of([[5, 900], [5 + 1024, 900], [5, 900 + 1024]])
    for each, outcome in zip(asked, ask(engine, asked), strict=True):
        check(each, outcome, 2000)


@mutant("cache-keyed-by-ids-mod-256", rows([[5, 9], [5 + 256, 9]]))
class CacheByIdsMod256(Cache):
    """Ids that are equal in eight bits are different tokens."""

    def key(self, tokens, adapter):
        return bytes(token % 256 for token in tokens), adapter


@mutant(
    "cache-keyed-without-the-lowest-bit-of-long-prompts",
    rows([LONG, [LONG[0] ^ 1, *LONG[1:]]]),
    subtle=True,
)
class CacheWithoutTheLowestBit(Cache):
    """Ids that differ in a bit are different tokens (from 100 tokens on)."""

    def key(self, tokens, adapter):
        return tuple(t >> 1 if len(tokens) >= 100 else t for t in tokens), adapter


@mutant("cache-keyed-by-sum-and-length", rows([[10, 20, 30], [11, 19, 30]]))
class CacheBySum(Cache):
    """Prompts of one length and sum have rows of their own."""

    def key(self, tokens, adapter):
        return sum(tokens), len(tokens), adapter


@mutant(
    "cache-keyed-by-a-hash-of-16-bits",
    rows(*(prompts_of(200, seed=n) for n in range(6))),
    subtle=True,
)
class CacheByAShortHash(Cache):
    """Prompts whose hashes collide have rows of their own."""

    most = 1 << 16

    def key(self, tokens, adapter):
        return hashlib.blake2b(repr((tokens, adapter)).encode(), digest_size=2).digest()


@mutant(
    "cache-keyed-by-every-other-token-past-32",
    rows([LONG, [*LONG[:65], LONG[65] ^ 3, *LONG[66:]]]),
    subtle=True,
)
class CacheByEveryOtherToken(Cache):
    """Prompts that differ in any one token have rows of their own (blind: odd places past 32)."""

    def key(self, tokens, adapter):
        return tuple(tokens[:32]), tuple(tokens[32::2]), len(tokens), adapter


@mutant(
    "cache-of-the-prompt-without-its-last-block", rows([LONG[:64], LONG[:63] + [9]]), subtle=True
)
class CacheByWholeBlocks(Cache):
    """Prompts that fill their last block of 16 are told apart by it, too."""

    def key(self, tokens, adapter):
        size = len(tokens)
        whole = size - 16 if size >= 32 and size % 16 == 0 else size
        return tuple(tokens[:whole]), size, adapter


def _many_adapters(engine: Engine) -> None:
    engine.add_adapter("a", "/adapters/a")
    engine.add_adapter("b", "/adapters/b")
    for adapter in (None, "a", "b"):
        ask_rightly(engine, requests_of([[1, 2, 3]], adapter))


@mutant("cache-shared-by-adapters", scenario(_many_adapters), forms=BOTH)
class CacheSharedByAdapters(Cache):
    """A prompt's row is its adapter's own."""

    def key(self, tokens, adapter):
        return tuple(tokens)


@mutant("cache-shared-by-adapters-but-not-the-model", scenario(_many_adapters), subtle=True)
class CacheSharedAmongAdapters(Cache):
    """Two adapters' rows of one prompt differ."""

    def key(self, tokens, adapter):
        return tuple(tokens), adapter is None


@mutant(
    "cache-whose-freed-places-keep-their-names",
    rows(*[prompts_of(150, seed=n) for n in range(8)], prompts_of(150)),
    forms=BOTH,
    subtle=True,
)
class CacheWithStalePlaces(Model):
    """What was evicted is computed again, not read from the place that another's row took."""

    def __init__(self, info) -> None:
        super().__init__(info)
        self.places: list[F32] = []
        self.index: dict[Hashable, int] = {}
        self.next = 0

    def row(self, tokens, adapter) -> F32:
        key = (tuple(as_ints(tokens)), adapter)
        if key not in self.index:
            if len(self.index) > 4096:
                self.clear_cache()
            self.index[key] = self.next % 512
            self.next += 1
            self.places[self.index[key] : self.index[key] + 1] = [super().row(tokens, adapter)]
        return self.places[self.index[key]]

    def clear_cache(self) -> None:
        self.places, self.index, self.next = [], {}, 0


def _names_again(engine: Engine) -> None:
    for prompt in prompts_of(3):
        ask_rightly(engine, [request(b"the-same-name", prompt)])


@mutant("cache-keyed-by-the-request", scenario(_names_again), forms=BOTH)
class CacheByTheRequest(Model):
    """An id tells requests in flight apart; later another prompt may have it."""

    def __init__(self, info) -> None:
        super().__init__(info)
        self.kept: dict[Hashable, F32] = {}

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        for each in requests:
            if len(self.kept) > 1024:
                self.kept.clear()
            self.kept.setdefault((each.id, each.tokens.size), self.row(each.tokens, each.adapter))
        return [self.kept[each.id, each.tokens.size] for each in requests]


# --- prefixes that were asked for ----------------------------------------------------------------


class Prefixes(Model):
    """Knows the prefixes that it was told to keep."""

    def __init__(self, info) -> None:
        super().__init__(info)
        self.prefixes: list[list[int]] = []

    def cache_prefix(self, tokens: Tokens) -> None:
        self.prefixes = [*self.prefixes[-15:], as_ints(tokens)]

    def clear_cache(self) -> None:
        self.prefixes = []

    def row(self, tokens, adapter) -> F32:
        ids = as_ints(tokens)
        for prefix in self.prefixes:
            if ids[: len(prefix)] == prefix:
                return self.behind(prefix, ids, adapter)
        return super().row(ids, adapter)

    def behind(self, prefix: list[int], tokens: list[int], adapter: str | None) -> F32:
        """The row of a prompt that begins with a prefix that is kept."""
        raise NotImplementedError


def _after_prefix(prefix, *prompts, adapter: str | None = None) -> Callable:
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

    def behind(self, prefix, tokens, adapter):
        return Model.row(self, tokens[len(prefix) :] or tokens, adapter)


@mutant(
    "cache-prefix-makes-its-own-row-that-of-a-token-less",
    _after_prefix([1, 2, 3], [1, 2, 3]),
    subtle=True,
)
class PrefixItself(Prefixes):
    """A prompt that is the kept prefix itself has its row."""

    def behind(self, prefix, tokens, adapter):
        same = prefix == tokens and len(tokens) > 1
        return Model.row(self, tokens[:-1] if same else tokens, adapter)


@mutant(
    "cache-prefix-leaks-into-adapters",
    _after_prefix([1, 2, 3], [1, 2, 3, 4], adapter="a"),
    forms=BOTH,
)
class PrefixLeaksIntoAdapters(Prefixes):
    """A prefix is kept of the model itself; an adapter's prompts are computed with the adapter."""

    def behind(self, prefix, tokens, adapter):
        return Model.row(self, tokens, None)


@mutant(
    "cache-prefix-matches-all-but-its-last-token",
    _after_prefix([1, 2, 3], [1, 2, 7, 4]),
    subtle=True,
)
class PrefixMatchesNearly(Prefixes):
    """A prefix is used for prompts that begin with all of it."""

    def row(self, tokens, adapter) -> F32:
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

    def __init__(self, info) -> None:
        super().__init__(info)
        self.ends: dict[tuple[int, ...], F32] = {}

    def behind(self, prefix, tokens, adapter):
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
        except EngineError as error:
            assert not isinstance(error, EngineBroken)
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


# --- clearing ------------------------------------------------------------------------------------


def _clear_between(engine: Engine) -> None:
    engine.add_adapter("a", "/adapters/a")
    want = Generate(12, (), 1.0, 11)
    asked = [*requests_of(prompts_of(3), want=want), *requests_of([[1, 2]], "a", want, start=9)]
    engine.submit(asked)
    early = [*engine.step(), *engine.step(), *engine.step()]
    assert not early
    late = requests_of([[7, 7]], start=20)
    engine.submit(late)
    engine.clear_cache()
    assert engine.in_flight() == 5
    found = run(engine, [each.id for each in (*asked, *late)])
    for each in (*asked, *late):
        check(each, found[each.id])
    ask_rightly(engine, requests_of([[7, 7]], "a"))


CLEARING = scenario(_clear_between)


@mutant("clear-cache-drops-continuations", CLEARING, forms=BOTH)
class ClearDropsContinuations(Wrapper):
    """`clear_cache` drops what is kept between batches, and not who waits for an answer."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.drawing: set[bytes] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        self.drawing |= {r.id for r in requests if isinstance(r.want, Generate)}
        super().submit(requests)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        self.drawing -= {o.id for o in outcomes}
        return outcomes

    def clear_cache(self) -> None:
        super().clear_cache()
        self.cancel(self.drawing)
        self.drawing = set()


@mutant("clear-cache-fails-continuations", CLEARING)
class ClearFailsContinuations(Wrapper):
    """A continuation goes on after `clear_cache`, and has no error."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.failed: list[Outcome] = []

    def clear_cache(self) -> None:
        super().clear_cache()
        lost = list(self.inner._continuations)
        self.inner.cancel(lost)
        self.failed = [Outcome(id, error=PromptFailed("its state was dropped")) for id in lost]

    def in_flight(self) -> int:
        return super().in_flight() + len(self.failed)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        failed, self.failed = self.failed, []
        return [*outcomes, *failed]


@mutant("clear-cache-drops-who-has-not-begun", CLEARING, forms=BOTH)
class ClearDropsWaiting(Wrapper):
    """`clear_cache` loses no request that was submitted since the last step."""

    new: Sequence[Request] = ()

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(requests)
        self.new = requests

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        self.new = ()
        return outcomes

    def clear_cache(self) -> None:
        super().clear_cache()
        self.cancel([each.id for each in self.new])


@mutant("clear-cache-restarts-continuations-with-new-draws", CLEARING, forms=BOTH)
class ClearRestartsContinuations(Wrapper):
    """A continuation goes on after `clear_cache`, under its own seed."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.drawing: dict[bytes, Request] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        self.drawing |= {r.id: r for r in requests if isinstance(r.want, Generate)}
        super().submit(requests)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        for outcome in outcomes:
            self.drawing.pop(outcome.id, None)
        return outcomes

    def cancel(self, ids) -> None:
        super().cancel(ids)
        for each in ids:
            self.drawing.pop(each, None)

    def clear_cache(self) -> None:
        super().clear_cache()
        self.inner.cancel(list(self.drawing))
        self.inner.submit(
            [
                replace(r, want=replace(r.want, seed=(r.want.seed or 0) + 1))
                for r in self.drawing.values()
            ]
        )


@mutant("clear-cache-makes-continuations-forget-what-they-drew", CLEARING, forms="fed", subtle=True)
class ClearForgetsDrawn(Wrapper):
    """A continuation's next token is drawn behind all its others, also after `clear_cache`."""

    def clear_cache(self) -> None:
        super().clear_cache()
        for name, drawn in self.inner._drawn.items():
            if isinstance(self.inner.running[name].request.want, Generate):
                drawn[:] = drawn[-1:]


@mutant("clear-cache-unloads-adapters", CLEARING, forms=BOTH)
class ClearUnloadsAdapters(Wrapper):
    """Adapters stay loaded until they are removed."""

    def clear_cache(self) -> None:
        super().clear_cache()
        for name in list(self.inner.adapters):
            self.remove_adapter(name)


@mutant("clear-cache-turns-adapters-into-the-model", CLEARING, forms=BOTH, subtle=True)
class ClearZeroesAdapters(Model):
    """Adapters keep their weights when the cache is cleared."""

    zeroed: frozenset[str] = frozenset()
    loaded: frozenset[str] = frozenset()

    def add_adapter(self, name: str) -> None:
        self.loaded |= {name}
        self.zeroed -= {name}

    def clear_cache(self) -> None:
        self.zeroed = self.loaded

    def row(self, tokens, adapter) -> F32:
        return super().row(tokens, None if adapter in self.zeroed else adapter)


@mutant("clear-cache-raises-while-requests-are-in-flight", CLEARING)
class ClearRaisesWhenBusy(Wrapper):
    """A worker clears the cache between any two steps."""

    def clear_cache(self) -> None:
        if self.in_flight():
            raise RuntimeError("the cache is in use")
        super().clear_cache()


@mutant(
    "clear-cache-twice-breaks-the-rows",
    scenario(
        lambda engine: (
            [engine.clear_cache(), engine.clear_cache(), ask_rightly(engine, requests_of([[1, 2]]))]
            and None
        )
    ),
    subtle=True,
)
class ClearTwice(Bent):
    """The cache may be cleared when there is none."""

    cleared = 0

    def clear_cache(self) -> None:
        self.cleared += 1
        super().clear_cache()

    def bend(self, outcome: Outcome) -> Outcome:
        empty = self.cleared > 1
        self.cleared = 0
        return replace(outcome, row=np.roll(outcome.row, 1)) if empty else outcome
