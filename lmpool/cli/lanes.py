"""How commands say what waits in which lane, who is its home, and what was stolen or kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lmpool.checks import counted
from lmpool.cli.terminal import escape

SHOWN: Final = 3
"""Longest lanes."""

if TYPE_CHECKING:
    from lmpool.producer.statistics import (
        LanesStatistics,
        LaneStatistics,
        PoolStatistics,
        WorkerStatistics,
    )


def lane_lines(found: PoolStatistics, shards: int, stolen_pace: str = "") -> dict[str, str]:
    """What there is to say of a pool's lanes and prefixes, by its name: nothing of those that it
    has not. `stolen_pace` goes behind what was stolen."""
    said: dict[str, str] = {}
    lanes = found["lanes"]
    if has_lanes(lanes, shards):
        said["lanes"] = f"{lanes['in_use']:,} of {lanes['lanes']:,} in use" + _taken(found)
        if found["stolen_jobs"]:
            said["lanes"] += stolen_pace
        if lanes["longest"]:
            said["longest"] = _longest(lanes, shards)
    if found["prompt_tokens"]:
        said["prefixes"] = _prefixes(found["prompt_tokens"], found["computed_tokens"])
    return said


def has_lanes(lanes: LanesStatistics, shards: int) -> bool:
    """Whether shards have several."""
    return lanes["lanes"] > shards


def _prefixes(asked: int, computed: int) -> str:
    """What part of the prompts' tokens was not computed, as far as that is known: what was drawn,
    and padding, count as computed."""
    if computed > asked:
        return f"{computed:,} tokens computed, drawn ones among them, for {asked:,} of prompts"
    return f"at least {share(1 - computed / asked)} of {asked:,} prompt tokens kept, not computed"


def share(part: float) -> str:
    """A part as ``12 %``; what is less than one and more than nothing as ``<1 %``."""
    return "<1 %" if 0 < part < 0.01 else f"{100 * part:.0f} %"


def stolen(worker: WorkerStatistics) -> str:
    """Of what a worker took, the part that it stole."""
    taken = worker["own_jobs"] + worker["stolen_jobs"]
    return share(worker["stolen_jobs"] / taken) if taken else "-"


def stolen_now(worker: WorkerStatistics) -> str:
    """How much it steals a second, where it does."""
    now = worker["stolen_per_second"]
    return f" ({now:,.1f}/s)" if now else ""


def at_home(workers: list[WorkerStatistics]) -> bool:
    """Whether these have homes: one alone needs none, and of one lane all are it."""
    return len(workers) > 1 and any(worker["lanes"] for worker in workers)


def name_of(lane: LaneStatistics, shards: int) -> str:
    """A lane's name: its number, where there are several shards with that of its shard."""
    of_shard = f" of shard {lane['shard']}" if shards > 1 else ""
    batch = " (batch)" if lane["priority"] == "batch" else ""
    return f"lane {lane['lane']}{of_shard}{batch}"


def _taken(found: PoolStatistics) -> str:
    taken = found["own_jobs"] + found["stolen_jobs"]
    if not taken:
        return ""
    return f", {share(found['stolen_jobs'] / taken)} of {counted(taken, 'job')} stolen"


def _longest(lanes: LanesStatistics, shards: int) -> str:
    """The longest lanes, a line each."""
    each = [
        f"{name_of(lane, shards)}: {lane['waiting']:,} wait"
        + (f", home {escape(lane['home'])}" if lane["home"] else ", anyone's")
        for lane in lanes["longest"][:SHOWN]
    ]
    more = lanes["waiting_lanes"] - len(each)
    if more > 0:
        each.append(f"and {more:,} more lanes: {lanes['waiting_jobs']:,} wait in all")
    return "\n".join(each)
