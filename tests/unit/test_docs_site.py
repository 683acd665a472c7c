"""The documentation as a site: it is built without a network, and needs none to be read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from tests.support.diagrams import DRAWINGS, drawings, site_hooks
from tests.support.markdown import ROOT

LOADED = {
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "embed": "src",
}  # fmt: skip
"""What a browser fetches by itself, and the attribute that says where."""
PUBLIC = (
    "lmpool", "lmpool.backends", "lmpool.dead_letters", "lmpool.errors", "lmpool.inspection",
    "lmpool.pool_view", "lmpool.testing",
)  # fmt: skip
INTERNAL = {"__version__", "errors"}
"""What has a page and not a place, or speaks for itself."""
ABSOLUTE = re.compile(r"(?:https?:)?//")


class _Fetched(HTMLParser):
    """What a page has a browser fetch from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        address = values.get(LOADED.get(tag, ""), "")
        if tag == "link" and not {"canonical", "next", "prev", "edit"} & {*values["rel"].split()}:
            address = values.get("href", "")
        if ABSOLUTE.match(address):
            self.found.append(address)


def fetched(page: str) -> list[str]:
    parser = _Fetched()
    parser.feed(page)
    return parser.found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` builds, where there is no network."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    nowhere = "http://127.0.0.1:1"
    environment = {
        **os.environ,
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), nowhere),
        "NO_MKDOCS_2_WARNING": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        assert not fetched(page.read_text("utf-8")), page
    for style in site.rglob("*.css"):
        addresses = re.findall(r"url\(\s*[\"']?([^\"')]+)|@import", style.read_text("utf-8"))
        assert not [each for each in addresses if not each or ABSOLUTE.match(each)], style


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where a server of files shows it."""
    handler = partial(_Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, name="site")
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright")
    from tests.support.browser import chromium

    with chromium() as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_asks_nobody_else_and_pages_fit(address: str, browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 844})
    asked: set[str] = set()
    page.on("request", lambda request: asked.add(request.url))
    for path in ("", "asking/", "operating/", "architecture/", "reference/client/"):
        page.goto(address + path, wait_until="networkidle")
        wider = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert wider <= 0, path
        broken = page.evaluate("[...document.images].filter(i => !i.naturalWidth).map(i => i.src)")
        assert not broken, path
    page.close()
    assert len(asked) > 10
    assert not [url for url in asked if not url.startswith((address, "data:"))]


@pytest.mark.slow
def test_pages_of_the_repository_alone_are_linked_there(site: Path) -> None:
    page = (site / "asking" / "index.html").read_text("utf-8")
    assert 'href="https://github.com/lmpool/lmpool/blob/main/examples/classify.py"' in page


@pytest.mark.slow
def test_diagrams_are_drawings_and_never_text(site: Path) -> None:
    page = (site / "architecture" / "index.html").read_text("utf-8")
    assert page.count('class="diagram"') >= 4
    assert "sequenceDiagram" not in page


@pytest.mark.slow
def test_the_reference_has_what_is_inherited(site: Path) -> None:
    page = (site / "reference" / "client" / "index.html").read_text("utf-8")
    for name in ("next_token_logprobs", "top_logprobs", "ask_iter", "stream", "encode", "head"):
        assert f'id="lmpool.PooledLM.{name}"' in page, name


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    pages = [page.read_text("utf-8") for page in (site / "reference").rglob("*.html")]
    shown = {name for page in pages for name in re.findall(r'id="(lmpool[\w.]*)"', page)}
    missing = []
    for module in PUBLIC:
        for name in {*import_module(module).__all__} - INTERNAL:
            value = getattr(import_module(module), name)
            home = getattr(value, "__module__", module)
            # A name that is documented where it is defined has no place under its short one.
            if not {f"{module}.{name}", f"{home}.{name}"} & shown:
                missing.append(f"{module}.{name}")
    assert not missing


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    named = set(re.findall(r"[\w/-]+\.md$", text, re.MULTILINE))
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert named == pages


def test_no_font_and_no_program_is_asked_for_elsewhere() -> None:
    class Loader(yaml.SafeLoader):
        """Takes what mkdocs.yml has beside plain YAML for None."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    config = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)
    assert config["theme"]["font"] is False
    assert config["strict"] is True
    assert not config.get("extra_javascript")
    assert [path for path in config["extra_css"] if not (ROOT / "docs" / path).is_file()] == []


def test_every_diagram_is_drawn() -> None:
    assert set(DRAWINGS.glob("*.svg")) == set(drawings()), "python -m tests.support.diagrams"


def test_drawings_fetch_nothing() -> None:
    for path in (*DRAWINGS.glob("*.svg"), *(ROOT / "docs" / "images").glob("*.svg")):
        drawing = path.read_text("utf-8")
        assert drawing.lstrip().startswith("<svg "), path
        assert not re.search(r"<script|<foreignObject|@import|(?<!xmlns)=\"https?:", drawing), path


# --- what finds it -----------------------------------------------------------------------------


def test_what_a_browser_would_fetch_is_found() -> None:
    page = (
        '<link rel="stylesheet" href="https://fonts.example/a.css"><script src="//x.example/y.js">'
        '</script><a href="https://example.org">no</a><img src="images/here.svg">'
        '<link rel="canonical" href="https://lmpool.example/"><script src="assets/a.js"></script>'
    )
    assert fetched(page) == ["https://fonts.example/a.css", "//x.example/y.js"]


def test_links_out_of_the_pages_become_those_of_the_repository() -> None:
    class Page:
        class file:  # noqa: N801 - as MkDocs has it
            src_uri = "integrations/trl.md"

    text = (
        "[a](../gateway.md) [b](../../examples/classify.py) "
        "![c](../../tests/benchmarks/results/hf.png)\n"
        "```\n[d](../../not/touched.py)\n```\n"
    )
    assert site_hooks().on_page_markdown(text, page=Page, config=None) == (
        "[a](../gateway.md) [b](https://github.com/lmpool/lmpool/blob/main/examples/classify.py) "
        "![c](../images/results/hf.png)\n"
        "```\n[d](../../not/touched.py)\n```\n"
    )
