"""The code blocks of the documents: which are run, which are checked, and which say why not.

A fence that nothing runs or checks has a comment before it, which no reader sees::

    <!-- not run: needs a GPU -->

or, where a test of its own runs it, ``<!-- run by tests/integration/test_wheel.py -->``. Whatever
else stands in a fence is run or checked by its language: Python runs on a pool of the tiny model
(`tests.support.run_blocks`), tests in it by pytest, and command lines are read as the programs
that they name would read them.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from lmpool.errors import SettingsError
from lmpool.settings import ClientOptions, GatewaySettings, WorkerOptions, variable_of
from tests.support.markdown import ROOT, has_target, is_defined

DOCUMENTS: Final = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

SHELL: Final = frozenset({"", "bash", "console", "sh", "shell"})
OUTPUT: Final = "text"
"""What programs print."""
REASON_WORDS: Final = 3
OTHER_VARIABLES: Final = frozenset(
    {"LMPOOL_CONFIG", "LMPOOL_CONTROL_URL", "LMPOOL_TEST_SERVER", "OTEL_EXPORTER_OTLP_ENDPOINT"}
)
"""What documents set besides settings."""

_FENCE: Final = re.compile(r"^( *)(`{3,})([\w+-]*)[^\n]*\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_BEFORE: Final = re.compile(r"((?:<!-- (?:(?!-->).)* -->\s*)+)\Z", re.DOTALL)
_NOT_RUN: Final = re.compile(r"<!-- not run:(.*?)-->", re.DOTALL)
_RUN_BY: Final = re.compile(r"<!-- run by (\S+) -->")
_ASSIGNED: Final = re.compile(r"([A-Z][A-Z0-9_]*)=")


@dataclass(frozen=True, slots=True)
class Block:
    """A fence of a document."""

    document: Path
    line: int
    language: str
    body: str
    not_run: str | None
    """Why nothing runs it, where it says so."""
    run_by: str | None
    """The test that runs it, where it names one."""

    @property
    def place(self) -> str:
        """Where it is, as an editor opens it."""
        return f"{name_of(self.document)}:{self.line}"

    @property
    def has_tests(self) -> bool:
        """Whether it is tests, for pytest to run."""
        return re.search(r"^(async )?def test_", self.body, re.MULTILINE) is not None

    @property
    def runs(self) -> bool:
        """Whether `tests/integration/test_docs_code.py` runs it."""
        return self.language == "python" and self.not_run is None and self.run_by is None


def name_of(document: Path) -> str:
    """A document's path in the checkout."""
    return document.relative_to(ROOT).as_posix() if document.is_relative_to(ROOT) else str(document)


def blocks(document: Path, text: str | None = None) -> list[Block]:
    """The fences of a document, in their order."""
    text = document.read_text("utf-8") if text is None else text
    found = []
    for fence in _FENCE.finditer(text):
        before = _BEFORE.search(text[: fence.start()])
        said = before[1] if before is not None else ""
        reason, test = _NOT_RUN.search(said), _RUN_BY.search(said)
        indent = len(fence[1])
        found.append(
            Block(
                document,
                text.count("\n", 0, fence.start()) + 1,
                fence[3],
                re.sub(rf"^ {{1,{indent}}}", "", fence[4], flags=re.MULTILINE)
                if indent
                else fence[4],
                reason[1].strip() if reason is not None else None,
                test[1] if test is not None else None,
            )
        )
    return found


def problems(block: Block) -> list[str]:
    """Why a block is neither run, nor checked, nor says why not; or what a check found."""
    if block.not_run is not None:
        enough = len(block.not_run.split()) >= REASON_WORDS
        return [] if enough else [f"why is it not run? {block.not_run!r} is no reason"]
    if block.run_by is not None:
        return list(_not_run_by(block))
    if block.language in SHELL:
        return [problem for line in command_lines(block.body) for problem in _command(line)]
    match block.language:
        case "python":
            return list(_unreadable(ast.parse, block.body))
        case "toml":
            return list(_toml(block.body))
        case "yaml":
            return list(_unreadable(lambda text: list(yaml.safe_load_all(text)), block.body))
        case "json":
            return list(_unreadable(json.loads, block.body))
        case "mermaid":
            return []  # which tests/unit/test_docs_site.py has drawn
        case language if language == OUTPUT:
            return [f"{line!r} is a command: no `text`" for line in _commands_in_text(block.body)]
        case _:
            return [f"nothing runs a block of {block.language!r}: say why, <!-- not run: ... -->"]


def _not_run_by(block: Block) -> Iterator[str]:
    test = ROOT / str(block.run_by)
    if not test.is_file():
        yield f"there is no {block.run_by}"
    elif name_of(block.document) not in test.read_text("utf-8"):
        yield f"{block.run_by} does not name {name_of(block.document)}"


def _unreadable(read: Any, text: str) -> Iterator[str]:
    try:
        read(text)
    except (SyntaxError, ValueError, yaml.YAMLError) as error:
        yield f"{type(error).__name__}: {error}"


def _toml(text: str) -> Iterator[str]:
    """Settings of ``lmpool.toml``, as it would be read."""
    unreadable = list(_unreadable(tomllib.loads, text))
    if unreadable:
        yield from unreadable
        return
    settings = tomllib.loads(text)
    gateway = settings.pop("gateway", {})
    known = {**ClientOptions.model_fields, **WorkerOptions.model_fields}
    yield from (f"{name} is no setting" for name in settings if name not in known)
    for kind, given in (
        (ClientOptions, settings),
        (WorkerOptions, settings),
        (GatewaySettings, gateway),
    ):
        whose = given if kind is GatewaySettings else given.keys() & kind.model_fields.keys()
        try:
            kind(**{name: given[name] for name in whose})
        except SettingsError as error:
            yield str(error)


# --- command lines -----------------------------------------------------------------------------


def command_lines(text: str) -> list[str]:
    """The commands of a block, without prompts, comments and continued lines."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = (re.sub(r"^\$ ", "", line.strip()) for line in joined.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _commands_in_text(text: str) -> list[str]:
    start = re.compile(r"(\$ |(pip|lmpool|make|curl|docker|kubectl|helm|export) [\w'-])")
    return [line for line in text.splitlines() if start.match(line)]


def _command(line: str) -> Iterator[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        yield f"{line!r}: {error}"
        return
    for command in _simple(words):
        while command and (command[0] == "export" or _ASSIGNED.match(command[0])):
            if command[0] != "export":
                yield from _variable(command[0])
            command = command[1:]
        if command:
            yield from _program(command, line)


def _simple(words: list[str]) -> Iterator[list[str]]:
    """The commands of a line, without what they are redirected to."""
    command: list[str] = []
    skip = False
    for word in words:
        if word in {"|", "&&", ";", "||", "&"}:
            yield command
            command = []
        elif word in {">", ">>", "<", "2>"}:
            skip = True
        elif skip:
            skip = False
        else:
            command.append(word)
    yield command


def _variable(assignment: str) -> Iterator[str]:
    name = assignment.partition("=")[0]
    if name.startswith("LMPOOL_") and name not in variables() | OTHER_VARIABLES:
        yield f"{name} is no variable that anything reads"


@cache
def variables() -> frozenset[str]:
    """Every setting's variable."""
    kinds = (ClientOptions, WorkerOptions, GatewaySettings)
    return frozenset(variable_of(kind, name) for kind in kinds for name in kind.model_fields)


def _program(words: list[str], line: str) -> Iterator[str]:
    program, *arguments = words
    match program:
        case "lmpool":
            yield from _lmpool(arguments)
        case "make":
            targets = [word for word in arguments if not _ASSIGNED.match(word)]
            yield from (f"make {each}: no such target" for each in targets if not has_target(each))
        case "pip":
            yield from _pip(arguments)
        case "python":
            yield from _python(arguments)
        case "pytest":
            yield from _pytest(arguments)
        case "arq":
            yield from (f"{a} is not there" for a in arguments if "." in a and not is_defined(a))
        case "cd" | "echo":
            pass
        case _ if program.startswith("deploy/"):
            if not os.access(ROOT / program, os.X_OK):
                yield f"{program} is no program of the checkout"
        case _:
            yield f"{line!r} is neither run nor checked: say why, <!-- not run: ... -->"


def _lmpool(arguments: list[str]) -> Iterator[str]:
    """What the command line itself says of it, which does nothing yet."""
    import typer

    from lmpool.cli import app

    try:
        command: Any = typer.main.get_command(app)
        context, name = None, "lmpool"
        while True:
            context = command.make_context(name, list(arguments), parent=context)
            if not hasattr(command, "resolve_command"):
                return
            rest = [*getattr(context, "_protected_args", []), *context.args]
            name, command, arguments = command.resolve_command(context, rest)
    except typer.Exit:
        return  # --help and --version
    except Exception as error:
        if type(error).__module__.split(".")[0] not in {"click", "typer", "lmpool"}:
            raise
        said = getattr(error, "format_message", None)
        yield f"lmpool {' '.join(arguments)}: {error if said is None else said()}"


def _pip(arguments: list[str]) -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    if arguments[:1] != ["install"]:
        yield f"pip {' '.join(arguments)} is not checked"
    for word in arguments[1:]:
        asked = re.fullmatch(r"lmpool\[([\w,-]+)\](?:[=<>~].*)?", word)
        for extra in set(asked[1].split(",")) - extras if asked else ():
            yield f"{word}: there is no extra {extra}"


def _python(arguments: list[str]) -> Iterator[str]:
    if arguments[:1] == ["-m"]:
        module = arguments[1]
        inside = module.startswith("lmpool.") and is_defined(module)
        path = ROOT / module.replace(".", "/")
        if not inside and not path.is_dir() and not path.with_suffix(".py").is_file():
            yield f"python -m {module}: there is no such module"
    elif not arguments or not (ROOT / arguments[0]).is_file():
        yield f"python {' '.join(arguments)}: there is no such file"


def _pytest(arguments: list[str]) -> Iterator[str]:
    options = (ROOT / "lmpool" / "contract_options.py").read_text("utf-8")
    for word in arguments:
        option = word.partition("=")[0]
        if option.startswith("--") and option != "--pyargs" and f'"{option}"' not in options:
            yield f"pytest {option}: no option of lmpool's"
        if word.startswith("lmpool.") and not is_defined(word):
            yield f"pytest {word}: there is no such module"
