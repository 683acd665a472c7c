"""Every captured request's full row of logits, taken where vLLM's sampler passes it.

`CaptureProcessor` is a logits processor for both of vLLM's model runners. A request is captured
when its sampling parameters carry an id; the others are not touched:

    SamplingParams(max_tokens=1, extra_args={"lmpool_capture": "some id"})

It is registered as an entry point of the group ``vllm.logits_processors``, so every vLLM in an
environment with lmpool has it. What it captured is read with the methods that `CapturedRows` adds
to vLLM's workers (``worker_extension_cls="lmpool.backends.vllm.capture.CapturedRows"``):

    llm.collective_rpc("lmpool_take_rows", args=(["some id"],))

A request of several tokens leaves the row of its last one. Rows that nobody takes are dropped, the
oldest first, when there are more than `MOST_ROWS`.

A request with an id under ``lmpool_watch`` leaves a row of no columns, and that only where logits
of any of its tokens were not finite: what was sampled from them means nothing.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor import LogitsProcessor as ProcessorV1

from lmpool.backends.vllm import internals

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ProcessorV2
except (
    ImportError
):  # a release without the second model runner, whose capture needs the first alone
    ProcessorV2 = object

logger = logging.getLogger(__name__)

CAPTURE: Final = "lmpool_capture"
"""The key of `SamplingParams.extra_args` whose value, a str or an int, names the row."""

WATCH: Final = "lmpool_watch"
"""The same, of a request whose logits are watched."""

MOST_ROWS: Final = 16_384
"""Rows kept for whoever asks for them: more than a server has requests in flight."""

UNREAD_STEPS: Final = 64
"""Steps whose watched logits may wait on the host: their copies have long ended by then."""

CaptureId = int | str
Rows = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
Asked = tuple[str, CaptureId]
"""`CAPTURE` or `WATCH`, and the id."""
Taken = tuple[list[CaptureId], Rows, npt.NDArray[np.float32]]
"""Ids, their rows [ids, vocab] and a float32 for each. Rows are float32 log-probabilities beside
their largest, or the bits of bfloat16 logits beside their logsumexp."""
Copied = tuple[list[CaptureId], int, str, int, list[float]]
"""The same with the rows elsewhere: ids, offset in bytes, dtype, vocabulary, the float32s."""


class HostCopy:
    """Tensors on their way to the host, from a GPU in a stream of its own."""

    def __init__(self, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream | None) -> None:
        self._tensors = tensors
        self._done: torch.cuda.Event | None = None
        if stream is None:
            return
        stream.wait_stream(torch.cuda.current_stream(tensors[0].device))
        with torch.cuda.stream(stream):
            self._tensors = [_to_host(tensor) for tensor in tensors]
            self._done = torch.cuda.Event()
            self._done.record(stream)
        for tensor in tensors:
            tensor.record_stream(stream)

    def read(self) -> list[npt.NDArray[Any]]:
        """The tensors as arrays. Waits for the copy."""
        if self._done is not None:
            self._done.synchronize()
            self._done = None
        return [tensor.numpy() for tensor in self._tensors]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    # Pinned memory comes from torch's cache of it: after the first steps nothing is allocated.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class RowBlock:
    """The rows captured in one step, on their way to the host in one copy.

    `logits` is float32 [rows, vocab]; it is not kept, and may be written as soon as the
    constructor returns.
    """

    def __init__(
        self, logits: torch.Tensor, *, bfloat16: bool, stream: torch.cuda.Stream | None
    ) -> None:
        self.bfloat16 = bfloat16
        self._wide: torch.Tensor | None = None
        if bfloat16:
            narrow = logits.to(torch.bfloat16)
            self._wide = logits.clone()
            scale = torch.logsumexp(logits, dim=-1)
            # One number in the same copy: nothing waits for the device here.
            exact = (narrow == logits).all().to(torch.float32)
            scale = torch.cat([scale, exact.reshape(1)])
            rows = narrow.view(torch.int16)
        else:
            rows = torch.log_softmax(logits, dim=-1)
            scale = rows.amax(dim=-1)
        self._copy = HostCopy([rows, scale], stream)

    def read(self) -> tuple[Rows, npt.NDArray[np.float32]]:
        """The rows and their scales on the host. Waits for the copy."""
        rows, scale = self._copy.read()
        if not self.bfloat16:
            return rows, scale
        if scale[-1] == 1.0:
            self._wide = None
            return rows.view(np.uint16), scale[:-1]
        assert self._wide is not None
        wide = torch.log_softmax(self._wide, dim=-1)
        self.bfloat16, self._wide = False, None
        self._copy = HostCopy([wide.cpu(), wide.amax(dim=-1).cpu()], None)
        return self.read()


class RowStore:
    """Captured rows by id, until they are taken."""

    def __init__(self, most: int = MOST_ROWS) -> None:
        self._most = most
        self._rows: dict[CaptureId, tuple[RowBlock, int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, ids: Iterable[CaptureId], block: RowBlock) -> None:
        """Keep a block's rows, the i-th as the i-th id's; the last one of an id counts."""
        for position, name in enumerate(ids):
            self._rows.pop(name, None)
            self._rows[name] = (block, position)
        while len(self._rows) > self._most:
            del self._rows[next(iter(self._rows))]

    def forget(self, ids: Iterable[CaptureId]) -> None:
        """Drop rows, where they are."""
        for name in ids:
            self._rows.pop(name, None)

    def take(self, ids: Iterable[CaptureId]) -> list[Taken]:
        """The rows of `ids`, by block; ids without a row are left out."""
        found: dict[RowBlock, tuple[list[CaptureId], list[int]]] = {}
        for name in ids:
            if name in self._rows:
                block, position = self._rows.pop(name)
                names, positions = found.setdefault(block, ([], []))
                names.append(name)
                positions.append(position)
        taken = []
        for block, (names, positions) in found.items():
            rows, scale = block.read()
            if positions != list(range(rows.shape[0])):
                rows, scale = rows[positions], scale[positions]
            taken.append((names, rows, scale))
        return taken


class WatchedLogits:
    """The watched requests whose logits were not finite, until they are taken."""

    def __init__(self, most: int = MOST_ROWS) -> None:
        self._most = most
        self._steps: deque[tuple[list[CaptureId], HostCopy]] = deque()
        self._unsound: dict[CaptureId, None] = {}

    def put(self, ids: list[CaptureId], largest: HostCopy) -> None:
        """See the largest logits of some requests, [ids]: no number and no bound is lost there."""
        self._steps.append((ids, largest))
        if len(self._steps) > UNREAD_STEPS:
            self._read()

    def _read(self) -> None:
        ids, copy = self._steps.popleft()
        (largest,) = copy.read()
        self._unsound.update((ids[i], None) for i in np.flatnonzero(~np.isfinite(largest)))
        while len(self._unsound) > self._most:
            del self._unsound[next(iter(self._unsound))]

    def take(self, ids: Iterable[CaptureId]) -> list[CaptureId]:
        """Those of `ids` whose logits were not finite at any time."""
        while self._steps:
            self._read()
        found = [name for name in ids if name in self._unsound]
        for name in found:
            del self._unsound[name]
        return found


class CaptureProcessor(ProcessorV1, ProcessorV2):  # type: ignore[misc]
    """Captures rows in whichever of vLLM's model runners loads it.

    The V1 runner makes it with a device and whether to pin memory, and speaks of batch positions;
    the V2 runner with its request states, and speaks of slots. `unfinished`, where it is set, tells
    which positions of the V1 runner's batch are prefills that go on: their rows are nobody's.
    Without it they are overwritten by the row of the whole prompt, which comes last.
    """

    def __init__(self, vllm_config: Any, *runner: Any) -> None:
        self._states: Any = runner[0] if len(runner) == 1 else None
        self._asked: dict[int, Asked] = {}
        """By batch position (V1) or request slot (V2)."""
        self._bfloat16 = vllm_config.model_config.dtype == torch.bfloat16
        self._stream: torch.cuda.Stream | None = None
        self.unfinished: Callable[[], npt.NDArray[np.bool_]] | None = None
        self.before_sampling: Callable[[], None] | None = None
        self.rows = RowStore()
        self.watched = WatchedLogits()
        # Every rank of a tensor-parallel group sees all logits; one of them publishes.
        self.publishes = _is_publisher()

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse what cannot be captured, when the request comes."""
        asked = _asked(sampling_params)
        if asked is None:
            return
        key, name = asked
        if isinstance(name, bool) or not isinstance(name, int | str):
            raise ValueError(f"extra_args[{key!r}]={name!r:.100}: a str or an int expected")
        if sampling_params.n != 1:
            raise ValueError(f"extra_args[{key!r}] with n={sampling_params.n}: write n=1")

    def is_argmax_invariant(self) -> bool:
        # Invariant processors are left out where all is greedy, and run after the temperature.
        return False

    # The V1 runner.

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow what was removed from, added to and moved within the runner's batch."""
        if batch_update is None:
            return
        places = self._asked
        for position in batch_update.removed:
            places.pop(position, None)
        for position, params, _prompt, _output in batch_update.added:
            self._assign(position, params)
        for first, second, direction in batch_update.moved:
            moved, displaced = places.pop(first, None), places.pop(second, None)
            if moved is not None:
                places[second] = moved
            if direction == MoveDirectionality.SWAP and displaced is not None:
                places[first] = displaced

    # The V2 runner.

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Follow a request into its slot; whether the sampler must call `apply` for it."""
        return self._assign(req_idx, sampling_params)

    def _assign(self, place: int, params: Any) -> bool:
        asked = _asked(params) if self.publishes else None
        if asked is None:
            self._asked.pop(place, None)
            return False
        self._asked[place] = asked
        return True

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Keep the rows of captured requests; `logits` pass unchanged."""
        if self.before_sampling is not None:
            self.before_sampling()
        if self._asked:
            found = self._by_position(logits) if ctx is None else self._by_slot(logits, ctx)
            found.sort()
            captured = [(row, name) for row, (key, name) in found if key == CAPTURE]
            watched = [(row, name) for row, (key, name) in found if key == WATCH]
            if self._stream is None and logits.is_cuda:
                self._stream = torch.cuda.Stream(logits.device)
            if captured:
                rows = _select(logits, [row for row, _ in captured])
                block = RowBlock(rows.float(), bfloat16=self._bfloat16, stream=self._stream)
                self.rows.put((name for _, name in captured), block)
            if watched:
                rows = _select(logits, [row for row, _ in watched])
                largest = HostCopy([rows.amax(dim=-1).float()], self._stream)
                self.watched.put([name for _, name in watched], largest)
        return logits

    def _by_position(self, logits: torch.Tensor) -> list[tuple[int, Asked]]:
        if self.unfinished is None:
            return list(self._asked.items())
        unfinished = self.unfinished()
        if len(unfinished) != logits.shape[0]:
            return self._refuse(logits, len(unfinished))
        return [(i, asked) for i, asked in self._asked.items() if not unfinished[i]]

    def _by_slot(self, logits: torch.Tensor, ctx: Any) -> list[tuple[int, Asked]]:
        slots = ctx.idx_mapping_np
        if len(slots) != logits.shape[0]:
            return self._refuse(logits, len(slots))
        lengths, prefills = ctx.seq_lens_upper_bound_np, self._states.prefill_len.np
        return [
            (row, self._asked[slot])
            for row, slot in enumerate(slots.tolist())
            if slot in self._asked and lengths[row] >= prefills[slot]
        ]

    def _refuse(self, logits: torch.Tensor, requests: int) -> list[tuple[int, Asked]]:
        # Better no row than another request's.
        logger.error(
            "%d rows of logits for %d requests (speculative decoding?): none is captured",
            logits.shape[0],
            requests,
        )
        return []


def _asked(params: Any) -> Asked | None:
    extra = params.extra_args or {}
    return next(((key, extra[key]) for key in (CAPTURE, WATCH) if extra.get(key) is not None), None)


def _select(logits: torch.Tensor, positions: list[int]) -> torch.Tensor:
    if positions == list(range(logits.shape[0])):
        return logits
    index = torch.tensor(positions, dtype=torch.int64, pin_memory=logits.is_cuda)
    return logits.index_select(0, index.to(logits.device, non_blocking=True))


def _is_publisher() -> bool:
    """Whether this is the first of the ranks that see logits."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return True
    return bool(
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_pp_group().is_last_rank
    )


class CapturedRows:
    """What vLLM's workers are extended by: reading captured rows, wherever the worker runs."""

    model_runner: Any

    def lmpool_attach(self) -> str | None:
        """Prepare for capturing; the model runner's generation, None where it cannot capture."""
        return internals.attach(self.model_runner)

    def lmpool_take_rows(
        self, ids: Sequence[CaptureId], forget: Sequence[CaptureId] = ()
    ) -> list[Taken] | None:
        """Give out rows, and drop those of `forget`; None where this rank does not publish."""
        capture = internals.find_capture(self.model_runner)
        if capture is None or not capture.publishes:
            return None
        capture.rows.forget(forget)
        capture.watched.take(forget)
        taken = capture.rows.take(ids)
        if unsound := capture.watched.take(ids):
            none = np.empty((len(unsound), 0), np.float32)
            taken.append((unsound, none, np.full(len(unsound), np.nan, np.float32)))
        return taken

    def lmpool_copy_rows(
        self, path: str, ids: Sequence[CaptureId], forget: Sequence[CaptureId] = ()
    ) -> list[Copied] | None:
        """The same, with the rows copied into the mapped file `path`, one block after the other."""
        taken = self.lmpool_take_rows(ids, forget)
        if taken is None:
            return None
        memory = _mapped(path)
        copied: list[Copied] = []
        offset = 0
        for names, rows, scale in taken:
            size = rows.nbytes
            memory[offset : offset + size] = rows.reshape(-1).view(np.uint8)
            copied.append((names, offset, rows.dtype.str, rows.shape[1], scale.tolist()))
            offset += size
        return copied


@functools.cache  # the file has a name at the first call only
def _mapped(path: str) -> npt.NDArray[np.uint8]:
    return np.memmap(path, np.uint8, mode="r+")
