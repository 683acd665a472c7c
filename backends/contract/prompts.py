"""Prompts that an engine could mistake for each other, and prompts about every length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from lmpool.backends.contract.operations import Prompt

LONGEST: Final = 4_096
"""Longer prompts than this are not computed again: the reference would take minutes."""

_TAIL: Final = 64
_MODULI: Final = (256, 1_024, 4_096, 65_536)

Random = np.random.Generator


def random_prompt(random: Random, vocab_size: int, length: int) -> Prompt:
    """So many random tokens."""
    return tuple(random.integers(0, vocab_size, length).tolist())


def lengths(longest: int) -> list[int]:
    """The powers of two up to the longest prompt, it itself, and their neighbours, all valid."""
    around = {2**k for k in range(longest.bit_length() + 1)} | {longest}
    near = {length + by for length in around for by in (-1, 0, 1)}
    return sorted(n for n in near if 1 <= n <= min(longest, LONGEST))


def near_copies(random: Random, prompt: Prompt, vocab_size: int, longest: int) -> list[Prompt]:
    """Prompts that differ from `prompt` in little, each in another way."""
    found = {
        copy
        for copy in _copies(random, prompt, vocab_size)
        if 1 <= len(copy) <= longest and copy != prompt
    }
    return sorted(found)


def _copies(random: Random, prompt: Prompt, vocab: int) -> Iterator[Prompt]:
    size = len(prompt)
    middle = size // 2

    def with_token(place: int, token: int) -> Prompt:
        return (*prompt[:place], token % vocab, *prompt[place + 1 :])

    def other(token: int) -> int:
        return (token + 1 + int(random.integers(vocab - 1))) % vocab

    # One token, at its places; one bit of one; one that is the same modulo a power of two.
    for place in {0, middle, size - 1, int(random.integers(size))}:
        token = prompt[place]
        yield with_token(place, other(token))
        for bit in random.integers(0, max(1, (vocab - 1).bit_length()), 2).tolist():
            if token ^ 1 << bit < vocab:
                yield with_token(place, token ^ 1 << bit)
        for modulus in _MODULI:
            for alike in (token + modulus, token - modulus):
                if 0 <= alike < vocab:
                    yield with_token(place, alike)
    # The same tokens in another order.
    yield (*prompt[1:], prompt[0])
    yield (*prompt[middle:], *prompt[:middle])
    yield prompt[::-1]
    yield tuple(random.permutation(prompt).tolist())
    if size > 3:
        yield (*prompt[: middle - 1], prompt[middle], prompt[middle - 1], *prompt[middle + 1 :])
        yield (prompt[0], *random.permutation(prompt[1:-1]).tolist(), prompt[-1])
        # The same sum of tokens.
        yield (prompt[0], (prompt[1] + 1) % vocab, (prompt[2] - 1) % vocab, *prompt[3:])
    # The same beginning, the same end, or both.
    for kept in (1, 3, 8, 16, 32, _TAIL):
        if size > kept:
            yield (*random_prompt(random, vocab, size - kept), *prompt[-kept:])
            yield (*prompt[:kept], *random_prompt(random, vocab, size - kept))
        if size > 2 * kept:
            between = random_prompt(random, vocab, size - 2 * kept)
            yield (*prompt[:kept], *between, *prompt[-kept:])
    # More or less of it, and what looks like padding.
    yield prompt[:-1]
    yield prompt[1:]
    yield (*prompt, int(random.integers(vocab)))
    yield (*prompt, prompt[-1])
    yield (*prompt, 0)
    yield (0, *prompt)
    yield prompt + prompt
