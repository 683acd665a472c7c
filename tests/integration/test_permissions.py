"""What the doctor finds of a user that lacks a right."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from lmpool import inspection
from lmpool.permissions import client_commands
from lmpool.scripts import CLIENT_SCRIPTS, script
from tests.support.clients import connected
from tests.support.server import RealServer
from tests.support.workers import in_process_worker

ROOT = Path(__file__).parents[2]
COMMANDS = client_commands("default", "producer-1")
NAMES = sorted({str(command[0]).lower() for command in COMMANDS} - {"info", "time"})

pytestmark = [pytest.mark.server, pytest.mark.one_server]


@pytest.fixture(scope="module")
def server(server_binary: str) -> Iterator[RealServer]:
    with RealServer(binary=server_binary) as server:
        yield server


@pytest.fixture
def admin(server: RealServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        client.flushall()
        yield client


@pytest.fixture
def url_of(server: RealServer, admin: redis.Redis) -> Callable[..., str]:
    """The URL of the user ``producer`` with these rules."""

    def made(*rules: str) -> str:
        admin.execute_command("ACL", "SETUSER", "producer", "reset", "on", ">pw", *rules)
        return server.url.replace("unix://", "unix://producer:pw@")

    return made


def found(url: str) -> list[str]:
    return [f"{f.what}. {f.remedy}" for f in inspection.diagnose(url) if "not allowed" in f.what]


def test_a_producer_of_the_file_may_all_that_is_looked_up(url_of: Callable[..., str]) -> None:
    acl = (ROOT / "deploy" / "redis" / "users.acl").read_text()
    (rules,) = re.findall(r"^user producer on >\S+ (.*)$", acl, re.M)
    words: Any = re.findall(r"\([^)]*\)|\S+", rules)
    assert found(url_of(*words)) == []


def test_what_is_looked_up_is_not_done(url_of: Callable[..., str], admin: redis.Redis) -> None:
    assert found(url_of("~*", "+@all")) == []
    assert admin.dbsize() == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_command_that_is_lacking_is_named(
    name: str, url_of: Callable[..., str], admin: redis.Redis
) -> None:
    (reason,) = found(url_of("~*", "+@all", f"-{name}"))
    assert f"{name.upper()} " in reason
    assert admin.dbsize() == 0


@pytest.mark.parametrize("kind", ["jobs", "flight", "reply", "waiting", "wake"])
def test_keys_out_of_reach_are_named(kind: str, url_of: Callable[..., str]) -> None:
    kinds = {"jobs", "batch", "flight", "reply", "result", "waiting", "wake", "adapters"} - {kind}
    keys = [f"~{{lmpool:*}}:{each}*" for each in (*kinds, "alive", "steady", "bounds", "counters")]
    (reason,) = found(url_of("+@all", "~lmpool:*", "~{lmpool:*}:serving", *keys))
    assert f":{kind}" in reason


def test_who_may_do_almost_nothing_is_told_no_more_than_fits(url_of: Callable[..., str]) -> None:
    (reason,) = found(url_of("~*", "+@connection", "+@transaction", "+info"))
    assert re.search(r"; and \d+ more\. ACL SETUSER <user> ", reason)
    (reason,) = found(url_of("~*", "+@connection", "+info"))
    assert "multi" in reason


def test_the_remedy_is_one(url_of: Callable[..., str]) -> None:
    (reason,) = found(url_of("~*", "+@connection", "+info"))
    (rules,) = re.findall(r"ACL SETUSER <user> ([^,]*),", reason)
    assert found(url_of(*rules.split())) == []


def test_every_command_of_clients_scripts_is_looked_up(
    url_of: Callable[..., str], server: RealServer, pool_name: str
) -> None:
    """Those that scripts for workers alone have of what all begin with are no client's."""
    shared = script("enqueue").source
    sources = [shared, *(script(name).source for name in CLIENT_SCRIPTS)]
    used = {name.lower() for text in sources for name in re.findall(r"call\('([A-Z]+)'", text)}
    assert used - {*NAMES} == {"time", "xack"}
    # And what it needs of all of these is enough.
    names = [f"+{name}" for name in (*NAMES, "multi", "exec", "info", "time")]
    with (
        in_process_worker(server.url, pool_name),
        connected(url_of("~*", "+@connection", *names), pool_name) as lm,
    ):
        assert len(lm.sync.batch_next_token_logprobs([[1], [2]], timeout=30)) == 2
