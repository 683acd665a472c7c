"""What Markdown documents name, and whether it is there: paths, dotted names, links, diagrams."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

SUFFIXES: Final = (".lua", ".md", ".py", ".toml")
ENTRY_POINT_GROUPS: Final = frozenset({"lmpool.engines"})
"""Names that look like modules and are none."""
OF_USERS: Final = frozenset({"lmpool.toml"})
"""Files that users write."""
MADE_LATER: Final = re.compile(r"\.venv\b")
"""Folders that `make` makes, and a checkout lacks."""

_FENCE: Final = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_SPAN: Final = re.compile(r"`([^`\n]+)`")
_PATH: Final = re.compile(r"[\w.][\w.-]*(/[\w.-]+)*/?")
_DOTTED: Final = re.compile(r"(?<![\w./@-])lmpool(?:\.[A-Za-z_]\w*)+")
_LINK: Final = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
_EXAMPLE: Final = re.compile(r"<!-- ([\w.-]+\.\w+) -->")
_IN_DIAGRAM: Final = re.compile(r"[\w./-]*\w\.(?:lua|py)\b")


# --- paths -------------------------------------------------------------------------------------


def named_paths(text: str) -> set[str]:
    """The paths of the checkout that a document names in backticks, or by file in a diagram.

    A path has a slash and begins with a folder of the checkout, or ends as sources and documents
    do. Placeholders (``backends/<name>/engine.py``), absolute paths, commands and the files that
    the document itself shows (``<!-- name -->``) are none.
    """
    examples = set(_EXAMPLE.findall(text))
    spans = [span for span in _SPAN.findall(_FENCE.sub("", text)) if _PATH.fullmatch(span)]
    for kind, body in _FENCE.findall(text):
        if kind == "mermaid":
            spans += _IN_DIAGRAM.findall(body)
    return {
        span
        for span in spans
        if span not in examples | OF_USERS
        and not MADE_LATER.match(span)
        and (span.endswith(SUFFIXES) or ("/" in span and (ROOT / span.partition("/")[0]).is_dir()))
    }


def is_there(path: str) -> bool:
    """Whether the checkout has this file or folder; a bare name may be any file's in it."""
    if "/" in path:
        found = ROOT / path
        return found.is_dir() if path.endswith("/") else found.exists()
    return (ROOT / path).is_file() or path in _file_names()


@cache
def _file_names() -> frozenset[str]:
    folders = ("lmpool", "producer", "worker", "backends", "tests", "deploy", "docs")
    return frozenset(p.name for folder in folders for p in (ROOT / folder).rglob("*"))


# --- dotted names ------------------------------------------------------------------------------


def dotted_names(text: str) -> set[str]:
    """``lmpool.x.y`` in backticks or code."""
    code = [body for _, body in _FENCE.findall(text)]
    code += _SPAN.findall(_FENCE.sub("", text))
    return {name for part in code for name in _DOTTED.findall(part)} - ENTRY_POINT_GROUPS - OF_USERS


def is_defined(dotted: str) -> bool:
    """Whether there is such a module, or a name in one; told by the sources, without an import.

    Of ``lmpool.PooledLM.sample`` the class is looked for, and not its method.
    """
    parts = dotted.split(".")[1:]
    place = ROOT / "lmpool"
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place /= f"{parts.pop(0)}.py"
    if not parts:
        return place.suffix == ".py" or (place / "__init__.py").is_file()
    return parts[0] in _names(place if place.suffix == ".py" else place / "__init__.py")


@cache
def _names(module: Path) -> frozenset[str]:
    """What a module defines, imports, or says in ``__all__``."""
    found: set[str] = set()
    if not module.is_file():
        return frozenset()
    for node in ast.parse(module.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
            if "__all__" in {target.id for target in targets if isinstance(target, ast.Name)}:
                found.update(ast.literal_eval(node.value) if node.value is not None else ())
    return frozenset(found)


# --- commands ----------------------------------------------------------------------------------


def make_targets(text: str) -> set[str]:
    """What a document says to ``make``, in backticks or code."""
    code = [body for _, body in _FENCE.findall(text)]
    code += _SPAN.findall(_FENCE.sub("", text))
    arguments = r"(?:[A-Z_]+=(?:\"[^\"]*\"|'[^']*'|\S+) +)*"
    found = [re.findall(rf"^ *make +{arguments}([a-z-]+)", part, re.MULTILINE) for part in code]
    return {target for targets in found for target in targets}


def has_target(target: str) -> bool:
    """Whether the Makefile makes it."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    engines = (ROOT / "tests" / "engines" / "requirements").glob("*.txt")
    kind, dash, engine = target.partition("-")
    if dash and engine in {"", *(path.stem for path in engines)}:  # "": `make soak-NAME`
        target = f"{kind}-%"
    return re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE) is not None


# --- links and headings ------------------------------------------------------------------------


def broken_links(text: str, file: Path) -> list[str]:
    """The relative links of a document that lead nowhere, also to a heading that is not there."""
    broken = []
    for target in _LINK.findall(_FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        to = (file.parent / path).resolve()
        if not to.exists():
            broken.append(target)
            continue
        if heading and heading not in anchors(to.read_text("utf-8") if path else text):
            broken.append(target)
    return broken


def headings(text: str) -> list[str]:
    """The headings of a document, as written."""
    return re.findall(r"^#{1,6} (.+)$", _FENCE.sub("", text), re.MULTILINE)


def anchors(text: str) -> list[str]:
    """What links to its headings are called, as GitHub makes them."""
    return [re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings(text)]


def table_words(text: str, heading: str) -> list[str]:
    """The first column of the table under a heading."""
    after = re.split(rf"^#+ {re.escape(heading)}$", text, maxsplit=1, flags=re.MULTILINE)[1]
    rows = re.findall(r"^\| *([^|]+?) *\|", after.split("\n#")[0], re.MULTILINE)
    return [row for row in rows[1:] if not row.startswith("--")]


# --- diagrams ----------------------------------------------------------------------------------

_BLOCKS: Final = {
    "flowchart": ("subgraph",),
    "sequenceDiagram": ("alt", "loop", "opt", "par", "critical", "break", "rect", "box"),
}
"""The kinds of diagrams that the documents use, and what of each an ``end`` closes."""
_PAIRS: Final = {")": "(", "]": "[", "}": "{"}
_MESSAGE: Final = re.compile(r"(\w+) *(?:-{1,2}>{1,2}|-{1,2}[x)])[+-]? *(\w+) *:")


def diagrams(text: str) -> list[str]:
    """The Mermaid diagrams of a document."""
    return [body for kind, body in _FENCE.findall(text) if kind == "mermaid"]


def diagram_problems(diagram: str) -> list[str]:
    """What would keep a diagram from being drawn, as far as its structure tells."""
    lines = [line.strip() for line in diagram.splitlines() if line.strip()]
    kind = lines[0].split()[0] if lines else ""
    if kind not in _BLOCKS:
        return [f"unknown kind of diagram {kind!r}"]
    problems = list(_unbalanced(lines[1:]))
    opened = sum(line.split()[0] in _BLOCKS[kind] for line in lines[1:])
    ended = lines[1:].count("end")
    if opened != ended:
        problems.append(f"{opened} blocks and {ended} ends")
    if kind == "sequenceDiagram":
        known = {line.split()[1] for line in lines if line.startswith(("participant ", "actor "))}
        for line in lines[1:]:
            message = _MESSAGE.match(line)
            names = message.groups() if message else ()
            problems += [f"no participant {name}: {line}" for name in names if name not in known]
    return problems


def _unbalanced(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if ";" in re.sub(r'"[^"]*"', "", line):
            yield f"a semicolon ends the line: {line}"
        if line.count('"') % 2:
            yield f"a quotation mark is missing: {line}"
        opened: list[str] = []
        for sign in re.sub(r'"[^"]*"|--?>?>|-\.+->?', "", line):
            if sign in _PAIRS.values():
                opened.append(sign)
            elif sign in _PAIRS and (not opened or opened.pop() != _PAIRS[sign]):
                yield f"a bracket is closed that was not opened: {line}"
                break
        else:
            if opened:
                yield f"a bracket is not closed: {line}"


def repeated(words: list[str]) -> list[str]:
    """Those that stand there more than once."""
    return [word for word, times in Counter(words).items() if times > 1]
