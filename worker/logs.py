"""What arq is given to log by, before it has read any settings."""

from __future__ import annotations

import os
from typing import Final

from lmpool.logs import logging_config

LOGGING: Final = logging_config(
    form="json" if os.environ.get("LMPOOL_LOG_FORMAT") == "json" else "text"
)
"""``arq lmpool.worker.WorkerSettings --custom-log-dict lmpool.worker.logs.LOGGING``."""
