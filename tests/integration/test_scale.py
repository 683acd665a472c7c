"""What docs/scale.md and docs/cluster.md reckon with, of real servers: connections to a primary."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from tests.support.clients import connected
from tests.support.cluster import Cluster
from tests.support.scale import CLIENT_CONNECTIONS, WORKER_CONNECTIONS
from tests.support.waiting import until
from tests.support.workers import worker_process

PROMPTS = [[i % 256, i // 256] for i in range(600)]


def of_each(cluster: Cluster) -> list[Counter[str]]:
    """lmpool's connections to each primary, by name; those that ask for the map end at once."""
    found = []
    for node in cluster.primaries():
        with node.client() as client:
            names = [each["name"] for each in cast(list[dict[str, Any]], client.client_list())]
        found.append(Counter(name for name in names if name in ("lmpool-worker", "lmpool-client")))
    return found


def test_connections_to_a_primary(server_binary: str, pool_name: str) -> None:
    with (
        Cluster(3, cluster_require_full_coverage="no") as cluster,
        worker_process(cluster.url, pool_name),
        connected(cluster.url, pool_name, cache_bytes=0) as lm,
    ):
        each = lm.info.shards // 3
        assert each == 2

        def have_opened() -> bool:
            lm.batch_next_token_logprobs_sync(PROMPTS)
            # Of a worker all but that of adapters, of which there are none.
            return all(
                found["lmpool-client"] == CLIENT_CONNECTIONS + each
                and found["lmpool-worker"] >= WORKER_CONNECTIONS - 1 + each
                for found in of_each(cluster)
            )

        until(have_opened, what="all connections to be opened", every=0.2)
        for found in of_each(cluster):
            assert found["lmpool-worker"] <= WORKER_CONNECTIONS + each
