"""Logs that a person can read."""

from __future__ import annotations

from typing import Any, Final

FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def logging_config(level: str = "info") -> dict[str, Any]:
    """For `logging.config.dictConfig`: lmpool at `level`, arq where it has something to say."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": FORMAT, "datefmt": "%H:%M:%S"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain"}},
        "loggers": {
            "lmpool": {"handlers": ["stderr"], "level": level.upper(), "propagate": False},
            "arq": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
        },
    }


LOGGING: Final = logging_config()
"""``arq lmpool.worker.WorkerSettings --custom-log-dict lmpool.worker.logs.LOGGING``."""
