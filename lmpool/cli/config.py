"""``lmpool config``: what is in force, and who says so."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic_settings import BaseSettings

from lmpool.cli.options import AsJson
from lmpool.cli.terminal import escape, json_text, lines
from lmpool.config_file import VARIABLE, read_config
from lmpool.errors import SettingsError
from lmpool.masking import mask_secrets
from lmpool.settings import (
    ClientOptions,
    GatewaySettings,
    WorkerOptions,
    refuse_unknown_variables,
    settings_of,
    variable_of,
)

OF: Final[dict[str, type[BaseSettings]]] = {
    "client": ClientOptions,
    "worker": WorkerOptions,
    "gateway": GatewaySettings,
}


def use(path: Path | None) -> None:
    """Have this process, and those that it starts, read this file."""
    if path is not None:
        file = Path(os.path.expanduser(path)).absolute()
        try:
            file.open("rb").close()
        except (OSError, ValueError) as error:  # it may have a null character
            reason = getattr(error, "strerror", None) or error
            raise SettingsError(
                f"--config {path} cannot be read: {reason}; write the path of a TOML file"
            ) from None
        os.environ[VARIABLE] = str(file)


def config(as_json: AsJson = False) -> None:
    """Show the settings in force, and where each comes from; secrets are masked."""
    refuse_unknown_variables()
    found = list(_found())
    if as_json:
        print(json_text(found))
        return
    out = lines()
    names = max(len(each["name"]) for each in found)
    for of in OF:
        out.print(f"[bold]{of}[/]")
        for each in found:
            if each["of"] == of:
                value = escape(_shown(each["value"]))
                told = "" if each["from"] == "default" else f"  [dim]{escape(each['from'])}[/]"
                out.print(f"  {each['name']:<{names}}  {value}{told}")


def _found() -> Iterator[dict[str, Any]]:
    file = read_config()
    for of, options in OF.items():
        try:
            settings = options()
        except SettingsError as error:
            raise SettingsError(f"the settings of a {of}: {error}") from None
        in_file = {} if file is None else settings_of(file, options)
        for name in options.model_fields:
            variable, source = variable_of(options, name), "default"
            if os.environ.get(variable):
                source = variable
            elif file is not None and name in in_file:
                source = str(file.path)
            value = mask_secrets(getattr(settings, name))
            yield {"of": of, "name": name, "value": value, "from": source}


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)
