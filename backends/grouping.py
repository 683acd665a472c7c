"""Which prompts share a forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from lmpool.backends.engine import Request

MAX_LOGITS: Final = 1 << 26
"""Logits computed at once: 256 MiB in float32."""

_MAX_WASTE: Final = 0.25
"""The part of a forward pass that may be padding."""


def forward_passes(
    lengths: Sequence[int], *, forward_tokens: int, vocab_size: int, may_pad: bool
) -> list[list[int]]:
    """Part prompts into forward passes of about `forward_tokens` positions; indices into `lengths`.

    Where the model does not bear padding, only prompts of one length share a pass.
    """
    return group_by_length(
        lengths,
        max_positions=forward_tokens,
        max_rows=max(1, MAX_LOGITS // vocab_size),
        max_waste=_MAX_WASTE if may_pad else 0.0,
        free_padding=forward_tokens // 8 if may_pad else 0,
    )


def group_by_length(
    lengths: Sequence[int],
    *,
    max_positions: int,
    max_rows: int,
    max_waste: float,
    free_padding: int,
) -> list[list[int]]:
    """Part prompts into groups, each to be padded to its longest; indices into `lengths`.

    Longest first. A group has at most `max_positions` positions (its size times its longest),
    unless one prompt alone has more, and at most `max_rows` prompts. Of its positions at
    most the part `max_waste` is padding, or `free_padding` of them: as many as cost less than
    another forward pass. With both 0, only prompts of one length share a group.
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
            or padding > max(free_padding, max_waste * positions)
        ):
            group = []
            groups.append(group)
            longest, filled = length, 0
        group.append(index)
        filled += length
    return groups


def of_equal_prompts(requests: Iterable[Request]) -> list[list[Request]]:
    """Requests parted by their tokens, each prompt where it comes first."""
    found: dict[bytes, list[Request]] = {}
    for request in requests:
        found.setdefault(request.tokens.tobytes(), []).append(request)
    return list(found.values())
