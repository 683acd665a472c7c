"""The fixtures of lmpool.testing, in runs of pytest as users have them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.processes import users_of
from tests.support.waiting import until
from tests.support.workers import clean_environment

ROOT = Path(__file__).parents[2]
PLUGIN = "lmpool.testing.plugin"


class Suite:
    """Tests in a folder of their own, run by a pytest of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / f"{name}.py").write_text(text)

    def run(self, *options: str, without: tuple[str, ...] = (), **variables: str) -> str:
        """What a run says that must have ended with its tests passed, without these packages."""
        done = self.attempt(*options, without=without, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def attempt(
        self, *options: str, without: tuple[str, ...] = (), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        code = "import sys\n"
        code += "".join(f"sys.modules[{name!r}] = None\n" for name in without)
        code += "import pytest\nsys.exit(pytest.main(sys.argv[1:]))"
        own = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "TMPDIR": str(self.temporary)}
        if named := os.environ.get("LMPOOL_TEST_SERVER"):
            own["LMPOOL_TEST_SERVER"] = named
        return subprocess.run(
            [sys.executable, "-c", code, "-q", "-p", PLUGIN, "-p", "no:cacheprovider", *options],
            cwd=self.folder,
            env={**clean_environment(), **own, **variables},
            capture_output=True,
            text=True,
            timeout=100,
        )


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


ISOLATED = """
import pytest

URLS, POOLS = set(), set()

@pytest.mark.parametrize("token", range(6))
def test_each_has_a_pool_of_its_own({fixture}, token):
    pool = {fixture}
    assert pool.calls == []
    pool.answer([1, 2], {{token: 1.0}})
    assert pool.lm.sync.next_token_logprobs([1, 2]).argmax() == token
    assert [call.prompt for call in pool.calls] == [(1, 2)]
    assert pool.pool not in POOLS
    POOLS.add(pool.pool)

@pytest.mark.parametrize("number", range(2))
def test_nothing_was_answered_before({fixture}, number):
    lm = {fixture}.lm.sync
    lm.top_logprobs([1, 2], 1)
    assert lm.statistics()["queued"] == 1
    assert lm.statistics()["cache_hits"] == 0

def test_a_pipeline_finds_it_by_its_settings({fixture}, monkeypatch):
    import lmpool
    {fixture}.answer([1, 2], {{9: 1.0}})
    with lmpool.connect(framework="numpy") as lm:
        assert lm.pool == {fixture}.pool
        assert lm.sync.next_token_logprobs([1, 2]).argmax() == 9
        {fixture}.answer([1, 2], {{8: 1.0}})
        assert lm.sync.next_token_logprobs([1, 2]).argmax() == 8
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "-n 2"])
def test_tests_on_fakeredis_do_not_disturb_each_other(
    suite: Suite, workers: tuple[str, ...]
) -> None:
    suite.write(test_isolated=ISOLATED.format(fixture="lmpool_fake"))
    said = suite.run(*workers, LMPOOL_URL="redis://nowhere.invalid:1/0", LMPOOL_SHARDS="no number")
    assert "9 passed" in said
    assert not list(suite.temporary.glob("lmpool*"))


OF_PRODUCTION = """
url = "redis://nowhere.invalid:1/0"
pool = "production"
max_prompt_tokens = 1
shards = 2
encoding = "f16"
"""

AS_USUAL = """
def test_it_is_made_as_without_a_file(lmpool_fake):
    import numpy as np
    import lmpool
    info = lmpool_fake.info
    assert (info.max_prompt_tokens, info.shards) == (4096, 1)
    lmpool_fake.answer([1, 2], {9: 0.7})
    with lmpool.connect(framework="numpy") as lm:
        assert lm.pool == lmpool_fake.pool
        assert lm.sync.next_token_logprobs([1, 2])[9] == np.float32(np.log(0.7))
"""


@pytest.mark.parametrize("name", ["lmpool.toml", "named.toml"])
def test_a_file_of_settings_is_not_for_tests(suite: Suite, name: str) -> None:
    file = suite.folder / name
    file.write_text(OF_PRODUCTION)
    suite.write(test_as_usual=AS_USUAL)
    named = "" if name == "lmpool.toml" else str(file)  # an empty variable is none
    assert "1 passed" in suite.run(LMPOOL_CONFIG=named)


@pytest.mark.one_server
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "-n 2"])
def test_tests_on_a_server_do_not_disturb_each_other(
    suite: Suite, workers: tuple[str, ...], server_binary: str
) -> None:
    suite.write(test_isolated=ISOLATED.format(fixture="lmpool_pool"))
    assert "9 passed" in suite.run(*workers)
    assert_nothing_left(suite)


SERVER = """
import os, subprocess, sys
from pathlib import Path
import redis

ASKS = '''
import lmpool
with lmpool.connect(framework="numpy") as lm:
    print(lm.sync.next_token_logprobs([1, 2]).argmax())
'''

def note(pool):
    with Path("urls").open("a") as urls:
        urls.write(pool.url + "\\n")

def test_other_processes_reach_it(lmpool_pool):
    lmpool_pool.answer([1, 2], {77: 1.0})
    said = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, check=True)
    assert said.stdout == "77\\n"
    assert [call.prompt for call in lmpool_pool.calls] == [(1, 2)]
    note(lmpool_pool)

def test_it_is_the_servers_one_pool(lmpool_pool):
    with redis.Redis.from_url(lmpool_pool.url, protocol=2) as client:
        assert "redis_version" in client.info("server")
        keys = [key.decode() for key in client.scan_iter()]
    assert keys and all(lmpool_pool.pool in key for key in keys), keys
    note(lmpool_pool)

def test_a_test_that_fails_leaves_nothing(lmpool_pool):
    lmpool_pool.delay(float("inf"))
    assert lmpool_pool.lm.sync.next_token_logprobs([1], timeout=0.1) == "an answer"
"""


@pytest.mark.one_server
def test_a_session_has_one_server_which_ends_with_it(suite: Suite, server_binary: str) -> None:
    suite.write(test_server=SERVER)
    done = suite.attempt()
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "answers were not there after 0.1 s" in done.stdout  # whichever side saw it first
    assert len(set((suite.folder / "urls").read_text().split())) == 1
    assert_nothing_left(suite)


def assert_nothing_left(suite: Suite) -> None:
    until(lambda: not users_of(suite.temporary), what="nobody to use its folder", every=0.05)
    until(lambda: not list(suite.temporary.glob("lmpool*")), what="the folder to be empty")


OPTIONS = """
import threading
import pytest

@pytest.fixture
def lmpool_options():
    return {"vocab_size": 1000}

def test_it_is_made_with_them(lmpool_fake):
    assert lmpool_fake.info.vocab_size == 1000

def test_no_thread_was_left():
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
"""


def test_options_are_a_fixture_and_no_thread_is_left(suite: Suite) -> None:
    suite.write(test_options=OPTIONS)
    assert "2 passed" in suite.run()


def test_without_fakeredis_it_says_what_to_install(suite: Suite) -> None:
    suite.write(test_it="def test_it(lmpool_fake): pass\n")
    done = suite.attempt(without=("fakeredis",))
    assert done.returncode == 1
    assert "pip install 'lmpool[testing]'" in done.stdout


def test_the_plug_in_is_registered_and_reads_nothing_of_lmpool() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"][PLUGIN] == PLUGIN
    code = f"import sys, {PLUGIN}; print(sorted(m for m in sys.modules if m[:6] == 'lmpool'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    read = ast.literal_eval(done.stdout)
    assert read == ["lmpool", "lmpool.errors", "lmpool.release", "lmpool.testing", PLUGIN]


def test_the_example_passes_without_torch(suite: Suite) -> None:
    for path in (ROOT / "examples" / "testing").glob("*.py"):
        suite.write(**{path.stem: path.read_text()})
    said = suite.run(without=("torch", "transformers", "arq"))
    assert re.search(r"^7 passed", said, re.MULTILINE), said


def test_the_example_fails_where_the_pipeline_is_wrong(suite: Suite) -> None:
    for path in (ROOT / "examples" / "testing").glob("*.py"):
        text = path.read_text().replace("Score(start=len(prompt))", "Score(start=len(prompt) + 1)")
        suite.write(**{path.stem: text.replace("[[10], [20, 21]]", "[[10, 11], [20, 21]]")})
    assert suite.attempt().returncode == 1


def test_the_documents_first_test_passes(suite: Suite) -> None:
    text = (ROOT / "docs" / "testing.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    suite.write(test_page="\n\n".join(blocks))
    said = suite.run()
    assert re.search(r"^\d+ passed", said, re.MULTILINE), said
