from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmpool.producer.cache import AnswerCache
from lmpool.rows import EncodedRow, pack_logprobs, unpack_row
from lmpool.wants import Digest, Generation

OVERHEAD = 200
D = {name: Digest(name.encode() * 16) for name in "abcde"}


def row(entries: int, value: float = 0.0) -> EncodedRow:
    return unpack_row(pack_logprobs(np.full(entries, value, np.float32)).joined())


def cost(entries: int) -> int:
    return entries * 4 + OVERHEAD


def test_rows_come_back_until_they_are_the_least_recently_used() -> None:
    cache = AnswerCache(3 * cost(10))
    a, b, c, d = (row(10, value) for value in range(4))
    cache.put(D["a"], a)
    cache.put(D["b"], b)
    cache.put(D["c"], c)
    assert cache.get(D["a"]) is a  # now b is the oldest
    cache.put(D["d"], d)
    assert cache.get(D["b"]) is None
    assert (cache.get(D["a"]), cache.get(D["c"]), cache.get(D["d"])) == (a, c, d)
    assert len(cache) == 3
    assert cache.size == 3 * cost(10)


def test_a_row_larger_than_the_cache_drops_no_other() -> None:
    cache = AnswerCache(cost(10))
    kept = row(10)
    cache.put(D["a"], kept)
    cache.put(D["b"], row(11))
    assert cache.get(D["a"]) is kept
    assert cache.get(D["b"]) is None


def test_no_bytes_no_cache() -> None:
    cache = AnswerCache(0)
    cache.put(D["a"], row(1))
    assert cache.get(D["a"]) is None
    assert cache.size == 0


def test_clear() -> None:
    cache = AnswerCache(1 << 20)
    cache.put(D["a"], row(10))
    cache.clear()
    assert (len(cache), cache.size, cache.get(D["a"])) == (0, 0, None)
    cache.put(D["a"], row(10))
    assert cache.size == cost(10)


def test_answers_of_every_kind_are_kept_by_their_bytes() -> None:
    cache = AnswerCache(1 << 20)
    answer = Generation(np.arange(10, dtype=np.int32), 0, "length")
    cache.put(D["a"], answer)
    assert cache.get(D["a"]) is answer
    assert cache.size == cost(10)


def test_what_is_there_stays() -> None:
    cache = AnswerCache(1 << 20)
    first = row(10)
    cache.put(D["a"], first)
    cache.put(D["a"], row(20))
    assert cache.get(D["a"]) is first
    assert cache.size == cost(10)


class CacheAgainstModel(RuleBasedStateMachine):
    """The cache does what a list in order of use would do."""

    BOUND = 3 * cost(20)

    def __init__(self) -> None:
        super().__init__()
        self.cache = AnswerCache(self.BOUND)
        self.model: list[tuple[Digest, EncodedRow]] = []  # the least recently used first

    @rule(digest=st.sampled_from(sorted(D.values())), entries=st.integers(1, 250))
    def put(self, digest: Digest, entries: int) -> None:
        new = row(entries)
        self.cache.put(digest, new)
        if cost(entries) <= self.BOUND and digest not in dict(self.model):
            self.model.append((digest, new))
            while sum(cost(kept.size) for _, kept in self.model) > self.BOUND:
                self.model.pop(0)

    @rule(digest=st.sampled_from(sorted(D.values())))
    def get(self, digest: Digest) -> None:
        expected = dict(self.model).get(digest)
        assert self.cache.get(digest) is expected
        if expected is not None:
            self.model = [entry for entry in self.model if entry[0] != digest]
            self.model.append((digest, expected))

    @rule(digest=st.sampled_from(sorted(D.values())))
    def touch(self, digest: Digest) -> None:
        self.cache.touch(digest)
        self.model.sort(key=lambda entry: entry[0] == digest)

    @rule(digest=st.sampled_from(sorted(D.values())))
    def take(self, digest: Digest) -> None:
        assert self.cache.take(digest) is dict(self.model).get(digest)
        self.model = [entry for entry in self.model if entry[0] != digest]

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.model = []

    @invariant()
    def bytes_are_counted_and_bounded(self) -> None:
        assert self.cache.size == sum(cost(kept.size) for _, kept in self.model) <= self.BOUND
        assert len(self.cache) == len(self.model)


TestCacheAgainstModel = CacheAgainstModel.TestCase


@given(seeds=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=4))
def test_threads_may_share_it(seeds: list[int]) -> None:
    cache = AnswerCache(2 * cost(10))
    rows = {digest: row(10, i) for i, digest in enumerate(D.values())}
    wrong: list[Digest] = []

    def use(seed: int) -> None:
        for pick in np.random.default_rng(seed).integers(0, 5, 50):
            digest = list(rows)[pick]
            found = cache.get(digest)
            if found is None:
                cache.put(digest, rows[digest])
            elif found is not rows[digest]:
                wrong.append(digest)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.size == len(cache) * cost(10) <= cache.max_bytes


def test_a_forked_child_gets_a_lock_of_its_own() -> None:
    cache = AnswerCache(1 << 20)
    cache.put(D["a"], row(1))
    other = threading.Thread(target=cache._lock.acquire)  # as one of the parent may have
    other.start()
    other.join()
    cache.unlock()
    assert cache.get(D["a"]) is not None
