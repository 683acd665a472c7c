"""fakeredis's own server is refused with the truth, and lmpool's does what is missing there."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis
from fakeredis import TcpFakeServer

import lmpool
from lmpool.errors import ServerError, ServerTooOld
from lmpool.testing import FakeServer
from tests.support.workers import InProcessWorker


@pytest.fixture(params=[("redis", (7, 0)), ("valkey", (8, 0))], ids=["redis", "valkey"])
def own_server(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of fakeredis's own server."""
    kind, version = request.param
    server = TcpFakeServer(("127.0.0.1", 0), server_type=kind, server_version=version)
    server.daemon_threads = True  # a read that waits holds up no end
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_client_says_what_it_lacks_and_what_to_use(own_server: str) -> None:
    with (
        pytest.raises(ServerError, match=r"fakeredis's own server.* no INFO.*MockPool") as caught,
        lmpool.connect(own_server, "pool", framework="numpy"),
    ):
        pass
    assert not isinstance(caught.value, ServerTooOld)


def test_a_worker_says_it_too(own_server: str) -> None:
    with pytest.raises(ServerError, match=r"fakeredis's own server.* no INFO.*MockPool"):
        InProcessWorker(own_server, "pool").start()


def test_what_it_is_said_to_lack_it_lacks(own_server: str) -> None:
    """Else lmpool might work with it. Older ones lack more."""
    with redis.Redis.from_url(own_server, protocol=2) as client:
        connection = client.connection_pool.get_connection()
        connection.send_command("INFO")
        with pytest.raises(redis.ResponseError, match="unknown command 'info'"):
            connection.read_response()
        client.connection_pool.release(connection)


def test_lmpools_has_info_and_its_reads_wait() -> None:
    with FakeServer() as server, server.client() as client, server.client() as other:
        assert client.info("server")["redis_version"] == "7.0.0"
        client.xgroup_create("jobs", "workers", "0", mkstream=True)
        found: list[object] = []
        read = threading.Thread(
            target=lambda: found.extend(
                other.xreadgroup("workers", "me", {"jobs": ">"}, count=1, block=0)
            )
        )
        read.start()
        client.xadd("jobs", {"a": "b"})
        read.join(60)
        assert len(found) == 1
