"""What operators see of lanes: homes, what was stolen, what waits where, which tokens were kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis.exceptions
from typer.testing import CliRunner

import lmpool
from lmpool import inspection
from lmpool.affinity import lanes_in_use, own_lanes
from lmpool.cli import app
from lmpool.exporter import Exporter
from lmpool.keys import PoolKeys
from lmpool.producer.statistics import PoolStatistics
from lmpool.servers import Servers
from lmpool.worker.status import WorkerStatus
from lmpool.worker.tally import Tally
from tests.support.clients import connected
from tests.support.gate import Gate
from tests.support.pools import Asking, some_prompts, worker_processes
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from tests.support.scrape import Scrape
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import WorkerProcess, worker_process

pytestmark = [pytest.mark.server]

LANES = 64
ONE_PREFIX = [7] * 300


@pytest.fixture(scope="module")
def server(server_binary: str) -> Iterator[RealServer]:
    with RealServer(binary=server_binary) as server:
        yield server


@contextmanager
def workers_with_ports(
    url: str, pool: str, count: int, **settings: object
) -> Iterator[list[tuple[WorkerProcess, int]]]:
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            port = free_port()
            worker = worker_process(url, pool, alive=False, metrics_port=port, **settings)
            found.append((stack.enter_context(worker), port))
        for worker, _ in found:
            worker.wait_until_alive()
        yield found


def settled(lm: lmpool.PooledLM, workers: int, shards: int = 1) -> PoolStatistics:
    """The pool's figures, once all workers know each other."""
    in_use = shards * lanes_in_use(workers, LANES)

    def look() -> PoolStatistics | None:
        found = lm.pool_statistics_sync()
        homes = [worker["lanes"] for worker in found["workers"]]
        whole = found["lanes"]["in_use"] == sum(homes) == in_use
        return found if len(homes) == workers and whole else None

    return until(look, what="all lanes to have a home", every=0.1)


def counted(lm: lmpool.PooledLM, jobs: int) -> PoolStatistics:
    """The pool's figures, once so many jobs are counted as taken."""

    def look() -> PoolStatistics | None:
        found = lm.pool_statistics_sync()
        return found if found["own_jobs"] + found["stolen_jobs"] >= jobs else None

    return until(look, what=f"{jobs} jobs to be counted", every=0.1)


@pytest.mark.parametrize("shards", [1, 2])
def test_homes_are_all_lanes_in_use_and_what_was_taken_is_what_was_asked(
    server: RealServer, pool_name: str, shards: int
) -> None:
    prompts = some_prompts(300, seed=4)
    with (
        workers_with_ports(server.url, pool_name, 3, lanes=LANES, shards=shards) as workers,
        connected(server.url, pool_name) as lm,
        Exporter([(pool_name, server.url)]) as exporter,
    ):
        settled(lm, 3, shards)
        lm.sync.batch_next_token_logprobs(prompts)
        counted(lm, len(prompts))
        # Jobs are counted as they are taken, tokens after the step; beats come between them, and
        # between what a worker says of itself and what the pool counts.
        asked = sum(map(len, prompts))
        told = ("own_jobs", "stolen_jobs", "prompt_tokens", "computed_tokens")

        def whole() -> PoolStatistics | None:
            found = lm.pool_statistics_sync()
            sums = [sum(worker[name] for worker in found["workers"]) for name in told]
            return found if sums == [found[name] for name in told] and asked == sums[3] else None

        found = until(whole, what="each worker's part to be told")
        taken = found["own_jobs"] + found["stolen_jobs"]
        assert taken >= len(prompts) == found["computed"]  # one given back is taken again
        assert found["lanes"]["lanes"] == LANES * shards
        assert found["lanes"]["waiting_jobs"] == 0 == len(found["lanes"]["longest"])
        # Each worker says its part of it, in its heartbeat and to who scrapes it.
        names = [worker["id"] for worker in found["workers"]]
        for _, port in workers:
            scrape = Scrape(port)
            (info,) = scrape.families["lmpool_worker_info"].samples
            (mine,) = [w for w in found["workers"] if w["id"] == info.labels["worker"]]
            lanes = [n for s in range(shards) for n in own_lanes(mine["id"], names, s, LANES)]
            assert scrape.value("lmpool_worker_home_lanes") == mine["lanes"] == len(lanes)
            assert scrape.value("lmpool_worker_own_jobs_total") == mine["own_jobs"]
            assert scrape.value("lmpool_worker_stolen_jobs_total") == mine["stolen_jobs"]
        shown = exporter.exposition().decode()
        label = f'{{model_name="tiny",pool="{pool_name}"}}'
        for metric, value in (
            ("lmpool_lanes", LANES * shards),
            ("lmpool_lanes_in_use", found["lanes"]["in_use"]),
            ("lmpool_waiting_jobs", 0),
            ("lmpool_waiting_lanes", 0),
            ("lmpool_longest_lane_jobs", 0),
            ("lmpool_jobs_own_total", found["own_jobs"]),
            ("lmpool_jobs_stolen_total", found["stolen_jobs"]),
            ("lmpool_prompt_tokens_total", sum(map(len, prompts))),
            ("lmpool_computed_tokens_total", sum(map(len, prompts))),
        ):
            assert f"{metric}{label} {float(value)}" in shown, metric
    # What they counted last is told as they leave.
    with connected(server.url, pool_name, workers_timeout=0.1) as lm:
        left = lm.pool_statistics_sync()
        assert left["workers"] == []
        assert left["own_jobs"] + left["stolen_jobs"] == taken


def test_what_is_counted_as_workers_leave_is_not_lost(server: RealServer, pool_name: str) -> None:
    with (
        worker_processes(server.url, pool_name, 2, lanes=LANES),
        connected(server.url, pool_name) as lm,
    ):
        settled(lm, 2)
        before = lm.pool_statistics_sync()
        lm.sync.batch_next_token_logprobs(some_prompts(50, seed=5))
        assert before["own_jobs"] + before["stolen_jobs"] == 0
    with connected(server.url, pool_name, workers_timeout=0.1) as lm:
        left = lm.pool_statistics_sync()
        assert left["own_jobs"] + left["stolen_jobs"] >= 50  # one given back is taken again


def test_a_full_server_counts_later_and_hears_every_beat(
    server_binary: str, pool_name: str
) -> None:
    status = WorkerStatus({"id": "me"}, lambda: None)
    shards = PoolKeys(pool_name).shards("0" * 8, 1, LANES)
    with RealServer(binary=server_binary) as server, server.client() as client:
        servers, tally = Servers.of_url(server.url), Tally(shards, status)
        try:
            status.own_jobs = 5
            client.config_set("maxmemory", 1)
            tally.add(servers)
            assert not client.exists(shards[0].counters)
            client.config_set("maxmemory", 0)
            tally.add(servers)
            assert client.hgetall(shards[0].counters) == {b"own_jobs": b"5"}
        finally:
            servers.close()


def test_what_can_be_counted_only_in_part_is_counted_once(
    server: RealServer, pool_name: str
) -> None:
    status = WorkerStatus({"id": "me"}, lambda: None)
    shards = PoolKeys(pool_name).shards("0" * 8, 2, LANES)
    servers, tally = Servers.of_url(server.url), Tally(shards, status)
    try:
        with server.client() as client:
            client.hset(shards[0].counters, "stolen_jobs", "nonsense")
            status.own_jobs, status.stolen_jobs = 5, 3
            tally.add(servers)
            tally.add(servers)
            first, second = (client.hgetall(shard.counters) for shard in shards)
            assert first == {b"own_jobs": b"5", b"stolen_jobs": b"nonsense"}
            assert second == {b"stolen_jobs": b"3"}
    finally:
        servers.close()


class DeafOnce(Proxy):
    """Whoever sends EXEC is cut off as the reply comes, once."""

    sent = replied = False

    def passes(self, data: bytes) -> bool:
        """Whether to pass it on."""
        if self.sent and not self.replied:
            self.replied = True
            return False
        self.sent |= b"EXEC\r\n" in data
        return True


def test_what_was_counted_is_not_counted_again_where_the_reply_is_lost(
    server_binary: str, pool_name: str
) -> None:
    status = WorkerStatus({"id": "me"}, lambda: None)
    shards = PoolKeys(pool_name).shards("0" * 8, 2, LANES)
    with (
        RealServer(tcp=True, binary=server_binary) as server,
        DeafOnce(server.port) as proxy,
        server.client() as client,
    ):
        servers, tally = Servers.of_url(proxy.url), Tally(shards, status)
        try:
            status.own_jobs = 5
            with pytest.raises(redis.exceptions.ConnectionError):
                tally.add(servers)
            assert proxy.replied
            status.own_jobs = 7
            tally.add(servers)
            assert client.hgetall(shards[0].counters) == {b"own_jobs": b"7"}
            # Whoever is away is given nothing: that is counted later.
            proxy.refuses = True
            proxy.cut()
            status.own_jobs = 9
            with pytest.raises(redis.exceptions.ConnectionError):
                tally.add(servers)
            proxy.refuses = False
            tally.add(servers)
            assert client.hgetall(shards[0].counters) == {b"own_jobs": b"9"}
            assert not client.exists(shards[1].counters)
        finally:
            servers.close()


def test_who_has_no_work_of_its_own_is_seen_to_steal(
    server: RealServer, pool_name: str, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    settings = {"lanes": LANES, "batch_size": 4, **gate.settings()}
    prompts = [[*ONE_PREFIX, number] for number in range(160)]
    with (
        worker_processes(server.url, pool_name, 2, **settings) as workers,
        connected(server.url, pool_name) as lm,
    ):
        names = [worker["id"] for worker in settled(lm, 2)["workers"]]
        asking = Asking(lm, prompts)
        everyone = {worker.pid for worker in workers}
        until(lambda: {pid for pid, _ in gate.batches()} == everyone, what="each to be at work")
        until(
            lambda: any(w["stolen_per_second"] for w in lm.pool_statistics_sync()["workers"]),
            what="the thief's pace",
        )
        gate.open()
        asking.rows()

        def agreed() -> PoolStatistics | None:
            """The pool's figures and the workers' own reach it one after another."""
            found = counted(lm, len(prompts))
            told = ("own_jobs", "stolen_jobs")
            sums = [sum(worker[name] for worker in found["workers"]) for name in told]
            return found if sums == [found[name] for name in told] else None

        found = until(agreed, what="figures that agree", every=0.1)
        lane = lm.info.placement().of(bytes_of(prompts[0]), None)[1]
        home = next(n for n in names if lane % 32 in own_lanes(n, names, 0, LANES))
        by_home = {worker["id"] == home: worker for worker in found["workers"]}
        assert by_home[True]["stolen_jobs"] == by_home[False]["own_jobs"] == 0
        assert by_home[False]["stolen_jobs"] == found["stolen_jobs"] > 0
        assert found["own_jobs"] == by_home[True]["own_jobs"] > 0


def bytes_of(prompt: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in prompt)


def test_what_waits_is_told_by_lane_with_its_home(
    server: RealServer, pool_name: str, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    settings = {"lanes": LANES, "batch_size": 1, **gate.settings()}
    with (
        ThreadPoolExecutor(1) as thread,
        worker_processes(server.url, pool_name, 2, **settings),
        connected(server.url, pool_name) as lm,
    ):
        names = [worker["id"] for worker in settled(lm, 2)["workers"]]
        prompts = [[*ONE_PREFIX, number] for number in range(60)]
        lane = lm.info.placement().of(bytes_of(prompts[0]), None)[1] % 32
        asked = thread.submit(lm.sync.batch_next_token_logprobs, prompts)
        try:
            until(lambda: lm.pool_statistics_sync()["backlog"] == 60, what="all jobs to be there")
            until(lambda: 0 < lm.pool_statistics_sync()["lanes"]["waiting_jobs"] < 60)
            found = lm.pool_statistics_sync()["lanes"]
            (longest,) = found["longest"]
            assert (longest["shard"], longest["lane"]) == (0, lane)
            assert longest["waiting"] == found["waiting_jobs"] > 40
            assert found["waiting_lanes"] == 1
            assert lane in own_lanes(longest["home"], names, 0, LANES)
            assert 0 < longest["oldest_seconds"] < 60
            where = ["--url", server.url, "--pool", pool_name]
            shown = CliRunner().invoke(app, ["stats", *where], env={"COLUMNS": "80"}).stdout
            assert f"32 of {LANES} in use" in shown
            assert f"longest  lane {lane}: " in shown
            assert f" wait, home {longest['home']}" in shown
            told = json.loads(CliRunner().invoke(app, ["stats", "--json", *where]).stdout)
            assert told["lanes"]["longest"][0]["home"] == longest["home"]
            top = CliRunner().invoke(app, ["top", "--once", *where], env={"COLUMNS": "80"}).stdout
            assert f"32 of {LANES} in use" in top
            assert longest["home"] in top
            findings = inspection.diagnose(server.url, pool_name)
            (skew,) = [each for each in findings if "waiting jobs are in one lane" in each.what]
            assert f"lane {lane}" in skew.what
            assert "LMPOOL_BLOCKS" in skew.remedy
        finally:
            gate.open()
        assert asked.result(60).shape == (60, 256)


@pytest.mark.parametrize(("keeps", "level"), [(0, "ok"), (20_000, "note")])
def test_the_doctor_leaves_one_lane_to_engines_that_keep_nothing(
    keeps: int, level: str, server: RealServer, pool_name: str
) -> None:
    with (
        worker_processes(server.url, pool_name, 2, lanes=1, engine_opts={"keeps": keeps}),
        connected(server.url, pool_name, cache_bytes=0) as lm,
    ):
        for number in range(2):
            prompts = [[*ONE_PREFIX, number, other] for other in range(20)]
            lm.batch_next_token_logprobs_sync(prompts)

        def all_told() -> bool:
            found = lm.pool_statistics_sync()
            asked, computed = found["prompt_tokens"], found["computed_tokens"]
            return asked >= 40 * 302 and (keeps > 0 or computed == asked)

        until(all_told, what="beats")
        (found,) = [
            each for each in inspection.diagnose(server.url, pool_name) if "one lane" in each.what
        ]
        assert (found.level, "--lanes 64" in found.remedy) == (level, level == "note"), found


def test_what_is_drawn_is_not_taken_for_a_prompt(server: RealServer, pool_name: str) -> None:
    prompts = [[*range(1, 101), 100 + number] for number in range(20)]
    with (
        worker_process(server.url, pool_name, engine_opts={"keeps": 10_000}),
        connected(server.url, pool_name) as lm,
        Exporter([(pool_name, server.url)]) as exporter,
    ):
        lm.sync.batch_generate(prompts, max_tokens=50)
        asked = sum(map(len, prompts))
        until(lambda: lm.pool_statistics_sync()["prompt_tokens"] == asked)
        where = ["--url", server.url, "--pool", pool_name]

        def whole() -> str | None:  # unless a beat comes in between, or what was drawn comes later
            computed = lm.pool_statistics_sync()["computed_tokens"]
            shown = CliRunner().invoke(app, ["stats", *where], env={"COLUMNS": "200"}).stdout
            text = f"{computed:,} tokens computed, drawn ones among them, for {asked:,} of"
            return shown if computed > asked and text in shown else None

        shown = until(whole, what="the tokens", every=0.1)
        assert "prompt tokens kept" not in shown
        (told,) = [
            line
            for line in exporter.exposition().decode().splitlines()
            if line.startswith("# HELP lmpool_computed_tokens_total")
        ]
        assert "drawn" in told


@pytest.mark.slow
def test_tokens_that_were_kept_are_told(server: RealServer, pool_name: str) -> None:
    shared = [list(range(n, n + 40)) for n in (1, 50)]
    prompts = [[*shared[n % 2], 100 + n] for n in range(40)]
    with (
        worker_process(server.url, pool_name, engine="hf", lanes=LANES),
        connected(server.url, pool_name) as lm,
    ):
        for prompt in shared:
            lm.next_token_logprobs_sync(prompt)
        lm.sync.batch_next_token_logprobs(prompts)
        found = counted(lm, 42)
        asked = sum(map(len, (*shared, *prompts)))
        until(lambda: lm.pool_statistics_sync()["prompt_tokens"] == asked)
        assert lm.pool_statistics_sync()["computed_tokens"] < asked / 2
        where = ["--url", server.url, "--pool", pool_name]
        shown = CliRunner().invoke(app, ["stats", *where], env={"COLUMNS": "80"}).stdout
        assert f" of {asked:,} prompt tokens kept, not computed" in shown
        assert found["workers"][0]["lanes"] == 1
