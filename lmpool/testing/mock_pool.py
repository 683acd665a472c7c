"""`MockPool`: a pool whose answers a test sets."""

from __future__ import annotations

import re
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Self, TypeAlias, TypedDict, Unpack

import numpy as np
import redis

import lmpool
from lmpool.address import is_cluster, is_sentinel
from lmpool.arguments import ClientArguments
from lmpool.checks import as_integer, as_number, is_text, quoted
from lmpool.errors import PoolError, PromptError, SettingsError
from lmpool.keys import check_pool_name
from lmpool.model_info import ModelInfo
from lmpool.producer import NumpyRows, PooledLM
from lmpool.producer.adapters import check_lora_name, check_new_name
from lmpool.server import understood
from lmpool.server_url import check_url, mask_url
from lmpool.settings import WorkerOptions
from lmpool.testing.answers import F32, Answers, Asked, Call, Failure, Meant, Set
from lmpool.testing.engine import AnsweringEngine
from lmpool.testing.given import Answered, meant_and_set, meant_by, row_with
from lmpool.testing.worker import LoneService
from lmpool.token_ids import TokenIds, listed, packed
from lmpool.wants import Want

Prompt: TypeAlias = TokenIds | str
"""Token ids; or text, whose bytes they are."""


class MockPoolArguments(TypedDict, total=False):
    """Those that a `MockPool` takes by name."""

    vocab_size: int
    max_prompt_tokens: int


class MockPool:
    """A pool whose worker is in this process and answers what a test sets, and anything else by the
    mock engine: rows that follow from the token ids alone.

    Made with the `url` of a server, or on fakeredis, in this process as well; `pool` is its name,
    by default one of its own. Its tokenizer makes each byte of a text a token. Use it as a context
    manager: at the end its clients are closed, and nothing of it is left.

    Raises `SettingsError` for what cannot be used, and where fakeredis is needed and not installed.
    """

    def __init__(
        self,
        url: str | None = None,
        pool: str | None = None,
        *,
        vocab_size: int = 256,
        max_prompt_tokens: int = 4096,
    ) -> None:
        self._answers = Answers()
        self._engine = AnsweringEngine(
            self._answers, vocab_size=vocab_size, max_prompt_tokens=max_prompt_tokens
        )
        if url is not None:
            _check_url(url)
        self._given_url, self._url = url, url
        self.pool = f"test-{token_hex(4)}" if pool is None else pool
        """The pool's name."""
        self._ending = ExitStack()
        self._clients: weakref.WeakSet[PooledLM[NumpyRows]] = weakref.WeakSet()
        self._lm: PooledLM[NumpyRows] | None = None
        self._service: LoneService | None = None

    # --- its life ------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with ExitStack() as ending:
            check_pool_name(self.pool)
            self._lm = None  # that of the time before, if there was one
            ending.callback(self._forget)
            if self._given_url is None:
                self._url = ending.enter_context(_fake_server())
            else:
                with understood(self._given_url):
                    self._check_name()
                ending.callback(self._delete_keys)
            folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="lmpool-testing-"))
            self._adapters = Path(folder)
            service = self._service = self._make_service()
            service.start()
            self._engine.served = service.info
            ending.callback(self._stop, service)
            self._ending = ending.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End its clients, its worker and its fakeredis. Idempotent.

        Raises `PoolError` with what the worker died of, where it did.
        """
        self._ending.close()

    def _make_service(self) -> LoneService:
        options = WorkerOptions(
            url=self.url,
            pool=self.pool,
            engine="mock",
            model="mock",
            engine_opts={},
            adapter_dirs=(str(self._adapters),),
            drain_timeout=10.0,
        )
        return LoneService(options, instead=self._engine)

    def _stop(self, service: LoneService) -> None:
        self._answers.delay(0.0)
        for lm in list(self._clients):
            lm.close()
        service.stop()
        if service.status.failure is not None:
            raise PoolError(f"the worker of {self.pool} failed: {service.status.failure}")

    def _forget(self) -> None:
        self._url, self._service = self._given_url, None

    # --- who asks it ---------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where its server is: for `lmpool.connect`, and for other processes of this machine."""
        if self._url is None:
            raise SettingsError(
                "a MockPool has no server yet: use it by `with MockPool() as pool:`"
            )
        return self._url

    @property
    def info(self) -> ModelInfo:
        """What it serves."""
        return self._running().info

    @property
    def lm(self) -> PooledLM[NumpyRows]:
        """A client of it, always the same; ``lm.sync`` is the blocking one."""
        if self._lm is None:
            self._lm = self.connect()
        return self._lm

    def connect(self, **options: Unpack[ClientArguments]) -> PooledLM[NumpyRows]:
        """Another client, with the options of `lmpool.connect`; closed with the pool.

        Unless they say otherwise it keeps no answers, so that what is set later counts.
        """
        given: ClientArguments = {"cache_bytes": 0, **options}
        lm = lmpool.connect(self.url, self.pool, framework="numpy", **given)
        self._clients.add(lm)
        return lm

    # --- what it answers -----------------------------------------------------------------------

    def answer(
        self,
        prompt: Prompt,
        answer: Answered,
        *,
        want: Want | type[Want] | None = None,
        lora_name: str | None = None,
    ) -> None:
        """Set what a prompt is answered with, from now on.

        A row, float [vocab] log-probabilities, or the probabilities of some tokens as
        ``{id: probability}`` (see `row`): it answers every want that follows from it, also of
        texts and continuations that go through the prompt. `TopLogprobs`, `TextScores`, `Draws` and
        `Generation` answer every `Top`, `Score`, `Draw` and `Generate` (also a streamed one) of
        this prompt. `want` says more closely which: a class, such as `lmpool.wants.Hidden`, or one
        want, such as ``Top(5)``. Arrays for `Tokens` are float [n], those for `Hidden` float
        [vocab]. The closest that is set counts.

        Raises `SettingsError` for what is no such answer, and `PromptError` for what is no prompt.
        """
        self._set(prompt, lora_name, *meant_and_set(answer, want, self.info))

    def fail(
        self,
        prompt: Prompt,
        reason: str = "a failure that the test has set",
        *,
        times: int | None = None,
        want: Want | type[Want] | None = None,
        lora_name: str | None = None,
    ) -> None:
        """Let whoever asks this prompt get `lmpool.errors.PromptFailed` of that `reason`.

        `times` it fails, and then no longer: what was set before holds again. None: always, until
        `answer` sets something else. A text and a continuation that go through it fail, too. The
        rest is as in `answer`.
        """
        if not is_text(reason) or not reason:
            raise SettingsError(f"reason={quoted(reason)}: write a text")
        count = np.inf if times is None else as_integer(times)
        if count is None or count < 1:
            raise SettingsError(f"times={quoted(times)}: write a positive integer, or None")
        self._set(prompt, lora_name, meant_by(want, self.info), Failure(reason, count))

    def delay(self, seconds: float) -> None:
        """Let each batch, and each token of a continuation, take so many seconds; 0: none.

        ``math.inf``: until the next `delay`. What waits already is told, too.
        """
        found = as_number(seconds)
        if found is None and seconds == np.inf:
            found = np.inf
        if found is None or not found >= 0:
            raise SettingsError(f"seconds={quoted(seconds)}: write 0 or more, or math.inf")
        self._answers.delay(found)

    def continue_with(
        self,
        prompt: Prompt,
        continuation: Prompt,
        *,
        ends: bool = True,
        lora_name: str | None = None,
    ) -> None:
        """Set the rows that make this continuation certain, and if it `ends` EOS after it.

        Draws, scores and `generate` then agree on it, at whatever seed and temperature.
        """
        ids = [*self._ids(prompt)]
        behind = [*self._ids(continuation), *(self.info.eos_token_ids[:1] if ends else ())]
        for token in behind:
            self.answer(ids, {token: 1.0}, lora_name=lora_name)
            ids.append(token)

    def row(self, probabilities: Mapping[int, float]) -> F32:
        """The row in which some tokens have these probabilities, and all others share the rest.

        float32 [vocab], natural log. Raises `SettingsError` where that makes no row.
        """
        return row_with(probabilities, self._engine.info.vocab_size)

    def add_adapter(self, name: str) -> None:
        """Register a LoRA adapter by its name: ``lora_name=name`` is known from now on.

        Raises `AdapterError` for what is no name.
        """
        check_new_name(name)
        service = self._running()
        adapters, loop = service.adapters, service.loop
        assert adapters is not None
        assert loop is not None
        folder = self._adapters / name.encode().hex()[:200]
        folder.mkdir(exist_ok=True)
        # Of the name alone, so that the rows of an adapter are the same in each run.
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_text(name)
        loop.call(lambda: adapters.add(name, str(folder), loop.adapters_in_use())).result()

    # --- what it was asked ---------------------------------------------------------------------

    @property
    def calls(self) -> list[Call]:
        """What reached the worker so far, in order.

        Equal asks are one call, as they are one job, and what a cache answered is none.
        """
        return self._answers.calls()

    # --- its tokenizer -------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """The ids of a text, its bytes in UTF-8: what ``lm.encode`` gives, without transformers."""
        return list(text.encode())

    def decode(self, token_ids: TokenIds) -> str:
        """The text of ids, whose bytes they are; see `encode`."""
        vocabulary = self._engine.byte_vocabulary()
        return b"".join(vocabulary[i] for i in self._ids(token_ids)).decode("utf-8", "replace")

    # --- inside --------------------------------------------------------------------------------

    def _running(self) -> LoneService:
        if self._service is None:
            raise SettingsError(
                "a MockPool that does not run: use it by `with MockPool() as pool:`"
            )
        return self._service

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        found = self.encode(prompt) if isinstance(prompt, str) else prompt
        info = self._engine.info
        ids = listed(found, info.max_prompt_tokens + 1)
        return tuple(np.frombuffer(packed(ids, info.vocab_size), "<u4").tolist())

    def _set(self, prompt: Prompt, lora_name: str | None, meant: Meant, answer: Set) -> None:
        self._running()
        name = None if lora_name is None else check_lora_name(lora_name)
        asked: Asked = (self._ids(prompt), name)
        if not asked[0]:
            raise PromptError("empty prompt: nobody can ask it, write at least one token id")
        self._answers.set(asked, meant, answer)
        if self._answers.calls():  # the pool may keep what it answered before
            self._delete_keys(b":result:")

    def _check_name(self) -> None:
        """Refuse the name of a pool that is there: its keys would be deleted at the end."""
        with self._server() as server:
            if next(self._keys(server), None) is not None:
                raise SettingsError(
                    f"pool={self.pool!r} is on that server: write a name that no pool has, or none"
                )

    def _delete_keys(self, named: bytes = b"") -> None:
        """The pool's keys, or those of them with this in their names."""
        with self._server() as server:
            keys = [key for key in self._keys(server) if named in key]
            if keys:
                server.delete(*keys)

    def _keys(self, server: redis.Redis) -> Iterator[bytes]:
        """The pool's, and those of no other whose name begins with its own."""
        own = re.compile(rb"\{?lmpool:%b([:}]|$)" % re.escape(self.pool).encode())
        return (key for key in server.scan_iter(f"*lmpool:{self.pool}*", 1000) if own.match(key))

    def _server(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, protocol=2)


def _check_url(url: str) -> None:
    if not is_text(url):
        raise SettingsError(f"url={quoted(url)}: write redis://[user:password@]host:port/db")
    check_url(url)
    if is_cluster(url) or is_sentinel(url):
        raise SettingsError(
            f"url={mask_url(url)!r}: a MockPool is on one server: write redis://..., or no url"
        )


@contextmanager
def _fake_server() -> Iterator[str]:
    try:
        from lmpool.testing.fake_server import FakeServer
    except ImportError as error:
        raise SettingsError(
            f"a MockPool without a url needs {error.name}: pip install 'lmpool[testing]'"
        ) from None
    with FakeServer() as server:
        yield server.url
