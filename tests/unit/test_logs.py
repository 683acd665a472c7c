"""How a line of a log reads."""

from __future__ import annotations

import io
import json
import logging
import logging.config
import re
from collections.abc import Iterator
from typing import Any

import pytest

from lmpool.logs import LogFormat, logging_config

WHEN = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}"
WHO = {"pool": "llama", "worker": "gpu-0 100%"}


@pytest.fixture
def _as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("lmpool", "arq")]
    before = [(each.handlers[:], each.level, each.propagate) for each in loggers]
    yield
    for each, (handlers, level, propagates) in zip(loggers, before, strict=True):
        each.handlers, each.propagate = handlers, propagates
        each.setLevel(level)


def told(form: LogFormat, level: str = "info", **who: str) -> list[str]:
    config = logging_config(level, form, **who)
    out = io.StringIO()
    config["handlers"]["stderr"]["stream"] = out
    logging.config.dictConfig(config)
    logger = logging.getLogger("lmpool.test")
    logger.debug("unheard at info")
    logger.warning("refused an entry: %s", "a\nb")
    logging.getLogger("arq.worker").info("not said")
    try:
        raise ValueError("k=0")
    except ValueError:
        logger.exception("gone")
    return out.getvalue().splitlines()


@pytest.mark.usefixtures("_as_before")
def test_a_line_of_text_says_when_and_who() -> None:
    first = told("text", **WHO)[0]
    when, level, rest = first.split(maxsplit=2)
    assert re.fullmatch(WHEN, when)
    assert (level, rest) == (
        "WARNING",
        "lmpool.test pool=llama worker=gpu-0 100%: refused an entry: a",
    )
    assert "unheard" in told("text", "debug")[0]


@pytest.mark.usefixtures("_as_before")
def test_every_line_of_json_is_an_object() -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in told("json", **WHO)]
    refused, gone = lines
    assert re.fullmatch(WHEN, refused.pop("time"))
    assert refused == {
        **WHO, "level": "WARNING", "logger": "lmpool.test", "message": "refused an entry: a\nb",
    }  # fmt: skip
    assert gone["message"] == "gone"
    assert "ValueError: k=0" in gone["exc_info"]
