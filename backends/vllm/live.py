"""Prompts that stay live in the engine after they were answered, so that others can extend them.

A particle filter asks for prompts that each extend one answered a moment ago by a token. The
engine keeps an answered request with its keys and values; the prompt that extends it is fed into
it and costs one decode step. What is kept is bounded by requests and by tokens of KV cache; the
least recently answered goes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lmpool.backends.engine import Tokens

LONGEST_EXTENSION: Final = 16
"""Tokens by which a prompt may extend a live one; beyond, whole cached blocks do as well."""

_Key = tuple[str | None, bytes]


@dataclass(slots=True, eq=False)
class LivePrompt:
    """A request that is kept: `id` in the engine, and the tokens it stands for."""

    id: str
    adapter: str | None
    tokens: Tokens
    reserved: int
    """Tokens of KV cache that it takes, whole blocks."""
    computed: int = 0
    """How many of its tokens the engine has keys and values of."""

    @property
    def key(self) -> _Key:
        """What a prompt that extends it is found by."""
        return self.adapter, self.tokens.tobytes()


class LivePrompts:
    """The requests that are live: idle ones that wait to be extended, and those being answered.

    `most` bounds the idle ones, `most_tokens` the KV cache of all of them together. What has to go
    is collected in `ended`, for the engine to abort.
    """

    def __init__(self, most: int, most_tokens: int, block_size: int) -> None:
        self.most = most
        self.ended: list[str] = []
        self._most_tokens = most_tokens
        self._block_size = block_size
        self._idle: dict[_Key, LivePrompt] = {}
        self._reserved = 0
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._idle)

    @property
    def reserved_tokens(self) -> int:
        """Tokens of KV cache that live requests take, or will have taken when answered."""
        return self._reserved

    def extended_by(self, adapter: str | None, tokens: Tokens) -> LivePrompt | None:
        """The longest idle prompt that `tokens` extends; None where there is none.

        It is no longer idle, and stands for `tokens` now.
        """
        if not self._idle:
            return None
        data, width = tokens.tobytes(), tokens.itemsize
        for extension in range(1, min(LONGEST_EXTENSION, tokens.size - 1) + 1):
            key = (adapter, data[: len(data) - extension * width])
            if (found := self._idle.pop(key, None)) is not None:
                if self._reserve(self._blocks(tokens.size) - found.reserved):
                    found.tokens, found.reserved = tokens, self._blocks(tokens.size)
                    return found
                self._end(found)
                return None
        return None

    def begin(self, adapter: str | None, tokens: Tokens) -> LivePrompt | None:
        """A new live prompt; None where nothing is kept, or what is being answered takes it all."""
        reserved = self._blocks(tokens.size)
        if self.most == 0 or not self._reserve(reserved):
            return None
        self._numbers += 1
        return LivePrompt(f"live-{self._numbers}", adapter, tokens, reserved)

    def keep(self, live: LivePrompt) -> None:
        """It was answered, and is idle from now on."""
        if (twin := self._idle.pop(live.key, None)) is not None:
            self._end(twin)
        live.computed = live.tokens.size
        self._idle[live.key] = live
        self.shrink(self.most)

    def shrink(self, idle: int) -> None:
        """End those that are idle longest, until there are at most `idle`."""
        while len(self._idle) > max(0, idle):
            self._end(self._idle.pop(next(iter(self._idle))))

    def forget(self, live: LivePrompt) -> None:
        """It was aborted while it was being answered."""
        self._reserved -= live.reserved

    def forget_adapter(self, adapter: str) -> None:
        """End the idle prompts of an adapter."""
        for key in [key for key in self._idle if key[0] == adapter]:
            self._end(self._idle.pop(key))

    def take_ended(self) -> list[str]:
        """The requests to abort since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def _reserve(self, tokens: int) -> bool:
        """Take KV cache, of idle prompts if need be; whether there was enough."""
        while self._reserved + tokens > self._most_tokens and self._idle:
            self._end(self._idle.pop(next(iter(self._idle))))
        if self._reserved + tokens > self._most_tokens:
            return False
        self._reserved += tokens
        return True

    def _end(self, live: LivePrompt) -> None:
        self._reserved -= live.reserved
        self.ended.append(live.id)

    def _blocks(self, tokens: int) -> int:
        # One more than the prompt: the token that the engine samples and nobody asked for.
        return -(-(tokens + 1) // self._block_size) * self._block_size
