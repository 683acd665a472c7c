"""What the doctor finds, in facts that no server has to produce."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lmpool.diagnosis import Facts, Finding, LaneFacts, examine
from lmpool.model_info import ModelInfo

MODEL = ModelInfo(
    model="m",
    revision=None,
    fingerprint="0" * 32,
    vocab_size=1024,
    max_prompt_tokens=128,
    dtype="float32",
    engine="mock",
    encoding="f32",
    max_backlog=1000,
)
HEALTHY: dict[str, Any] = {
    "redis_version": "7.2.4",
    "role": "master",
    "maxmemory": 1 << 30,
    "maxmemory_policy": "noeviction",
    "used_memory": 1 << 20,
    "maxclients": 10_000,
    "connected_clients": 5,
    "rdb_last_bgsave_status": "ok",
    "aof_enabled": 0,
}


def facts(**changes: Any) -> Facts:
    """A healthy server and pool, but for the changes."""
    info = {**HEALTHY, **changes.pop("info", {})}
    given: dict[str, Any] = {
        "url": "redis://localhost",
        "info": info,
        "config": {"save": "", "timeout": "0", "protected-mode": "yes", "requirepass": ""},
        "latencies": [0.0001] * 5,
        "clock_offset": 0.0,
        "model": MODEL,
        "workers": {"w1": True},
        "pending": {"w1": 3},
        **changes,
    }
    return Facts(**given)


def worst(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.level != "ok"]


def test_nothing_is_wrong_with_a_healthy_pool() -> None:
    assert worst(examine(facts())) == []


@pytest.mark.parametrize(
    ("changes", "level", "said"),
    [
        ({"info": {"redis_version": "6.2.1"}}, "wrong", "6.2.1"),
        ({"info": {"role": "slave", "master_host": "h", "master_port": 1}}, "wrong", "replica"),
        ({"refused": ["no 'eval'"]}, "wrong", "no 'eval'"),
        ({"refused_to_workers": ["no 'xack'"]}, "note", "no 'xack'"),
        ({"refused": ["a"], "refused_to_workers": ["no 'xack'"]}, "note", "no 'xack'"),
        ({"refused": ["a"], "refused_to_watchers": ["no 'xlen'"]}, "wrong", "no 'xlen'"),
        ({"info": {"maxmemory_policy": "allkeys-lru"}}, "wrong", "allkeys-lru"),
        ({"info": {"maxmemory_policy": "allkeys-lfu", "maxmemory": 0}}, "note", "once a maxmemory"),
        ({"info": {"maxmemory_policy": "volatile-ttl"}}, "wrong", "volatile-ttl"),
        ({"info": {"maxmemory": 0}}, "note", "no maxmemory"),
        ({"info": {"used_memory": (1 << 30) - 1}}, "wrong", "noeviction"),
        ({"info": {"maxmemory": 4 << 20, "used_memory": 0}}, "wrong", "holds 1,024"),
        ({"info": {"rdb_last_bgsave_status": "err"}}, "wrong", "snapshot failed"),
        ({"info": {"aof_enabled": 1}}, "note", "append-only"),
        ({"config": {"save": "3600 1"}}, "note", "snapshots are on"),
        ({"config": {"save": "", "timeout": "300"}}, "note", "idle for 300 s"),
        (
            {"config": {"save": "", "protected-mode": "no", "requirepass": ""}},
            "note",
            "no password",
        ),
        ({"config": {"save": "", "io-threads": "2"}}, "note", "2 I/O threads"),
        ({"config": {"save": "", "io-threads": "2"}, "cores": 2}, "wrong", "all of the 2 cores"),
        ({"latencies": [0.007] * 3}, "note", "7.00 ms"),
        ({"latencies": [0.2] * 3}, "wrong", "200.00 ms"),
        ({"clock_offset": -4000.0}, "note", "4000 s apart"),
        ({"info": {"connected_clients": 9_990}}, "wrong", "connections are taken"),
        ({"model": None}, "note", "no pool"),
        ({"model_error": "not msgpack"}, "wrong", "not msgpack"),
        ({"workers": {"w1": False}, "pending": {}}, "wrong", "none of its workers"),
        ({"workers": {"w1": True, "w2": False}, "pending": {"w2": 9}}, "note", "9 jobs held by 1"),
        ({"backlog": 999}, "wrong", "near its bound"),
        ({"dead": 3}, "note", "3 jobs given up"),
    ],
)  # fmt: skip
def test_what_is_not_well_is_found_with_a_remedy(
    changes: dict[str, Any], level: str, said: str
) -> None:
    found = worst(examine(facts(**changes)))
    matching = [finding for finding in found if said in finding.what]
    assert [finding.level for finding in matching] == [level], found
    assert matching[0].remedy or "msgpack" in said or "6.2.1" in said


@pytest.mark.parametrize("threads", ["1", "2", "3"])
def test_io_threads_that_leave_a_core_to_others_are_well(threads: str) -> None:
    config = {"save": "", "io-threads": threads}
    assert worst(examine(facts(config=config, cores=4))) == []


SEVERAL: dict[str, Any] = {
    "model": replace(MODEL, lanes=64),
    "workers": {f"w{n}": True for n in range(4)},
    "lanes": LaneFacts(64),
}


def of_lanes(**changes: Any) -> list[Finding]:
    """What it finds of lanes that are in order, but for the changes."""
    found = examine(facts(**{**SEVERAL, **changes}))
    return [each for each in found if "lane" in each.what or "stole" in each.what]


def test_lanes_that_are_in_order_are_told_with_how_many_each_has() -> None:
    (found,) = of_lanes()
    assert (found.level, found.remedy) == ("ok", "")
    assert found.what == "64 of 64 lanes are in use, 16.0 for each of 4 workers"
    (alone,) = of_lanes(workers={"w": True}, lanes=LaneFacts(1))
    assert alone.what == "1 of 64 lanes are in use: one worker needs no more"
    # What is not known, or of nobody, is not told.
    assert of_lanes(lanes=None) == of_lanes(workers={"w": False}) == []


@pytest.mark.parametrize(
    ("changes", "said", "remedy"),
    [
        (
            {"model": MODEL, "lanes": LaneFacts(1)},
            "all 4 workers read",
            "lmpool shards --lanes 64 ",
        ),
        (
            {"workers": {f"w{n}": True for n in range(20)}},
            "3.2 for each of 20 workers",
            "lmpool shards --lanes 512 ",
        ),
        (
            {"lanes": LaneFacts(64, "lane 3 of shard 0", 60, 100)},
            "60 of 100 waiting jobs are in one lane, lane 3 of shard 0: these prompts begin alike",
            "LMPOOL_BLOCKS=64 ",
        ),
        (
            {"lanes": LaneFacts(64, taken={"a": (100, 101), "b": (500, 40)})},
            "a stole 101 of the 201 jobs that it took",
            "LMPOOL_BLOCKS",
        ),
    ],
)
def test_lanes_that_are_not_in_order_are_found_with_a_remedy(
    changes: dict[str, Any], said: str, remedy: str
) -> None:
    (found,) = worst(of_lanes(**changes))
    assert found.level == "note"
    assert said in found.what
    assert remedy in found.remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"lanes": LaneFacts(64, "lane 3 of shard 0", 20, 20)},
        {"lanes": LaneFacts(64, "lane 3 of shard 0", 50, 100)},
        {"lanes": LaneFacts(1, "lane 0 of shard 0", 500, 500), "workers": {"w": True}},
        {"lanes": LaneFacts(64, taken={"a": (9, 100), "b": (500, 400)})},
        {"model": MODEL, "lanes": LaneFacts(1), "workers": {"w": True}},
        {"model": replace(MODEL, lanes=2, shards=64), "lanes": LaneFacts(128)},
    ],
    ids=["few wait", "half", "one worker", "few taken", "one lane for one", "many shards"],
)
def test_what_says_little_of_lanes_is_not_told(changes: dict[str, Any]) -> None:
    assert worst(of_lanes(**changes)) == []


def test_one_lane_is_right_for_engines_that_keep_nothing() -> None:
    def found(asked: int, computed: int) -> Finding:
        lanes = LaneFacts(1, prompt_tokens=asked, computed_tokens=computed)
        (only,) = of_lanes(model=MODEL, lanes=lanes)
        return only

    nothing = found(20_000, 20_000)
    assert (nothing.level, nothing.remedy) == ("ok", "")
    assert "of 20,000 tokens of prompts their engines kept none" in nothing.what
    for some in (found(20_000, 19_000), found(200, 200)):
        assert some.level == "note"
        assert "keeps no states" not in some.remedy
    # Nothing was told yet, or what was drawn is among what was computed.
    for unknown in (found(0, 0), found(20_000, 30_000)):
        assert unknown.level == "note"
        assert "one is right for an engine that keeps no states" in unknown.remedy


def test_a_server_that_hides_its_configuration_is_examined_all_the_same() -> None:
    assert worst(examine(facts(config=None))) == []


def test_a_server_that_hides_everything_is_examined_all_the_same() -> None:
    found = examine(Facts("redis://h", {}, None, [0.001], 0.0, model=MODEL, workers={"w": True}))
    assert not [finding for finding in found if finding.level == "wrong"]


def test_the_backlog_is_shown_with_what_it_is() -> None:
    shown = [finding.what for finding in examine(facts(backlog=7)) if "backlog 7" in finding.what]
    assert len(shown) == 1
    assert "XLEN" in shown[0]
    assert "lag of XINFO GROUPS is wrong" in shown[0]


@pytest.mark.parametrize(
    "changes", [{"model": None}, {"workers": {}}], ids=["no pool", "no worker"]
)
def test_who_lacks_a_worker_is_told_the_command_for_this_server(changes: dict[str, Any]) -> None:
    found = facts(url="redis://h:1/2", pool="p", **changes)
    advice = [each.remedy for each in examine(found) if "start" in (each.remedy or "")]
    assert len(advice) == 1
    assert "lmpool worker --url redis://h:1/2 --pool p" in (advice[0] or "")
