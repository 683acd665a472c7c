"""The table of docs/scale.md: what `lmpool plan` says of one large pool, and what follows for each
primary, worker and client of it."""

from __future__ import annotations

from typing import Final

from lmpool.liveness import BEAT_MS
from lmpool.plan import Demand, Plan, PlannedModel, plan
from lmpool.plan.arithmetic import LEAST_PRIMARIES

MODEL: Final = PlannedModel("8B", 128_256, "bfloat16")
GPUS: Final = 256
CLIENTS: Final = 1000
RATE: Final = 100_000.0
TTL: Final = 60.0
PROMPT_TOKENS: Final = 512
WANTS: Final[dict[str, tuple[str, ...]]] = {
    "the likeliest 20": ("top:20",),
    "one in 20 a row": ("top:20=0.95", "row=0.05"),
    "rows": ("row",),
}

WORKER_CONNECTIONS: Final = 6
"""Of a worker to each primary, at most, beside one for each shard that it waits for."""
CLIENT_CONNECTIONS: Final = 2
"""The same of a client. `tests/integration/test_scale.py` counts both."""


def planned(wants: tuple[str, ...]) -> Plan:
    """What `lmpool plan` says."""
    demand = Demand(
        MODEL,
        RATE,
        wants=wants,
        gpus=GPUS,
        prompt_tokens=PROMPT_TOKENS,
        ttl=TTL,
        clients=CLIENTS,
    )
    return plan(demand)


def scale_table() -> str:
    """A column for each kind of answers."""
    plans = [planned(wants) for wants in WANTS.values()]
    columns = [dict(_lines(found)) for found in plans]
    lines = ["| | " + " | ".join(WANTS) + " |", "|---|" + "---|" * len(WANTS)]
    lines += [
        f"| {name} | " + " | ".join(column[name] for column in columns) + " |"
        for name in columns[0]
    ]
    return "\n".join(lines)


def _lines(found: Plan) -> list[tuple[str, str]]:
    value = {line.name: line.value for line in found.lines}
    primaries = max(LEAST_PRIMARIES, round(value["primaries"]))
    shards = round(value["shards"])
    each = shards / primaries
    into, out = value["bytes_in"] / primaries, value["bytes_out"] / primaries
    answers = value["computed"] / primaries * value["answer"]
    of_worker, of_client = WORKER_CONNECTIONS + each, CLIENT_CONNECTIONS + each
    return [
        ("an answer", f"{value['answer']:,.0f} B"),
        ("processors busy, of all primaries", f"{value['server_cores']:.1f} cores"),
        ("primaries; shards", f"{primaries}; {shards}"),
        ("jobs a second, of each primary", f"{value['asked'] / primaries:,.0f}"),
        ("into each primary", _pace(into)),
        ("out of it, to clients and workers", _pace(out)),
        ("out of it to one replica, answers alone", _pace(answers)),
        (
            f"`maxmemory` of each, for {TTL:g} s",
            f"{value['maxmemory'] / primaries / 2**30:.1f} GiB",
        ),
        ("connections to each primary", f"{GPUS * of_worker + CLIENTS * of_client:,.0f}"),
        ("of these, blocked reads", f"{(GPUS + CLIENTS) * each:,.0f}"),
        (
            "connections of a worker; of a client",
            f"{primaries * of_worker:,.0f}; {primaries * of_client:,.0f}",
        ),
        (
            "lanes in use, by default; of these home to a worker",
            f"{value['lanes_in_use']:,.0f}; {value['home_lanes']:.1f}",
        ),
        ("heartbeats a second, at each primary", f"{GPUS * each / BEAT_MS * 1000:,.0f}"),
        ("a worker writes", _pace(value["computed"] / GPUS * value["answer"])),
        ("a client reads", _pace(value["client_bytes"])),
    ]


def _pace(rate: float) -> str:
    """Bytes a second, as links are sold."""
    bits = 8 * rate
    if bits >= 1e9:
        return f"{bits / 1e9:,.1f} Gbit/s"
    return f"{bits / 1e6:,.0f} Mbit/s" if bits >= 1e7 else f"{bits / 1e6:,.2f} Mbit/s"
