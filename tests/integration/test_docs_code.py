"""The documents' Python, run on a pool of the tiny model and on a gateway before it."""

from __future__ import annotations

import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmpool
from tests.support.code_blocks import DOCUMENTS, Block, blocks, command_lines, name_of
from tests.support.gateways import GatewayProcess
from tests.support.markdown import ROOT
from tests.support.run_blocks import EXAMPLE_GATEWAYS, EXAMPLE_POOL
from tests.support.waiting import until
from tests.support.workers import clean_environment

pytestmark = [pytest.mark.slow, pytest.mark.one_server]

RUN = {d: [block for block in blocks(d) if block.runs] for d in DOCUMENTS}
WITH_CODE = [d for d, found in RUN.items() if any(not block.has_tests for block in found)]
WITH_TESTS = [d for d, found in RUN.items() if any(block.has_tests for block in found)]
CURL = [
    block
    for document in DOCUMENTS
    for block in blocks(document)
    if block.run_by == "tests/integration/test_docs_code.py"
]


@pytest.fixture(scope="module")
def tiny(server_binary: str) -> Iterator[lmpool.EmbeddedLM]:
    pytest.importorskip("transformers")
    with lmpool.embedded("tiny", engine="hf", pool=EXAMPLE_POOL) as lm:
        yield lm


@pytest.fixture(scope="module")
def gateway(tiny: lmpool.EmbeddedLM) -> Iterator[str]:
    with GatewayProcess(tiny.url, tiny.pool) as running:
        until(lambda: _ready(running.base_url), 120, what="the gateway to be ready")
        yield running.base_url


def _ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/ready", timeout=60):
            return True
    except urllib.error.HTTPError as error:
        error.close()  # it is an answer, too
        return False
    except OSError:
        return False


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**clean_environment(), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_every_pages_python_runs(tiny: lmpool.EmbeddedLM, gateway: str, tmp_path: Path) -> None:
    command = ("-m", "tests.support.run_blocks", *(str(document) for document in WITH_CODE))
    said = run(tmp_path, *command, "--url", tiny.url, "--gateway", gateway)
    ran = [line.removeprefix("--- ") for line in said.splitlines() if line.startswith("--- ")]
    assert ran == [b.place for d in WITH_CODE for b in RUN[d] if not b.has_tests]


@pytest.mark.parametrize("document", WITH_TESTS, ids=name_of)
def test_a_pages_tests_pass(document: Path, tmp_path: Path) -> None:
    texts = [block.body for block in RUN[document] if block.has_tests]
    (tmp_path / "test_page.py").write_text("\n\n".join(texts))
    options = ("-q", "-p", "no:cacheprovider", "-p", "lmpool.testing.plugin")
    said = run(tmp_path, "-m", "pytest", *options)
    assert f"{sum(text.count('def test_') for text in texts)} passed" in said


@pytest.mark.parametrize("block", CURL, ids=lambda block: block.place)
def test_curl_is_answered(block: Block, gateway: str) -> None:
    """docs/gateway.md."""
    for line in command_lines(block.body):
        for address in EXAMPLE_GATEWAYS:
            line = line.replace(address, gateway)
        with urllib.request.urlopen(_request(shlex.split(line)), timeout=120) as answer:
            assert answer.status == 200
            assert answer.read()


def _request(words: list[str]) -> urllib.request.Request:
    """What curl would send."""
    assert words[0] == "curl"
    address, data = "", None
    headers: dict[str, str] = {}
    rest = iter(words[1:])
    for word in rest:
        if word == "-H":
            name, _, value = next(rest).partition(": ")
            headers[name] = value
        elif word == "-d":
            data = next(rest).encode()
        elif word in {"-s", "-N"}:
            pass
        else:
            assert word.startswith("http"), f"curl {word} is not known here"
            address = word
    return urllib.request.Request(address, data, headers)
