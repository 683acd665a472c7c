"""A real Chromium for tests of pages, and what went wrong in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Dialog,
    Locator,
    Page,
    expect,
    sync_playwright,
)

PATIENCE = 20_000
"""Milliseconds: what a page comes to show may take that on a machine that is busy."""
NARROW = {"width": 390, "height": 844}
WIDE = {"width": 1280, "height": 900}
_WATCH = """
window.violations = [];
addEventListener('securitypolicyviolation', (e) => window.violations.push(e.violatedDirective));
"""


def find_chromium() -> str:
    """The browser's program; without one the test is skipped, or fails where it is expected."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    text = "no Chromium: install one (Debian's package chromium)"
    if os.environ.get("LMPOOL_REQUIRE_SERVERS", "") not in ("", "0"):
        pytest.fail(text)
    pytest.skip(text)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser while the block runs. It has the thread's event loop: for a module's tests."""
    program = find_chromium()
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        arguments = [
            "--no-sandbox",  # where tests run as root, and in containers, there is none
            "--host-resolver-rules=MAP *.example 127.0.0.1",  # names that lead here
        ]
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page in a browser, with all that it complained of."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.problems: list[str] = []
        page.set_default_timeout(PATIENCE)
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("dialog", self._asked)

    def _said(self, message: ConsoleMessage) -> None:
        # Of an answer that is none Chromium says so by itself: the page has words for it.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.problems.append(f"{message.type}: {message.text}")

    def _asked(self, dialog: Dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def __getitem__(self, selector: str) -> Locator:
        return self.page.locator(selector)

    def shows(self, selector: str, text: Any) -> None:
        """Wait until there is this text, or a pattern's, in there."""
        expect(self[selector]).to_contain_text(text)

    def state(self, name: str) -> None:
        """Wait until the pool is said to be so."""
        expect(self["#state"]).to_have_attribute("data-state", name)

    def press(self, *keys: str) -> None:
        """Keys, one after another, wherever the focus is."""
        for key in keys:
            self.page.keyboard.press(key)

    def violations(self) -> list[str]:
        """What the page's security policy has stopped, which nothing of its own should be."""
        found: list[str] = self.page.evaluate("window.violations")
        return found

    def overflow(self) -> int:
        """Pixels that are wider than the window."""
        width: int = self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        return width

    def barriers(self) -> list[str]:
        """What axe-core finds serious or critical for those who use other means than eyes."""
        found = Axe().run(self.page).response["violations"]
        return [
            f"{each['id']}: {node['target']} {node['failureSummary']}"
            for each in found
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]


@contextmanager
def tab(browser: Browser, url: str, *, complains: bool = False, **options: Any) -> Iterator[Tab]:
    """A page, of which nothing may go wrong (`complains`: unless the test is about that)."""
    context = browser.new_context(**{"viewport": WIDE, "reduced_motion": "reduce", **options})
    context.add_init_script(_WATCH)
    try:
        found = Tab(context.new_page())
        found.page.goto(url)
        yield found
        assert not found.violations()
        assert complains or not found.problems, found.problems
    finally:
        context.close()
