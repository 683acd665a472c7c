"""The documents name what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.markdown import (
    ROOT,
    broken_links,
    diagram_problems,
    diagrams,
    dotted_names,
    has_target,
    headings,
    is_defined,
    is_there,
    make_targets,
    named_paths,
    repeated,
    table_words,
)

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
DECISIONS = ROOT / "docs" / "decisions"
WORDS = {
    "adapter", "answer", "batch", "claim", "dead letter", "delivery", "digest", "drain", "engine",
    "fingerprint", "flight", "heartbeat", "hit", "job", "joined", "kept state", "lane",
    "model info", "notice", "pool", "prefix", "priority", "queued", "row", "shard", "want",
}  # fmt: skip
FENCE = "```"

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix()
)


@each_document
def test_every_path_is_there(document: Path) -> None:
    missing = [p for p in sorted(named_paths(document.read_text("utf-8"))) if not is_there(p)]
    assert not missing


@each_document
def test_every_dotted_name_is_defined(document: Path) -> None:
    names = dotted_names(document.read_text("utf-8"))
    assert not [name for name in sorted(names) if not is_defined(name)]


@each_document
def test_every_make_target_is_there(document: Path) -> None:
    targets = make_targets(document.read_text("utf-8"))
    assert not [target for target in sorted(targets) if not has_target(target)]


@each_document
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    assert not broken_links(document.read_text("utf-8"), document)


@each_document
def test_diagrams_are_well_formed(document: Path) -> None:
    for diagram in diagrams(document.read_text("utf-8")):
        assert not diagram_problems(diagram), diagram


@each_document
def test_no_heading_stands_twice(document: Path) -> None:
    assert not repeated(headings(document.read_text("utf-8")))


def test_the_glossary_has_every_word_once() -> None:
    words = table_words(ARCHITECTURE.read_text("utf-8"), "Words")
    assert not repeated(words)
    assert set(words) >= WORDS


def test_there_is_one_glossary() -> None:
    # A word of it is the heading of no second explanation.
    words = set(table_words(ARCHITECTURE.read_text("utf-8"), "Words"))
    for document in DOCUMENTS:
        found = [h for h in headings(document.read_text("utf-8")) if h.lower() in words]
        assert not found, document
    with_table = [d for d in DOCUMENTS if "| word | meaning |" in d.read_text("utf-8")]
    assert with_table == [ARCHITECTURE]


def test_the_architecture_is_drawn() -> None:
    assert len(diagrams(ARCHITECTURE.read_text("utf-8"))) >= 4


def test_every_decision_is_a_short_page_of_the_index() -> None:
    index = (DECISIONS / "README.md").read_text("utf-8")
    pages = [page for page in sorted(DECISIONS.glob("*.md")) if page.name != "README.md"]
    assert len(pages) >= 6
    for page in pages:
        text = page.read_text("utf-8")
        assert f"]({page.name})" in index, f"{page.name} is not in the index"
        for part in ("**Decided.**", "**Against.**", "**Why.**", "**Cost.**"):
            assert text.count(part) == 1, f"{page.name}: {part}"
        assert len(text.splitlines()) <= 50, f"{page.name}: a page is half a page"


# --- what finds it -----------------------------------------------------------------------------


def test_a_path_that_is_missing_is_found() -> None:
    text = "See `lmpool/nothing.py`, `worker/`, `nowhere.lua` and `tests/unit/test_docs.py`."
    missing = {path for path in named_paths(text) if not is_there(path)}
    assert missing == {"lmpool/nothing.py", "nowhere.lua"}


def test_a_path_in_a_diagram_is_found() -> None:
    text = f"{FENCE}mermaid\nflowchart LR\n    a -- never.lua --> b\n{FENCE}\n"
    assert named_paths(text) == {"never.lua"}


def test_examples_are_no_paths() -> None:
    text = (
        "<!-- my_engine.py -->\n"
        f"{FENCE}python\nopen('lmpool/shown.py')\n{FENCE}\n"
        "`my_engine.py` for `meta-llama/Llama-3.2-1B`, `backends/<name>/engine.py`, `/metrics`, "
        "`tests/engines/test_*.py`, `python -m lmpool/x.py`, `.venv-vllm/bin/python`, "
        "`text/plain`, `redis://host:6379/0`, `2.5/3`, `adapter_config.json`"
    )
    assert named_paths(text) == set()


def test_a_folder_is_no_file_and_a_file_no_folder() -> None:
    assert is_there("lmpool/lua/")
    assert is_there("lmpool/lua")
    assert not is_there("lmpool/keys.py/")


def test_a_dotted_name_that_is_missing_is_found() -> None:
    text = (
        "`lmpool.connect(url)`, `lmpool.errors.PromptError`, `lmpool.backends.vllm.capture`, "
        "`lmpool.nothing`, `lmpool.keys.nothing`, `lmpool.engines`, `https://lmpool.example`, "
        "`arq lmpool.worker.WorkerSettings`\n"
        f"{FENCE}python\nfrom lmpool.wrong import this\n{FENCE}\n"
    )
    missing = {name for name in dotted_names(text) if not is_defined(name)}
    assert missing == {"lmpool.nothing", "lmpool.keys.nothing", "lmpool.wrong"}


def test_a_make_target_that_is_missing_is_found() -> None:
    text = (
        "make sure: `make check`, `make bench ARGS='jobs'`, `make test-mlx`, `make test-none`\n"
        f'{FENCE}\nmake ARGS="-k adapters" nothing  # make do\n{FENCE}\n'
    )
    assert {t for t in make_targets(text) if not has_target(t)} == {"nothing", "test-none"}


def test_a_link_that_leads_nowhere_is_found() -> None:
    text = (
        "[a](docs/architecture.md) [b](docs/architecture.md#words) [c](https://example.org/x) "
        "[d](docs/missing.md) [e](docs/architecture.md#no-such-heading) [f](#here)\n\n## Here\n"
    )
    broken = broken_links(text, ROOT / "README.md")
    assert broken == ["docs/missing.md", "docs/architecture.md#no-such-heading"]


@pytest.mark.parametrize(
    ("diagram", "problem"),
    [
        ("pie\n a: 1", "unknown kind"),
        ("flowchart LR\n subgraph a [one]\n b --> c", "1 blocks and 0 ends"),
        ("flowchart LR\n a[one --> b", "not closed"),
        ("flowchart LR\n a(one] --> b", "not opened"),
        ('flowchart LR\n a -- "one --> b', "quotation mark"),
        ("sequenceDiagram\n participant A\n A->>B: hello", "no participant B"),
        ("sequenceDiagram\n participant A\n A->>A: this; and that", "a semicolon"),
        ("sequenceDiagram\n participant A\n loop x\n A->>A: hello", "1 blocks and 0 ends"),
    ],
)
def test_a_malformed_diagram_is_found(diagram: str, problem: str) -> None:
    assert any(problem in found for found in diagram_problems(diagram))


def test_a_word_that_stands_twice_is_found() -> None:
    rows = "".join(f"| {word} | x |\n" for word in ("job", "row", "job"))
    text = f"# Words\n\n| word | meaning |\n|---|---|\n{rows}\n## Next\n\n| other | x |\n"
    assert table_words(text, "Words") == ["job", "row", "job"]
    assert repeated(table_words(text, "Words")) == ["job"]
