"""The options of ``lmpool worker``: one for each setting of a worker."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from lmpool.errors import SettingsError
from lmpool.settings import WorkerOptions

REFUSED: Final = 78
"""Exit status for settings that cannot be used: a supervisor need not try again."""

_WHERE: Final = "Where they run"
_WHAT: Final = "Settings (each is also an LMPOOL_* variable)"


def with_worker_options(function: Callable[..., None]) -> Callable[..., None]:
    """`function`, called with what the options of the command line say, by setting."""

    def command(**given: Any) -> None:
        function(**given)

    command.__doc__ = function.__doc__
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*_places(), *(_option(n, f) for n, f in WorkerOptions.model_fields.items())]
    )
    return command


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


def _places() -> list[inspect.Parameter]:
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
    text = field.description or ""
    default = field.default
    if field.default_factory is None and default not in (None, (), False):
        shown = f"{default:g}" if isinstance(default, float) else default
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
    kinds = [kind for kind in _alternatives(field.annotation) if kind is not type(None)]
    if get_origin(kinds[0]) is Literal:
        return "|".join(str(choice) for choice in get_args(kinds[0]))
    return {int: "N", float: "SECONDS"}.get(kinds[0], "TEXT")


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)
