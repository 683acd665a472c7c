"""Options of commands that are settings: named, bounded and described where the settings are."""

from __future__ import annotations

import inspect
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo


def option(name: str, field: FieldInfo, panel: str | None = None) -> inspect.Parameter:
    """The option of a setting; None, or False, where it is not written."""
    choices = [str(choice) for choice in _choices(field)]
    # In the text and not as the metavar: it would take the width that names need.
    text = f"{', '.join(choices)}: {field.description}" if choices else field.description or ""
    default = field.default
    if field.default_factory is None and default not in (None, (), False):
        shown = f"{default:g}" if isinstance(default, float) else default
        if isinstance(default, ByteSize):
            shown = f"{default >> 20}MiB"
        if name == "url":  # too long a word for a narrow terminal
            text, shown = f"{text}, as redis://HOST/0", "that of localhost"
        text += f" [dim]\\[{shown}][/]"
    if field.annotation is bool:
        return parameter(name, bool, text, metavar=None, panel=panel, default=False)
    return parameter(name, str, text, metavar=_metavar(field), panel=panel)


def parameter(
    name: str,
    kind: type,
    text: str,
    *,
    metavar: str | None,
    panel: str | None = None,
    default: Any = None,
    hidden: bool = False,
) -> inspect.Parameter:
    """An option, as a function that typer calls has it."""
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


def is_json(field: FieldInfo) -> bool:
    """Whether its option is written as JSON."""
    return get_origin(field.annotation) in (dict, tuple, list)


def _metavar(field: FieldInfo) -> str:
    if is_json(field):
        return "JSON"
    return {int: "N", float: "SECONDS", ByteSize: "SIZE", Path: "FILE"}.get(_kind(field), "TEXT")


def _choices(field: FieldInfo) -> tuple[Any, ...]:
    kind = _kind(field)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _kind(field: FieldInfo) -> Any:
    return next(kind for kind in _alternatives(field.annotation) if kind is not type(None))


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)
