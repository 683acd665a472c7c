"""What is said on a stderr that may take nothing."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

import lmpool
from lmpool.stderr import say


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, os.strerror(28))


def test_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    say("a")
    say("b", end="")
    assert capsys.readouterr() == ("", "a\nb")


@pytest.mark.parametrize("kind", ["none", "closed", "full"])
def test_what_takes_nothing_is_no_error(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", {"none": None, "closed": closed, "full": Full()}[kind])
    say("a")
    assert capsys.readouterr().out == ""


def test_nothing_else_says_anything_there() -> None:
    """What does would say it on stdout, or fail, where there is no stderr."""
    here = Path(lmpool.__file__).parent
    folders = (here, here / "worker", here / "producer", here / "backends")  # some are links
    found = {
        file.resolve()
        for folder in folders
        for file in folder.resolve().rglob("*.py")
        if "sys.stderr" in file.read_text("utf-8")
    }
    assert found == {(here / "stderr.py").resolve()}
