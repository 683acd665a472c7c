"""Which prompts share a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MAX_WASTE: Final = 0.25
"""The part of a group's positions that may be padding."""


def group_by_length(
    lengths: Sequence[int], *, max_positions: int, max_rows: int, free_padding: int = 0
) -> list[list[int]]:
    """Part prompts into groups, each to be padded to its longest; indices into `lengths`.

    Longest first. A group has at most `max_positions` positions (its size times its longest),
    unless one prompt alone has more, and at most `max_rows` prompts. At most a quarter of its
    positions are padding, or `free_padding` of them: what costs less than another forward pass.
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
            or padding > max(free_padding, MAX_WASTE * positions)
        ):
            group = []
            groups.append(group)
            longest, filled = length, 0
        group.append(index)
        filled += length
    return groups
