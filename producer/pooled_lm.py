"""`PooledLM`: a language model that a pool of workers serves."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

from lmpool.commands import Fields
from lmpool.errors import PoolMismatch, PoolTimeout, UnknownAdapter
from lmpool.keys import Priority, ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.producer.client import Client
from lmpool.producer.control import ask_workers
from lmpool.producer.frameworks import Framework
from lmpool.producer.jobs import JobMaker
from lmpool.producer.prompts import TokenIds, prompt_bytes
from lmpool.producer.served import Served
from lmpool.producer.statistics import PoolStatistics, pool_statistics
from lmpool.producer.waiting import Terms, Waiting
from lmpool.servers import Servers
from lmpool.settings import ClientOptions, mask_url, refuse_unknown_variables
from lmpool.wants import Answer as WantAnswer
from lmpool.wants import Generate, Row
from lmpool.wire import Job

Make = Callable[[JobMaker, str | None], list[Job]]
"""Makes the asks of a call, given how a model is asked and the adapter that is meant."""
Answer = tuple[Served, list[Any]]

WORKERS_POLL: Final = 0.1


class PooledLM:
    """Next-token log-probabilities from a pool; made by `lmpool.connect` or `lmpool.embedded`.

    A drop-in for genlm-backend's ``AsyncLM``. Every method works from any thread and any event
    loop; each ``async`` one has a ``_sync`` twin, which may also be called inside a running loop
    (and then blocks it). Rows are float32 [vocab_size], natural log, normalized: torch tensors
    that the caller owns, or read-only numpy arrays.

    Waiting calls take `timeout` in seconds and then raise `PoolTimeout`, and `priority`, which is
    ``"interactive"`` or ``"batch"`` (lets interactive jobs go first). Cancelling a call withdraws
    it: what nobody waits for is not computed.
    """

    def __init__(self, options: ClientOptions | None = None) -> None:
        self.options = ClientOptions() if options is None else options
        self._client = Client(self.options)
        self._framework = Framework(self.options.framework)
        encoding = self.options.encoding
        self._row = Row(None if encoding == "auto" else encoding)
        self._waiting = Waiting(self._client)
        self._last_served: Served | None = None
        # Whoever forgets to close still leaves nothing behind.
        self._finalizer: weakref.finalize[..., PooledLM] = weakref.finalize(
            self, self._client.close_soon
        )

    # --- life ----------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The server's URL, password included: what another process needs to connect."""
        return self.options.url

    @property
    def pool(self) -> str:
        """The pool's name."""
        return self.options.pool

    @property
    def info(self) -> ModelInfo:
        """What the pool serves. Connects at the first call."""
        return self._info_sync()

    def __repr__(self) -> str:
        return f"PooledLM(url={mask_url(self.url)!r}, pool={self.pool!r})"

    def close(self) -> None:
        """Withdraw what is waited for and end the connection."""
        self._finalizer()

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        try:
            self._info_sync()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        try:
            await self._info_async()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _info_async(self) -> ModelInfo:
        if self._client.info is not None:
            return self._client.info
        # Shielded: one caller's cancellation must not end what others wait for.
        return await asyncio.shield(asyncio.wrap_future(self._client.load_info()))

    def _info_sync(self) -> ModelInfo:
        return self._client.info or self._client.load_info().result()

    def _served(self, info: ModelInfo) -> Served:
        served = self._last_served
        if served is None or served.info is not info:
            served = self._last_served = Served(self._client, info)
        return served

    def _served_sync(self) -> Served:
        return self._served(self._info_sync())

    def _follow_sync(self) -> None:
        self._info_sync()
        self._client.follow().result()

    # --- asking --------------------------------------------------------------------------------

    async def _rows_async(self, make: Make, lora_name: str | None, terms: Terms) -> Answer:
        """The rows of what `make` asks for, and of whom.

        Asked anew of a pool that was replaced, if the client follows, and once of an adapter that
        was replaced: all rows of a call are of one model and one adapter.
        """
        asked_again = False
        while True:
            served = self._served(self._client.info or await self._info_async())
            adapter = None
            if lora_name is not None:
                if not served.adapters.knows(lora_name):
                    found = self._client.run(self._read_adapters)
                    served.adapters.keep(await asyncio.wrap_future(found))
                adapter = served.adapters.reference(lora_name)
            asks = make(served.jobs, adapter)
            row = self._client.lookup(asks[0]) if len(asks) == 1 else None
            if row is not None:
                return served, [row]
            try:
                return served, await self._waiting.rows_async(served.info, asks, terms)
            except PoolMismatch:
                if self._client.info is served.info:
                    raise
            except UnknownAdapter:
                if asked_again:
                    raise
                asked_again = True
                served.adapters.forget()

    def _rows_sync(self, make: Make, lora_name: str | None, terms: Terms) -> Answer:
        """`_rows_async`, blocking."""
        asked_again = False
        while True:
            served = self._served_sync()
            adapter = None
            if lora_name is not None:
                if not served.adapters.knows(lora_name):
                    served.adapters.keep(self._client.run(self._read_adapters).result())
                adapter = served.adapters.reference(lora_name)
            asks = make(served.jobs, adapter)
            row = self._client.lookup(asks[0]) if len(asks) == 1 else None
            if row is not None:
                return served, [row]
            try:
                return served, self._waiting.rows_sync(served.info, asks, terms)
            except PoolMismatch:
                if self._client.info is served.info:
                    raise
            except UnknownAdapter:
                if asked_again:
                    raise
                asked_again = True
                served.adapters.forget()

    def _read_adapters(self, servers: Servers) -> Fields:
        shard = self._client.shards[0]
        return servers.for_shard(shard).hgetall(shard.adapters)

    # --- log-probabilities ---------------------------------------------------------------------

    async def next_token_logprobs(
        self,
        token_ids: TokenIds,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> Any:
        """Log-probabilities of the token after a prompt, float32 [vocab_size].

        Calls made in the same turn of the event loop travel as one request.

        Raises:
            PromptError: (a ValueError) the prompt is empty, too long, or has bad ids.
            UnknownAdapter: (a ValueError) no adapter `lora_name`.
            PoolTimeout, NoWorkers, PoolBusy, PromptFailed, ServerError: see `lmpool.errors`.
        """
        terms = self._waiting.terms(timeout, priority)
        _, (row,) = await self._rows_async(
            lambda jobs, adapter: [jobs.one(token_ids, jobs.check(self._row), adapter)],
            lora_name,
            terms,
        )
        return self._framework.one(row)

    def next_token_logprobs_sync(
        self,
        token_ids: TokenIds,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> Any:
        """`next_token_logprobs`, blocking."""
        terms = self._waiting.terms(timeout, priority)
        _, (row,) = self._rows_sync(
            lambda jobs, adapter: [jobs.one(token_ids, jobs.check(self._row), adapter)],
            lora_name,
            terms,
        )
        return self._framework.one(row)

    async def batch_next_token_logprobs(
        self,
        token_ids_list: Sequence[TokenIds],
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
        progress: bool = False,
    ) -> Any:
        """Rows of several prompts, float32 [number of prompts, vocab_size], in their order.

        Every prompt is checked before any is sent. Equal prompts are computed once.
        `progress=True` shows a bar.
        """
        terms = self._waiting.terms(timeout, priority, progress)
        served, rows = await self._rows_async(
            lambda jobs, adapter: jobs.many(token_ids_list, jobs.check(self._row), adapter),
            lora_name,
            terms,
        )
        return self._framework.stack(rows, served.info.vocab_size)

    def batch_next_token_logprobs_sync(
        self,
        token_ids_list: Sequence[TokenIds],
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
        progress: bool = False,
    ) -> Any:
        """`batch_next_token_logprobs`, blocking."""
        terms = self._waiting.terms(timeout, priority, progress)
        served, rows = self._rows_sync(
            lambda jobs, adapter: jobs.many(token_ids_list, jobs.check(self._row), adapter),
            lora_name,
            terms,
        )
        return self._framework.stack(rows, served.info.vocab_size)

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
        """
        (ids,) = await self.batch_sample(
            [prompt_token_ids],
            max_tokens,
            eos_token_ids,
            temperature,
            seed,
            lora_name,
            timeout=timeout,
            priority=priority,
        )
        return ids

    def sample_sync(
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
        """`sample`, blocking."""
        (ids,) = self.batch_sample_sync(
            [prompt_token_ids],
            max_tokens,
            eos_token_ids,
            temperature,
            seed,
            lora_name,
            timeout=timeout,
            priority=priority,
        )
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
        """Continue several prompts; see `sample`."""
        terms = self._waiting.terms(timeout, priority, progress)
        _, rows = await self._rows_async(
            lambda jobs, adapter: jobs.many(
                prompt_token_ids_list,
                jobs.check(Generate(max_tokens, eos_token_ids, temperature, seed)),
                adapter,
            ),
            lora_name,
            terms,
        )
        return [row.token_ids.tolist() for row in rows]

    def batch_sample_sync(
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
        """`batch_sample`, blocking."""
        terms = self._waiting.terms(timeout, priority, progress)
        _, rows = self._rows_sync(
            lambda jobs, adapter: jobs.many(
                prompt_token_ids_list,
                jobs.check(Generate(max_tokens, eos_token_ids, temperature, seed)),
                adapter,
            ),
            lora_name,
            terms,
        )
        return [row.token_ids.tolist() for row in rows]

    def ask_again(self, job: Job, *, timeout: float | None = None) -> WantAnswer:
        """The answer to a job that was made before, as of a job among the dead; blocking."""
        terms = self._waiting.terms(timeout, None)
        (row,) = self._waiting.rows_sync(self._info_sync(), [job], terms)
        return row

    @property
    def shards(self) -> tuple[ShardKeys, ...]:
        """The keys of the pool's shards. Connects at the first call."""
        self._info_sync()
        return self._client.shards

    # --- vocabulary ----------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (transformers), as the pool published it."""
        return self._served_sync().tokenizer

    @property
    def byte_vocab(self) -> list[Any]:
        """Every token: its bytes, with its `token_id`; genlm's ``Token`` where installed."""
        return self._served_sync().byte_vocab

    @property
    def str_vocab(self) -> list[str]:
        """Every token as text; what is no UTF-8 as the tokenizer spells it."""
        return self._served_sync().str_vocab

    # --- adapters and caches -------------------------------------------------------------------

    def add_new_lora(self, lora_path: str, lora_name: str) -> None:
        """Register the LoRA adapter in folder `lora_path` (on the workers) as `lora_name`.

        The folder must be one that the operator allows (LMPOOL_ADAPTER_DIRS). Replaces an adapter
        of that name. Raises `AdapterError` with each worker's reason.
        """
        self._control("add_lora", lora_name, lora_path)
        self._served_sync().adapters.forget()

    def remove_lora(self, lora_name: str) -> None:
        """Unregister an adapter on every worker; unknown names raise `UnknownAdapter`."""
        self._follow_sync()
        adapters = self._served_sync().adapters
        adapters.keep(self._client.run(self._read_adapters).result())
        adapters.reference(lora_name)
        self._control("remove_lora", lora_name)
        adapters.forget()

    def set_lora(self, lora_path: str, lora_name: str) -> None:
        """Not offered: an adapter is chosen per call, with `lora_name=`."""
        raise RuntimeError("there is no active adapter: pass lora_name= to each call")

    def clear_lora(self) -> None:
        """Not offered: an adapter is chosen per call, with `lora_name=`."""
        raise RuntimeError("there is no active adapter: leave lora_name= out for the base model")

    def cache_kv(self, prompt_tokens: TokenIds) -> None:
        """Have every worker compute and keep a prefix's state, where its engine keeps state."""
        info = self.info
        tokens = prompt_bytes(prompt_tokens, info.vocab_size, info.max_prompt_tokens)
        self._control("cache_prefix", tokens)

    def clear_kv_cache(self) -> None:
        """Have every worker drop its engine's state."""
        self._control("clear_cache")

    def clear_cache(self) -> None:
        """Drop this client's own cache of rows."""
        self._client.cache.clear()

    def reset_async_queries(self) -> None:
        """Withdraw everything that is waited for through this client."""
        self._client.withdraw_all()

    def _control(self, function: str, *arguments: Any) -> None:
        self._follow_sync()
        workers = [worker["id"] for worker in self.pool_statistics_sync()["workers"]]
        ask_workers(self.url, self._client.keys, workers, function, *arguments)

    # --- numbers -------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """This client's counters: `requests`, and how each was answered; see the README."""
        return self._client.statistics

    async def pool_statistics(self) -> PoolStatistics:
        """The pool's counters, backlog, and living workers."""
        await self._info_async()
        return await asyncio.wrap_future(self._client.run(self._read_statistics))

    def pool_statistics_sync(self) -> PoolStatistics:
        """`pool_statistics`, blocking."""
        self._info_sync()
        return self._client.run(self._read_statistics).result()

    def _read_statistics(self, servers: Servers) -> PoolStatistics:
        return pool_statistics(servers, self._client.shards)

    async def wait_for_workers(self, timeout: float = 60.0) -> None:
        """Return once a worker is alive, also of a pool that nobody has served yet.

        Raises `PoolTimeout` after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not await asyncio.wrap_future(self._client.any_worker()):
            self._give_up_at(deadline, timeout)
            await asyncio.sleep(WORKERS_POLL)

    def wait_for_workers_sync(self, timeout: float = 60.0) -> None:
        """`wait_for_workers`, blocking."""
        deadline = time.monotonic() + timeout
        while not self._client.any_worker().result():
            self._give_up_at(deadline, timeout)
            time.sleep(WORKERS_POLL)

    def _give_up_at(self, deadline: float, timeout: float) -> None:
        if time.monotonic() >= deadline:
            raise PoolTimeout(
                f"no worker of pool {self.pool!r} within {timeout:g} s: start one, lmpool worker"
            )


def connect(url: str | None = None, pool: str | None = None, **options: Any) -> PooledLM:
    """A client of a pool: `PooledLM`, which connects when it is entered or first asked.

    Options are those of `lmpool.settings.ClientOptions`; what is not given comes from
    ``LMPOOL_*`` variables. Raises `SettingsError` for values that cannot be used.
    """
    refuse_unknown_variables()
    return PooledLM(ClientOptions(url=url, pool=pool, **options))
