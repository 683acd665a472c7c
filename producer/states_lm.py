"""What lies behind rows: those of every beginning of a text, hidden states, and the head."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar, cast

import numpy as np

from lmpool.errors import PoolMismatch
from lmpool.keys import Priority
from lmpool.model_info import ModelInfo
from lmpool.producer.answering_lm import AdapterOf
from lmpool.producer.asking_lm import AskingLM
from lmpool.producer.blocking import in_thread, outcome
from lmpool.producer.call_options import CallOptions
from lmpool.producer.frameworks import RowT_co
from lmpool.producer.head_files import has_matrices, read_parts
from lmpool.producer.heads import Head, HeadNumbers
from lmpool.producer.jobs import JobMaker
from lmpool.producer.served_model import ServedModel
from lmpool.producer.stacking import Stacks
from lmpool.token_ids import TokenIds
from lmpool.wants import Answer, HeadBytes, HeadPart, Hidden, HiddenState
from lmpool.wants.hidden import head_of
from lmpool.wire import Job

if TYPE_CHECKING:
    import torch

Device: TypeAlias = "str | torch.device | None"
"""A device of torch."""

PARTS_AT_ONCE: Final = 8
"""Parts of a head that are asked for together: 32 MiB."""

T = TypeVar("T")


class StatesLM(AskingLM[RowT_co], Generic[RowT_co]):
    """A model that a pool serves, asked for what lies behind its rows."""

    async def logprobs_at(
        self,
        token_ids: TokenIds,
        positions: TokenIds,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
        progress: bool = False,
    ) -> RowT_co:
        """The rows after the first p tokens of a text, for each p of `positions`.

        float32 [number of positions, vocab_size], in their order; a position may come twice. Each
        is the row of a prompt, ``token_ids[:p]``, and cached as such; they are asked together, so
        that a worker that keeps what it computed takes the text in once. Raises what
        `next_token_logprobs` raises, and `PromptError` for a position that is not 1 to the length
        of the text, or of the longest prompt.
        """
        options = self._options(timeout, priority, progress)

        def make(jobs: JobMaker, adapter: AdapterOf, before: Sequence[Job]) -> list[Job]:
            row, served = self._checked(jobs, self._row), adapter(lora_name)
            parts = [job.token_ids() for job in before]
            if parts:  # the longest has all of the text that is asked about
                return jobs.prefixes(max(parts, key=len), [*map(len, parts)], row, served)
            return jobs.prefixes(token_ids, positions, row, served)

        stacks = Stacks(self._framework)
        _, rows = await self._answers(make, (lora_name,), options, stacks)
        await self._with_framework(options)
        return stacks.whole(cast(list[Answer], rows))

    async def last_hidden_state(
        self,
        token_ids: TokenIds,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> HiddenState:
        """What the model's head is applied to after a prompt: float32 [hidden_size].

        That is behind the final norm; `head` makes the prompt's row of it. Raises what
        `next_token_logprobs` raises, `PromptError` where this pool gives no hidden states
        (`info.no_head` says why), and `PromptFailed` for an adapter that changes the head itself.
        """
        options = self._options(timeout, priority)
        return cast(HiddenState, await self._one(token_ids, Hidden(), lora_name, options))

    async def head(
        self,
        device: Device = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> Head[RowT_co]:
        """The model's head, to make rows of hidden states here: ``head.logprobs(h)``.

        With NumPy in float32, or by torch on `device` (by default the CPU, where rows are tensors).
        It is read from the model's own files where this machine has them, else in parts over the
        pool; once for a client. Raises `PromptError` where this pool gives no hidden states,
        `SettingsError` for a device that is none, and what `next_token_logprobs` raises.
        """
        options = self._options(timeout, priority)
        model = await self._served((), options)
        numbers = model.head_numbers
        if numbers is None:
            numbers = model.head_numbers = await self._read_head(model, options)
        read = numbers
        return await self._aside(lambda: Head(read, self._framework, device), options)

    async def _read_head(self, model: ServedModel, options: CallOptions) -> HeadNumbers:
        info, form = model.info, head_of(model.info)
        matrix = np.empty(info.vocab_size * form.row_bytes, np.uint8)
        parts = form.weight_parts(info.vocab_size)
        known: set[int] = set()
        if await self._aside(lambda: has_matrices(info, form), options):
            digests = [d async for _, d in self._parts(info, range(parts), options, hashed=True)]
            known = await self._aside(lambda: read_parts(info, form, digests, matrix), options)
        missing = [number for number in range(parts) if number not in known]
        size = form.part_rows * form.row_bytes
        async for number, part in self._parts(info, missing, options):
            matrix[number * size :][: len(part)] = np.frombuffer(part, np.uint8)
        bias = None
        async for _, part in self._parts(info, [parts] if form.bias else [], options):
            bias = np.frombuffer(part, "<f4")
        return HeadNumbers(form, info.vocab_size, matrix, bias)

    async def _parts(
        self, info: ModelInfo, numbers: Sequence[int], options: CallOptions, hashed: bool = False
    ) -> AsyncIterator[tuple[int, bytes]]:
        """These parts of the head of the model `info`, or their digests, a few at a time."""
        for start in range(0, len(numbers), PARTS_AT_ONCE):
            some = numbers[start : start + PARTS_AT_ONCE]

            def make(
                jobs: JobMaker, _: AdapterOf, __: object, some: Sequence[int] = some
            ) -> list[Job]:
                # Any prompt will do: these spread over a pool's shards.
                return [
                    jobs.one([number % info.vocab_size], jobs.check(HeadPart(number, hashed)), None)
                    for number in some
                ]

            served, found = await self._answers(make, (), options)
            if served is not info:
                raise PoolMismatch("the pool has come to serve another model: ask for its head")
            for number, part in zip(some, cast(list[HeadBytes], found), strict=True):
                yield number, part.data.tobytes()

    async def _aside(self, function: Callable[[], T], options: CallOptions) -> T:
        """What a function brings that reads files, on a thread of its own."""
        future = in_thread(function, "lmpool-head")
        return await outcome(future, options.deadline, "the model's files were not read")
