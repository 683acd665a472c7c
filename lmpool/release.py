"""Which release of lmpool this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["VERSION"]


def _installed() -> str:
    try:
        return version("lmpool")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"


VERSION = _installed()
