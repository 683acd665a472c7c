"""`lmpool demo --gateway` as a process: what it shows to be typed is typed, and works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import short_folder, users_of
from tests.support.waiting import until
from tests.support.workers import clean_environment

pytest.importorskip("openai")

pytestmark = [pytest.mark.server, pytest.mark.slow]

LAST = "All that it can is at"


@pytest.fixture(scope="module")
def shown() -> Iterator[str]:
    """What a demo says until it serves. At its end nothing is there, and nobody."""
    with short_folder() as folder:
        log = folder / "said"
        with log.open("wb") as written:
            demo = subprocess.Popen(
                [sys.executable, "-m", "lmpool", "demo", "--gateway", "--workers", "1"],
                stdout=written,
                stderr=subprocess.STDOUT,
                env={**clean_environment(), "TMPDIR": str(folder), "COLUMNS": "60"},
            )
        try:
            until(lambda: LAST in said(demo, log), 200, what="the demo to serve", every=0.1)
            yield log.read_text()
        finally:
            demo.terminate()
            try:
                demo.wait(60)
            except subprocess.TimeoutExpired:
                demo.kill()
                demo.wait()
                raise
        assert demo.returncode == 0, log.read_text()
        until(lambda: not users_of(folder), what="the demo's processes to end", every=0.05)
        assert not list(folder.glob("lmpool*"))


def said(demo: subprocess.Popen[bytes], log: Path) -> str:
    assert demo.poll() is None, log.read_text()
    return log.read_text()


def text_by_curl(shown: str) -> str:
    """What the command answers that it shows, which is run as it stands there."""
    found = re.search(r"^curl .*?\\\n.*?$", shown, re.MULTILINE)
    assert found is not None, shown
    command = ["bash", "-c", found[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    answer = json.loads(done.stdout)
    assert 1 <= answer["usage"]["completion_tokens"] <= 12
    return str(answer["choices"][0]["text"])


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_command_and_the_python_program_do_the_same(shown: str) -> None:
    program = shown[shown.index("from openai import") : shown.index(LAST)]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    *text, likeliest = done.stdout.removesuffix("\n").split("\n")
    assert "\n".join(text) == text_by_curl(shown)
    assert len(text[0]) > 5
    assert re.fullmatch(r"\{('.*?': -\d+\.\d+(e-\d+)?(, )?){3,4}\}", likeliest), likeliest


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_what_it_can_is_described_where_it_says(shown: str) -> None:
    url = re.search(r"is at (http://\S+/docs)$", shown.strip())
    assert url is not None
    command = ["curl", "-sf", url[1]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "openapi.json" in done.stdout
