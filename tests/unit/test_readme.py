"""The README is short, and shows the same on GitHub and on PyPI."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lmpool.cli import app
from tests.support.markdown import ROOT, anchors
from tests.support.readme import README, SECTIONS, section

TEXT = README.read_text("utf-8")
BLOB = "https://github.com/lmpool/lmpool/blob/main/"
RAW = "https://raw.githubusercontent.com/lmpool/lmpool/main/"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^()\s]+)\)")


@pytest.mark.parametrize(
    ("page", "name", "made"),
    SECTIONS,
    ids=[f"{page.stem}-{name}" for page, name, _ in SECTIONS],
)
def test_parts_are_those_of_the_code(page: Path, name: str, made: Callable[[], str]) -> None:
    assert section(page.read_text("utf-8"), name) == made(), "python -m tests.support.readme"


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 210, "what is reference belongs into docs/"


def test_every_link_leads_somewhere_from_pypi_too() -> None:
    # Which shows this text alone: what is relative leads nowhere there.
    found = LINK.findall(TEXT)
    assert len(found) > 20
    for image, _, target in found:
        start = RAW if image else BLOB
        if not image and not target.startswith("https://github.com/lmpool/"):
            assert re.match(r"https?://", target), f"{target}: write {BLOB}..."
            continue
        assert target.startswith(start), f"{target}: write {start}..."
        path, _, heading = target.removeprefix(start).partition("#")
        assert (ROOT / path).is_file(), target
        assert not heading or heading in anchors((ROOT / path).read_text("utf-8")), target


def test_its_drawings_need_nothing_else() -> None:
    # A server of pictures may show a drawing, and lets it load and run nothing.
    pictures = [ROOT / t.removeprefix(RAW) for image, _, t in LINK.findall(TEXT) if image]
    assert pictures
    for picture in pictures:
        if picture.suffix == ".svg":
            drawing = picture.read_text("utf-8")
            assert drawing.startswith("<svg ")
            assert not re.search(r"<script|<foreignObject|href=|@import|url\((?!#)", drawing)


def test_commands_exist() -> None:
    import typer

    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"^lmpool (\w+)", TEXT, re.MULTILINE))
    assert named
    assert named <= known


def test_make_targets_exist() -> None:
    makefile = (README.parent / "Makefile").read_text("utf-8")
    for target in set(re.findall(r"`?make ([a-z-]+)", TEXT)):
        pattern = re.sub(r"^(test|bench)-(clients|genlm|mlx|sglang|vllm)$", r"\1-%", target)
        assert re.search(rf"^{pattern}:", makefile, re.MULTILINE), target
