"""The documents' Mermaid diagrams as drawings, for a site that loads no program from elsewhere.

`python -m tests.support.diagrams` draws those that have changed (it needs npm and a chromium, see
`playwright install chromium`) and removes what is drawn of none any longer. Each drawing is named
by its diagram: `docs/site/hooks.py` finds it so.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Final

from tests.support.markdown import ROOT, diagrams

MERMAID: Final = "mermaid@12.3.0"
DRAWINGS: Final = ROOT / "docs" / "images" / "diagrams"

_PAGE: Final = """<!doctype html><meta charset="utf-8"><body><script src="mermaid.min.js"></script>
<script>
mermaid.initialize({startOnLoad: false, theme: "neutral", htmlLabels: false,
    fontFamily: "Arial, Helvetica, sans-serif", deterministicIds: true,
    flowchart: {htmlLabels: false, useMaxWidth: false}, sequence: {useMaxWidth: false}})
async function draw(text) { return (await mermaid.render("diagram", text)).svg }
</script>"""


def site_hooks() -> ModuleType:
    """`docs/site/hooks.py`, which lies in no package."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawings() -> dict[Path, str]:
    """Every diagram of a page of the site, and where its drawing is."""
    named = site_hooks().drawing
    pages = sorted((ROOT / "docs").rglob("*.md"))
    found = (text for page in pages for text in diagrams(page.read_text("utf-8")))
    return {DRAWINGS / named(text.strip()): text.strip() for text in found}


def draw(texts: list[str], folder: Path) -> list[str]:
    """Each diagram as an SVG."""
    from playwright.sync_api import sync_playwright

    subprocess.run(["npm", "pack", "--silent", MERMAID], cwd=folder, check=True)
    (archive,) = folder.glob("mermaid-*.tgz")
    subprocess.run(["tar", "xzf", archive.name], cwd=folder, check=True)
    shutil.copy(folder / "package/dist/mermaid.min.js", folder)
    (folder / "page.html").write_text(_PAGE, "utf-8")
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto((folder / "page.html").as_uri())
        drawn = [str(page.evaluate("draw", text)) for text in texts]
        browser.close()
    return [_tidy(svg) for svg in drawn]


def _tidy(svg: str) -> str:
    """With the size that a page is to show it at, and nothing that a browser would fetch."""
    box = re.search(r'viewBox="[-\d.]+ [-\d.]+ ([\d.]+) ([\d.]+)"', svg)
    assert box is not None, svg[:200]
    assert "foreignObject" not in svg, "a label that is HTML is not drawn everywhere"
    head, rest = svg.split(">", 1)
    head = re.sub(r' (?:width|height|style)="[^"]*"', "", head)
    size = f' width="{float(box[1]):.0f}" height="{float(box[2]):.0f}"'
    return re.sub(r"@import[^;]*;", "", f"{head}{size}>{rest}") + "\n"


def main() -> None:
    wanted = drawings()
    DRAWINGS.mkdir(parents=True, exist_ok=True)
    for path in set(DRAWINGS.glob("*.svg")) - set(wanted):
        path.unlink()
    missing = [path for path in wanted if not path.exists()]
    with tempfile.TemporaryDirectory(prefix="lmpool-diagrams-") as folder:
        texts = [wanted[path] for path in missing]
        for path, svg in zip(missing, draw(texts, Path(folder)) if texts else [], strict=True):
            path.write_text(svg, "utf-8")
            print(path.relative_to(ROOT), f"{len(svg):,} bytes")


if __name__ == "__main__":
    main()
