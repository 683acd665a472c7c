"""Which prefixes are kept, and in which slots of the key-value store."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lmpool.backends.engine import Tokens
from lmpool.backends.trie import TokenTrie
from lmpool.backends.trie_runs import Lease

Slots = npt.NDArray[np.int64]


class KeptPrefixes:
    """Prefixes by their token ids, apart for each adapter, in at most `capacity` slots.

    What was looked up or added since `begin` is part of the running batch and stays; of the rest,
    the least recently used makes room.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._trie = TokenTrie(capacity)
        self._leases: list[Lease] = []

    def __len__(self) -> int:
        return self._trie.held

    @property
    def evicted(self) -> int:
        """Tokens whose keys and values made room for others."""
        return self._trie.evicted

    def begin(self) -> None:
        """A new batch: what the one before used may make room."""
        self._trie.release(self._leases)
        self._leases = []

    def find(self, adapter: str | None, tokens: Tokens) -> Slots:
        """The slots of the longest prefix of `tokens` that is kept, int64 [its length]."""
        lease = self._trie.hold(tokens, adapter)
        self._leases.append(lease)
        return self._trie.path(lease)

    def add(self, adapter: str | None, tokens: Tokens) -> Slots:
        """Keep a prefix; the new slots of its last tokens, for the caller to fill.

        Those of its first tokens are there already. Of a prefix that there is no room for, none is
        kept that was not kept before.
        """
        lease = self._trie.lease(tokens, adapter)
        if lease is None:
            return np.empty(0, np.int64)
        self._trie.commit([lease])
        self._leases.append(lease)
        return self._trie.path(lease)[lease.found :]

    def drop(self, adapter: str | None) -> None:
        """Forget an adapter's prefixes."""
        self.begin()
        self._trie.forget(adapter)

    def clear(self) -> None:
        """Forget everything."""
        self._leases = []
        self._trie.clear()


def common_prefix(prompts: Sequence[Tokens]) -> Tokens:
    """What all of the prompts begin with."""
    length = min(prompt.size for prompt in prompts)
    block = np.stack([prompt[:length] for prompt in prompts])
    differs = np.flatnonzero((block != block[0]).any(axis=0))
    return prompts[0][: int(differs[0]) if differs.size else length]
