"""Holding workers where a test wants them: at loading their engine, or in the midst of a batch."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from tests.support.waiting import until


class Gate:
    """Workers started with `settings` and `environment` compute when they may.

    Batches are held until `open`; loading only with ``hold_loading=True``.
    """

    def __init__(self, folder: Path, *, hold_loading: bool = False) -> None:
        self._signs = folder / "gate"
        self._signs.mkdir()
        plugin = folder / "plugin"
        metadata = plugin / "lmpool_gated-0.dist-info"
        metadata.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("gated_engine.py"), plugin)
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: lmpool-gated\nVersion: 0\n"
        )
        (metadata / "entry_points.txt").write_text(
            "[lmpool.engines]\ngated = gated_engine:GatedEngine\n"
        )
        paths = [str(plugin), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {"PYTHONPATH": os.pathsep.join(paths)}
        if not hold_loading:
            self.open("load")

    def settings(self, **engine_opts: Any) -> dict[str, Any]:
        """What a worker needs: its engine, that engine's options, its environment."""
        return {
            "engine": "gated",
            "engine_opts": {"gate": str(self._signs), **engine_opts},
            "environment": self.environment,
        }

    def open(self, what: str = "compute", pid: int | None = None) -> None:
        """From now on all workers, or the one with that process id, may do it."""
        (self._signs / f"{'all' if pid is None else pid} may {what}").touch()

    def close(self) -> None:
        """From now on nobody may compute, unless it was opened for one worker alone."""
        (self._signs / "all may compute").unlink(missing_ok=True)

    def batches(self) -> list[tuple[int, int]]:
        """Process id and size of every batch that was begun; each worker's in their order."""
        found = []
        for sign in self._signs.iterdir():
            match = re.fullmatch(r"(\d+) batch (\d+) of (\d+)", sign.name)
            if match:
                found.append(tuple(map(int, match.groups())))
        return [(pid, size) for pid, _, size in sorted(found)]

    def wait_for_batch(self, number: int = 1, timeout: float = 60.0) -> list[tuple[int, int]]:
        """Wait until so many batches were begun; see `batches`."""
        return until(
            lambda: found if len(found := self.batches()) >= number else None,
            timeout,
            what=f"batch number {number} to begin",
        )

    def wait_for_loading(self, timeout: float = 60.0) -> None:
        """Wait until a worker is loading its engine."""
        until(
            lambda: any(sign.name.endswith(" loading") for sign in self._signs.iterdir()),
            timeout,
            what="a worker to load its engine",
        )
