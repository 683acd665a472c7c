"""Engines that take one prompt for another by the key that they keep it by."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

from lmpool.backends import Engine, EngineInfo, Request
from tests.engines.mutants.engines import F32, Ids, Model
from tests.engines.mutants.registry import BOTH, Make, mutant
from tests.engines.mutants.witnesses import (
    ask,
    ask_rightly,
    check,
    prompt_of,
    prompts_of,
    request,
    requests_of,
    rows,
    scenario,
)


def as_ints(tokens: Ids) -> list[int]:
    return [int(token) for token in tokens]


class Cache(Model):
    """Keeps the last 512 rows by a key, which `clear_cache` drops; right, if the key is."""

    most = 512

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self.kept: dict[Hashable, F32] = {}

    def key(self, tokens: list[int], adapter: str | None) -> Hashable:
        return tuple(tokens), adapter

    def row(self, tokens: Ids, adapter: str | None) -> F32:
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

    def key(self, tokens: list[int], adapter: str | None) -> Hashable:
        return tuple(tokens[-64:]), adapter


@mutant("cache-keyed-by-the-first-96-tokens-and-the-length", rows([LONG, [*LONG[:-1], 9]]))
class CacheByTheFirst96(Cache):
    """Prompts that differ behind 96 tokens have rows of their own."""

    def key(self, tokens: list[int], adapter: str | None) -> Hashable:
        return tuple(tokens[:96]), len(tokens), adapter


@mutant(
    "cache-keyed-by-length-head-and-tail", rows([LONG, [*LONG[:60], 9, *LONG[61:]]]), forms=BOTH
)
class CacheByLengthHeadAndTail(Cache):
    """Prompts that differ in their middle alone have rows of their own."""

    def key(self, tokens: list[int], adapter: str | None) -> Hashable:
        return len(tokens), tuple(tokens[:16]), tuple(tokens[-16:]), adapter


@mutant("cache-keyed-by-the-multiset-of-tokens", rows([[1, 2, 3], [2, 1, 3]]), forms=BOTH)
class CacheByTheMultiset(Cache):
    """The order of tokens matters."""

    def key(self, tokens: list[int], adapter: str | None) -> Hashable:
        return tuple(sorted(tokens)), adapter


@mutant("cache-keyed-by-the-set-of-tokens", rows([[1, 2, 2], [1, 1, 2]]), subtle=True)
class CacheByTheSet(Cache):
    """How often a token comes matters."""

    def key(self, tokens: list[int], adapter: str | None) -> Hashable:
        return frozenset(tokens), len(tokens), tokens[-1], adapter


@mutant("cache-keyed-up-to-rotation", rows([[1, 2, 3, 4], [3, 4, 1, 2]]), subtle=True)
class CacheUpToRotation(Cache):
    """A prompt that is another one turned has a row of its own."""

    def key(self, tokens: list[int], adapter: str | None) -> Hashable:
        start = tokens.index(min(tokens))
        return tuple(tokens[start:] + tokens[:start]), adapter


@mutant("cache-keyed-by-ids-mod-1024", lambda make: _wide(make))
class CacheByIdsMod1024(Cache):
    """Ids that are equal in ten bits are different tokens (in vocabularies of more than 1,024)."""

    def key(self, tokens: list[int], adapter: str | None) -> Hashable:
        return tuple(token % 1024 for token in tokens), adapter


def _wide(make: Make) -> None:
    engine = make(vocab_size=2000, max_prompt_tokens=64)
    asked = requests_of([[5, 900], [5 + 1024, 900], [5, 900 + 1024]])
    for each, outcome in zip(asked, ask(engine, asked), strict=True):
        check(each, outcome, 2000)


@mutant("cache-keyed-by-ids-mod-256", rows([[5, 9], [5 + 256, 9]]))
class CacheByIdsMod256(Cache):
    """Ids that are equal in eight bits are different tokens."""

    def key(self, tokens: list[int], adapter: str | None) -> Hashable:
        return bytes(token % 256 for token in tokens), adapter


@mutant(
    "cache-keyed-without-the-lowest-bit-of-long-prompts",
    rows([LONG, [LONG[0] ^ 1, *LONG[1:]]]),
    subtle=True,
)
class CacheWithoutTheLowestBit(Cache):
    """Ids that differ in a bit are different tokens (from 100 tokens on)."""

    def key(self, tokens: list[int], adapter: str | None) -> Hashable:
        return tuple(t >> 1 if len(tokens) >= 100 else t for t in tokens), adapter


@mutant("cache-keyed-by-sum-and-length", rows([[10, 20, 30], [11, 19, 30]]))
class CacheBySum(Cache):
    """Prompts of one length and sum have rows of their own."""

    def key(self, tokens: list[int], adapter: str | None) -> Hashable:
        return sum(tokens), len(tokens), adapter


@mutant(
    "cache-keyed-by-a-hash-of-16-bits",
    rows(*(prompts_of(200, seed=n) for n in range(6))),
    subtle=True,
)
class CacheByAShortHash(Cache):
    """Prompts whose hashes collide have rows of their own."""

    most = 1 << 16

    def key(self, tokens: list[int], adapter: str | None) -> Hashable:
        return hashlib.blake2b(repr((tokens, adapter)).encode(), digest_size=2).digest()


@mutant(
    "cache-keyed-by-every-other-token-past-32",
    rows([LONG, [*LONG[:65], LONG[65] ^ 3, *LONG[66:]]]),
    subtle=True,
)
class CacheByEveryOtherToken(Cache):
    """Prompts that differ in any one token have rows of their own (blind: odd places past 32)."""

    def key(self, tokens: list[int], adapter: str | None) -> Hashable:
        return tuple(tokens[:32]), tuple(tokens[32::2]), len(tokens), adapter


@mutant(
    "cache-of-the-prompt-without-its-last-block", rows([LONG[:64], [*LONG[:63], 9]]), subtle=True
)
class CacheByWholeBlocks(Cache):
    """Prompts that fill their last block of 16 are told apart by it, too."""

    def key(self, tokens: list[int], adapter: str | None) -> Hashable:
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

    def key(self, tokens: list[int], adapter: str | None) -> Hashable:
        return tuple(tokens)


@mutant("cache-shared-by-adapters-but-not-the-model", scenario(_many_adapters), subtle=True)
class CacheSharedAmongAdapters(Cache):
    """Two adapters' rows of one prompt differ."""

    def key(self, tokens: list[int], adapter: str | None) -> Hashable:
        return tuple(tokens), adapter is None


@mutant(
    "cache-whose-freed-places-keep-their-names",
    rows(*[prompts_of(150, seed=n) for n in range(8)], prompts_of(150)),
    forms=BOTH,
    subtle=True,
)
class CacheWithStalePlaces(Model):
    """What was evicted is computed again, not read from the place that another's row took."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self.places: list[F32] = []
        self.index: dict[Hashable, int] = {}
        self.next = 0

    def row(self, tokens: Ids, adapter: str | None) -> F32:
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

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self.kept: dict[Hashable, F32] = {}

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        for each in requests:
            if len(self.kept) > 1024:
                self.kept.clear()
            self.kept.setdefault((each.id, each.tokens.size), self.row(each.tokens, each.adapter))
        return [self.kept[each.id, each.tokens.size] for each in requests]
