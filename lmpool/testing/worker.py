"""A worker whose threads are this process's: it starts in milliseconds, and one sees inside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from lmpool.backends import Engine
from lmpool.clock import ServerClock
from lmpool.commands import NewEntry, Server
from lmpool.model_info import ModelInfo
from lmpool.servers import Servers
from lmpool.settings import WorkerOptions
from lmpool.worker.engine_thread import EngineLoop
from lmpool.worker.intake import Intake
from lmpool.worker.seat import Seat
from lmpool.worker.service import Service

IDLE_BLOCK_MS: Final = 10
"""As an idle worker notices that it is to stop when its read ends."""


class _BriefIntake(Intake):
    def _read_new(
        self, block: int | None, server: Server, keys: Sequence[str], count: int
    ) -> Sequence[tuple[bytes, Sequence[NewEntry]]] | None:
        brief = None if block is None else min(block, IDLE_BLOCK_MS)
        return super()._read_new(brief, server, keys, count)


class InProcessService(Service):
    """A `Service` that stops at once. With `instead`, that engine serves, and the one that
    `options` name is not used."""

    _new_intake = _BriefIntake

    def __init__(
        self,
        options: WorkerOptions,
        on_failure: Callable[[], None] = lambda: None,
        instead: Engine | None = None,
    ) -> None:
        super().__init__(options, on_failure)
        self._instead = instead
        self.info: ModelInfo
        """What it serves, once it does."""

    def _join(
        self, engine: Engine, control: Servers, clock: ServerClock, version: str
    ) -> EngineLoop:
        if self._instead is not None:
            engine.close()
            engine = self.engine = self._instead
        return super()._join(engine, control, clock, version)

    def _enter_pool(
        self, control: Servers, info: ModelInfo, engine: Engine, beating: Servers
    ) -> Seat:
        seat = super()._enter_pool(control, info, engine, beating)
        self.info = seat.info
        return seat


class _LoneIntake(_BriefIntake):
    """That of a pool's only worker: what it gave back would come to it again, behind the others."""

    def _is_overdue(self) -> bool:
        return False


class LoneService(InProcessService):
    """One whose pool never has another, and which runs jobs in the order in which they came."""

    _new_intake = _LoneIntake
