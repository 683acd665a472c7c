"""What is set wrongly is told where it was set: addresses, passwords, servers, workers."""

from __future__ import annotations

import json
import logging
import re
import socketserver
import threading

import pytest

import lmpool
from lmpool.errors import (
    ServerRefused,
    ServerTooOld,
    ServerUnreachable,
    SettingsError,
)
from tests.support.clients import connected
from tests.support.ports import free_port
from tests.support.server import RealServer
from tests.support.workers import WorkerProcess, worker_process


def test_wrong_address():
    port = free_port()
    lm = lmpool.connect(f"redis://:s3cret@127.0.0.1:{port}/0", "p")
    message = rf"no answer from redis://:\*\*\*@127\.0\.0\.1:{port}/0: .*refused.*Is the server"
    with pytest.raises(ServerUnreachable, match=message), lm:
        pass
    with pytest.raises(ServerUnreachable, match="no answer from unix:///nowhere/s"):
        lmpool.connect("unix:///nowhere/s", "p").__enter__()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:6379"}, r"url='localhost:6379' has no scheme; write redis://"),
        (
            {"url": "redis://:s3cret@host:port/0"},
            r"url=redis://:\*\*\*@host:port/0: its port is no",
        ),
        (
            {"url": "redis://host:6379/zero"},
            r"url='redis://host:6379/zero': .*database.* no number; write redis://",
        ),
        ({"pool": "a pool"}, "pool='a pool' is no pool name: write 1 to 64 letters"),
        ({"cache_bytes": "lots"}, "cache_bytes='lots'"),
        ({"encoding": "f64"}, r"encoding='f64': input should be 'auto', 'f32'"),
        ({"framework": "jax"}, r"framework='jax': input should be"),
        ({"request_timeout": -1}, r"request_timeout=-1: input should be greater than 0"),
        ({"when_busy": "explode"}, r"when_busy='explode'"),
        ({"pol": "p"}, "unknown argument pol: did you mean pool?"),
    ],
)
def test_connect_refuses_nonsense(options, message):
    with pytest.raises(SettingsError, match=message) as error:
        lmpool.connect(**{"url": "redis://localhost", "pool": "p", **options})
    assert "s3cret" not in str(error.value)


def test_a_wrong_password_is_shown_nowhere(server_binary, caplog, capfd):
    with RealServer(binary=server_binary, tcp=True, requirepass="r1ght") as server:
        url = server.url.replace("r1ght", "wr0ng")
        refused = WorkerProcess(url, "p")
        with (
            worker_process(server.url, "p", log_level="debug") as worker,
            caplog.at_level(logging.DEBUG),
        ):
            lm = lmpool.connect(url, "p")
            assert "wr0ng" in lm.url
            with pytest.raises(
                ServerRefused, match=r"redis://:\*\*\*@.* refused the.*password"
            ) as e:
                lm.next_token_logprobs_sync([1])
            shown = [str(e.value), repr(e.value), repr(lm), str(lm), repr(lm.options)]
            lm.close()
            with pytest.raises(ServerRefused, match="password"):
                lmpool.connect(re.sub(":r1ght@", "", server.url), "p").__enter__()
            with connected(server.url, "p") as right:
                right.next_token_logprobs_sync([1])
                shown += [repr(right), repr(right.options)]
                lives = worker.log
        assert refused.wait() == 78
        shown += [lives, refused.log, caplog.text, *capfd.readouterr()]
        refused.close()
    assert "refused the user or password" in shown[0]
    assert "***" in lives
    for text in shown:
        assert "wr0ng" not in text
        assert "r1ght" not in text


class _OldServer(socketserver.ThreadingTCPServer):
    """Speaks enough of the protocol to say that it is Redis 6.2."""

    daemon_threads = True
    allow_reuse_address = True

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                arguments = []
                for _ in range(int(line[1:])):
                    length = int(self.rfile.readline()[1:])
                    arguments.append(self.rfile.read(length + 2)[:-2].upper())
                if arguments[0] == b"PING":
                    self.wfile.write(b"+PONG\r\n")
                elif arguments[0] == b"INFO":
                    text = b"# Server\r\nredis_version:6.2.14\r\n"
                    self.wfile.write(b"$%d\r\n%s\r\n" % (len(text), text))
                else:
                    self.wfile.write(b"+OK\r\n")


def test_a_server_that_is_too_old():
    with _OldServer(("127.0.0.1", 0), _OldServer.Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        url = f"redis://127.0.0.1:{server.server_address[1]}/0"
        worker = WorkerProcess(url, "p")
        try:
            message = "runs Redis 6.2.14: lmpool needs Redis 7.0 or Valkey 8; upgrade the server"
            with pytest.raises(ServerTooOld, match=re.escape(message)):
                lmpool.connect(url, "p").__enter__()
            assert worker.wait() == 78
            assert message in worker.log
            assert "Traceback" not in worker.log
        finally:
            worker.close()
            server.shutdown()


BAD_SETTINGS = [
    # what a worker is told, and what it must say
    ({"batch_size": 0}, "LMPOOL_BATCH_SIZE='0': input should be greater than or equal to 1"),
    ({"timeout": -1}, "LMPOOL_TIMEOUT='-1': input should be greater than or equal to 0"),
    ({"shards": "three"}, "LMPOOL_SHARDS='three': input should be a valid integer"),
    ({"worker_name": "a b"}, "LMPOOL_WORKER_NAME='a b'"),
    ({"batchsize": 3}, "unknown variable LMPOOL_BATCHSIZE: did you mean LMPOOL_BATCH_SIZE?"),
    ({"max_prompt_tokens": 9, "max_batch_tokens": 5}, "max_batch_tokens=5 is below max_prompt"),
    ({"max_batch_tokens": 5}, "max_batch_tokens=5 is below the longest prompt, 4096 tokens"),
    ({"engine_opts": "{nope"}, "LMPOOL_ENGINE_OPTS='{nope' is not JSON"),
    (
        {"engine_opts": {"dealy": 1}},
        "the engine 'mock' has no option 'dealy'; did you mean 'delay'",
    ),
    ({"engine_opts": {"vocab_size": 1}}, "vocab_size=1: an integer from 2 to"),
    ({"engine_opts": {"dtype": "a"}, "dtype": "float32"}, "dtype is set twice"),
    ({"engine": "moc"}, "expected; did you mean 'mock'?"),
    ({"pool": "a b"}, "LMPOOL_POOL='a b' is no pool name: write 1 to 64 letters"),
    ({"url": "redis://:s3cret@host:port"}, "LMPOOL_URL=redis://:***@host:port: its port is no"),
]


@pytest.mark.one_server
def test_workers_refuse_nonsense(server_url, pool_name, redis_client):
    for start in range(0, len(BAD_SETTINGS), 5):  # a few at a time: they share the cores
        cases = BAD_SETTINGS[start : start + 5]
        workers = [
            WorkerProcess(
                server_url,
                pool_name,
                environment={
                    f"LMPOOL_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
                    for name, value in settings.items()
                },
            )
            for settings, _ in cases
        ]
        try:
            for worker, (settings, message) in zip(workers, cases, strict=True):
                assert worker.wait() == 78, (settings, worker.log)
                assert message in worker.log
                assert "Traceback" not in worker.log
                said = [line for line in worker.log.splitlines() if " INFO " not in line]
                assert len(said) <= 2, worker.log
                assert "s3cret" not in worker.log
        finally:
            for worker in workers:
                worker.close()
    assert not redis_client.exists(f"lmpool:{pool_name}")
