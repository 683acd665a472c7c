from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import pytest
import redis

from lmpool.keys import GROUP, PoolKeys, ShardKeys
from lmpool.scripts import Script, script
from lmpool.wire import Job
from tests.support.protocol import (
    Caller,
    Consumer,
    entries_of,
    new_job,
    queued,
    read_flight,
    shard_of_pool,
    write_flight,
)

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
        "near",
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


# --- who is near and waits ---------------------------------------------------------------------

JOBS = [new_job(n) for n in range(6)]


@pytest.fixture
def shard(pool_name: str) -> ShardKeys:
    return shard_of_pool(pool_name)


def digests_of(*places: int) -> str:
    return "".join(JOBS[n].digest.hex() for n in places)


def tell_near(server: redis.Redis, shard: ShardKeys, digests: str, *near: str) -> int:
    """How many of those near were told that these lie near."""
    told: int = script("near")(
        server,  # type: ignore[arg-type]
        [shard.reply("near")],
        [shard.prefix, digests, "there", f" {' '.join(near)} "],
    )
    return told


def near_notices(server: redis.Redis, shard: ShardKeys, client: str) -> list[str]:
    """The digests of each notice that says so."""
    entries = entries_of(server, shard.reply(client))
    near = [fields for _, fields in entries if b"near" in fields]
    assert all(fields[b"in"] == b"there" for fields in near)
    return [fields[b"near"].decode() for fields in near]


def waits(server: redis.Redis, shard: ShardKeys, client: str, *places: int) -> Caller:
    caller = Caller(server, shard, client)
    caller.enqueue(*(JOBS[n] for n in places))
    return caller


def flights(server: redis.Redis, shard: ShardKeys, jobs: Sequence[Job] = JOBS) -> list[object]:
    return [read_flight(server, shard, job) for job in jobs]


def test_who_waits_and_is_near_is_told(
    any_server: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    callers = {
        "a": waits(redis_client, shard, "a", 0, 1),
        "b": waits(redis_client, shard, "b", 1, 2, 3),
        "far": waits(redis_client, shard, "far", 0, 1, 2),
        "other": waits(redis_client, shard, "other", 4),
    }
    before, jobs = flights(redis_client, shard), queued(redis_client, shard)
    near = ("a", "b", "other", "nobody")
    assert tell_near(redis_client, shard, digests_of(3, 0, 1, 2), *near) == 2
    assert near_notices(redis_client, shard, "a") == [digests_of(0, 1)]
    assert near_notices(redis_client, shard, "b") == [digests_of(3, 1, 2)]
    assert near_notices(redis_client, shard, "far") == []
    assert near_notices(redis_client, shard, "other") == []
    # It is a shortcut alone: nothing is done with, and no other sees anything of it.
    assert flights(redis_client, shard) == before
    assert queued(redis_client, shard) == jobs
    assert [notice for caller in callers.values() for notice in caller.notices()] == []


def test_who_was_told_is_told_again_once_it_is_stored(
    any_server: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    worker = Consumer(redis_client, shard)
    callers = [waits(redis_client, shard, name, 0, 1) for name in ("a", "far")]
    ids = worker.read()
    assert tell_near(redis_client, shard, digests_of(0, 1), "a") == 1
    worker.complete(
        [(job, entry, "ok", "") for job, entry in zip(JOBS[:2], ids, strict=True)],
        stored=JOBS[:2],
    )
    for caller in callers:
        assert [notice.digest for notice in caller.notices()] == [j.digest for j in JOBS[:2]]
    assert tell_near(redis_client, shard, digests_of(0, 1), "a") == 0  # nobody waits any more


def test_a_name_is_told_as_a_whole(
    any_server: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    waiting = ("a", "ab", "b.c", "%a", ".", "c-1", "x")
    for client in waiting:
        waits(redis_client, shard, client, 0)
    near = ("abc", "bxc", "c-12", "%", "xx", "c-", "b")
    assert tell_near(redis_client, shard, digests_of(0), *near) == 0
    assert [near_notices(redis_client, shard, client) for client in waiting] == [[]] * 7
    for client in waiting:
        assert tell_near(redis_client, shard, digests_of(0), "z", client, *near) == 1
    assert [near_notices(redis_client, shard, client) for client in waiting] == (
        [[digests_of(0)]] * 7
    )


@pytest.mark.parametrize("same", [True, False], ids=["who wait together", "others each time"])
def test_broken_flights_cost_themselves_alone(
    any_server: str, redis_client: redis.Redis, shard: ShardKeys, same: bool
) -> None:
    waits(redis_client, shard, "a", 0, 2, 4)
    waits(redis_client, shard, "b", *((0, 2, 4) if same else (2,)))
    right = redis_client.get(shard.flight(JOBS[0].digest))
    assert isinstance(right, bytes)
    places = (0, 1, 2, 3, 4)
    kinds = (b"", b"no flight", b"1-0 0 a ", b"1-0 0", right.replace(b"-", b"+"), right * 10_000)
    for broken in kinds:
        redis_client.set(shard.flight(JOBS[1].digest), broken)
        redis_client.delete(shard.flight(JOBS[3].digest))
        redis_client.hset(shard.flight(JOBS[3].digest), "no", "string")
        assert tell_near(redis_client, shard, digests_of(*places), "a", "b") == 2
        assert near_notices(redis_client, shard, "a").pop() == digests_of(0, 2, 4)
        assert near_notices(redis_client, shard, "b").pop() == (
            digests_of(0, 2, 4) if same else digests_of(2)
        )
        assert redis_client.get(shard.flight(JOBS[1].digest)) == broken


def test_who_is_named_many_times_is_told_once(
    any_server: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    waits(redis_client, shard, "a", 0)
    write_flight(redis_client, shard, JOBS[1], "1-0", *["a"] * 1000)
    assert tell_near(redis_client, shard, digests_of(1, 0), "a", "a") == 1
    assert near_notices(redis_client, shard, "a") == [digests_of(1, 0)]


def test_who_is_gone_gets_no_reply_stream(
    any_server: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    callers = [waits(redis_client, shard, name, 0, 1) for name in ("a", "b", "c")]
    callers[0].vanish()
    callers[2].vanish()
    redis_client.set(shard.reply("c"), b"no stream")
    assert tell_near(redis_client, shard, digests_of(0, 1), "a", "b", "c") == 1
    assert redis_client.exists(shard.reply("a")) == 0
    assert redis_client.get(shard.reply("c")) == b"no stream"
    assert near_notices(redis_client, shard, "b") == [digests_of(0, 1)]


def test_nobody_is_told_nothing(
    any_server: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    waits(redis_client, shard, "a", 0)
    assert tell_near(redis_client, shard, digests_of(1, 2), "a") == 0  # nobody waits
    assert tell_near(redis_client, shard, digests_of(0)) == 0  # nobody is near
    assert tell_near(redis_client, shard, "", "a") == 0
    assert tell_near(redis_client, shard, digests_of(0)[:31], "a") == 0
    assert near_notices(redis_client, shard, "a") == []
    assert redis_client.exists(shard.reply("near")) == 0
    right = redis_client.get(shard.flight(JOBS[0].digest))
    assert isinstance(right, bytes)
    redis_client.set(shard.flight(JOBS[1].digest)[:-1], right)
    assert tell_near(redis_client, shard, digests_of(0) + digests_of(1)[:31], "a") == 1
    assert near_notices(redis_client, shard, "a") == [digests_of(0)]  # what is whole


def test_many_rows_are_told_of_at_once(
    any_server: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    """More than what one call of the server takes."""
    jobs = [new_job(7, n) for n in range(1500)]
    callers = [Caller(redis_client, shard, name) for name in ("a", "b")]
    callers[0].enqueue(*jobs, bound=10_000)
    callers[1].enqueue(*jobs[::2], bound=10_000)
    digests = [job.digest.hex() for job in jobs]
    assert tell_near(redis_client, shard, "".join(digests), "a", "b") == 2
    assert near_notices(redis_client, shard, "a") == ["".join(digests)]
    assert near_notices(redis_client, shard, "b") == ["".join(digests[::2])]
