"""What the doctor finds of a user that lacks a right."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import redis

from lmpool import inspection
from lmpool.errors import PromptFailed
from lmpool.permissions import (
    Command,
    client_commands,
    control_commands,
    watcher_commands,
    worker_commands,
)
from lmpool.pool_view import PoolViewer
from lmpool.scripts import CLIENT_SCRIPTS, script
from lmpool.servers import Servers
from lmpool.shards import change
from lmpool.worker.service import warn_of_rights
from tests.support.clients import connected
from tests.support.server import RealServer
from tests.support.users import rules_of
from tests.support.waiting import until
from tests.support.workers import in_process_worker, worker_process
from tests.unit.test_scripts import NAMES as SCRIPTS

OF_CLIENTS = client_commands("default", "producer-1")
OF_WORKERS = worker_commands("default")
OF_WATCHERS = watcher_commands("default")
HAVE_PARTS = ("XINFO", "XGROUP", "SCRIPT")


def name_of(command: Command) -> str:
    """As ACL rules have it."""
    name, *words = map(str, command)
    return f"{name}|{words[0]}".lower() if name in HAVE_PARTS else name.lower()


def first_words(commands: Iterable[Command]) -> set[str]:
    return {str(command[0]).lower() for command in commands}


def called(*scripts: str) -> set[str]:
    """What these scripts call, and what all begin with."""
    text = "".join(script(name).source for name in scripts)
    found = re.findall(r"call\('([A-Z]+)'(?:, '([A-Z]+)')?", text)
    return {name_of(words if words[0] in HAVE_PARTS else words[:1]) for words in found}


NAMES = sorted(first_words(OF_CLIENTS) - {"info", "time"})
ONLY_WORKERS = sorted(first_words(OF_WORKERS) - first_words(OF_CLIENTS) - {"xreadgroup"})

pytestmark = [pytest.mark.server, pytest.mark.one_server]


def said(url: str, pool: str = "default") -> list[str]:
    """What the doctor says of the user's rights."""
    findings = inspection.diagnose(url, pool)
    findings = [each for each in findings if each.what.startswith("this user")]
    return [f"{each.level}: {each.what}. {each.remedy}" for each in findings]


def found(url: str, pool: str = "default") -> list[str]:
    """What clients lack."""
    return [text for text in said(url, pool) if text.startswith("wrong: ")]


BOTH = "ok: this user may do what clients and workers do. "
CLIENT = "ok: this user may do what clients do, and take no jobs as workers do. "


WATCHES = "ok: this user may read what `lmpool exporter` does, and neither ask nor take jobs. "
ROLES = {"producer": CLIENT, "worker": BOTH, "operator": BOTH, "exporter": WATCHES}


@pytest.mark.parametrize(("role", "does"), ROLES.items())
@pytest.mark.parametrize("is_served", [False, True])
def test_a_role_of_the_file_may_all_that_is_looked_up(
    is_served: bool, role: str, does: str, url_of: Callable[..., str], own_server: RealServer
) -> None:
    url = url_of(role, *rules_of(role))
    with in_process_worker(own_server.url, "default") if is_served else nullcontext():
        assert said(url) == [does]
        assert not [each for each in inspection.diagnose(url) if each.level == "wrong"]


@pytest.mark.parametrize(("role", "does"), ROLES.items())
def test_a_role_for_one_pool_may_all_that_is_looked_up_there(
    role: str, does: str, url_of: Callable[..., str]
) -> None:
    """As docs/security.md says; and who is to be kept apart has notices of its own name."""
    text = " ".join(rules_of(role)).replace("{lmpool:*}:serving", "{lmpool:llama}:serving")
    text = text.replace("%RW~{lmpool:* ", "%RW~{lmpool:llama}:* %RW~{lmpool:llama:* ")
    text = re.sub(r"(%\w+~)lmpool:\* ", r"\1lmpool:llama \1lmpool:llama:* ", text)
    text = text.replace("{lmpool:*", "{lmpool:llama:*").replace(":producer-*", ":alice-*")
    url = url_of("alice", *re.findall(r"\([^)]*\)|\S+", text))
    assert said(url, "llama") == [does]
    assert found(url, "other")


@pytest.mark.parametrize("name", sorted(first_words(OF_WATCHERS) - {"time"}))
def test_a_command_that_an_exporter_lacks_is_named(name: str, url_of: Callable[..., str]) -> None:
    url = url_of("exporter", *rules_of("exporter"), f"-{name}")
    (reason,) = said(url)
    assert reason.startswith("wrong: this user may not do all that `lmpool exporter` does: ")
    assert f" {name.upper()}: " in reason
    (rules,) = re.findall(r"for a client: ACL SETUSER <user> (.*)$", reason)
    assert found(url_of("exporter", *rules.split())) == []


@pytest.mark.parametrize(
    "lacking",
    [
        ["-evalsha", "-multi"],
        ["-@scripting", "-@transaction", "-xreadgroup"],
        ["-evalsha", "-xadd", "-xreadgroup"],
        ["-evalsha", "-xadd", "-multi"],
    ],
)
def test_who_may_change_something_is_a_client_that_lacks_rights(
    lacking: list[str], url_of: Callable[..., str], admin: redis.Redis
) -> None:
    (reason,) = said(url_of("producer", "~*", "+@all", *lacking))
    assert reason.startswith("wrong: this user is not allowed what clients do: ")
    assert admin.dbsize() == 0


def test_who_lacks_the_keys_of_shards_is_told_as_a_client_too(url_of: Callable[..., str]) -> None:
    (reason,) = said(url_of("producer", "~lmpool:*", "+@all"))
    assert "a client's that changes something: " in reason
    assert "for a client: ACL SETUSER" in reason


def test_keys_that_an_exporter_lacks_are_named(url_of: Callable[..., str]) -> None:
    rules = [rule for rule in rules_of("exporter") if "dead" not in rule]
    (reason,) = said(url_of("exporter", *rules))
    assert reason.startswith("wrong: ")
    assert re.search(r" XLEN \S+:dead: ", reason)


def test_what_is_looked_up_is_all_that_an_exporter_needs(
    url_of: Callable[..., str], own_server: RealServer, admin: Any, pool_name: str
) -> None:
    rules = [rule for rule in exactly(OF_WATCHERS) if rule not in ("+multi", "+exec")]
    url = url_of("exporter", *rules)
    admin.acl_log_reset()
    with (
        in_process_worker(own_server.url, pool_name, shards=1),
        connected(own_server.url, pool_name) as lm,
        PoolViewer(url, pool_name) as viewer,
    ):
        lm.next_token_logprobs_sync([1, 2])
        (shard,) = lm.shards
        for stream in shard.streams:  # what waits where nobody reads
            admin.xgroup_destroy(stream.key, "workers")
            admin.xadd(stream.key, {"job": "x"})
        admin.xadd(shard.dead, {"job": "x"})
        view = viewer.read()
    assert view.statistics["computed"] == 1
    assert view.dead_letters is not None
    assert admin.acl_log(100) == []


@pytest.mark.parametrize(
    "lacking", [["xack", "xdel"], ["hincrby"], ["multi"], ["psetex"], ["xreadgroup"]]
)
def test_a_worker_says_at_its_start_what_it_may_not_do(
    lacking: list[str],
    url_of: Callable[..., str],
    admin: redis.Redis,
    pool_name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = url_of("worker", "~*", "+@all", *(f"-{name}" for name in lacking))
    with in_process_worker(url, pool_name, may_fail=True):
        pass
    (line,) = [text for text in caplog.messages if "what workers do" in text]
    assert line.startswith("the server: this user is not allowed what workers do: ")
    for name in lacking:
        assert f" {name.upper()}: " in line
    assert line.endswith("%RW~arq:*, or `worker` of deploy/redis/users.acl")
    rules = re.findall(r"ACL SETUSER <user> ([^,]*),", line)[0].split()
    caplog.clear()
    with in_process_worker(url_of("worker", *rules), pool_name):
        pass
    assert "not allowed" not in caplog.text


def test_a_worker_whose_calls_are_elsewhere_needs_no_rights_for_them_here(
    url_of: Callable[..., str],
    own_server: RealServer,
    pool_name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = url_of("worker", *(rule for rule in rules_of("worker") if "arq" not in rule))
    with in_process_worker(url, pool_name, control_url=own_server.url):
        pass
    assert "not allowed" not in caplog.text
    with in_process_worker(url, pool_name):
        pass
    assert "not allowed what workers do: " in caplog.text
    with closing(Servers.of_url(url)) as servers:
        caplog.clear()
        warn_of_rights(servers.anywhere, control_commands(pool_name))
    assert "arq:job:" in caplog.text


@pytest.mark.parametrize(
    "lacking", [[], ["-multi"], ["-exec"], ["-discard"], ["-watch"], ["-xdel"]]
)
def test_what_is_looked_up_is_not_done(
    lacking: list[str], url_of: Callable[..., str], admin: redis.Redis
) -> None:
    """Neither where there is nothing, nor where all is there."""
    url = url_of("producer", "~*", "+@all", *lacking)
    assert said(url)
    assert admin.dbsize() == 0
    keys = {
        str(word) for each in OF_WORKERS + OF_CLIENTS for word in each if "lmpool:" in str(word)
    }
    admin.mset(dict.fromkeys(keys, "there"))
    assert said(url)
    held: Any = admin.mget(keys)
    assert {*held} == {b"there"}
    assert admin.dbsize() == len(keys)
    assert admin.script_exists(hashlib.sha1(b"return").hexdigest()) == [False]


@pytest.mark.parametrize("name", [*NAMES, "multi", "exec"])
def test_a_command_that_is_lacking_is_named(
    name: str, url_of: Callable[..., str], admin: redis.Redis
) -> None:
    (reason,) = found(url_of("producer", "~*", "+@all", f"-{name}"))
    assert f" {name.upper()}: " in reason
    assert admin.dbsize() == 0


@pytest.mark.parametrize("name", ONLY_WORKERS)
def test_a_command_that_only_workers_need_is_named_and_nothing_is_wrong(
    name: str, url_of: Callable[..., str], admin: redis.Redis
) -> None:
    (reason,) = said(url_of("worker", "~*", "+@all", f"-{name}"))
    assert reason.startswith("note: this user may take jobs, and not do all else that workers do: ")
    assert f" {name.upper()}: " in reason
    assert admin.dbsize() == 0


def test_who_may_take_no_jobs_is_told_no_more_of_workers(url_of: Callable[..., str]) -> None:
    assert said(url_of("narrow", "~*", "+@all", "-xreadgroup", "-xclaim")) == [CLIENT]


def test_a_look_leaves_room_in_the_log_of_refusals(
    url_of: Callable[..., str], admin: redis.Redis
) -> None:
    """Who was refused something looks there, too: by default it holds 128."""
    url = url_of("producer", *rules_of("producer"))
    admin.acl_log_reset()
    assert said(url) == [CLIENT]
    assert len(admin.acl_log()) < 20


@pytest.mark.parametrize("kind", ["jobs", "flight", "reply", "waiting", "wake"])
def test_keys_out_of_reach_are_named(kind: str, url_of: Callable[..., str]) -> None:
    kinds = {"jobs", "batch", "flight", "reply", "result", "waiting", "wake", "adapters"} - {kind}
    keys = [f"~{{lmpool:*}}:{each}*" for each in (*kinds, "alive", "steady", "bounds", "counters")]
    rules = ("+@all", "~lmpool:*", "~{lmpool:*}:serving", *keys)
    (reason,) = found(url_of("producer", *rules))
    assert f":{kind}" in reason


@pytest.mark.parametrize("rights", [[], ["%R~arq:*"]])
def test_keys_of_workers_out_of_reach_are_named(
    rights: list[str], url_of: Callable[..., str]
) -> None:
    (reason,) = said(url_of("worker", "+@all", "~lmpool:*", "~{lmpool:*", *rights))
    assert reason.startswith("note: ")
    assert {"arq:job:", "arq:retry:", "arq:result:"} <= {*re.findall(r"arq:[a-z]+:", reason)}


def test_who_may_do_almost_nothing_is_told_no_more_than_fits(url_of: Callable[..., str]) -> None:
    (reason,) = found(url_of("producer", "~*", "+@connection", "+@transaction", "+info"))
    assert re.search(r"; and \d+ more\. ACL SETUSER <user> ", reason)
    (reason,) = found(url_of("producer", "~*", "+@connection", "+info"))
    assert "multi" in reason


def remedy(reason: str) -> list[str]:
    (rules,) = re.findall(r"ACL SETUSER <user> ([^,]*),", reason)
    return str(rules).split()


def test_the_remedy_is_one(url_of: Callable[..., str]) -> None:
    (reason,) = found(url_of("producer", "~*", "+@connection", "+info"))
    assert found(url_of("producer", *remedy(reason))) == []
    (reason,) = said(url_of("worker", "~*", "+@all", "-xack"))
    assert said(url_of("worker", *remedy(reason))) == [BOTH]


def test_every_command_of_clients_scripts_is_looked_up(
    url_of: Callable[..., str], own_server: RealServer, pool_name: str
) -> None:
    """Those that scripts for workers alone have of what all begin with are no client's."""
    used = called(*CLIENT_SCRIPTS)
    assert used - {*map(name_of, OF_CLIENTS)} == {"xack"}
    # And what it needs of all of these is enough.
    names = [f"+{name}" for name in (*NAMES, "multi", "exec", "info", "time")]
    with (
        in_process_worker(own_server.url, pool_name),
        connected(url_of("producer", "~*", "+@connection", *names), pool_name) as lm,
    ):
        assert len(lm.sync.batch_next_token_logprobs([[1], [2]], timeout=30)) == 2


def test_every_command_of_workers_scripts_is_looked_up() -> None:
    assert called(*SCRIPTS) - {*map(name_of, OF_WORKERS)} == {"hmget"}  # of clients' alone
    assert "HMGET" not in "".join(
        script(name).source for name in SCRIPTS if name not in CLIENT_SCRIPTS
    )


def exactly(commands: Iterable[Command]) -> list[str]:
    """Rules by which a user may do these commands, each with keys of its kind, and no more."""
    names: dict[str, set[str]] = defaultdict(set)
    rules = ["+info", "+time", "+script|load", "+multi", "+exec", "+@connection"]
    for command in commands:
        kinds = [re.sub(r"\{.*\}", "{lmpool:*}", str(word)) for word in command]
        kinds = [re.sub(r"(?<=[:}])(0+|c|w)(?=:|$)", "*", kind) for kind in kinds]
        kinds = [kind.replace("lmpool:default", "lmpool:*") for kind in kinds if "lmpool:" in kind]
        names[" ".join(f"~{kind}" for kind in kinds)].add(f"+{name_of(command)}")
    # These take keys of several kinds at once.
    names["~*"] = {"+evalsha", "+eval", "+xreadgroup"}
    names["~arq:*"] = {"+del"}
    rules += [f"({' '.join(sorted(some))} {kinds})" for kinds, some in names.items() if kinds]
    return rules


def test_what_is_looked_up_is_all_that_a_worker_needs(
    url_of: Callable[..., str],
    own_server: RealServer,
    admin: Any,
    pool_name: str,
    tmp_path: Path,
) -> None:
    """Nothing was refused a worker that may do that alone, but what it does without."""
    url = url_of("worker", *exactly(OF_WORKERS))
    admin.acl_log_reset()
    style = tmp_path / "style"
    style.mkdir()
    (style / "adapter_config.json").write_text('{"r": 8}')
    (style / "adapter_model.safetensors").write_text("x")
    settings: dict[str, Any] = {
        "adapter_dirs": [str(tmp_path)],
        "engine_opts": {"fail_token": 99},
        "shards": 1,
    }
    with (
        worker_process(url, pool_name, alive=False, **settings) as first,
        worker_process(url, pool_name, alive=False, **settings) as second,
    ):
        for worker in (first, second):
            worker.url = own_server.url  # by which it is looked at
            worker.wait_until_alive()
        with connected(own_server.url, pool_name) as lm:
            lm.add_new_lora(str(style), "style")
            lm.batch_next_token_logprobs_sync([[1, each] for each in range(50)], lora_name="style")
            pieces = lm.sync.stream([1, 2], max_tokens=5, eos_token_ids=[])
            assert sum(piece.token_ids.size for piece in pieces) == 5
            with pytest.raises(PromptFailed):
                lm.next_token_logprobs_sync([99])
            (shard,) = lm.shards
            admin.xadd(shard.stream().key, {"job": "none"})
            until(lambda: admin.xlen(shard.dead) > 0, what="it to be buried")
            change(own_server.url, pool_name, 2, 8)
            until(lambda: admin.xlen(shard.dead) == 0, what="it to be taken along")
            lm.remove_lora("style")
    denied = {(str(entry["reason"]), str(entry["object"])) for entry in admin.acl_log(1000)}
    assert {what for _, what in denied} <= {"config|get", "dbsize", "discard"}, denied
