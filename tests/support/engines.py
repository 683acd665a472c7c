"""``lmpool doctor --engines`` where an engine is installed beside transformers."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.support.workers import clean_environment


def check_engines(name: str, drawn: str = "same") -> None:
    """The command ends well, and has asked a pool of `name`, which draws so, and one of hf."""
    done = subprocess.run(
        [sys.executable, "-m", "lmpool", "doctor", "--engines"],
        env={**clean_environment(), "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    for engine, draws in (("hf", "same"), (name, drawn)):
        assert re.search(rf"{engine}\W+[\d.e+-]+\W+same\W+{draws}\W+[\d,]+", shown), shown
    assert "the same tokens, and rows within 0.0001" in shown
