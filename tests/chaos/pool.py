"""A pool to be broken: a server, workers that are started again when they die, and a load."""

from __future__ import annotations

import random
import re
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import redis

from lmpool.shards import change, look
from tests.chaos.load import VOCAB, Load, Outcomes
from tests.support.faults import Faults
from tests.support.pools import until_at_rest
from tests.support.proxy import Proxy
from tests.support.sentinels import sentinels
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import WorkerProcess

LANES = 64
"""Of each shard, at first."""
OTHER_LANES = (1, 8, 16, 64, 200)
"""What `change_lanes` chooses from."""
OTHER_SHARDS = (1, 2, 4, 6, 9)
"""What `change_shards` chooses from."""


class ChaosPool:
    """`workers` workers on a server of their own; callers reach it through `proxy`.

    `acts` is what prompts do to a worker (see `FaultyEngine`); those of the load have tokens from
    16 on. The workers' clocks are `clocks` seconds ahead and behind, in turn. A `replicated` server
    has a replica and three Sentinels, through which everybody reaches it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        workers: int = 2,
        server: dict[str, str] | None = None,
        load: dict[str, Any] | None = None,
        acts: dict[str, str] | None = None,
        clocks: float = 0.0,
        replicated: bool = False,
        vocab_size: int = VOCAB,
        **settings: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.workers: list[WorkerProcess] = []
        self.kills = 0
        self.at_rest_in = 20.0
        """Seconds after which nothing may be left."""
        self._seed = seed
        self._count = workers
        self._steals = folder / "steals"
        self._load = {"vocab_size": vocab_size, **(load or {})}
        self._vocab_size = vocab_size
        self._clocks = clocks
        self._replicated = replicated
        self._server_options = server or {}
        self._url = self._workers_url = ""
        self._taken_over = 0
        self._settings = {
            "batch_size": 16,
            "lanes": LANES,
            **Faults(folder).settings(delay=0.004, acts=acts or {}),
            **settings,
        }
        self._ended = threading.Event()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._start_servers(stack)
            stack.callback(self._stop_workers)
            self.workers = [self._start() for _ in range(self._count)]
            for worker in self.workers:
                worker.wait_until_alive()
            supervisor = threading.Thread(target=self._supervise)
            supervisor.start()
            stack.callback(supervisor.join)
            stack.callback(self._ended.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *details: Any) -> None:
        self._stack.__exit__(*details)

    def _start_servers(self, stack: ExitStack) -> None:
        self.server = stack.enter_context(RealServer(tcp=True, **self._server_options))
        self.proxy = stack.enter_context(Proxy(self.server.port))
        self._url, self._workers_url = self.proxy.url, self.server.url
        self.replica = None
        if self._replicated:
            of = f"127.0.0.1 {self.server.port}"
            self.replica = stack.enter_context(RealServer(tcp=True, replicaof=of))
            self._url = self._workers_url = stack.enter_context(sentinels(self.server))

    def load(self, **options: Any) -> Load:
        """Callers of this pool."""
        return Load(self._url, "chaos", seed=self._seed, **{**self._load, **options})

    def admin(self) -> redis.Redis:
        """A connection to the server; close it."""
        return self.server.client()

    def command(self, *words: Any) -> Any:
        """Have the server do something."""
        with self.admin() as client:
            return client.execute_command(*words)

    def kill_worker(self) -> None:
        """SIGKILL for one of them."""
        victims = [worker for worker in self.workers if worker.process.poll() is None]
        if victims:
            self.random.choice(victims).kill()
            self.kills += 1

    def check_nothing_left(self) -> None:
        """No job, flight, or reply, and no consumer of a worker that is gone."""
        with self.admin() as client:
            until_at_rest(client, "chaos", self.at_rest_in)

    def change_lanes(self) -> None:
        """Have all workers started again, one by one, with another number of lanes; in their midst
        one of them is killed."""
        lanes = self.random.choice([n for n in OTHER_LANES if n != self._settings["lanes"]])
        self._settings = {**self._settings, "lanes": lanes, "replace": True}
        victim = self.random.randrange(self._count)
        for place, worker in enumerate(list(self.workers)):
            if place == victim:
                worker.kill()
                self.kills += 1
            else:
                worker.terminate()
            until(lambda: self.workers[place] is not worker, 60, what="a worker to be replaced")  # noqa: B023
            self.workers[place].wait_until_alive()

    def change_shards(self) -> None:
        """``lmpool shards`` while the pool is served: first their number, then that of lanes. A
        worker is killed in the midst of each."""
        before = look(self._tests_url(), "chaos")
        shards = self.random.choice([n for n in OTHER_SHARDS if n != len(before.shards)])
        lanes = self.random.choice([n for n in OTHER_LANES if n != before.lanes])
        for numbers in ((shards, None), (None, lanes)):
            change(self._tests_url(), "chaos", *numbers, wait=0.0)
            self.kill_worker()
            until(lambda: not look(self._tests_url(), "chaos").behind, what="all to move")

    @property
    def stolen(self) -> int:
        """Jobs that workers took of others' lanes."""
        lines = self._steals.read_text().splitlines() if self._steals.exists() else []
        return sum(map(int, lines))

    def _start(self) -> WorkerProcess:
        settings = dict(self._settings)
        opts = {"steals": str(self._steals), "vocab_size": self._vocab_size}
        settings["engine_opts"] = {**settings["engine_opts"], **opts}
        if self._clocks:
            settings["engine_opts"]["clock"] = self._clocks
            self._clocks = -self._clocks
        worker = WorkerProcess(self._workers_url, "chaos", **settings)
        worker.url = self._tests_url()
        return worker

    def _tests_url(self) -> str:
        return self.server.url

    def taken_over(self) -> int:
        """Jobs that workers took over from dead ones, or from themselves."""
        return self._taken_over + sum(_taken_over(worker) for worker in self.workers)

    def _supervise(self) -> None:
        while not self._ended.wait(0.1):
            for place, worker in enumerate(self.workers):
                if worker.process.poll() is not None:
                    self._taken_over += _taken_over(worker)
                    worker.close()
                    self.workers[place] = self._start()

    def _stop_workers(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.resume()
                worker.terminate()
        for worker in self.workers:
            try:
                worker.wait(60)
            finally:
                worker.close()


def _taken_over(worker: WorkerProcess) -> int:
    return sum(map(int, re.findall(r"took over (\d+) jobs", worker.log)))


def run_fault(pool: ChaosPool, fault: Any, *, before: float = 1.5, after: float = 1.0) -> Result:
    """A load, the fault in its midst, and what became of every prompt."""
    with pool.load() as load:
        time.sleep(before)
        began = time.monotonic()
        fault(pool)
        over = time.monotonic()

        def goes_on() -> bool:
            calls = load.outcomes.calls
            return sum(begin > over for begin, _, _ in calls) > 20

        until(goes_on, what="the load to go on after the fault")
        time.sleep(after)
    pool.check_nothing_left()
    return Result(load.outcomes, began, over)


class Result:
    """What a fault did to a load."""

    def __init__(self, outcomes: Outcomes, began: float, over: float) -> None:
        self.outcomes = outcomes
        self.lasted = over - began
        self.longest_wait = outcomes.longest_wait(began)
        """Seconds that a prompt waited after the fault had begun."""
        self.recovered_in = outcomes.longest_wait(over)
        """Seconds that a prompt waited after the fault was over."""
        self.back_after = outcomes.back_after(began, over)
        """Seconds after its end until the pace was nearly what it had been."""

    def check(self) -> None:
        """Each prompt has one outcome, and that is its row."""
        found = self.outcomes
        assert found.wrong == 0
        assert found.failed == [], found.failed[:3]
        assert found.right == found.asked > 0
