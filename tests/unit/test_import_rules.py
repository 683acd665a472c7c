"""What may import what: the arrows of docs/architecture.md, over every import in the tree.

Imports inside functions count as well, and those for type checkers alone: both are knowledge of
another part. A worker that is started as a process is named by a string, and not imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "lmpool": "lmpool",
    "producer": "lmpool.producer",
    "worker": "lmpool.worker",
    "backends": "lmpool.backends",
}
DOORS = {"cli", "gateway", "testing", "integrations"}

ON_THE_CLIENT = {
    "benchmark",
    "dead_letters",
    "engine_check",
    "exporter",
    "inspection",
    "long_texts",
    "pool_view",
    "prompt_text",
}
"""Modules of lmpool's own folder that are functions of a client, for users and commands alike."""

MAY_IMPORT = {
    "core": {"core"},
    "producer": {"producer", "core"},
    "backends": {"backends", "core"},
    "worker": {"worker", "backends", "core"},
    "client functions": {"client functions", "face", "producer", "core"},
    "face": {"producer", "core"},
    **{door: {door, "client functions", "face", "producer", "core"} for door in DOORS},
}
"""From part to part. Whatever is no folder of its own is core; the face is lmpool/__init__.py."""

SHARED = "what engines share"

EXCEPTIONS = {
    # `python -m lmpool` is the command line.
    ("lmpool.__main__", "cli"),
    # `lmpool worker` is the launcher: its own process starts the workers'.
    ("lmpool.cli.worker", "worker"),
    # `lmpool gateway` is the gateway, and `lmpool gateway-key` makes its keys.
    ("lmpool.cli.gateway", "gateway"),
    # `lmpool page` is the gateway's live page alone.
    ("lmpool.cli.page", "gateway"),
    # `lmpool doctor --engines` asks which engines are installed here.
    ("lmpool.cli.doctor", "backends"),
    # A pool that a test sets the answers of has its worker and its engine in the test's process.
    ("lmpool.testing.worker", "worker"),
    ("lmpool.testing.worker", "backends"),
    ("lmpool.testing.engine", "backends"),
    # The name "tiny" stands for the files of the model that lmpool brings.
    ("lmpool.backends.model_files", "tiny"),
    # The path by which others import the capture of rows in vLLM.
    ("lmpool.backends.vllm_capture", "vllm"),
}
"""Modules that may import one part, or one engine's folder, more."""


@dataclass(frozen=True)
class Import:
    """One module or name that a file asks for."""

    file: str
    line: int
    importer: str
    target: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.importer} imports {self.target}"


class Tree:
    """The modules of a checkout, and what each imports."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = dict(self._find())
        self.packages = {name for name, path in self._files.items() if path.stem == "__init__"}

    def _find(self) -> Iterator[tuple[str, Path]]:
        for folder, package in FOLDERS.items():
            for path in sorted((self._root / folder).rglob("*.py")):
                parts = path.relative_to(self._root / folder).with_suffix("").parts
                if folder == "lmpool" and parts[0] in FOLDERS:
                    continue  # the link to another folder
                if parts[-1] == "__init__":
                    parts = parts[:-1]
                yield ".".join((package, *parts)), path

    def imports(self) -> Iterator[Import]:
        """Every import of a module of lmpool's."""
        for importer, path in self._files.items():
            file = path.relative_to(self._root).as_posix()
            for node in ast.walk(ast.parse(path.read_text("utf-8"), file)):
                if isinstance(node, ast.Import):
                    targets = [name.name for name in node.names]
                elif isinstance(node, ast.ImportFrom):
                    assert node.level == 0, f"{file}:{node.lineno}: a relative import"
                    targets = [self._named(node.module or "", name.name) for name in node.names]
                else:
                    continue
                for target in targets:
                    if target.partition(".")[0] == "lmpool":
                        yield Import(file, node.lineno, importer, target)

    def _named(self, module: str, name: str) -> str:
        """What ``from module import name`` asks for: a module of that name, or the one it is in."""
        return f"{module}.{name}" if f"{module}.{name}" in self._files else module

    def part(self, module: str) -> str:
        """The part that a module belongs to."""
        first = module.split(".")[1:2]
        if not first:
            return "face"
        if first[0] in {"producer", "worker", "backends"} | DOORS:
            return first[0]
        return "client functions" if first[0] in ON_THE_CLIENT else "core"

    def engine(self, module: str) -> str | None:
        """The engine's folder that a module of the backends is in, or that it is shared."""
        parts = module.split(".")
        if parts[:2] != ["lmpool", "backends"] or len(parts) == 2:
            return None
        return parts[2] if ".".join(parts[:3]) in self.packages else SHARED


def against(tree: Tree, each: Import) -> str | None:
    """The part, or the engine's folder, that this module is not to know; None if it may."""
    part = tree.part(each.target)
    if part not in MAY_IMPORT[tree.part(each.importer)]:
        return part
    importer, target = tree.engine(each.importer), tree.engine(each.target)
    return target if importer and target not in {None, SHARED, importer} else None


def offences(root: Path) -> list[str]:
    """Imports that go against an arrow, each as ``file:line: who imports what``."""
    tree = Tree(root)
    found = ((each, against(tree, each)) for each in tree.imports())
    said = [str(each) for each, to in found if to and (each.importer, to) not in EXCEPTIONS]
    return list(dict.fromkeys(said))


def test_every_import_goes_along_the_arrows() -> None:
    assert offences(ROOT) == []


def test_every_exception_is_needed() -> None:
    tree = Tree(ROOT)
    assert {(each.importer, against(tree, each)) for each in tree.imports()} >= EXCEPTIONS


GOOD = {
    "lmpool/__init__.py": "from lmpool.producer import PooledLM",
    "lmpool/__main__.py": "from lmpool.cli import app",
    "lmpool/keys.py": "import redis",
    "lmpool/inspection.py": "from lmpool.producer import PooledLM",
    "lmpool/cli/__init__.py": "import lmpool\nfrom lmpool import inspection, keys",
    "lmpool/gateway/__init__.py": "from lmpool.producer import PooledLM",
    "producer/__init__.py": "from lmpool.producer.client import PooledLM",
    "producer/client.py": 'from lmpool.keys import GROUP\nWORKER = "lmpool.worker"',
    "worker/__init__.py": "from lmpool.backends import load_engine\nfrom lmpool import keys",
    "backends/__init__.py": "",
    "backends/engine.py": "from lmpool.keys import GROUP",
    "backends/hf/__init__.py": "from lmpool.backends.hf.model import Model",
    "backends/hf/model.py": "from lmpool.backends.engine import Engine",
    "backends/vllm/__init__.py": "from lmpool.backends import engine",
}


def made_up(root: Path, changed: dict[str, str]) -> Path:
    """A checkout of the shape of lmpool's, and what is different in it."""
    for name, text in {**GOOD, **changed}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_a_tree_in_order_has_no_offence(tmp_path: Path) -> None:
    assert offences(made_up(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("file", "text", "line", "target"),
    [
        ("lmpool/keys.py", "import redis\n\nimport lmpool.producer", 3, "lmpool.producer"),
        ("lmpool/keys.py", "from lmpool import connect", 1, "lmpool"),
        ("lmpool/keys.py", "from lmpool.inspection import stats", 1, "lmpool.inspection"),
        ("producer/client.py", "def f():\n    from lmpool import worker", 2, "lmpool.worker"),
        ("producer/client.py", "from lmpool.backends import engine", 1, "lmpool.backends.engine"),
        ("producer/client.py", "from lmpool import inspection", 1, "lmpool.inspection"),
        ("worker/service.py", "from lmpool.producer import client", 1, "lmpool.producer.client"),
        ("worker/service.py", "import lmpool.cli as cli", 1, "lmpool.cli"),
        ("backends/engine.py", "from lmpool.worker import service", 1, "lmpool.worker"),
        ("backends/engine.py", "from lmpool.backends import hf", 1, "lmpool.backends.hf"),
        ("backends/hf/model.py", "from lmpool.backends.vllm import x", 1, "lmpool.backends.vllm"),
        ("lmpool/cli/main.py", "from lmpool.worker import Settings", 1, "lmpool.worker"),
        ("lmpool/gateway/page.py", "from lmpool import cli", 1, "lmpool.cli"),
    ],
)
def test_an_import_against_an_arrow_is_found(
    tmp_path: Path, file: str, text: str, line: int, target: str
) -> None:
    (offence,) = offences(made_up(tmp_path, {file: text}))
    assert offence.startswith(f"{file}:{line}: lmpool.")
    assert offence.endswith(f" imports {target}")
