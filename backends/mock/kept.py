"""States that the mock engine pretends to keep: of blocks of tokens, the latest used."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

TOKEN_BYTES: Final = 4
BLOCK_TOKENS: Final = 16


class KeptBlocks:
    """Room for the states of `room` tokens; those of whole blocks are kept, behind what they
    follow."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.evicted_tokens = 0
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    @property
    def tokens(self) -> int:
        """How many there are states of."""
        return BLOCK_TOKENS * len(self._blocks)

    def clear(self) -> None:
        """Keep nothing."""
        self._blocks.clear()

    def compute(self, prompt: bytes, key: bytes) -> int:
        """How many tokens of a prompt (ids as little-endian uint32) must be computed. They are kept
        from now on."""
        size, step = len(prompt) // TOKEN_BYTES, TOKEN_BYTES * BLOCK_TOKENS
        name, names = key, list[bytes]()
        for start in range(0, len(prompt) - step + 1, step):
            block = prompt[start : start + step]
            name = hashlib.blake2b(name + block, digest_size=16).digest()
            names.append(name)
        kept = 0
        while kept < len(names) and names[kept] in self._blocks:
            kept += 1
        for name in reversed(names):  # what others begin with, too, is the latest used
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while self.tokens > self.room:
            self._blocks.popitem(last=False)
            self.evicted_tokens += BLOCK_TOKENS
        return size - min(BLOCK_TOKENS * kept, size - 1)
