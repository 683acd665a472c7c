"""One question, and several as callers write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, starmap
from typing import Final, TypeAlias, cast, get_args

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

ASKS_MOST: Final = 1 << 22
"""Asks of one call; without end go those of `ask_iter`."""

_WANTS = get_args(Want)


def check_want(want: object) -> None:
    """Raise `PromptError` for what is no want."""
    if not isinstance(want, _WANTS):
        raise PromptError(f"want={quoted(want)}: write one of lmpool.wants, such as Top(20)")


def each_ask(asks: object) -> Iterator[Ask]:
    """What a caller gave, one after another. Raises `PromptError` for what is no ask, and where
    they cannot be gone through, also midway."""
    if isinstance(asks, (str, bytes, bytearray, memoryview, Mapping, Ask)):
        raise PromptError(f"asks of type {type(asks).__name__}: a list of asks is needed")
    # Of lists no error comes but what a signal's handler raises, which is not to be told otherwise.
    given = asks if isinstance(asks, (list, tuple)) else _gone_through(asks)
    yield from starmap(_ask, enumerate(given))


def _gone_through(asks: object) -> Iterator[object]:
    try:
        yield from cast(Iterable[object], asks)
    except LmpoolError:  # ours, of a call that it makes
        raise
    except Exception as error:
        raise PromptError(
            f"asks of type {type(asks).__name__}: a list of asks is needed ({said(error)})"
        ) from error


def all_asks(asks: object) -> list[Ask]:
    """All that a caller gave. Raises `PromptError`, also for more than may be in one call."""
    found = list(islice(each_ask(asks), ASKS_MOST + 1))
    if len(found) > ASKS_MOST:
        raise PromptError(f"more than {ASKS_MOST} asks in one call: ask them by ask_iter")
    return found


def _ask(number: int, found: object) -> Ask:
    if isinstance(found, tuple) and len(found) == 2:
        found = Ask(*found)
    try:
        if not isinstance(found, Ask):
            raise PromptError(f"{quoted(found)}: write an Ask, or a pair of a prompt and a want")
        check_want(found.want)
    except PromptError as error:
        raise PromptError(f"ask {number}: {error}").of(number) from None
    return found
