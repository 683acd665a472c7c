"""Where rows come from: captured in vLLM's workers, or vLLM's own log-probabilities."""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from lmpool.backends.continuous import Admitted
from lmpool.backends.engine import Outcome
from lmpool.backends.vllm import internals
from lmpool.backends.vllm.capture import CAPTURE, WATCH, Copied
from lmpool.backends.vllm.row_store import Taken
from lmpool.errors import EngineBroken, PromptFailed, SettingsError
from lmpool.wants import Hidden

logger = logging.getLogger(__name__)

SHARED_BYTES: Final = 64 << 20
"""Of the memory that rows of another process come through: what is larger comes in pieces."""

CapturedRow = tuple[npt.NDArray[np.float32] | npt.NDArray[np.uint16], float]
"""float32 [vocab] log-probabilities and their largest, or uint16 [vocab], the bits of bfloat16
logits, and their logsumexp. The float is not finite where the row is none; of a watched request
there is nothing else."""


class RowSource(Protocol):
    """Gets the rows of requests, which it knows by number."""

    prefix: str | None
    """What the ids of requests begin with where they are captured in vLLM's workers."""

    def row(self, number: int) -> dict[str, Any]:
        """What `SamplingParams` must have so that vLLM gives the row of request `number`."""
        ...

    def watch(self, number: int) -> dict[str, Any]:
        """What they must have so that a request's logits are watched while it samples."""
        ...

    def see(self, number: int, output: Any) -> None:
        """Look at what vLLM put out for a request."""

    def take(self, numbers: Sequence[int]) -> dict[int, CapturedRow]:
        """The rows of requests that have ended, where there are any.

        A watched request has one, that is none, if its logits were not finite.
        """
        ...

    def forget(self, numbers: Sequence[int]) -> None:
        """These requests were aborted."""

    def close(self) -> None:
        """Free what it holds."""


def row_source(engine: Any, *, capture: bool) -> RowSource:
    """Capture where vLLM's model runner lets us, else its log-probabilities, said in the log.

    Raises `SettingsError` where neither gives rows.
    """
    internals.check_speculation(engine.vllm_config)
    core = engine.engine_core
    prefix = secrets.token_hex(16)
    runners = internals.call_workers(core, "lmpool_attach", prefix)
    runner = next(filter(None, runners), None)
    if not capture:
        logger.warning("rows come through vLLM's logprobs=-1, as told: many times slower")
        return FullLogprobs()
    if runner is None:
        logger.warning(
            "rows come through vLLM's logprobs=-1, many times slower: its model runner has no "
            "place for lmpool's logits processor"
        )
        return FullLogprobs()
    if internals.is_local(engine):
        logger.info("rows are captured in vLLM's %s model runner, in this process", runner)
        return LocalRows(core, prefix)
    logger.info("rows are captured in vLLM's %s model runner, in another process", runner)
    return SharedRows(core, prefix, engine.vllm_config.model_config.get_vocab_size())


class _CapturedRows:
    def __init__(self, core: Any, prefix: str) -> None:
        self._core = core
        self.prefix: str | None = prefix

    def row(self, number: int) -> dict[str, Any]:
        return {"extra_args": {CAPTURE: f"{self.prefix}{number}"}}

    def watch(self, number: int) -> dict[str, Any]:
        return {"extra_args": {WATCH: f"{self.prefix}{number}"}}

    def see(self, number: int, output: Any) -> None:
        pass

    def _of_publisher(self, replies: Sequence[Any]) -> Any:
        found = [reply for reply in replies if reply is not None]
        if len(found) != 1:
            raise EngineBroken(f"{len(found)} of vLLM's workers publish rows: one expected")
        return found[0]


class LocalRows(_CapturedRows):
    """Rows captured in this process: handed over as they are."""

    def take(self, numbers: Sequence[int]) -> dict[int, CapturedRow]:
        return self._call(numbers, ())

    def forget(self, numbers: Sequence[int]) -> None:
        self._call((), numbers)

    def _call(self, numbers: Sequence[int], forgotten: Sequence[int]) -> dict[int, CapturedRow]:
        replies = internals.call_workers(
            self._core, "lmpool_take_rows", list(map(str, numbers)), list(map(str, forgotten))
        )
        taken: list[Taken] = self._of_publisher(replies)
        found: dict[int, CapturedRow] = {}
        for names, rows, scale in taken:
            rows.flags.writeable = False
            found.update(zip(map(int, names), zip(rows, scale.tolist(), strict=True), strict=True))
        return found

    def close(self) -> None:
        pass


class SharedRows(_CapturedRows):
    """Rows captured in another process, copied through memory that both have mapped.

    The memory has a name only until the other process has mapped it, so that none is left behind
    however the two end.
    """

    def __init__(self, core: Any, prefix: str, vocab_size: int) -> None:
        super().__init__(core, prefix)
        row = 4 * vocab_size
        with tempfile.NamedTemporaryFile(
            prefix="lmpool-rows-", dir=_memory_folder(), delete=False
        ) as file:
            self._path = file.name
            try:
                # Reserved now: a page that cannot be had later would end the process.
                size = _reserve(file.fileno(), max(row, SHARED_BYTES // row * row), row)
                self._memory = np.memmap(file, np.uint8, mode="r+", shape=(size,))
                self._of_publisher(internals.call_workers(core, "lmpool_copy_rows", self._path, []))
            finally:
                Path(self._path).unlink()
        self._most = size // row

    def take(self, numbers: Sequence[int]) -> dict[int, CapturedRow]:
        found: dict[int, CapturedRow] = {}
        for start in range(0, len(numbers), self._most):
            found.update(self._call(numbers[start : start + self._most], ()))
        return found

    def forget(self, numbers: Sequence[int]) -> None:
        self._call((), numbers)

    def _call(self, numbers: Sequence[int], forgotten: Sequence[int]) -> dict[int, CapturedRow]:
        replies = internals.call_workers(
            self._core,
            "lmpool_copy_rows",
            self._path,
            list(map(str, numbers)),
            list(map(str, forgotten)),
        )
        copied: list[Copied] = self._of_publisher(replies)
        found: dict[int, CapturedRow] = {}
        for names, offset, dtype, vocab_size, scale in copied:
            size = len(names) * vocab_size * np.dtype(dtype).itemsize
            # Our own copy: the next call writes there again.
            rows = self._memory[offset : offset + size].copy().view(dtype)
            rows = rows.reshape(len(names), vocab_size)
            rows.flags.writeable = False
            found.update(zip(map(int, names), zip(rows, scale, strict=True), strict=True))
        return found

    def close(self) -> None:
        del self._memory


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _reserve(file: int, size: int, least: int) -> int:
    while True:
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            if size // 2 < least:
                raise SettingsError(
                    f"no {size} bytes of shared memory for rows: {error}; enlarge /dev/shm "
                    "(docker run --shm-size=1g)"
                ) from None
            size = size // 2 // least * least
        else:
            return size


class FullLogprobs:
    """Rows from vLLM's own log-probabilities of the whole vocabulary."""

    def __init__(self) -> None:
        self.prefix: str | None = None
        self._rows: dict[int, CapturedRow] = {}
        self._watched: set[int] = set()

    def row(self, number: int) -> dict[str, Any]:
        return {"logprobs": -1}

    def watch(self, number: int) -> dict[str, Any]:
        self._watched.add(number)
        return {"logprobs": -1}

    def see(self, number: int, output: Any) -> None:
        if output.new_logprobs is not None:
            row = internals.full_logprobs(output)
            largest = float(row.max())
            if number not in self._watched or not np.isfinite(largest):
                self._rows[number] = (row, largest)

    def take(self, numbers: Sequence[int]) -> dict[int, CapturedRow]:
        self._watched.difference_update(numbers)
        return {number: self._rows.pop(number) for number in numbers if number in self._rows}

    def forget(self, numbers: Sequence[int]) -> None:
        self.take(numbers)

    def close(self) -> None:
        self._rows.clear()


def is_none(row: CapturedRow | None) -> bool:
    """Whether what was captured is not finite."""
    return row is not None and not np.isfinite(row[1])


def outcome_of_row(admitted: Admitted[Any], row: CapturedRow | None) -> Outcome:
    """What became of a request that vLLM brought to its end."""
    request_id, continuation = admitted.request.id, admitted.continuation
    if row is not None and isinstance(admitted.request.want, Hidden):
        return Outcome.of_state(request_id, row[0].astype(np.float32, copy=False))
    if row is not None and is_none(row):
        reason = f"the model's logits are not finite in this dtype ({row[1]})"
        return Outcome(request_id, error=PromptFailed(reason))
    if continuation is not None:
        if not continuation.finished:
            return Outcome(request_id, error=PromptFailed("vLLM ended this continuation early"))
        return Outcome(request_id, answer=continuation.answer())
    if row is None:
        return Outcome(request_id, error=PromptFailed("vLLM gave no row for this prompt"))
    values, scale = row
    return Outcome(request_id, row=values, logsumexp=scale if values.dtype == np.uint16 else 0.0)
