"""Where in a text its tokens begin, in characters."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from lmpool.gateway.words import Words


class TextOffsets:
    """Those of tokens that come one after another, of which several may be one character: each of
    them begins where that does."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.here = 0
        """Where the next one begins, and one that the text leaves out."""

    def told(self, token: int) -> int:
        """Where a token of the text begins."""
        data = self._words.token_bytes(token)
        begun, _ = self._decoder.getstate()
        at = self.here
        if begun and data and data[0] & 0xC0 != 0x80:  # what was begun is no character after all
            at += len(begun.decode("utf-8", "replace"))
        self.here += len(self._decoder.decode(data))
        return at


def prompt_offsets(words: Words, ids: Sequence[int], text: str) -> list[int]:
    """Where the tokens of a prompt begin in its text: that of what a tokenizer puts around it is
    left out."""
    offsets, found = TextOffsets(words), list[int]()
    for token in ids:
        hidden = token in words.special and not text.startswith(words.text(token), offsets.here)
        found.append(offsets.here if hidden else offsets.told(token))
    # Some tokenizers put a blank before a text, which becomes a part of its first token.
    if offsets.here == len(text) + 1:
        found = [max(0, at - 1) for at in found]
    return found
