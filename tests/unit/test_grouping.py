from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmpool.backends.grouping import group_by_length


@given(
    lengths=st.lists(st.integers(1, 300), max_size=60),
    max_positions=st.integers(1, 2000),
    max_rows=st.integers(1, 20),
    max_waste=st.floats(0, 1),
    free_padding=st.integers(0, 100),
)
def test_every_prompt_is_in_one_group_within_the_bounds(
    lengths: list[int], max_positions: int, max_rows: int, max_waste: float, free_padding: int
) -> None:
    groups = group_by_length(
        lengths,
        max_positions=max_positions,
        max_rows=max_rows,
        max_waste=max_waste,
        free_padding=free_padding,
    )
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        sizes = [lengths[i] for i in group]
        positions = len(sizes) * max(sizes)
        assert len(sizes) <= max_rows
        assert positions <= max_positions or len(sizes) == 1
        assert positions - sum(sizes) <= max(free_padding, max_waste * positions)


def test_prompts_of_one_length_share_a_group() -> None:
    assert group_by_length([5] * 8, max_positions=40, max_rows=99, max_waste=0, free_padding=0) == [
        list(range(8))
    ]


def test_a_long_prompt_does_not_pad_short_ones() -> None:
    groups = group_by_length(
        [4, 1000, 4, 4], max_positions=10_000, max_rows=99, max_waste=0.25, free_padding=0
    )
    assert groups == [[1], [0, 2, 3]]


def test_little_padding_costs_less_than_another_pass() -> None:
    groups = group_by_length(
        [1, 9, 2], max_positions=1000, max_rows=99, max_waste=0, free_padding=15
    )
    assert groups == [[1, 2, 0]]
