"""``lmpool worker``, which has an option for each setting of a worker."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, Final

import typer

from lmpool.cli.setting_options import is_json, option, parameter
from lmpool.errors import SettingsError
from lmpool.masking import mask_text
from lmpool.settings import WorkerOptions

_WHERE: Final = "Where they run"
_WHAT: Final = "Settings (each is also an LMPOOL_* variable)"


def worker(**given: Any) -> None:
    """Serve a model: one worker for each GPU, started again when it dies.

    Ends on SIGTERM or Ctrl-C once the running batches are done.
    """
    from lmpool.worker.launcher import launch

    placing = {name: given.pop(name) for name in ("gpus", "workers", "events")}
    raise typer.Exit(launch(read_options(given), **placing))


def read_options(given: dict[str, Any]) -> dict[str, Any]:
    """Settings from what the options say. Raises `SettingsError` for what is no JSON."""
    settings = {}
    for name, value in given.items():
        if value is None or value is False:
            continue  # not written: an LMPOOL_* variable or the default says
        if isinstance(value, str) and is_json(WorkerOptions.model_fields[name]):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise SettingsError(
                    f"--{name.replace('_', '-')} {mask_text(value)}: {error}; write JSON, for "
                    "example "
                    + ("'[\"/srv/adapters\"]'" if name == "adapter_dirs" else "'{\"a\": 1}'")
                ) from None
        settings[name] = value
    return settings


def _placement_options() -> list[inspect.Parameter]:
    return [
        parameter(
            "gpus", str,
            "one worker for each of these GPUs: 0,1,2,3, or all, or 0+1,2+3 for two GPUs each",
            metavar="LIST", panel=_WHERE,
        ),
        parameter(
            "workers", int, "so many workers without a GPU of their own", metavar="N", panel=_WHERE
        ),
        parameter("events", Path, "", metavar="FILE", panel=_WHERE, hidden=True),
    ]  # fmt: skip


worker.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*_placement_options(), *(option(n, f, _WHAT) for n, f in WorkerOptions.model_fields.items())]
)
