"""What commands show, to programs and on narrow terminals, of a pool whose names are long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from lmpool.cli import app
from lmpool.wire import pack_job
from tests.support.clients import connected
from tests.support.pools import pool_shards
from tests.support.protocol import new_job
from tests.support.screens import WIDTHS, unbroken
from tests.support.workers import in_process_worker

WORKER = "a-worker-" + "w" * 43 + "-z"
BENCH = ("bench", "--seconds", "0.1", "--concurrency", "4", "--length", "5")


class Commands:
    def __init__(self, *where: str) -> None:
        self._where = where

    def __call__(self, *words: str, width: int = 80, status: int = 0) -> str:
        found = CliRunner().invoke(app, [*words, *self._where], env={"COLUMNS": str(width)})
        assert found.exit_code == status, found.output
        return found.stdout

    def json(self, *words: str, status: int = 0) -> Any:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is no JSON")

        return json.loads(self(*words, "--json", status=status), parse_constant=refuse)


@pytest.fixture
def pool(pool_name: str) -> str:
    """A name of 63 characters."""
    return (pool_name + "-" + "p" * 63)[:61] + "-z"


@pytest.fixture
def lmpool(server_url: str, pool: str) -> Iterator[Commands]:
    with in_process_worker(server_url, pool, worker_name=WORKER):
        yield Commands("--url", server_url, "--pool", pool)


def test_ping_for_programs(lmpool: Commands, pool: str, server_url: str) -> None:
    found = lmpool.json("ping")
    assert found["pool"] == pool
    assert found["model"]["vocab_size"] == 256
    assert [each["id"].startswith(WORKER) for each in found["workers"]] == [True]
    assert min(found["latencies"]) <= found["latency"] <= max(found["latencies"])


def test_ping_for_programs_without_a_worker(server_url: str, pool_name: str) -> None:
    with in_process_worker(server_url, pool_name):
        pass
    found = Commands("--url", server_url, "--pool", pool_name).json("ping", status=1)
    assert found["workers"] == []


def test_the_doctor_for_programs(lmpool: Commands, pool: str) -> None:
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json", *lmpool._where]).stdout)
    assert found["pool"] == pool
    assert found["good"] is all(each["level"] != "wrong" for each in found["findings"])
    assert {"ok", "note", "wrong"} >= {each["level"] for each in found["findings"]}
    assert any("1 worker alive" in each["what"] for each in found["findings"])


def test_the_doctor_for_programs_says_when_nobody_answers() -> None:
    found = Commands("--url", "redis://:geheim@127.0.0.1:1").json("doctor", status=1)
    assert found["good"] is False
    assert "no answer from" in found["findings"][0]["what"]
    assert "geheim" not in json.dumps(found)


@pytest.mark.one_shard
def test_the_dead_for_programs(
    lmpool: Commands, server_url: str, pool: str, redis_client: Any
) -> None:
    assert lmpool.json("dead", "list") == []
    with connected(server_url, pool) as lm:
        job = new_job(5, 6, 7, fingerprint=lm.info.fingerprint)
    shard = pool_shards(redis_client, pool)[0]
    fields = {"job": pack_job(job), "reason": "it died", "deliveries": 3, "worker": WORKER}
    name = redis_client.xadd(shard.dead, fields).decode()
    redis_client.xadd(shard.dead, {"job": b"garbage", "reason": "not msgpack"})
    first, second = lmpool.json("dead", "list")
    assert first | {"given_up": ""} == {
        "name": name, "given_up": "", "reason": "it died", "deliveries": 3, "worker": WORKER,
        "wanted": "row", "adapter": None, "prompt_tokens": 3, "bytes": len(fields["job"]),
    }  # fmt: skip
    assert first["given_up"].endswith("+00:00")
    assert (second["wanted"], second["prompt_tokens"], second["bytes"]) == (None, None, 7)
    for width in WIDTHS:
        assert WORKER in unbroken(lmpool("dead", "list", width=width).splitlines())
    assert [each["token_ids"] for each in lmpool.json("dead", "show", "--all")] == [[5, 6, 7], None]
    assert lmpool.json("dead", "retry", name) == {"name": name, "answered": True, "error": None}
    failed = lmpool.json("dead", "retry", "--all", status=1)
    assert (failed["answered"], "drop it" in failed["error"]) == (False, True)
    assert lmpool.json("dead", "drop", "--all") == {"dropped": 1}


@pytest.mark.parametrize("width", WIDTHS)
def test_no_name_is_lost_at_any_width(lmpool: Commands, pool: str, width: int) -> None:
    for words, status in ((("ping",), 0), (("stats",), 0), (("top", "--once"), 0), (BENCH, 0)):
        text = lmpool(*words, width=width, status=status)
        assert pool in unbroken(text.splitlines()), words
        if words is not BENCH:
            assert WORKER in unbroken(text.splitlines()), words
        if words in (("stats",), ("top", "--once"), BENCH):  # others are lines that wrap anywhere
            assert max(len(line) for line in text.splitlines()) <= width, words
    stats = json.loads(lmpool("stats", "--json"))
    assert stats["workers"][0]["id"].startswith(WORKER)
