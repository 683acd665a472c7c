"""One question, and several as callers write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast, get_args

from lmpool.checks import quoted, said
from lmpool.errors import LmpoolError, PromptError
from lmpool.token_ids import TokenIds
from lmpool.wants import Row, Want


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, what is wanted of it, and the LoRA adapter that is meant; None is the base model.

    Without a want it is the whole row, as it travels by this client's `encoding`.
    """

    token_ids: TokenIds
    want: Want = Row()  # noqa: RUF009 -- frozen
    lora_name: str | None = None


Asks: TypeAlias = Iterable[Ask | tuple[TokenIds, Want]]
"""Questions: each an `Ask`, or a pair of a prompt and a want."""

_WANTS = get_args(Want)
_NEEDED = "an Ask, or a pair of a prompt and a want, is needed"


def read_ask(found: object) -> Ask:
    """A question as a caller gave it. Raises `PromptError` for what is none."""
    if isinstance(found, tuple) and len(found) == 2:
        found = Ask(*found)
    if not isinstance(found, Ask):
        raise PromptError(f"{quoted(found)}: {_NEEDED}")
    check_want(found.want)
    return found


def check_want(want: object) -> None:
    """Raise `PromptError` for what is no want."""
    if not isinstance(want, _WANTS):
        raise PromptError(f"want={quoted(want)}: write one of lmpool.wants, such as Top(20)")


def each_ask(asks: object) -> Iterator[object]:
    """What a caller gave, one after another. Raises `PromptError` where it cannot be gone through,
    also midway."""
    kind = type(asks).__name__
    if isinstance(asks, (str, bytes, bytearray, memoryview, Mapping, Ask)):
        raise PromptError(f"asks of type {kind}: a list of asks is needed")
    try:
        yield from cast(Iterable[object], asks)
    except LmpoolError:  # of a call that it makes
        raise
    except Exception as error:
        raise PromptError(
            f"asks of type {kind}: a list of asks is needed ({said(error)})"
        ) from error
