"""The ways to a server: Sentinels that fail over, TLS, users with narrow permissions."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import redis
import trustme
from typer.testing import CliRunner

import lmpool
from lmpool.address import Sentinels
from lmpool.backends.mock import mock_row
from lmpool.cli import app
from lmpool.errors import PoolTimeout, ServerError, ServerRefused, SettingsError
from lmpool.scripts import script
from lmpool.settings import ClientOptions
from lmpool.wants import Digester, Row
from tests.support.clients import connected
from tests.support.pools import some_prompts
from tests.support.ports import free_port, listens
from tests.support.sentinels import sentinels
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import living_workers, worker_process


def test_sentinel_urls_are_read() -> None:
    url = "redis+sentinel://me:p%40ss@one:26380,two,[::1]:5/my%2Dservice/3"
    known = Sentinels.parse(url)
    assert known.hosts == (("one", 26380), ("two", 26379), ("::1", 5))
    assert known.service == "my-service"
    assert known.options == {"username": "me", "password": "p@ss", "db": 3}
    assert not known.tls
    assert "p%40ss" not in repr(ClientOptions(url=url))
    assert Sentinels.parse("rediss+sentinel://h/s?ssl_cert_reqs=none").tls


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+sentinel://host", "names no service"),
        ("redis+sentinel://host/s/x", "database is no number"),
        ("redis+sentinel://host:0/s", "no host and port"),
        ("redis+sentinel://:secret@one,:5/s", "no host and port"),
        ("redis+sentinel://host/s?nonsense=1", "unknown option 'nonsense'"),
    ],
)
def test_sentinel_urls_that_cannot_be_used(url: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        lmpool.connect(url)
    assert "redis" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_failover_of_sentinels_loses_nothing(server_binary, pool_name):
    with ExitStack() as stack:
        primary = stack.enter_context(RealServer(binary=server_binary, tcp=True))
        replica = stack.enter_context(
            RealServer(binary=server_binary, tcp=True, replicaof=f"127.0.0.1 {primary.port}")
        )
        url = stack.enter_context(sentinels(primary))
        stack.enter_context(worker_process(url, pool_name, alive=False))
        until(lambda: living_workers(primary.url, pool_name), what="the worker to be alive")
        lm = stack.enter_context(
            connected(url, pool_name, cache_bytes=0, workers_timeout=100, reconnect_timeout=100)
        )
        row = lm.next_token_logprobs_sync([1, 2], timeout=60)
        np.testing.assert_array_equal(row, mock_row([1, 2], 256))
        primary.kill()
        # Sentinels that were paused for two seconds trust no clock for half a minute.
        for number in range(5):
            prompt = [3, number]
            row = lm.next_token_logprobs_sync(prompt, timeout=150)
            np.testing.assert_array_equal(row, mock_row(prompt, 256))
        with replica.client() as client:
            assert client.info("replication")["role"] == "master"


# --- users -------------------------------------------------------------------------------------

DEPLOY = Path(__file__).parents[2] / "deploy" / "redis"


@pytest.fixture(scope="module")
def guarded(server_binary: str, tmp_path_factory) -> Iterator[Callable[[str], str]]:
    """A server with the configuration and the users of `deploy/redis`; answers a user's URL."""
    folder = tmp_path_factory.mktemp("guarded")
    port = free_port()
    shutil.copy(DEPLOY / "users.acl", folder)
    own = ["--port", str(port), "--dir", str(folder), "--aclfile", str(folder / "users.acl")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [server_binary, str(DEPLOY / "redis.conf"), *own], stdout=log, stderr=log
        )

    def url(user: str) -> str:
        return f"redis://{user}:change-this-{user}@127.0.0.1:{port}/0"

    def answers() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        with redis.Redis.from_url(url("operator")) as client:
            try:
                return bool(client.ping())
            except redis.exceptions.ConnectionError:
                return False

    try:
        until(answers, what="the server to answer")
        with worker_process(url("worker"), "guarded", engine_opts={"delay": 0.05}):
            yield url
    finally:
        process.kill()
        process.wait(60)


def test_each_user_can_do_its_work(
    guarded: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmpool.diagnosis.SLOW", 60.0)  # which is no fault of the users
    prompts = some_prompts(50, seed=1)
    with connected(guarded("producer"), "guarded", cache_bytes=0) as lm:
        np.testing.assert_array_equal(
            lm.batch_next_token_logprobs_sync(prompts, timeout=60),
            [mock_row(prompt, 256) for prompt in prompts],
        )
        assert len(lm.sample_sync([1, 2], 5, [], seed=1, timeout=60)) == 5
        assert len(lm.byte_vocab) == 256
        statistics = lm.pool_statistics_sync()
        assert statistics["computed"] >= 50
        assert statistics["held_bytes"] > 0
        with pytest.raises(PoolTimeout):  # withdrawn
            lm.batch_next_token_logprobs_sync(some_prompts(500, seed=2), timeout=0.05)
        # What is no row is deleted and computed again, by the selector for that alone.
        with redis.Redis.from_url(guarded("worker")) as worker:
            digest = Digester(lm.info.fingerprint).digest(
                Row("f32"), np.array(prompts[0], "<u4").tobytes()
            )
            worker.set(lm.shards[0].result(digest), b"no row")
        np.testing.assert_array_equal(
            lm.next_token_logprobs_sync(prompts[0], timeout=60), mock_row(prompts[0], 256)
        )
    where = ["--url", guarded("operator"), "--pool", "guarded"]
    for words in (["ping"], ["stats"], ["dead", "list"], ["doctor"]):
        found = CliRunner().invoke(app, [*words, *where])
        assert found.exit_code == 0, found.output


def test_a_producer_can_neither_write_rows_nor_read_others_notices(
    guarded: Callable[[str], str],
) -> None:
    with (
        connected(guarded("producer"), "guarded") as lm,
        redis.Redis.from_url(guarded("producer")) as thief,
    ):
        assert lm._client._session.id.startswith("producer-")
        shard = lm.shards[0]
        result, other = shard.result(bytes(16)), shard.reply("operator-0123")
        set_it = "return redis.call('SET', KEYS[1], 'x')"
        read_it = "return redis.call('XRANGE', KEYS[1], '-', '+')"
        evict_everything = (shard.prefix, 60_000, 0, 1000, 1000, 0)
        for command in (
            ("SET", result, "x"),
            ("EVAL", set_it, 1, result),
            ("EVAL", f"return redis.call('SET', '{result}', 'x')", 0),
            ("EVAL", "return redis.call('APPEND', KEYS[1], 'x')", 1, result),
            ("RENAME", shard.stream().key, result),
            ("COPY", shard.stream().key, result),
            ("XREAD", "STREAMS", other, "0"),
            ("XRANGE", other, "-", "+"),
            ("EVAL", read_it, 1, other),
            ("XADD", other, "*", "ok", "0" * 32),
            ("SET", "lmpool:guarded", "x"),
            ("SET", shard.alive("me"), "x"),
            ("XREADGROUP", "GROUP", "workers", "me", "STREAMS", shard.stream().key, ">"),
            ("XADD", shard.dead, "*", "job", "x"),
            ("HSET", shard.adapters, "a", "b"),
            ("XADD", shard.account, "*", "held", "0", "bytes", "0", "life", "0", "digests", ""),
            ("DEL", shard.account),
            ("EVAL", script("evict").source, 1, shard.account, *evict_everything),
            ("KEYS", "*"),
            ("SCAN", "0"),
            ("FLUSHALL",),
            ("CONFIG", "GET", "*"),
            ("CLIENT", "KILL", "TYPE", "normal"),
            ("CLIENT", "LIST"),
            ("ACL", "LIST"),
            ("MONITOR",),
            ("SHUTDOWN",),
        ):
            with pytest.raises(
                redis.exceptions.ResponseError, match=r"(?i)no permission|can't run this"
            ):
                thief.execute_command(*command)


def test_nobody_gets_in_without_a_user(guarded: Callable[[str], str]) -> None:
    address = guarded("producer").rpartition("@")[2]
    for login in ("", "default:@", "producer:wrong@"):
        with pytest.raises(ServerRefused), connected(f"redis://{login}{address}", "guarded"):
            pass


# --- TLS ---------------------------------------------------------------------------------------


@pytest.fixture
def tls(server_binary: str, tmp_path: Path) -> Iterator[tuple[RealServer, int, Path]]:
    """A server, the port at which it speaks TLS, and the authority that vouches for it."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    trusted, key, chain = tmp_path / "ca.pem", tmp_path / "key.pem", tmp_path / "chain.pem"
    authority.cert_pem.write_to_path(str(trusted))
    issued.private_key_pem.write_to_path(str(key))
    issued.private_key_and_cert_chain_pem.write_to_path(str(chain))
    port = free_port()
    server = RealServer(
        binary=server_binary,
        tls_port=str(port),
        tls_cert_file=str(chain),
        tls_key_file=str(key),
        tls_ca_cert_file=str(trusted),
        tls_auth_clients="no",
    )
    with ExitStack() as stack:
        try:
            stack.enter_context(server)
        except RuntimeError as error:
            if not re.search("Bad directive|TLS support", str(error)):
                raise
            server = stack.enter_context(RealServer(binary=server_binary, tcp=True))
            in_front = [sys.executable, "-m", "tests.support.tls", str(port), str(server.port)]
            process = stack.enter_context(subprocess.Popen([*in_front, str(chain)]))
            stack.callback(process.kill)
            until(lambda: listens(port), what="what speaks TLS for the server")
        yield server, port, trusted


def test_tls(tls, pool_name):
    server, port, trusted = tls
    url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={trusted}"
    with worker_process(url, pool_name, alive=False):
        until(lambda: living_workers(server.url, pool_name), what="the worker to be alive")
        with connected(url, pool_name) as lm:
            row = lm.next_token_logprobs_sync([1, 2], timeout=60)
            np.testing.assert_array_equal(row, mock_row([1, 2], 256))
    with (
        pytest.raises(ServerError, match=r"(?i)certificate"),
        connected(f"rediss://127.0.0.1:{port}/0", pool_name),
    ):
        pass
