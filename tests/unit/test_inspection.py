"""Looking at servers and pools, without a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from lmpool import inspection
from lmpool.errors import ServerUnreachable, SettingsError, UnknownPool
from lmpool.keys import PoolKeys
from lmpool.model_info import ModelInfo
from tests.support.heartbeats import beating
from tests.support.protocol import Consumer
from tests.support.workers import in_process_worker

MODEL = ModelInfo(
    model="m",
    revision=None,
    fingerprint="0" * 32,
    vocab_size=1024,
    max_prompt_tokens=128,
    dtype="float32",
    engine="mock",
    encoding="f32",
)
NOBODY = "redis://:geheim@127.0.0.1:1"


@pytest.fixture
def server(fake_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


def test_a_ping_tells_who_answers(fake_url: str, pool_name: str) -> None:
    with in_process_worker(fake_url, pool_name) as worker:
        found = inspection.ping(fake_url, pool_name)
    assert found.server == "Redis 7.0.0"
    assert found.pool == pool_name
    assert found.model.vocab_size == 256
    assert [alive["id"] for alive in found.workers] == [worker.service.consumer]
    assert len(found.latencies) == inspection.PINGS
    assert 0 < found.latencies[0] <= found.latency <= found.latencies[-1]


def test_a_pool_without_workers_answers(fake_url: str, pool_name: str, server: redis.Redis) -> None:
    server.set(PoolKeys(pool_name).info, MODEL.pack())
    found = inspection.ping(fake_url, pool_name)
    assert found.model == MODEL
    assert found.workers == []


def test_who_does_not_answer_is_named(fake_url: str, pool_name: str) -> None:
    with pytest.raises(UnknownPool, match=pool_name):
        inspection.ping(fake_url, pool_name)
    with pytest.raises(ServerUnreachable, match=r"redis://:\*\*\*@"):
        inspection.read_facts(NOBODY, pool_name)


def test_url_and_pool_come_from_the_variables(
    fake_url: str, pool_name: str, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.set(PoolKeys(pool_name).info, MODEL.pack())
    monkeypatch.setenv("LMPOOL_URL", fake_url)
    monkeypatch.setenv("LMPOOL_POOL", pool_name)
    assert inspection.ping().pool == pool_name
    assert inspection.read_facts().pool == pool_name


def test_facts_of_a_pool(fake_url: str, pool_name: str, server: redis.Redis) -> None:
    server.set(PoolKeys(pool_name).info, MODEL.pack())
    shard = PoolKeys(pool_name).shard(MODEL.fingerprint8, 0)
    living, dead = Consumer(server, shard, "living"), Consumer(server, shard, "dead", "batch")
    server.xadd(shard.stream().key, {"job": "a"})
    living.read()
    for _ in range(2):
        server.xadd(shard.stream("batch").key, {"job": "b"})
    dead.read()
    server.xadd(shard.dead, {"job": "c"})
    with beating(server, shard, "living", b"x"):
        facts = inspection.read_facts(fake_url, pool_name)
    assert facts.model == MODEL
    assert facts.workers == {"living": True, "dead": False}
    assert facts.pending == {"living": 1, "dead": 2}
    assert (facts.backlog, facts.dead) == (3, 1)
    assert abs(facts.clock_offset) < 10


def test_facts_of_a_pool_that_is_none(fake_url: str, pool_name: str, server: redis.Redis) -> None:
    assert inspection.read_facts(fake_url, pool_name).model is None
    server.set(PoolKeys(pool_name).info, b"nonsense")
    facts = inspection.read_facts(fake_url, pool_name)
    assert facts.model is None
    assert pool_name in facts.model_error


def test_a_diagnosis_of_nobody_is_a_finding_and_one_of_a_bad_url_an_error() -> None:
    (finding,) = inspection.diagnose(NOBODY, "p")
    assert finding.level == "wrong"
    assert "no answer from" in finding.what
    assert "geheim" not in finding.what
    with pytest.raises(SettingsError, match="scheme"):
        inspection.diagnose("http://h", "p")


def test_a_diagnosis_finds_the_pool(fake_url: str, pool_name: str, server: redis.Redis) -> None:
    server.set(PoolKeys(pool_name).info, MODEL.pack())
    found = {finding.what: finding.level for finding in inspection.diagnose(fake_url, pool_name)}
    (wrong,) = [what for what in found if pool_name in what]
    assert "none of its workers is alive" in wrong
    assert found[wrong] == "wrong"
