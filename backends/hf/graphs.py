"""Forward passes as CUDA graphs, where to launch their kernels takes a GPU's host longer than the
GPU takes to run them: several times as long, of small ones.

A graph repeats what it recorded, for inputs of the same shapes at the same places. So a pass is
padded to a shape that others have, too, and recorded when that has come up often enough; a recorded
pass is one copy to the device and one launch.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from lmpool.backends.device import all_to_device, refill
from lmpool.backends.hf.packed_layout import ALIGNMENT, Indices, Pass
from lmpool.garbage import uncollected

logger = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]
Compute = Callable[[Tensors], torch.Tensor]
"""A forward pass: from what it is computed of to logits [outputs, vocab]."""
Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what a function has the device do, once it has run; what it returns does it again."""
Lags = Callable[[Callable[[], None]], bool]
"""Whether the device waits for its host when a function launches what it does."""
Key = tuple[tuple[str, tuple[int, ...]], ...]

SURE_POSITIONS: Final = 1_024
"""Of as many the kernels take less than their launches, whatever the model."""
MOST_POSITIONS: Final = 4_096
"""Of more than those they may take less: that is tried."""
LAGGING: Final = 1.25
"""Of a pass that takes no longer than this times its launches the device waits for its host."""
MOST_PAIRS: Final = 1 << 22
MOST_COLUMNS: Final = 1 << 15
MOST_OUTPUTS: Final = 64
MOST_GRAPHS: Final = 64
RECORDED_AFTER: Final = 3
"""Passes of one shape: to record one takes about as long as three."""
STALE_AFTER: Final = 1_000
"""Passes after which a graph that was not used may give way to another."""
_MOST_NUMBERS: Final = 4 * MOST_POSITIONS + 4 * MOST_COLUMNS + MOST_OUTPUTS
"""What a pass is computed of at most: four numbers of each position, and of each column."""


class Shape(NamedTuple):
    """Of a pass: `rows` of `width` positions that see `columns`, and of `outputs` the logits."""

    rows: int
    width: int
    columns: int
    outputs: int


@dataclass(slots=True, eq=False)
class _Graph:
    inputs: torch.Tensor
    """Where it reads its numbers, one after another: a part of what all read."""
    logits: torch.Tensor
    """Where it puts its logits: a part of where all do."""
    replay: Callable[[], None]
    used: int


class PassGraphs:
    """The graphs of one model.

    `record` is `CudaRecorder`'s, or another's in tests; `difference` tells how far logits are from
    those that a pass gave that was not replayed, where that is more than rounding. With `lags`,
    larger passes are recorded as well, as long as it finds that worth it.
    """

    def __init__(
        self,
        record: Record,
        difference: Callable[[torch.Tensor, torch.Tensor], float | None],
        device: torch.device,
        lags: Lags | None = None,
    ) -> None:
        self._record = record
        self._difference = difference
        self._device = device
        self._lags = lags
        self._most = SURE_POSITIONS if lags is None else MOST_POSITIONS
        self._lagging = SURE_POSITIONS
        """Passes of up to so many positions are worth it, as is known; between these two none was
        tried."""
        self._graphs: OrderedDict[Key, _Graph] = OrderedDict()
        """Those that were used least lately first."""
        self._seen: Counter[Key] = Counter()
        self._passes = 0
        self._pauses_until = 0
        # One graph runs at a time, in one stream: all read and write the same memory.
        self._inputs = torch.zeros(_MOST_NUMBERS, dtype=torch.int64, device=device)
        self._logits: torch.Tensor | None = None
        self.reason = ""
        """Why nothing is recorded any more."""

    def __len__(self) -> int:
        return len(self._graphs)

    def fit(self, part: Pass, widest: int) -> Shape | None:
        """The shape in which a pass is recorded; None where it is too large, its rows would be
        longer than the `widest` that may be, or nothing is recorded."""
        if self.reason:
            return None
        had, narrow, seen = part.shape
        rows, width = _rounded(had), _rounded(narrow)
        columns = _rounded(-(-seen // ALIGNMENT) * ALIGNMENT)
        outputs = _rounded(max(1, part.outputs.size))
        if (
            width > max(narrow, widest)
            or rows * width > self._most
            or rows * width * columns > MOST_PAIRS
            or rows * columns > MOST_COLUMNS
            or outputs > MOST_OUTPUTS
        ):
            return None
        return Shape(rows, width, columns, outputs)

    def logits(
        self, arrays: Mapping[str, Indices], compute: Compute, positions: int = 0
    ) -> torch.Tensor:
        """The logits [outputs, vocab] that `compute` gives of these arrays on the device, of so
        many positions."""
        key = tuple((name, array.shape) for name, array in arrays.items())
        self._passes += 1
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.used = self._passes
            refill(graph.inputs, [*arrays.values()])
            graph.replay()
            return graph.logits.clone()  # the next one's come to the same place
        tensors = all_to_device([*arrays.values()], self._device)
        at = dict(zip(arrays, tensors, strict=True))
        logits = compute(at) if positions <= self._lagging else self._judged(at, compute, positions)
        if positions > self._most:
            return logits
        self._seen[key] += 1
        if self._seen[key] >= RECORDED_AFTER and self._may_record():
            self._try(key, arrays, compute, logits, positions)
        elif len(self._seen) > 16 * MOST_GRAPHS:
            self._seen.clear()
        return logits

    def clear(self) -> None:
        """Forget them all: the model is another."""
        self._graphs.clear()
        self._seen.clear()

    def _may_record(self) -> bool:
        if self.reason or self._passes < self._pauses_until:
            return False
        if len(self._graphs) < MOST_GRAPHS:
            return True
        key, oldest = next(iter(self._graphs.items()))
        if self._passes - oldest.used < STALE_AFTER:
            return False
        del self._graphs[key]
        self._seen.pop(key, None)
        return True

    def _judged(self, at: Tensors, compute: Compute, positions: int) -> torch.Tensor:
        """The logits of a pass, of which it is found out whether the device waits for its host in
        it."""
        assert self._lags is not None
        logits = compute(at)

        def run() -> None:
            compute(at)

        # Once more: what libraries set up for the first pass of a shape would count as launching.
        if self._lags(run):
            self._lagging = positions
        else:
            self._most = positions - 1
        return logits

    def _try(
        self,
        key: Key,
        arrays: Mapping[str, Indices],
        compute: Compute,
        right: torch.Tensor,
        positions: int,
    ) -> None:
        """Record a pass, and keep it if it gives again what it gave."""
        try:
            graph = self._recorded(arrays, compute, right)
            graph.replay()
            difference = self._difference(graph.logits, right)
            if difference is None:
                self._graphs[key] = graph
                return
            reason = f"a graph gave other logits than its pass, by {difference:.2g}"
        except torch.OutOfMemoryError as error:
            if positions <= SURE_POSITIONS:  # there may be some later
                self._pauses_until = self._passes + STALE_AFTER
                self.clear()
                return
            reason = str(error)
        except Exception as error:  # a model that asks the device in between cannot be recorded
            reason = f"{type(error).__name__}: {error}"
        if positions > SURE_POSITIONS:  # those that are smaller go on
            self._most = min(self._most, positions - 1)
            what = f"as large as one of {positions:,} positions"
        else:
            self.reason, what = reason, "any more"
            self.clear()
        logger.info("no forward pass is recorded as a CUDA graph %s: %s", what, reason)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # raises where the device is lost with it

    def _recorded(
        self, arrays: Mapping[str, Indices], compute: Compute, right: torch.Tensor
    ) -> _Graph:
        sizes = [array.size for array in arrays.values()]
        if self._logits is None:
            self._logits = right.new_empty((MOST_OUTPUTS, right.shape[1]))
        inputs = self._inputs[: sum(sizes)]
        parts = zip(arrays.items(), inputs.split(sizes), strict=True)
        tensors = {name: part.view(array.shape) for (name, array), part in parts}
        logits = self._logits[: len(right)]

        def run() -> None:
            logits.copy_(compute(tensors))

        refill(inputs, [*arrays.values()])
        return _Graph(inputs, logits, self._record(run), self._passes)


class CudaRecorder:
    """Records CUDA graphs, which share the memory that they need in between."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        # Memory that no graph owns any more cannot be shared by another.
        self._owner = torch.cuda.CUDAGraph()
        with (
            warnings.catch_warnings(action="ignore"),  # that it is empty
            torch.cuda.stream(self._stream),
            self._capturing(self._owner),
        ):
            pass

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what `run` launches. Raises what it raises, and where it waits for the device."""
        graph = torch.cuda.CUDAGraph()
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            # What libraries set up at first cannot be recorded; and who waits for the device is to
            # be found out before: a recording that is broken off leaves torch's allocator in it.
            with _no_waiting():
                run()
            with self._capturing(graph):
                run()
        computing.wait_stream(self._stream)
        return graph.replay

    def lags(self, run: Callable[[], None]) -> bool:
        """Whether the device waits for its host when `run` launches what it does."""
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        run()
        launched = time.perf_counter() - began
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - began <= LAGGING * launched

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        # What a collection frees may need the device, which takes no such calls meanwhile; other
        # threads' calls, such as freeing a row's pinned memory, are theirs.
        with uncollected():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with suppress(Exception):  # that it was broken off: the first error says more
                    self._end(graph)
                raise
            self._end(graph)

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except BaseException:
            end_allocating = getattr(torch._C, "_cuda_endAllocateToPool", None)
            if end_allocating is not None:
                end_allocating(torch.cuda.current_device(), self._pool)
            raise


@contextmanager
def _no_waiting() -> Iterator[None]:
    """What waits for the device raises `RuntimeError`."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # that it does not find all
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _rounded(size: int) -> int:
    """The next of 1, 2, 4, 8, 16, 20, 24, 28, 32, 40, ...: four to an octave from 16 on."""
    step = 1 << max(0, (size - 1).bit_length() - 3)
    return 1 << (size - 1).bit_length() if size <= 16 else -(-size // step) * step
