"""The token trie against a dictionary of prefixes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmpool.backends.trie import TokenTrie
from lmpool.backends.trie_runs import Lease, Run, Tokens

SLOTS = 24

roots = st.sampled_from(["", "other"])
prompts = st.tuples(roots, st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple))
Prompt = tuple[str, tuple[int, ...]]


def ids(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, dtype=np.uint32)


def add(trie: TokenTrie, *prompts: Sequence[int]) -> None:
    leases = [lease for prompt in prompts if (lease := trie.lease(ids(prompt))) is not None]
    assert len(leases) == len(prompts)
    trie.commit(leases)
    trie.release(leases)
    trie.check()


def beginnings(prompt: Prompt) -> list[Prompt]:
    root, tokens = prompt
    return [(root, tokens[: n + 1]) for n in range(len(tokens))]


def found(trie: TokenTrie, prompt: Sequence[int]) -> int:
    """How many tokens of a prompt are there."""
    lease = trie.lease(ids(prompt))
    assert lease is not None
    trie.discard([lease])
    trie.release([lease])
    trie.check()
    return lease.found


class Batches(RuleBasedStateMachine):
    """Batches of prompts, computed or failed, some of them kept."""

    def __init__(self) -> None:
        super().__init__()
        self.trie = TokenTrie(SLOTS)
        self.known: dict[Prompt, int] = {}  # the slot of each computed prefix
        self.kept: list[tuple[Prompt, Lease]] = []

    @rule(batch=st.lists(prompts, min_size=1, max_size=5, unique=True), computed=st.booleans())
    def compute(self, batch: list[Prompt], computed: bool) -> None:
        leases: list[Lease] = []
        held: dict[Prompt, int] = {}
        for prompt in batch:
            evicted = self.trie.statistics().evicted
            lease = self.trie.lease(ids(prompt[1]), prompt[0])
            self.forget_evicted()
            if lease is None:
                assert len(prompt[1]) + self.trie.statistics().pinned > SLOTS
                break
            prefixes = beginnings(prompt)
            there = sum(p in self.known or p in held for p in prefixes)
            assert lease.found <= there
            if self.trie.statistics().evicted == evicted:
                assert lease.found == there
            for prefix, slot in zip(prefixes, self.trie.path(lease).tolist(), strict=True):
                assert held.setdefault(prefix, slot) == slot
                assert self.known.get(prefix, slot) == slot
            leases.append(lease)
            self.trie.check()
        assert len(set(held.values())) == len(held) <= SLOTS
        for prompt, lease in [*zip(batch, leases, strict=False), *self.kept]:
            slots = self.trie.path(lease).tolist()
            assert len(slots) == len(prompt[1])
            for prefix, slot in zip(beginnings(prompt), slots, strict=True):
                assert held.get(prefix, self.known.get(prefix)) == slot
        if computed:
            self.trie.commit(leases)
            self.known.update(held)
        self.trie.discard(leases)
        self.trie.check()
        self.trie.release(leases)

    @rule(prompt=prompts)
    def keep(self, prompt: Prompt) -> None:
        if len(self.kept) == 1:
            return
        self.compute([prompt], True)
        lease = self.trie.lease(ids(prompt[1]), prompt[0])
        self.forget_evicted()
        assert lease is not None
        self.trie.commit([lease])
        self.trie.narrow(lease)
        self.known.update(zip(beginnings(prompt), self.trie.path(lease).tolist(), strict=True))
        assert self.trie.statistics().pinned == len(prompt[1])
        self.kept.append((prompt, lease))

    @rule(prompt=prompts)
    def look(self, prompt: Prompt) -> None:
        lease = self.trie.hold(ids(prompt[1]), prompt[0])
        self.trie.check()
        there = [self.known[p] for p in beginnings(prompt) if p in self.known]
        assert self.trie.path(lease).tolist() == there
        self.trie.release([lease])

    @rule()
    def let_go(self) -> None:
        while self.kept:
            self.trie.release([self.kept.pop()[1]])

    @rule(root=roots)
    def forget(self, root: str) -> None:
        if any(prompt[0] == root for prompt, _ in self.kept):
            return
        self.trie.forget(root)
        self.known = {prefix: slot for prefix, slot in self.known.items() if prefix[0] != root}

    @rule()
    def clear(self) -> None:
        self.kept.clear()
        self.trie.clear()
        self.known.clear()
        assert self.trie.statistics().held == 0

    def forget_evicted(self) -> None:
        """Leave only what the trie still has, by a walk of its own."""
        there: dict[Prompt, int] = {}
        waiting: list[tuple[Prompt, Run]] = [
            ((str(name), ()), run)
            for name, root in self.trie._roots.items()
            for run in root.children.values()
        ]
        while waiting:
            (root, tokens), run = waiting.pop()
            for token, slot in zip(run.tokens.tolist(), run.slots.tolist(), strict=True):
                tokens = (*tokens, token)
                there[root, tokens] = slot
            waiting.extend(((root, tokens), child) for child in run.children.values())
        self.known = {p: slot for p, slot in self.known.items() if p in there}
        assert all(there[p] == slot for p, slot in self.known.items())
        for prompt, _ in self.kept:
            assert prompt in there

    @invariant()
    def sound(self) -> None:
        self.trie.check()
        statistics = self.trie.statistics()
        assert statistics.held <= SLOTS
        self.forget_evicted()
        assert statistics.held == len(self.known)


Batches.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_batches = pytest.mark.slow(Batches.TestCase)


def test_prompts_share_what_they_begin_with() -> None:
    trie = TokenTrie(100)
    add(trie, [1, 2, 3, 4], [1, 2, 5], [1, 2, 3], [7])
    assert trie.statistics().held == 6
    assert [found(trie, p) for p in ([1, 2, 3, 4, 5], [1, 2, 6], [1], [7, 7], [4])] == [
        4,
        2,
        1,
        1,
        0,
    ]
    assert trie.statistics().held == 6


def test_roots_share_nothing() -> None:
    trie = TokenTrie(10)
    leases = [trie.lease(ids([1, 2, 3]), root) for root in (None, "one", "two")]
    held = [lease for lease in leases if lease is not None]
    assert [lease.found for lease in held] == [0, 0, 0]
    assert len({slot for lease in held for slot in trie.path(lease).tolist()}) == 9
    trie.commit(held)
    trie.release(held)
    trie.forget("one")
    trie.forget("never seen")
    trie.check()
    assert trie.statistics().held == 6
    again = trie.lease(ids([1, 2, 3]), "two")
    assert again is not None
    assert again.found == 3


def test_a_continued_prompt_is_one_run() -> None:
    trie = TokenTrie(100)
    for length in range(1, 50):
        add(trie, range(length))
    assert trie.statistics().runs == 1


def test_the_prompt_used_least_lately_is_evicted_from_its_end() -> None:
    trie = TokenTrie(14)
    add(trie, [1, 2, 3, 4], [1, 2, 8, 9], [5, 6, 7])
    found(trie, [1, 2, 3, 4])
    add(trie, [4, 4, 4, 4, 4, 4])  # one slot is missing for it
    assert trie._find(ids([1, 2, 8, 9]))[1] == 3
    assert trie._find(ids([5, 6, 7]))[1] == 3
    assert trie.statistics().evicted == 1


def test_leases_are_never_evicted() -> None:
    trie = TokenTrie(10)
    first = trie.lease(ids([1, 2, 3, 4]))
    assert first is not None
    assert trie.lease(ids([2] * 7)) is None
    second = trie.lease(ids([2] * 6))
    assert second is not None
    assert trie.lease(ids([1, 2, 3, 5])) is None
    trie.commit([first, second])
    trie.release([first])
    trie.check()
    add(trie, [1, 2, 3, 5])
    assert found(trie, [2] * 6) == 6
    assert found(trie, [1, 2, 3, 4]) == 3


def test_what_is_held_was_there_and_stays() -> None:
    trie = TokenTrie(10)
    add(trie, [1, 2, 3, 4], [5, 6])
    before = trie.statistics()
    part, nothing = trie.hold(ids([1, 2, 9])), trie.hold(ids([7]))
    assert (part.end, part.found, nothing.end) == (2, 2, 0)
    assert trie.statistics().held == before.held
    assert trie.statistics().found == before.found
    slots = trie.path(part).tolist()
    assert trie.path(nothing).size == 0
    add(trie, [1, 8])  # parts the run that is held
    assert trie.lease(ids([2] * 7)) is None
    assert trie.path(part).tolist() == slots
    trie.check()
    trie.release([part, nothing])
    add(trie, [2] * 7)
    trie.check()


def test_a_prompt_beyond_all_slots_evicts_nothing() -> None:
    trie = TokenTrie(4)
    add(trie, [1, 2, 3])
    assert trie.lease(ids([4] * 5)) is None
    assert found(trie, [1, 2, 3]) == 3


def test_a_run_is_not_evicted_for_its_own_continuation() -> None:
    trie = TokenTrie(6)
    add(trie, [1, 2, 3], [4, 5, 6])
    add(trie, [1, 2, 3, 7])
    assert found(trie, [1, 2, 3, 7]) == 4
    assert trie.lease(ids([1, 2, 3, 7, 8, 9, 10])) is None
    assert found(trie, [1, 2, 3, 7]) == 4


def test_what_was_not_computed_is_taken_out() -> None:
    trie = TokenTrie(50)
    add(trie, [1, 2, 3])
    leases = [trie.lease(ids(p)) for p in ([1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 9], [6])]
    held = [lease for lease in leases if lease is not None]
    trie.discard(held)
    trie.check()
    trie.release(held)
    assert trie.statistics().held == 3
    assert found(trie, [1, 2, 3, 4]) == 3


def test_a_lease_lives_through_splits() -> None:
    trie = TokenTrie(50)
    add(trie, range(10))
    lease = trie.lease(ids([0, 1, 2]))
    assert lease is not None
    before = trie.path(lease).tolist()
    add(trie, [0, 1, 9], [0, 9], [0, 1, 2, 3, 4, 9])
    assert trie.path(lease).tolist() == before
    trie.release([lease])
    trie.check()


def test_failures_do_not_pile_up_in_the_queue() -> None:
    trie = TokenTrie(50)
    for number in range(1_000):
        lease = trie.lease(ids([number, 1]))
        assert lease is not None
        trie.discard([lease])
        trie.release([lease])
    trie.check()
    assert len(trie._queue) < 100


def test_a_long_prompt_is_found_in_microseconds() -> None:
    trie = TokenTrie(100_000)
    prompt = np.random.default_rng(0).integers(0, 1 << 17, 4_000).astype(np.uint32)
    add(trie, prompt.tolist(), [*prompt[:1_000].tolist(), 1], [*prompt[:2_000].tolist(), 1])
    times = []
    for _ in range(50):
        began = time.perf_counter()
        lease = trie.lease(prompt)
        times.append(time.perf_counter() - began)
        assert lease is not None
        assert lease.found == 4_000
        trie.release([lease])
    assert min(times) < 200e-6
