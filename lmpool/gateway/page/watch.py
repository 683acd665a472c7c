"""Looking at a pool about once a second, for all who watch it, while somebody does."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

from lmpool.checks import said
from lmpool.errors import LmpoolError
from lmpool.gateway.pools import Pool
from lmpool.pool_view import PoolViewer

logger = logging.getLogger(__name__)

State = Literal["looking", "serving", "no workers", "no pool", "no server"]

EVERY: Final = 1.0
LINGER: Final = 20.0
"""Seconds for which it goes on without a watcher: one who loads the page anew finds the last
minutes."""
SLOW: Final = 3.0
"""Seconds after which a server that has not answered is said not to."""
ANSWERS_WITHIN: Final = 8.0
"""Seconds after which a connection that brings no answer is given up for another."""
WINDOW: Final = 3.5
"""Seconds over which the pace is measured."""
HISTORY: Final = 240
"""Looks whose pace is told."""
MOST_TEXT: Final = 300
MOST_ITEMS: Final = 256
"""Characters of a text and entries of a list that are shown: whoever may write to the server may
write more."""
MOST_FAILURES: Final = 20


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look found. Times are this machine's, in seconds since 1970."""

    number: int
    state: State
    since: float
    """Since when it has been so."""
    why: str = ""
    view: dict[str, Any] | None = None
    """The last one that there was: of a server that is gone, too."""
    rate: float | None = None
    """Answers a second."""
    failures: tuple[dict[str, Any], ...] = ()


class Watch:
    """One pool's looks."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.seen = Seen(0, "looking", time.time())
        self.history: deque[tuple[float, float | None]] = deque(maxlen=HISTORY)
        """When, by this machine's clock, and at which pace."""
        self._counted: deque[tuple[float, int]] = deque()
        self._news = asyncio.Event()
        self._watchers = 0
        self._left = 0.0
        self._task: asyncio.Task[None] | None = None
        self._viewer: PoolViewer | None = None
        self._thread: ThreadPoolExecutor | None = None

    @property
    def is_looking(self) -> bool:
        """Whether what is seen is of a moment ago."""
        return self._task is not None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have it looked at meanwhile."""
        self._watchers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._look_on())
        try:
            yield
        finally:
            self._watchers -= 1
            self._left = time.monotonic()

    async def after(self, number: int) -> Seen:
        """What is seen once it is newer than look `number`."""
        while self.seen.number <= number:
            await self._news.wait()
        return self.seen

    async def stop(self) -> None:
        """End, with the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look_on(self) -> None:
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, f"page-{self._pool.name}")
        try:
            while self._watchers or time.monotonic() - self._left < LINGER:
                began = loop.time()
                reading = loop.run_in_executor(thread, self._read)
                done, _ = await asyncio.wait((reading,), timeout=SLOW)
                if not done:
                    self._publish("no server", why="its server has not answered yet")
                self._take(await reading)
                await asyncio.sleep(max(EVERY / 4, began + EVERY - loop.time()))
        finally:
            self._task = None  # before anything is waited for: who comes now begins anew
            viewer, self._viewer = self._viewer, None
            if viewer is not None:
                thread.submit(viewer.close)
            thread.shutdown(wait=False)

    def _read(self) -> dict[str, Any] | str:
        """A view, or why there is none; on the thread."""
        viewer = self._viewer
        try:
            if viewer is None:
                viewer = self._viewer = PoolViewer(
                    self._pool.url, self._pool.name, answers_within=ANSWERS_WITHIN
                )
            found = viewer.read().as_dict()
            # Of more workers than are shown it is told how many there are.
            alive = len(found["statistics"]["workers"])
            view: dict[str, Any] = plain({**found, "alive": alive})
            return view
        except LmpoolError as error:
            return str(error)[:MOST_TEXT]
        except Exception as error:  # of what anyone may have written there
            logger.debug("pool %s cannot be read", self._pool.name, exc_info=True)
            return f"it cannot be read: {said(error)}"[:MOST_TEXT]

    def _take(self, found: dict[str, Any] | str) -> None:
        if isinstance(found, str):
            self._counted.clear()
            self._publish("no server", why=found)
            return
        workers = found["statistics"]["workers"]
        state: State = "serving" if workers else "no workers" if found["model"] else "no pool"
        rate = self._pace(found["read_at"], found["statistics"]["computed"])
        failures = _failures(workers)
        for worker in workers:
            worker["failures"] = []  # told once, and not with each view
        self._publish(state, view=found, rate=rate, failures=failures)

    def _pace(self, at: float, computed: int) -> float | None:
        counted = self._counted
        if counted and (
            computed < counted[-1][1] or at <= counted[-1][0] or at - counted[-1][0] > 10
        ):
            counted.clear()  # the server lost its counters, or its clock was set, or nobody looked
        counted.append((at, computed))
        while at - counted[0][0] > WINDOW:
            counted.popleft()
        (first, before), took = counted[0], at - counted[0][0]
        return (computed - before) / took if took > 0 and first < at else None

    def _publish(
        self,
        state: State,
        *,
        why: str = "",
        view: dict[str, Any] | None = None,
        rate: float | None = None,
        failures: tuple[dict[str, Any], ...] = (),
    ) -> None:
        last, now = self.seen, time.time()
        since = last.since if state == last.state else now
        self.seen = Seen(
            last.number + 1, state, since, why, view or last.view, rate, failures or last.failures
        )
        self.history.append((now, rate))
        news, self._news = self._news, asyncio.Event()
        news.set()


def plain(value: Any) -> Any:
    """The same, within bounds, and as JSON that a browser reads: it knows no infinity."""
    if isinstance(value, str):
        return value if len(value) <= MOST_TEXT else value[:MOST_TEXT] + "…"
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {plain(name): plain(each) for name, each in list(value.items())[:MOST_ITEMS]}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value[:MOST_ITEMS]]
    return value


def _failures(workers: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The latest failures of all workers, the newest first."""
    found: list[dict[str, Any]] = [
        {**failure, "worker": worker["id"]}
        for worker in workers
        for failure in worker.get("failures") or ()
        if isinstance(failure, dict)
    ]
    found.sort(key=lambda failure: _number(failure.get("at")), reverse=True)
    return tuple(found[:MOST_FAILURES])


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
