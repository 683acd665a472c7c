"""Where rows come from: captured in vLLM's workers, or vLLM's own log-probabilities."""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from lmpool.backends.continuous import Admitted
from lmpool.backends.engine import Outcome
from lmpool.backends.vllm import internals
from lmpool.backends.vllm.capture import ANSWER, CAPTURE, WATCH, Copied
from lmpool.backends.vllm.row_store import STEP, Rows, Taken
from lmpool.backends.words import alike, outcome_of, word_count
from lmpool.errors import EngineBroken, PromptFailed, SettingsError
from lmpool.wants import Draw, Hidden, Want, want_to_wire

logger = logging.getLogger(__name__)

SHARED_BYTES: Final = 64 << 20
"""Of the memory that rows of another process come through: what is larger comes in pieces."""

_SEEDS: Final = 1 << 64
"""Seeds beyond are those that they equal modulo it, and vLLM lets no such integer pass."""

CapturedRow = tuple[Rows, float]
"""What there is of a request, as `row_store.Taken` has it, and its float; of a watched one there is
nothing else."""


class RowSource(Protocol):
    """Gets the rows of requests, which it knows by number."""

    prefix: str | None
    """What the ids of requests begin with where they are captured in vLLM's workers."""

    def row(self, number: int, want: Want | None = None) -> dict[str, Any]:
        """What `SamplingParams` must have so that vLLM gives the row of request `number`.

        Of a `want` that is `reducible` it may give the answer.
        """
        ...

    def watch(self, number: int, want: Want | None = None) -> dict[str, Any]:
        """What they must have so that a request's logits are watched while it samples.

        Of a `want` that is `reducible` each step gives the answer, or vLLM's output the row.
        """
        ...

    def see(self, number: int, output: Any) -> None:
        """Look at what vLLM put out for a request."""

    def take(self, numbers: Sequence[int]) -> dict[int, CapturedRow]:
        """The rows of requests that have ended, where there are any.

        A watched request has one, that is none, if its logits were not finite. Of those watched
        nothing is left then.
        """
        ...

    def take_steps(self, steps: Sequence[tuple[int, int]]) -> dict[tuple[int, int], CapturedRow]:
        """What steps of watched requests gave, by request and number of the token, from 0."""
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

    def row(self, number: int, want: Want | None = None) -> dict[str, Any]:
        return self._asked(CAPTURE, number, want)

    def watch(self, number: int, want: Want | None = None) -> dict[str, Any]:
        return self._asked(WATCH, number, want)

    def _asked(self, key: str, number: int, want: Want | None) -> dict[str, Any]:
        if isinstance(want, Draw) and want.seed is not None:
            want = replace(want, seed=want.seed % _SEEDS)
        answer = {} if want is None else {ANSWER: want_to_wire(want)}
        return {"extra_args": {key: f"{self.prefix}{number}", **answer}}

    def see(self, number: int, output: Any) -> None:
        pass

    def take(self, numbers: Sequence[int]) -> dict[int, CapturedRow]:
        names = list(map(str, numbers))
        return {int(name): row for name, row in self._call(names, names).items()}

    def take_steps(self, steps: Sequence[tuple[int, int]]) -> dict[tuple[int, int], CapturedRow]:
        names = {f"{number}{STEP}{step}": (number, step) for number, step in steps}
        return {names[name]: row for name, row in self._call(list(names), ()).items()}

    def forget(self, numbers: Sequence[int]) -> None:
        self._call((), list(map(str, numbers)))

    def _call(self, names: Sequence[str], ended: Sequence[str]) -> dict[str, CapturedRow]:
        """What there is by these names; of the requests that have ended nothing is left."""
        raise NotImplementedError

    def _of_publisher(self, replies: Sequence[Any]) -> Any:
        found = [reply for reply in replies if reply is not None]
        if len(found) != 1:
            raise EngineBroken(f"{len(found)} of vLLM's workers publish rows: one expected")
        return found[0]


class LocalRows(_CapturedRows):
    """Rows captured in this process: handed over as they are."""

    def _call(self, names: Sequence[str], ended: Sequence[str]) -> dict[str, CapturedRow]:
        replies = internals.call_workers(self._core, "lmpool_take_rows", list(names), list(ended))
        taken: list[Taken] = self._of_publisher(replies)
        found: dict[str, CapturedRow] = {}
        for given, rows, scale in taken:
            rows.flags.writeable = False
            found.update(zip(given, zip(rows, scale.tolist(), strict=True), strict=True))
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

    def _call(self, names: Sequence[str], ended: Sequence[str]) -> dict[str, CapturedRow]:
        found: dict[str, CapturedRow] = {}
        for start in range(0, max(1, len(names)), self._most):
            last = start + self._most >= len(names)
            found.update(self._copy(names[start : start + self._most], ended if last else ()))
        return found

    def _copy(self, names: Sequence[str], ended: Sequence[str]) -> dict[str, CapturedRow]:
        replies = internals.call_workers(
            self._core, "lmpool_copy_rows", self._path, list(names), list(ended)
        )
        copied: list[Copied] = self._of_publisher(replies)
        found: dict[str, CapturedRow] = {}
        for given, offset, dtype, width, scale in copied:
            size = len(given) * width * np.dtype(dtype).itemsize
            # Our own copy: the next call writes there again.
            rows = self._memory[offset : offset + size].copy().view(dtype)
            rows = rows.reshape(len(given), width)
            rows.flags.writeable = False
            found.update(zip(given, zip(rows, scale, strict=True), strict=True))
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

    def row(self, number: int, want: Want | None = None) -> dict[str, Any]:
        return {"logprobs": -1}

    def watch(self, number: int, want: Want | None = None) -> dict[str, Any]:
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

    def take_steps(self, steps: Sequence[tuple[int, int]]) -> dict[tuple[int, int], CapturedRow]:
        return {}

    def forget(self, numbers: Sequence[int]) -> None:
        self.take(numbers)

    def close(self) -> None:
        self._rows.clear()


def reducible(want: Want, vocab_size: int) -> bool:
    """Whether a row can be reduced where it is to what answers this want, and that is less."""
    return alike(want) is not None and word_count(want) <= vocab_size // 2


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
    if values.dtype == np.int32:
        return outcome_of(admitted.request, values, scale)
    return Outcome(request_id, row=values, logsumexp=scale if values.dtype == np.uint16 else 0.0)
