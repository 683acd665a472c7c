"""Forward passes that compute each distinct token position of a batch once, and keep what they did.

The prompts' positions are packed into a few rows with a 4-dimensional attention mask, by which a
position sees its own ancestors in the trie of all prompts and nothing else; its `position_ids` are
its depth. Keys and values live in an arena with a slot for each position of the trie. The models
are stock ones: they find the arena behind the cache interface of transformers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from lmpool.backends.device import all_to_device, to_device
from lmpool.backends.engine import Measures, Tokens
from lmpool.backends.hf.graphs import PassGraphs, Shape
from lmpool.backends.hf.head import Head
from lmpool.backends.hf.packed_layout import (
    QUERY_BLOCK,
    RESERVED_SLOTS,
    Bounds,
    Indices,
    Layout,
    Pass,
    lay_out,
    leaves_one,
    padded,
    passes,
)
from lmpool.backends.trie import TokenTrie
from lmpool.backends.trie_runs import Lease, TrieStatistics

# Untyped on purpose: its annotations differ from release to release.
cache_utils: Any = importlib.import_module("transformers.cache_utils")

Take = Callable[[list[int], Indices, torch.Tensor], Callable[[], list[int]]]
"""Takes logits [outputs, vocab]: of which prompts' numbers they are, and after which of its tokens.

What it returns is called after the last forward pass, and tells whose logits are unusable.
"""

_PINNED_SHARE: Final = 0.5
"""The part of the slots that kept prefixes may take."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a position: `heads` keys of `key_dim`, values of `value_dim`."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Reach:
    """Which of the positions before it a position attends to; by default all.

    Those nearer than `window`, or those of its own chunk of `chunk` positions.
    """

    window: int | None = None
    chunk: int | None = None


class Arena:
    """The keys and values of every slot: a pair of tensors [slots, heads, dim] for each layer."""

    def __init__(self, shapes: Sequence[LayerShape], slots: int, device: torch.device) -> None:
        def block(shape: LayerShape, dim: int) -> torch.Tensor:
            made = torch.empty((slots, shape.heads, dim), dtype=shape.dtype, device=device)
            made[:RESERVED_SLOTS] = 0
            return made

        self.keys = [block(shape, shape.key_dim) for shape in shapes]
        self.values = [block(shape, shape.value_dim) for shape in shapes]
        self.nbytes = sum(block.nbytes for block in (*self.keys, *self.values))
        self.writes = torch.empty(0, dtype=torch.int64)
        self.columns: torch.Tensor | None = None
        self.claimed = 0
        """How long a model is told that its cache is. Masks and positions are given to it, so that
        it makes no difference; where it does, a trial shows it."""
        self.contiguous = False
        """Whether the model wants states in one piece: it costs a copy."""


class ArenaLayer(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """One layer's part of the arena, as transformers wants to see it."""

    is_sliding = False

    def __init__(self, arena: Arena, layer: int) -> None:
        super().__init__()
        self._arena = arena
        self._layer = layer
        self.is_initialized = True

    def lazy_initialization(self, *_: object) -> None: ...

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the new positions' states; return those of all the columns that the rows see."""
        arena, layer = self._arena, self._layer
        columns = arena.columns
        found = []
        for kept, new in ((arena.keys[layer], keys), (arena.values[layer], values)):
            kept.index_copy_(0, arena.writes, new.transpose(1, 2).flatten(0, 1))
            if columns is None:
                found.append(new)
            else:
                seen = kept.index_select(0, columns.flatten())
                states = seen.unflatten(0, columns.shape).transpose(1, 2)
                found.append(states.contiguous() if arena.contiguous else states)
        return found[0], found[1]

    # What models ask of a cache to place new tokens and to mask them: here they say both.
    def get_seq_length(self) -> int:
        return self._arena.claimed

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None: ...


class PackedForward:
    """Computes the logits after prompts, and keeps their keys and values in `slots` slots."""

    def __init__(
        self,
        head: Head,
        shapes: Sequence[LayerShape],
        *,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        bounds: Bounds,
        head_rows: int = 128,
    ) -> None:
        self._head = head
        self.device = device
        self._dtype = dtype
        self.bounds = bounds
        self.head_rows = head_rows
        self.slots = slots
        self._trie = TokenTrie(slots)
        self._arena = Arena(shapes, slots + RESERVED_SLOTS, device)
        layers = [ArenaLayer(self._arena, layer) for layer in range(len(shapes))]
        self._cache = cache_utils.Cache(layers=layers)
        self._prefixes: dict[bytes, Lease] = {}
        self.query_block = QUERY_BLOCK if device.type == "cuda" else None
        self.graphs: PassGraphs | None = None
        """Where passes are recorded, once it is known that they may be."""
        self.reach: Reach | Mapping[str, Reach] = Reach()
        """That of every layer, or that of each kind of layer, by its name in the model's config."""

    def run(
        self,
        prompts: Sequence[Tokens],
        take: Take,
        adapter: str | None = None,
        counts: Sequence[int] | None = None,
    ) -> list[int]:
        """Give `take` the logits after each of several distinct prompts, in parts.

        `adapter` is the one that the model uses now: it finds only what it computed itself. With
        `counts` they are those after each of so many of a prompt's last tokens, and the head gives
        a block of `head_rows` at a time.
        Returns the numbers of the prompts that could not be computed: those for which there are too
        few slots, and those that `take` refused.
        """
        waiting = list(range(len(prompts)))
        if sum(prompt.size for prompt in prompts) > self.slots // 2:
            # What shares a prefix should be in the slots at the same time.
            waiting.sort(key=lambda i: prompts[i].astype(">u4").tobytes())
        left: list[int] = []
        while waiting:
            leases: list[Lease] = []
            try:
                for number in waiting:
                    lease = self._trie.lease(prompts[number], adapter)
                    if lease is None:
                        break
                    leases.append(lease)
                batch, waiting = waiting[: len(leases)], waiting[len(leases) :]
                if leases:
                    wanted = None if counts is None else [counts[i] for i in batch]
                    graphs = self.graphs if adapter is None else None
                    refused = self._compute(leases, batch, take, wanted, graphs)
                    left.extend(refused)
                    # A state that is no number is in all that shared a row with it.
                    if not refused:
                        self._trie.commit(leases)
                else:
                    left.append(waiting.pop(0))
            finally:
                self._trie.discard(leases)
                self._trie.release(leases)
        return left

    def keep_prefix(self, prompt: Tokens) -> bool:
        """Compute a prefix and never evict it; False where there are too few slots for that."""
        name = prompt.tobytes()
        if name in self._prefixes:
            return True
        pinned = self._trie.statistics().pinned
        if pinned + prompt.size > self.slots * _PINNED_SHARE:
            return False
        if self.run([prompt], lambda *_: list):
            return False
        lease = self._trie.lease(prompt)
        assert lease is not None
        self._trie.narrow(lease)
        self._prefixes[name] = lease
        return True

    def forget(self, adapter: str) -> None:
        """Forget what was computed with an adapter, which was put into the model or taken out."""
        self._trie.forget(adapter)
        if self.graphs is not None:
            self.graphs.clear()

    def want_contiguous(self) -> None:
        """Give the model keys and values in one piece."""
        self._arena.contiguous = True

    @contextlib.contextmanager
    def on_trial(self, *, width: int | None = None, claimed: int = 0) -> Iterator[None]:
        """Compute in rows of this `width`, with a cache `claimed` that long, and forget it all."""
        bounds = self.bounds
        self.bounds = dataclasses.replace(bounds, width=width)
        self._arena.claimed = claimed
        try:
            yield
        finally:
            self.bounds, self._arena.claimed = bounds, 0
            self.clear()

    def clear(self) -> None:
        """Forget all that is kept, prefixes too."""
        self._prefixes.clear()
        self._trie.clear()

    @property
    def kv_cache_bytes(self) -> int:
        """The memory in which keys and values are kept; it is taken once and never grows."""
        return self._arena.nbytes

    def measures(self, besides: int) -> Measures:
        """What was computed, `besides` elsewhere, and what is kept."""
        trie = self._trie
        return Measures(trie.added + besides, trie.held, trie.slots, trie.evicted)

    def statistics(self) -> TrieStatistics:
        """How full the slots are, and what they were used for."""
        return self._trie.statistics()

    def check(self) -> None:
        """Raise `AssertionError` where an invariant of the trie is broken."""
        self._trie.check()

    def _compute(
        self,
        leases: Sequence[Lease],
        numbers: Sequence[int],
        take: Take,
        counts: Sequence[int] | None,
        graphs: PassGraphs | None,
    ) -> list[int]:
        layout = lay_out(leases, counts)
        bounds, rows = self.bounds, None
        if counts is not None:  # what bounds the logits is the block
            bounds, rows = dataclasses.replace(bounds, outputs=bounds.positions), self.head_rows
        if counts is not None or self._head.gives_states:
            graphs = None
        taken: list[Callable[[], list[int]]] = []
        with torch.inference_mode():
            for part in passes(layout, bounds):
                for chosen, logits in self._forward(layout, part, rows, graphs):
                    owners = [numbers[i] for i in part.prompts[chosen]]
                    taken.append(take(owners, part.depths[chosen], logits))
                    del logits  # before the next block is computed
        return list(dict.fromkeys(number for finish in taken for number in finish()))

    def _forward(
        self, layout: Layout, part: Pass, rows: int | None, graphs: PassGraphs | None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """The logits of a pass, in blocks of `rows`; None: all at once."""
        places, which = np.unique(part.outputs, return_inverse=True)
        begin = 0
        for logits in self._blocks(layout, part, places, rows, graphs):
            first, last = np.searchsorted(which, (begin, begin + len(logits)))
            if last - first == len(logits):
                yield slice(first, last), logits
            else:
                # Several prompts want the same: each is given its own.
                for at in range(first, last, rows or last):
                    some = slice(at, min(at + (rows or last), last))
                    yield some, logits[to_device(which[some] - begin, self.device)]
            begin += len(logits)
            del logits  # before the next block is computed

    def _blocks(
        self,
        layout: Layout,
        part: Pass,
        places: Indices,
        rows: int | None,
        graphs: PassGraphs | None,
    ) -> Iterator[torch.Tensor]:
        """The logits at the distinct outputs of a pass, `places`; of one that has none, nothing."""
        shape = None if graphs is None else graphs.fit(part, self.bounds.widest)
        if graphs is not None and shape is not None:
            yield from self._recorded(graphs, shape, layout, part)
            return
        queries = part.queries
        # Rows of new beginnings need nothing that is kept, and a plainly causal mask where each of
        # them is one prompt's.
        begins = np.array_equal(part.columns, queries) and bool(layout.fresh[queries].all())
        masked = (
            not begins
            or bool(self._arena.claimed)
            or not (layout.depths[queries] == np.arange(queries.shape[1])).all()
        )
        lines, width, columns = part.shape
        if masked and leaves_one(width, self.query_block):
            part, begins = padded(part, (lines, width + 1, columns), layout.blank), False
            places = np.unique(part.outputs)
        wanted = places if places.size else np.zeros(1, np.int64)
        arrays = self._arrays(layout, part, wanted, gathered=not begins, masked=masked)
        at = dict(zip(arrays, all_to_device([*arrays.values()], self.device), strict=True))
        blocks = self._head.blocks(at["wanted"], rows or wanted.size, **self._inputs(at))
        for logits in blocks:
            if places.size:
                yield logits
            del logits  # before the next block is computed

    def _recorded(
        self, graphs: PassGraphs, shape: Shape, layout: Layout, part: Pass
    ) -> Iterator[torch.Tensor]:
        """The same of a pass that is recorded, or is to be: in a shape that others have, too."""
        part = padded(part, shape[:3], layout.blank)
        places = np.unique(part.outputs)
        wanted = np.zeros(shape.outputs, np.int64)
        wanted[: places.size] = places
        positions = shape.rows * shape.width
        logits = graphs.logits(self._arrays(layout, part, wanted), self._logits, positions)
        if places.size:
            yield logits[: places.size]

    def _arrays(
        self,
        layout: Layout,
        part: Pass,
        wanted: Indices,
        *,
        gathered: bool = True,
        masked: bool = True,
    ) -> dict[str, Indices]:
        """What a pass is computed of, int64: of its queries and of the columns that they see, as
        far as these are `gathered` and `masked`."""
        queries, columns = part.queries, part.columns
        arrays = {
            "tokens": layout.tokens[queries],
            "depths": layout.depths[queries],
            "writes": part.writes,
            "wanted": wanted,
        }
        if gathered:
            arrays["slots"] = layout.slots[columns]
        if masked:
            arrays |= {"queries": queries, "columns": columns, "ends": layout.ends[columns]}
            if self.reach != Reach():
                arrays["seen"] = layout.depths[columns]
        return arrays

    def _logits(self, at: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._head.logits(at["wanted"], **self._inputs(at))

    def _inputs(self, at: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What the model is called with; the arena is told where it writes and what is seen."""
        self._arena.writes, self._arena.columns = at["writes"], at.get("slots")
        return {
            "input_ids": at["tokens"],
            "position_ids": at["depths"],
            "attention_mask": self._mask(at) if "ends" in at else None,
            self._head.cache_name: self._cache,
            "use_cache": True,
        }

    def _mask(self, at: Mapping[str, torch.Tensor]) -> torch.Tensor | dict[str, torch.Tensor]:
        """[rows, 1, width, columns]: 0 where a position sees a column, else the least number.

        Where layers differ in what they see, a mask for each kind of layer.
        """
        # A CPU compares numbers into numbers many times faster than into bools; float32 tells more
        # positions apart than there are slots.
        queries = at["queries"].float()[:, :, None]
        columns = at["columns"].float()[:, None, :]
        ends = at["ends"].float()[:, None, :]
        shape = (*at["queries"].shape, at["columns"].shape[1])
        unrelated = torch.empty(shape, dtype=self._dtype, device=self.device)
        ended = torch.empty_like(unrelated)
        torch.gt(columns, queries, out=unrelated)
        torch.ge(queries, ends, out=ended)
        torch.maximum(unrelated, ended, out=unrelated)
        del ended  # the mask that is made takes as much

        def mask(reach: Reach) -> torch.Tensor:
            hidden = unrelated
            if reach != Reach():
                depths, seen = at["depths"][:, :, None], at["seen"][:, None, :]
                if reach.window is not None:
                    hidden = torch.maximum(hidden, (depths - seen >= reach.window).to(hidden))
                if reach.chunk is not None:
                    apart = depths // reach.chunk != seen // reach.chunk
                    hidden = torch.maximum(hidden, apart.to(hidden))
            return (hidden * torch.finfo(self._dtype).min)[:, None]

        if isinstance(self.reach, Reach):
            return mask(self.reach)
        return {kind: mask(reach) for kind, reach in self.reach.items()}
