"""What `PooledLM` and `SyncPooledLM` share: all that is asked of a pool besides rows and tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Final, NoReturn, Self, TypeVar

from lmpool.checks import is_text, quoted
from lmpool.errors import PromptError, ServerUnreachable, UnknownPool
from lmpool.keys import ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.producer.adapters import (
    check_folder,
    check_lora_name,
    check_new_name,
    read_registry,
)
from lmpool.producer.blocking import outcome, pause, run_blocking
from lmpool.producer.client import Client
from lmpool.producer.control import Argument, ask_workers
from lmpool.producer.deadline import Deadline
from lmpool.producer.prompts import prompt_bytes
from lmpool.producer.served_model import ServedModel, ServedModels
from lmpool.producer.statistics import PoolStatistics, pool_statistics, workers_in
from lmpool.producer.tokens import ByteToken, Tokenizer, encode_conversation
from lmpool.producer.waits import Future
from lmpool.server_url import mask_url
from lmpool.servers import Servers
from lmpool.settings import ClientOptions
from lmpool.token_ids import TokenIds, listed, packed
from lmpool.vocabulary import Vocabulary

INFO_POLL: Final = 0.1
"""Seconds between two looks whether a pool has come to be served."""
IDS_MOST: Final = 1 << 24
"""Ids of one text."""
AT_ONCE: Final = 0.01
"""Seconds in which a client ends that has asked for nothing yet, or has waited for as long as it
may."""

T = TypeVar("T")


class BaseLM:
    """A model that a pool serves. These methods may block; all work from any thread."""

    def __init__(self, options: ClientOptions, client: Client, models: ServedModels) -> None:
        self.options = options
        self._client = client
        self._models = models

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
        """What the pool serves: model, vocabulary size, longest prompt, special token ids.

        Connects at the first call. Raises `UnknownPool` where nobody serves it within the client's
        `workers_timeout`, and `ServerError` where there is no server. Like every call that takes no
        timeout, it waits `request_timeout` at most.
        """
        return self._client.info or run_blocking(self._load_info(self._until(None)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(url={mask_url(self.url)!r}, pool={self.pool!r})"

    def close(self, timeout: float | None = None) -> None:
        """Withdraw what is waited for and end the connection; see `PooledLM.close`."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            run_blocking(self._load_info(self._until(None)))
        except BaseException:
            self.close(AT_ONCE)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _until(self, timeout: float | None) -> Deadline:
        return Deadline.checked(timeout, self.options.request_timeout)

    async def _load_info(self, deadline: Deadline) -> ModelInfo:
        """The model info, for which a pool that nobody has served is waited for."""
        client = self._client
        if client.info is not None:
            return client.info
        patience = Deadline(self.options.workers_timeout)
        while True:
            try:
                return await outcome(client.load_info(), deadline, client.no_answer, shared=True)
            except UnknownPool:
                if not patience.left() or deadline.left() == 0.0:
                    raise
            left = deadline.left()
            await pause(INFO_POLL if left is None else min(INFO_POLL, left))

    async def _run(self, function: Callable[[Servers], T], deadline: Deadline) -> T:
        """What a function brings that reads from the server."""
        return await outcome(self._client.run(function), deadline, self._client.no_answer)

    async def _patiently(self, ask: Callable[[], Future[T]], deadline: Deadline) -> T:
        """What `ask` brings, asked again while the server is away, for `reconnect_timeout`: as
        long as prompts wait for it."""
        patience = Deadline(self.options.reconnect_timeout)
        while True:
            try:
                return await outcome(ask(), deadline, self._client.no_answer)
            except ServerUnreachable:
                if not patience.left():
                    raise
            left = deadline.left()
            await pause(INFO_POLL if left is None else min(INFO_POLL, left))

    def _model(self, deadline: Deadline) -> ServedModel:
        return self._models.of(run_blocking(self._load_info(deadline)))

    def _model_with_vocabulary(self) -> ServedModel:
        deadline = self._until(None)
        model = self._model(deadline)
        model.read_vocabulary(deadline)
        return model

    def _read_vocabulary(self) -> Vocabulary:
        return self._model_with_vocabulary().vocabulary

    @property
    def shards(self) -> tuple[ShardKeys, ...]:
        """The keys of the pool's shards, which it may leave for others (``lmpool shards``).

        Asks the server.
        """
        deadline = self._until(None)
        run_blocking(self._load_info(deadline))
        return run_blocking(self._run(self._client.shards_now, deadline))

    # --- vocabulary ----------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, of transformers, as the pool published it.

        Raises `PoolError` where the pool published none, or transformers is not installed.
        """
        return self._model_with_vocabulary().tokenizer

    @property
    def byte_vocab(self) -> list[ByteToken]:
        """Every token: its bytes, with its `token_id`; genlm's ``Token`` where installed.

        Raises `PoolError` where the pool published none.
        """
        return self._model_with_vocabulary().byte_vocab

    @property
    def str_vocab(self) -> list[str]:
        """Every token as text; what is no UTF-8 as the tokenizer spells it."""
        return self._model_with_vocabulary().str_vocab

    def encode(self, text: str, bos: bool | None = None) -> list[int]:
        """A text as token ids.

        The tokens that a model wants around a text are as its tokenizer has them; `bos` says
        whether there are any: False is none, True begins with the BOS token in any case. Raises
        `PromptError` for what is no text, and what `tokenizer` raises.
        """
        if bos is not None and type(bos) is not bool:
            raise PromptError(f"bos={quoted(bos)}: write True, False, or None")
        if not is_text(text):
            raise PromptError(f"{quoted(text)}: a text in UTF-8 is needed")
        special = bos is not False
        # Of which parts may be asked: what is too long is refused where it is.
        ids = list(self.tokenizer.encode(text, add_special_tokens=special, verbose=False))
        first = self.info.bos_token_id
        if not bos or ids[:1] == [first]:
            return ids
        if first is None:
            raise PromptError(f"bos=True: {self.info.model} has no BOS token")
        return [first, *ids]

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """A conversation as token ids, as the model was taught to read it.

        `messages` are mappings with ``role`` and ``content``; with `add_generation_prompt` the
        model's turn is next. Raises `PromptError` for what the model's chat template does not
        take, `PoolError` where it has none, and what `tokenizer` raises.
        """
        return encode_conversation(self.tokenizer, self.info, messages, add_generation_prompt)

    def decode(self, token_ids: TokenIds) -> str:
        """The text of token ids, special tokens included.

        Raises what `tokenizer` raises, and `PromptError` for ids that the vocabulary does not have.
        """
        ids = listed(token_ids, IDS_MOST, "token_ids")
        packed(ids, self.info.vocab_size)
        return self.tokenizer.decode(list(ids))

    # --- adapters and caches -------------------------------------------------------------------

    def add_new_lora(
        self,
        lora_path: str | os.PathLike[str],
        lora_name: str,
        *,
        timeout: float | None = None,
    ) -> None:
        """Register the LoRA adapter in folder `lora_path` (on the workers) as `lora_name`.

        The folder must be one that the operator allows (LMPOOL_ADAPTER_DIRS). Replaces an adapter
        of that name. Raises `AdapterError` with each worker's reason, and `PoolTimeout` after
        `timeout` seconds, 120 where neither it nor a `request_timeout` is given. So do the other
        calls that every worker has to answer.
        """
        deadline = self._until(timeout)
        name, path = check_new_name(lora_name), check_folder(lora_path)
        self._control("add_lora", deadline, name, path)
        self._model(deadline).adapters.forget()

    def remove_lora(self, lora_name: str, *, timeout: float | None = None) -> None:
        """Unregister an adapter on every worker; unknown names raise `UnknownAdapter`."""
        deadline = self._until(timeout)
        check_lora_name(lora_name)
        self._follow(deadline)
        adapters = self._model(deadline).adapters
        read = partial(self._read_adapters, name=lora_name)
        reading = self._patiently(lambda: self._client.run(read), deadline)
        adapters.keep(run_blocking(reading))
        adapters.reference(lora_name)
        self._control("remove_lora", deadline, lora_name)
        adapters.forget()

    def set_lora(self, lora_path: str, lora_name: str) -> NoReturn:
        """Not offered: an adapter is chosen per call, with `lora_name=`."""
        raise RuntimeError("there is no active adapter: pass lora_name= to each call")

    def clear_lora(self) -> NoReturn:
        """Not offered: an adapter is chosen per call, with `lora_name=`."""
        raise RuntimeError("there is no active adapter: leave lora_name= out for the base model")

    def cache_kv(self, prompt_tokens: TokenIds, *, timeout: float | None = None) -> None:
        """Have every worker compute and keep a prefix's state, where its engine keeps state.

        Raises `PromptError` for what is no prompt, `PoolError` with each worker's reason.
        """
        deadline = self._until(timeout)
        info = run_blocking(self._load_info(deadline))
        tokens = prompt_bytes(prompt_tokens, info.vocab_size, info.max_prompt_tokens)
        self._control("cache_prefix", deadline, tokens)

    def clear_kv_cache(self, *, timeout: float | None = None) -> None:
        """Have every worker drop its engine's state. Raises `PoolError` with each one's reason."""
        self._control("clear_cache", self._until(timeout))

    def clear_cache(self) -> None:
        """Drop this client's own cache of rows."""
        self._client.cache.clear()

    def reset_async_queries(self) -> None:
        """Withdraw everything that is waited for through this client."""
        self._client.withdraw_all()

    def _control(self, function: str, deadline: Deadline, *arguments: Argument) -> None:
        self._follow(deadline)
        read = partial(self._client.run, self._read_workers)
        workers = run_blocking(self._patiently(read, deadline))
        ask_workers(
            self._client.options,
            list(workers),
            function,
            *arguments,
            deadline=deadline,
            listening=workers,
            alive=lambda: self._client.run(self._read_workers),
        )

    def _follow(self, deadline: Deadline) -> None:
        run_blocking(self._load_info(deadline))
        run_blocking(self._patiently(self._client.follow, deadline))

    def _read_workers(self, servers: Servers) -> dict[str, str | None]:
        """Where each worker listens for control jobs, those that have yet to move with the pool,
        too: looked for in this order nobody is missed."""
        shards = self._client.shards_now(servers)
        while True:
            info = self._client.info
            assert info is not None
            behind = workers_in(servers, info.left_shards(self._client.keys))
            found = [*behind, *pool_statistics(servers, shards)["workers"]]
            before, shards = shards, self._client.shards_now(servers)
            if shards == before:  # else the last may have left where was looked, as it was looked
                return {worker["id"]: worker["control"] for worker in found}

    def _read_adapters(self, servers: Servers, name: str | None = None) -> dict[str, str]:
        return read_registry(servers, self._client.shards_now(servers), name)

    # --- numbers -------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """This client's counters: `requests`, and how each was answered; see docs/operating.md."""
        return self._client.statistics

    def _read_statistics(self, servers: Servers) -> PoolStatistics:
        return pool_statistics(servers, self._client.shards_now(servers))
