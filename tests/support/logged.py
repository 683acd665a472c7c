"""What lmpool logs in a test, whatever else is logged in the process meanwhile."""

from __future__ import annotations

import logging

import pytest


def records(caplog: pytest.LogCaptureFixture, *loggers: str) -> list[logging.LogRecord]:
    """Those of lmpool's loggers, or of these and the ones below them."""
    names = loggers or ("lmpool",)
    return [each for each in caplog.records if each.name.partition(".")[0] in names]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Those of lmpool's loggers."""
    return [each.getMessage() for each in records(caplog)]
