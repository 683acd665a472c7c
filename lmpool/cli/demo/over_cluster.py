"""``lmpool demo --cluster``: a pool on a Redis Cluster, and a primary that is killed under load."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console

from lmpool.cli.bars import ascii_text
from lmpool.cli.demo.client import Report, examine
from lmpool.cli.demo.load import make_work, run_load
from lmpool.cli.demo.private_cluster import PrivateCluster, Range
from lmpool.cli.lanes import share
from lmpool.cli.terminal import escape, lines, speaks_unicode
from lmpool.errors import LmpoolError
from lmpool.liveness import BEAT_MS
from lmpool.pool_view import PoolViewer
from lmpool.producer import NumpyRows, PooledLM, connect
from lmpool.producer.statistics import PoolStatistics

PRIMARIES: Final = 3
READY_WITHIN: Final = 300.0
KILLED_AFTER: Final = 1.5
"""Seconds of load after which a primary is killed."""
MOCK_BATCH: Final = 0.1
"""Seconds that a batch of the mock engine takes: an instant one leaves nothing in flight."""
BEGINNINGS: Final = 64
BEGINNING_TOKENS: Final = 64
"""What prompts begin with: whole blocks, by which their lanes are chosen."""
KEEPS: Final = BEGINNINGS * BEGINNING_TOKENS * 3 // 4
"""Tokens whose states a worker of the mock engine keeps: more than its share of all beginnings, and
less than all."""
SETTLED_WITHIN: Final = 10.0
"""Seconds for which workers are waited for to say what they are the home of, and what they did."""
REPLACED_WITHIN: Final = 20.0
"""Seconds in which a replica must have taken its place."""
CHECKED: Final = 400
"""Prompts whose rows are compared at the end."""

NEXT: Final = """\
export LMPOOL_URL=redis+cluster://user:password@node-1:6379,node-2:6379/
lmpool doctor                  # what the cluster lacks
lmpool worker --gpus all --model meta-llama/Llama-3.2-1B --pool llama"""


def run_over_cluster(*, workers: int, engine: str, model: str, prompts: int) -> None:
    """Start, show, load, kill, count, check, end. Leaves nothing behind."""
    console = lines()
    # A SIGTERM then ends it as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started = time.perf_counter()
    of_mock = {"delay": MOCK_BATCH, "vocab_size": 2048, "keeps": KEEPS}
    options = of_mock if engine == "mock" else {}
    with PrivateCluster(PRIMARIES, "demo") as cluster:
        with console.status("starting a cluster and workers"):
            settings = {"engine": engine, "model": model, "engine_opts": options}
            cluster.start_workers(workers, settings)
            lm = _connect(cluster)
        with lm:
            demo = _Demo(lm, cluster, console)
            demo.show_processes(time.perf_counter() - started)
            demo.show_homes()
            demo.show_load(prompts)
            demo.show_taken()
            demo.show_next()


def _connect(cluster: PrivateCluster) -> PooledLM[NumpyRows]:
    """A client, once all workers serve."""
    with PoolViewer(cluster.url, cluster.pool) as viewer:
        cluster.wait_for_workers(lambda: len(viewer.read().workers), READY_WITHIN)
    return connect(cluster.url, cluster.pool, framework="numpy")


class _Demo:
    def __init__(self, lm: PooledLM[NumpyRows], cluster: PrivateCluster, console: Console) -> None:
        self.lm = lm
        self.cluster = cluster
        self.console = console
        self.ascii_only = not speaks_unicode(console)
        self.killed_at = 0.0
        self.replaced_after: float | None = None

    def say(self, text: str = "") -> None:
        self.console.print(ascii_text(text) if self.ascii_only else text)

    def title(self, text: str) -> None:
        self.say()
        self.say(f"[bold]{text}[/]")

    # --- the parts -----------------------------------------------------------------------------

    def show_processes(self, seconds: float) -> None:
        info = self.lm.info
        self.title(f"Started in {seconds:.1f} s, on this machine, for this demo alone")
        self.show_nodes()
        for worker in self.cluster.workers:
            self.say(
                f"  worker   pid {worker.popen.pid:<8} {info.engine} engine, model "
                f"{escape(info.model)}: arq lmpool.worker.WorkerSettings"
            )
        self.say(
            f"  The pool has {info.shards} shards, two a primary: "
            "parts stay alike when one is added."
        )

    def show_nodes(self) -> None:
        """Each primary, its slots and the shards in them, and the replica that it began with."""
        for found in self.cluster.layout():
            here = [
                str(shard.number)
                for shard in self.lm.shards
                if found.first <= shard.slot <= found.last
            ]
            self.say(
                f"  primary  pid {found.primary.popen.pid:<8} {found.primary.address}: slots "
                f"{found.first:,} to {found.last:,}, shards {', '.join(here)}"
            )
            replica = self.cluster.replica_of(found.primary)
            if replica is not None:
                self.say(f"  replica  pid {replica.popen.pid:<8} {replica.address}")

    def show_homes(self) -> None:
        """How many lanes there are, and how many each worker is the home of."""
        found = self.settled(
            lambda _, now: sum(w["lanes"] for w in now["workers"]) == now["lanes"]["in_use"]
        )
        lanes = found["lanes"]
        self.title(f"Lanes: {lanes['in_use']:,} of {lanes['lanes']:,} in use")
        self.say("  prompts that begin alike meet in a lane, and each lane has a home")
        for worker in found["workers"]:
            self.say(f"  worker   pid {worker['pid']:<8} home of {worker['lanes']:,} lanes")

    def show_taken(self) -> None:
        """What each worker took, and of whom: as it says itself, which no primary takes with it."""
        found = self.settled(lambda before, now: _taken(before) == _taken(now) > 0)
        self.title("Lanes: who ran what")
        for worker in found["workers"]:
            own, others = worker["own_jobs"], worker["stolen_jobs"]
            self.say(f"  worker   pid {worker['pid']:<8} {own:,} of its lanes, {others:,} stolen")
        others = sum(worker["stolen_jobs"] for worker in found["workers"])
        asked = sum(worker["prompt_tokens"] for worker in found["workers"])
        computed = sum(worker["computed_tokens"] for worker in found["workers"])
        kept = max(0.0, 1 - computed / max(1, asked))
        self.show_numbers(
            (share(others / max(1, _taken(found))), "stolen", "by a worker that had nothing to do"),
            (share(kept), "of prompt tokens kept", "their worker had just computed them"),
        )

    def settled(self, reached: Callable[[PoolStatistics, PoolStatistics], bool]) -> PoolStatistics:
        """The pool's figures once they are so, beside those of a beat before; or at last."""
        until = time.monotonic() + SETTLED_WITHIN
        found = self.lm.pool_statistics_sync()
        while time.monotonic() < until:
            time.sleep(BEAT_MS / 1000)
            before, found = found, self.lm.pool_statistics_sync()
            if reached(before, found):
                break
        return found

    def show_numbers(self, *lines: tuple[str, str, str]) -> None:
        """Numbers, each with what it is and a remark."""
        for number, what, remark in lines:
            self.say(f"  {number:>6}  {what:<28}[dim]{remark}[/]")

    def show_load(self, prompts: int) -> None:
        info = self.lm.info
        longest = info.max_prompt_tokens
        begin = min(BEGINNING_TOKENS, longest // 2)
        works = make_work(prompts, info.vocab_size, longest, BEGINNINGS, begin)
        asked = sum(len(prompts) for prompts in works[0]["rounds"]) * len(works)
        both = {tuple(prompt) for each in works[0]["rounds"] for prompt in each}
        both &= {tuple(prompt) for each in works[1]["rounds"] for prompt in each}
        check = [list(prompt) for prompt in sorted(both)[:CHECKED]]
        for work in works:
            work["check"] = check
        self.title(f"Load: {asked:,} prompts from {len(works)} client processes at once")
        victim = self.cluster.layout()[0]
        self.say(
            f"  after {KILLED_AFTER:g} s: kill -9 of {victim.primary.address}, which has a part of "
            "them in flight"
        )
        with self.console.status("waiting for rows"):
            reports = run_load(
                self.lm,
                works,
                patience=60.0,
                group=self.cluster.group,
                meanwhile=lambda: self.kill(victim),
            )
        self.show_outcome(reports, asked, check)

    def kill(self, victim: Range) -> None:
        """End a primary, and see when another has its place."""
        time.sleep(KILLED_AFTER)
        victim.primary.popen.kill()
        victim.primary.popen.wait()
        killed = time.monotonic()
        while time.monotonic() - killed < REPLACED_WITHIN:
            owners = {found.primary.port for found in self.cluster.layout()}
            if victim.primary.port not in owners:
                self.replaced_after = time.monotonic() - killed
                return
            time.sleep(0.02)

    def show_outcome(self, reports: Sequence[Report], asked: int, check: list[list[int]]) -> None:
        if self.replaced_after is None:
            raise LmpoolError(f"no replica took its place within {REPLACED_WITHIN:g} s")
        rows = sum(report["rows"] for report in reports)
        if rows != asked:
            raise LmpoolError(f"{asked:,} prompts were asked, and {rows:,} rows came")
        seconds = max(report["seconds"] for report in reports)
        longest = max(report["longest"] for report in reports)
        again = sum(report["statistics"]["resubmitted"] for report in reports)
        self.say(f"  its replica had its place after {self.replaced_after:.1f} s:")
        self.show_nodes()
        stored = sum(
            report["statistics"][name]
            for report in reports
            for name in ("local_hits", "cache_hits", "joined")
        )
        self.show_numbers(
            (
                f"{rows:,}",
                f"rows in {seconds:.1f} s",
                f"{rows / seconds:,.0f} a second, the outage included",
            ),
            (share(stored / asked), "not computed anew", "stored, or asked by another just then"),
            ("0", "prompts lost", "each was answered by one row"),
            (
                f"{again:,}",
                "asked again",
                "lost with the primary; clients ask anew",
            ),
            (
                f"{longest:.1f}",
                "seconds, the longest call",
                "the others waited less, or not at all",
            ),
        )
        # Asked anew by a client that has none of them, after all that happened.
        with connect(
            self.cluster.url, self.cluster.pool, framework="numpy", cache_bytes=0
        ) as other:
            mine = examine(other.batch_next_token_logprobs_sync(check))
        checked = [mine, *(report["checked"] for report in reports)]
        if len({each["hash"] for each in checked}) != 1:
            raise LmpoolError("two clients got different rows for the same prompts")
        self.say(
            f"  [green]Checked:[/] {len(check)} rows are the same bytes in all {len(checked)} "
            "clients, before and after."
        )

    def show_next(self) -> None:
        self.title("Next: a cluster of yours")
        for line in NEXT.splitlines():
            self.say(f"  {escape(line)}".rstrip())


def _taken(found: PoolStatistics) -> int:
    """Jobs that its living workers have taken."""
    return sum(worker["own_jobs"] + worker["stolen_jobs"] for worker in found["workers"])
