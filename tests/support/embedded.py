"""What embedded pools leave, and programs in place of theirs."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmpool.producer.embedded import EmbeddedLM
from tests.support.processes import users_of
from tests.support.waiting import until

MOCK: dict[str, Any] = {"engine": "mock", "framework": "numpy"}


def assert_nothing_left(folder: Path) -> None:
    """Neither a process that knows the folder, nor anything of a pool in it."""
    until(lambda: not users_of(folder), what=f"nobody to use {folder}", every=0.05)
    # torch leaves a folder of its own.
    until(lambda: not list(folder.glob("lmpool*")), what=f"{folder} to be empty")


def processes(lm: EmbeddedLM) -> set[int]:
    """Every process of the pool: reaper, server, launcher, workers."""
    workers = {worker["pid"] for worker in lm.pool_statistics_sync()["workers"]}
    return {*lm.processes().values(), *workers}


@contextmanager
def instead_of_arq(folder: Path, program: str) -> Iterator[None]:
    """Let workers run `program`."""
    package = folder.parent / f"{folder.name}-arq" / "arq"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(textwrap.dedent(program))
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        try:
            yield
        finally:
            subprocess.run(["rm", "-r", str(package.parent)], check=True)


def program(path: Path, version: str) -> Path:
    """A server's program that says nothing but its version."""
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return path
