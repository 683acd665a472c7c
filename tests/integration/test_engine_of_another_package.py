"""The engine of docs/engines.md, as a package of its own: a pool runs it, and the suite passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.readme import ENGINES, section
from tests.support.workers import clean_environment

pytestmark = [pytest.mark.slow]

EXAMINE = (
    # Named, as it is where lmpool was installed before it had the entry point.
    "-m", "pytest", "-p", "no:cacheprovider", "-p", "lmpool.contract_options",
    "--pyargs", "lmpool.backends.contract", "--engine", "bigram", "--engine-seed", "5",
    "--engine-reference", "my_rows:reference", "--engine-lacks", "adapters",
)  # fmt: skip

MY_ROWS = """
from bigram_engine import bigrams

def reference(prompts, adapter=None):
    return bigrams(64)[[prompt[-1] for prompt in prompts]]
"""

ASK = """
import numpy as np
import lmpool
from bigram_engine import bigrams

if __name__ == "__main__":
    with lmpool.embedded("any", engine="bigram", framework="numpy") as lm:
        assert (lm.info.engine, lm.info.vocab_size) == ("bigram", 64)
        rows = lm.batch_next_token_logprobs_sync([[1, 2], [63], [5, 2]])
        assert np.array_equal(rows, bigrams(64)[[2, 63, 2]])
        drawn = lm.sample_sync([7], max_tokens=3, eos_token_ids=[], temperature=0.0)
        assert drawn[0] == bigrams(64)[7].argmax()
    print("asked")
"""


def example(name: str) -> str:
    """One of the page's files."""
    found = re.fullmatch(
        r"```(?:python|toml)\n(.*)```", section(ENGINES.read_text("utf-8"), name), re.DOTALL
    )
    assert found is not None, f"docs/engines.md: {name} is no code"
    return found[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's package, as pip installs it, beside lmpool's own."""
    source = tmp_path_factory.mktemp("source")
    for name in ("bigram_engine.py", "pyproject.toml"):
        (source / name).write_text(example(name))
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--target", str(target), str(source)],
        check=True,
        capture_output=True,
    )
    return target


def run(installed: Path, folder: Path, *command: str, expected: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**clean_environment(), "PYTHONPATH": f"{installed}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == expected, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.usefixtures("server_binary")
def test_a_pool_of_it_answers(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text(ASK)
    assert run(installed, tmp_path, "ask.py").strip() == "asked"


def test_it_passes_the_suite_that_lmpool_brings(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "test_bigram_engine.py").write_text(example("test_bigram_engine.py"))
    shown = run(installed, tmp_path, "-m", "pytest", "-rs", "-p", "no:cacheprovider")
    passed = re.search(r"(\d+) passed", shown)
    assert passed is not None
    assert int(passed[1]) == 11
    assert "lacks adapters: a table of bigrams has no layers to adapt" in shown


def test_the_command_line_examines_it(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "my_rows.py").write_text(MY_ROWS)
    shown = run(installed, tmp_path, *EXAMINE, "--engine-opts", '{"vocab_size": 64}')
    assert "11 passed, 1 skipped" in shown
    broken = tmp_path / "my_rows.py"
    broken.write_text(MY_ROWS.replace("prompt[-1]", "prompt[-2:][0]"))
    shown = run(installed, tmp_path, *EXAMINE, "-k", "rows", expected=1)
    assert "the engine 'bigram' breaks a promise (rows, seed 5)" in shown
    assert "each row is that of its own prompt and adapter" in shown
    assert re.search(r"1\. submit 1: #\d+ row after \[\d+, \d+", shown), "not made smaller"
    assert "--engine-seed 5 -k rows" in shown
    bare = [*EXAMINE[:9], "mock"]
    shown = run(installed, tmp_path, *bare, "-k", "rows", expected=1)
    assert "name their own reference (--engine-reference" in shown
    shown = run(installed, tmp_path, *EXAMINE[:-2], "--engine-lacks", "sense", expected=1)
    assert "write one of adapter files, adapters" in shown


def test_the_suite_finds_what_is_wrong_with_it(installed: Path, tmp_path: Path) -> None:
    """The same test of an engine that mistakes the token before the last one for the last."""
    test = example("test_bigram_engine.py")
    (tmp_path / "test_bigram_engine.py").write_text(test.replace("prompt[-1]", "prompt[-2:][0]"))
    shown = run(installed, tmp_path, "-m", "pytest", "-k", "rows", expected=1)
    assert re.search(r"off by [\d.]+ nats: #\d+ row after", shown)
