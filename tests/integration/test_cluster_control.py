"""Control jobs through a Redis Cluster, and through a server of their own."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.errors import JobFormatError, PoolTimeout, ServerUnreachable, UnknownAdapter
from lmpool.keys import GROUP, PoolKeys
from lmpool.producer import PooledLM
from lmpool.producer.control import ask_workers
from lmpool.producer.deadline import Deadline
from lmpool.servers import Servers
from lmpool.settings import ClientOptions
from lmpool.wire import pack_job
from lmpool.worker.dead_letters import DeadLetters
from tests.integration.test_adapters import rows_of, write_adapter
from tests.support.certificates import certificates, where_tls_is_spoken
from tests.support.clients import connected
from tests.support.cluster import Cluster, ClusterNode, slot_of
from tests.support.faults import Faults
from tests.support.protocol import new_job, shard_of_pool
from tests.support.redis_client import open_redis
from tests.support.sentinels import sentinels
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import (
    ARQ,
    WorkerProcess,
    clean_environment,
    living_workers,
    settings_as_environment,
    worker_process,
)

NODE_TIMEOUT = 1.0
PROMPT = [[1, 2, 3]]


@pytest.fixture(scope="module")
def cluster(server_binary: str) -> Iterator[Cluster]:
    """Three primaries, three replicas, which every test leaves as it found them."""
    with Cluster(3, 1, node_timeout=NODE_TIMEOUT) as cluster:
        yield cluster


def owner_of(cluster: Cluster, pool: str) -> ClusterNode:
    """The node that the pool's control jobs lie on."""
    return cluster.owner(PoolKeys(pool).control_slot)


def ask(
    url: str, pool: str, worker: WorkerProcess, function: str, *, control_url: str | None = None
) -> Any:
    """What a worker answers to a control job."""
    options = ClientOptions(url=url, pool=pool, control_url=control_url)
    consumer = worker.wait_until_alive()["id"]
    return ask_workers(options, [consumer], function, deadline=Deadline(20))[consumer]


def use_everything(url: str, pool: str, folder: Path, **control: Any) -> None:
    """Every control function does what it is for; the last one ends the worker."""
    adapters = folder / "adapters"
    style = write_adapter(adapters / "style")
    with (
        worker_process(url, pool, adapter_dirs=[str(adapters)], **control) as worker,
        connected(url, pool, **control) as lm,
    ):
        lm.add_new_lora(style, "style", timeout=60)
        rows = lm.batch_next_token_logprobs_sync(PROMPT, lora_name="style")
        assert not np.array_equal(rows, rows_of(None, PROMPT))
        lm.cache_kv(PROMPT[0], timeout=60)
        lm.clear_kv_cache(timeout=60)
        lm.remove_lora("style", timeout=60)
        with pytest.raises(UnknownAdapter):
            lm.batch_next_token_logprobs_sync(PROMPT, lora_name="style")
        assert ask(url, pool, worker, "describe", **control)["pid"] == worker.pid
        assert ask(url, pool, worker, "drain", **control) is None
        assert worker.wait(60) == 0, worker.log


def control_keys(url: str, pool: str) -> list[str]:
    """The keys of control jobs of a pool."""
    tag = PoolKeys(pool).tag
    with open_redis(url) as client:
        found = sorted(key.decode() for key in client.keys("*"))
    untagged = [key for key in found if key.startswith("arq:") and "{lmpool:" not in key]
    assert untagged == []
    return [key for key in found if tag in key and ("arq:" in key or ":control:" in key)]


def test_control_jobs_travel_through_a_cluster(
    cluster: Cluster, pool_name: str, tmp_path: Path
) -> None:
    use_everything(cluster.url, pool_name, tmp_path)
    tag = PoolKeys(pool_name).tag
    left = control_keys(cluster.url, pool_name)
    # Results, which end by themselves; all on one node.
    assert {key.rpartition(tag)[0] for key in left} == {"arq:result:"}, left
    assert {slot_of(key) for key in left} == {PoolKeys(pool_name).control_slot}


def test_control_jobs_travel_through_a_cluster_with_tls_and_users(
    server_binary: str, pool_name: str, tmp_path: Path
) -> None:
    users = "user default off\nuser worker on >w ~* &* +@all\n"
    with where_tls_is_spoken(Cluster(3, 0, tls=certificates(tmp_path), users=users)) as secured:
        use_everything(secured.url_of("worker", "w"), pool_name, tmp_path)


@pytest.mark.one_server
def test_control_jobs_may_have_a_server_of_their_own(
    cluster: Cluster, pool_name: str, tmp_path: Path
) -> None:
    with RealServer(requirepass="s3cret") as server:
        use_everything(cluster.url, pool_name, tmp_path, control_url=server.url)
        assert control_keys(cluster.url, pool_name) == []
        assert control_keys(server.url, pool_name)
        # And the other way round: the pool on one server, its control jobs on a cluster.
        use_everything(server.url, f"{pool_name}-2", tmp_path, control_url=cluster.url)
        assert control_keys(cluster.url, f"{pool_name}-2")


def test_a_client_of_another_server_of_control_jobs_is_told_which_to_set(
    server_binary: str, pool_name: str
) -> None:
    with RealServer(tcp=True) as pool, RealServer(tcp=True, requirepass="s3cret") as control:
        place = f"redis://127.0.0.1:{control.port}/0"
        # Workers listen elsewhere, and the client does not know.
        with (
            worker_process(pool.url, pool_name, control_url=control.url) as worker,
            connected(pool.url, pool_name) as lm,
        ):
            worker.wait_until_alive()
            (said,) = lm.pool_statistics_sync()["workers"]
            assert said["control"] == place
            text = told(lm, f"take control jobs from {place}, and this client puts", timeout=2)
            assert "Set LMPOOL_CONTROL_URL" in text
            assert "s3cret" not in text
            with connected(pool.url, pool_name, control_url=control.url) as knowing:
                knowing.clear_kv_cache(timeout=60)
        # The other way round.
        with (
            worker_process(pool.url, pool_name) as worker,
            connected(pool.url, pool_name, control_url=control.url) as lm,
        ):
            worker.wait_until_alive()
            assert "s3cret" not in told(lm, "Leave LMPOOL_CONTROL_URL", timeout=2)
            with connected(pool.url, pool_name) as knowing:
                knowing.clear_kv_cache(timeout=60)


def told(lm: PooledLM, what: str, *, timeout: float) -> str:
    """What a caller is told whom nobody answers, once `what` was found out before its time was
    over: on a machine that stands still, that may be over first."""

    def text() -> str | None:
        began = time.monotonic()
        with pytest.raises(PoolTimeout) as caught:
            lm.clear_kv_cache(timeout=timeout)
        assert time.monotonic() - began < 30
        return str(caught.value) if re.search(what, str(caught.value)) else None

    found = until(text, what=what)
    assert found is not None
    return found


# ---- what befalls the node that they lie on


class Asked:
    """A call that takes the worker some seconds, made beside the test."""

    def __init__(self, lm: PooledLM, *, timeout: float = 60.0) -> None:
        self.took = 0.0
        self.error: Exception | None = None
        self._lm, self._timeout = lm, timeout
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Asked:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    @property
    def has_ended(self) -> bool:
        """Whether it was answered."""
        return not self._thread.is_alive()

    def _ask(self) -> None:
        began = time.monotonic()
        try:
            self._lm.cache_kv([1, 2], timeout=self._timeout)
        except Exception as error:
            self.error = error
        self.took = time.monotonic() - began


@pytest.fixture
def slow_worker(
    cluster: Cluster, pool_name: str, tmp_path: Path
) -> Iterator[tuple[WorkerProcess, PooledLM]]:
    """A worker that takes a second to keep a prefix, and a client of it. It must live on."""
    slow = Faults(tmp_path).settings(prefix_delay=1.0)
    with (
        worker_process(cluster.url, pool_name, **slow) as worker,
        connected(cluster.url, pool_name) as lm,
    ):
        yield worker, lm
        lm.clear_kv_cache(timeout=60)
        assert worker.process.poll() is None, worker.log
        assert "Traceback" not in worker.log, worker.log


def runs(cluster: Cluster, pool: str) -> bool:
    """Whether a worker has begun a control job."""
    node, tag = owner_of(cluster, pool), PoolKeys(pool).tag
    with node.client() as client:
        return bool(client.keys(f"arq:in-progress:{tag}*"))


@contextmanager
def running_job(cluster: Cluster, lm: PooledLM) -> Iterator[Asked]:
    """A call whose job has begun; at the end of the block it is waited for."""
    while True:
        with Asked(lm) as running:
            until(lambda: runs(cluster, lm.pool) or running.has_ended)
            if not running.has_ended:  # it may have, before this was looked at
                yield running
                return
        assert running.error is None


def test_a_job_that_runs_while_its_node_is_killed_is_answered(
    cluster: Cluster, pool_name: str, slow_worker: tuple[WorkerProcess, PooledLM]
) -> None:
    _, lm = slow_worker
    node = owner_of(cluster, pool_name)
    with running_job(cluster, lm) as running:
        node.kill()
        with Asked(lm) as later:  # while nobody serves it
            pass
    cluster.wait_for_failover(PoolKeys(pool_name).control_slot, node)
    node.start()
    cluster.wait_until_ok()
    assert (running.error, later.error) == (None, None)


@pytest.mark.one_server
def test_an_adapter_comes_while_a_node_of_its_registry_is_dead(
    cluster: Cluster, pool_name: str, tmp_path: Path
) -> None:
    """It is written in every shard, and so on every node; the worker does it once more."""
    adapters = tmp_path / "adapters"
    style = write_adapter(adapters / "style")
    with (
        worker_process(cluster.url, pool_name, adapter_dirs=[str(adapters)]) as worker,
        connected(cluster.url, pool_name) as lm,
    ):
        control = owner_of(cluster, pool_name)
        for node in (control, next(n for n in cluster.primaries() if n is not control)):
            (slot, *_) = cluster.slots(node)
            node.kill()
            lm.add_new_lora(style, "style", timeout=60)
            lm.remove_lora("style", timeout=60)
            lm.add_new_lora(style, "style", timeout=60)
            cluster.wait_for_failover(slot, node)
            rows = lm.batch_next_token_logprobs_sync(PROMPT, lora_name="style", timeout=60)
            assert not np.array_equal(rows, rows_of(None, PROMPT))
            node.start()
            cluster.wait_until_ok()
        assert worker.process.poll() is None, worker.log


def test_a_job_that_runs_while_its_node_is_paused_is_answered(
    cluster: Cluster, pool_name: str, slow_worker: tuple[WorkerProcess, PooledLM]
) -> None:
    _, lm = slow_worker
    node = owner_of(cluster, pool_name)
    with running_job(cluster, lm) as running:
        node.pause()
        cluster.wait_for_failover(PoolKeys(pool_name).control_slot, node)
        with Asked(lm) as later:
            pass
    node.resume()
    cluster.wait_until_ok()
    assert (running.error, later.error) == (None, None)


def test_jobs_are_answered_while_their_slot_moves(
    cluster: Cluster, pool_name: str, slow_worker: tuple[WorkerProcess, PooledLM]
) -> None:
    _, lm = slow_worker
    slot = PoolKeys(pool_name).control_slot
    source = owner_of(cluster, pool_name)
    target = next(node for node in cluster.primaries() if node is not source)
    for to in (target, source):
        with running_job(cluster, lm) as running:
            # Half of the keys are at either node for longer than the job takes.
            cluster.move_slot(slot, to, keys=1, meanwhile=lambda: time.sleep(1.5))
        assert cluster.owner(slot) is to
        assert running.error is None
    lm.clear_kv_cache(timeout=60)


@pytest.mark.one_server
def test_a_caller_is_told_in_time_that_the_node_is_away(server_binary: str, pool_name: str) -> None:
    with (
        RealServer(tcp=True) as pool,
        Cluster(3, 0, node_timeout=NODE_TIMEOUT) as cluster,
        worker_process(pool.url, pool_name, control_url=cluster.url) as worker,
        connected(pool.url, pool_name, control_url=cluster.url) as lm,
    ):
        lm.clear_kv_cache(timeout=60)
        node = owner_of(cluster, pool_name)
        node.pause()
        told(lm, r"after 4 s: redis\+cluster://.* is lost: ", timeout=4)
        node.kill()
        with (
            connected(pool.url, pool_name, control_url=cluster.url, reconnect_timeout=1.0) as hasty,
            pytest.raises(ServerUnreachable, match=r"no answer from redis\+cluster://"),
        ):
            hasty.clear_kv_cache(timeout=60)
        assert lm.next_token_logprobs_sync([1], timeout=60).shape == (256,)  # prompts go on
        node.start()
        cluster.wait_until_ok()
        lm.clear_kv_cache(timeout=60)
        assert worker.process.poll() is None


# ---- arq --check


def check(url: str, pool: str, folder: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    """``arq --check`` with these settings."""
    given = {"url": url, "pool": pool, "engine": "mock", "worker_name": "here", **settings}
    return subprocess.run(
        [*ARQ, "--check"],
        env={**clean_environment(), **settings_as_environment(given)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


def tells_the_truth(
    url: str, pool: str, folder: Path, take_away: Callable[[], None], **settings: Any
) -> None:
    """Alive, dead, and away with the server: each is told."""

    def status() -> int:
        return check(url, pool, folder, **settings).returncode

    assert status() == 1  # nobody was ever there
    with worker_process(url, pool, worker_name="here", **settings) as worker:
        until(lambda: status() == 0)
        worker.kill()
        until(lambda: not living_workers(url, pool), what="its sign of life to end")
        until(lambda: status() == 1)
    take_away()
    found = check(url, pool, folder, **settings)
    assert found.returncode == 70
    assert "lmpool worker: " in found.stderr, found.stderr
    assert "Traceback" not in found.stderr, found.stderr


@pytest.mark.one_server
def test_arqs_check(server_binary: str, pool_name: str, tmp_path: Path) -> None:
    """Of one server, of Sentinels, of a cluster, and of a server of control jobs: side by side, as
    it waits in each of them."""
    with ExitStack() as stack:
        one = stack.enter_context(RealServer(requirepass="s3cret@"))
        primary = stack.enter_context(RealServer(tcp=True))
        watched = stack.enter_context(sentinels(primary, replicas=0))
        many = stack.enter_context(Cluster(3, 0, node_timeout=NODE_TIMEOUT))
        pool = stack.enter_context(RealServer(tcp=True))
        control = stack.enter_context(RealServer(tcp=True))
        ways: list[tuple[str, Callable[[], None], dict[str, str]]] = [
            (f"unix://:s3cret%40@{one.socket}?db=1", one.kill, {}),
            (watched, primary.kill, {}),
            (many.url, owner_of(many, pool_name).kill, {}),
            (pool.url, control.kill, {"control_url": control.url}),
        ]
        with ThreadPoolExecutor(len(ways)) as together:
            found = [
                together.submit(tells_the_truth, url, pool_name, tmp_path, take_away, **settings)
                for url, take_away, settings in ways
            ]
            for each in found:
                each.result()


@pytest.mark.one_server
def test_arqs_check_knows_a_worker_again_after_a_failover(
    cluster: Cluster, pool_name: str, tmp_path: Path
) -> None:
    slot = PoolKeys(pool_name).control_slot
    with worker_process(cluster.url, pool_name, worker_name="here"):
        until(lambda: check(cluster.url, pool_name, tmp_path).returncode == 0)
        node = owner_of(cluster, pool_name)
        cluster.lose_writes(node)  # the sign of life may be among them
        cluster.wait_for_failover(slot, node)
        until(lambda: check(cluster.url, pool_name, tmp_path).returncode == 0)
        node.start()
        cluster.wait_until_ok()


# ---- settings


@pytest.mark.one_server
def test_a_node_of_a_cluster_is_no_server_of_control_jobs(
    cluster: Cluster, server_url: str, pool_name: str
) -> None:
    wrong = cluster.nodes[0].url
    with worker_process(server_url, pool_name, alive=False, control_url=wrong) as worker:
        assert worker.wait(60) == 78
        assert "is a node of a Redis Cluster: write redis+cluster://" in worker.log


def waits(node: RealServer) -> int:
    """How often a node was asked for a replica's sake."""
    with node.client() as client:
        return int(client.info("commandstats").get("cmdstat_wait", {}).get("calls", 0))


def test_a_job_given_up_waits_for_a_replica_and_garbage_does_not(
    cluster: Cluster, pool_name: str
) -> None:
    job, shard = new_job(1, 2), shard_of_pool(pool_name)
    with (
        RealServer() as alone,
        closing(Servers.of_url(cluster.url)) as many,
        closing(Servers.of_url(alone.url)) as one,
    ):
        for servers, node, has_replica in (
            (one, alone, False),
            (many, cluster.owner(shard.slot), True),
        ):
            # Slots may have moved since this process looked where they are.
            until(lambda it=servers: it.apart([shard], lambda s: s.exists(shard.dead)) is not None)
            server, letters = servers.for_shard(shard), DeadLetters(servers, "me")
            server.xgroup_create(shard.stream().key, GROUP, id="0", mkstream=True)
            entry = server.xadd(shard.stream().key, {"job": pack_job(job)})
            before = waits(node)
            letters.refuse(shard.stream(), entry, b"garbage", JobFormatError("garbage"))
            assert waits(node) == before
            letters.give_up(shard.stream(), entry, pack_job(job), job, 3, "worker")
            # More than once where the node was late to answer.
            assert (waits(node) > before) is has_replica
            assert server.xlen(shard.dead) == 2


@pytest.mark.one_server
def test_what_must_not_be_lost_waits_for_a_replica(
    cluster: Cluster, server_binary: str, pool_name: str, tmp_path: Path
) -> None:
    adapters = tmp_path / "adapters"
    style = write_adapter(adapters / "style")
    nodes: list[RealServer]
    with RealServer() as server:
        for url, nodes in ((server.url, [server]), (cluster.url, cluster.primaries())):
            with (
                worker_process(url, pool_name, adapter_dirs=[str(adapters)]),
                connected(url, pool_name) as lm,
            ):
                before = [waits(node) for node in nodes]
                lm.add_new_lora(style, "style", timeout=60)
                after = [waits(node) for node in nodes]
                assert len(lm.shards) == (1 if len(nodes) == 1 else 6)
            # More than once where a node was late to answer: then all is done again.
            more = [b > a for a, b in zip(before, after, strict=True)]
            assert more == ([False] if len(nodes) == 1 else [True] * 3)
