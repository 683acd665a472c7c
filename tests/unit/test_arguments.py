"""Arguments are typed and told as the settings are: there is one list of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
from pydantic import ByteSize

import lmpool
from lmpool.arguments import (
    AllClientArguments,
    AllWorkerArguments,
    ClientArguments,
    EmbeddedArguments,
    WorkerArguments,
)
from lmpool.settings import ClientOptions, WorkerOptions

OPTIONS = pytest.mark.parametrize(
    ("arguments", "options"),
    [(AllClientArguments, ClientOptions), (AllWorkerArguments, WorkerOptions)],
)

GIVEN_AS: dict[Any, Any] = {
    ByteSize: int | str,
    dict[str, Any]: Mapping[str, object],
    tuple[str, ...]: Sequence[str],
}
"""What may be given for a setting of a type, where it is another."""


def kinds(hint: Any) -> set[Any]:
    """The types of a union, without None; a Literal by its values."""
    if get_origin(hint) is Literal:
        return set(get_args(hint))
    if get_origin(hint) is Annotated:  # with the setting's bounds
        return kinds(get_args(hint)[0])
    if isinstance(hint, type) or get_origin(hint) in (dict, tuple, Mapping, Sequence):
        return set() if hint is type(None) else {hint}
    members = get_args(hint)
    if not members:
        return {hint}
    return set().union(*(kinds(GIVEN_AS.get(member, member)) for member in members))


@OPTIONS
def test_every_setting_is_an_argument_of_its_type(arguments: type, options: Any) -> None:
    hints = get_type_hints(arguments)
    assert list(hints.keys() ^ options.model_fields.keys()) == []
    for name, field in options.model_fields.items():
        wanted = GIVEN_AS.get(field.annotation, field.annotation)
        assert kinds(hints[name]) == kinds(wanted), name
        assert type(None) in get_args(hints[name]), f"{name}: None is as if it were left out"


DOORS = pytest.mark.parametrize(
    ("door", "arguments", "named"),
    [
        (lmpool.connect, ClientArguments, {"url", "pool", "framework"}),
        (lmpool.embedded, EmbeddedArguments, {"model", "engine", "pool", "framework"}),
    ],
)


@DOORS
def test_help_and_notebooks_see_every_option(
    door: Callable[..., Any], arguments: type, named: set[str]
) -> None:
    parameters = inspect.signature(door).parameters
    assert named | get_type_hints(arguments).keys() <= parameters.keys()
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


@DOORS
def test_every_option_is_told_as_the_settings_tell_it(
    door: Callable[..., Any], arguments: type, named: set[str]
) -> None:
    text = (inspect.getdoc(door) or "").partition("Args:\n")[2].partition("\n\n")[0]
    told = {
        name: " ".join(what.split())
        for name, what in re.findall(r"^    (\w+): (.*(?:\n        .*)*)", text, re.MULTILINE)
    }
    assert told.keys() == inspect.signature(door).parameters.keys()
    fields = {**WorkerOptions.model_fields, **ClientOptions.model_fields}
    for name in named | get_type_hints(arguments).keys():
        assert told[name] == fields[name].description, name


def test_client_and_worker_share_no_argument_by_accident() -> None:
    assert not get_type_hints(ClientArguments).keys() & get_type_hints(WorkerArguments).keys()
