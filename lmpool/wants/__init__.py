"""What may be asked of a prompt: one closed set of wants, and everything that a want decides.

For each want there is its check, what its digest covers, its wire form, how a worker stores the
answer and how a client reads it. A new want that a row answers is a class derived from `OfRow` and
one more member of `Want`: every engine answers it by reducing rows, until it does better. One that
takes more is also what each engine does for it: a type checker finds the places, by
`typing.assert_never`. Both have a public method of the client.
"""

from __future__ import annotations

from lmpool.wants.answers import (
    Answer,
    Computed,
    Draws,
    FinishReason,
    Generation,
    HeadBytes,
    HiddenState,
    Reduced,
    TextScores,
    TopLogprobs,
)
from lmpool.wants.choice import Choice, TokenSet
from lmpool.wants.digests import DIGEST_BYTES, Digest, Digester
from lmpool.wants.draw import Draw
from lmpool.wants.drawing import MAX_SEED
from lmpool.wants.generate import MAX_EOS_IDS, Generate, StopSequences
from lmpool.wants.hidden import HeadPart, Hidden
from lmpool.wants.of_prompt import OfPrompt
from lmpool.wants.of_row import OfRow
from lmpool.wants.position_ids import AskedIds, PositionIds
from lmpool.wants.row import Row
from lmpool.wants.score import Score
from lmpool.wants.stream import Stream
from lmpool.wants.tokens import Tokens
from lmpool.wants.top import Top
from lmpool.wants.want import KINDS, Want, decode_all, want_from_wire, want_to_wire

__all__ = [
    "DIGEST_BYTES",
    "KINDS",
    "MAX_EOS_IDS",
    "MAX_SEED",
    "Answer",
    "AskedIds",
    "Choice",
    "Computed",
    "Digest",
    "Digester",
    "Draw",
    "Draws",
    "FinishReason",
    "Generate",
    "Generation",
    "HeadBytes",
    "HeadPart",
    "Hidden",
    "HiddenState",
    "OfPrompt",
    "OfRow",
    "PositionIds",
    "Reduced",
    "Row",
    "Score",
    "StopSequences",
    "Stream",
    "TextScores",
    "TokenSet",
    "Tokens",
    "Top",
    "TopLogprobs",
    "Want",
    "decode_all",
    "want_from_wire",
    "want_to_wire",
]
