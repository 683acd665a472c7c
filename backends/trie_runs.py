"""What a token trie is made of: runs of tokens, and the leases on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]
Slots = npt.NDArray[np.int64]

TOKEN_BYTES: Final = 4


class Run:
    """Tokens that follow one another without a branch, from depth `start` on.

    `raw` are the tokens' bytes, which are compared at once where arrays are compared one by one;
    `slots` is int64 [length]; the first `computed` of them are computed. The runs below it go by
    the bytes of their first token. `parent` is None at the root, and after the run was evicted.
    """

    __slots__ = (
        "children", "computed", "parent", "pins", "queued", "raw", "slots", "start", "used",
    )  # fmt: skip

    def __init__(self, parent: Run | None, start: int, raw: bytes, slots: Slots) -> None:
        self.parent = parent
        self.start = start
        self.raw = raw
        self.slots = slots
        self.computed = 0
        self.children: dict[bytes, Run] = {}
        self.pins = 0
        self.used = 0
        self.queued = False

    @property
    def tokens(self) -> Tokens:
        """Its tokens, uint32 [length]."""
        return np.frombuffer(self.raw, np.uint32)

    @property
    def size(self) -> int:
        """How many tokens it has."""
        return len(self.raw) // TOKEN_BYTES

    @property
    def end(self) -> int:
        """The depth after its last token."""
        return self.start + self.size


@dataclass(slots=True, eq=False)
class Lease:
    """A prompt's way through the trie, kept until it is released.

    The prompt ends at depth `end`, in `run` or in one above it where `run` was split meanwhile.
    Its first `found` tokens were in the trie when the lease was taken.
    """

    run: Run
    end: int
    found: int

    def last_run(self) -> Run:
        """The run in which the prompt ends."""
        run = self.run
        while run.start >= self.end and run.parent is not None:
            run = run.parent
        return run


@dataclass(frozen=True, slots=True)
class TrieStatistics:
    """Counts since the trie was made, in positions; `runs`, `held` and `pinned` are of now.

    `found` and `added` are those of `lease`: what was there and what had to be computed.
    """

    slots: int
    runs: int
    held: int
    pinned: int
    found: int
    added: int
    evicted: int
