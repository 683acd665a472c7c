"""Laying prompts out for packed forward passes: which position attends to which, and in what rows.

The positions of a batch's prompts, each once, are put in preorder of the trie that the prompts
span. Then a position sees exactly those before it whose subtree has not ended yet, and any stretch
of preorder can be cut into rows of one width: a row needs the ancestors of its first position, and
what lies between its first and its last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from lmpool.backends.trie_runs import TOKEN_BYTES, Lease, Run

Indices = npt.NDArray[np.int64]

BLANK: Final = 0
"""The slot that fills up short rows; it holds zeros and no position sees it."""
SPARE: Final = 1
"""The slot into which goes what is computed a second time, or only to fill up a row."""
RESERVED_SLOTS: Final = 2

# What it costs to gather the keys and values of a position, and to compute one, in pairs of
# positions that attend to each other.
_GATHER_COST: Final = 24
_POSITION_COST: Final = 1_000

QUERY_BLOCK: Final = 32
"""Queries of a row that one block of a GPU's kernel computes, or a divisor of that. Where a row
leaves a single query to its last block, and all heads share one head of keys, PyTorch's
memory-efficient kernel (seen with 2.11) takes the heads for queries there, and gives all but
the first of them the masks of whatever lies behind: such rows get a position more."""

ALIGNMENT: Final = 8
"""Attention kernels of a GPU would copy a mask whose rows are no multiple of this."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A batch's positions in preorder. All arrays but the last five are int64 [positions + 1].

    The last entry of each is the blank position. `ends` is where the subtree of a position ends,
    `begins` where its run begins, and `above` the last position of the run above (-1: none).
    `fresh`, bool, tells what has to be computed for the first time. `queries` are the positions to
    compute: the fresh ones and those with logits, in preorder. `last` are the last positions of
    the prompts, in preorder. `outputs` are the positions whose logits are wanted, in preorder, and
    `prompts` whose they are: several prompts may want those of one position.
    """

    tokens: Indices
    slots: Indices
    depths: Indices
    ends: Indices
    begins: Indices
    above: Indices
    fresh: npt.NDArray[np.bool_]
    queries: Indices
    last: Indices
    outputs: Indices
    prompts: Indices

    @property
    def blank(self) -> int:
        """The number of the blank position."""
        return self.slots.size - 1


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One forward pass: `rows` by `width` positions to compute, `columns` seen by each row.

    `queries` is int64 [rows, width], `columns` int64 [rows, columns], both positions of the
    layout; rows are filled up with the last query and with the blank position. `writes` are the
    slots that get what is computed, int64 [rows * width]. `outputs` are the places in the
    flattened `queries` whose logits are wanted, ascending, `prompts` whose they are, and
    `depths` after how many tokens of it, less one.
    """

    queries: Indices
    columns: Indices
    writes: Indices
    outputs: Indices
    prompts: Indices
    depths: Indices

    @property
    def shape(self) -> tuple[int, int, int]:
        """Its rows, their width, and the columns that each sees."""
        rows, width = self.queries.shape
        return rows, width, self.columns.shape[1]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a forward pass may hold at most, where one position does not need more.

    `positions` to compute; `outputs` with logits; `pairs` of positions in the attention mask;
    `columns` of all rows, whose keys and values are gathered: a row alone may have as many beside
    those that its deepest position sees. Rows are at most `widest`, and all of one `width` where a
    trial asks for that.
    """

    positions: int
    outputs: int
    pairs: int = 1 << 25
    columns: int = 1 << 16
    widest: int = 1 << 62
    width: int | None = None


def leaves_one(width: int, block: int | None) -> bool:
    """Whether rows of so many queries leave a single one to the last of a kernel's blocks."""
    return block is not None and width > 1 and width % block == 1


def padded(part: Pass, shape: tuple[int, int, int], blank: int) -> Pass:
    """The same in a `shape` that is no smaller. Of what is added nothing comes and nothing is kept:
    rows and positions repeat the last ones, and columns hold the `blank` position."""
    rows, width, columns = shape
    had, narrow = part.queries.shape
    queries = np.empty((rows, width), np.int64)
    queries[:had, :narrow] = part.queries
    queries[:had, narrow:] = part.queries[:, -1:]
    queries[had:] = queries[had - 1]
    seen = np.full((rows, columns), blank)
    seen[:had, : part.columns.shape[1]] = part.columns
    seen[had:] = seen[had - 1]
    writes = np.full((rows, width), SPARE)
    writes[:had, :narrow] = part.writes.reshape(had, narrow)
    outputs = part.outputs + part.outputs // narrow * (width - narrow)
    return replace(part, queries=queries, columns=seen, writes=writes.reshape(-1), outputs=outputs)


def lay_out(leases: Sequence[Lease], counts: Sequence[int] | None = None) -> Layout:
    """The positions of these leases' prompts, at least one, in preorder.

    Logits are wanted of so many of the last positions of each; by default of the last.
    """
    lengths, below = _used_runs(leases)
    # Siblings stand in any order. Prompts that share nothing, those of one length together, make
    # rows that are a prompt each: popped from the end, they come first.
    below[None].sort(key=lambda run: (run not in below, lengths[run]))
    order: list[Run] = []
    numbers: dict[Run | None, int] = {}
    parents: list[int] = []
    sizes: list[int] = []
    places: dict[Run, int] = {}
    total = 0
    waiting = below[None]
    while waiting:
        run = waiting.pop()
        numbers[run] = len(order)
        order.append(run)
        parents.append(numbers.get(run.parent, -1))
        sizes.append(lengths[run])
        places[run] = total
        total += sizes[-1]
        waiting.extend(below.get(run, ()))

    begins = list(places.values())
    stops = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    ends = stops.copy()
    for number in range(len(order) - 1, 0, -1):
        parent = parents[number]
        if parent >= 0 and ends[number] > ends[parent]:
            ends[parent] = ends[number]
    # One repeat for the five that differ from run to run only; the last run is the blank position.
    above = [-1 if parent < 0 else stops[parent] - 1 for parent in parents]
    shifts = [run.start - begin for run, begin in places.items()]
    computed = [run.computed + begin for run, begin in places.items()]
    each = np.array(
        [[*ends, -1], [*begins, total], [*above, -1], [*shifts, -total], [*computed, total + 1]]
    )
    spread = np.repeat(each, [*sizes, 1], axis=1)
    raw = [run.raw[: size * TOKEN_BYTES] for run, size in zip(order, sizes, strict=True)]
    slots = np.empty(total + 1, np.int64)
    np.concatenate(
        [run.slots[:size] for run, size in zip(order, sizes, strict=True)], out=slots[:-1]
    )
    slots += RESERVED_SLOTS
    slots[-1] = BLANK
    at = np.arange(total + 1)
    fresh = at >= spread[4]
    last, outputs, prompts = _outputs(leases, counts, places)
    wanted = fresh.copy()
    wanted[outputs] = True
    return Layout(
        tokens=np.frombuffer(b"".join([*raw, bytes(TOKEN_BYTES)]), np.uint32).astype(np.int64),
        slots=slots,
        depths=at + spread[3],
        ends=spread[0],
        begins=spread[1],
        above=spread[2],
        fresh=fresh,
        queries=np.flatnonzero(wanted),
        last=last,
        outputs=outputs,
        prompts=prompts,
    )


def passes(layout: Layout, bounds: Bounds) -> Iterator[Pass]:
    """Cut a layout into forward passes, each to be run after those before it."""
    queries = layout.queries
    places = np.searchsorted(queries, layout.last)
    outputs = np.searchsorted(queries, layout.outputs)
    start = done = 0
    while start < queries.size:
        stop = min(start + bounds.positions, queries.size)
        lo = int(np.searchsorted(places, start))
        if stop < queries.size:
            # Better a little less than a prompt cut in two, whose rest would need a mask.
            ends = int(np.searchsorted(places, stop))
            whole = int(places[ends - 1]) + 1 if ends else 0
            if stop - whole <= (stop - start) // 8:
                stop = whole
        if done + bounds.outputs < outputs.size:
            stop = min(stop, max(start + 1, int(outputs[done + bounds.outputs])))
        first = int(places[lo]) - start + 1 if lo < places.size else 1
        width = _width(layout, queries[start:stop], first, bounds)
        while width == 0:
            stop = start + (stop - start + 1) // 2
            width = _width(layout, queries[start:stop], first, bounds)
        given = slice(done, int(np.searchsorted(outputs, stop)))
        yield _pass(layout, queries[start:stop], width, outputs[given] - start, given)
        start, done = stop, given.stop


def _used_runs(
    leases: Sequence[Lease],
) -> tuple[dict[Run, int], dict[Run | None, list[Run]]]:
    """How much of each run the prompts need, and the needed runs below each; None: the first."""
    lengths: dict[Run, int] = {}
    below: dict[Run | None, list[Run]] = {None: []}
    for lease, run in _ends(leases):
        reach = lease.end - run.start
        new = run not in lengths
        lengths[run] = max(reach, lengths.get(run, 0))
        while new:
            parent = run.parent
            assert parent is not None
            if parent.parent is None:
                below[None].append(run)
                break
            below.setdefault(parent, []).append(run)
            new = parent not in lengths
            lengths[parent] = parent.tokens.size
            run = parent
    return lengths, below


def _ends(leases: Sequence[Lease]) -> Iterator[tuple[Lease, Run]]:
    for lease in leases:
        yield lease, lease.last_run()


def _outputs(
    leases: Sequence[Lease], counts: Sequence[int] | None, places: Mapping[Run, int]
) -> tuple[Indices, Indices, Indices]:
    """The last positions of the prompts, those with logits, and whose these are, in preorder.

    `places` are those where the runs begin.
    """
    last = np.array(
        [places[run] + lease.end - 1 - run.start for lease, run in _ends(leases)], dtype=np.int64
    )
    if counts is None:
        order = np.argsort(last, kind="stable")
        return last[order], last[order], order
    parts, owners = [], []
    for number, (lease, run) in enumerate(_ends(leases)):
        end, left = lease.end, counts[number]
        while left:
            first = max(run.start, end - left)
            begin = places[run] + first - run.start
            parts.append(np.arange(begin, begin + end - first))
            owners.append(np.full(end - first, number))
            left -= end - first
            if left:
                assert run.parent is not None
                end, run = run.start, run.parent
    outputs, prompts = np.concatenate(parts), np.concatenate(owners)
    order = np.argsort(outputs, kind="stable")
    return np.sort(last), outputs[order], prompts[order]


def _width(layout: Layout, queries: Indices, first: int, bounds: Bounds) -> int:
    """The width of the cheapest rows, or 0 where none are within bounds.

    `first` is how many queries the first prompt has: prompts of one length suit rows of that width.
    """
    count = queries.size
    widths = [-(-count // (1 << halvings)) for halvings in range(count.bit_length())]
    if first < count:
        widths.append(first)
    widths = [width for width in widths if width <= bounds.widest]
    if bounds.width is not None:
        widths = [min(bounds.width, count)]
    ancestors = _ancestors(layout, queries)
    deepest = int(layout.depths[queries].max()) + 1
    best, least = 0, np.inf
    for width in widths:
        rows = -(-count // width)
        columns = _row_length(queries, ancestors, width)
        pairs, gathered = rows * width * columns, rows * columns
        shared = gathered if rows > 1 else gathered - deepest
        if (pairs <= bounds.pairs and shared <= bounds.columns) or count == 1:
            cost = pairs + _GATHER_COST * gathered + _POSITION_COST * rows * width
            if cost < least:
                best, least = width, cost
    return best


def _row_length(queries: Indices, ancestors: Indices, width: int) -> int:
    """How many columns each row of `width` queries is given.

    `ancestors` are how many a row sees besides what lies between its first query and its last, less
    the number of the first.
    """
    rest = (queries.size - 1) // width * width  # where the last row begins
    most = int(ancestors[rest] + queries[-1])
    if rest:
        most = max(most, int((ancestors[:rest:width] + queries[width - 1 : rest : width]).max()))
    return most if most == width else -(-most // ALIGNMENT) * ALIGNMENT


def _ancestors(layout: Layout, queries: Indices) -> Indices:
    found: Indices = layout.depths[queries] + 1 - queries
    return found


def _pass(layout: Layout, queries: Indices, width: int, outputs: Indices, given: slice) -> Pass:
    rows = -(-queries.size // width)
    filled = np.full(rows * width, queries[-1])
    filled[: queries.size] = queries
    placed = filled.reshape(rows, width)
    length = _row_length(queries, _ancestors(layout, queries), width)
    columns = np.full((rows, length), layout.blank)
    for row, first, final in zip(
        columns, placed[:, 0].tolist(), placed[:, -1].tolist(), strict=True
    ):
        at, stop = first, final + 1
        filled_to = 0
        while at >= 0:
            begin = int(layout.begins[at])
            row[filled_to : filled_to + stop - begin] = np.arange(begin, stop)
            filled_to += stop - begin
            at = int(layout.above[at])
            stop = at + 1
    writes = np.full(filled.size, SPARE)
    writes[: queries.size] = np.where(layout.fresh[queries], layout.slots[queries], SPARE)
    depths = layout.depths[layout.outputs[given]]
    return Pass(placed, columns, writes, outputs, layout.prompts[given], depths)
