"""``lmpool score``, as those who type it see it."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from lmpool.backends.mock import MockEngine, mock_row
from lmpool.cli import app
from lmpool.errors import PromptError
from lmpool.long_texts import score_long_text
from tests.support.clients import connected
from tests.support.workers import clean_environment, in_process_worker

TEXT = b"abcd\nefgh"


def score(*arguments: str, given: bytes | None = None, **environment: str) -> Result:
    """Run it in this process."""
    return CliRunner(env=environment).invoke(app, ["score", *arguments], input=given)


@pytest.fixture
def served(server_url: str, pool_name: str) -> Iterator[list[str]]:
    """The options that name a pool with one worker, which takes up to 6 tokens."""
    with in_process_worker(server_url, pool_name, max_prompt_tokens=6):
        yield ["--url", server_url, "--pool", pool_name]


def exact(text: bytes, window: int, stride: int) -> list[float]:
    """Log-probabilities by windows: each token given those of its window before it."""
    found: list[float] = []
    for end in range(1, len(text)):
        last = window if end < window else window + -(-(end + 1 - window) // stride) * stride
        begin = max(0, min(last, len(text)) - window)
        found.append(float(mock_row([*text[begin:end]], 256)[text[end]]))
    return found


def test_json_has_every_token_of_a_text_longer_than_prompts(
    served: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT)
    for options, sizes in (([], (7, 3)), (["--window", "4", "--stride", "1"], (4, 1))):
        shown = score(str(tmp_path / "a.txt"), "--json", "--top", "2", *options, *served)
        assert shown.exit_code == 0, shown.output
        found = json.loads(shown.stdout)
        logprobs = [each["logprob"] for each in found["tokens"]]
        assert logprobs[0] is None
        np.testing.assert_allclose(logprobs[1:], exact(TEXT, *sizes), atol=1e-4)
        assert "".join(each["token"] for each in found["tokens"]) == TEXT.decode()
        assert [len(each["top"]) for each in found["tokens"][1:]] == [2] * 8
        mean = np.mean(logprobs[1:])
        assert found["perplexity"] == pytest.approx(math.exp(-mean), rel=1e-4)
        assert found["scored"] == 8


@pytest.mark.parametrize(
    "environment",
    [{}, {"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": "1"}],
    ids=["no terminal", "no colour"],
)
def test_without_colours_there_is_a_line_a_token(
    served: list[str], environment: dict[str, str]
) -> None:
    shown = score("-", *served, given=TEXT, **environment)
    assert shown.exit_code == 0, shown.output
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout)
    title, head, *lines, summary = plain.splitlines()
    assert title.endswith("9 tokens")
    assert head.split() == ["bits", "rank", "token"]
    assert [line.split()[-1] for line in lines] == ["a", "b", "c", "d", "⏎", "e", "f", "g", "h"]
    bits = [float(line.split()[0]) for line in lines[1:]]
    np.testing.assert_allclose(bits, -np.array(exact(TEXT, 7, 3)) / math.log(2), atol=0.06)
    assert summary.startswith("8 tokens scored: perplexity")


def test_in_colours_the_text_stands_as_it_is(served: list[str]) -> None:
    shown = score("-", *served, given=TEXT, FORCE_COLOR="1", COLORTERM="truecolor")
    assert shown.exit_code == 0, shown.output
    assert "\x1b[" in shown.stdout
    assert "bits of surprise" in shown.stdout


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty: there is nothing to score"),
    "a mark alone": (b"\xef\xbb\xbf", "is empty: there is nothing to score"),
    "a mark, not UTF-8": (b"\xef\xbb\xbfabc\xff", "is no text in UTF-8: byte 0xff at 6"),
    "not UTF-8": (b"abc\xff\xfe", "is no text in UTF-8: byte 0xff at 3"),
    "binary": (b"\x7fELF\x00\x01", "is no text: a zero byte at 4"),
    "one token": (b"a", "a text of 1 tokens: nothing stands before the first"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_text_is_refused(served: list[str], tmp_path: Path, name: str) -> None:
    content, said = BAD[name]
    path = tmp_path / "file"
    path.write_bytes(content)
    for shown in (score(str(path), *served), score("-", *served, given=content)):
        assert shown.exit_code == 2
        assert said in shown.output
        assert len(shown.output.splitlines()) == 1


def test_a_byte_order_mark_is_none_of_the_text(served: list[str], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT)
    plain = json.loads(score("-", "--json", *served, given=TEXT).stdout)
    for shown in (
        score(str(path), "--json", *served),
        score("-", "--json", *served, given=path.read_bytes()),
    ):
        assert json.loads(shown.stdout) == plain
    path.write_bytes(TEXT + b"\xef\xbb\xbf")  # elsewhere it is a character like others
    assert json.loads(score(str(path), "--json", *served).stdout) != plain


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    assert "No such file" in score(str(tmp_path / "none")).output
    assert "Is a directory" in score(str(tmp_path)).output


def test_a_pool_without_a_vocabulary_says_so(
    server_url: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MockEngine, "byte_vocabulary", lambda engine: None)
    with in_process_worker(server_url, pool_name):
        shown = score("-", "--url", server_url, "--pool", pool_name, given=TEXT)
    assert shown.exit_code == 2
    assert "has published no vocabulary" in shown.output


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"window": 1}, "window=1: write an integer from 2 to 7"),
        ({"window": 8}, "window=8: write an integer from 2 to 7"),
        ({"window": 4, "stride": 4}, "stride=4: write an integer from 1 to 3"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    served: list[str], sizes: dict[str, int], said: str
) -> None:
    with connected(served[1], served[3]) as lm, pytest.raises(PromptError, match=said):
        score_long_text(lm.sync, [1, 2, 3], **sizes)


def test_an_adapter_that_is_none_is_refused(served: list[str]) -> None:
    shown = score("-", "--adapter", "nobody", *served, given=TEXT)
    assert shown.exit_code == 2
    assert "nobody" in shown.output


def test_a_process_of_its_own_prints_nothing_else(served: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT)
    done = subprocess.run(
        [sys.executable, "-m", "lmpool", "score", str(tmp_path / "a.txt"), "--json", *served],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=150,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["scored"] == 8
