"""The closed set of wants, and how one travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias, cast, get_args

from lmpool.errors import AnswerFormatError, JobFormatError
from lmpool.model_info import ModelInfo
from lmpool.wants.answers import Answer
from lmpool.wants.draw import Draw
from lmpool.wants.generate import Generate
from lmpool.wants.hidden import HeadPart, Hidden
from lmpool.wants.of_row import OfRow
from lmpool.wants.row import Row
from lmpool.wants.score import Score
from lmpool.wants.stream import Stream
from lmpool.wants.tokens import Tokens
from lmpool.wants.top import Top

Want: TypeAlias = Row | Top | Tokens | Score | Draw | Generate | Stream | Hidden | HeadPart
"""Every kind of question."""

KINDS: Final[dict[str, type[Want]]] = {want.kind: want for want in get_args(Want)}
"""The wants by kind."""


def want_to_wire(want: Want) -> list[object]:
    """A want as it travels: ``[kind, fields...]``."""
    return [want.kind, *want.fields()]


def want_from_wire(found: object) -> Want:
    """Read `want_to_wire`'s form, strictly. Raises `JobFormatError`."""
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise JobFormatError(f"no want: {found!r:.100}")
    kind = KINDS.get(found[0])
    if kind is None:
        raise JobFormatError(f"unknown want {found[0]!r:.40}; there are {', '.join(KINDS)}")
    return kind.from_fields(found[1:])


def decode_all(
    want: Want, stored: Sequence[bytes], info: ModelInfo
) -> Sequence[Answer | AnswerFormatError]:
    """The stored answers to one checked want of several prompts; an error for what is no answer."""
    if len(stored) > 1 and isinstance(want, (OfRow, Row)):
        alike = want.decode_alike(stored, info)
        if alike is not None:
            return cast(list[Answer], alike)
    return [_decoded(want, data, info) for data in stored]


def _decoded(want: Want, data: bytes, info: ModelInfo) -> Answer | AnswerFormatError:
    try:
        return want.decode(data, info)
    except AnswerFormatError as error:
        return error
