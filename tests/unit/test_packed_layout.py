"""Packed forward passes: each position once, each seeing its own ancestors and nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lmpool.backends.hf.packed_layout import BLANK, RESERVED_SLOTS, SPARE, Bounds, lay_out, passes
from lmpool.backends.trie import TokenTrie
from lmpool.backends.trie_runs import Lease

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=10).map(tuple)
batches = st.lists(prompts, min_size=1, max_size=12, unique=True)


def leases_of(trie: TokenTrie, batch: list[tuple[int, ...]]) -> list[Lease]:
    leases = [trie.lease(np.array(prompt, np.uint32)) for prompt in batch]
    assert None not in leases
    return [lease for lease in leases if lease is not None]


@settings(max_examples=300, deadline=None)
@given(
    earlier=batches,
    batch=batches,
    positions=st.integers(1, 40),
    outputs=st.integers(1, 12),
    pairs=st.integers(1, 500),
    columns=st.integers(1, 60),
)
def test_passes(
    earlier: list[tuple[int, ...]],
    batch: list[tuple[int, ...]],
    positions: int,
    outputs: int,
    pairs: int,
    columns: int,
) -> None:
    trie = TokenTrie(500)
    before = leases_of(trie, earlier)
    trie.commit(before)
    known = {int(slot) for lease in before for slot in trie.path(lease)}
    leases = leases_of(trie, batch)
    path = {prompt: trie.path(lease) for prompt, lease in zip(batch, leases, strict=True)}
    ancestors = {
        int(slots[n]) + RESERVED_SLOTS: {int(s) + RESERVED_SLOTS for s in slots[: n + 1]}
        for slots in path.values()
        for n in range(slots.size)
    }
    depth = {int(s) + RESERVED_SLOTS: n for slots in path.values() for n, s in enumerate(slots)}
    token = {
        int(s) + RESERVED_SLOTS: t
        for prompt, slots in path.items()
        for t, s in zip(prompt, slots, strict=True)
    }

    layout = lay_out(leases)
    bounds = Bounds(positions, outputs, pairs, columns)
    written: set[int] = set()
    answered: list[int] = []
    for part in passes(layout, bounds):
        rows, width = part.queries.shape
        count = part.queries.size
        if count > 1:
            assert count <= positions + width
            assert part.outputs.size <= outputs
            assert count * part.columns.shape[1] <= pairs
            alone = layout.depths[part.queries].max() + 1 if rows == 1 else 0
            assert part.columns.size - alone <= columns
        new = [int(slot) for slot in part.writes if slot != SPARE]
        assert len(new) == len(set(new))
        assert not written & set(new)
        written |= set(new)
        for row in range(rows):
            seen = part.columns[row]
            for query in part.queries[row].tolist():
                slot = int(layout.slots[query])
                assert layout.depths[query] == depth[slot]
                assert layout.tokens[query] == token[slot]
                visible = layout.slots[seen[(seen <= query) & (query < layout.ends[seen])]].tolist()
                assert len(visible) == len(set(visible))
                assert set(visible) == ancestors[slot]
                assert {s - RESERVED_SLOTS for s in visible} <= known | {
                    s - RESERVED_SLOTS for s in written
                }
        for place, prompt in zip(part.outputs.tolist(), part.prompts.tolist(), strict=True):
            slot = int(layout.slots[part.queries.flatten()[place]])
            assert slot == path[batch[prompt]][-1] + RESERVED_SLOTS
        answered += part.prompts.tolist()
    assert BLANK not in written
    assert {s - RESERVED_SLOTS for s in written} == {
        int(s) for slots in path.values() for s in slots
    } - known
    assert sorted(answered) == list(range(len(batch)))


def test_particles_share_the_keys_of_their_prompt() -> None:
    trie = TokenTrie(10_000)
    prompt = tuple(range(1_000))
    first = leases_of(trie, [prompt])
    trie.commit(first)
    layout = lay_out(leases_of(trie, [(*prompt, n) for n in range(32)]))
    (part,) = passes(layout, Bounds(1_024, 1_024))
    assert part.queries.size == 32
    assert part.columns.size < 2 * 1_032


def test_a_prompt_of_more_columns_than_rows_share_is_computed_in_no_smaller_parts() -> None:
    trie = TokenTrie(10_000)
    prompt = tuple(range(1_000))
    first = leases_of(trie, [prompt])
    bounds = Bounds(64, 64, pairs=64 * 1_000, columns=100)
    parts = list(passes(lay_out(first), bounds))
    assert [part.queries.shape for part in parts] == [(1, 64)] * 15 + [(1, 40)]
    trie.commit(first)
    (part,) = passes(lay_out(leases_of(trie, [(*prompt, n) for n in range(32)])), bounds)
    assert part.shape == (1, 32, 1_032)


def test_rows_beside_each_other_share_their_columns() -> None:
    trie = TokenTrie(10_000)
    longer = [tuple(range(n, n + 90)) for n in (0, 1_000, 2_000)]
    first = leases_of(trie, longer)
    trie.commit(first)
    layout = lay_out(leases_of(trie, [(*prompt, 7) for prompt in longer]))
    parts = list(passes(layout, Bounds(64, 64, columns=100)))
    assert sum(part.queries.size for part in parts) == 3
    assert all(part.columns.size <= 100 + 91 for part in parts)
    assert len(list(passes(layout, Bounds(64, 64, columns=1_000)))) == 1


def test_strangers_do_not_share_a_row() -> None:
    trie = TokenTrie(10_000)
    rng = np.random.default_rng(0)
    layout = lay_out(leases_of(trie, [tuple(rng.integers(0, 9_999, 64)) for _ in range(64)]))
    parts = list(passes(layout, Bounds(1_024, 1_024)))
    assert [part.queries.size for part in parts] == [1_024] * 4
    assert all(part.columns.shape[1] <= 128 for part in parts)


def test_prompts_of_one_length_fill_rows_of_their_own() -> None:
    """So that they need no mask, though some of them share their beginning."""
    trie = TokenTrie(10_000)
    rng = np.random.default_rng(0)
    batch = [(n, *rng.integers(1_000, 9_999, 30).tolist()) for n in range(200)]
    batch[3:3] = [(*batch[70][:5], 1), (*batch[90][:2], *range(40))]
    layout = lay_out(leases_of(trie, batch))
    parts = list(passes(layout, Bounds(1_024, 1_024)))
    plain = [part for part in parts if np.array_equal(part.columns, part.queries)]
    assert [part.queries.shape for part in plain] == [(33, 31)] * 6
    assert len(parts) == 7
    assert sorted(int(n) for part in parts for n in part.prompts) == list(range(202))
