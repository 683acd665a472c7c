"""The examples, as their own words say to run them, and that what they compute is right."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import lmpool
from lmpool.backends.engine import Outcome, Request
from lmpool.backends.mock import MockEngine, mock_row
from tests.support.clients import connected
from tests.support.waiting import until
from tests.support.workers import clean_environment, in_process_worker

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.joinpath("examples").glob("*.py"))
SAYS = {
    "classify": ["'Return a list of' goes on with ' the' ("],
    "multiple_choice": ["the likeliest is KeyError.", "by the byte it is"],
    "perplexity": ["tokens  perplexity.py"],
    "constrained": ["%  The method returns None.", "%  The method returns a list."],
    "distill": ["part-00000.npz", "part-00001.npz", "positions, 20 tokens each"],
    "rerank": ["the likeliest of ", "most of the prompt's: If the file does not exist,"],
}
"""What each prints, besides."""


def imported(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_on_the_tiny_model(example: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, str(example)],
        cwd=tmp_path,
        env={**clean_environment(), "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    for said in SAYS[example.stem]:
        assert said in done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_readme_links_it(example: Path) -> None:
    assert f"examples/{example.name}" in (ROOT / "README.md").read_text("utf-8")


def test_the_classifiers_shares_are_those_of_the_rows(server_url: str, pool_name: str) -> None:
    classify = imported("classify").classify
    with in_process_worker(server_url, pool_name), connected(server_url, pool_name) as lm:
        found = classify(lm.sync, ["ab", "abc"], ["x", "y"])
    for text, shares in zip((b"ab", b"abc"), found, strict=True):
        two = np.exp(mock_row([*text], 256)[[ord("x"), ord("y")]])
        np.testing.assert_allclose(shares, two / two.sum(), rtol=1e-5)


def test_choices_are_judged_by_the_rows_before_their_tokens(
    server_url: str, pool_name: str
) -> None:
    judge = imported("multiple_choice").judge
    with in_process_worker(server_url, pool_name), connected(server_url, pool_name) as lm:
        found = judge(lm.sync, "ab", ["c", "xyz"])
    for answer, text in zip(found, (b"abc", b"abxyz"), strict=True):
        exact = sum(float(mock_row([*text[:n]], 256)[text[n]]) for n in range(2, len(text)))
        assert answer.logprob == pytest.approx(exact, abs=1e-4)
        assert answer.by_byte == pytest.approx(exact / (len(text) - 2), abs=1e-4)


def test_a_perplexity_is_that_of_the_rows(server_url: str, pool_name: str) -> None:
    tokens = [n * 7 % 250 for n in range(40)]
    with in_process_worker(server_url, pool_name), connected(server_url, pool_name) as lm:
        found = imported("perplexity").perplexity(lm.sync, tokens, 100, 50)
    exact = [float(mock_row(tokens[:n], 256)[tokens[n]]) for n in range(1, 40)]
    assert found == pytest.approx(np.exp(-np.mean(exact)), rel=1e-4)


@pytest.mark.one_server
def test_weighted_draws_follow_the_models_distribution(server_url: str, pool_name: str) -> None:
    example = imported("constrained")
    texts = [(1, 2), (1, 3), (2, 2, 2), (250,)]
    with in_process_worker(server_url, pool_name):

        async def ask() -> dict[tuple[int, ...], float]:
            async with lmpool.connect(server_url, pool_name, framework="numpy") as lm:
                grammar = example.Grammar(texts)
                found = await example.sample(lm, [7], grammar, 3_000, 5)
                shares: dict[tuple[int, ...], float] = example.estimate(found)
                return shares

        found = asyncio.run(ask())
    exact = {
        text: float(sum(mock_row([7, *text[:n]], 256)[text[n]] for n in range(len(text))))
        for text in texts
    }
    total = sum(np.exp(list(exact.values())))
    assert found.keys() == exact.keys()
    for text, logprob in exact.items():
        assert found[text] == pytest.approx(np.exp(logprob) / total, abs=0.04)


def text_file(folder: Path, lines: int) -> Path:
    path = folder / "texts.txt"
    path.write_text("\n".join(f"text {number}" for number in range(lines)) + "\n\nx\n")
    return path


def parts(folder: Path) -> dict[str, tuple[int, dict[str, np.ndarray]]]:
    """When each part was written, and what it has."""
    found = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as content:
            found[path.name] = path.stat().st_mtime_ns, dict(content)
    return found


@pytest.mark.one_server
def test_distilled_parts_go_on_where_a_kill_has_left_them(
    server_url: str,
    pool_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    command = [str(ROOT / "examples/distill.py"), str(text_file(tmp_path, 60)), "--part", "8"]
    command += ["--out", str(out), "--url", server_url, "--pool", pool_name]
    environment = {**clean_environment(), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    killed, compute = threading.Event(), MockEngine.compute

    def compute_some(engine: MockEngine, requests: Sequence[Request]) -> Iterable[Outcome]:
        """What was asked before there were two parts: no more than six of them."""
        if len(list(out.glob("*.npz"))) >= 2:
            killed.wait(150)
        return compute(engine, requests)

    monkeypatch.setattr(MockEngine, "compute", compute_some)
    with in_process_worker(server_url, pool_name, batch_size=8):
        first = [sys.executable, *command, "-k", "3"]
        with subprocess.Popen(first, env=environment, stdout=subprocess.DEVNULL) as running:
            until(lambda: len(parts(out)) >= 2, 120.0)
            running.kill()
        killed.set()
        before = parts(out)
        assert 2 <= len(before) < 8
        (out / "part-00007.writing").write_bytes(b"half a pa")
        again = imported("distill").main
        monkeypatch.setattr(sys, "argv", [*command, "-k", "3"])
        again()
        monkeypatch.setattr(sys, "argv", [*command, "-k", "4"])
        with pytest.raises(SystemExit, match="name another --out"):
            again()
    after = parts(out)
    assert len(after) == 8
    assert [after[name][0] for name in before] == [when for when, _ in before.values()]
    assert capsys.readouterr().out.count(".npz") == 8 - len(before)
    number = 0
    for _, part in after.values():
        answered = 0
        for begin, end in itertools.pairwise(part["offsets"]):
            tokens = part["tokens"][begin:end].tolist()
            assert bytes(tokens) == f"text {number}".encode()
            for at in range(1, len(tokens)):
                row = mock_row(tokens[:at], 256)
                best = np.argsort(-row, kind="stable")[:3]
                assert part["top_ids"][answered].tolist() == best.tolist()
                np.testing.assert_allclose(part["top_logprobs"][answered], row[best], atol=1e-4)
                rest = np.log1p(-np.exp(row[best]).sum())
                assert part["rest"][answered] == pytest.approx(rest, abs=1e-4)
                answered += 1
            number += 1
        assert answered == len(part["rest"])
    assert number == 60


def test_drafts_are_ranked_by_the_rows(server_url: str, pool_name: str) -> None:
    example = imported("rerank")
    with in_process_worker(server_url, pool_name):

        async def ask() -> list[tuple[tuple[int, ...], float, float]]:
            async with lmpool.connect(server_url, pool_name, framework="numpy") as lm:
                drafts = await example.sample(lm, [0, 7, 8], 6, 5, 1.0, 1)
                assert len(set(drafts)) == len(drafts) > 1
                found = await example.judge(lm, [0, 7, 8], drafts)
                return [(each.tokens, each.likely, each.from_prompt) for each in found]

        found = asyncio.run(ask())

    def total(prompt: list[int], tokens: tuple[int, ...]) -> float:
        rows = (mock_row([*prompt, *tokens[:n]], 256)[tokens[n]] for n in range(len(tokens)))
        return float(sum(rows))

    for tokens, likely, from_prompt in found:
        given, alone = total([0, 7, 8], tokens), total([0], tokens)
        assert likely == pytest.approx(given / len(tokens), abs=1e-4)
        assert from_prompt == pytest.approx((given - alone) / len(tokens), abs=1e-4)
    assert [likely for _, likely, _ in found] == sorted((each[1] for each in found), reverse=True)
