"""Running the benchmarks in small, for their own sake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def quick_figures(name: str, folder: Path, *options: str) -> None:
    """Take one benchmark's figures in small: it must find its rows right and have figures."""
    written = folder / "figures.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.benchmarks", name),
            *("--quick", "--runs", "1", "--json", str(written), *options),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"# {name}\n" in done.stdout
    (figures,) = json.loads(written.read_text())
    assert figures["figures"]
