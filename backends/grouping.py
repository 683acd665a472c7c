"""Which prompts share a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MAX_WASTE: Final = 0.25
"""The part of a group's positions that may be padding."""

FREE_PADDING: Final = 128
"""Padding positions that cost less than another forward pass would."""


def group_by_length(
    lengths: Sequence[int], *, max_positions: int, max_rows: int
) -> list[list[int]]:
    """Part prompts into groups, each to be padded to its longest; indices into `lengths`.

    Longest first. Of a group's positions (its size times its longest), at most a quarter or
    `FREE_PADDING` are padding, and at most `max_positions` there are, unless one prompt alone has
    more. No group has more than `max_rows` prompts.
    """
    groups: list[list[int]] = []
    group: list[int] = []
    longest = filled = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        positions = (len(group) + 1) * longest
        padding = positions - filled - length
        if (
            not group
            or len(group) == max_rows
            or positions > max_positions
            or padding > max(FREE_PADDING, MAX_WASTE * positions)
        ):
            group = []
            groups.append(group)
            longest, filled = length, 0
        group.append(index)
        filled += length
    return groups
