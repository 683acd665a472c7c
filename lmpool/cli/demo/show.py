"""What ``lmpool demo`` prints."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from rich.console import Console

from lmpool.benchmark import when_counted
from lmpool.cli.bars import ascii_text, bar_lines
from lmpool.cli.demo.client import Report, examine
from lmpool.cli.demo.load import make_work, run_load
from lmpool.cli.terminal import escape, lines, speaks_unicode
from lmpool.errors import LmpoolError
from lmpool.inspection import ping
from lmpool.producer import EmbeddedLM, NumpyRows, embedded
from lmpool.producer.statistics import PoolStatistics
from lmpool.prompt_text import Encode, decode, encoder, read_vocabulary

# The tiny model has read the documentation of Python's standard library, and nothing else.
TEXTS: Final = (
    "Return the number of",
    "This function returns a",
    "If the file does not",
    "The class is used to",
)
BEGINNINGS: Final = ("This method is called when the", "For example, if the")
LIKELIEST: Final = 5

NEXT: Final = """\
import asyncio, lmpool

async def main():
    async with lmpool.connect("redis://gpu-box:6379/0", pool="llama") as lm:
        prompts = [lm.tokenizer.encode(text) for text in ("The capital of", "Once upon a")]
        rows = await lm.batch_next_token_logprobs(prompts)      # [2, vocabulary], float32
        for row in rows:
            print(lm.tokenizer.decode([int(row.argmax())]), float(row.max()))

asyncio.run(main())"""


def run_demo(*, workers: int, engine: str, model: str, prompts: int) -> None:
    """Start, show, load, count, check, end. Leaves nothing behind."""
    console = lines()
    # A SIGTERM then ends it as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started = time.perf_counter()
    slow = ": importing torch takes some seconds" if engine == "hf" else ""
    with console.status(f"starting a server and workers{slow}"):
        lm = embedded(model, engine, workers, pool="demo", framework="numpy")
    with lm:
        _Demo(lm, console).run(prompts, time.perf_counter() - started)


class _Demo:
    def __init__(self, lm: EmbeddedLM[NumpyRows], console: Console) -> None:
        self.lm = lm
        self.console = console
        self.ascii_only = not speaks_unicode(console)
        vocabulary = read_vocabulary(lm)
        self.tokens = vocabulary.tokens
        self.encode: Encode = encoder(lm, vocabulary, quick=True)

    def run(self, prompts: int, start_seconds: float) -> None:
        self.show_processes(start_seconds)
        self.show_likeliest()
        self.show_samples()
        self.show_load(prompts)
        self.show_next()

    def say(self, text: str = "") -> None:
        self.console.print(ascii_text(text) if self.ascii_only else text)

    def title(self, text: str) -> None:
        self.say()
        self.say(f"[bold]{text}[/]")

    # --- the parts -----------------------------------------------------------------------------

    def show_processes(self, seconds: float) -> None:
        lm, info, pids = self.lm, self.lm.info, self.lm.processes()
        found = ping(lm.url, lm.pool)
        self.title(f"Started in {seconds:.1f} s, on this machine, for this demo alone")
        self.say(f"  server  pid {pids['server']:<8} {found.server}, {escape(lm.url)}")
        for worker in found.workers:
            self.say(
                f"  worker  pid {worker['pid']:<8} {info.engine} engine, model "
                f"{escape(info.model)}: arq lmpool.worker.WorkerSettings"
            )
        self.say(
            f"  The model has {info.vocab_size:,} tokens: every row is {info.vocab_size:,} "
            f"log-probabilities ({info.dtype})."
        )

    def show_likeliest(self) -> None:
        self.title("The likeliest next tokens")
        prompts = [self.encode(text) for text in TEXTS]
        found = self.lm.sync.batch_top_logprobs(prompts, LIKELIEST, timeout=60.0)
        for text, top in zip(TEXTS, found, strict=True):
            self.say(f"  [cyan]{text}[/] …")
            lines = bar_lines(
                self.tokens,
                top.token_ids,
                np.exp(top.logprobs),
                width=30,
                ascii_only=self.ascii_only,
            )
            for line in lines:
                self.say(f"      {escape(line)}")

    def show_samples(self) -> None:
        self.title("Sampled continuations (each is one job: the worker does the loop)")
        texts = self.lm.batch_sample_sync(
            [self.encode(text) for text in BEGINNINGS],
            max_tokens=20,
            eos_token_ids=self.lm.info.eos_token_ids,
            temperature=0.7,
            seed=1,
            timeout=60.0,
        )
        for beginning, ids in zip(BEGINNINGS, texts, strict=True):
            continued = "".join(c if c.isprintable() else " " for c in decode(self.tokens, ids))
            self.say(f"  [cyan]{beginning}[/]{escape(continued)}")

    def show_load(self, prompts: int) -> None:
        works = make_work(prompts, self.lm.info.vocab_size, self.lm.info.max_prompt_tokens)
        asked = sum(len(prompts) for prompts in works[0]["rounds"]) * len(works)
        self.title(f"Load: {asked:,} prompts from {len(works)} client processes at once")
        before = self.lm.pool_statistics_sync()
        with self.console.status("waiting for rows"):
            reports = run_load(self.lm, works)
            queued = sum(report["statistics"]["queued"] for report in reports)
            after = when_counted(self.lm, before["computed"] + queued)
        self.show_counts(reports, before, after)
        self.show_checks(reports, works[0]["check"])

    def show_counts(
        self, reports: Sequence[Report], before: PoolStatistics, after: PoolStatistics
    ) -> None:
        rows = sum(report["rows"] for report in reports)
        seconds = max(report["seconds"] for report in reports)
        computed = after["computed"] - before["computed"]
        batches = max(1, after["batches"] - before["batches"])
        joined, cache_hits, local_hits = (
            sum(report["statistics"][name] for report in reports)
            for name in ("joined", "cache_hits", "local_hits")
        )
        for number, what, remark in (
            (rows, f"rows in {seconds:.1f} s", f"{rows / seconds:,.0f} a second"),
            (computed, "computed", f"in {batches:,} batches, {computed / batches:.0f} at a time"),
            (joined, "shared in flight", "somebody else had just asked the same"),
            (cache_hits, "from the result cache", "computed earlier, for another client"),
            (local_hits, "from local caches", "never left the client"),
        ):
            self.say(f"  {number:>6,}  {what:<23}[dim]{remark}[/]")

    def show_checks(self, reports: Sequence[Report], prompts: list[list[int]]) -> None:
        mine = examine(self.lm.batch_next_token_logprobs_sync(prompts))
        checked = [mine, *(report["checked"] for report in reports)]
        off = max(each["off_by"] for each in checked)
        if off > 1e-4:
            raise LmpoolError(f"a row's probabilities sum to 1 only within {off:.1e}")
        if len({each["hash"] for each in checked}) != 1:
            raise LmpoolError("two clients got different rows for the same prompts")
        self.say(
            f"  [green]Checked:[/] {len(prompts)} rows are the same bytes in all "
            f"{len(checked)} processes, and each sums to 1 (within {off:.0e})."
        )

    def show_next(self) -> None:
        self.title("Next: a model of yours, on a machine with GPUs")
        self.say("  lmpool worker --gpus 0,1 --model meta-llama/Llama-3.2-1B --pool llama")
        self.say("and anywhere that reaches its server (LMPOOL_URL says where that is):")
        for line in NEXT.splitlines():
            self.say(f"  {escape(line)}".rstrip())
