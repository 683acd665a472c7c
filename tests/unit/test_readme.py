"""The README says what the code does."""

from __future__ import annotations

import ast
import re

from lmpool.cli import app
from tests.support.readme import README, section, settings_table

TEXT = README.read_text("utf-8")


def test_settings_are_those_of_the_code() -> None:
    assert section(TEXT, "settings") == settings_table(), "python -m tests.support.readme"


def test_python_examples_are_python() -> None:
    examples = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(examples) >= 2
    for example in examples:
        ast.parse(example)


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
