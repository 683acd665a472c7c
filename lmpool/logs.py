"""Logs of workers and gateways: lines that a person can read, or JSON."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any, Final, Literal

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

WANT: Final = "want"
"""The field that says what was wanted, of a line about one job."""
DATE: Final = "%Y-%m-%dT%H:%M:%S%z"
_ENTRY: Final = re.compile(
    r"^(?:\[[^\]\n]*\] )?"  # which of several workers it is
    r"(?:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} (?P<level>\w+) +(?P<logger>[\w.]+)"
    r"(?: \w+=[^\s:]+)*: "
    r"|(?P<json>\{.*\})$)",
    re.MULTILINE,
)


def logging_config(
    level: str = "info", form: LogFormat = "text", *, others: str = "arq", **who: str
) -> dict[str, Any]:
    """For `logging.config.dictConfig`: lmpool at `level`, and `others` from warnings on.

    `who` speaks, such as ``pool`` and ``worker``, is in every line. The JSON has an object a line,
    with ``time``, ``level``, ``logger``, ``message``, and ``exc_info`` where there is a traceback.
    """
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": _json(who) if form == "json" else _text(who)},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines"}},
        "loggers": {
            "lmpool": {"handlers": ["stderr"], "level": level.upper(), "propagate": False},
            others: {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
        },
    }


def entries(log: str) -> Iterator[tuple[str, str, str]]:
    """What a log says, in either form: level, logger and message of each entry, in order.

    What stands between entries, such as a traceback, is of the message before it.
    """
    starts = [*_ENTRY.finditer(log)]
    for number, start in enumerate(starts):
        end = starts[number + 1].start() if number + 1 < len(starts) else len(log)
        level, logger, message = start.group("level", "logger", "json")
        if message is None:
            yield level, logger, log[start.end() : end].strip()
            continue
        try:
            said = json.loads(message)
            yield said["level"], said["logger"], said["message"]
        except (ValueError, KeyError, TypeError):
            continue  # of another process's


class _Lines(logging.Formatter):
    """Lines, with the want that a record is about, where it says one."""

    def format(self, record: logging.LogRecord) -> str:
        want = getattr(record, WANT, None)
        record.about = "" if want is None else f" {WANT}={want}"
        return super().format(record)


def about(want: str) -> dict[str, str]:
    """For the ``extra`` of a line that is about one job: the kind of its want."""
    return {WANT: want}


def _text(who: dict[str, str]) -> dict[str, Any]:
    speaks = "".join(f" {name}={value}" for name, value in who.items()).replace("%", "%%")
    line = f"%(asctime)s %(levelname)-7s %(name)s{speaks}%(about)s: %(message)s"
    return {"()": _Lines, "fmt": line, "datefmt": DATE}


def _json(who: dict[str, str]) -> dict[str, Any]:
    return {
        "()": "pythonjsonlogger.json.JsonFormatter",
        "fmt": "%(asctime)s %(levelname)s %(name)s %(message)s",
        "datefmt": DATE,
        "rename_fields": {"asctime": "time", "levelname": "level", "name": "logger"},
        "static_fields": dict(who),
    }
