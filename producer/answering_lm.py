"""How `PooledLM` has jobs answered, whatever they want."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from lmpool.errors import LmpoolError, PoolMismatch, UnknownAdapter
from lmpool.keys import Priority
from lmpool.model_info import ModelInfo
from lmpool.producer.adapters import check_lora_name
from lmpool.producer.base_lm import BaseLM
from lmpool.producer.blocking import outcome
from lmpool.producer.call_options import CallOptions, Errors
from lmpool.producer.caller import Caller
from lmpool.producer.client import Client
from lmpool.producer.frameworks import Framework, RowT_co, framework
from lmpool.producer.jobs import JobMaker
from lmpool.producer.pending import PendingCall
from lmpool.producer.served_model import ServedModel, ServedModels
from lmpool.producer.stacking import Conversions, Stacks
from lmpool.rows import EncodedRow
from lmpool.settings import ClientOptions
from lmpool.token_ids import TokenIds
from lmpool.wants import Answer, Reduced, Row, Want
from lmpool.wire import Job

Logprobs: TypeAlias = npt.NDArray[np.float32]
Found: TypeAlias = "Answer | LmpoolError"
AnswerTo: TypeAlias = "RowT_co | Reduced"
"""What a want is answered with, as a caller gets it: a row follows the client's `framework`."""

AdapterOf = Callable[[str | None], str | None]
"""A name as ``name@fingerprint``, which is looked up. Raises `UnknownAdapter`."""
MakeJobs = Callable[[JobMaker, AdapterOf, Sequence[Job]], list[Job]]
"""Makes the jobs of a call, for a model and its adapters. Asked again, it is given those it made
before: what the caller gave may be another by then (`as_asked`)."""


class AnsweringLM(BaseLM, Generic[RowT_co]):
    """A model that a pool serves, and what any of its jobs is answered with."""

    def __init__(self, options: ClientOptions, client: Client, models: ServedModels) -> None:
        super().__init__(options, client, models)
        self._framework: Framework[RowT_co] = framework(options.framework)
        self._caller = Caller(client)
        self._row = Row(None if options.encoding == "auto" else options.encoding)
        usual = CallOptions.checked(options, None, None)
        self._usual = usual if usual.deadline.at is None else None
        """Those of a call that says nothing of its own, where they begin no time: one for all."""

    def _options(
        self,
        timeout: float | None,
        priority: Priority | None,
        progress: bool = False,
        errors: Errors = "raise",
    ) -> CallOptions:
        said_nothing = timeout is None and priority is None and progress is False
        if (
            said_nothing
            and self._usual is not None
            and isinstance(errors, str)
            and errors == "raise"
        ):
            return self._usual
        return CallOptions.checked(self.options, timeout, priority, progress, errors)

    def _checked(self, jobs: JobMaker, want: Want) -> Want:
        """A want with the model's defaults; a row's way to travel is this client's."""
        if type(want) is Row and not self._framework.is_there:
            self._framework.load()  # while the pool computes
        return jobs.check(self._row if type(want) is Row and want.encoding is None else want)

    async def _with_framework(self, options: CallOptions) -> None:
        """Wait until rows can be handed out."""
        if not self._framework.is_there:
            missing = "torch was not imported (do it before, or write framework='numpy')"
            await outcome(self._framework.load(), options.deadline, missing, shared=True)

    async def _hand_out(self, answer: Answer, options: CallOptions) -> AnswerTo[RowT_co]:
        if isinstance(answer, EncodedRow):
            await self._with_framework(options)
        return self._handed_out(answer)

    def _handed_out(self, answer: Answer) -> AnswerTo[RowT_co]:
        return self._framework.one(answer) if isinstance(answer, EncodedRow) else answer

    def _given(self, found: Found, number: int) -> AnswerTo[RowT_co] | LmpoolError:
        return found.of(number) if isinstance(found, LmpoolError) else self._handed_out(found)

    async def _one(
        self,
        prompt: TokenIds,
        want: Want,
        lora_name: str | None,
        options: CallOptions,
        asked: PendingCall | Answer | None = None,
    ) -> Answer:
        """The answer to one want, of which `_asked` may have said what it does."""
        if asked is None:
            asked = self._asked(prompt, want, lora_name, options)
        if isinstance(asked, PendingCall):
            try:
                await self._caller.wait(asked, options)
            except BaseException as error:
                self._caller.leave(asked, error)
                raise
            call, asked = asked, self._ended(asked, options)
            if asked is None:
                prompt = call.jobs[0].token_ids()  # as it was when it was asked
        if asked is None:
            return await self._one_anew(prompt, want, lora_name, options)
        return asked

    def _asked(
        self, prompt: TokenIds, want: Want, lora_name: str | None, options: CallOptions
    ) -> PendingCall | Answer | None:
        """The usual call, begun, or its answer, if it is there; None where more is to be known."""
        info = self._client.info
        if info is None or lora_name is not None:
            return None
        model = self._models.of(info)
        want = self._checked(model.jobs, want)
        if type(want) is Row:
            call = self._caller.begin_in_crowd(info, model.jobs, prompt, want, options)
            if call is not None:
                return call
        job = model.jobs.one(prompt, want, None)
        if type(want) is not Row:
            self._reduce_rows(model, (job,))
        found = self._client.lookup(job)
        return self._caller.begin(info, (job,), options) if found is None else found

    def _ended(self, call: PendingCall, options: CallOptions) -> Answer | None:
        """The answer of the usual call; None where it is to be asked anew, of another model."""
        try:
            (found,) = self._caller.end(call, options)
            if isinstance(found, LmpoolError):
                raise found
            return found
        except PoolMismatch:
            if self._client.info is call.info:
                raise
            return None

    async def _one_anew(
        self, prompt: TokenIds, want: Want, lora_name: str | None, options: CallOptions
    ) -> Answer:
        _, (answer,) = await self._answers(
            lambda jobs, adapter, before: [
                jobs.one(
                    as_asked(before, [prompt])[0], self._checked(jobs, want), adapter(lora_name)
                )
            ],
            (lora_name,),
            options,
        )
        if isinstance(answer, LmpoolError):
            raise answer
        return answer

    def _reduce_rows(self, model: ServedModel, jobs: Sequence[Job]) -> None:
        """Answer what follows from rows of the local cache."""
        if self._client.cache.rows:
            row = self._row.checked(model.info)
            self._client.reduce_rows(jobs, partial(model.jobs.row_digest, row))

    async def _several(
        self,
        prompts: Sequence[TokenIds],
        want: Want,
        lora_name: str | None,
        options: CallOptions,
        stacks: Stacks[Any] | None = None,
    ) -> tuple[ModelInfo, list[Answer]]:
        info, found = await self._answers(
            lambda jobs, adapter, before: jobs.many(
                as_asked(before, prompts), self._checked(jobs, want), adapter(lora_name)
            ),
            (lora_name,),
            options,
            stacks,
        )
        return info, cast(list[Answer], found)

    async def _served(self, names: Iterable[str | None], options: CallOptions) -> ServedModel:
        """The model that is served, which knows the adapters of these names, if there are such."""
        info = self._client.info or await self._load_info(options.deadline)
        model = self._models.of(info)
        wanted = {check_lora_name(name) for name in names if name is not None}
        if not all(map(model.adapters.knows, wanted)):
            read = partial(self._read_adapters, name=wanted.pop() if len(wanted) == 1 else None)
            reading = self._patiently(lambda: self._client.run(read), options.deadline)
            model.adapters.keep(await reading)
        return model

    async def _answers(
        self,
        make: MakeJobs,
        names: Collection[str | None],
        options: CallOptions,
        stacks: Stacks[Any] | Conversions[Any] | None = None,
    ) -> tuple[ModelInfo, list[Found]]:
        """The answers to what `make` makes, and the model whose they are.

        Rows may be in what `stacks` makes for them, and then say so. Asked anew of a pool
        that was replaced, if the client follows, and once of an adapter that was replaced: all
        answers of a call are of one model and one adapter of a name.
        """
        asked_again = False
        jobs: list[Job] = []
        while True:
            model = await self._served(names, options)
            info = model.info
            found: list[Found] = []
            jobs = make(model.jobs, partial(adapter_of, model), jobs)
            stack = None if stacks is None else stacks.begin(jobs, info)
            if not jobs:
                return info, found
            self._reduce_rows(model, jobs)
            answer = self._client.lookup(jobs[0]) if len(jobs) == 1 else None
            if answer is not None:
                return info, [answer]
            try:
                found = await self._caller.answers(info, jobs, options, stack)
                for each in found if options.keeps_errors else ():
                    if isinstance(each, (PoolMismatch, UnknownAdapter)):
                        raise each.of(each.index)  # not one that would hold on to the answers
                return info, found
            except (PoolMismatch, UnknownAdapter) as error:
                adapter = isinstance(error, UnknownAdapter)
                if asked_again if adapter else self._client.info is info:
                    if not found:
                        raise
                    return info, found
                if adapter:
                    asked_again = True
                    model.adapters.forget()


def as_asked(before: Sequence[Job], prompts: Sequence[TokenIds]) -> Sequence[TokenIds]:
    """The prompts of a call: as they were when it was asked first, if it was."""
    return [job.token_ids() for job in before] or prompts


def adapter_of(model: ServedModel, name: str | None) -> str | None:
    return None if name is None else model.adapters.reference(check_lora_name(name))
