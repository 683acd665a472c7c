"""A mock engine whose process dies, hangs or breaks where a test wants it; loaded as a plug-in.

`tests.support.faults` is the test's side.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lmpool.backends.engine import Outcome, Request
from lmpool.backends.mock import MockEngine
from lmpool.errors import EngineBroken
from lmpool.worker import intake, publishing, recovery, status, watchdog


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _segfault() -> None:
    signal.raise_signal(signal.SIGSEGV)  # in this thread, which so goes no further


def _hang() -> None:
    time.sleep(10_000)


def _break() -> None:
    raise EngineBroken("a test broke the engine")


ACTS: dict[str, Callable[[], None]] = {
    "kill": _die,
    "segfault": _segfault,
    "hang": _hang,
    "break": _break,
}


def _write_down_steals(file: Path) -> None:
    stole = status.WorkerStatus.stole

    def note(self: status.WorkerStatus, found: Any) -> None:
        stole(self, found)
        if count := sum(len(entries) for _, entries in found):
            with file.open("a") as log:  # at once: the worker may be killed
                log.write(f"{count}\n")

    status.WorkerStatus.stole = note  # type: ignore[method-assign]


class FaultyEngine(MockEngine):
    """As the mock engine.

    `acts` maps a token to what a prompt that contains it does to the worker each time. `die_at` is
    a step at which the worker is killed, by one process of the pool: that which takes the file
    `once`.
    `unguarded` switches recovery and watchdog off. `memory` is how many prompts fit into its
    memory. `clock` is how many seconds the machine's clock is ahead. `prefix_delay` is how many
    seconds a prefix takes. `patience` is how many seconds jobs wait in a lane for its home alone.
    `steals` is a file that gets a line with their number each time that the worker takes jobs of
    others' lanes.
    """

    def __init__(
        self,
        model: str,
        *,
        acts: dict[str, str] | None = None,
        die_at: str | None = None,
        once: str | None = None,
        memory: int | None = None,
        unguarded: bool = False,
        clock: float = 0.0,
        prefix_delay: float = 0.0,
        patience: float | None = None,
        steals: str | None = None,
        **options: Any,
    ) -> None:
        if unguarded:
            for thread in (recovery.Recovery, watchdog.Watchdog):
                thread.run = lambda self: None  # type: ignore[method-assign]
            status.WorkerStatus.let_go = lambda self, jobs: self.held.clear()  # type: ignore[method-assign]
        if clock:
            right = time.time
            time.time = lambda: right() + clock
        if patience is not None:
            status.WorkerStatus.patience = lambda self: patience  # type: ignore[method-assign]
        if steals:
            _write_down_steals(Path(steals))
        super().__init__(model, **options)
        self._acts = {int(token): ACTS[act] for token, act in (acts or {}).items()}
        self._memory = memory
        self._prefix_delay = prefix_delay
        self._die_at = die_at
        self._once = Path(once) if once else None
        if die_at in ("read", "publishing", "published"):
            self._patch(die_at)

    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        if self._die_at == "computing":
            self._die_once()
        for request in requests:
            for token, act in self._acts.items():
                if (request.tokens == token).any():
                    act()
        if self._memory is not None and len(requests) > self._memory:
            raise MemoryError(f"{len(requests)} prompts")
        outcomes = super().compute(requests)
        if self._die_at == "computed":
            self._die_once()
        return outcomes

    def cache_prefix(self, tokens: Any) -> None:
        time.sleep(self._prefix_delay)
        super().cache_prefix(tokens)

    def _die_once(self) -> None:
        assert self._once is not None
        try:
            self._once.unlink()
        except FileNotFoundError:
            return
        _die()

    def _patch(self, step: str) -> None:
        if step == "read":
            read = intake.Intake._parse

            def parse(*arguments: Any) -> Any:
                delivery = read(*arguments)
                if delivery:
                    self._die_once()
                return delivery

            intake.Intake._parse = parse  # type: ignore[method-assign]
            return
        engine, written = self, 0

        class Transaction(publishing.Transaction):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                nonlocal written
                written += 1
                if step == "publishing" and written == 2:
                    engine._die_once()  # the first chunk of a batch is written, the second is not
                super().__init__(*arguments, **options)

            def answers(self) -> tuple[Any, Any]:
                answers = super().answers()
                if step == "published":
                    engine._die_once()  # all is written, and the worker knows of nothing
                return answers

        publishing.CHUNK_MOST = 4  # type: ignore[misc]
        publishing.Transaction = Transaction  # type: ignore[misc]
