"""What is refused before a server is asked, whatever else is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmpool.cli import app

NOWHERE = ["--url", "redis://127.0.0.1:1/0"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["generate", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["generate", "x", "--temperature", "nan"], "temperature=nan"),
        (["generate", "x", "--top-p", "1.5"], "top_p=1.5"),
        (["generate", "x", "--top-k", "-3"], "top_k=-3"),
        (["generate", "x", "--min-p", "2"], "min_p=2.0"),
        (["generate", "x", "--max-tokens", str(1 << 40)], f"max_tokens={1 << 40}"),
        (["generate", "x", "--stop", ""], "--stop ''"),
        (["score", "FILE", "--window", "1"], "--window"),
        (["score", "FILE", "--stride", "0"], "--stride"),
        (["dead", "show"], "name entries"),
        (["dead", "drop"], "name entries"),
        (["dead", "retry", "1-1", "--all"], "name entries"),
    ],
    ids=str,
)
def test_no_server_is_asked_where_the_options_cannot_be(
    command: list[str], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "text"
    file.write_text("one two three")
    words = [str(file) if word == "FILE" else word for word in command]
    found = CliRunner().invoke(app, [*words, *NOWHERE])
    assert found.exit_code == 2
    assert said in found.output
    assert "127.0.0.1" not in found.output
