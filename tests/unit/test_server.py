from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import redis

import lmpool
from lmpool.clock import ServerClock, to_ms
from lmpool.errors import ServerRefused, ServerTooOld, ServerUnreachable
from lmpool.replies import Parser
from lmpool.server import check_version, explained, greet, is_lost, open_server
from tests.support.ports import free_port
from tests.support.server import RealServer

SECRET = "s3cret"


class Stub:
    """A server that answers what it is told to: a line of Lua-less, stream-less RESP."""

    def __init__(self, answer: Callable[[list[bytes]], bytes]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://:{SECRET}@127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        threads = []
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                break
            self._connections.append(connection)
            threads.append(threading.Thread(target=self._serve, args=(connection,)))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            try:
                while header := lines.readline():
                    words = []
                    for _ in range(int(header[1:])):
                        length = int(lines.readline()[1:])
                        words.append(lines.read(length + 2)[:-2])
                    connection.sendall(self._answer(words))
            except (OSError, ValueError):
                pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._thread.join(60)


@pytest.fixture
def stub() -> Iterator[Callable[[Callable[[list[bytes]], bytes]], str]]:
    made: list[Stub] = []

    def make(answer: Callable[[list[bytes]], bytes]) -> str:
        made.append(Stub(answer))
        return made[-1].url

    yield make
    for each in made:
        each.close()


def bulk(text: str) -> bytes:
    return f"${len(text)}\r\n{text}\r\n".encode()


def a_server_that_says(info: str) -> Callable[[list[bytes]], bytes]:
    def answer(command: list[bytes]) -> bytes:
        name = command[0].upper()
        if name == b"PING":
            return b"+PONG\r\n"
        return bulk(info) if name == b"INFO" else b"+OK\r\n"

    return answer


def refusal(url: str, kind: type[Exception], within: float = 30.0) -> str:
    """What `lmpool.connect` says of the server at `url`, which must come quickly."""
    began = time.monotonic()
    lm = lmpool.connect(url, "p")
    try:
        with pytest.raises(kind) as refused:
            lm.next_token_logprobs_sync([1])
        assert type(refused.value) is kind
        assert time.monotonic() - began < within
        message = str(refused.value)
        assert SECRET not in message
        assert SECRET not in repr(refused.value.__context__)
        # So does entering.
        with pytest.raises(kind), lmpool.connect(url, "p"):
            pass
        return message
    finally:
        lm.close()


# --- versions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["6.2.0", "6.2.14", "5.0.7", "2.8"])
def test_a_server_that_is_too_old_is_refused_at_the_caller(
    version: str, stub: Callable[..., str]
) -> None:
    url = stub(a_server_that_says(f"# Server\r\nredis_version:{version}\r\n"))
    message = refusal(url, ServerTooOld)
    assert f"runs Redis {version}: lmpool needs Redis 7.0 or Valkey 8; upgrade" in message


def test_a_server_without_a_command_is_too_old(stub: Callable[..., str]) -> None:
    url = stub(lambda _: b"-ERR unknown command 'PING', with args beginning with:\r\n")
    assert "lacks a command" in refusal(url, ServerTooOld)


def test_a_server_that_is_no_sentinel_is_told_from_an_old_one(stub: Callable[..., str]) -> None:
    """In the words that Redis 7.0 has for it."""
    unknown = b"-ERR unknown command 'SENTINEL', with args beginning with: "
    url = stub(lambda command: unknown + b"\r\n" if command[0] == b"SENTINEL" else b"+OK\r\n")
    url = url.replace("redis://", "redis+sentinel://").replace("/0", "/service/0")
    assert "is no Sentinel: write redis://" in refusal(url, ServerRefused)


def test_a_sentinel_is_no_server(stub: Callable[..., str]) -> None:
    url = stub(a_server_that_says("redis_version:7.2.0\r\nredis_mode:sentinel\r\n"))
    assert "is a Sentinel: write redis+sentinel://" in refusal(url, ServerRefused)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"redis_version": "7.0.0"}, "Redis 7.0.0"),
        ({"redis_version": "8.2.1"}, "Redis 8.2.1"),
        ({"redis_version": "10.0"}, "Redis 10.0"),
        ({"redis_version": "7.2.4", "valkey_version": "8.1.0"}, "Valkey 8.1.0"),
        ({"redis_version": 7.4}, "Redis 7.4"),
        ({}, "Redis "),
    ],
)
def test_versions_that_serve(info: dict[str, object], said: str) -> None:
    assert check_version(info, "redis://h") == said


def test_a_real_server_is_greeted(server_url: str) -> None:
    clock = ServerClock()
    server = open_server(server_url)
    try:
        began = time.monotonic()
        assert greet(server, server_url, clock).startswith(("Redis ", "Valkey "))
        late = (time.monotonic() - began) * 1000  # at most: its time was on the way meanwhile
        before, now, after = server.time(), clock.now_ms(), server.time()
        assert before[0] * 1000 - late - 1000 < now < after[0] * 1000 + 2000
    finally:
        server.close()


# --- refusals ----------------------------------------------------------------------------------


def test_a_wrong_port_is_told_quickly() -> None:
    message = refusal(f"redis://:{SECRET}@127.0.0.1:{free_port()}/0", ServerUnreachable)
    assert message.startswith("no answer from redis://:***@127.0.0.1:")
    assert "Is the server running" in message


def test_a_wrong_socket_is_told_quickly() -> None:
    message = refusal(f"unix://:{SECRET}@/nowhere/redis.sock?db=0", ServerUnreachable)
    assert "/nowhere/redis.sock" in message


def test_a_wrong_host_is_told_quickly() -> None:
    refusal(f"redis://:{SECRET}@no-such-host.invalid:6379/0", ServerUnreachable)


def test_something_else_on_the_port_is_told_quickly(stub: Callable[..., str]) -> None:
    url = stub(lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert "no Redis-compatible server answers at" in refusal(url, ServerUnreachable)


def test_a_server_that_hangs_up_is_told_quickly(stub: Callable[..., str]) -> None:
    def hang_up(_: list[bytes]) -> bytes:
        raise OSError

    refusal(stub(hang_up), ServerUnreachable)


@pytest.fixture(scope="module")
def guarded(server_binary: str) -> Iterator[RealServer]:
    with RealServer(tcp=True, requirepass="the-right-one") as server:
        yield server


@pytest.mark.server
@pytest.mark.parametrize("login", ["", f":{SECRET}@", f"default:{SECRET}@", f"nobody:{SECRET}@"])
def test_a_wrong_password_is_refused_without_telling_it(guarded: RealServer, login: str) -> None:
    message = refusal(f"redis://{login}127.0.0.1:{guarded.port}/0", ServerRefused)
    assert "password" in message
    assert "the-right-one" not in message


@pytest.mark.server
def test_a_password_for_a_server_without_one_is_refused(server_url: str) -> None:
    refusal(server_url.replace("unix://", f"unix://user:{SECRET}@"), ServerRefused)


@pytest.mark.server
def test_the_right_password_is_taken(guarded: RealServer) -> None:
    server = open_server(guarded.url)
    try:
        greet(server, guarded.url)
    finally:
        server.close()
    assert "the-right-one" not in refusal_of_unknown_pool(guarded.url)


def refusal_of_unknown_pool(url: str) -> str:
    lm = lmpool.connect(url, "never-served", workers_timeout=0.2)
    try:
        with pytest.raises(lmpool.errors.UnknownPool) as refused:
            lm.info  # noqa: B018
        return str(refused.value)
    finally:
        lm.close()


@pytest.mark.server
def test_a_user_without_permissions_is_refused(guarded: RealServer) -> None:
    with guarded.client() as admin:
        admin.acl_setuser("narrow", enabled=True, passwords=[f"+{SECRET}"], commands=["+ping"])
    message = refusal(f"redis://narrow:{SECRET}@127.0.0.1:{guarded.port}/0", ServerRefused)
    assert "permi" in message


# --- explanations ------------------------------------------------------------------------------

E = redis.exceptions


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (E.AuthenticationError("invalid username-password pair"), ServerRefused),
        (E.AuthenticationWrongNumberOfArgsError("wrong"), ServerRefused),
        (E.NoPermissionError("no permissions"), ServerRefused),
        (E.ResponseError("NOAUTH Authentication required."), ServerRefused),
        (E.ResponseError("WRONGPASS invalid"), ServerRefused),
        (E.ResponseError("unknown command 'XAUTOCLAIM'"), ServerTooOld),
        (E.ResponseError("something else"), ServerRefused),
        (E.ConnectionError("refused"), ServerUnreachable),
        (E.TimeoutError(""), ServerUnreachable),
        (E.BusyLoadingError("loading"), ServerUnreachable),
        (E.ReadOnlyError("You can't write against a read only replica."), ServerUnreachable),
        (E.ResponseError("MISCONF Errors writing to the AOF file"), ServerUnreachable),
        (E.ResponseError("BUSY Redis is busy running a script."), ServerUnreachable),
        (E.OutOfMemoryError("command not allowed"), ServerUnreachable),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_exceptions_of_the_client_become_ours(error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind) as told, explained(f"redis://:{SECRET}@h:1/0"):
        raise error
    assert "redis://:***@h:1/0" in str(told.value)
    assert told.value.__cause__ is None


@pytest.mark.server
def test_a_replica_is_told_as_such(server_binary: str) -> None:
    with (
        RealServer(binary=server_binary, tcp=True, replicaof="127.0.0.1 1") as server,
        server.client() as client,
        pytest.raises(ServerUnreachable) as told,
        explained(server.url),
    ):
        client.set("a", "b")
    said = "is not ready: it is a replica, which takes no writes: write its primary's URL, or where"
    assert f"{server.url} {said} Sentinels name that" in str(told.value)


def test_who_may_not_is_told_where_it_stands_who_may() -> None:
    said = r"may not\. Use a URL .*deploy/redis/users\.acl"
    with pytest.raises(ServerRefused, match=said), explained("redis://h"):
        raise E.NoPermissionError("this user may not")


@pytest.mark.parametrize(
    "place", [f"script: {'0f' * 20}, on @user_script:20.", "script: on @user_script:20."]
)
@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("The user executing the script can't run this command or subcommand", True),
        (
            "ACL failure in script: User n has no permissions to run the 'xinfo|stream' command",
            False,
        ),
        ("ACL failure in script: No permissions to access a key", True),
    ],
)
def test_what_a_scripts_user_may_not_do_is_told_in_the_servers_words(
    words: str, more: bool, place: str
) -> None:
    error = Parser.parse_error(f"ERR {words} {place}")
    assert isinstance(error, redis.exceptions.NoPermissionError)
    assert str(error) == words + " (ACL LOG says which)" * more


def test_other_exceptions_pass() -> None:
    with pytest.raises(KeyError), explained("redis://h"):
        raise KeyError


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (E.ConnectionError("gone"), True),
        (E.TimeoutError("slow"), True),
        (E.BusyLoadingError("loading"), True),
        (E.ReadOnlyError("a replica"), True),
        (ConnectionResetError(), True),
        (OSError(), True),
        (E.AuthenticationError("wrong"), False),
        (E.AuthorizationError("wrong"), False),
        (E.NoPermissionError("wrong"), False),
        (E.ResponseError("wrong"), False),
        (E.ResponseError("UNBLOCKED force unblock from blocking operation, ... -> replica"), True),
        (E.ResponseError("UNBLOCKED client unblocked via CLIENT UNBLOCK"), True),
        (E.ResponseError("UNBLOCKED the stream key no longer exists"), False),
        (E.NoScriptError("unknown"), False),
        (E.OutOfMemoryError("full"), False),
        (ValueError(), False),
    ],
    ids=lambda value: repr(value),
)
def test_which_errors_are_worth_another_connection(error: Exception, lost: bool) -> None:
    assert is_lost(error) is lost


def test_values_of_every_size_arrive_whole(any_server: str, pool_name: str) -> None:
    server = open_server(any_server)
    try:
        for size in (0, 1, 5999, 6000, 6001, 100_000, 3_000_000):
            value = bytes(i % 251 for i in range(min(size, 1000))) * (size // 1000 or 1)
            server.set(pool_name, value)
            assert server.get(pool_name) == value
        server.delete(pool_name)
    finally:
        server.close()


# --- time --------------------------------------------------------------------------------------


def test_the_clock_is_the_servers() -> None:
    now = 50.0
    clock = ServerClock(lambda: now)
    clock.set(1_700_000_000, 250_000)
    assert clock.now_ms() == 1_700_000_000_250
    now += 1.5
    assert clock.now_ms() == 1_700_000_001_750


@pytest.mark.parametrize(
    ("seconds", "ms"), [(1, 1000), (0.0015, 2), (0.5, 500), (0, 1), (1e-9, 1), (600.0, 600_000)]
)
def test_seconds_as_milliseconds(seconds: float, ms: int) -> None:
    assert to_ms(seconds) == ms
