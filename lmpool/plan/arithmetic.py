"""The arithmetic of a plan, line by line: what is to be, by which formula, of which numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from lmpool.affinity import LANES_PER_WORKER, lanes_in_use, usual_lanes
from lmpool.checks import quoted
from lmpool.model_info import MAX_LANES, MAX_SHARDS
from lmpool.plan import measured
from lmpool.plan.answers import PlannedWant, planned_wants
from lmpool.plan.demand import MOST, Demand
from lmpool.plan.states import KNOWN, kept_states
from lmpool.plan.traffic import Traffic, traffic
from lmpool.result_memory import CACHED_BYTES, RESERVE, least_reserve, reserve

LEAST_PRIMARIES: Final = 3
"""A cluster has no fewer: with two there is no majority when one dies."""

WAITING_SECONDS: Final = 5.0
"""So long a backlog is reckoned with: workers that start, a client that asks much at once."""
FLIGHT_BYTES: Final = 640
"""Of a job that waits: the record of who waits for it, its place in the stream, its notice."""
BASE_BYTES: Final = 32 << 20
"""Of a server without results: itself, the tokenizer, what is on its way to clients."""
FRAGMENTED: Final = 1.1
"""The process's memory beside what it has in use."""

Unit = Literal["bytes", "bytes/s", "s", "/s", "cores", "", "%"]


@dataclass(frozen=True, slots=True)
class Line:
    """One quantity: `formula` in words, the same with `numbers`, and the `value`."""

    section: str
    name: str
    """Stable, for programs."""
    what: str
    formula: str
    numbers: str
    value: float
    unit: Unit


@dataclass(frozen=True, slots=True)
class Plan:
    """The lines, what is to be heeded, and what could not be known."""

    demand: Demand
    wants: tuple[PlannedWant, ...]
    lines: tuple[Line, ...]
    warnings: tuple[str, ...]
    unknown: tuple[str, ...]

    def __getitem__(self, name: str) -> Line:
        return next(line for line in self.lines if line.name == name)

    def __contains__(self, name: str) -> bool:
        return any(line.name == name for line in self.lines)


def plan(demand: Demand) -> Plan:
    """What a pool needs to answer this. Raises `SettingsError` for wants that there are not."""
    encoding = demand.encoding or demand.model.encoding
    wants = planned_wants(demand.wants, demand.model, encoding, demand.prompt_tokens)
    sheet = _Sheet()
    _of_prompts(sheet, demand)
    _of_answers(sheet, demand, wants)
    _of_memory(sheet, demand, wants)
    _of_network(sheet, demand, wants)
    _of_processors(sheet)
    _of_lanes(sheet, demand)
    _of_clients(sheet, demand, wants)
    _of_workers(sheet, demand)
    lines = {line.name: line for line in sheet.lines}
    warnings = tuple(_warnings(demand, wants, lines))
    return Plan(demand, wants, tuple(sheet.lines), warnings, tuple(_unknown(demand)))


@dataclass(slots=True)
class _Sheet:
    """The lines so far. A section's function adds to it, and uses what is there by name."""

    lines: list[Line] = field(default_factory=list)
    section: str = ""
    values: dict[str, float] = field(default_factory=dict)

    def __getattr__(self, name: str) -> float:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def add(
        self, name: str, what: str, formula: str, numbers: str, value: float, unit: Unit = ""
    ) -> None:
        self.values[name] = value
        self.lines.append(Line(self.section, name, what, formula, numbers, value, unit))


def mean(wants: Sequence[PlannedWant], of: Callable[[PlannedWant], float]) -> float:
    """By their shares."""
    return sum(want.share * of(want) for want in wants)


def n(value: float) -> str:
    """A number in a formula: 12,000 or 0.025."""
    if value and (abs(value) < 1e-3 or abs(value) >= MOST):
        return f"{value:.3g}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"


def _of_prompts(sheet: _Sheet, demand: Demand) -> None:
    sheet.section = "prompts"
    asked = demand.prompt_rate
    sheet.add("asked", "asked", "prompts a second", n(asked), asked, "/s")
    sheet.add(
        "computed", "computed", "asked x distinct", f"{n(asked)} x {n(demand.distinct)}",
        asked * demand.distinct, "/s",
    )  # fmt: skip
    sheet.add(
        "hits", "answered by what is stored", "asked - computed",
        f"{n(asked)} - {n(sheet.computed)}", asked - sheet.computed, "/s",
    )  # fmt: skip


def _of_answers(sheet: _Sheet, demand: Demand, wants: Sequence[PlannedWant]) -> None:
    sheet.section = "answers"
    for number, want in enumerate(wants):
        of = f"a vocabulary of {n(demand.model.vocab_size)}"
        if want.want.kind == "row":
            of += f", as {demand.encoding or demand.model.encoding}"
        sheet.add(
            f"answer_{number}", f"{want.text}, {100 * want.share:.3g} % of what is asked",
            "as lmpool encodes it", of, want.stored, "bytes",
        )  # fmt: skip
    sheet.add(
        "answer", "an answer", "sum of share x bytes",
        " + ".join(f"{n(w.share)} x {n(w.stored)}" for w in wants),
        mean(wants, lambda w: w.stored), "bytes",
    )  # fmt: skip
    sheet.add(
        "footprint", "of the server's memory", "the same, each with its key and the allocator's "
        "rounding", " + ".join(f"{n(w.share)} x {n(w.footprint)}" for w in wants),
        mean(wants, lambda w: w.footprint), "bytes",
    )  # fmt: skip


def _of_memory(sheet: _Sheet, demand: Demand, wants: Sequence[PlannedWant]) -> None:
    sheet.section = "the server's memory"
    sheet.add(
        "results", "results", "computed x time to live x footprint",
        f"{n(sheet.computed)}/s x {n(demand.ttl)} s x {n(sheet.footprint)}",
        sheet.computed * demand.ttl * sheet.footprint, "bytes",
    )  # fmt: skip
    jobs = min(sheet.computed * WAITING_SECONDS, float(2 * demand.max_backlog))
    job = mean(wants, lambda w: traffic(w, demand.prompt_tokens).job)
    sheet.add(
        "streams", f"jobs that wait, of {WAITING_SECONDS:g} s", "jobs x (job + its record)",
        f"{n(jobs)} x ({n(job)} + {FLIGHT_BYTES})", jobs * (job + FLIGHT_BYTES), "bytes",
    )  # fmt: skip
    sheet.add(
        "base", "all else", "the server itself, the tokenizer, buffers",
        f"about {BASE_BYTES >> 20} MiB", BASE_BYTES,
        "bytes",
    )  # fmt: skip
    other = sheet.streams + sheet.base
    most = maxmemory_for(sheet.results, other)
    spare = reserve(most, round(sheet.results))
    sheet.add(
        "reserve", "left free by workers",
        f"the larger of maxmemory / 16 and {RESERVE >> 20} MiB, x (1 + results / maxmemory)",
        f"{n(least_reserve(most))} x (1 + {n(sheet.results)} / {n(most)})", spare, "bytes",
    )  # fmt: skip
    sheet.add(
        "maxmemory", "maxmemory to set", "results + jobs + all else + what is left free",
        " + ".join(map(n, (sheet.results, sheet.streams, sheet.base, spare))), most, "bytes",
    )  # fmt: skip
    sheet.add(
        "machine", "memory of its machine", "maxmemory x 1.1, for fragmentation",
        f"{n(most)} x {FRAGMENTED:g}", most * FRAGMENTED, "bytes",
    )  # fmt: skip
    if demand.memory is None:
        return
    held = room_for(demand.memory, other)
    sheet.add(
        "memory_results", "results that your memory holds",
        "memory - jobs - all else - what is left free",
        f"{n(demand.memory)} - {n(sheet.streams)} - {n(sheet.base)} - "
        f"{n(reserve(demand.memory, held))}", held, "bytes",
    )  # fmt: skip
    sheet.add(
        "memory_ttl", "time to live that fits", "results / (computed x footprint)",
        f"{n(held)} / ({n(sheet.computed)}/s x {n(sheet.footprint)})",
        held / (sheet.computed * sheet.footprint), "s",
    )  # fmt: skip


def maxmemory_for(results: float, other: float) -> int:
    """The least maxmemory with which workers may hold so many bytes of results."""
    low, high = 1, 4 * int(results + other) + (1 << 30)
    while low < high:
        middle = (low + high) // 2
        if middle - other - reserve(middle, round(results)) >= results:
            high = middle
        else:
            low = middle + 1
    return low


def room_for(most: int, other: float) -> int:
    """The bytes of results that workers hold with this maxmemory; 0 where there is no room."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if most - other - reserve(most, middle) >= middle:
            low = middle
        else:
            high = middle - 1
    return low


def _of_network(sheet: _Sheet, demand: Demand, wants: Sequence[PlannedWant]) -> None:
    sheet.section = "the server's network"

    def per(*names: str) -> float:
        def bytes_of(want: PlannedWant) -> float:
            found: Traffic = traffic(want, demand.prompt_tokens)
            return float(sum(getattr(found, name) for name in names))

        return mean(wants, bytes_of)

    asked, computed = sheet.asked, sheet.computed
    asking, writing = per("claim", "fetch"), per("publish")
    sheet.add(
        "bytes_in", "in", "asked x (claim with job + fetch) + computed x (answer with its notice)",
        f"{n(asked)}/s x {n(asking)} + {n(computed)}/s x {n(writing)}",
        asked * asking + computed * writing, "bytes/s",
    )  # fmt: skip
    handing, reading = per("deliver"), per("notice", "answer")
    sheet.add(
        "bytes_out", "out", "computed x job + asked x (notice + answer)",
        f"{n(computed)}/s x {n(handing)} + {n(asked)}/s x {n(reading)}",
        computed * handing + asked * reading, "bytes/s",
    )  # fmt: skip


def _of_processors(sheet: _Sheet) -> None:
    sheet.section = "the server's processor"
    moved = sheet.answer * (sheet.computed + sheet.asked)
    job, byte = measured.SERVER_JOB, measured.SERVER_BYTE
    sheet.add(
        "server_cores", "busy", "asked x time of a job + bytes of answers in and out x time of one",
        f"{n(sheet.asked)}/s x {1e6 * job:g} us + {n(moved)}/s x {1e9 * byte:g} ns",
        sheet.asked * job + moved * byte, "cores",
    )  # fmt: skip
    primaries = max(1, math.ceil(sheet.server_cores / measured.BUSY))
    sheet.add(
        "primaries", "primaries, of one core each", f"busy / {measured.BUSY:g}, rounded up",
        f"{n(sheet.server_cores)} / {measured.BUSY:g}", primaries,
    )  # fmt: skip
    # As workers choose where nobody says: `usual_places` of worker/membership.py.
    shards = 1 if primaries == 1 else min(MAX_SHARDS, 2 * max(LEAST_PRIMARIES, primaries))
    sheet.add(
        "shards", "shards", "one of one server, two a primary of a cluster",
        "1" if primaries == 1 else f"2 x {n(max(LEAST_PRIMARIES, primaries))}", shards,
    )  # fmt: skip


def _of_lanes(sheet: _Sheet, demand: Demand) -> None:
    """Where prompts that begin alike meet: of one worker there is nothing to say."""
    lanes = demand.lanes or usual_lanes(int(sheet.shards))
    if demand.gpus == 1 or lanes == 1:
        return
    sheet.section = "lanes"
    used = lanes_in_use(demand.gpus, lanes)
    sheet.add(
        "lanes_in_use", "in use",
        f"shards x the least power of two that is {LANES_PER_WORKER} x GPUs, up to LMPOOL_LANES",
        f"{n(sheet.shards)} x {n(used)}", sheet.shards * used,
    )  # fmt: skip
    sheet.add(
        "home_lanes", "of these, home to each worker, about", "lanes in use / GPUs",
        f"{n(sheet.lanes_in_use)} / {demand.gpus:,}", sheet.lanes_in_use / demand.gpus,
    )  # fmt: skip


def _of_clients(sheet: _Sheet, demand: Demand, wants: Sequence[PlannedWant]) -> None:
    sheet.section = "each client"
    each = sheet.asked / demand.clients
    job, byte = measured.CLIENT_JOB, measured.CLIENT_BYTE
    sheet.add(
        "client_cores", "busy",
        "asked by one x (time of a job + bytes of its answer x time of one)",
        f"{n(sheet.asked)}/s / {demand.clients:,} x ({1e6 * job:g} us + {n(sheet.answer)} x "
        f"{1e9 * byte:g} ns)", each * (job + sheet.answer * byte), "cores",
    )  # fmt: skip
    sheet.add(
        "client_bytes", "reads", "asked by one x answer",
        f"{n(each)}/s x {n(sheet.answer)}", each * sheet.answer, "bytes/s",
    )  # fmt: skip
    kept = [want for want in wants if getattr(want.want, "cached", False)]
    share = sum(want.share for want in kept)
    if not kept or demand.distinct == 1:
        return  # nothing is asked again
    entry = mean(kept, lambda w: w.stored + CACHED_BYTES) / share
    whole = each * share * demand.distinct * demand.ttl * entry
    sheet.add(
        "cache_bytes", "cache_bytes that keeps all that it asks again within the time to live",
        "its distinct prompts x (answer + entry)",
        f"{n(each)}/s x {n(share)} x {n(demand.distinct)} x {n(demand.ttl)} s x {n(entry)}",
        whole, "bytes",
    )  # fmt: skip
    part = min(1.0, demand.cache_bytes / whole)
    sheet.add(
        "cache_hits", "answered by its own cache, where it asks again what it asked itself",
        "part of wants that are kept x (1 - distinct) x min(1, cache_bytes as set / that)",
        f"{n(share)} x (1 - {n(demand.distinct)}) x min(1, {n(demand.cache_bytes)} / {n(whole)})",
        100 * share * (1 - demand.distinct) * part, "%",
    )  # fmt: skip


def _of_workers(sheet: _Sheet, demand: Demand) -> None:
    sheet.section = "each worker"
    model, gpus = demand.model, demand.gpus
    each = sheet.computed / gpus
    sheet.add(
        "worker_prompts", "must compute", "computed / GPUs", f"{n(sheet.computed)}/s / {gpus:,}",
        each, "/s",
    )  # fmt: skip
    sheet.add(
        "worker_tokens", "of prompt tokens, where none are kept",
        "computed by one x prompt's tokens",
        f"{n(each)}/s x {n(demand.prompt_tokens)}", each * demand.prompt_tokens, "/s",
    )  # fmt: skip
    state = model.state_bytes
    if state is not None:
        sheet.add(
            "state", "keys and values of a token", "2 x layers x KV heads x head dim x bytes",
            f"2 x {model.layers} x {model.kv_heads} x {model.head_dim} x {model.dtype_bytes}",
            state, "bytes",
        )  # fmt: skip
        sheet.add(
            "prompt_states", "of a prompt", "that x prompt's tokens",
            f"{n(state)} x {n(demand.prompt_tokens)}", state * demand.prompt_tokens, "bytes",
        )  # fmt: skip
    weights = model.weights_bytes
    if weights is not None:
        sheet.add("weights", "weights", model.weights_from, "as found", weights, "bytes")
    if demand.gpu_memory is None or state is None or weights is None:
        return
    kept = kept_states(demand.engine, demand.gpu_memory, weights, state, demand.engine_opts)
    if kept is None:
        return
    sheet.add("gpu_states", kept.what, kept.formula, kept.numbers, kept.tokens)
    if "home_lanes" in sheet.values:
        sheet.add(
            "pool_states", "the same of all workers, as each beginning has one home", "that x GPUs",
            f"{n(sheet.gpu_states)} x {gpus:,}", sheet.gpu_states * gpus,
        )  # fmt: skip


def _unknown(demand: Demand) -> Iterator[str]:
    yield from demand.model.unknown
    if demand.gpu_memory is not None and demand.engine not in ("auto", *KNOWN):
        yield (
            f"tokens whose states fit on a GPU: the engine {quoted(demand.engine)} says itself how "
            f"many it keeps; {', '.join(KNOWN)} are known"
        )


def _warnings(demand: Demand, wants: Sequence[PlannedWant], lines: dict[str, Line]) -> list[str]:
    found = []
    smaller = "; ".join(_smaller(demand, wants))
    if lines["primaries"].value > 1:
        primaries = max(LEAST_PRIMARIES, lines["primaries"].value)
        found.append(
            f"one server is not enough: take a Redis Cluster of {primaries:,.0f} primaries or more "
            f"(redis+cluster://), or: {smaller}"
        )
    ttl = lines.get("memory_ttl")
    if ttl is not None and ttl.value < min(1, demand.ttl):
        found.append(
            "the server's memory holds less than a second of results, which are evicted before "
            f"they are read: give it more, or: {smaller}"
        )
    elif ttl is not None and ttl.value < demand.ttl:
        found.append(
            f"of {n(demand.ttl)} s to live, the server's memory holds the last {n(ttl.value)} s: "
            f"older results are evicted. Set result_ttl to that, or: {smaller}"
        )
    if lines["client_cores"].value > 1:
        found.append(
            f"a client is busy on {lines['client_cores'].value:.2g} cores, and one process has "
            "about one: spread what is asked over more clients (--clients)"
        )
    homes = lines.get("home_lanes")
    if homes is not None and homes.value < LANES_PER_WORKER / 2:
        a_shard = math.ceil(demand.gpus / lines["shards"].value)
        due = lanes_in_use(max(2, a_shard), MAX_LANES)
        found.append(
            f"a worker is the home of {homes.value:.2g} lanes, and some of far more than others: "
            f"set LMPOOL_LANES={due}"
        )
    states = lines.get("gpu_states")
    if states is not None and states.value < demand.prompt_tokens:
        found.append(
            f"states of {n(states.value)} tokens are kept on a GPU, fewer than one prompt has: "
            "take a GPU with more memory, or several for one worker"
        )
    return found


def _smaller(demand: Demand, wants: Sequence[PlannedWant]) -> list[str]:
    """What makes a plan smaller, the most first."""
    found = []
    if any(want.want.kind == "row" for want in wants):
        found.append("ask for top:20 instead of rows")
        if (demand.encoding or demand.model.encoding) == "f32":
            found.append("rows as f16 (--row-encoding f16), or bf16 of a model in bfloat16")
    found.append("a shorter --ttl")
    return found
