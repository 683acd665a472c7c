"""The faults, each a function of the pool that it breaks."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis

import lmpool
from lmpool.errors import PromptFailed
from lmpool.keys import GROUP
from tests.chaos.pool import ChaosPool
from tests.support.pools import pool_shards
from tests.support.waiting import until


@dataclass(frozen=True)
class Fault:
    """What is done, and what it is done to."""

    name: str
    act: Callable[[ChaosPool], None]
    pool: dict[str, Any] = field(default_factory=dict)
    short: bool = False
    """Whether it is part of the short form."""
    alone: bool = False
    """Whether it needs a pool that is made for it."""
    within: float = 10.0
    """Seconds after its end within which every prompt that waited is answered."""


def kill(pool: ChaosPool) -> None:
    pool.kill_worker()


def kill_client(pool: ChaosPool) -> None:
    """What only it waited for is not run to the end, and nothing of it stays."""
    program = (
        "import lmpool, sys\n"
        "lm = lmpool.connect(sys.argv[1], 'chaos', framework='numpy')\n"
        "lm.batch_next_token_logprobs_sync([[1, i % 256, i >> 8] for i in range(60_000)])\n"
    )
    client = subprocess.Popen([sys.executable, "-c", program, pool.proxy.url])
    try:
        with pool.admin() as admin:
            (shard,) = pool_shards(admin, "chaos")
            streams = [stream.key for stream in shard.streams]
            until(lambda: sum(map(admin.xlen, streams)) > 1000, what="its jobs to be queued")
    finally:
        client.kill()
        client.wait(60)
    pool.at_rest_in = 60.0  # it counts as living for 30 s


def fatal_prompt(pool: ChaosPool) -> None:
    """One of `acts`: whoever asks it gets the error, and nobody else."""
    with (
        lmpool.connect(pool.proxy.url, "chaos", workers_timeout=60) as lm,
        pytest.raises(PromptFailed, match="given up after 2 deliveries"),
    ):
        lm.next_token_logprobs_sync([7, 1], timeout=60)


def freeze(pool: ChaosPool) -> None:
    worker = pool.random.choice(pool.workers)
    worker.pause()
    time.sleep(8.0)
    worker.resume()


def restart_server(pool: ChaosPool) -> None:
    pool.server.kill()
    time.sleep(1.0)
    pool.server.start()


def fail_over(pool: ChaosPool) -> None:
    pool.server.kill()
    assert pool.replica is not None
    pool.server = pool.replica

    def is_primary() -> bool:
        with pool.admin() as client:
            return client.info("replication")["role"] == "master"

    until(is_primary, what="the sentinels to make the replica the primary")


def commands(pool: ChaosPool) -> None:
    with pool.admin() as client:
        client.script_flush()
        time.sleep(0.3)
        for key in (key for shard in pool_shards(client, "chaos") for key in shard.groups):
            client.xgroup_destroy(key, GROUP)
        time.sleep(0.3)
        client.client_kill_filter(_type="normal", skipme=True)
        time.sleep(0.3)
        client.delete("lmpool:chaos")
        client.flushall()


def pause(pool: ChaosPool) -> None:
    with pool.admin() as client:
        client.client_pause(7000)
    time.sleep(7.0)


def block(pool: ChaosPool) -> None:
    with pool.admin() as client:
        client.connection_pool.connection_kwargs["socket_timeout"] = 30
        client.execute_command("DEBUG", "SLEEP", "6")


def long_script(pool: ChaosPool) -> None:
    with pool.admin() as client, pool.admin() as other:
        client.config_set("busy-reply-threshold", 100)
        connection = client.connection_pool.get_connection()
        connection.send_command("EVAL", "while true do end", 0)
        time.sleep(3.0)  # BUSY, says the server to everybody
        other.script_kill()
        with contextlib.suppress(redis.exceptions.ResponseError):
            connection.read_response()
        client.connection_pool.release(connection)


def cut(pool: ChaosPool) -> None:
    for _ in range(5):
        pool.proxy.cut()
        time.sleep(0.1)


def half_close(pool: ChaosPool) -> None:
    pool.proxy.half_close()


def hold(pool: ChaosPool) -> None:
    pool.proxy.hold()
    time.sleep(5.0)
    pool.proxy.release()


def delay(pool: ChaosPool) -> None:
    pool.proxy.delay = 0.1
    time.sleep(3.0)
    pool.proxy.delay = 0.0


def trickle(pool: ChaosPool) -> None:
    pool.proxy.chunk, pool.proxy.delay = 64, 0.001
    time.sleep(3.0)
    pool.proxy.chunk, pool.proxy.delay = 1 << 16, 0.0


def unreachable(pool: ChaosPool) -> None:
    pool.proxy.refuses = True
    pool.proxy.cut()
    time.sleep(3.0)
    pool.proxy.refuses = False


def fill_memory(pool: ChaosPool) -> None:
    with pool.admin() as client:
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory", used + (1 << 20))  # room for a thousand rows
        time.sleep(5.0)
        client.config_set("maxmemory", 0)


def evict(pool: ChaosPool) -> None:
    with pool.admin() as client:
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", used + (256 << 10))
        time.sleep(5.0)
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")


def broken_disk(pool: ChaosPool) -> None:
    taken = pool.server.folder / "dump.rdb"
    taken.mkdir()
    (taken / "in-the-way").touch()
    with pool.admin() as client:
        client.config_set("save", "3600 1")
        client.bgsave()
        time.sleep(3.0)
        assert client.info("persistence")["rdb_last_bgsave_status"] == "err"
        client.config_set("stop-writes-on-bgsave-error", "no")
        client.config_set("save", "")  # or it would not end in order
    (taken / "in-the-way").unlink()
    taken.rmdir()


def become_replica(pool: ChaosPool) -> None:
    with pool.admin() as client:
        client.replicaof("127.0.0.1", 1)
        time.sleep(3.0)
        client.replicaof("NO", "ONE")


def change_lanes(pool: ChaosPool) -> None:
    pool.change_lanes()


def change_shards(pool: ChaosPool) -> None:
    pool.change_shards()


NO_STREAMS = {"streams": 0}
"""A continuation may draw the token that its workers die of."""
AOF = {"appendonly": "yes", "appendfsync": "everysec"}

FAULTS = [
    Fault("SIGKILL of a worker", kill),
    Fault("the same, workers' clocks two hours apart", kill, {"clocks": 3600.0}, alone=True),
    Fault("SIGKILL of a client with 60,000 prompts", kill_client, alone=True),
    Fault(
        "a prompt that segfaults its workers",
        fatal_prompt,
        {"acts": {"7": "segfault"}, "max_deliveries": 2, "load": NO_STREAMS},
        alone=True,
    ),
    Fault(
        "a prompt that its engine hangs on",
        fatal_prompt,
        {"acts": {"7": "hang"}, "max_deliveries": 2, "engine_timeout": 4, "load": NO_STREAMS},
        alone=True,
    ),
    Fault("SIGSTOP of a worker for 8 s", freeze),
    Fault("SIGKILL of the server, back empty", restart_server),
    Fault("SIGKILL of the server, back from its AOF", restart_server, {"server": AOF}, short=True),
    Fault("failover by three Sentinels", fail_over, {"replicated": True}, alone=True),
    Fault("SCRIPT FLUSH, XGROUP DESTROY, CLIENT KILL, FLUSHALL", commands, short=True),
    Fault("CLIENT PAUSE of 7 s", pause),
    Fault("DEBUG SLEEP of 6 s", block, {"server": {"enable-debug-command": "yes"}}),
    Fault("a script that runs for 3 s (BUSY)", long_script),
    Fault("connections cut, five times", cut, short=True),
    Fault("connections half closed", half_close),
    Fault("nothing arrives for 5 s", hold),
    Fault("100 ms on every packet for 3 s", delay),
    Fault("64 bytes at a time for 3 s", trickle),
    Fault("no connection for 3 s", unreachable),
    Fault("memory full, noeviction, for 5 s", fill_memory),
    Fault("memory full, allkeys-lru, for 5 s", evict),
    Fault("snapshots fail for 3 s (MISCONF)", broken_disk),
    Fault("the server a replica for 3 s (READONLY)", become_replica),
    Fault("LMPOOL_LANES changed, worker by worker", change_lanes),
    Fault("shards and lanes changed by a command", change_shards),
]
