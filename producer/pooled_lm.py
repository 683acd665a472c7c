"""`PooledLM`: a language model that a pool of workers serves."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import secrets
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import Any, Self, cast

import numpy as np

from lmpool.commands import Server
from lmpool.errors import (
    LmpoolError,
    PoolError,
    PoolTimeout,
    PromptError,
    SettingsError,
    UnknownAdapter,
)
from lmpool.keys import GROUP
from lmpool.liveness import any_alive
from lmpool.model_info import Encoding, ModelInfo
from lmpool.producer.calls import Ask, Call
from lmpool.producer.client import Client
from lmpool.producer.control import ask_workers
from lmpool.producer.prompts import TokenIds, prompt_bytes
from lmpool.producer.statistics import PoolStatistics, pool_statistics
from lmpool.producer.tokens import byte_tokens, load_tokenizer, string_tokens
from lmpool.settings import ClientOptions, mask_url, refuse_unknown_variables
from lmpool.vocabulary import Vocabulary
from lmpool.wire import Digester, Row

ADAPTERS_FRESH = 1.0
"""Seconds for which the list of adapters is trusted."""


class PooledLM:
    """Next-token log-probabilities from a pool; made by `lmpool.connect` or `lmpool.embedded`.

    A drop-in for genlm-backend's ``AsyncLM``. Every method works from any thread and any event
    loop; each ``async`` one has a ``_sync`` twin, which may also be called inside a running loop
    (and then blocks it). Rows are float32 [vocab_size], natural log, normalized: torch tensors
    that the caller owns, or read-only numpy arrays.

    Waiting calls take `timeout` in seconds and then raise `PoolTimeout`. Cancelling a call
    withdraws it: what nobody waits for is not computed.
    """

    def __init__(self, options: ClientOptions | None = None) -> None:
        self.options = ClientOptions() if options is None else options
        self._client = Client(self.options)
        self._digester: Digester | None = None
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[Call]] = (
            weakref.WeakKeyDictionary()
        )
        self._adapters: dict[str, str] = {}
        self._adapters_read = -math.inf
        self._torch = _wants_torch(self.options.framework)
        # Whoever forgets to close still leaves nothing behind.
        self._finalizer = weakref.finalize(self, self._client.close)

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

    # --- log-probabilities ---------------------------------------------------------------------

    async def next_token_logprobs(
        self, token_ids: TokenIds, lora_name: str | None = None, *, timeout: float | None = None
    ) -> Any:
        """Log-probabilities of the token after a prompt, float32 [vocab_size].

        Calls made in the same turn of the event loop travel as one request.

        Raises:
            PromptError: (a ValueError) the prompt is empty, too long, or has bad ids.
            UnknownAdapter: (a ValueError) no adapter `lora_name`.
            PoolTimeout, NoWorkers, PoolBusy, PromptFailed, ServerError: see `lmpool.errors`.
        """
        info = self._client.info or await self._info_async()
        adapter = None if lora_name is None else await self._adapter_async(lora_name)
        ask = self._ask_logprobs(info, token_ids, adapter)
        row = self._client.lookup(ask)
        if row is None:
            (row,) = await self._rows_async([ask], timeout)
        return self._one(row)

    def next_token_logprobs_sync(
        self, token_ids: TokenIds, lora_name: str | None = None, *, timeout: float | None = None
    ) -> Any:
        """`next_token_logprobs`, blocking."""
        info = self._client.info or self._info_sync()
        adapter = None if lora_name is None else self._adapter_sync(lora_name)
        ask = self._ask_logprobs(info, token_ids, adapter)
        row = self._client.lookup(ask)
        if row is None:
            (row,) = self._rows_sync([ask], timeout)
        return self._one(row)

    async def batch_next_token_logprobs(
        self,
        token_ids_list: Sequence[TokenIds],
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        progress: bool = False,
    ) -> Any:
        """Rows of several prompts, float32 [number of prompts, vocab_size], in their order.

        Every prompt is checked before any is sent. Equal prompts are computed once.
        `progress=True` shows a bar.
        """
        info = self._client.info or await self._info_async()
        adapter = None if lora_name is None else await self._adapter_async(lora_name)
        asks = self._ask_batch(info, token_ids_list, adapter)
        return self._stack(await self._rows_async(asks, timeout, progress), info)

    def batch_next_token_logprobs_sync(
        self,
        token_ids_list: Sequence[TokenIds],
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        progress: bool = False,
    ) -> Any:
        """`batch_next_token_logprobs`, blocking."""
        info = self._client.info or self._info_sync()
        adapter = None if lora_name is None else self._adapter_sync(lora_name)
        asks = self._ask_batch(info, token_ids_list, adapter)
        return self._stack(self._rows_sync(asks, timeout, progress), info)

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
        progress: bool = False,
    ) -> list[list[int]]:
        """Continue several prompts; see `sample`."""
        info = self._client.info or await self._info_async()
        adapter = None if lora_name is None else await self._adapter_async(lora_name)
        asks = self._ask_samples(
            info, prompt_token_ids_list, max_tokens, eos_token_ids, temperature, seed, adapter
        )
        return [row.token_ids() for row in await self._rows_async(asks, timeout, progress)]

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
        progress: bool = False,
    ) -> list[list[int]]:
        """`batch_sample`, blocking."""
        info = self._client.info or self._info_sync()
        adapter = None if lora_name is None else self._adapter_sync(lora_name)
        asks = self._ask_samples(
            info, prompt_token_ids_list, max_tokens, eos_token_ids, temperature, seed, adapter
        )
        return [row.token_ids() for row in self._rows_sync(asks, timeout, progress)]

    # --- vocabulary ----------------------------------------------------------------------------

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        info = self.info
        key = self._client.keys.vocabulary(info.fingerprint8)
        found = self._client.run(lambda server: server.get(key)).result()
        if found is None:
            raise PoolError(f"pool {self.pool!r} has published no vocabulary")
        return Vocabulary.unpack(found)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer (transformers), as the pool published it."""
        return load_tokenizer(self._vocabulary, self.info)

    @cached_property
    def byte_vocab(self) -> list[Any]:
        """Every token: its bytes, with its `token_id`; genlm's ``Token`` where installed."""
        return byte_tokens(self._vocabulary.tokens)

    @cached_property
    def str_vocab(self) -> list[str]:
        """Every token as text; what is no UTF-8 as the tokenizer spells it."""
        return string_tokens(self._vocabulary.tokens, self.tokenizer)

    # --- adapters and caches -------------------------------------------------------------------

    def add_new_lora(self, lora_path: str, lora_name: str) -> None:
        """Register the LoRA adapter in folder `lora_path` (on the workers) as `lora_name`.

        The folder must be one that the operator allows (LMPOOL_ADAPTER_DIRS). Replaces an adapter
        of that name. Raises `AdapterError` with each worker's reason.
        """
        self._control("add_lora", lora_name, lora_path)
        self._adapters_read = -math.inf

    def remove_lora(self, lora_name: str) -> None:
        """Unregister an adapter on every worker; unknown names raise `UnknownAdapter`."""
        self._adapters_read = -math.inf
        self._adapter_sync(lora_name)
        self._control("remove_lora", lora_name)
        self._adapters_read = -math.inf

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
        workers = [worker["id"] for worker in self.pool_statistics_sync()["workers"]]
        ask_workers(self.url, self._client.keys, workers, function, *arguments)

    async def _adapter_async(self, name: str) -> str:
        if not self._adapters_known(name):
            self._keep_adapters(await asyncio.wrap_future(self._client.run(self._read_adapters)))
        return self._adapter(name)

    def _adapter_sync(self, name: str) -> str:
        if not self._adapters_known(name):
            self._info_sync()
            self._keep_adapters(self._client.run(self._read_adapters).result())
        return self._adapter(name)

    def _adapters_known(self, name: str) -> bool:
        fresh = time.monotonic() - self._adapters_read < ADAPTERS_FRESH
        return fresh and name in self._adapters

    def _read_adapters(self, server: Server) -> dict[bytes, bytes]:
        return server.hgetall(self._client.lanes[0].adapters)

    def _keep_adapters(self, found: dict[bytes, bytes]) -> None:
        self._adapters = {
            name.decode(): entry.partition(b"\n")[0].decode() for name, entry in found.items()
        }
        self._adapters_read = time.monotonic()

    def _adapter(self, name: str) -> str:
        fingerprint = self._adapters.get(name) if isinstance(name, str) else None
        if fingerprint is None:
            known = ", ".join(sorted(self._adapters)) or "none"
            raise UnknownAdapter(
                f"unknown LoRA adapter {name!r}: register it with add_new_lora(); known: {known}"
            )
        return f"{name}@{fingerprint}"

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

    def _read_statistics(self, server: Server) -> PoolStatistics:
        return pool_statistics(server, self._client.lanes, GROUP)

    async def wait_for_workers(self, timeout: float = 60.0) -> None:
        """Return once a worker is alive; `PoolTimeout` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        await self._info_async()
        while not await asyncio.wrap_future(
            self._client.run(lambda server: any_alive(server, self._client.lanes[0]))
        ):
            if time.monotonic() >= deadline:
                raise PoolTimeout(f"no worker of pool {self.pool!r} within {timeout:g} s")
            await asyncio.sleep(0.1)

    # --- asks ----------------------------------------------------------------------------------

    def _ask_logprobs(self, info: ModelInfo, token_ids: TokenIds, adapter: str | None) -> Ask:
        tokens = prompt_bytes(token_ids, info.vocab_size, info.max_prompt_tokens)
        encoding = self._encoding(info)
        digest = self._digests(info).logprobs(tokens, encoding, adapter)
        return Ask(digest.hex().encode(), "logprobs", tokens, adapter, {"encoding": encoding})

    def _ask_batch(
        self, info: ModelInfo, prompts: Sequence[TokenIds], adapter: str | None
    ) -> list[Ask]:
        asks = []
        for number, prompt in enumerate(prompts):
            try:
                asks.append(self._ask_logprobs(info, prompt, adapter))
            except PromptError as error:
                raise PromptError(f"prompt {number}: {error}") from None
        return asks

    def _ask_samples(
        self,
        info: ModelInfo,
        prompts: Sequence[TokenIds],
        max_tokens: int,
        eos_token_ids: Sequence[int],
        temperature: float,
        seed: int | None,
        adapter: str | None,
    ) -> list[Ask]:
        want = _sampling(info, max_tokens, eos_token_ids, temperature, seed)
        asks = []
        for prompt in prompts:
            tokens = prompt_bytes(prompt, info.vocab_size, info.max_prompt_tokens)
            # Without a seed every continuation is its own: a fresh one keeps digests apart.
            mine = {**want, "seed": secrets.randbits(63) if seed is None else want["seed"]}
            digest = self._digests(info).job("sample", tokens, mine, adapter)
            asks.append(Ask(digest.hex().encode(), "sample", tokens, adapter, mine))
        return asks

    def _digests(self, info: ModelInfo) -> Digester:
        if self._digester is None:
            self._digester = Digester(info.fingerprint)
        return self._digester

    def _encoding(self, info: ModelInfo) -> Encoding:
        chosen = self.options.encoding
        return info.encoding if chosen == "auto" else chosen

    # --- waiting -------------------------------------------------------------------------------

    def _deadline(self, timeout: float | None) -> tuple[float | None, float | None]:
        if timeout is None:
            timeout = self.options.request_timeout
        if timeout is None:
            return None, None
        if isinstance(timeout, bool) or not timeout > 0:
            raise SettingsError(f"timeout={timeout!r}: write a positive number of seconds, or None")
        return timeout, time.monotonic() + timeout

    async def _rows_async(
        self, asks: Sequence[Ask], timeout: float | None, progress: bool = False
    ) -> list[Row]:
        limit, deadline = self._deadline(timeout)
        loop = asyncio.get_running_loop()
        call = Call(asks, deadline).for_loop(loop)
        # All that this turn of the loop asks for leaves together, at its end.
        turn = self._turns.get(loop)
        if turn is None:
            turn = self._turns[loop] = []
            loop.call_soon(self._end_turn, loop)
        turn.append(call)
        try:
            if limit is None and not progress:
                await call.wait_async()
            else:
                async with asyncio.timeout(limit):
                    await (self._watch_async(call) if progress else call.wait_async())
        except TimeoutError:
            self._client.forget(call)
            raise self._timed_out(call, limit) from None
        except BaseException:
            self._client.forget(call)
            raise
        return _outcome(call)

    def _end_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        calls = self._turns.pop(loop, [])
        try:
            self._client.submit(calls)
        except LmpoolError as error:
            for call in calls:
                if not call.done:
                    call.error = error
                call._wake()

    def _rows_sync(
        self, asks: Sequence[Ask], timeout: float | None, progress: bool = False
    ) -> list[Row]:
        limit, deadline = self._deadline(timeout)
        call = Call(asks, deadline).for_thread()
        self._client.submit([call])
        try:
            if progress:
                with _bar(len(asks)) as update:
                    while not call.wait(_tick(deadline)):
                        update(len(asks) - call.left)
                        if deadline is not None and time.monotonic() >= deadline:
                            break
                    update(len(asks) - call.left)
                done = call.done
            else:
                done = call.wait(limit)
        except BaseException:
            self._client.forget(call)
            raise
        if not done:
            self._client.forget(call)
            raise self._timed_out(call, limit)
        return _outcome(call)

    async def _watch_async(self, call: Call) -> None:
        with _bar(len(call.asks)) as update:
            while not call.done:
                await asyncio.wait({call.future}, timeout=0.1)
                update(len(call.asks) - call.left)

    def _timed_out(self, call: Call, limit: float | None) -> PoolTimeout:
        return PoolTimeout(
            f"{call.left} of {len(call.asks)} rows were not there after {limit:g} s; "
            f"they were withdrawn (pool {self.pool!r})"
        )

    # --- rows ----------------------------------------------------------------------------------

    def _one(self, row: Row) -> Any:
        values = row.logprobs()
        if self._torch:
            import torch

            return torch.from_numpy(np.array(values) if row.encoding == "f32" else values)
        values.flags.writeable = False
        return values

    def _stack(self, rows: Sequence[Row], info: ModelInfo) -> Any:
        block = np.empty((len(rows), info.vocab_size), np.float32)
        for number, row in enumerate(rows):
            block[number] = row.logprobs()
        if self._torch:
            import torch

            return torch.from_numpy(block)
        block.flags.writeable = False
        return block


def connect(url: str | None = None, pool: str | None = None, **options: Any) -> PooledLM:
    """A client of a pool: `PooledLM`, which connects when it is entered or first asked.

    Options are those of `lmpool.settings.ClientOptions`; what is not given comes from
    ``LMPOOL_*`` variables. Raises `SettingsError` for values that cannot be used.
    """
    refuse_unknown_variables()
    return PooledLM(ClientOptions(url=url, pool=pool, **options))


def _wants_torch(framework: str) -> bool:
    if framework == "auto":
        return importlib.util.find_spec("torch") is not None
    if framework == "torch" and importlib.util.find_spec("torch") is None:
        raise SettingsError("framework='torch': torch is not installed; write framework='numpy'")
    return framework == "torch"


def _sampling(
    info: ModelInfo,
    max_tokens: int,
    eos_token_ids: Sequence[int],
    temperature: float,
    seed: int | None,
) -> dict[str, Any]:
    """What a sampling job wants, checked."""
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise PromptError(f"max_tokens={max_tokens!r}: write a positive integer")
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    if not number or not 0 <= temperature < math.inf:
        raise PromptError(f"temperature={temperature!r}: write a number of 0 (greedy) or more")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise PromptError(f"seed={seed!r}: write an integer, or None")
    eos = sorted({int(token) for token in eos_token_ids})
    if any(not 0 <= token < info.vocab_size for token in eos):
        raise PromptError(f"eos_token_ids={eos}: outside [0, {info.vocab_size})")
    return {
        "max_tokens": max_tokens,
        "eos": eos,
        "temperature": float(temperature),
        "seed": 0 if seed is None else seed & (2**63 - 1),
    }


def _outcome(call: Call) -> list[Row]:
    if call.error is not None:
        # Several callers may share one error: each raises its own.
        raise type(call.error)(*call.error.args)
    return cast(list[Row], call.rows)


def _tick(deadline: float | None) -> float:
    return 0.1 if deadline is None else max(0.0, min(0.1, deadline - time.monotonic()))


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    """A progress bar; yields a function that takes how many rows are there."""
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="row") as bar:

        def update(done: int) -> None:
            bar.update(done - bar.n)

        yield update
