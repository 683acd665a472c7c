"""What is wrong with a server and a pool, from what `lmpool.inspection` read of them.

Each check is a function of the facts, so that it can be tried without a server.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from lmpool.affinity import LANES_PER_WORKER, lanes_in_use
from lmpool.checks import counted
from lmpool.errors import LmpoolError
from lmpool.model_info import MAX_LANES, ModelInfo
from lmpool.server import check_version
from lmpool.server_url import worker_command

SLOW: Final = 0.005
VERY_SLOW: Final = 0.050
CLOCKS_APART: Final = 60.0
FULL: Final = 0.85
OVERFULL: Final = 0.97
"""Of maxmemory: workers keep a sixteenth free at least, as far as it is theirs."""
ROWS_ENOUGH: Final = 2_000
CONNECTIONS_LEFT: Final = 50
_REFUSALS_SHOWN: Final = 5
_RIGHTS_OF_CLIENTS: Final = (
    "ACL SETUSER <user> +@read +@write +@stream +@scripting +@transaction +@connection +info +time "
    "%RW~lmpool:* %RW~{lmpool:*"
)
_RIGHTS_OF_WORKERS: Final = f"{_RIGHTS_OF_CLIENTS} %RW~arq:*"
MANY_WAIT: Final = 32
"""Waiting jobs from which it is told that most of them are in one lane."""
MANY_TOKENS: Final = 10_000
"""Tokens of prompts from which it is told that an engine keeps none of them."""
MANY_TAKEN: Final = 200
"""Jobs that a worker took, from which it is told that it stole most of them."""

Level = Literal["ok", "note", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: how it is, and what to do if that is not well."""

    level: Level
    what: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class LaneFacts:
    """How many lanes jobs are put into; of the lane that has most, what it is called and how many
    of all waiting jobs are there; how many jobs each living worker took of its own lanes and of
    others'; and of engines that tell it, the tokens of prompts that they were given, and all that
    they computed, drawn ones and padding among them."""

    in_use: int
    longest: str = ""
    there: int = 0
    waiting: int = 0
    taken: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    prompt_tokens: int = 0
    computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What was read of a server and one of its pools."""

    url: str
    info: Mapping[str, object]
    """The fields of INFO, those that the server shows."""
    config: Mapping[str, str] | None
    """The server's settings; None where it does not show them."""
    latencies: Sequence[float]
    """Seconds that PINGs took."""
    clock_offset: float
    """Seconds by which the server's clock is ahead of this machine's."""
    refused: Sequence[str] = ()
    """Commands that clients need and this user may not, with what the server says of them."""
    refused_to_workers: Sequence[str] | None = None
    """The same of what workers need besides; None of a client's user, which may take no jobs."""
    refused_to_watchers: Sequence[str] | None = None
    """The same of what an exporter needs; None of who may do more than read, or not even that."""
    pool: str = "default"
    model: ModelInfo | None = None
    """What the pool serves; None where there is no such pool."""
    model_error: str = ""
    """Why its model info cannot be read."""
    workers: Mapping[str, bool] = field(default_factory=dict)
    """Whether each worker that the pool knows of has a heartbeat."""
    pending: Mapping[str, int] = field(default_factory=dict)
    """Jobs that each worker holds."""
    backlog: int = 0
    dead: int = 0
    """Jobs that were given up."""
    lanes: LaneFacts | None = None
    """None where they are not known."""
    cores: int | None = None
    """Of the server's machine; None where that is not this one."""

    def number(self, name: str) -> int:
        """A number of INFO, 0 where it is not there."""
        value = self.info.get(name, 0)
        return value if isinstance(value, int) else 0


def check_server(facts: Facts) -> Iterator[Finding]:
    """Version, role, permissions."""
    try:
        yield Finding("ok", f"{check_version(dict(facts.info), facts.url)} answers")
    except LmpoolError as error:
        yield Finding("wrong", str(error))
    if facts.info.get("role") == "slave":
        yield Finding(
            "wrong",
            "this server is a replica: it refuses writes",
            "connect to its primary, "
            f"{facts.info.get('master_host')}:{facts.info.get('master_port')}",
        )
    yield from _check_rights(facts)


def check_workers_rights(refused: Sequence[str]) -> Iterator[Finding]:
    """What a worker's user may not of what workers do."""
    if refused:
        yield Finding(
            "wrong",
            f"this user is not allowed what workers do: {_first(refused)}",
            f"{_RIGHTS_OF_WORKERS}, or `worker` of deploy/redis/users.acl",
        )


def _check_rights(facts: Facts) -> Iterator[Finding]:
    to_clients, to_workers = facts.refused, facts.refused_to_workers
    to_watchers = facts.refused_to_watchers
    if to_watchers is not None:
        yield _of_who_only_reads(to_watchers, to_clients)
        return
    if to_clients:
        yield Finding(
            "wrong",
            f"this user is not allowed what clients do: {_first(to_clients)}",
            f"{_RIGHTS_OF_CLIENTS}, or a user of deploy/redis/users.acl",
        )
    if to_workers:
        yield Finding(
            "note",
            f"this user may take jobs, and not do all else that workers do: {_first(to_workers)}",
            f"for a worker: {_RIGHTS_OF_WORKERS}, or `worker` of deploy/redis/users.acl; a client "
            "needs none of it",
        )
    elif not to_clients and to_workers is None:
        yield Finding("ok", "this user may do what clients do, and take no jobs as workers do")
    elif not to_clients:
        yield Finding("ok", "this user may do what clients and workers do")


def _of_who_only_reads(to_watchers: Sequence[str], to_clients: Sequence[str]) -> Finding:
    if to_watchers:
        return Finding(
            "wrong",
            f"this user may not do all that `lmpool exporter` does: {_first(to_watchers)}; and "
            f"nothing of a client's that changes something: {_first(to_clients)}",
            f"`exporter` of deploy/redis/users.acl; for a client: {_RIGHTS_OF_CLIENTS}",
        )
    said = "this user may read what `lmpool exporter` does, and neither ask nor take jobs"
    return Finding("ok", said)


def _first(refused: Sequence[str]) -> str:
    """Some of them, and how many more there are."""
    more = len(refused) - _REFUSALS_SHOWN
    return "; ".join(refused[:_REFUSALS_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def check_eviction(facts: Facts) -> Iterator[Finding]:
    """What happens when the memory is full."""
    policy = str(facts.info.get("maxmemory_policy") or "unknown")
    bound, used = facts.number("maxmemory"), facts.number("used_memory")
    level: Level
    if policy.startswith("allkeys-"):
        level = "wrong" if bound else "note"
        yield Finding(
            level,
            f"maxmemory-policy {policy} may drop job streams and workers' heartbeats"
            + ("" if bound else ", once a maxmemory is set"),
            "CONFIG SET maxmemory-policy noeviction (workers drop the oldest rows themselves)",
        )
    elif policy in ("volatile-ttl", "volatile-random"):
        yield Finding(
            "wrong" if bound else "note",
            f"maxmemory-policy {policy} drops heartbeats and notices as readily as rows",
            "CONFIG SET maxmemory-policy noeviction (workers drop the oldest rows themselves)",
        )
    elif not bound:
        yield Finding(
            "note",
            f"there is no maxmemory: rows may fill the machine ({in_bytes(used)} in use)",
            "CONFIG SET maxmemory to what the server may use",
        )
    else:
        yield Finding("ok", f"maxmemory {in_bytes(bound)}, {policy}")
    if bound:
        yield from _check_headroom(facts, policy, bound, used)


def _check_headroom(facts: Facts, policy: str, bound: int, used: int) -> Iterator[Finding]:
    if policy == "noeviction" and used > OVERFULL * bound:
        yield Finding(
            "wrong",
            f"{in_bytes(used)} of {in_bytes(bound)} are in use, and with noeviction workers wait "
            "where dropping old rows makes no room: other data fill it",
            "raise maxmemory, or move the other data to another server",
        )
    if facts.model is None:
        return
    row = row_bytes(facts.model)
    room = bound // row
    if room < ROWS_ENOUGH:
        yield Finding(
            "wrong",
            f"a row takes {in_bytes(row)}: the server's memory holds {room:,} of them",
            f"raise maxmemory to {in_bytes(ROWS_ENOUGH * row)} or more",
        )
    else:
        yield Finding("ok", f"a row takes {in_bytes(row)}: there is room for {room:,}")


def row_bytes(model: ModelInfo) -> int:
    """The bytes of one row, as it is stored."""
    return model.vocab_size * (4 if model.encoding == "f32" else 2)


def check_persistence(facts: Facts) -> Iterator[Finding]:
    """Saving to disk: rows are large, and worth little after a restart."""
    if facts.info.get("rdb_last_bgsave_status", "ok") != "ok":
        yield Finding(
            "wrong",
            "the last snapshot failed, and the server may refuse writes because of it",
            "make room on its disk, or CONFIG SET save ''",
        )
    if facts.info.get("aof_enabled"):
        yield Finding(
            "note",
            "the append-only file is on: every row is written to disk too",
            "CONFIG SET appendonly no: clients ask again for what a restart forgets",
        )
    save = None if facts.config is None else facts.config.get("save", "")
    if save:
        yield Finding(
            "note",
            f"snapshots are on (save {save}): each one forks a server full of rows",
            "CONFIG SET save '': clients ask again for what a restart forgets",
        )
    if save == "" and not facts.info.get("aof_enabled"):
        yield Finding("ok", "nothing is saved to disk: clients ask again after a restart")


def check_connection(facts: Facts) -> Iterator[Finding]:
    """Latency, clock, connections, what is open to whom."""
    middle = statistics.median(facts.latencies)
    slowest = max(facts.latencies)
    shown = f"the server answers in {1000 * middle:.2f} ms (slowest {1000 * slowest:.2f} ms)"
    if middle >= SLOW:
        yield Finding(
            "wrong" if middle >= VERY_SLOW else "note",
            shown,
            "put it nearer to pipelines and workers: each call takes two or three round trips",
        )
    else:
        yield Finding("ok", shown)
    if abs(facts.clock_offset) >= CLOCKS_APART:
        yield Finding(
            "note",
            f"this machine's clock and the server's are {abs(facts.clock_offset):.0f} s apart; "
            "lmpool goes by the server's",
            "set the clocks (NTP), or the times in logs will not fit",
        )
    limit, connected = facts.number("maxclients"), facts.number("connected_clients")
    if limit and limit - connected < CONNECTIONS_LEFT:
        yield Finding(
            "wrong",
            f"{connected:,} of {limit:,} connections are taken; a client has two, a worker six",
            "CONFIG SET maxclients to more",
        )
    config = facts.config or {}
    if config.get("timeout", "0") not in ("0", ""):
        yield Finding(
            "note",
            f"the server closes connections idle for {config['timeout']} s",
            "CONFIG SET timeout 0: lmpool reconnects, but not for nothing",
        )
    if config.get("protected-mode") == "no" and config.get("requirepass") == "":
        yield Finding(
            "note",
            "protected-mode is off and there is no password: whoever reaches the port may do all",
            "set a password or ACL users, unless only your machines reach it",
        )


def check_threads(facts: Facts) -> Iterator[Finding]:
    """I/O threads spin while the server has work: each needs a core that nobody else wants."""
    written = (facts.config or {}).get("io-threads", "1")
    threads = int(written) if written.isdecimal() else 1
    if threads < 2:
        return
    if facts.cores is None:
        yield Finding(
            "note",
            f"the server has {threads} I/O threads (io-threads), which spin while it has work",
            "io-threads 1 in its configuration, and a restart, unless as many cores are its alone",
        )
    elif facts.cores <= threads:
        yield Finding(
            "wrong",
            f"the server's {threads} I/O threads (io-threads) spin on all of the {facts.cores} "
            "cores here: workers, clients and they stand in each other's way",
            "io-threads 1 in its configuration, and a restart",
        )
    else:
        yield Finding("ok", f"{threads} I/O threads leave {facts.cores - threads} cores to others")


def check_pool(facts: Facts) -> Iterator[Finding]:
    """Is it served, by whom, is anything stuck."""
    if facts.model_error:
        yield Finding("wrong", facts.model_error)
        return
    if facts.model is None:
        yield Finding(
            "note",
            f"there is no pool {facts.pool!r} yet",
            f"start a worker: {worker_command(facts.url, facts.pool)}; or check the name",
        )
        return
    alive = sum(facts.workers.values())
    shown = f"pool {facts.pool} serves {facts.model.model} ({facts.model.engine})"
    if alive:
        yield Finding(
            "ok",
            f"{shown}: {counted(alive, 'worker')} alive, backlog {facts.backlog:,} (XLEN of its "
            "job streams; the lag of XINFO GROUPS is wrong once jobs were withdrawn)",
        )
    else:
        yield Finding(
            "wrong",
            f"{shown}, and none of its workers is alive",
            f"start one: {worker_command(facts.url, facts.pool)}",
        )
    stuck = {n: facts.pending.get(n, 0) for n, lives in facts.workers.items() if not lives}
    if sum(stuck.values()):
        yield Finding(
            "wrong" if alive == 0 else "note",
            f"{counted(sum(stuck.values()), 'job')} held by {counted(len(stuck), 'worker')} "
            "without a heartbeat",
            "a living worker takes them within ten seconds" if alive else "start a worker",
        )
    if facts.backlog >= facts.model.max_backlog * FULL:
        yield Finding(
            "wrong",
            f"the backlog of {facts.backlog:,} jobs is near its bound of "
            f"{facts.model.max_backlog:,}: callers wait or get PoolBusy",
            "add workers, or raise LMPOOL_MAX_BACKLOG",
        )
    if facts.dead:
        yield Finding(
            "note",
            f"{counted(facts.dead, 'job')} given up",
            "see which and why: lmpool dead list; try them again: lmpool dead retry",
        )


def check_lanes(facts: Facts) -> Iterator[Finding]:
    """Are there enough lanes, do jobs spread over them, and do workers serve their own."""
    model, lanes = facts.model, facts.lanes
    alive = sum(facts.workers.values())
    if model is None or lanes is None or not alive:
        return
    anew = "for all workers and start them anew, the first with LMPOOL_REPLACE=1"
    if model.lanes == 1:
        if alive > 1:
            yield _one_lane(lanes, alive)
        return
    count = model.shards * model.lanes
    shown = f"{lanes.in_use:,} of {count:,} lanes are in use"
    due = lanes_in_use(max(2, math.ceil(alive / model.shards)), MAX_LANES)
    if alive > 1 and lanes.in_use < LANES_PER_WORKER // 2 * alive and due > model.lanes:
        yield Finding(
            "note",
            f"{shown}, {lanes.in_use / alive:.1f} for each of {alive:,} workers: some are the home "
            "of far more than others",
            f"lmpool shards --lanes {due} (the pool is served meanwhile)",
        )
    elif alive > 1:
        yield Finding("ok", f"{shown}, {lanes.in_use / alive:.1f} for each of {alive:,} workers")
    else:
        yield Finding("ok", f"{shown}: one worker needs no more")
    if lanes.in_use > 1 and lanes.waiting >= MANY_WAIT and 2 * lanes.there > lanes.waiting:
        known = model.blocks * model.block_tokens
        yield Finding(
            "note",
            f"{lanes.there:,} of {lanes.waiting:,} waiting jobs are in one lane, {lanes.longest}: "
            f"these prompts begin alike, as far as their first {known:,} tokens say",
            "idle workers steal of it, and each computes the beginning for itself. Where prompts "
            f"differ later, write LMPOOL_BLOCKS={4 * model.blocks} {anew}",
        )
    for worker, (own, stolen) in sorted(lanes.taken.items()):
        if own + stolen >= MANY_TAKEN and stolen > own:
            yield Finding(
                "note",
                f"{worker} stole {stolen:,} of the {own + stolen:,} jobs that it took: its own "
                "lanes bring it less than it can do",
                "lmpool top shows the longest lanes and each worker's pace: one lane that is far "
                "longer than others wants a higher LMPOOL_BLOCKS; homes that are slower than this "
                "one are no fault",
            )


def _one_lane(lanes: LaneFacts, alive: int) -> Finding:
    """That several workers read one lane, which is right where their engines keep nothing."""
    shown = f"a shard has one lane, which all {alive:,} workers read"
    # Where they computed more, drawn tokens or padding are among them: what was kept is unknown.
    if lanes.prompt_tokens >= MANY_TOKENS and lanes.computed_tokens == lanes.prompt_tokens:
        given = f"{lanes.prompt_tokens:,} tokens of prompts"
        return Finding("ok", f"{shown}: of {given} their engines kept none, so more bring nothing")
    # Where engines have told nothing of it, it is for whoever reads this to know.
    told = 0 < lanes.prompt_tokens >= lanes.computed_tokens
    unless = "" if told else "; one is right for an engine that keeps no states"
    return Finding(
        "note",
        f"{shown}: prompts that begin alike meet a worker that has kept their beginning by chance",
        f"lmpool shards --lanes 64 (the pool is served meanwhile){unless}",
    )


CHECKS: Final[tuple[Callable[[Facts], Iterator[Finding]], ...]] = (
    check_server,
    check_eviction,
    check_persistence,
    check_connection,
    check_threads,
    check_pool,
    check_lanes,
)


def examine(facts: Facts) -> list[Finding]:
    """Every check's findings: server, eviction, persistence, connection, threads, pool, lanes."""
    return [finding for check in CHECKS for finding in check(facts)]


def in_bytes(count: int) -> str:
    """A number of bytes in the unit that fits, such as ``1.5 GiB``."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} GiB"
