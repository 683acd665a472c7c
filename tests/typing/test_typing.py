"""mypy and pyright pass what is right, usage.py, and find each of mistakes.py on its line."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
USAGE, MISTAKES = HERE / "usage.py", HERE / "mistakes.py"

pytestmark = [
    pytest.mark.types,
    pytest.mark.timeout(600),  # mypy reads torch, once
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="rows are torch's by default"
    ),
]


def mypy(file: Path) -> dict[int, str]:
    """What a user's mypy finds, by line: strict, without this project's configuration."""
    # lmpool is not installed here but read: what is in it is silent, as if it were.
    command = [
        sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull,
        "--follow-imports", "silent", "--cache-dir", ".mypy_cache/usage", str(file),
    ]  # fmt: skip
    cache = ROOT / ".mypy_cache"
    cache.mkdir(exist_ok=True)
    with (cache / "usage.lock").open("w") as lock:  # two at once would spoil it
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^(\S+?):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    assert done.returncode == bool(found), done.stdout
    assert {name for name, _, _ in found} <= {str(file.relative_to(ROOT)), str(file)}
    return {int(line): message for _, line, message in found}


def pyright(file: Path) -> dict[int, str]:
    """What pyright finds, by line."""
    command = [
        sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(file),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
        "PYRIGHT_PYTHON_CACHE_DIR": str(ROOT / ".mypy_cache"),
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {each["range"]["start"]["line"] + 1: each["message"] for each in found}


CHECKERS = pytest.mark.parametrize("checker", [mypy, pyright])


@CHECKERS
def test_typical_use_passes(checker: Callable[[Path], dict[int, str]]) -> None:
    assert checker(USAGE) == {}


@CHECKERS
def test_each_mistake_is_found_where_it_is(checker: Callable[[Path], dict[int, str]]) -> None:
    lines = MISTAKES.read_text("utf-8").splitlines()
    mistakes = {number for number, line in enumerate(lines, 1) if "# mistake: " in line}
    assert len(mistakes) >= 5
    assert set(checker(MISTAKES)) == mistakes
