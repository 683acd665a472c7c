"""Users of a server, with the rights of a published role or those that a test says."""

from __future__ import annotations

import re
from pathlib import Path

import redis

from tests.support.server import RealServer

USERS = Path(__file__).parents[2] / "deploy" / "redis" / "users.acl"


def rules_of(role: str) -> list[str]:
    """The rules of a user of ``users.acl``, less its password's."""
    (rules,) = re.findall(rf"^user {role} on >\S+ (.*)$", USERS.read_text("utf-8"), re.M)
    return re.findall(r"\([^)]*\)|\S+", rules)


def url_of_user(server: RealServer, admin: redis.Redis, name: str, *rules: str) -> str:
    """The URL of that user, which has these rights from now on, where it is connected too."""
    admin.execute_command("ACL", "SETUSER", name, "reset", "on", ">pw", *rules)
    return server.url.replace("unix://", f"unix://{name}:pw@")
