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

from lmpool.logs import LogFormat, about, entries, logging_config

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
    logger.warning("k=0: refused an entry: %s", "a\nb")
    logging.getLogger("arq.worker").info("not said")
    logger.error("a job failed", extra=about("top"))
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
        "lmpool.test pool=llama worker=gpu-0 100%: k=0: refused an entry: a",
    )
    assert "unheard" in told("text", "debug")[0]


@pytest.mark.usefixtures("_as_before")
def test_a_line_about_one_job_says_what_was_wanted() -> None:
    (line,) = [line for line in told("text", **WHO) if "a job failed" in line]
    assert line.endswith(" worker=gpu-0 100% want=top: a job failed")
    (said,) = [json.loads(line) for line in told("json", **WHO) if "a job failed" in line]
    assert (said["want"], said["pool"]) == ("top", "llama")
    assert sum("want" in line for line in told("json")) == 1


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("who", [{}, {"pool": "llama"}, {"pool": "a", "worker": "gpu-0"}])
def test_what_a_log_says_can_be_read_again(form: LogFormat, who: dict[str, str]) -> None:
    log = "\n".join(["something before", *told(form, **who)])
    refused, failed, gone = entries(log)
    assert refused == ("WARNING", "lmpool.test", "k=0: refused an entry: a\nb")
    assert gone[:2] == ("ERROR", "lmpool.test")
    assert gone[2].startswith("gone")
    of_several = "\n".join(f"[gpu 0] {line}" for line in log.splitlines())
    assert failed == ("ERROR", "lmpool.test", "a job failed")
    found = [entry[:2] for entry in entries(of_several)]
    assert found == [refused[:2], failed[:2], gone[:2]]


@pytest.mark.usefixtures("_as_before")
def test_every_line_of_json_is_an_object() -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in told("json", **WHO)]
    refused, failed, gone = lines
    assert re.fullmatch(WHEN, refused.pop("time"))
    assert refused == {
        **WHO,
        "level": "WARNING",
        "logger": "lmpool.test",
        "message": "k=0: refused an entry: a\nb",
    }
    assert (failed["message"], gone["message"]) == ("a job failed", "gone")
    assert "ValueError: k=0" in gone["exc_info"]
