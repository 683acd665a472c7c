"""What README, docs/comparison.md and docs/engines.md say was measured, of the saved reports."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import Final

from tests.benchmarks.measure import number
from tests.support.performance import (
    BATCHES,
    GATHERED,
    GPU_PARTICLES,
    GPU_SINGLE,
    LARGE,
    PARTICLES,
    SINGLE,
    SMALLER,
    figure,
    saved,
)

FULL: Final = "pool, batch calls, batch_size=512"
DISTINCT: Final = "512 distinct prompts of 32 tokens"


def values_of(report: str, heading: str, what: str, unit: str | None = None) -> Sequence[float]:
    """A figure of a saved report, run by run."""
    found: Sequence[float] = figure(report, heading, what, unit)["values"]
    return found


def median(report: str, heading: str, what: str, unit: str | None = None) -> str:
    """The same in one number."""
    return number(statistics.median(values_of(report, heading, what, unit)))


def machine(report: str) -> str:
    """What a report was measured on."""
    cpu, _, cores = saved(report)["facts"]["cpu"].rpartition(", ")
    return f"{cores} of an {cpu}"


def _starred(what: str, report: str) -> str:
    """What was measured, with a mark where that was on another machine than the jobs."""
    return what if machine(report) == machine("jobs") else f"{what} \\*"


def _machines(*reports: str) -> str:
    """The machine of the jobs, and the other one of reports whose lines are marked."""
    others = {machine(report) for report in reports} - {machine("jobs")}
    if not others:
        return machine("jobs")
    (other,) = others
    return f"{machine('jobs')} (\\*: {other})"


def _arq() -> str:
    """The faster of the two, whose results are the same."""
    sides = ("arq", "arq, msgpack")
    return number(max(statistics.median(values_of("jobs", "Pace", side)) for side in sides))


def _runs(report: str, heading: str, what: str) -> int:
    return len(values_of(report, heading, what))


def _table(*rows: tuple[str, str, str]) -> str:
    lines = [("", "figure", "beside it"), *rows]
    head, *body = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines]
    return "\n".join([head, "|---|---|---|", *body])


_ROWS: Final = partial(median, "rows", LARGE)
_SMALLER: Final = partial(median, "rows", SMALLER)
_TIME: Final = partial(median, "latency", "Time")
_MOST_OF_SCORES: Final = "by hand / rows of all prefixes at once: the most that scores can gain"
_SOCKETS: Final = "of bare sockets that SET and GET as many bytes"


def _one_prompt(awaited: bool) -> tuple[str, str, str]:
    found = f"{_TIME('pool, blocking call: median')} ms median, "
    found += f"{_TIME('pool, blocking call: p99')} ms p99"
    if awaited:
        found += (
            f" (awaited: {_TIME('pool, awaited: median')} and {_TIME('pool, awaited: p99')} ms)"
        )
    return "one prompt at a time, from call to row", found, f"{_TIME('PING: median')} ms for PING"


def readme_figures() -> str:
    """The few of README.md."""
    bench = "`make bench ARGS='jobs rows latency'`"
    rows = f"{_ROWS('pool, batch calls')} rows/s, {_ROWS('pool, batch calls', 'MB/s')} MB/s"
    table = _table(
        (
            "small rows, 32-token prompts",
            f"{median('jobs', 'Pace', FULL)} jobs/s",
            f"arq running no-op jobs: {_arq()}/s",
        ),
        (
            _starred("rows of 256 KiB", "rows"),
            rows,
            f"{_ROWS('pool, batch calls / the bound')} {_SOCKETS}",
        ),
        _one_prompt(awaited=False),
        (
            "SIGKILL of one of two workers under load (`make chaos`)",
            "no prompt lost, no row wrong",
            "the longest wait: 4.9 s",
        ),
    )
    head = f"On {_machines('rows')}, one worker with the mock engine, medians ({bench}):"
    return f"{head}\n\n{table}\n\n{_on_a_gpu()}"


def _on_a_gpu() -> str:
    gpu = saved("gpu")["facts"]["gpu"].split(",")[0]
    particles, single = partial(median, "gpu", GPU_PARTICLES), partial(median, "gpu", GPU_SINGLE)
    return _wrapped(
        f"With the `hf` engine, {_model('gpu')}, on one {gpu} (`make bench ARGS=gpu`): 32 "
        "particles of one prompt get "
        f"{particles('pool')} rows a second through the pool, beside "
        f"{particles('by hand (DynamicCache)')} of a `DynamicCache` by hand in the process that "
        f"asks; the engine alone gives {particles('engine')}, and without its CUDA graphs "
        f"{particles('engine, enforce_eager')}. One prompt after another: {single('pool')} through "
        f"the pool, {single('by hand')} by hand."
    )


def _model(report: str) -> str:
    """The model and its rows, of a title that goes on with the prompts."""
    title = saved(report)["title"]
    model, rows, _ = f"{title[0].lower()}{title[1:]}".rsplit(", ", 2)
    return f"{model} and {rows}"


def comparison_figures() -> str:
    """Those of rows in docs/comparison.md."""
    pace, times = partial(median, "jobs", "Pace"), partial(median, "jobs", "Ratios")
    dedup = partial(median, "dedup")
    facts = saved("jobs")["facts"]
    versions = f"{facts['server'].split(',')[0]}, redis-py {facts['redis']}"
    runs, of_rows = _runs("jobs", "Pace", FULL), _runs("rows", LARGE, "pool, batch calls")
    more = "" if of_rows == runs else f", of rows of 64 KB and more {of_rows}"
    head = _wrapped(
        f"Measured on {_machines('rows')}, {versions}, one worker process with the mock engine, "
        f"one client process; medians of {runs} runs{more}, with the peer in the same run:"
    )
    usual = f"default settings: {pace(BATCHES)}"
    ratio = times(f"{FULL} / the faster arq")
    large = f"{_ROWS('pool, batch calls')} rows/s, {_ROWS('pool, batch calls', 'MB/s')} MB/s"
    lone = f"one call a prompt: {_ROWS('pool, gathered calls')} rows/s"
    bounds = [_ROWS(f"pool, {calls} calls / the bound") for calls in ("batch", "gathered")]
    smaller = f"{_SMALLER('pool, batch calls')} rows/s, "
    smaller += f"{_SMALLER('pool, batch calls', 'MB/s')} MB/s"
    computed = f"{dedup('Computed', '4 clients, same')} rows computed"
    table = _table(
        (
            "small rows (256 floats), 32-token prompts",
            f"{pace(FULL)} jobs/s ({usual})",
            f"arq running no-op jobs: {_arq()}/s, so {ratio} times",
        ),
        (
            "the same, one call a prompt under `asyncio.gather`",
            f"{pace(GATHERED)} jobs/s",
            f"{times(f'{GATHERED} / the faster arq')} times arq",
        ),
        (
            _starred("rows of 256 KiB", "rows"),
            f"{large} ({lone})",
            f"{bounds[0]} ({bounds[1]}) {_SOCKETS}",
        ),
        (
            _starred("rows of 64 KB, 32 a call", "rows"),
            smaller,
            f"{_SMALLER('pool, batch calls / the bound')} of the same",
        ),
        _one_prompt(awaited=True),
        (
            "four processes asking the same 2,000 prompts",
            f"{computed}, {dedup('Time', '4 clients, same')} s",
            f"one process alone: {dedup('Time', 'one client')} s",
        ),
        (
            "1,000,000 distinct prompts",
            f"client {_grown('client')}, worker {_grown('worker')} MiB per 100,000",
            "",
        ),
    )
    return f"{head}\n\n{table}"


def smaller_figures() -> str:
    """Those of what is smaller than rows in docs/comparison.md."""
    texts, choices = "500 texts", "8 choices of 20 tokens after 400"
    scores, streams = partial(median, "scores", texts), partial(median, "streams", "Time")
    kept, vllm = "trunk in pieces", partial(median, "vllm_scores", "The pool against")
    answers, awrs = partial(median, "answers"), partial(median, "awrs", "Ratios")
    processors = "Ratios of processor time, all three processes"
    top, drawn = "Top-20 of the next token", "bytes of values, draws / rows"
    share = 100 * statistics.median(values_of("awrs", "Ratios", drawn))
    lines = [
        (
            "answers",
            "the likeliest 20 of 128,256 tokens, mock engine",
            f"{answers('Pace', 'top 20')} answers/s of {answers('Stored', 'top 20')} bytes",
            (
                f"{answers('Ratios of pace', 'top 20 / rows')} times rows of "
                f"{answers('Stored', 'rows')} bytes, "
                f"{answers(processors, 'top 20 / a row')} of "
                "their processor time"
            ),
        ),
        (
            "scores",
            "scores of 500 texts of 200 tokens, `hf`, one thread, V=16,000",
            f"{scores('batch_score')} positions/s",
            (
                f"{scores('batch_score / by hand')} of transformers by hand in batches; "
                f"{scores('batch_score / rows of all prefixes at once')} times rows of all "
                f"prefixes at once (by hand {scores(_MOST_OF_SCORES)} times), "
                f"{scores('batch_score / rows one after another')} times row after row"
            ),
        ),
        (
            "scores",
            "scores of 8 choices of 20 tokens behind a context of 400",
            f"{median('scores', choices, 'one context')} positions/s",
            (
                f"{median('scores', choices, 'one context / contexts of their own')} times choices "
                "behind contexts of their own"
            ),
        ),
        (
            "vllm_scores",
            "the likeliest 20 of the next token, `vllm`, V=16,000",
            f"{median('vllm_scores', top, 'pool')} answers/s",
            f"{vllm('top-20 of the next token: own')} of vLLM's own `logprobs=20` in process",
        ),
        (
            "vllm_scores",
            "the likeliest 20 at each position of texts of 200 tokens, `vllm`",
            f"{median('vllm_scores', 'Texts of 200, top-20', 'pool')} texts/s",
            (
                f"{vllm('texts of 200, top-20: own')} times its own `prompt_logprobs=20`; choices "
                "behind common contexts "
                f"{vllm('32 choices of 20 on 4 contexts of 400, top-20: own')} times"
            ),
        ),
        (
            "scores_memory",
            "scores of a text of 8,000 tokens at V=128,256, `hf`",
            (
                f"{median('scores_memory', kept, 'scores')} MiB at most, beside the model and the "
                "text's states"
            ),
            "",
        ),
        (
            "streams",
            "the next token of a stream, mock engine",
            f"{streams('alone: a token')} ms",
            (
                "with an engine of 5 ms a token: "
                f"{streams('5 ms a token: to the next, less these')} ms after it is drawn"
            ),
        ),
        (
            "awrs",
            "genlm's AWRS on draws, V=128,256, mock engine",
            f"{median('awrs', 'Stored', 'draws')} bytes of values a token",
            (
                f"{awrs('accepted tokens a second, draws / rows')} times the accepted tokens a "
                f"second of AWRS on rows, {number(share)} % of their bytes"
            ),
        ),
    ]
    table = _table(*((_starred(what, of), found, beside) for of, what, found, beside in lines))
    return f"One worker, medians, on {_machines(*(of for of, *_ in lines))}:\n\n{table}"


def _grown(side: str) -> str:
    return f"{statistics.median(values_of('memory', 'Growth', side)):+.2f}"


def engine_figures() -> str:
    """Those of the hf engine in docs/engines.md."""

    def times(heading: str, over: str, under: str) -> str:
        return median("hf", heading, f"{over} / {under}")

    genlm, prepared, hand = "genlm-backend", "genlm-backend after cache_kv", "by hand"
    flex = [
        statistics.median(values_of("masks", heading, "flex / mask"))
        for heading in saved("masks")["figures"]
    ]
    at_end = median("hf_memory", "Resident memory", "at the end")
    bench = "`make bench ARGS='hf --save'`"
    said = (
        "The same Llama (random weights, V=16,000), prompts and one thread on every side "
        f"({bench}, medians of {_runs('hf', PARTICLES, 'engine')} runs): 32 particles of one "
        f"prompt take {times(PARTICLES, 'engine', genlm)} times the pace of genlm-backend's "
        f"`AsyncTransformer`, {times(PARTICLES, 'engine', prepared)} times that after its "
        "`cache_kv`, "
        f"{times(PARTICLES, 'engine', hand)} times that of a `DynamicCache` by hand, and "
        f"{times(PARTICLES, 'pool', genlm)} times through the pool. 512 distinct prompts: "
        f"{times(DISTINCT, 'engine', genlm)} times genlm-backend, "
        f"{times(DISTINCT, 'engine', hand)} of batches by hand. One prompt after another: "
        f"{times(SINGLE, 'engine', genlm)} times genlm-backend. Over 100,000 distinct prompts the "
        f"engine stays at {at_end} MiB. On a CPU its attention with a mask is {min(flex):.1f} to "
        f"{max(flex):.1f} times as fast as flex attention, which there compiles a kernel for each "
        "shape (`make bench ARGS=masks`)."
    )
    return _wrapped(said)


def vllm_figures() -> str:
    """Those of the vllm engine in docs/engines.md."""
    live, capture = (
        partial(median, "vllm", heading) for heading in ("Live prompts against", "Capture against")
    )
    return _wrapped(
        "Particles on live prompts get "
        f"{live('prefix cache of 32-token blocks alone')} times the rows a second of prefix "
        f"caching with small blocks, {live('a fresh request a row, no reuse')} times those of "
        f"fresh requests. Capture runs at {capture('no capture')} of the pace at which vLLM "
        f"generates without any, {capture('logprobs=-1')} times that of `logprobs=-1`, "
        f"{capture('vllm serve over HTTP')} times that of `vllm serve` over HTTP (one "
        f"thread on {machine('vllm')}, medians, V=32,000: `make bench-vllm`; "
        "`tests/benchmarks/results/vllm.md`)."
    )


def _wrapped(said: str) -> str:
    return textwrap.fill(said, 110, break_long_words=False, break_on_hyphens=False)
