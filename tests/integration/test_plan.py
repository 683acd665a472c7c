"""What `lmpool plan` reckons, held against a real server with a worker at work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lmpool.plan import Demand, Plan, PlannedModel, plan
from lmpool.pool_view import PoolViewer
from lmpool.wants import Row, Top, Want
from tests.support.clients import connected
from tests.support.pools import pool_shards
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import in_process_worker

WATCHED = ("used_memory", "total_net_input_bytes", "total_net_output_bytes")
TOKENS = 32


def reckoned(text: str, vocab_size: int, count: int, asked: int = 1) -> Plan:
    """Of so many prompts in a second, each `asked` so often, whose answers stay for one."""
    model = PlannedModel("mock", vocab_size, "float32")
    distinct = 1 / asked
    return plan(
        Demand(model, asked * count, (text,), prompt_tokens=TOKENS, ttl=1.0, distinct=distinct)
    )


@pytest.mark.parametrize(
    ("text", "want", "vocab_size", "count"),
    # Enough of what is small: connections' buffers come and go beside it.
    [("row", Row(), 1000, 3000), ("row", Row(), 5003, 3000), ("top:20", Top(20), 1000, 20_000)],
    ids=["rows of 1,000", "rows of 5,003", "top 20"],
)
def test_memory_and_bytes_are_as_reckoned(
    text: str, want: Want, vocab_size: int, count: int, server_binary: str, pool_name: str
) -> None:
    found = reckoned(text, vocab_size, count)
    rng = np.random.default_rng(7)
    prompts = rng.integers(0, vocab_size, (count, TOKENS)).tolist()
    # As for a client elsewhere: one on the worker's machine has large rows of the worker.
    options: dict[str, Any] = {
        "engine_opts": {"vocab_size": vocab_size},
        "near_bytes": 0,
        "log_level": "warning",
    }
    with (
        RealServer(maxmemory="1gb") as server,
        server.client() as client,
        in_process_worker(server.url, pool_name, **options),
        connected(server.url, pool_name, cache_bytes=0) as lm,
        PoolViewer(server.url, pool_name) as viewer,
    ):
        lm.sync.ask_many([(prompt[:5], want) for prompt in prompts[:200]])  # streams, scripts
        until(lambda: viewer.read().statistics["backlog"] == 0)
        before: Any = {**client.info("memory"), **client.info("stats")}
        held = viewer.read().statistics["held_bytes"]
        for start in range(0, count, 500):
            lm.sync.ask_many([(prompt, want) for prompt in prompts[start : start + 500]])
        until(lambda: viewer.read().statistics["backlog"] == 0)
        after: Any = {**client.info("memory"), **client.info("stats")}
        kept = viewer.read().statistics["held_bytes"] - held
        lm.sync.ask_many([(prompt, want) for prompt in prompts])
        again: Any = client.info("stats")
        (shard,) = pool_shards(client, pool_name)
        sizes = {client.strlen(key) for key in client.scan_iter(f"{shard.prefix}:result:*")}
    grown = {name: after[name] - before[name] for name in before if name in WATCHED}
    # Asked again they are hits: nothing is computed, delivered or written.
    twice = reckoned(text, vocab_size, count, asked=2)
    for name, line in (
        ("total_net_input_bytes", "bytes_in"),
        ("total_net_output_bytes", "bytes_out"),
    ):
        assert again[name] - before[name] == pytest.approx(twice[line].value, rel=0.15)
    assert sizes == {found["answer"].value}
    assert kept == found["results"].value
    # Never more than reckoned; of what is small less, as many share the pages of the account.
    assert 0.65 < grown["used_memory"] / found["results"].value < 1.05
    assert grown["total_net_input_bytes"] == pytest.approx(found["bytes_in"].value, rel=0.15)
    assert grown["total_net_output_bytes"] == pytest.approx(found["bytes_out"].value, rel=0.15)
