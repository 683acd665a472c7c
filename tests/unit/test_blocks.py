"""Memory of blocks that their callers have dropped."""

from __future__ import annotations

import gc
import random
import threading
from typing import Any

import numpy as np
import pytest

from lmpool.producer import blocks as blocks_module
from lmpool.producer.blocks import Blocks
from lmpool.producer.frameworks import framework
from lmpool.producer.stacking import Stack
from lmpool.rows import EncodedRow

SIZE = 1000


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    monkeypatch.setattr(blocks_module, "LEAST", 4 * SIZE * 10)
    monkeypatch.setattr(blocks_module, "MOST", 4 * SIZE * 40)
    return Blocks()


def place(block: Any) -> int:
    found: int = block.__array_interface__["data"][0]
    return found


def kept(blocks: Blocks) -> list[int]:
    """The bytes of what is kept."""
    return [memory.size for memory in blocks._spare]


def test_what_was_dropped_is_used_again(blocks: Blocks) -> None:
    block = blocks.empty(20, SIZE)
    assert (block.shape, block.dtype) == ((20, SIZE), np.float32)
    assert block.flags.writeable
    assert block.flags.c_contiguous
    first = place(block)
    del block
    assert kept(blocks) == [4 * SIZE * 20]
    for rows in (20, 18):  # a smaller one, too
        block = blocks.empty(rows, SIZE)
        assert block.shape == (rows, SIZE)
        assert place(block) == first
        assert kept(blocks) == []
        del block


def test_nothing_is_used_again_that_anybody_holds(blocks: Blocks) -> None:
    block = blocks.empty(20, SIZE)
    block[:] = 1
    row, first = block[3, ::2], place(block)
    del block
    gc.collect()
    other = blocks.empty(20, SIZE)
    assert place(other) != first
    other[:] = 2
    assert row.tolist() == [1] * 500
    del row
    assert place(blocks.empty(20, SIZE)) == first


def test_a_tensor_holds_its_memory(blocks: Blocks) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(blocks.empty(20, SIZE))
    part, first = tensor[5:].fill_(1), tensor.data_ptr()
    del tensor
    gc.collect()
    assert kept(blocks) == []
    assert place(blocks.empty(20, SIZE)) != first
    assert bool((part == 1).all())


def test_several_are_kept_up_to_a_bound_and_the_last_ones_longest(blocks: Blocks) -> None:
    several = [blocks.empty(rows, SIZE) for rows in (10, 11, 12)]
    places = [place(block) for block in several]
    while several:
        del several[0]
    assert kept(blocks) == [4 * SIZE * rows for rows in (10, 11, 12)]
    block = blocks.empty(15, SIZE)  # all fit
    del block
    assert kept(blocks) == [4 * SIZE * rows for rows in (11, 12, 15)]  # 48 rows are too many
    assert place(blocks.empty(11, SIZE)) in places[1:]


@pytest.mark.parametrize(("asked", "is_used"), [(20, True), (18, True), (17, False), (21, False)])
def test_memory_that_is_too_small_or_much_too_large_is_not_used(
    blocks: Blocks, asked: int, is_used: bool
) -> None:
    first = blocks.empty(20, SIZE)
    before = place(first)
    del first
    second = blocks.empty(asked, SIZE)
    assert (place(second) == before) == is_used
    assert kept(blocks) == ([] if is_used else [4 * SIZE * 20])


def test_what_is_dropped_and_asked_for_at_random_is_kept_within_the_bound(blocks: Blocks) -> None:
    draw = random.Random(1)
    held: list[tuple[int, Any]] = []
    for number in range(2000):
        if held and draw.random() < 0.5:
            held.pop(draw.randrange(len(held)))
        else:
            held.append((number, blocks.empty(draw.randrange(1, 30), SIZE)))
            held[-1][1][:] = number
        assert sum(kept(blocks)) <= blocks_module.MOST
        assert all((block == number).all() for number, block in held)
    held.clear()
    assert 0 < sum(kept(blocks)) <= blocks_module.MOST
    assert not blocks._lent


@pytest.mark.parametrize("rows", [0, 1, 9, 41])
def test_what_is_small_or_immense_is_not_kept(blocks: Blocks, rows: int) -> None:
    block = blocks.empty(rows, SIZE)
    assert block.shape == (rows, SIZE)
    del block
    assert kept(blocks) == []


def test_no_two_threads_have_the_same(blocks: Blocks) -> None:
    wrong: list[int] = []

    def use(number: int) -> None:
        for _ in range(300):
            block = blocks.empty(10, SIZE)
            block[:] = number
            if not (block == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_stacked_rows_are_in_such_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "torch":
        pytest.importorskip("torch")
    monkeypatch.setattr(blocks_module, "LEAST", 1)
    rows = [EncodedRow("f32", 3, 0.0, np.full(3, i, np.float32)) for i in range(4)]
    made = framework(name)
    places = set[int]()
    for _ in range(3):
        block = Stack(made, 4, 3).whole(rows)
        assert block.tolist() == [[i] * 3 for i in range(4)]
        places.add(np.asarray(block).__array_interface__["data"][0])
        del block
    assert len(places) == 1
