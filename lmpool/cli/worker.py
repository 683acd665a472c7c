"""``lmpool worker``, which has an option for each setting of a worker."""

from __future__ import annotations

import inspect
import json
import types
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from lmpool.cli.terminal import print_error
from lmpool.errors import LmpoolError, SettingsError
from lmpool.settings import WorkerOptions

_WHERE: Final = "Where they run"
_WHAT: Final = "Settings (each is also an LMPOOL_* variable)"


def worker(**given: Any) -> None:
    """Serve a model: one worker for each GPU, started again when it dies.

    Ends on SIGTERM or Ctrl-C once the running batches are done.
    """
    from lmpool.worker.launcher import EXIT_REFUSED, launch

    placing = {name: given.pop(name) for name in ("gpus", "workers", "events")}
    try:
        status = launch(read_options(given), **placing)
    except LmpoolError as error:
        print_error(error)
        status = EXIT_REFUSED
    raise typer.Exit(status)


def read_options(given: dict[str, Any]) -> dict[str, Any]:
    """Settings from what the options say. Raises `SettingsError` for what is no JSON."""
    settings = {}
    for name, value in given.items():
        if value is None or value is False:
            continue  # not written: an LMPOOL_* variable or the default says
        if isinstance(value, str) and _is_json(WorkerOptions.model_fields[name]):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise SettingsError(
                    f"--{name.replace('_', '-')} {value}: {error}; write JSON, for example "
                    + ("'[\"/srv/adapters\"]'" if name == "adapter_dirs" else "'{\"a\": 1}'")
                ) from None
        settings[name] = value
    return settings


def _placement_options() -> list[inspect.Parameter]:
    return [
        _parameter(
            "gpus", str,
            "one worker for each of these GPUs: 0,1,2,3, or all, or 0+1,2+3 for two GPUs each",
            metavar="LIST", panel=_WHERE,
        ),
        _parameter(
            "workers", int, "so many workers without a GPU of their own", metavar="N", panel=_WHERE
        ),
        _parameter("events", Path, "", metavar="FILE", panel=_WHERE, hidden=True),
    ]  # fmt: skip


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    choices = [str(choice) for choice in _choices(field)]
    # In the text and not as the metavar: it would take the width that names need.
    text = f"{', '.join(choices)}: {field.description}" if choices else field.description or ""
    default = field.default
    if field.default_factory is None and default not in (None, (), False):
        shown = f"{default:g}" if isinstance(default, float) else default
        if name == "url":  # too long a word for a narrow terminal
            shown = str(shown).removeprefix("redis://").removesuffix("/0")
        text += f" [dim]\\[{shown}][/]"
    if field.annotation is bool:
        return _parameter(name, bool, text, metavar=None, panel=_WHAT, default=False)
    return _parameter(name, str, text, metavar=_metavar(field), panel=_WHAT)


def _parameter(
    name: str,
    kind: type,
    text: str,
    *,
    metavar: str | None,
    panel: str,
    default: Any = None,
    hidden: bool = False,
) -> inspect.Parameter:
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=text,
        metavar=metavar,
        show_default=False,
        hidden=hidden,
        rich_help_panel=panel,
    )
    annotation: Any = Annotated[kind if kind is bool else Union[kind, None], option]  # noqa: UP007
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _is_json(field: FieldInfo) -> bool:
    return get_origin(field.annotation) in (dict, tuple, list)


def _metavar(field: FieldInfo) -> str:
    if _is_json(field):
        return "JSON"
    return {int: "N", float: "SECONDS"}.get(_kind(field), "TEXT")


def _choices(field: FieldInfo) -> tuple[Any, ...]:
    kind = _kind(field)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _kind(field: FieldInfo) -> Any:
    return next(kind for kind in _alternatives(field.annotation) if kind is not type(None))


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


worker.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*_placement_options(), *(_option(n, f) for n, f in WorkerOptions.model_fields.items())]
)
