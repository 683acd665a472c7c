"""``lmpool demo``: what a newcomer wants to see."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.markup import escape

from lmpool.bars import ascii_text, bar_lines, likeliest
from lmpool.demo_client import examine
from lmpool.errors import LmpoolError
from lmpool.pool_commands import speaks_unicode
from lmpool.producer import EmbeddedLM, NumpyRows, embedded
from lmpool.producer.statistics import PoolStatistics
from lmpool.prompt_text import Encode, decode, encoder, read_vocabulary
from lmpool.server import greet, open_server
from lmpool.variables import as_variables

# The tiny model has read the documentation of Python's standard library, and nothing else.
TEXTS: Final = (
    "Return the number of",
    "This function returns a",
    "If the file does not",
    "The class is used to",
)
BEGINNINGS: Final = ("This method is called when the", "For example, if the")
LIKELIEST: Final = 5
CLIENTS: Final = 2
ROUNDS: Final = 12
CHECKED: Final = 8

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
    console = Console(highlight=False, soft_wrap=True)
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
        server = open_server(lm.url)
        version = greet(server, lm.url)
        server.close()
        workers = lm.pool_statistics_sync()["workers"]
        self.title(f"Started in {seconds:.1f} s, on this machine, for this demo alone")
        self.say(f"  server  pid {pids['server']:<8} {version}, {escape(lm.url)}")
        for worker in workers:
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
        rows = self.lm.batch_next_token_logprobs_sync(prompts, timeout=60.0)
        for text, row in zip(TEXTS, rows, strict=True):
            self.say(f"  [cyan]{text}[/] …")
            lines = bar_lines(
                self.tokens, *likeliest(row, LIKELIEST), width=30, ascii_only=self.ascii_only
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
        with self.console.status("waiting for rows"), _clients(self.lm, works) as clients:
            answers = [_result(client) for client in clients]
        after = self.lm.pool_statistics_sync()
        self.show_counts(answers, before, after)
        self.show_checks(answers, works[0]["check"])

    def show_counts(
        self, answers: Sequence[dict[str, Any]], before: PoolStatistics, after: PoolStatistics
    ) -> None:
        total = {name: sum(a[name] for a in answers) for name in answers[0] if name != "hash"}
        seconds = max(answer["seconds"] for answer in answers)
        computed = after["computed"] - before["computed"]
        batches = max(1, after["batches"] - before["batches"])
        lines = [
            (total["rows"], f"rows in {seconds:.1f} s", f"{total['rows'] / seconds:,.0f} a second"),
            (computed, "computed", f"in {batches:,} batches, {computed / batches:.0f} at a time"),
            (total["joined"], "shared in flight", "somebody else had just asked the same"),
            (total["cache_hits"], "from the result cache", "computed earlier, for another client"),
            (total["local_hits"], "from local caches", "never left the client"),
        ]
        for number, what, remark in lines:
            self.say(f"  {number:>6,}  {what:<23}[dim]{remark}[/]")

    def show_checks(self, answers: Sequence[dict[str, Any]], prompts: list[list[int]]) -> None:
        mine = examine(np.asarray(self.lm.batch_next_token_logprobs_sync(prompts)))
        off = max(answer["off_by"] for answer in [mine, *answers])
        if off > 1e-4:
            raise LmpoolError(f"a row's probabilities sum to 1 only within {off:.1e}")
        if len({answer["hash"] for answer in [mine, *answers]}) != 1:
            raise LmpoolError("two clients got different rows for the same prompts")
        self.say(
            f"  [green]Checked:[/] {len(prompts)} rows are the same bytes in all "
            f"{len(answers) + 1} processes, and each sums to 1 (within {off:.0e})."
        )

    def show_next(self) -> None:
        self.title("Next: a model of yours, on a machine with GPUs")
        self.say("  lmpool worker --gpus 0,1 --model meta-llama/Llama-3.2-1B --pool llama")
        self.say("and anywhere that reaches its server (LMPOOL_URL says where that is):")
        for line in NEXT.splitlines():
            self.say(f"  {escape(line)}".rstrip())


def make_work(prompts: int, vocab_size: int, longest: int) -> list[dict[str, Any]]:
    """What each client asks: rounds of prompts, of which many repeat.

    Of a round's prompts, about four in ten are new and asked by all clients at once, three new and
    its own, two its own of earlier rounds, one another client's of earlier rounds.
    """
    chance = random.Random(5)

    def new(count: int) -> list[list[int]]:
        lengths = (chance.randint(min(4, longest), min(16, longest)) for _ in range(count))
        return [[chance.randrange(vocab_size) for _ in range(n)] for n in lengths]

    each = prompts // CLIENTS
    works: list[dict[str, Any]] = [{"rounds": []} for _ in range(CLIENTS)]
    mine: list[list[list[int]]] = [[] for _ in range(CLIENTS)]
    shared: list[list[int]] = []
    for number in range(ROUNDS):
        width = max(1, each * (number + 1) // ROUNDS - each * number // ROUNDS)
        together = new(-(-width * 4 // 10))
        shared += together
        olds = [list(old) for old in mine]
        for client, work in enumerate(works):
            own = new((width - len(together)) // 2 if number else width - len(together))
            left = width - len(together) - len(own)
            theirs = olds[(client + 1) % CLIENTS]
            again = [
                chance.choice(theirs if i % 3 == 0 else olds[client])
                for i in range(left if theirs and olds[client] else 0)
            ]
            asked = together + own + again
            mine[client] += own
            chance.shuffle(asked)
            work["rounds"].append(asked)
    for work in works:
        work["check"] = shared[:CHECKED]
    return works


@contextmanager
def _clients(
    lm: EmbeddedLM[NumpyRows], works: Sequence[Any]
) -> Iterator[list[subprocess.Popen[str]]]:
    """One process for each client, all told to begin at the same moment."""
    environment = {
        **os.environ,
        # Should the demo be killed, its clients need not wait for its server.
        **as_variables({"url": lm.url, "pool": lm.pool, "reconnect_timeout": 3}),
    }
    clients = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "lmpool.demo_client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            process_group=0,  # Ctrl-C is for us, and we end them
        )
        for _ in works
    ]
    try:
        for client, work in zip(clients, works, strict=True):
            _tell(client, json.dumps(work))
        for client in clients:
            _hear(client)
        for client in clients:
            _tell(client, "go")
        yield clients
    finally:
        for client in clients:
            client.kill()
            client.communicate()


def _tell(client: subprocess.Popen[str], line: str) -> None:
    assert client.stdin is not None
    try:
        client.stdin.write(line + "\n")
        client.stdin.flush()
    except BrokenPipeError:
        raise LmpoolError(f"a client process ended with status {client.wait()}") from None


def _hear(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    line = client.stdout.readline()
    if not line:
        raise LmpoolError(f"a client process ended with status {client.wait()}")
    return line


def _result(client: subprocess.Popen[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_hear(client))
    return found
