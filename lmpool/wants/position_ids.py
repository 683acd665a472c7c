"""Token ids to be scored at each position of a text: one list for all, or one for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from lmpool.checks import is_integer
from lmpool.errors import JobFormatError, PromptError
from lmpool.token_ids import TokenIds, listed, packed
from lmpool.wants import packing

MAX_TOKEN_IDS: Final = 1 << 20
"""Ids of one want: 4 MiB of a job."""
_TOO_MANY: Final = f"token_ids of more than {MAX_TOKEN_IDS} ids: ask in several calls"


@dataclass(frozen=True, slots=True)
class PositionIds:
    """`width` token ids for each scored position, one after another, little-endian uint32."""

    width: int
    data: bytes

    @property
    def positions(self) -> int:
        """For how many positions there are some."""
        return len(self.data) // (4 * self.width)


AskedIds: TypeAlias = TokenIds | Sequence[TokenIds] | bytes | PositionIds
"""One list for all positions, or one for each, of equal lengths; of a checked want, in bytes."""


def as_array(token_ids: AskedIds) -> npt.NDArray[np.uint32]:
    """The ids of a checked want, one after another."""
    data = token_ids.data if isinstance(token_ids, PositionIds) else token_ids
    assert type(data) is bytes
    return np.frombuffer(data, "<u4")


def beyond(token_ids: AskedIds, size: int) -> str | None:
    """What is wrong where an id is none of a vocabulary of `size`; None where all are."""
    largest = int(as_array(token_ids).max())
    return None if largest < size else f"token id {largest} in token_ids: below {size} expected"


def checked_ids(given: AskedIds | None, size: int) -> bytes | PositionIds | None:
    """A caller's ids as bytes. Raises `PromptError`, also for one beyond `size`."""
    if given is None:
        return None
    if isinstance(given, (bytes, PositionIds)):
        return _again(given, size)
    lists = _lists(given)
    if lists is None:
        ids = listed(cast(TokenIds, given), MAX_TOKEN_IDS, "token_ids")
        return packed(_some(ids), size, "token_ids: ")
    parts: list[bytes] = []
    for place, some in enumerate(lists):
        name = f"token_ids[{place}]"
        parts.append(packed(_some(listed(some, MAX_TOKEN_IDS, name), name), size, f"{name}: "))
        if len(parts[-1]) != len(parts[0]):
            raise PromptError(
                f"{name} has {len(parts[-1]) // 4} ids, token_ids[0] has {len(parts[0]) // 4}: "
                "give each position as many"
            )
        if len(parts) * len(parts[0]) > 4 * MAX_TOKEN_IDS:
            raise PromptError(_TOO_MANY)
    return PositionIds(len(parts[0]) // 4, b"".join(parts))


def _some(ids: Sequence[int], name: str = "token_ids") -> Sequence[int]:
    if not len(ids):
        raise PromptError(f"{name}: at least one token id is needed; None asks for none")
    if len(ids) > MAX_TOKEN_IDS:
        raise PromptError(_TOO_MANY)
    return ids


def _lists(given: Any) -> Iterable[TokenIds] | None:
    """A list for each position; None for one list of ids."""
    dimensions = getattr(given, "ndim", None)
    if dimensions == 2:
        return cast(Iterable[TokenIds], given) if len(given) else None
    if type(given) not in (list, tuple) or not given:
        return None
    first = given[0]
    single = is_integer(first) or isinstance(first, (str, float))
    return None if single or not hasattr(first, "__len__") else cast(Iterable[TokenIds], given)


def _again(given: bytes | PositionIds, size: int) -> bytes | PositionIds:
    """The ids of a want that was checked before."""
    try:
        if isinstance(given, PositionIds):
            found = read_ids(given.width, given.data)
        else:
            found = read_ids(None, given)
    except JobFormatError as error:
        raise PromptError(f"{error}: write lists of token ids") from None
    assert found is not None
    wrong = beyond(found, size)
    if wrong is not None:
        raise PromptError(wrong)
    return found


def read_ids(width: object, data: object) -> bytes | PositionIds | None:
    """Ids as they travel. Raises `JobFormatError`."""
    if data is None and width is None:
        return None
    if not isinstance(data, bytes) or not 0 < len(data) <= 4 * MAX_TOKEN_IDS or len(data) % 4:
        raise JobFormatError(f"token_ids are not 1 to {MAX_TOKEN_IDS} uint32")
    if width is None:
        return data
    if packing.expect_integer("ids a position", width, 1, MAX_TOKEN_IDS) * 4 > len(data):
        raise JobFormatError(f"{width} ids a position, of {len(data) // 4}")
    if len(data) % (4 * cast(int, width)):
        raise JobFormatError(f"{len(data) // 4} ids are no whole number of {width} a position")
    return PositionIds(cast(int, width), data)
