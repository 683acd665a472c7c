"""Pieces of a continuation that runs, as they are stored: entries of a stream, one after another.

An entry's id says how many tokens there are up to its end, its value is what is stored of an answer
that has its tokens alone. So a piece that is read twice, or out of order, is known by its number.
"""

from __future__ import annotations

import re
from typing import Final

from lmpool.commands import Fields
from lmpool.errors import AnswerFormatError
from lmpool.model_info import ModelInfo
from lmpool.wants import Generation, Stream

PIECE: Final = b"piece"
"""The field of an entry that holds a piece."""

_ID: Final = re.compile(rb"0-(\d{1,10})")


def piece_id(upto: int) -> str:
    """The id of a piece that ends with the token of this number, counted from 1."""
    return f"0-{upto}"


def read_piece(
    want: Stream, entry_id: bytes, fields: Fields, before: int, info: ModelInfo
) -> Generation:
    """What was drawn behind the first `before` tokens. Raises `AnswerFormatError`."""
    found = _ID.fullmatch(entry_id)
    part = want.decode(fields.get(PIECE, b""), info)
    if found is None or int(found[1]) != before + part.token_ids.size or not part.token_ids.size:
        raise AnswerFormatError(f"no piece that follows {before} tokens: {entry_id!r:.40}")
    return part
