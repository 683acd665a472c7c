"""Whatever is given to whatever is public: an error of lmpool's, and nothing sent.

Methods, functions and their parameters are found by looking: a new one is tried as it is there,
and what a parameter of a new type may hold is to be written into `TYPED`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgpack
import numpy as np
import pytest
import redis
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lmpool
from lmpool import PooledLM, SyncPooledLM, benchmark, inspection
from lmpool.arguments import AllClientArguments, AllWorkerArguments, spelled_out
from lmpool.errors import (
    AdapterError,
    LmpoolError,
    PromptError,
    SettingsError,
    UnknownAdapter,
)
from lmpool.keys import GROUP, PoolKeys
from lmpool.producer.asks import Ask
from lmpool.producer.embedded import embedded_lm
from lmpool.scripts import script
from lmpool.settings import URLS, ClientOptions, WorkerOptions
from lmpool.vocabulary import Vocabulary
from lmpool.wants import Draw, Generate, Row, Top
from tests.support.fake import FakeServer
from tests.support.heartbeats import beating
from tests.support.parts import VOCAB, info_of, jobs_of
from tests.support.waiting import until

NOT_OFFERED = {"set_lora", "clear_lora"}
ABOUT_ARGUMENTS = (AdapterError, PromptError, SettingsError, UnknownAdapter)
NOBODY = "redis://127.0.0.1:1/0"


class RecordingServer(FakeServer):
    """Counts what a pool is asked to do, and refuses it: whoever asks in earnest knows at once."""

    sent = 0

    def _run(self, client: Any, command: list[bytes], connection: socket.socket) -> Any:
        name = command[0].upper()
        # The jobs of prompts, and arq's of control functions.
        runs = name in (b"EVAL", b"EVALSHA")
        if name == b"WATCH" or (runs and command[1] in ENQUEUE):
            self.sent += 1
        if name == b"WATCH" or runs:
            return redis.exceptions.NoPermissionError("NOPERM for a test")
        return super()._run(client, command, connection)


ENQUEUE = {script("enqueue").sha.encode(), script("enqueue").source.encode()}


# --- what may be given -------------------------------------------------------------------------


class Broken:
    """An object that breaks wherever it is touched."""

    def _break(self, *_: object) -> Any:
        raise KeyError("broken")

    __index__ = __int__ = __float__ = __iter__ = __len__ = __bool__ = __eq__ = __repr__ = _break
    __str__ = __fspath__ = __getitem__ = __contains__ = __array__ = item = tolist = detach = _break
    __hash__ = None  # type: ignore[assignment]
    dtype = property(_break)


def _breaks_midway() -> Iterator[Any]:
    yield [1]
    raise OSError("midway")


def _tensors() -> list[Any]:
    return [
        torch.tensor([1, 2]),
        torch.tensor(3),
        torch.tensor(True),
        torch.tensor([[1], [2]]),
        torch.tensor([0.5]),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor([1, 0]).to_sparse(),
        torch.empty(3, dtype=torch.int64, device="meta"),
        torch.tensor([1.0], requires_grad=True),
        np.array([1, 2]),
        np.array(3),
        np.array([[1], [2]], np.uint8),
        np.array(["a"]),
        np.array([None]),
        np.array([]),
        np.array([1.5]),
        np.ma.masked_array([1, 2], [True, False]),
        np.zeros((2, 0, 2), np.int32),
        np.bool_(True),
        np.int8(-3),
        np.uint64(2**64 - 1),
        np.float16("nan"),
        np.datetime64("now"),
    ]


SURROGATES = st.text(st.characters(codec=None, categories=("Cs", "L", "P", "Cc")), max_size=4)
SIMPLE = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 2**31, 2**63, 2**64, 10**400, -(10**400)])
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=3)
    | SURROGATES
    | st.binary(max_size=3)
    | st.sampled_from(
        ["", "\0", "\ud800", "redis://\ud800/0", "redis://a..b/0", "unix:///%00", "@"]
    )
)
STRANGE: list[Callable[[], Any]] = [
    lambda: Broken(),
    lambda: 10**5000,
    lambda: _breaks_midway(),
    lambda: (i for i in ()),
    lambda: range(10**12),
    lambda: Decimal("1.5"),
    lambda: Fraction(1, 10**400),
    lambda: Path("/\udc80"),
    lambda: object(),
    lambda: int,
    lambda: open,
    lambda: memoryview(b"ab"),
    lambda: {1, 2},
    dict,
    lambda: {"a": 1},
    lambda: NotImplemented,
    *(lambda number=number: _tensors()[number] for number in range(len(_tensors()))),
]
ANYTHING = st.recursive(
    SIMPLE | st.sampled_from(STRANGE).map(lambda make: make()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        | st.lists(inner, max_size=2).map(iter)
    ),
    max_leaves=4,
)

PROMPT = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)
NAMES = st.sampled_from(["one", "two", ""])
QUESTIONS = st.builds(Top, st.integers(1, VOCAB)) | st.just(Row()) | st.just(Draw(2, seed=1))
QUESTIONS |= st.just(Generate(2, stop=[[1]]))
TYPED: dict[str, st.SearchStrategy[Any]] = {
    "Want": QUESTIONS,
    "Want | OfPrompt[AnswerT]": QUESTIONS,
    "AskedIds | None": st.none() | PROMPT | st.lists(PROMPT, max_size=3),
    "Sequence[Mapping[str, str]]": st.just([{"role": "user", "content": "hi"}]),
    "Asks": st.lists(st.tuples(PROMPT, QUESTIONS) | st.builds(Ask, PROMPT), max_size=3),
    "TokenSet | None": st.none() | PROMPT,
    "TokenIds": PROMPT | PROMPT.map(np.array) | PROMPT.map(torch.tensor),
    "Sequence[TokenIds]": st.lists(PROMPT, max_size=3),
    "Sequence[int]": PROMPT,
    "Sequence[int] | None": st.none() | PROMPT,
    "StopSequences": st.lists(PROMPT | PROMPT.map(np.array), max_size=3),
    "Sequence[int | str] | str | None": PROMPT | NAMES | st.none(),
    "Sequence[str] | None": st.lists(NAMES),
    "Mapping[str, object] | None": st.dictionaries(NAMES, SIMPLE, max_size=2),
    "int": st.integers(-2, 300) | st.integers(1, 9).map(np.int64),
    "int | None": st.none() | st.integers() | st.integers(0, 9).map(torch.tensor),
    "int | str | None": st.none() | st.integers() | st.sampled_from(["1MiB", "-1"]),
    "float": st.floats(),
    "float | None": st.none() | st.floats(0.05, 3.0),
    "Device": st.none() | st.sampled_from(["cpu", "nowhere"]),
    "bool": st.booleans(),
    "bool | None": st.none() | st.booleans(),
    "str": NAMES,
    "str | None": st.none() | NAMES,
    "str | os.PathLike[str]": NAMES | st.just(Path("/srv/adapters/one")),
    "Job": st.builds(lambda prompt: jobs_of([prompt])[0], PROMPT),
    "ClientOptions | None": st.none() | st.just(ClientOptions(url=NOBODY)),
    "PooledLM[RowT_co]": st.just(None),
}


def typed(name: str, annotation: Any) -> st.SearchStrategy[Any]:
    """What the annotation of a parameter promises."""
    if name in URLS:
        return st.sampled_from([None, NOBODY, "unix:///nowhere"])
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = text.replace("typing.", "").replace("collections.abc.", "")
    if "Literal" in text or text in ("Priority | None", "FrameworkName | None", "Errors"):
        choices = ["interactive", "batch", "auto", "numpy", "f32", "wait", "raise", "follow"]
        choices.append("return")
        return st.none() | st.sampled_from(choices)
    assert text in TYPED, f"{name}: {text} is new; write into TYPED what it may be"
    return TYPED[text]


@st.composite
def arguments(draw: st.DrawFn, function: Callable[..., Any]) -> dict[str, Any]:
    """Some of a function's arguments, most of the right type."""
    chosen: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self" or (parameter.default is not parameter.empty and draw(st.booleans())):
            continue
        if draw(st.integers(0, 40)) == 7:
            continue  # a required one is missing
        ill = draw(st.integers(0, 3)) == 0
        chosen[name] = draw(ANYTHING if ill else typed(name, parameter.annotation))
    if draw(st.integers(0, 40)) == 7:
        chosen["nobody_knows"] = 1
    return chosen


# --- what is asked -----------------------------------------------------------------------------


def methods() -> list[tuple[type, str]]:
    """The public methods of both kinds of client."""
    return [
        (kind, name)
        for kind in (PooledLM, SyncPooledLM)
        for name, member in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in NOT_OFFERED
    ]


@spelled_out(AllClientArguments)
def client_options(**given: Any) -> None:
    """A client's settings."""
    ClientOptions(**given)


@spelled_out(AllWorkerArguments)
def worker_options(**given: Any) -> None:
    """A worker's settings."""
    WorkerOptions(**given)


FUNCTIONS: list[Callable[..., Any]] = [
    lmpool.connect, lmpool.embedded, benchmark.measure, inspection.ping, inspection.diagnose,
    inspection.read_facts, PooledLM, SyncPooledLM, client_options, worker_options,
]  # fmt: skip


def case_of_method(method: tuple[type, str]) -> st.SearchStrategy[Any]:
    kind, name = method
    return st.tuples(st.just(kind), st.just(name), arguments(getattr(kind, name)))


def case_of_function(function: Callable[..., Any]) -> st.SearchStrategy[Any]:
    return st.tuples(st.just(function), arguments(function))


async def _gone_through(answers: AsyncIterator[object]) -> None:
    async for _ in answers:
        pass


def outcome(function: Callable[..., Any], given: dict[str, Any]) -> LmpoolError | None:
    """How a call ended; any other exception than may be fails the test."""
    try:
        inspect.signature(function).bind(**given)
    except TypeError:
        with pytest.raises((TypeError, SettingsError)):  # settings name what they do not know
            function(**given)
        return None
    try:
        found = function(**given)
        if inspect.iscoroutine(found):
            found = asyncio.run(found)
        elif inspect.isgenerator(found):
            list(found)
        elif inspect.isasyncgen(found):
            asyncio.run(_gone_through(found))
    except LmpoolError as error:
        assert str(error)  # noqa: PT017
        return error
    if isinstance(found, PooledLM):
        found.close()
    return None


@pytest.fixture(scope="module")
def server() -> Iterator[RecordingServer]:
    """A pool with a heartbeat, and nobody behind it."""
    info, keys = info_of(shards=1), PoolKeys("p")
    (shard,) = info.shard_keys(keys)
    with RecordingServer() as server, server.client() as client:
        client.set(keys.info, info.pack())
        tokens = [bytes([number]) for number in range(VOCAB)]
        client.set(keys.vocabulary(info.fingerprint8), Vocabulary(tokens, {}).pack())
        client.hset(shard.adapters, "one", "f" * 32 + "\n/srv/adapters/one")
        for stream in shard.streams:
            client.xgroup_create(stream.key, GROUP, id="0", mkstream=True)
            client.xgroup_createconsumer(stream.key, GROUP, "w")
        with beating(client, shard, "w", msgpack.packb({"id": "w"})):
            yield server


def connected_to(server: RecordingServer) -> PooledLM:
    return lmpool.connect(server.url, "p", framework="numpy", request_timeout=3.0)


@pytest.fixture
def client(server: RecordingServer) -> Iterator[PooledLM]:
    with connected_to(server) as lm:
        yield lm


@settings(max_examples=250, suppress_health_check=list(HealthCheck))
@given(case=st.sampled_from(methods()).flatmap(case_of_method))
def test_methods_refuse_what_they_cannot_use(
    server: RecordingServer, client: PooledLM, case: tuple[type, str, dict[str, Any]]
) -> None:
    ask(server, client, *case)


def ask(
    server: RecordingServer, client: PooledLM, kind: type, name: str, given: dict[str, Any]
) -> None:
    """Call a method, and see that it ends as it may."""
    ends = name in ("close", "aclose")
    lm = connected_to(server) if ends else client
    before, began = server.sent, time.monotonic()
    error = outcome(getattr(lm.sync if kind is SyncPooledLM else lm, name), given)
    if isinstance(error, ABOUT_ARGUMENTS):
        assert server.sent == before, "something was sent of what was refused"
    elif error is not None:
        settle(lm)
    assert time.monotonic() - began < 60.0
    if ends:
        lm.close()


def settle(lm: PooledLM) -> None:
    """Until what a call has left to be sent is sent."""
    session = lm._client._session
    if session.closed:
        return
    until(lambda: not session.table.has_unsent() and not session.table.withdrawn)
    lm._client.run(lambda servers: servers.anywhere.ping()).result(60)


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(case=st.sampled_from(FUNCTIONS).flatmap(case_of_function))
def test_functions_and_options_refuse_what_they_cannot_use(
    case: tuple[Callable[..., Any], dict[str, Any]],
) -> None:
    function, given = case

    def started(*_: object) -> Any:
        raise LmpoolError("a pool would have been started")

    with patch.object(embedded_lm, "PrivatePool", started), patch.dict(os.environ):
        if function in (benchmark.measure, inspection.ping, inspection.diagnose):
            os.environ["LMPOOL_URL"] = NOBODY
        outcome(function, given)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_each_strange_value_is_an_option(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object) -> Any:
        raise LmpoolError("a pool would have been started")

    monkeypatch.setattr(embedded_lm, "PrivatePool", started)
    monkeypatch.setenv("LMPOOL_URL", NOBODY)
    for place in inspect.signature(function).parameters.keys() - {"self"}:
        for make in STRANGE:
            began = time.monotonic()
            outcome(function, {place: make()})
            assert time.monotonic() - began < 30.0, place


SOUND: dict[str, Any] = {
    "job": jobs_of([[1]])[0],
    "asks": [([1], Top(1))],
    "want": Top(1),
    "text_token_ids": [1, 2],
    "text_token_ids_list": [[1, 2]],
    "messages": [{"role": "user", "content": "hi"}],
    "token_ids": [1],
    "token_ids_list": [[1]],
    "prompt_token_ids": [1],
    "prompt_token_ids_list": [[1]],
    "prompt_tokens": [1],
    "max_tokens": 3,
    "eos_token_ids": [0],
    "lora_path": "/srv/adapters/one",
}


@pytest.mark.parametrize("name", [name for kind, name in methods() if kind is PooledLM])
def test_each_strange_value_in_each_place(
    server: RecordingServer, client: PooledLM, name: str
) -> None:
    parameters = inspect.signature(getattr(PooledLM, name)).parameters
    needed = {
        name: SOUND.get(name, "one") for name, p in parameters.items() if p.default is p.empty
    }
    del needed["self"]
    for place in parameters.keys() - {"self"}:
        for make in STRANGE:
            value = make()
            ask(server, client, PooledLM, name, {**needed, place: value})
