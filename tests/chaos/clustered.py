"""A pool on a cluster, whose engines hold their jobs for a while, and what befalls both."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from lmpool.keys import GROUP
from tests.chaos.load import Load
from tests.chaos.pool import ChaosPool
from tests.chaos.replicated import what_it_holds
from tests.support.cluster import Cluster, ClusterNode, slot_of
from tests.support.faults import Faults
from tests.support.pools import pool_shards
from tests.support.redis_client import open_redis
from tests.support.waiting import until
from tests.support.workers import living_workers

DELAY = 0.4
"""Seconds for which an engine holds its batch: where all is answered at once, nothing is lost."""
SERVED_WITHIN = 5.0
"""Seconds beyond the node timeout within which calls are answered again."""
LONGEST_CALL = 15.0
"""Seconds beyond the node timeout that a call may take."""
AWAY = 0.5
"""Seconds that restarts may be longer than measured: nodes go one after another."""


class ClusterPool(ChaosPool):
    """As `ChaosPool`, on three primaries and three replicas."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        cluster: dict[str, Any] | None = None,
        patience: float = 0.0,
        **settings: Any,
    ) -> None:
        slow = Faults(folder / "slow").settings(delay=DELAY)
        # A prompt may well be in the hands of several workers that are killed. What one of those
        # held is run one at a time: so few that this is no part of what is measured.
        held = {**slow, "workers": 4, "batch_size": 3, "max_deliveries": 20, "result_ttl": 60}
        load = {"callers": 8, "size": 8, "longest_stream": 4, "timeout": 120.0}
        super().__init__(folder, seed=seed, load=load, **{**held, **settings})
        self._options = cluster or {}
        self._patience = patience
        """Seconds that all may take longer than is promised: other tests run beside this one."""
        self.away = 0.0
        """Seconds for which the fault of the moment kept every node away."""
        self.at_rest_in = 40.0
        self.done: list[str] = []
        """What befell it, and what came of it."""

    def _start_servers(self, stack: ExitStack) -> None:
        self.cluster = stack.enter_context(Cluster(3, 1, **self._options))
        self._url = self._workers_url = self.cluster.url

    def _tests_url(self) -> str:
        return self.cluster.url

    def admin(self) -> redis.Redis:
        """A connection to every primary; close it."""
        return open_redis(self.cluster.url)

    def slots(self) -> list[int]:
        """The slots of the pool's shards."""
        with self.admin() as client:
            return sorted({slot_of(shard.prefix) for shard in pool_shards(client, "chaos")})

    def victim(self) -> tuple[ClusterNode, int]:
        """The primary of one of the pool's shards, and that shard's slot."""
        slot = self.random.choice(self.slots())
        return self.cluster.owner(slot), slot

    def kill_worker(self) -> None:
        """SIGKILL for one of them that holds jobs, if there is one: others lose nothing."""
        pids = {worker["id"]: worker["pid"] for worker in living_workers(self._url, "chaos")}
        held: set[int] = set()
        with self.admin() as client:
            for shard in pool_shards(client, "chaos"):
                with client.pipeline(transaction=False) as pipe:
                    for stream in shard.streams:
                        pipe.xpending(stream.key, GROUP)
                    found = pipe.execute(raise_on_error=False)
                for summary in found:
                    if isinstance(summary, dict):
                        names = [each["name"].decode() for each in summary["consumers"]]
                        held |= {pids[name] for name in names if name in pids}
        busy = [w for w in self.workers if w.pid in held and w.process.poll() is None]
        if not busy:
            super().kill_worker()
            return
        self.random.choice(busy).kill()
        self.kills += 1

    def busiest(self) -> tuple[ClusterNode, int]:
        """The primary of the shard that has the most jobs, and that shard's slot."""
        with self.admin() as client:
            jobs = {}
            for shard in pool_shards(client, "chaos"):
                with client.pipeline(transaction=False) as pipe:
                    for stream in shard.streams:
                        pipe.xlen(stream.key)
                    jobs[slot_of(shard.prefix)] = sum(pipe.execute())
        slot = max(jobs, key=lambda slot: jobs[slot])
        return self.cluster.owner(slot), slot

    def befall(self, load: Load, fault: ClusterFault) -> tuple[float, float]:
        """A fault; return once calls are answered again, which must be soon enough.

        Seconds, at most, without an answer, and for which a call waited.
        """
        self.away = 0.0
        began = time.monotonic()
        try:
            fault.act(self)
            over = time.monotonic()
            timeout = self.cluster.node_timeout + self._patience

            def is_served() -> bool:
                return sum(begin > over and rows > 0 for begin, _, rows in load.outcomes.calls) > 3

            until(is_served, SERVED_WITHIN + timeout + 5 * DELAY, what="calls to be answered")
            # The next fault would make those wait longer that wait for the end of this one.
            until(lambda: load.waits_since() > over, LONGEST_CALL + timeout, what="all the others")
        except (AssertionError, redis.exceptions.RedisError) as error:
            self.done.append(fault.name)
            raise AssertionError(f"{error}\nafter {self.done}\n{self.diagnosis()}") from error
        gap = load.outcomes.longest_gap(began)
        wait = load.outcomes.longest_wait(began)
        self.done.append(f"{fault.name}: {gap:.1f} s without an answer, longest wait {wait:.1f} s")
        print(time.strftime("%X"), self.done[-1], flush=True)
        within = SERVED_WITHIN + self.cluster.node_timeout + self.away + self._patience
        assert gap < within, f"{self.done}\n{self.diagnosis()}"
        return gap, wait

    def check(self, load: Load) -> None:
        """Every prompt has its row, no call took too long, and the faults did hit something."""
        found = load.outcomes
        longest = max(end - begin for begin, end, _ in found.calls)
        print(
            f"{found.asked} prompts, {found.resubmitted} asked again, {self.taken_over()} taken "
            f"over, {self.stolen} stolen, {self.kills} workers killed, longest call {longest:.1f} s"
        )
        assert found.wrong == 0, self.done
        assert found.failed == [], (sorted(set(found.failed)), self.done)
        assert found.right == found.asked
        assert found.streams > 0
        assert longest < LONGEST_CALL + self.cluster.node_timeout + self._patience, self.done
        assert found.resubmitted + self.taken_over() > 0, f"nothing was in flight: {self.done}"

    def diagnosis(self) -> str:
        """What the nodes hold, what the clients' threads are at, and the workers' and theirs."""
        lines = []
        for node in self.cluster.running:
            try:
                with node.client() as client:
                    members = "\n".join(map(str, node.members()))
                    lines += [f"--- {node} knows\n{members}", *what_it_holds(client)]
            except (redis.exceptions.RedisError, OSError) as error:
                lines.append(f"--- {node}: {error}")
            lines.append(node.log.read_text()[-2000:])
        frames = sys._current_frames()
        for thread in threading.enumerate():
            if thread.name.startswith("lmpool"):
                stack = "".join(traceback.format_stack(frames[thread.ident or 0])[-6:])
                lines.append(f"--- {thread.name}\n{stack}")
        for worker in list(self.workers):
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGABRT)  # it writes down where its threads are
                worker.process.wait(60)
            with suppress(FileNotFoundError):  # another takes its place
                lines.append(f"--- {worker.pid}: {worker.log[-10_000:]}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ClusterFault:
    """What is done to a pool on a cluster."""

    name: str
    act: Callable[[ClusterPool], None]


@contextmanager
def _comes_back(pool: ClusterPool, node: ClusterNode, slot: int) -> Iterator[None]:
    """Another node takes the place of one that the block ends; then it is started again."""
    yield
    pool.cluster.wait_for_failover(slot, node)
    if not node.runs:
        node.start()
    pool.cluster.wait_until_ok()


def kill_primary(pool: ClusterPool) -> None:
    """Its replica has all that it was told."""
    node, slot = pool.victim()
    with _comes_back(pool, node, slot):
        pool.kill_worker()
        node.kill()


def lose_writes(pool: ClusterPool) -> None:
    """Its replica has nothing of what it was told for 1.3 s."""
    node, slot = pool.busiest()  # prompts that begin alike lie together: others may have none

    def queued() -> int:
        with pool.admin() as client:
            return sum(
                client.xinfo_stream(stream.key)["entries-added"]
                for shard in pool_shards(client, "chaos")
                if slot_of(shard.prefix) == slot
                for stream in shard.streams
            )

    def go_on() -> None:
        time.sleep(1.3)
        before = queued()
        until(lambda: queued() > before, what="a job that will be lost")
        pool.kill_worker()

    with _comes_back(pool, node, slot):
        pool.cluster.lose_writes(node, go_on)


def pause_primary(pool: ClusterPool) -> None:
    """It comes back as if it still were one."""
    node, slot = pool.victim()
    node.pause()
    pool.cluster.wait_for_failover(slot, node)
    pool.kill_worker()
    time.sleep(pool.random.uniform(0.0, 3.0))
    node.resume()
    pool.cluster.wait_until_ok()


def freeze_for_a_moment(pool: ClusterPool) -> None:
    """Shorter than the node timeout: nobody takes its place."""
    node, _ = pool.victim()
    node.pause()
    time.sleep(pool.random.uniform(0.2, 0.6) * pool.cluster.node_timeout)
    node.resume()
    pool.kill_worker()
    pool.cluster.wait_until_ok()


def _elsewhere(pool: ClusterPool, slot: int) -> ClusterNode:
    owner = pool.cluster.owner(slot)
    return pool.random.choice([node for node in pool.cluster.primaries() if node is not owner])


def move_slots(pool: ClusterPool) -> None:
    """A few keys at a time, to another primary and back, one slot after another."""
    for slot in pool.slots():
        for _ in range(2):
            target = _elsewhere(pool, slot)
            pool.cluster.move_slot(slot, target, keys=20, meanwhile=lambda: time.sleep(0.2))
    pool.kill_worker()


def move_slots_at_once(pool: ClusterPool) -> None:
    """The same on Valkey 9; on others as `move_slots`."""
    if not pool.cluster.moves_at_once:
        move_slots(pool)
        return
    for slot in pool.slots():
        for _ in range(2):
            pool.cluster.move_at_once([slot], _elsewhere(pool, slot))
    pool.kill_worker()


def grow_and_shrink(pool: ClusterPool) -> None:
    """A fourth primary comes, gets its share of the slots, and goes again."""
    cluster, at_once = pool.cluster, pool.cluster.moves_at_once
    node = cluster.add_node()
    cluster.rebalance([*cluster.primaries(), node], at_once=at_once)
    pool.kill_worker()
    time.sleep(1.0)
    cluster.remove_node(node, at_once=at_once)


def restart(pool: ClusterPool) -> None:
    """Every node is killed and comes back, with what its file holds, if it has one."""
    pool.kill_worker()
    began = time.monotonic()
    pool.cluster.restart()
    pool.away = time.monotonic() - began + AWAY


def come_back_empty(pool: ClusterPool) -> None:
    """A primary that was killed is there again before anybody took its place."""
    node, _ = pool.victim()
    pool.kill_worker()
    node.kill()
    node.start()
    pool.cluster.wait_until_ok()


def kill_workers(pool: ClusterPool) -> None:
    """Two of them, and nothing else."""
    pool.kill_worker()
    pool.kill_worker()


def change_lanes(pool: ClusterPool) -> None:
    """All workers are started again, one by one, with another number."""
    pool.change_lanes()


def change_shards(pool: ClusterPool) -> None:
    """Their number, and that of lanes, while all workers stay."""
    pool.change_shards()


CLUSTER_FAULTS = [
    ClusterFault("SIGKILL of two workers", kill_workers),
    ClusterFault("SIGKILL of a primary", kill_primary),
    ClusterFault("SIGKILL of a primary whose replica fell behind", lose_writes),
    ClusterFault("SIGSTOP of a primary, which comes back as a replica", pause_primary),
    ClusterFault("SIGSTOP of a primary for a moment", freeze_for_a_moment),
    ClusterFault("all slots moved to and fro, key by key", move_slots),
    ClusterFault("all slots moved to and fro, at once", move_slots_at_once),
    ClusterFault("a primary added, and removed again", grow_and_shrink),
    ClusterFault("SIGKILL of all nodes", restart),
    ClusterFault("SIGKILL of a primary, back at once", come_back_empty),
    ClusterFault("LMPOOL_LANES changed, worker by worker", change_lanes),
    ClusterFault("shards and lanes changed by a command", change_shards),
]
