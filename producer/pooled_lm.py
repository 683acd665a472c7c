"""`PooledLM`: a language model that a pool of workers serves, and its blocking twin."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypeVar,
    cast,
    overload,
)

from lmpool.checks import as_integer, quoted
from lmpool.errors import LmpoolError, PromptError, SettingsError
from lmpool.keys import Priority
from lmpool.producer.answering_lm import AdapterOf, AnswerTo, as_asked
from lmpool.producer.asking_lm import AnswerT
from lmpool.producer.asks import Asks
from lmpool.producer.base_lm import AT_ONCE, BaseLM
from lmpool.producer.blocking import blocking, outcome, pause, run_blocking, running_loop
from lmpool.producer.call_options import CallOptions, Errors
from lmpool.producer.client import Client
from lmpool.producer.deadline import Deadline
from lmpool.producer.frameworks import RowT_co
from lmpool.producer.jobs import JobMaker
from lmpool.producer.pending import PendingCall
from lmpool.producer.served_model import ServedModels
from lmpool.producer.stacking import Stacks
from lmpool.producer.states_lm import StatesLM
from lmpool.producer.statistics import PoolStatistics
from lmpool.producer.stream import Piece
from lmpool.producer.streaming_lm import StreamingLM
from lmpool.rows import EncodedRow
from lmpool.settings import ClientOptions
from lmpool.token_ids import TokenIds
from lmpool.wants import (
    Answer,
    Generate,
    Generation,
    OfPrompt,
    Row,
    StopSequences,
    Stream,
    Want,
)
from lmpool.wire import Job

WORKERS_POLL: Final = 0.1

P = ParamSpec("P")
T = TypeVar("T")


class PooledLM(StatesLM[RowT_co], StreamingLM[RowT_co]):
    """Next-token log-probabilities from a pool; made by `lmpool.connect` or `lmpool.embedded`.

    A drop-in for genlm-backend's ``AsyncLM``. Every method works from any thread and any event
    loop. `sync` is the same client with every method blocking; as in genlm-backend, methods have
    ``_sync`` twins too. Blocking methods may be called inside a running event loop, which then
    stands still. Rows are float32 [vocab_size], natural log, normalized: torch tensors that the
    caller owns, or read-only numpy arrays.

    Waiting calls take `timeout` in seconds and then raise `PoolTimeout`, and `priority`, which is
    ``"interactive"`` or ``"batch"`` (lets interactive jobs go first). Cancelling a call withdraws
    it: what nobody waits for is not computed.
    """

    def __init__(self, options: ClientOptions | None = None) -> None:
        options = ClientOptions() if options is None else options
        if not isinstance(options, ClientOptions):
            raise SettingsError(f"options={quoted(options)}: write ClientOptions(...), or connect")
        client = Client(options)
        super().__init__(options, client, ServedModels(client))
        # Whoever forgets to close still leaves nothing behind.
        self._finalizer: weakref.finalize[..., BaseLM] = weakref.finalize(self, client.close_soon)

    @property
    def sync(self) -> SyncPooledLM[RowT_co]:
        """This client with every method blocking, under the same names."""
        return SyncPooledLM(self)

    def close(self, timeout: float | None = None) -> None:
        """Withdraw what is waited for and end the connection.

        A server that does not answer is waited for `timeout` seconds, 3 where neither it nor a
        shorter `request_timeout` is given, and then left alone.
        """
        seconds = Deadline.checked(timeout, None).timeout
        last = self._finalizer.peek()
        if last is not None:
            _, end, arguments, _ = last
            end(*arguments, seconds)
            self._finalizer.detach()  # not before: what Ctrl-C kept from being closed is yet

    async def aclose(self, timeout: float | None = None) -> None:
        """`close` without blocking the event loop."""
        running_loop()
        await asyncio.to_thread(self.close, timeout)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        # What is read from a pickle is a client of its own, of the same pool.
        return type(self), (self.options,)

    async def __aenter__(self) -> Self:
        try:
            await self._load_info(self._until(None))
        except BaseException:
            await self.aclose(AT_ONCE)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    # --- log-probabilities ---------------------------------------------------------------------

    async def next_token_logprobs(
        self,
        token_ids: TokenIds,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> RowT_co:
        """Log-probabilities of the token after a prompt, float32 [vocab_size].

        Calls made in the same turn of the event loop travel as one request.

        Raises:
            PromptError: (a ValueError) the prompt is empty, too long, or has bad ids.
            UnknownAdapter: (a ValueError) no adapter `lora_name`.
            PoolTimeout, NoWorkers, PoolBusy, PromptFailed, ServerError: see `lmpool.errors`.
        """
        options = self._options(timeout, priority)
        asked = self._asked(token_ids, self._row, lora_name, options)
        if isinstance(asked, PendingCall) and asked.has_future and options.deadline.at is None:
            # As in `_one`, in one coroutine less: of thousands that wait each holds little.
            try:
                await asked.future
            except BaseException as error:
                self._caller.leave(asked, error)
                raise
            found = self._ended(asked, options)
            if found is not None:
                if not self._framework.is_there:
                    await self._with_framework(options)
                return self._framework.one(cast(EncodedRow, found))
        row = await self._one(token_ids, self._row, lora_name, options, asked)
        if not self._framework.is_there:
            await self._with_framework(options)
        return self._framework.one(cast(EncodedRow, row))

    async def batch_next_token_logprobs(
        self,
        token_ids_list: Sequence[TokenIds],
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
        progress: bool = False,
    ) -> RowT_co:
        """Rows of several prompts, float32 [number of prompts, vocab_size], in their order.

        Every prompt is checked before any is sent. Equal prompts are computed once.
        `progress=True` shows a bar. Raises what `next_token_logprobs` raises; the message of a
        `PromptError` begins with the prompt's number.
        """
        options = self._options(timeout, priority, progress)
        stacks = Stacks(self._framework)
        _, rows = await self._several(token_ids_list, self._row, lora_name, options, stacks)
        await self._with_framework(options)
        return stacks.whole(rows)

    # --- sampling ------------------------------------------------------------------------------

    async def sample(
        self,
        prompt_token_ids: TokenIds,
        max_tokens: int,
        eos_token_ids: Sequence[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> list[int]:
        """Continue a prompt on the worker, as one job: the sampled ids, without the EOS token.

        `temperature` 0 is greedy. A `seed` repeats: the same prompt and seed give the same ids.
        An EOS id outside the vocabulary ends nothing, and `max_tokens` 0 asks for nothing.
        `generate` tells more, and why it ended. Raises what `next_token_logprobs` raises.
        """
        want = Generate(max_tokens, eos_token_ids, temperature, seed)
        options = self._options(timeout, priority)
        (ids,) = await self._generate([prompt_token_ids], want, lora_name, options)
        return ids

    async def batch_sample(
        self,
        prompt_token_ids_list: Sequence[TokenIds],
        max_tokens: int,
        eos_token_ids: Sequence[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
        progress: bool = False,
    ) -> list[list[int]]:
        """Continue several prompts, each a job of its own, with one seed; see `sample`."""
        want = Generate(max_tokens, eos_token_ids, temperature, seed)
        options = self._options(timeout, priority, progress)
        return await self._generate(prompt_token_ids_list, want, lora_name, options)

    async def _generate(
        self,
        prompts: Sequence[TokenIds],
        want: Generate,
        lora_name: str | None,
        options: CallOptions,
    ) -> list[list[int]]:
        asked: list[Job] = []

        def make(jobs: JobMaker, adapter: AdapterOf, before: Sequence[Job]) -> list[Job]:
            given = as_asked(before, prompts)
            asked[:] = jobs.many(given, jobs.check(want), adapter(lora_name), one_seed=True)
            # For no tokens there is nothing to be asked.
            return asked if as_integer(want.max_tokens) else []

        _, found = await self._answers(make, (lora_name,), options)
        if not found:
            return [[] for _ in asked]
        return [generation.text_ids.tolist() for generation in cast(list[Generation], found)]

    def ask_again(self, job: Job, *, timeout: float | None = None) -> Answer:
        """The answer to a job that was made before, as of one among the dead; blocking."""
        options = self._options(timeout, None)
        if not isinstance(job, Job):
            raise PromptError(f"job={quoted(job)}: a job is needed, as a dead letter has one")
        info = run_blocking(self._load_info(options.deadline))
        (answer,) = run_blocking(self._caller.answers(info, [job], options))
        return cast(Answer, answer)

    # --- the pool ------------------------------------------------------------------------------

    async def pool_statistics(self, *, timeout: float | None = None) -> PoolStatistics:
        """The pool's counters, backlog, and living workers."""
        deadline = self._until(timeout)
        await self._load_info(deadline)
        return await self._run(self._read_statistics, deadline)

    async def wait_for_workers(self, timeout: float | None = 60.0) -> None:
        """Return once a worker is alive, also of a pool that nobody has served yet.

        Raises `PoolTimeout` after `timeout` seconds.
        """
        deadline, client = self._until(timeout), self._client
        while not await outcome(client.any_worker(), deadline, client.no_answer):
            left = deadline.left()
            if left is not None and left <= 0:
                raise deadline.error(
                    f"no worker of pool {self.pool!r} was alive", ": start one, lmpool worker"
                )
            await pause(WORKERS_POLL if left is None else min(WORKERS_POLL, left))

    # --- as genlm-backend calls them -----------------------------------------------------------

    next_token_logprobs_sync = blocking(next_token_logprobs)
    batch_next_token_logprobs_sync = blocking(batch_next_token_logprobs)
    sample_sync = blocking(sample)
    batch_sample_sync = blocking(batch_sample)
    pool_statistics_sync = blocking(pool_statistics)
    wait_for_workers_sync = blocking(wait_for_workers)


RowT = TypeVar("RowT")


def _of_sync(
    method: Callable[Concatenate[PooledLM[RowT], P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncPooledLM[RowT], P], T]:
    """The blocking twin of a method of `PooledLM`, for `SyncPooledLM`."""

    @functools.wraps(method)
    def twin(self: SyncPooledLM[RowT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run_blocking(method(self._lm, *args, **kwargs))

    return twin


class SyncPooledLM(BaseLM, Generic[RowT_co]):
    """`PooledLM` with every method blocking, under the same names: what `PooledLM.sync` is.

    It is the same client, with the same connection, cache and counters: closing one closes both.
    """

    def __init__(self, lm: PooledLM[RowT_co]) -> None:
        if not isinstance(lm, PooledLM):
            raise SettingsError(f"lm={quoted(lm)}: a PooledLM is needed; write lm.sync")
        super().__init__(lm.options, lm._client, lm._models)
        self._lm = lm

    def close(self, timeout: float | None = None) -> None:
        """Withdraw what is waited for and end the connection; see `PooledLM.close`."""
        self._lm.close(timeout)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return SyncPooledLM, (self._lm,)

    def ask_iter(
        self,
        asks: Asks,
        *,
        in_flight: int = 1024,
        ordered: bool = False,
        errors: Errors = "raise",
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> Iterator[tuple[int, AnswerTo[RowT_co] | LmpoolError]]:
        """The answers to asks of any number, as they come; see `PooledLM.ask_iter`."""
        window = self._lm._window(asks, in_flight, ordered, errors, timeout, priority)
        try:
            while (found := run_blocking(window.next())) is not None:
                yield found
        finally:
            window.close()

    def stream(
        self,
        token_ids: TokenIds,
        max_tokens: int = 20,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        stop: StopSequences = (),
        logprobs: bool = False,
        top_logprobs: int = 0,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> Iterator[Piece]:
        """A continuation in pieces as they are drawn; see `PooledLM.stream`."""
        want = Stream(
            max_tokens, eos_token_ids, temperature, seed,
            top_p, top_k, min_p, stop, logprobs, top_logprobs,
        )  # fmt: skip
        reader = self._lm._piece_reader(token_ids, want, lora_name, timeout, priority)
        try:
            while (piece := run_blocking(reader.next())) is not None:
                yield piece
        finally:
            reader.close()

    @overload
    def ask(
        self, token_ids: TokenIds, want: Row, lora_name: str | None = None, *,
        timeout: float | None = None, priority: Priority | None = None,
    ) -> RowT_co: ...  # fmt: skip
    @overload
    def ask(
        self, token_ids: TokenIds, want: OfPrompt[AnswerT], lora_name: str | None = None, *,
        timeout: float | None = None, priority: Priority | None = None,
    ) -> AnswerT: ...  # fmt: skip

    def ask(
        self,
        token_ids: TokenIds,
        want: Want | OfPrompt[AnswerT],
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> AnswerTo[RowT_co] | AnswerT:
        """The answer to one want of one prompt; see `PooledLM.ask`."""
        asking = self._lm.ask(
            token_ids, cast(Row, want), lora_name, timeout=timeout, priority=priority
        )
        return run_blocking(asking)

    @overload
    def ask_many(
        self, asks: Asks, *, errors: Literal["raise"] = "raise", timeout: float | None = None,
        priority: Priority | None = None, progress: bool = False,
    ) -> list[AnswerTo[RowT_co]]: ...  # fmt: skip
    @overload
    def ask_many(
        self, asks: Asks, *, errors: Errors, timeout: float | None = None,
        priority: Priority | None = None, progress: bool = False,
    ) -> list[AnswerTo[RowT_co] | LmpoolError]: ...  # fmt: skip

    def ask_many(
        self,
        asks: Asks,
        *,
        errors: Errors = "raise",
        timeout: float | None = None,
        priority: Priority | None = None,
        progress: bool = False,
    ) -> Sequence[AnswerTo[RowT_co] | LmpoolError]:
        """The answers to several asks, in their order; see `PooledLM.ask_many`."""
        asking = self._lm.ask_many(
            asks, errors=errors, timeout=timeout, priority=priority, progress=progress
        )
        return run_blocking(asking)

    top_logprobs = _of_sync(PooledLM[RowT_co].top_logprobs)
    batch_top_logprobs = _of_sync(PooledLM[RowT_co].batch_top_logprobs)
    token_logprobs = _of_sync(PooledLM[RowT_co].token_logprobs)
    batch_token_logprobs = _of_sync(PooledLM[RowT_co].batch_token_logprobs)
    score = _of_sync(PooledLM[RowT_co].score)
    batch_score = _of_sync(PooledLM[RowT_co].batch_score)
    draw = _of_sync(PooledLM[RowT_co].draw)
    batch_draw = _of_sync(PooledLM[RowT_co].batch_draw)
    logprobs_at = _of_sync(PooledLM[RowT_co].logprobs_at)
    generate = _of_sync(PooledLM[RowT_co].generate)
    batch_generate = _of_sync(PooledLM[RowT_co].batch_generate)
    last_hidden_state = _of_sync(PooledLM[RowT_co].last_hidden_state)
    head = _of_sync(PooledLM[RowT_co].head)
    next_token_logprobs = _of_sync(PooledLM[RowT_co].next_token_logprobs)
    batch_next_token_logprobs = _of_sync(PooledLM[RowT_co].batch_next_token_logprobs)
    sample = _of_sync(PooledLM[RowT_co].sample)
    batch_sample = _of_sync(PooledLM[RowT_co].batch_sample)
    pool_statistics = _of_sync(PooledLM[RowT_co].pool_statistics)
    wait_for_workers = _of_sync(PooledLM[RowT_co].wait_for_workers)
