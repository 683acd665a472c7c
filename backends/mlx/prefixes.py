"""Which prefixes are kept, and in which slots of the key-value store: a radix tree of token ids.

It holds numbers only, no arrays of a model. Slots are numbered from 0; each holds the keys and
values of one token position, after all the positions above it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lmpool.backends.engine import Tokens

Slots = npt.NDArray[np.int32]

_NO_SLOTS: Slots = np.empty(0, np.int32)


class _Node:
    """A run of tokens below its parent's, one slot for each."""

    __slots__ = ("children", "parent", "slots", "tokens", "used")

    def __init__(self, parent: _Node | None, tokens: Tokens, slots: Slots, used: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.used = used
        self.children: dict[int, _Node] = {}


class PrefixTree:
    """Prefixes by their token ids, one tree for each adapter, in at most `capacity` slots.

    The least recently used leaves make room. What was looked up or added since `begin` is part of
    the running batch and stays.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._roots: dict[str | None, _Node] = {}
        self._free: list[Slots] = [np.arange(capacity, dtype=np.int32)]
        self._free_count = capacity
        self._now = 0

    def __len__(self) -> int:
        return self.capacity - self._free_count

    def begin(self) -> None:
        """A new batch: what the one before used may make room."""
        self._now += 1

    def find(self, adapter: str | None, tokens: Tokens) -> Slots:
        """The slots of the longest prefix of `tokens` that is kept, int32 [its length]."""
        root = self._roots.get(adapter)
        if root is None:
            return _NO_SLOTS
        parts = [node.slots[:length] for node, length in self._walk(root, tokens)]
        return np.concatenate(parts) if parts else _NO_SLOTS

    def add(self, adapter: str | None, tokens: Tokens) -> Slots:
        """Keep a prefix; the new slots of its last tokens, for the caller to fill.

        Those of its first tokens are there already. Of a prefix that there is no room for, none is
        kept that was not kept before.
        """
        root = self._roots.get(adapter)
        if root is None:
            root = self._roots[adapter] = _Node(None, tokens[:0], _NO_SLOTS, self._now)
        node, done = root, 0
        for node, length in self._walk(root, tokens):
            done += length
            if length < node.tokens.size:
                node = self._split(node, length)
        new = tokens.size - done
        if new == 0 or not self._make_room(new):
            return _NO_SLOTS
        slots = self._take(new)
        leaf = _Node(node, tokens[done:].copy(), slots, self._now)
        node.children[int(leaf.tokens[0])] = leaf
        return slots

    def drop(self, adapter: str | None) -> None:
        """Forget an adapter's prefixes."""
        root = self._roots.pop(adapter, None)
        if root is not None:
            for node in _below(root):
                self._give_back(node.slots)

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._free = [np.arange(self.capacity, dtype=np.int32)]
        self._free_count = self.capacity

    def _walk(self, root: _Node, tokens: Tokens) -> Iterator[tuple[_Node, int]]:
        """The nodes that `tokens` leads through, and how far into each."""
        node, done = root, 0
        while done < tokens.size:
            child = node.children.get(int(tokens[done]))
            if child is None:
                return
            rest = tokens[done : done + child.tokens.size]
            differs = np.flatnonzero(child.tokens[: rest.size] != rest)
            length = int(differs[0]) if differs.size else rest.size
            child.used = self._now
            yield child, length
            if length < child.tokens.size:
                return
            node, done = child, done + length

    def _split(self, node: _Node, length: int) -> _Node:
        """Part a node after `length` tokens; the upper part, which is new."""
        parent = node.parent
        assert parent is not None
        upper = _Node(parent, node.tokens[:length], node.slots[:length], node.used)
        parent.children[int(upper.tokens[0])] = upper
        node.parent, node.tokens, node.slots = upper, node.tokens[length:], node.slots[length:]
        upper.children[int(node.tokens[0])] = node
        return upper

    def _make_room(self, count: int) -> bool:
        """Drop leaves that no running batch uses until `count` slots are free, oldest first."""
        if count > self.capacity:
            return False
        while self._free_count < count:
            leaves = [
                node
                for root in self._roots.values()
                for node in _below(root)
                if not node.children and node.used < self._now
            ]
            if not leaves:
                return False
            leaves.sort(key=lambda node: node.used)
            # Many at a time: looking for them costs a walk over the tree.
            wanted = max(count - self._free_count, self.capacity // 16)
            for leaf in leaves:
                assert leaf.parent is not None
                del leaf.parent.children[int(leaf.tokens[0])]
                self._give_back(leaf.slots)
                wanted -= leaf.slots.size
                if wanted <= 0:
                    break
        return True

    def _take(self, count: int) -> Slots:
        taken: list[Slots] = []
        self._free_count -= count
        while count:
            run = self._free.pop()
            taken.append(run[:count])
            if run.size > count:
                self._free.append(run[count:])
            count -= taken[-1].size
        return np.concatenate(taken)

    def _give_back(self, slots: Slots) -> None:
        if slots.size:
            self._free.append(slots)
            self._free_count += slots.size


def _below(root: _Node) -> Iterator[_Node]:
    """Every node under the root."""
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children.values())
        yield node
