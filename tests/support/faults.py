"""Workers that die, hang or break where a test wants it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

STEPS = ("read", "computing", "computed", "publishing", "published")
"""Where a worker can be killed."""


class Faults:
    """Settings of workers whose engine is `tests.support.faulty_engine.FaultyEngine`."""

    def __init__(self, folder: Path) -> None:
        plugin = folder / "faulty"
        metadata = plugin / "lmpool_faulty-0.dist-info"
        metadata.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("faulty_engine.py"), plugin)
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: lmpool-faulty\nVersion: 0\n"
        )
        (metadata / "entry_points.txt").write_text(
            "[lmpool.engines]\nfaulty = faulty_engine:FaultyEngine\n"
        )
        self._folder = folder
        paths = [str(plugin), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {"PYTHONPATH": os.pathsep.join(paths)}

    def settings(self, **engine_opts: Any) -> dict[str, Any]:
        """What a worker needs: its engine, that engine's options, its environment."""
        if "die_at" in engine_opts:
            once = self._folder / engine_opts["die_at"]
            once.touch()
            engine_opts["once"] = str(once)
        return {"engine": "faulty", "engine_opts": engine_opts, "environment": self._environment}
