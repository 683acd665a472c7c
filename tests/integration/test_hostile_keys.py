"""Keys that others write, of the wrong type and shape: what that costs is one prompt at most."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from typing import Any

import numpy as np
import pytest
import redis
from typer.testing import CliRunner

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.cli import app
from lmpool.errors import PromptFailed
from lmpool.isolation import isolate
from lmpool.keys import GROUP, ShardKeys
from lmpool.liveness import LIFE_MS
from lmpool.producer.statistics import pool_statistics
from lmpool.rows import pack_logprobs
from lmpool.scripts import SHARED, script
from lmpool.servers import Servers
from lmpool.wire import claim_head, pack_job
from lmpool.worker import engine_thread, heartbeat
from tests.support.clients import connected
from tests.support.pools import Asking, pool_shards, some_prompts
from tests.support.protocol import (
    Caller,
    Consumer,
    entries_of,
    new_job,
    shard_of_pool,
    told,
    write_flight,
)
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import worker_process

SCRIPTS = [
    each.name.removesuffix(".lua") for each in resources.files("lmpool").joinpath("lua").iterdir()
]
LAST = "18446744073709551615-18446744073709551615"
A, B, C = new_job(1), new_job(2), new_job(3)

WRONG_TYPES: dict[str, Callable[[redis.Redis, str], object]] = {
    "string": lambda server, key: server.set(key, b"\xff\0"),
    "list": lambda server, key: server.rpush(key, "a"),
    "set": lambda server, key: server.sadd(key, "a"),
    "sorted set": lambda server, key: server.zadd(key, {"a": 1}),
    "hash": lambda server, key: server.hset(key, "a", "b"),
    "stream": lambda server, key: server.xadd(key, {"a": "b"}),
}


def put(server: redis.Redis, key: str, kind: str) -> None:
    """A key of that type in the place of what is there."""
    with server.pipeline(transaction=True) as at_once:  # workers make streams again
        at_once.delete(key)
        WRONG_TYPES[kind](at_once, key)
        at_once.execute()


@pytest.fixture
def fingerprint(lm: lmpool.PooledLM) -> str:
    return lm.info.fingerprint


@pytest.fixture
def served(redis_client: redis.Redis, pool: str) -> ShardKeys:
    """The shard of a pool with a worker."""
    return pool_shards(redis_client, pool)[0]


def ask(lm: lmpool.PooledLM, prompts: list[list[int]], timeout: float = 60.0) -> None:
    """All of them at once, with the right rows."""
    np.testing.assert_array_equal(
        lm.batch_next_token_logprobs_sync(prompts, timeout=timeout),
        [mock_row(prompt, 256) for prompt in prompts],
    )


# --- flights -----------------------------------------------------------------------------------


def test_flights_of_the_wrong_type_with_their_jobs(
    lm: lmpool.PooledLM,
    redis_client: redis.Redis,
    served: ShardKeys,
    fingerprint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_thread, "LONG_WAIT", 600.0)  # nobody asks first who waits
    monkeypatch.setattr(engine_thread, "LONG_BACKLOG_MS", 1e15)
    kinds = list(WRONG_TYPES)
    jobs = [new_job(1, number, fingerprint=fingerprint) for number in range(len(kinds))]
    for kind, job in zip(kinds, jobs, strict=True):
        put(redis_client, served.flight(job.digest), kind)
        redis_client.xadd(served.stream().key, {"job": pack_job(job)})
    ask(lm, [[3, number] for number in range(5)])
    for job in jobs:
        until(lambda job=job: redis_client.get(served.result(job.digest)), what="it to be run")
        until(lambda job=job: not redis_client.exists(served.flight(job.digest)))
    until(lambda: not redis_client.xlen(served.stream().key))
    for kind, job in zip(kinds, jobs, strict=True):
        redis_client.delete(served.result(job.digest))
        put(redis_client, served.flight(job.digest), kind)
    ask(lm, [[1, number] for number in range(len(kinds))])


def test_a_malformed_job_under_a_flight_of_the_wrong_type(
    lm: lmpool.PooledLM, redis_client: redis.Redis, served: ShardKeys, fingerprint: str
) -> None:
    job = new_job(1, 2, fingerprint=fingerprint)
    put(redis_client, served.flight(job.digest), "stream")
    packed = pack_job(job).replace(b"\xa4sent\x00", b"\xa4sent\xa1x")
    redis_client.xadd(served.stream().key, {"job": packed})
    ask(lm, [[3, number] for number in range(5)])
    until(lambda: len(entries_of(redis_client, served.dead)) == 1, what="it to be buried")
    ask(lm, [[1, 2]])


@pytest.mark.parametrize("kind", WRONG_TYPES)
def test_jobs_are_given_back_whatever_their_flights_are(
    kind: str, caller: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A, B)
    first, second = worker.read()
    put(redis_client, shard.flight(A.digest), kind)
    assert worker.release((A, first), (B, second)) == 2
    assert worker.held() == []
    assert worker.admit(*zip((A, B), worker.read(), strict=True)) == "wr"


POISON = {
    "a deadline that is no number": "1-1 0 abc x ",
    "a deadline alone": "100",
    "nothing": "",
    "no stream": "1-1  100 x ",
    "a stream of the producer's": "1-1 4096  x ",
    "a stream of no lane": "1-1 b0000000000000000000000000000  x ",
    "a reply stream": "1-1 {prefix}:reply:x  x ",
    "an id that is none": "x 0  x ",
    "an id that is too large": "99999999999999999999999-1 0  x ",
    "a job that is not there": "1-1 0  x ",
    "a job that is not there, of nobody": "1-1 0  ",
    "an end in the past": "1-1 0 1 x ",
    "no text": "\xff\0",
    "more than anybody wrote": "1-1 0  " + 600_000 * "x ",
}


@pytest.mark.parametrize("priority", ["interactive", "batch"])
def test_flights_that_no_client_wrote(
    priority: Any,
    lm: lmpool.PooledLM,
    redis_client: redis.Redis,
    served: ShardKeys,
    fingerprint: str,
) -> None:
    for stream in (f"{served.prefix}:jobs:4096", f"{served.prefix}:reply:x"):
        redis_client.xadd(stream, {"job": "x"}, id="1-1")
    prompts = [[1, number] for number in range(len(POISON) + 2)]
    for prompt, poison in zip(prompts, POISON.values(), strict=False):
        poisoned = new_job(*prompt, fingerprint=fingerprint)
        redis_client.set(served.flight(poisoned.digest), poison.format(prefix=served.prefix))
    found = lm.batch_next_token_logprobs_sync(prompts, timeout=60, priority=priority)
    np.testing.assert_array_equal(found, [mock_row(prompt, 256) for prompt in prompts])
    assert redis_client.xlen(f"{served.prefix}:jobs:4096") == 1
    redis_client.delete(f"{served.prefix}:jobs:4096", f"{served.prefix}:reply:x")


def test_a_worker_deletes_nothing_elsewhere_for_a_flight(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    buried: Any = redis_client.xadd(shard.dead, {"job": "x"})
    caller.enqueue(A, B, C)
    for job in (A, B, C):
        lane = f"0:{shard.dead}" if job is C else shard.dead
        write_flight(redis_client, shard, job, buried.decode(), caller.id, lane=lane)
    (first, second, _) = worker.read()
    worker.complete([(A, first, "ok", ""), (B, second, "ok", "")], stored=(B,))
    assert caller.withdraw(C) == 0
    assert not any(redis_client.exists(shard.flight(job.digest)) for job in (A, B, C))
    assert [kept for kept, _ in entries_of(redis_client, shard.dead)] == [buried]


@pytest.mark.parametrize("damage", ["hash", "the last id"])
def test_a_reply_stream_that_cannot_be_written_harms_only_whose_it_is(
    damage: str,
    caller: Caller,
    other: Caller,
    worker: Consumer,
    redis_client: redis.Redis,
    shard: ShardKeys,
) -> None:
    caller.enqueue(A, B, C)
    other.enqueue(A, B, C)
    reply = shard.reply("first")
    if damage == "hash":
        put(redis_client, reply, "hash")
    else:
        redis_client.xadd(reply, {"x": "y"}, id=LAST)
    first, second, third = worker.read()
    worker.complete([(A, first, "failed", "why"), (B, second, "ok", "")])
    waiting = (third.decode(), caller.id, other.id)
    write_flight(redis_client, shard, C, *waiting, deadline="1")
    assert worker.admit((C, third)) == "e"
    assert [status for _, status, _ in told(other)] == ["failed", "ok", "expired"]
    assert not any(caller.flight(job) for job in (A, B, C))
    # Whose it is makes it anew by looking.
    assert caller.check(A) == ("u", True)
    assert redis_client.type(reply) == b"stream"


@pytest.mark.one_shard
def test_a_failing_job_whose_waiters_reply_is_a_hash_stops_no_worker(
    start_pool: Callable[..., str], any_server: str, redis_client: redis.Redis
) -> None:
    pool = start_pool(engine_opts={"fail_token": 7}, batch_size=1)
    with connected(any_server, pool) as lm:
        (shard,) = pool_shards(redis_client, pool)
        put(redis_client, shard.reply("victim"), "hash")
        job = new_job(7, 1, fingerprint=lm.info.fingerprint)
        Caller(redis_client, shard, "victim").enqueue(job)
        with pytest.raises(PromptFailed, match="token 7"):
            lm.next_token_logprobs_sync([7, 1], timeout=60)
        ask(lm, [[1, 2]])
        until(lambda: not redis_client.exists(shard.flight(job.digest)))
        redis_client.delete(shard.reply("victim"))


# --- what is the workers' ----------------------------------------------------------------------


def destroy(server: redis.Redis, key: str, how: str) -> None:
    """What the shipped users may not, and another program may."""
    if how == "the last id":
        server.xadd(key, {"job": "x"}, id=LAST)
    elif how == "the group's place":
        server.xgroup_setid(key, GROUP, LAST)
    else:
        put(server, key, how)


@pytest.mark.parametrize("any_server", ["server"], indirect=True)
@pytest.mark.parametrize("how", ["hash", "string", "the last id", "the group's place"])
def test_job_streams_are_mended_while_callers_wait(
    how: str, lm: lmpool.PooledLM, redis_client: redis.Redis, served: ShardKeys
) -> None:
    ask(lm, [[1, 1]])
    for stream in served.streams:
        destroy(redis_client, stream.key, how)
    # Which reads them as well: there may be one such entry in each.
    assert lm.pool_statistics_sync()["backlog"] < 10 + len(served.streams)
    ask(lm, some_prompts(20, seed=1))
    until(lambda: redis_client.type(served.stream().key) == b"stream")
    until(lambda: redis_client.xinfo_groups(served.stream().key))
    assert redis_client.xinfo_groups(served.stream().key)[0]["name"] == GROUP.encode()


@pytest.mark.one_shard
@pytest.mark.parametrize("any_server", ["server"], indirect=True)
@pytest.mark.parametrize("how", ["hash", "the last id", "the group's place"])
def test_a_fresh_worker_mends_the_streams(
    how: str, start_pool: Callable[..., str], any_server: str, redis_client: redis.Redis
) -> None:
    pool = start_pool()
    (shard,) = pool_shards(redis_client, pool)
    for stream in shard.streams:
        destroy(redis_client, stream.key, how)
    start_pool()
    with connected(any_server, pool) as lm:
        ask(lm, [[1, 2]])


@pytest.mark.parametrize("how", ["list", "string"])
def test_counters_dead_letters_registry_and_model_info_are_mended(
    how: str, lm: lmpool.PooledLM, redis_client: redis.Redis, served: ShardKeys, pool: str
) -> None:
    keys = (served.counters, served.dead, served.adapters, served.bounds)
    for key in keys:
        put(redis_client, key, how)
    put(redis_client, lm._client.keys.info, "list")
    put(redis_client, lm._client.keys.serving, "list")
    lm.pool_statistics_sync()
    ask(lm, some_prompts(20, seed=2))
    until(lambda: redis_client.type(lm._client.keys.info) == b"string")
    until(lambda: redis_client.type(served.bounds) == b"hash")
    ask(lm, [[1, 2]])
    assert lm.pool_statistics_sync()["computed"] >= 1
    until(lambda: {redis_client.type(key) for key in keys} <= {b"none", b"hash", b"stream"})


@pytest.mark.parametrize("there", ["many", "007", ""])
def test_a_counter_that_is_no_number(
    there: str, lm: lmpool.PooledLM, redis_client: redis.Redis, served: ShardKeys
) -> None:
    redis_client.hset(served.counters, mapping={"computed": there, "failed": "7"})
    assert lm.pool_statistics_sync()["computed"] in (0, 7)
    ask(lm, [[1, 2]])
    until(lambda: redis_client.hget(served.counters, "computed") != there.encode())
    assert lm.pool_statistics_sync()["failed"] == 7


def test_statistics_of_damaged_keys(
    any_server: str, pool: str, redis_client: redis.Redis, served: ShardKeys
) -> None:
    consumers = redis_client.xinfo_consumers(served.stream().key, GROUP)
    servers = Servers(lambda: redis_client)  # type: ignore[arg-type,return-value]

    def unread() -> bool:  # unless the worker's next beat comes in between
        redis_client.set(served.alive(consumers[0]["name"].decode()), b"\xc1", px=LIFE_MS)
        return pool_statistics(servers, [served])["workers"] == []

    until(unread)


# --- bounds ------------------------------------------------------------------------------------


@pytest.mark.one_shard
def test_the_backlogs_bound_is_the_workers(
    start_pool: Callable[..., str], redis_client: redis.Redis
) -> None:
    pool = start_pool(max_backlog=3, delay=1.0)
    (shard,) = pool_shards(redis_client, pool)
    caller = Caller(redis_client, shard)
    jobs = [new_job(1, number) for number in range(40)]
    answers, _ = caller.enqueue(*jobs, bound=10**9)
    assert answers.count("q") == 3
    assert answers.count("f") == 37
    for job in jobs:
        redis_client.delete(shard.flight(job.digest))
    # Past the scripts a stream becomes longer, but not for long.
    with redis_client.pipeline(transaction=False) as pipeline:
        for _ in range(2000):
            pipeline.xadd(shard.stream("batch").key, {"job": b"x" * 100})
        pipeline.execute()
    until(lambda: redis_client.xlen(shard.stream("batch").key) < 200, what="it to be trimmed")


@pytest.mark.one_shard
def test_long_entries_are_not_read(server_binary: str, pool_name: str) -> None:
    with (
        RealServer(binary=server_binary) as server,
        worker_process(server.url, pool_name) as worker,
        connected(server.url, pool_name) as lm,
        server.client() as client,
    ):
        ask(lm, [[1, 1]])
        (shard,) = pool_shards(client, pool_name)
        before = peak_memory(worker.pid)
        worker.pause()
        for _ in range(20):
            client.xadd(shard.stream().key, {"job": bytes(10 << 20)})
        asking = Asking(lm, [[1, 2], [3, 4]])
        worker.resume()
        np.testing.assert_array_equal(asking.rows(), [mock_row([1, 2], 256), mock_row([3, 4], 256)])
        until(lambda: client.xlen(shard.stream().key) == 0, what="them to be taken off")
        assert peak_memory(worker.pid) - before < 130 << 20  # 200 MiB lay there
        dead = entries_of(client, shard.dead)
        assert len(dead) in (20, 21)  # one may be found by two of its threads
        assert all(b"bytes" in fields[b"reason"] for _, fields in dead)
        assert any(b"an entry of 10485763 bytes" in fields[b"reason"] for _, fields in dead)


def peak_memory(pid: int) -> int:
    """Bytes that a process has had at most."""
    with open(f"/proc/{pid}/status") as status:
        (line,) = [line for line in status if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


# --- results, names, texts ---------------------------------------------------------------------


@pytest.mark.one_shard
def test_results_of_the_wrong_type_are_computed_again(
    lm: lmpool.PooledLM, redis_client: redis.Redis, served: ShardKeys, fingerprint: str
) -> None:
    prompts = [[1, number] for number in range(len(WRONG_TYPES) + 1)]
    results = [served.result(new_job(*p, fingerprint=fingerprint).digest) for p in prompts]
    for key, kind in zip(results, WRONG_TYPES, strict=False):
        put(redis_client, key, kind)
    ask(lm, prompts)
    assert {redis_client.type(key) for key in results} == {b"string"}


def test_a_row_of_nan_is_computed_again(
    lm: lmpool.PooledLM, redis_client: redis.Redis, served: ShardKeys, fingerprint: str
) -> None:
    key = served.result(new_job(1, 2, fingerprint=fingerprint).digest)
    redis_client.set(key, pack_logprobs(np.full(256, np.nan, "f4")).joined())
    ask(lm, [[1, 2], [3, 4]])


@pytest.mark.one_shard
def test_a_name_in_the_registry_that_is_no_text_costs_that_name_alone(
    lm: lmpool.PooledLM, redis_client: redis.Redis, served: ShardKeys
) -> None:
    redis_client.hset(served.adapters, b"\xff\xfe", b"\xff\n/x")
    redis_client.hset(served.adapters, "good", "0" * 32 + "\n/nowhere")
    with pytest.raises(lmpool.errors.UnknownAdapter, match=r"known: good$"):
        lm.next_token_logprobs_sync([1], "none", timeout=60)
    with pytest.raises(lmpool.errors.UnknownAdapter, match="LMPOOL_ADAPTER_DIRS"):
        lm.next_token_logprobs_sync([1], "good", timeout=60)


def test_escapes_of_others_do_not_reach_the_terminal(
    any_server: str,
    pool: str,
    lm: lmpool.PooledLM,
    redis_client: redis.Redis,
    served: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "mend", lambda *_: [])  # no beat takes the last id of all away
    evil = "\x1b]0;owned\x07[bold]x\x9b31m\u202e"
    redis_client.xadd(served.dead, {"job": "x", "reason": evil, "worker": evil, b"\xff": "x"})
    redis_client.xadd(served.dead, {"job": "x", "reason": "late"}, id="18446744073709551615-1")
    for words in (["list"], ["show", "--all"]):
        found = CliRunner().invoke(app, ["dead", *words, "--url", any_server, "--pool", pool])
        assert found.exit_code == 0, found.output
        assert not set("\x1b\x07\x9b\u202e") & set(found.output)
        assert "[bold]x" in found.output


def test_scripts_are_read_again_by_whoever_may_not_send_them(
    server_binary: str, pool_name: str
) -> None:
    """A server that forgot them: a producer waits for a worker, which loads them."""
    with (
        RealServer(binary=server_binary) as server,
        worker_process(server.url, pool_name),
        server.client() as admin,
    ):
        admin.execute_command("ACL", "SETUSER", "narrow", "on", ">pw", "~*", "+@all", "-eval")
        with connected(server.url.replace("unix://", "unix://narrow:pw@"), pool_name) as lm:
            ask(lm, [[1, 1]], timeout=60)
            admin.script_flush()
            ask(lm, [[1, 2]], timeout=60)


def test_isolation_finds_who_is_to_blame() -> None:
    sent, blamed = [], []

    def send(some: Any) -> None:
        if {13, 77} & set(some):
            raise redis.exceptions.ResponseError("ERR odd")
        sent.extend(some)

    isolate(range(100), send, lambda one, error: blamed.append(one))
    assert blamed == [13, 77]
    assert sent == [n for n in range(100) if n not in blamed]

    def refuse(some: Any) -> None:
        raise redis.exceptions.ResponseError("ERR no")

    blamed.clear()
    with pytest.raises(redis.exceptions.ResponseError):
        isolate(range(100), refuse, lambda one, error: blamed.append(one))
    assert len(blamed) == 4  # then it is not they


@pytest.mark.server
@pytest.mark.one_server
@pytest.mark.parametrize("name", sorted(set(SCRIPTS) - {SHARED}))
def test_every_script_comes_to_its_end_whatever_it_is_given(
    name: str, server_url: str, pool_name: str
) -> None:
    """Whoever may run scripts may give them any numbers: a count of what does not follow."""
    shard = shard_of_pool(pool_name)
    large, streams = 10**15, [stream.key for stream in shard.streams]
    given = [[shard.prefix, *[large] * 12], [shard.prefix, GROUP, *[large] * 11]]
    for place in range(1, 12):
        given.append([shard.prefix, *["1"] * 11])
        given[-1][place] = large
    # A server that is busy with a script answers nobody.
    with redis.Redis.from_url(server_url, socket_timeout=10, retry=None) as caller:
        caller.xadd(streams[0], {"job": b"x"})
        for arguments in given:
            for keys in (streams[:1], streams[:2]):
                with suppress(redis.exceptions.ResponseError):
                    script(name)(caller, keys, arguments)  # type: ignore[arg-type]
                assert caller.ping()


@pytest.mark.parametrize("seed", range(2))
def test_a_claim_that_is_refused_has_done_nothing(
    seed: int, redis_client: redis.Redis, shard: ShardKeys, caller: Caller, other: Caller
) -> None:
    rng = random.Random(seed)
    caller.enqueue(A)
    other.enqueue(A, C)

    def state() -> dict[bytes, Any]:
        keys = [key.encode() for key in (shard.stream().key, shard.reply("first"))]
        keys += [key.encode() for key in (shard.flight(job.digest) for job in (A, B, C))]
        return {key: redis_client.dump(key) for key in keys}

    heads = [claim_head(job.digest, lane, 0, None) for job, lane in ((B, 0), (A, 1), (C, 2))]
    sound: list[Any] = [shard.prefix, "first", 30_000, 60_000, 100, GROUP, 1, shard.lanes]
    sound += ["".join(heads), 0, *(pack_job(job) for job in (B, A, C))]
    strange = ["", " ", "-1", "0", "1.5", "1e3", "nan", "inf", "0x7", "x", "9" * 40, "7" * 180]
    refused = 0
    for _ in range(150):
        arguments = list(sound)
        for _ in range(rng.randint(1, 2)):
            place = rng.randrange(2, len(arguments))
            what = rng.random()
            if what < 0.5:
                arguments[place] = rng.choice(strange)
            elif what < 0.6:
                del arguments[place]
            elif what < 0.7:
                arguments.insert(place, rng.choice(strange))
            else:
                at, text = rng.randrange(32, 60) + 60 * rng.randrange(3), "".join(heads)
                arguments[8] = text[:at] + rng.choice("x-. 9\n") + text[at + rng.randint(0, 2) :]
        before = state()
        try:
            script("enqueue")(redis_client, [shard.stream().key], arguments)  # type: ignore[arg-type]
        except redis.exceptions.ResponseError:
            assert state() == before, arguments
            refused += 1
        caller.withdraw(B)
        other.check(A, C)
    assert 50 < refused < 150


@pytest.mark.parametrize("name", ["c" * 201, "first second", "c" * (1 << 20)], ids=range(3))
def test_a_client_by_a_name_that_is_none_claims_nothing(
    name: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    """It would be written into each flight, and kept for each deadline."""
    with pytest.raises(redis.exceptions.ResponseError, match="is no claim"):
        Caller(redis_client, shard, name).enqueue(A, B)
    assert redis_client.exists(shard.stream().key, shard.flight(A.digest)) == 0


def test_who_is_named_many_times_in_a_flight_is_told_once(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A, B, C)
    entries = worker.read()
    for job, entry in zip((A, B, C), entries, strict=True):
        names = [other.id, caller.id] * 500
        write_flight(redis_client, shard, job, entry.decode(), *names)
    assert worker.admit((C, entries[2])) == "r"
    before = redis_client.xlen(shard.reply(caller.id))
    worker.complete(
        [(A, entries[0], "ok", ""), (B, entries[1], "ok", ""), (C, entries[2], "failed", "no")],
        stored=(A, B),
    )
    assert redis_client.xlen(shard.reply(caller.id)) == before + 2
    assert sorted(told(caller)) == sorted(
        [(A.digest.hex(), "ok", ""), (B.digest.hex(), "ok", ""), (C.digest.hex(), "failed", "no")]
    )
