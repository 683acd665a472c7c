"""Every code block of the documents is run, checked, or says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.code_blocks import DOCUMENTS, Block, blocks, name_of, problems
from tests.support.markdown import ROOT

BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]
FENCE = "```"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_block_is_run_or_checked_or_says_why_not(document: Path) -> None:
    found = [f"{b.place}: {problem}" for b in blocks(document) for problem in problems(b)]
    assert not found, "\n".join(found)


def test_every_fence_is_read() -> None:
    fences = sum(d.read_text("utf-8").count(f"\n{FENCE}") for d in DOCUMENTS)
    assert len(BLOCKS) * 2 == fences
    assert sum(block.runs for block in BLOCKS) >= 15


def test_most_python_runs() -> None:
    python = [block for block in BLOCKS if block.language == "python"]
    idle = [block.place for block in python if block.not_run is not None]
    assert len(idle) * 3 <= len(python), idle


# --- what finds it -----------------------------------------------------------------------------


def one(text: str) -> Block:
    (block,) = blocks(ROOT / "docs" / "engines.md", text)
    return block


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("docker compose up", "neither run nor checked"),
        ("curl http://localhost:8000/health", "neither run nor checked"),
        ("lmpool nothing", "No such command"),
        ("lmpool stats --wach", "--wach"),
        ("lmpool dead revive 1-0", "No such command"),
        ("lmpool worker --gpus", "--gpus"),
        ("LMPOOL_MODLE=tiny lmpool worker", "LMPOOL_MODLE"),
        ("export LMPOOL_URL=redis://a/0 LMPOOL_POL=b", "LMPOOL_POL"),
        ("make tests", "no such target"),
        ("pip install 'lmpool[hff]'", "no extra hff"),
        ("python -m lmpool.integrations.none", "no such module"),
        ("python examples/none.py", "no such file"),
        ("pytest --pyargs lmpool.backends.contract --engin x", "--engin"),
        ("lmpool ping | grep alive", "neither run nor checked"),
        ("lmpool score 'half", "No closing quotation"),
    ],
)
def test_a_wrong_command_line_is_found(text: str, problem: str) -> None:
    found = problems(one(f"{FENCE}\n{text}\n{FENCE}\n"))
    assert any(problem in each for each in found), found


@pytest.mark.parametrize(
    ("language", "text", "problem"),
    [
        ("js", "let a = 1", "nothing runs a block of 'js'"),
        ("python", "def x(:", "SyntaxError"),
        ("toml", "batch_sizes = 3", "no setting"),
        ("toml", "[gateway]\nprot = 3", "prot"),
        ("toml", "batch_size = 'many'", "batch_size"),
        ("yaml", "a: [", "Error"),
        ("json", "{", "Error"),
        ("text", "$ docker compose up", "is a command"),
        ("dockerfile", "FROM scratch", "nothing runs a block"),
    ],
)
def test_a_block_that_nothing_runs_is_found(language: str, text: str, problem: str) -> None:
    found = problems(one(f"{FENCE}{language}\n{text}\n{FENCE}\n"))
    assert any(problem in each for each in found), found
    assert not problems(
        one(f"<!-- not run: needs a cluster -->\n\n{FENCE}{language}\n{text}\n{FENCE}")
    )


@pytest.mark.parametrize(
    "text",
    [
        "lmpool --version && lmpool stats --help",
        "lmpool worker --gpus 0,1 --engine-opts '{}'  # a comment",
        "lmpool gateway-key alice >> keys",
        "$ export LMPOOL_URL=redis://server:6379/0",
        "make test-genlm",
        "python -m tests.chaos",
        "lmpool plan \\\n    --prompt-rate 3",
    ],
)
def test_a_right_command_line_is_none(text: str) -> None:
    assert problems(one(f"{FENCE}\n{text}\n{FENCE}\n")) == []


def test_a_mark_gives_a_reason_and_a_test_that_is_there() -> None:
    fence = f"{FENCE}js\nx\n{FENCE}\n"
    assert problems(one(f"<!-- not run: no -->\n{fence}"))
    assert problems(one(f"<!-- not run: -->\n{fence}"))
    assert problems(one(f"<!-- run by tests/unit/test_none.py -->\n{fence}"))
    assert problems(one(f"<!-- run by tests/unit/test_keys.py -->\n{fence}")), "it names no page"
    assert problems(one(f"<!-- not run: this is another paragraph's -->\n\nText.\n\n{fence}"))
    run = "tests/integration/test_engine_of_another_package.py"
    assert not problems(one(f"<!-- run by {run} -->\n\n<!-- x.py -->\n\n{fence}"))


def test_blocks_know_their_place() -> None:
    first, second = blocks(
        ROOT / "README.md",
        f"# A\n\n{FENCE}\nmake test\n{FENCE}\n\n- b\n\n    {FENCE}python\n    x = 1\n    {FENCE}\n",
    )
    assert (first.place, first.language, first.runs) == ("README.md:3", "", False)
    assert (second.place, second.body, second.runs) == ("README.md:9", "x = 1\n", True)
