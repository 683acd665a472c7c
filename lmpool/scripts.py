"""The Lua scripts: every change of several keys is one of them, atomic on the server.

A script is called by its hash. One that a server has forgotten (a restart, a failover, ``SCRIPT
FLUSH``) is sent whole by who may send scripts; clients that may not wait for a worker, which loads
theirs at every heartbeat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any, Final

import redis.exceptions

from lmpool.commands import Server, Value
from lmpool.replies import RefusedInScript

SHARED: Final = "access"
"""What every script begins with."""
CLIENT_SCRIPTS: Final = ("check", "enqueue", "withdraw")


class ScriptsMissing(redis.exceptions.ResponseError):
    """The server does not know the scripts, and this user may not send any."""

    def __init__(self) -> None:
        super().__init__(
            "NOSCRIPT the server has forgotten the pool's scripts, and this user may not send "
            "them: a worker does"
        )


def _read(name: str) -> str:
    return resources.files("lmpool").joinpath("lua", f"{name}.lua").read_text("utf-8")


class Script:
    """One named script, behind the functions that all of them share."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = f"{_read(SHARED)}\n{_read(name)}"
        self.sha = hashlib.sha1(self.source.encode()).hexdigest()

    def __call__(self, server: Server, keys: Sequence[str], arguments: Sequence[Value]) -> Any:
        """Run it. Returns what it returns."""
        try:
            return server.evalsha(self.sha, len(keys), *keys, *arguments)
        except redis.exceptions.NoScriptError:
            try:
                return server.eval(self.source, len(keys), *keys, *arguments)
            except redis.exceptions.NoPermissionError as error:
                if isinstance(error, RefusedInScript):
                    raise
                raise ScriptsMissing from None

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
    if extension == "lua" and name != SHARED
}


def script(name: str) -> Script:
    """The script of that name."""
    return _SCRIPTS[name]


def load_client_scripts(server: Server) -> None:
    """Make the server know what clients run."""
    for name in CLIENT_SCRIPTS:
        script(name).load(server)
