"""Sentinels for tests, which make a replica the primary once that is gone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import redis

from tests.support.ports import free_port
from tests.support.server import RealServer
from tests.support.waiting import until


@contextmanager
def sentinels(
    primary: RealServer, count: int = 3, *, replicas: int = 1, ports: Sequence[int] = ()
) -> Iterator[str]:
    """Sentinels that watch `primary` as the service ``main``; yields the URL that clients use."""
    ports = ports or [free_port() for _ in range(count)]
    running = []
    try:
        for port in ports:
            file = primary.folder / f"sentinel-{port}.conf"
            file.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {primary.folder}\n"
                f"sentinel monitor main 127.0.0.1 {primary.port} 2\n"
                "sentinel down-after-milliseconds main 1000\n"
                "sentinel failover-timeout main 5000\n"
            )
            with (primary.folder / f"sentinel-{port}.log").open("wb") as log:
                running.append(
                    subprocess.Popen(
                        [primary.binary, str(file), "--sentinel"], stdout=log, stderr=log
                    )
                )
        for port in ports:
            with redis.Redis(port=port, socket_connect_timeout=1) as client:

                def ready(client: redis.Redis = client) -> bool:
                    try:
                        state = client.sentinel_master("main")
                    except redis.exceptions.RedisError:
                        return False
                    others, found = state["num-other-sentinels"], state["num-slaves"]
                    return others == len(ports) - 1 and found == replicas

                until(ready, what="the sentinels to know each other and the replica", every=0.1)
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        yield f"redis+sentinel://{hosts}/main/0"
    finally:
        for process in running:
            process.kill()
            process.wait(60)
