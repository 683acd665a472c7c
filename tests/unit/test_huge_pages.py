"""The tests' own processes stand still for nobody's huge pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.huge_pages import do_without_huge_pages

STATUS = Path("/proc/self/status")


@pytest.mark.skipif(
    not STATUS.exists() or "THP_enabled" not in STATUS.read_text(), reason="Linux says it"
)
def test_neither_tests_nor_what_they_start_have_huge_pages() -> None:
    if not do_without_huge_pages():
        pytest.skip("the kernel refuses it")
    said = f"print(open({str(STATUS)!r}).read())"
    child = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    for text in (STATUS.read_text(), child.stdout):
        assert "THP_enabled:\t0" in text
