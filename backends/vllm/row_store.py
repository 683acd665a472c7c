"""What was captured of rows, from the sampler until somebody takes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lmpool.backends.device import to_device
from lmpool.backends.small_answers import reduce_logits

MOST_BYTES: Final = 2 << 30
"""Of rows kept for whoever asks for them."""

MOST_UNSOUND: Final = 16_384
"""Watched requests kept whose logits were not finite."""

STEP: Final = "/"
"""Between the name of a request and the number of a step, in the name of what the step left."""

UNREAD_STEPS: Final = 64
"""Steps whose watched logits may wait on the host: their copies have long ended by then."""

Rows = npt.NDArray[Any]
Taken = tuple[list[str], Rows, npt.NDArray[np.float32]]
"""Names, what there is of them [names, ...] and a float32 for each, which is not finite where there
is no row: float32 [vocab] log-probabilities beside 0, uint16 [vocab], the bits of bfloat16 logits,
beside their logsumexp, or the int32 that `small_answers.reduce_logits` made."""


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
    constructor returns. Where the block `owned` is nobody else's, it is kept, and may be written
    here. `nbytes` is what the block takes until it is read.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        *,
        bfloat16: bool,
        stream: torch.cuda.Stream | None,
        owned: bool = False,
    ) -> None:
        self.bfloat16 = bfloat16
        self._wide: torch.Tensor | None = None
        if bfloat16:
            narrow = logits.to(torch.bfloat16)
            self._wide = logits if owned else logits.clone()
            scale = torch.logsumexp(logits, dim=-1)
            # One number in the same copy: nothing waits for the device here.
            exact = (narrow == logits).all().to(torch.float32)
            scale = torch.cat([scale, exact.reshape(1)])
            rows = narrow.view(torch.int16)
        else:
            # Memory that the machine has to give anew takes as long as the exponentials.
            in_place = owned and not logits.is_cuda and logits.is_contiguous()
            rows = torch.log_softmax(logits, dim=-1, out=logits if in_place else None)
            scale = _beside_rows(rows)
        self.nbytes = rows.nbytes + (0 if self._wide is None else self._wide.nbytes)
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
        self._copy = HostCopy([wide.cpu(), _beside_rows(wide).cpu()], None)
        return self.read()


def _beside_rows(rows: torch.Tensor) -> torch.Tensor:
    # Where logits are no row, no number of their log-softmax is one: a look at the first will do.
    first = rows[:, 0]
    return torch.where(first.isnan(), first, 0.0)


class AnswerBlock:
    """What was made of a step's rows for wants that are `small_answers.alike`, on its way alone.

    `places` are their rows of the `logits`, [rows, vocab].
    """

    def __init__(
        self,
        logits: torch.Tensor,
        places: Sequence[int],
        wants: Sequence[Any],
        stream: torch.cuda.Stream | None,
    ) -> None:
        rows = to_device(np.array(places, np.int64), logits.device)
        words, scales = reduce_logits(logits, rows, wants)
        self.nbytes = words.nbytes
        self._copy = HostCopy([words, scales], stream)

    def read(self) -> tuple[Rows, npt.NDArray[np.float32]]:
        """The numbers of each answer on the host, and its float. Waits for the copy."""
        words, scales = self._copy.read()
        return words, scales


class Block(Protocol):
    """What one step left, a row for each of some names, or what was made of it."""

    nbytes: int

    def read(self) -> tuple[Rows, npt.NDArray[np.float32]]:
        """The rows, and a float32 for each, which is not finite where the row is none."""
        ...


@dataclass(slots=True, eq=False)
class _Kept:
    """What is left of a block, which takes its bytes until the last of its rows is gone."""

    block: Block
    positions: dict[str, int]


class RowStore:
    """Captured rows by name, until they are taken; at most `most_bytes` of them.

    Where there are more, the oldest go, all of a step at once: they share their memory.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._kept: dict[_Kept, None] = {}
        self._of: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._of)

    def put(self, names: Iterable[str], block: Block) -> None:
        """Keep a block's rows, the i-th as the i-th name's; the last one of a name counts."""
        kept = _Kept(block, {})
        self._kept[kept] = None
        self.nbytes += block.nbytes
        for position, name in enumerate(names):
            self._pop(name)
            kept.positions[name] = position
            self._of[name] = kept
        while self.nbytes > self.most_bytes:
            for name in list(next(iter(self._kept)).positions):
                self._pop(name)

    def forget(self, names: Iterable[str]) -> None:
        """Drop rows, where they are, and those of steps."""
        gone = set(names)
        kept = [name for name in self._of if name in gone or name.rpartition(STEP)[0] in gone]
        for name in kept:
            self._pop(name)

    def take(self, names: Iterable[str]) -> list[Taken]:
        """The rows of `names`, by block; names without a row are left out."""
        found: dict[Block, tuple[list[str], list[int]]] = {}
        for name in names:
            if (popped := self._pop(name)) is not None:
                block, position = popped
                of_block, positions = found.setdefault(block, ([], []))
                of_block.append(name)
                positions.append(position)
        taken = []
        for block, (of_block, positions) in found.items():
            rows, scale = block.read()
            if positions != list(range(rows.shape[0])):
                rows, scale = rows[positions], scale[positions]
            taken.append((of_block, rows, scale))
        return taken

    def _pop(self, name: str) -> tuple[Block, int] | None:
        kept = self._of.pop(name, None)
        if kept is None:
            return None
        position = kept.positions.pop(name)
        if not kept.positions:
            del self._kept[kept]
            self.nbytes -= kept.block.nbytes
        return kept.block, position


class WatchedLogits:
    """The watched requests whose logits were not finite, until they are taken."""

    def __init__(self, most: int = MOST_UNSOUND) -> None:
        self._most = most
        self._steps: deque[tuple[list[str], HostCopy]] = deque()
        self._unsound: dict[str, None] = {}

    def put(self, ids: list[str], largest: HostCopy) -> None:
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

    def take(self, ids: Iterable[str]) -> list[str]:
        """Those of `ids` whose logits were not finite at any time."""
        while self._steps:
            self._read()
        found = [name for name in ids if name in self._unsound]
        for name in found:
            del self._unsound[name]
        return found
