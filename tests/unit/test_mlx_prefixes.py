from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmpool.backends.engine import Tokens
from lmpool.backends.mlx.prefixes import KeptPrefixes


def ids(*tokens: int) -> Tokens:
    return np.array(tokens, np.uint32)


class Filled:
    """A tree and a store: what each slot was filled with is the prefix that ends there."""

    def __init__(self, capacity: int) -> None:
        self.tree = KeptPrefixes(capacity)
        self.store: dict[int, tuple[str | None, tuple[int, ...]]] = {}

    def add(self, adapter: str | None, tokens: Tokens) -> int:
        slots = self.tree.add(adapter, tokens)
        for back, slot in enumerate(slots[::-1].tolist()):
            prefix = tokens[: tokens.size - back].tolist()
            self.store[slot] = adapter, tuple(prefix)
        return slots.size

    def check(self, adapter: str | None, tokens: Tokens) -> int:
        slots = self.tree.find(adapter, tokens).tolist()
        assert len(slots) <= tokens.size
        for length, slot in enumerate(slots, 1):
            assert self.store[slot] == (adapter, tuple(tokens[:length].tolist()))
        return len(slots)


def test_the_longest_kept_prefix_is_found() -> None:
    filled = Filled(100)
    assert filled.add(None, ids(1, 2, 3, 4)) == 4
    assert filled.add(None, ids(1, 2, 9)) == 1
    assert filled.add(None, ids(1, 2)) == 0
    assert filled.check(None, ids(1, 2, 3, 4, 5)) == 4
    assert filled.check(None, ids(1, 2, 9)) == 3
    assert filled.check(None, ids(1, 2, 8)) == 2
    assert filled.check(None, ids(2, 3)) == 0
    assert filled.check("french", ids(1, 2, 3)) == 0
    assert len(filled.tree) == 5


def test_adapters_have_prefixes_of_their_own_and_lose_them_alone() -> None:
    filled = Filled(100)
    filled.add(None, ids(1, 2, 3))
    filled.add("french", ids(1, 2, 3, 4))
    assert filled.check("french", ids(1, 2, 3, 4)) == 4
    filled.tree.drop("french")
    filled.tree.drop("french")
    assert filled.check("french", ids(1, 2, 3, 4)) == 0
    assert filled.check(None, ids(1, 2, 3, 4)) == 3
    assert len(filled.tree) == 3
    filled.tree.clear()
    assert len(filled.tree) == 0


def test_the_oldest_leaves_make_room_and_the_running_batch_stays() -> None:
    filled = Filled(8)
    for token in range(4):
        filled.tree.begin()
        filled.add(None, ids(token, 50))
    filled.tree.begin()
    filled.check(None, ids(0, 50))  # used again
    filled.add(None, ids(9, 50))
    assert filled.check(None, ids(1, 50)) == 0
    assert filled.check(None, ids(0, 50)) == 2
    assert filled.add(None, ids(7, 7, 7, 7, 7)) == 0, "what this batch uses was dropped"
    assert filled.check(None, ids(9, 50)) == 2
    assert filled.add(None, ids(*range(100, 109))) == 0, "more than there is"


def test_a_tree_without_slots_keeps_nothing() -> None:
    filled = Filled(0)
    assert filled.add(None, ids(1, 2)) == 0
    assert filled.check(None, ids(1, 2)) == 0


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
STEPS = st.lists(
    st.tuples(st.sampled_from([None, "a", "b"]), st.lists(PROMPTS, min_size=1, max_size=4)),
    max_size=40,
)


@given(capacity=st.integers(0, 40), steps=STEPS, dropped=st.integers(0, 50))
def test_a_slot_never_holds_another_prefix(
    capacity: int, steps: list[tuple[str | None, list[list[int]]]], dropped: int
) -> None:
    filled = Filled(capacity)
    for number, (adapter, prompts) in enumerate(steps):
        filled.tree.begin()
        batch = [ids(*prompt) for prompt in prompts]
        found = [filled.tree.find(adapter, prompt) for prompt in batch]
        for prompt in batch:
            filled.add(adapter, prompt)
        for prompt, slots in zip(batch, found, strict=True):
            # What was looked up at the start of a batch is there to its end.
            for length, slot in enumerate(slots.tolist(), 1):
                assert filled.store[slot] == (adapter, tuple(prompt[:length].tolist()))
            filled.check(adapter, prompt)
        if number == dropped:
            filled.tree.drop(adapter)
        assert 0 <= len(filled.tree) <= capacity
    for adapter in (None, "a", "b"):
        filled.tree.drop(adapter)
    assert len(filled.tree) == 0
