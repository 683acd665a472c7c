"""Settings in a file: ``lmpool.toml`` of the current folder, or the one LMPOOL_CONFIG names."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lmpool.checks import said
from lmpool.errors import SettingsError

VARIABLE: Final = "LMPOOL_CONFIG"
USUAL: Final = "lmpool.toml"
MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file's settings, by name; those of a gateway are in the table ``gateway``."""

    path: Path
    settings: Mapping[str, Any]

    def table(self, name: str) -> Mapping[str, Any]:
        """A table's settings, or with "" those outside of tables. Raises `SettingsError`."""
        if not name:
            return {key: value for key, value in self.settings.items() if key != "gateway"}
        found = self.settings.get(name, {})
        if not isinstance(found, dict):
            raise SettingsError(f"{self.path}: {name} is a table: write [{name}]")
        return found


def read_config(environ: Mapping[str, str] | None = None) -> ConfigFile | None:
    """The file that says settings, if there is one.

    Raises `SettingsError` where the one that is named is not there, and for one that is no TOML.
    """
    named = (os.environ if environ is None else environ).get(VARIABLE)
    path = Path(os.path.expanduser(named or USUAL))
    if not named and not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise SettingsError(f"{path}: more than {MAX_BYTES} bytes are no settings")
        return ConfigFile(path, tomllib.loads(data.decode("utf-8-sig")))
    except (OSError, UnicodeDecodeError) as error:
        name = f"{VARIABLE}={named}" if named else str(path)
        reason = getattr(error, "strerror", None) or said(error)
        raise SettingsError(
            f"{name} cannot be read: {reason}; write the path of a TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsError(
            f'{path} is no TOML ({said(error)}): write for example pool = "llama"'
        ) from None
