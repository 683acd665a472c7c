"""What a gateway is not brought down by, while others are answered: keys, floods, slow ones, and
callers that go away."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from lmpool.gateway.keys import line, new_key
from tests.support.gateways import GatewayProcess
from tests.support.pools import until_at_rest
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import worker_process

pytestmark = [pytest.mark.slow]

POOL = "hostile"
JSON = {"content-type": "application/json"}
ALICE, BOB = new_key(), new_key()
SLOW = {"delay": 0.05}
"""Seconds a batch of the mock engine: a continuation of n tokens takes n of them."""
BODY_BYTES = 1 << 20


@pytest.fixture(scope="module")
def server(_session_server: RealServer) -> RealServer:
    return _session_server


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"{line('alice', ALICE)}\n{line('bob', BOB, 2)}\n")
    return path


@pytest.fixture(scope="module")
def gateway(server: RealServer, keys: Path) -> Iterator[GatewayProcess]:
    options = (
        "--api-keys", str(keys), "--max-body", str(BODY_BYTES), "--body-timeout", "8",
        "--queue-timeout", "30",
    )  # fmt: skip
    url = server.url
    with (
        worker_process(url, POOL, engine_opts=SLOW),
        GatewayProcess(url, POOL, options=options) as gateway,
        client(gateway) as http,
    ):
        until(lambda: http.get("/ready").is_success, 120, what="it to be ready", every=0.1)
        yield gateway


@contextmanager
def client(gateway: GatewayProcess, key: str = ALICE) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=gateway.base_url, timeout=60, headers=headers) as http:
        yield http


@pytest.fixture
def http(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with client(gateway) as http:
        yield http
        assert answers(http), "others are answered after it as before"


def answers(http: httpx.Client) -> bool:
    answer = http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 1})
    return answer.status_code == 200


@contextmanager
def connection(gateway: GatewayProcess) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as raw:
        yield raw


def everything(raw: socket.socket) -> bytes:
    """What comes until the other end closes."""
    found = b""
    try:
        while data := raw.recv(65_536):
            found += data
    except ConnectionError:
        pass
    return found


def head(more: str = "", path: str = "/v1/completions") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\n"
        f"Content-Type: application/json\r\n{more}"
    ).encode()


# --- keys --------------------------------------------------------------------------------------


def test_keys_open_it_and_nothing_else_does(gateway: GatewayProcess) -> None:
    body = {"prompt": [1], "max_tokens": 1}
    with httpx.Client(base_url=gateway.base_url, timeout=60) as http:
        for auth in (None, ("any", "wrong"), ("any", ALICE[:-1])):
            assert http.post("/v1/completions", json=body, auth=auth).status_code == 401
        assert http.post("/v1/completions", json=body, auth=("any", ALICE)).status_code == 200
        for path in ("/v1/models", "/tokenize", "/v1/none", "/inference/v1/generate"):
            assert http.get(path).status_code == 401
        for path in ("/health", "/ready", "/version", "/openapi.json"):
            assert http.get(path).status_code == 200
        described = http.get("/openapi.json").json()
    assert described["paths"]["/v1/completions"]["post"]["security"]
    assert "security" not in described["paths"]["/health"]["get"]


def test_a_key_that_is_added_is_known_soon_and_one_that_is_gone_is_not(
    gateway: GatewayProcess, keys: Path
) -> None:
    new, before = new_key(), keys.read_text()
    with client(gateway, new) as http:
        assert http.get("/v1/models").status_code == 401
        keys.write_text(f"{before}{line('new', new)}\n")
        until(lambda: http.get("/v1/models").status_code == 200, every=0.2)
        keys.write_text(before)
        until(lambda: http.get("/v1/models").status_code == 401, every=0.2)


def test_a_keys_own_bound_is_a_429_for_it_alone(
    gateway: GatewayProcess, http: httpx.Client
) -> None:
    body = {"prompt": [1], "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with client(gateway, BOB) as bob:
        with bob.stream("POST", "/v1/completions", json=body) as one:
            first = one.iter_lines()  # what is let go of is hung up
            next(first)
            with bob.stream("POST", "/v1/completions", json=body) as other:
                second = other.iter_lines()
                next(second)
                third = bob.post("/v1/completions", json={"prompt": [1]})
                assert third.status_code == 429
                assert 1 <= int(third.headers["retry-after"]) <= 120
                assert answers(http)
        until(lambda: answers(bob), what="the key to have room again", every=0.2)


# --- bodies ------------------------------------------------------------------------------------


def test_a_gigabyte_is_refused_and_not_held(gateway: GatewayProcess, http: httpx.Client) -> None:
    before = gateway.resident()
    with connection(gateway) as raw:
        raw.sendall(head(f"Content-Length: {1 << 30}\r\n\r\n"))
        assert everything(raw).startswith(b"HTTP/1.1 413 ")
    for _ in range(3):
        with connection(gateway) as raw:
            raw.sendall(head("Transfer-Encoding: chunked\r\n\r\n"))
            chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
            sent = 0
            try:
                while sent < 1 << 30:
                    raw.sendall(chunk)
                    sent += len(chunk)
            except OSError:
                pass
            assert sent < 1 << 28
    assert gateway.resident() < before + (64 << 20)


@pytest.mark.parametrize("part", ["head", "body"])
def test_one_that_trickles_in_is_given_up(
    gateway: GatewayProcess, http: httpx.Client, part: str
) -> None:
    with connection(gateway) as raw:
        data = head("X-Slow: ") if part == "head" else head("Content-Length: 90\r\n\r\n")
        raw.sendall(data)
        began = time.monotonic()
        closed = threading.Event()

        def trickle() -> None:
            while not closed.wait(0.1):
                try:
                    raw.sendall(b"a")
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        found = everything(raw)
        closed.set()
        thread.join()
        assert time.monotonic() - began < 60
        assert found.startswith(b"HTTP/1.1 408 ") if part == "body" else found == b""


def test_heads_without_an_end_are_cut(gateway: GatewayProcess, http: httpx.Client) -> None:
    with connection(gateway) as raw:
        raw.sendall(head())
        sent = 0
        try:
            while sent < 1 << 28:
                raw.sendall(b"X-More: " + b"a" * 8000 + b"\r\n")
                sent += 8000
        except OSError:
            pass
        assert sent < 1 << 26


@pytest.mark.parametrize(
    "lines",
    [
        "X-A: a\rX-B: b\r\n", "X-A: a\nX-B: b\r\n", "X-A : a\r\n", "X-A: \x00\r\n",
        "Content-Length: 2\r\nContent-Length: 3\r\n", "Content-Length: -1\r\n",
        "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", "Transfer-Encoding: x\r\n",
    ],
)  # fmt: skip
def test_damaged_heads_add_no_header(
    gateway: GatewayProcess, http: httpx.Client, lines: str
) -> None:
    with connection(gateway) as raw:
        raw.sendall(head(f"{lines}Connection: close\r\n\r\n") + b"{}")
        raw.shutdown(socket.SHUT_WR)
        found = everything(raw)
    assert found == b"" or found.startswith((b"HTTP/1.1 4",))
    assert b"X-B" not in found


@pytest.mark.usefixtures("http")
def test_who_offers_another_protocol_is_answered_in_this_one(gateway: GatewayProcess) -> None:
    """As Java's client does with every request."""
    body = json.dumps({"prompt": [1, 2], "max_tokens": 1}).encode()
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEA\r\n"
    with connection(gateway) as raw:
        for _ in range(2):
            raw.sendall(head(f"{offer}Content-Length: {len(body)}\r\n\r\n") + body)
            answer = b""
            while b"usage" not in answer:
                data = raw.recv(65_536)
                assert data, answer
                answer += data
            assert answer.startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("name", ["model", "prompt", "stop"])
def test_line_breaks_of_a_body_reach_no_head(http: httpx.Client, name: str) -> None:
    body = {"prompt": [1], "max_tokens": 1, name: "a\r\nX-Evil: 1\r\n\r\n"}
    answer = http.post("/v1/completions", json=body)
    assert "x-evil" not in answer.headers
    assert answer.status_code in (200, 404)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"[" * 500_000, 400),
        (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, 400),
        (json.dumps({"prompt": [1], "stop": ["s"] * 100_000}).encode(), 400),
        (json.dumps({"prompt": [1], "stop": "s" * 900_000}).encode(), 400),
        (json.dumps({"prompt": [[1]] * 100_000}).encode(), 400),
        (json.dumps({"prompt": [1], "n": 10**30}).encode(), 400),
        (b'{"prompt": [1], "n": 128, "max_tokens": 1000000000, "logprobs": 100}', 413),
        (b'{"prompt": [1], "temperature": 1e999}', 400),
        (b'{"prompt": [1], "temperature": NaN}', 400),
        (b'{"prompt": [' + b"9" * 5000 + b"]}", 400),
        (b'{"prompt": "\xff\xfe"}', 400),
        (b"\x00" * 1000, 400),
    ],
    ids=lambda given: None if isinstance(given, int) else f"{len(given)}-{given[:20]!r}",
)
def test_bodies_made_to_hurt_are_refused_at_once(
    http: httpx.Client, content: bytes, status: int
) -> None:
    began = time.monotonic()
    answer = http.post("/v1/completions", content=content, headers=JSON)
    assert time.monotonic() - began < 60
    assert answer.status_code in {status, 422}, answer.text[:300]
    assert answer.json()["error"]["message"]


WRONG: list[Any] = [
    None,
    True,
    -1,
    0,
    2**70,
    1.5,
    "",
    "x",
    "\ud800",
    [],
    [[]],
    [None],
    {},
    {"a": {}},
]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
)
def test_no_field_of_any_wrong_type_is_a_failure_of_ours(
    gateway: GatewayProcess, http: httpx.Client, path: str
) -> None:
    description = http.get("/openapi.json").json()
    schema = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    given = schema["schema"].get("anyOf", [schema["schema"]])
    names = [each["$ref"].rpartition("/")[2] for each in given]
    schemas = description["components"]["schemas"]
    fields = {field for name in names for field in schemas[name]["properties"]}
    messages = [{"role": "user", "content": "a"}]
    sound: dict[str, Any] = {"prompt": [1], "tokens": [1], "max_tokens": 1, "messages": messages}
    sound = {field: value for field, value in sound.items() if field in fields}
    if path == "/tokenize":
        del sound["messages"]
    for field in sorted(fields):
        for wrong in WRONG:
            body = json.dumps({**sound, field: wrong}).encode()
            answer = http.post(path, content=body, headers=JSON)
            assert answer.status_code in (200, 400, 404, 413, 422), (field, wrong, answer.text)


# --- callers that go away ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1.0, 2.0], "max_tokens": 1.0}),
        ("/inference/v1/generate", {"token_ids": [1.0], "sampling_params": {"max_tokens": 1.0}}),
        ("/v1/logprobs", {"prompt": [[1.0, 2.0]], "want": {"kind": "top", "k": 2.0}}),
    ],
)
def test_a_whole_number_may_be_written_with_a_point(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    """As JSON has it, and as schemas say: some languages know no other numbers."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text


def test_who_hangs_up_leaves_no_job(
    gateway: GatewayProcess, http: httpx.Client, redis_client: redis.Redis
) -> None:
    body = json.dumps({"prompt": [7, 8], "max_tokens": 3000, "ignore_eos": True, "n": 3})
    stream = json.dumps({**json.loads(body), "stream": True, "n": 1, "stop": "never"})
    for text, reads in ((body, False), (stream, True), (stream, False)):
        with connection(gateway) as raw:
            raw.sendall(head(f"Content-Length: {len(text)}\r\n\r\n") + text.encode())
            if reads:
                assert raw.recv(100).startswith(b"HTTP/1.1 200")
            else:
                time.sleep(0.5)
    until_at_rest(redis_client, POOL, timeout=60)


@pytest.mark.usefixtures("gateway")  # whose worker serves the pool
def test_who_does_not_read_is_ended_and_holds_nothing_up(
    server: RealServer, redis_client: redis.Redis
) -> None:
    """A stream that nobody reads ends with its request's time."""
    options = ("--timeout", "3")
    with GatewayProcess(server.url, POOL, options=options) as short:
        with client(short) as http:
            until(lambda: http.get("/ready").is_success, 120, what="it to be ready", every=0.1)
        text = json.dumps({"prompt": [9], "max_tokens": 4000, "ignore_eos": True, "stream": True})
        with connection(short) as raw:
            more = f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
            raw.sendall(head(more) + text.encode())
            time.sleep(1)
            until_at_rest(redis_client, POOL, timeout=60)
            data = everything(raw)
            assert b'"error"' in data
            assert b"it was withdrawn" in data


# --- without room, without workers, without a server ---------------------------------------------


def test_without_workers_it_waits_and_then_says_when_to_come_again(
    server: RealServer, pool_name: str
) -> None:
    url = server.url
    with (
        GatewayProcess(url, pool_name, options=("--queue-timeout", "2")) as gateway,
        client(gateway) as http,
    ):
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 503
        began = time.monotonic()
        answer = http.post("/v1/completions", json={"prompt": [1], "model": pool_name})
        assert answer.status_code == 503
        assert 1 <= int(answer.headers["retry-after"]) <= 120
        assert time.monotonic() - began >= 2
        with worker_process(url, pool_name, engine_opts=SLOW):
            until(lambda: http.get("/ready").is_success, 60, what="it to be ready", every=0.2)
            assert answers(http)


def test_a_pool_of_another_model_is_found_by_who_asks_nothing_of_it(
    server: RealServer, pool_name: str
) -> None:
    """As one behind a proxy that sends it requests only while it is ready."""
    new: dict[str, Any] = {"model": "new", "max_prompt_tokens": 8}
    with ExitStack() as stack:
        with worker_process(server.url, pool_name, model="old", engine_opts=SLOW):
            gateway = stack.enter_context(GatewayProcess(server.url, pool_name))
            http = stack.enter_context(client(gateway))
            until(lambda: http.get("/ready").is_success, 120, what="it to be ready", every=0.1)
            assert http.get("/v1/models").json()["data"][0]["root"] == "old"
        vocabulary = {**SLOW, "vocab_size": 300}
        with worker_process(server.url, pool_name, engine_opts=vocabulary, **new):
            until(lambda: http.get("/v1/models/new").is_success, 30, what="the new one", every=0.1)
            until(lambda: http.get("/ready").is_success, 30, what="it to be ready", every=0.1)
            (card,) = http.get("/v1/models").json()["data"]
            assert (card["root"], card["max_model_len"]) == ("new", 8)
            body = {"model": "new", "prompt": [299], "max_tokens": 1}
            assert http.post("/v1/completions", json=body).status_code == 200


def test_a_full_backlog_is_waited_for_and_then_a_503(server: RealServer, pool_name: str) -> None:
    url = server.url
    slow = {"delay": 1.0}
    options = ("--queue-timeout", "2")
    with (
        worker_process(url, pool_name, engine_opts=slow, max_backlog=1, batch_size=1),
        GatewayProcess(url, pool_name, options=options) as gateway,
        client(gateway) as http,
    ):
        until(lambda: http.get("/ready").is_success, 120, what="it to be ready", every=0.1)
        body = {"prompt": [[i] for i in range(30)], "max_tokens": 1}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 503, answer.text
        assert 1 <= int(answer.headers["retry-after"]) <= 120


def test_two_pools_behind_one_gateway(server: RealServer, pool_name: str) -> None:
    url, other = server.url, f"{pool_name}-b"
    with (
        worker_process(url, pool_name, engine_opts=SLOW),
        worker_process(url, other, engine_opts={**SLOW, "vocab_size": 300}),
        GatewayProcess(url, pool_name, other) as gateway,
        client(gateway) as http,
    ):
        until(lambda: http.get("/ready").is_success, 120, what="it to be ready", every=0.1)
        listed = [card["id"] for card in http.get("/v1/models").json()["data"]]
        assert listed == [pool_name, other]
        body = {"prompt": [299], "max_tokens": 1}
        assert http.post("/v1/completions", json={**body, "model": other}).status_code == 200
        assert http.post("/v1/completions", json={**body, "model": pool_name}).status_code == 400
        assert http.post("/v1/completions", json=body).status_code == 400


def test_a_server_that_is_away_takes_no_other_pool_off_the_list(
    server: RealServer, pool_name: str
) -> None:
    away = f"{pool_name}-b"
    with ExitStack() as stack:
        other = stack.enter_context(RealServer())
        for url, pool in ((server.url, pool_name), (other.url, away)):
            stack.enter_context(worker_process(url, pool, engine_opts=SLOW))
        pools = (pool_name, f"{away}={other.url}")
        gateway = stack.enter_context(GatewayProcess(server.url, *pools))
        http = stack.enter_context(client(gateway))
        until(lambda: http.get("/ready").is_success, 120, what="it to be ready", every=0.1)
        other.pause()
        try:
            listed = http.get("/v1/models")
            answer = http.post("/v1/completions", json={"model": f"{away}:x", "prompt": [1]})
        finally:
            other.resume()
        assert [card["id"] for card in listed.json()["data"]] == [pool_name]
        error = answer.json()["error"]
        assert (answer.status_code, error["message"]) == (503, "the pool's server does not answer")

        def listed_ids() -> list[str]:
            return [card["id"] for card in http.get("/v1/models").json()["data"]]

        both = [pool_name, away]
        until(lambda: listed_ids() == both, 30, what="both to be listed", every=0.1)


# --- what a review found -------------------------------------------------------------------------


def test_a_body_of_wrong_items_is_refused_at_the_first(http: httpx.Client) -> None:
    """Each of them told would fill the memory, and keep everybody waiting."""
    began = time.monotonic()
    for prompt in ([-1] * 200_000, [[-1]] * 100_000, [1, *["x"] * 200_000]):
        answer = http.post("/v1/completions", json={"prompt": prompt})
        assert answer.status_code in (400, 422)
    hello = {"role": "user", "content": "?"}
    lists = [
        ("/v1/logprobs", {"prompt": "a", "want": [{}] * 100_000}),
        ("/v1/logprobs", {"prompt": "a", "want": {"kind": "score", "token_ids": [[]] * 100_000}}),
        ("/v1/logprobs", {"prompt": "a", "want": [{"kind": "row"}] * 40_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * 200_000}]}),
        ("/v1/chat/completions", {"messages": [1] * 200_000}),
        ("/v1/chat/completions", {"messages": [hello], "modalities": [1] * 200_000}),
        ("/v1/chat/completions", {"messages": [hello], "stop": [1] * 200_000}),
    ]
    for path, body in lists:
        answer = http.post(path, json=body)
        assert answer.status_code in (400, 422), path
        assert len(answer.content) < 2000
    answer = http.post("/tokenize", json={"messages": [], "prompt": None})
    assert answer.status_code in (400, 422)
    assert time.monotonic() - began < 60


def test_trailers_without_end_end_the_connection(gateway: GatewayProcess, http: Any) -> None:
    with connection(gateway) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        raw.sendall(b"1\r\na\r\n0\r\n")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            raw.sendall(b"a: b\r\n" * 5_000_000)


def test_a_second_request_before_the_first_ones_answer_hides_no_hang_up(
    gateway: GatewayProcess, http: Any, redis_client: redis.Redis
) -> None:
    body = json.dumps({"prompt": [3, 4], "max_tokens": 400, "stream": True, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    with connection(gateway) as raw:
        raw.sendall(head.encode())
        raw.recv(100)
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    with redis_client as seen:
        until(lambda: not list(seen.scan_iter("{lmpool:hostile:*:flight:*")))


def test_prompts_of_one_request_have_room_of_their_own(http: httpx.Client) -> None:
    """A long prompt leaves the others theirs."""
    long, short = [5] * 4095, [5, 6]
    body = {"prompt": [long, short], "max_tokens": 9, "seed": 1, "ignore_eos": True}
    answer = http.post("/v1/completions", json={**body, "return_token_ids": True}).json()
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [2, 9]


def test_what_would_be_too_long_an_answer_is_refused_before(http: httpx.Client) -> None:
    params = {"logprobs": 100, "max_tokens": 4000, "n": 128, "seed": 1, "ignore_eos": True}
    generate = http.post(
        "/inference/v1/generate", json={"token_ids": [1, 2], "sampling_params": params}
    )
    chosen = {"prompt": [[1, 2]] * 16, "logprobs": 100, "max_tokens": 4000, "n": 128}
    completions = http.post("/v1/completions", json=chosen)
    for answer in (generate, completions):
        assert answer.status_code == 413, answer.text
        assert "ask for fewer" in answer.json()["error"]["message"]


def test_a_text_that_can_not_fit_is_not_read(http: httpx.Client) -> None:
    text = "a" * (BODY_BYTES - 1000)  # of a vocabulary whose longest tokens are known
    for path, body in (
        ("/v1/completions", {"prompt": ["a", text]}),
        ("/v1/logprobs", {"prompt": text, "want": {"kind": "top"}}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert f"a text of {len(text)} characters" in error["message"]
        assert "maximum context length" in error["message"]
        assert error["code"] == "context_length_exceeded"
    # Beside one that fits it is in its place.
    body = {"prompt": ["a", text], "want": {"kind": "top"}}
    fits, fits_not = http.post("/v1/logprobs", json=body).json()["data"]
    assert fits["token_ids"]
    assert "characters" in fits_not["error"]["message"]


def test_an_answer_beyond_the_bound_is_a_413_in_openais_shape(server: RealServer) -> None:
    options = ("--max-response", "20000")
    with (
        worker_process(server.url, "bounded"),
        GatewayProcess(server.url, "bounded", options=options) as gateway,
        httpx.Client(base_url=gateway.base_url, timeout=60) as http,
    ):
        until(lambda: http.get("/ready").is_success, 120, what="it to be ready", every=0.1)
        body = {"prompt": [1, 2], "max_tokens": 3000, "return_token_ids": True, "ignore_eos": True}
        answer = http.post("/v1/completions", json={**body, "n": 8})
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "request_too_large"
