"""The Lua scripts: every change of several keys is one of them, atomic on the server.

A script is called by its hash, and sent whole once more when a server has forgotten it (a restart,
a failover, ``SCRIPT FLUSH``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any, Final

import redis.exceptions

from lmpool.commands import Server, Value


class Script:
    """One named script."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = resources.files("lmpool").joinpath("lua", f"{name}.lua").read_text("utf-8")
        self.sha = hashlib.sha1(self.source.encode()).hexdigest()

    def __call__(self, server: Server, keys: Sequence[str], arguments: Sequence[Value]) -> Any:
        """Run it. Returns what it returns."""
        try:
            return server.evalsha(self.sha, len(keys), *keys, *arguments)
        except redis.exceptions.NoScriptError:
            return server.eval(self.source, len(keys), *keys, *arguments)

    def load(self, server: Server) -> None:
        """Make the server know it."""
        server.script_load(self.source)

    def __repr__(self) -> str:
        return f"Script({self.name!r})"


# Read with this module, not when first asked for: a fork while a thread reads them, which imports
# more, would leave the child with import locks that nobody releases.
_SCRIPTS: Final = {
    name: Script(name)
    for name, extension in (
        file.name.split(".") for file in resources.files("lmpool").joinpath("lua").iterdir()
    )
    if extension == "lua"
}


def script(name: str) -> Script:
    """The script of that name."""
    return _SCRIPTS[name]
