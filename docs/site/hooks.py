"""What the site needs and GitHub does not, done while MkDocs reads the pages.

Links to files outside of ``docs/`` become those of the repository, pictures there are copied, and
Mermaid diagrams, for which a reader's browser would load a program from elsewhere, become the
drawings that were made of them (``python -m tests.support.diagrams``).
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from pathlib import Path
from typing import Any

BLOB = "https://github.com/lmpool/lmpool/blob/main/"
DRAWINGS = "images/diagrams"
PICTURES = "tests/benchmarks/results"
COPIES = "images/results"
"""Where pictures of outside are on the site, and where they come from."""

_LINK = re.compile(r"(?<=\]\()((?:\.\./)+[^()\s]+)(?=\))")
_IMAGE = re.compile(r"!\[[^\]]*\]\($")
_FENCE = re.compile(r"^( *```.*?^ *```)$", re.MULTILINE | re.DOTALL)
_DIAGRAM = re.compile(r"```mermaid\n(.*?)\n```", re.DOTALL)


def drawing(diagram: str) -> str:
    """The file in `DRAWINGS` that is drawn of a diagram: another diagram has another name."""
    return f"{hashlib.blake2b(diagram.strip().encode(), digest_size=6).hexdigest()}.svg"


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """The pages, and the pictures outside of their folder."""
    from mkdocs.structure.files import File

    for path in sorted(Path(config.config_file_path).parent.glob(f"{PICTURES}/*.png")):
        files.append(File.generated(config, f"{COPIES}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """A page's text, before anything else looks at it."""
    folder = posixpath.dirname(page.file.src_uri)
    parts = _FENCE.split(markdown)
    for number, part in enumerate(parts):
        shown = _DIAGRAM.fullmatch(part)
        if shown is not None:
            at = posixpath.relpath(f"{DRAWINGS}/{drawing(shown[1])}", folder or ".")
            # A click shows it alone, as large as it is.
            parts[number] = f"[![A diagram: {_said(shown[1])}]({at}){{ .diagram }}]({at})"
        elif not part.startswith("```"):
            parts[number] = _LINK.sub(lambda found, text=part: _outside(folder, text, found), part)
    return "".join(parts)


def on_post_page(output: str, **_: Any) -> str:
    """A page as it is written: its link to the repository counts no stars there."""
    return output.replace(' data-md-component="source"', "")


def _outside(folder: str, text: str, found: re.Match[str]) -> str:
    """A link that leaves ``docs/``, as one of the repository."""
    target = posixpath.normpath(posixpath.join("docs", folder, found[1]))
    if target.startswith("docs/"):
        return found[1]
    if _IMAGE.search(text[: found.start()]) and target.startswith(PICTURES):
        return posixpath.relpath(target.replace(PICTURES, COPIES), folder or ".")
    return BLOB + target


def _said(diagram: str) -> str:
    """What a diagram shows, for who cannot see it: the names in it."""
    names = re.findall(r"participant \w+ as (.+)|[\[({]+\"?([^\]\"(){}]+)\"?[\])}]+", diagram)
    said = dict.fromkeys(re.sub(r"<br/>|\s+", " ", a or b).strip() for a, b in names)
    return ", ".join(said).replace("[", "").replace("]", "")
