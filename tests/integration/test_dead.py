"""Jobs that were given up: listed, shown, tried again, dropped."""

from __future__ import annotations

import re

import numpy as np
import pytest
from typer.testing import CliRunner

from lmpool import dead_letters
from lmpool.backends.mock import mock_row
from lmpool.cli import app
from lmpool.wire import pack_job
from tests.support.clients import connected
from tests.support.pools import Asking, pool_shards
from tests.support.protocol import new_job
from tests.support.waiting import until
from tests.support.workers import in_process_worker


class Commands:
    def __init__(self, url: str, pool: str) -> None:
        self._where = ["--url", url, "--pool", pool]

    def __call__(self, *words: str, status: int = 0) -> str:
        found = CliRunner().invoke(app, ["dead", *words, *self._where])
        assert found.exit_code == status, found.output
        return found.output


@pytest.mark.parametrize("shards", [1, 2])
def test_the_dead_are_listed_shown_tried_again_and_dropped(
    shards, server_url, redis_client, pool_name
):
    with (
        in_process_worker(server_url, pool_name, shards=shards, engine_opts={"delay": 0.3}),
        connected(server_url, pool_name, cache_bytes=0) as lm,
    ):
        dead = Commands(server_url, pool_name)
        for words in (["list"], ["show", "--all"], ["retry", "--all"]):
            assert dead(*words) == "no job was given up\n"
        assert dead("retry", "--all", "--json") == ""
        job = new_job(5, 6, 7, fingerprint=lm.info.fingerprint)
        shard = pool_shards(redis_client, pool_name)[int.from_bytes(job.digest[:4], "big") % shards]
        fields = {"job": pack_job(job), "reason": "it died", "deliveries": 3, "worker": "w-1"}
        entry = redis_client.xadd(shard.dead, fields).decode()
        garbage = redis_client.xadd(
            shard.dead, {"job": b"garbage", "reason": "not msgpack"}
        ).decode()
        listed = dead("list")
        assert "5 6 7" in listed
        assert "no job: 7 bytes" in listed
        (name,) = re.findall(rf"(?:\d/)?{entry}", listed)
        (other,) = re.findall(rf"(?:\d/)?{garbage}", listed)
        shown = dead("show", name)
        for part in ("it died", "w-1", "3 deliveries", "wanted   row", "5 6 7"):
            assert part in shown
        assert "no entry '1-1'" in dead("show", "1-1", status=2)
        assert "--all" in dead("retry", status=2)

        # Whoever asks the same at that time waits with it, and one computation serves both.
        before = lm.pool_statistics_sync()["computed"]
        asking = Asking(lm, [[5, 6, 7]])
        until(lambda: lm.statistics()["queued"] == 1)
        assert "answered" in dead("retry", name)
        np.testing.assert_array_equal(asking.rows(), [mock_row([5, 6, 7], 256)])
        assert lm.pool_statistics_sync()["computed"] == before + 1
        assert "drop it" in dead("retry", "--all", status=1)
        assert name not in dead("list")
        assert "1 dropped" in dead("drop", other)
        assert "no job was given up" in dead("list")


@pytest.mark.one_shard
def test_a_job_that_fails_again_stays_until_it_is_dropped(server_url, redis_client, pool_name):
    with (
        in_process_worker(server_url, pool_name, engine_opts={"fail_token": 7}),
        connected(server_url, pool_name) as lm,
    ):
        dead = Commands(server_url, pool_name)
        job = new_job(7, fingerprint=lm.info.fingerprint)
        (shard,) = pool_shards(redis_client, pool_name)
        redis_client.xadd(shard.dead, {"job": pack_job(job), "reason": "it died"})
        assert "a prompt contains the token 7" in dead("retry", "--all", status=1)
        assert redis_client.xlen(shard.dead) == 1
        assert "1 dropped" in dead("drop", "--all")


def test_the_latest_are_read_without_the_others(server_url, redis_client, pool_name):
    with (
        in_process_worker(server_url, pool_name, shards=2),
        connected(server_url, pool_name) as lm,
    ):
        names = {}
        for shard in pool_shards(redis_client, pool_name):
            fields = {"job": b"garbage", "reason": "so"}
            names[shard.number] = [redis_client.xadd(shard.dead, fields).decode() for _ in range(4)]
        found = dead_letters.read(lm, latest=3)
        assert [(each.shard, each.entry) for each in found] == [
            (shard, name) for shard in (0, 1) for name in names[shard][1:]
        ]
        assert len(dead_letters.read(lm)) == 8
