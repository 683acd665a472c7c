from __future__ import annotations

from importlib import resources

import pytest
import redis

from lmpool.keys import GROUP, PoolKeys
from lmpool.scripts import Script, script

NAMES = sorted(
    path.name.removesuffix(".lua")
    for path in resources.files("lmpool").joinpath("lua").iterdir()
    if path.name.endswith(".lua") and path.name != "access.lua"  # which is a part of each
)


def test_every_script_is_known() -> None:
    assert {
        "admit",
        "alive",
        "bury",
        "check",
        "complete",
        "enqueue",
        "enter",
        "evict",
        "inherit",
        "leave",
        "mend",
        "narrow",
        "part",
        "pieces",
        "reclaim",
        "release",
        "replace",
        "reread",
        "serve",
        "sift",
        "waiting",
        "withdraw",
    } == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_script_says_what_it_does_and_compiles(
    name: str, redis_client: redis.Redis, any_server: str
) -> None:
    source = script(name).source
    assert source.startswith("-- ")
    assert "KEYS[1]" in source
    assert redis_client.script_load(source) == script(name).sha


@pytest.mark.parametrize("name", NAMES)
def test_scripts_call_nothing_that_depends_on_the_clock_or_chance_of_a_replica(name: str) -> None:
    source = script(name).source
    for forbidden in ("math.random", "'KEYS'", "'SCAN'", "'FLUSHALL'", "'FLUSHDB'", "loadstring"):
        assert forbidden not in source


def test_a_script_is_read_once() -> None:
    assert script("check") is script("check")
    assert repr(script("check")) == "Script('check')"


def test_a_script_that_there_is_not() -> None:
    with pytest.raises(FileNotFoundError):
        Script("no_such_script")


def test_a_script_that_the_server_forgot_is_sent_again(
    any_server: str, redis_client: redis.Redis, pool_name: str
) -> None:
    replace = script("replace")
    key = PoolKeys(pool_name).info
    for number in range(3):
        redis_client.script_flush()
        held = redis_client.get(key) or b""
        assert replace(redis_client, [key], [held, f"v{number}"]) == 1  # type: ignore[arg-type]
        assert redis_client.get(key) == f"v{number}".encode()
    redis_client.delete(key)


def test_a_loaded_script_needs_no_second_try(
    any_server: str,
    redis_client: redis.Redis,
    pool_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace = script("replace")
    replace.load(redis_client)  # type: ignore[arg-type]

    def refuse(*_: object) -> None:
        raise AssertionError("sent whole")

    monkeypatch.setattr(redis_client, "eval", refuse)
    key = PoolKeys(pool_name).info
    assert replace(redis_client, [key], ["", "v"]) == 1  # type: ignore[arg-type]
    redis_client.delete(key)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "replace"])
def test_scripts_touch_keys_of_one_slot_only(name: str) -> None:
    # Keys are KEYS[..] or begin with the shard's prefix, which carries the hash tag.
    for line in script(name).source.splitlines():
        if "redis.call(" in line and "'TIME'" not in line:
            assert not any(f"'{word}:" in line for word in ("jobs", "lmpool")), line
    assert GROUP == "workers"
