"""A pool in virtual time: prompts come, homes serve their lanes, idle workers take what waits.

Where a prompt belongs, who is whose home, and what is taken of others' lanes is decided by
`lmpool.affinity`, as in a worker. What is left out: the network, the server, batches' own timeouts.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from lmpool.affinity import Placement, Waiting, homes, lanes_in_use, patience, steals

BATCH: Final = 8
"""Prompts of a batch."""
BATCH_SECONDS: Final = 0.004
"""What a batch takes beside its tokens."""
TOKEN_SECONDS: Final = 50e-6
"""What a token takes that was not kept."""
PREFIX, OWN = 512, 8
"""Tokens that the prompts of a group share, and those that each has of its own."""

CHANGES: Final = 8
"""Workers that join or die, one at a time, of which the mean is told."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a pool is asked: `groups` of prompts with a common prefix, and how often each.

    `utilization` is of the workers' time, if each prompt were a batch of its own and its prefix
    kept. `skew` is Zipf's exponent: 0 for groups that are asked alike.
    """

    workers: int
    utilization: float
    jobs: int
    groups: int
    skew: float = 0.0
    kept: int = 64
    """Prefixes that a worker keeps."""
    affinity: bool = True
    deep: bool = False
    """Whether each prompt has a lane of its own, as if it were told apart behind its prefix."""
    most_lanes: int = 1024
    speeds: Sequence[float] = ()
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    busy: list[float] = field(default_factory=list)
    jobs: list[int] = field(default_factory=list)
    computed: int = 0
    stolen: int = 0
    waits: list[float] = field(default_factory=list)
    ended: float = 0.0

    @property
    def stolen_share(self) -> float:
        """Jobs that did not meet their home, of all."""
        return self.stolen / sum(self.jobs)

    @property
    def tokens_each(self) -> float:
        """Tokens computed for a job."""
        return self.computed / sum(self.jobs)

    @property
    def imbalance(self) -> float:
        """The busiest worker's time over the mean's."""
        return max(self.busy) / (sum(self.busy) / len(self.busy))


@dataclass(slots=True)
class _Worker:
    speed: float
    lanes: list[int]
    kept: OrderedDict[int, None] = field(default_factory=OrderedDict)
    idle: bool = True


class Pool:
    """One run. `run` is called once."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.rng = np.random.default_rng(load.seed)
        count = load.workers
        self.lanes = lanes_in_use(count, load.most_lanes) if load.affinity else 1
        names = [f"host-{n // 8}-gpu{n % 8}" for n in range(count)]
        self.home = homes(names, 0, self.lanes) if load.affinity else np.zeros(1, np.intp)
        speeds = load.speeds or [1.0] * count
        self.workers = [_Worker(speeds[n], []) for n in range(count)]
        for lane, home in enumerate(self.home):
            self.workers[home].lanes.append(lane)
        self.waiting: dict[int, deque[tuple[float, int]]] = {}
        self.idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self.patience = patience(PREFIX + OWN, TOKEN_SECONDS) if load.affinity else 0.0
        self.out = Outcome([0.0] * count, [0] * count)
        self.events: list[tuple[float, int, int, int]] = []

    def run(self) -> Outcome:
        """Until all jobs are done."""
        load = self.load
        place = Placement(1, load.most_lanes if load.affinity else 1)
        weights = 1.0 / np.arange(1, load.groups + 1) ** load.skew
        groups = self.rng.choice(load.groups, load.jobs, p=weights / weights.sum())
        prefixes = self.rng.integers(0, 50_000, (load.groups, PREFIX)).astype("<u4")
        lanes = [place.of(prefix.tobytes(), None)[1] % self.lanes for prefix in prefixes]
        self._warm(lanes)
        pace = sum(w.speed for w in self.workers) * load.utilization
        gaps = self.rng.exponential(job_seconds() / pace, load.jobs)
        for number, (at, group) in enumerate(zip(np.cumsum(gaps), groups, strict=True)):
            heapq.heappush(self.events, (float(at), number, 0, int(group)))
        serial = load.jobs
        while self.events:
            now, _, kind, what = heapq.heappop(self.events)
            started: list[tuple[int, float]] = []
            if kind == 0:  # a job came
                lane = int(self.rng.integers(self.lanes)) if load.deep else lanes[what]
                self.waiting.setdefault(lane, deque()).append((now, what))
                home = int(self.home[lane])
                if load.affinity and home in self.idle:
                    started += self._serve(home, now)
                elif self.idle:
                    heapq.heappush(self.events, (now + self.patience, serial, 2, lane))
                    serial += 1
            elif kind == 1:  # a batch is done
                self.idle[what] = None
                started += self._serve(what, now)
            elif self.idle and what in self.waiting:  # a lane may be anyone's now
                started += self._serve(next(iter(self.idle)), now)
            for worker, until in started:
                heapq.heappush(self.events, (until, serial, 1, worker))
                serial += 1
            if started and self.idle and self.waiting:  # the next one is called
                heapq.heappush(self.events, (now, serial, 2, next(iter(self.waiting))))
                serial += 1
            self.out.ended = now
        return self.out

    def _warm(self, lanes: Sequence[int]) -> None:
        """What is kept from before, as far as there is room: each at its home, or anywhere."""
        for group, lane in enumerate(lanes):
            home = int(self.home[lane]) if self.load.affinity else group % self.load.workers
            kept = self.workers[home].kept
            if len(kept) < self.load.kept:
                kept[group] = None

    def _serve(self, number: int, now: float) -> list[tuple[int, float]]:
        """Start a batch of its own lanes, the oldest first, and then of what is anyone's."""
        worker, batch = self.workers[number], []
        own = [lane for lane in worker.lanes if lane in self.waiting]
        for lane in sorted(own, key=lambda lane: self.waiting[lane][0]):
            batch += self._take(lane, BATCH - len(batch))
        if len(batch) < BATCH and self.waiting:
            mine = set(worker.lanes)
            others = [
                Waiting(lane, now - jobs[0][0], len(jobs))
                for lane, jobs in self.waiting.items()
                if lane not in mine
            ]
            for chosen, count in steals(others, BATCH - len(batch), self.patience - 1e-9):
                taken = self._take(chosen.lane, count)
                self.out.stolen += len(taken)
                batch += taken
        if not batch:
            return []
        del self.idle[number]
        seconds = BATCH_SECONDS
        for came, group in batch:
            self.out.waits.append(now - came)
            tokens = OWN if group in worker.kept else PREFIX + OWN
            self.out.computed += tokens
            seconds += tokens * TOKEN_SECONDS
            worker.kept[group] = None
            worker.kept.move_to_end(group)
            if len(worker.kept) > self.load.kept:
                worker.kept.popitem(last=False)
        seconds /= worker.speed
        self.out.busy[number] += seconds
        self.out.jobs[number] += len(batch)
        return [(number, now + seconds)]

    def _take(self, lane: int, count: int) -> list[tuple[float, int]]:
        jobs = self.waiting[lane]
        taken = [jobs.popleft() for _ in range(min(count, len(jobs)))]
        if not jobs:
            del self.waiting[lane]
        return taken


def job_seconds() -> float:
    """What a job takes alone, if its prefix is kept."""
    return BATCH_SECONDS + OWN * TOKEN_SECONDS


def moved(workers: int, lanes: int, *, join: bool) -> float:
    """The share of lanes that get another home when a worker joins or dies: the mean of several."""
    names = [f"host-{n // 8}-gpu{n % 8}" for n in range(workers + CHANGES)]
    living, others = names[:workers], names[workers:]
    if join:
        changed = [[*living, other] for other in others]
    else:
        changed = [living[:n] + living[n + 1 :] for n in range(0, workers, -(-workers // CHANGES))]
    before = [living[n] for n in homes(living, 0, lanes)]
    shares = []
    for those in changed:
        after = [those[n] for n in homes(those, 0, lanes)]
        shares.append(sum(a != b for a, b in zip(before, after, strict=True)) / lanes)
    return sum(shares) / len(shares)
