"""Many callers of one gateway at once: quick ones, slow ones, and some that hang up mid-way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import httpx
import pytest
import redis

from lmpool.gateway.options import GatewayOptions
from lmpool.gateway.serve import SAID_EVERY
from tests.support.gateways import GatewayProcess
from tests.support.pools import pool_shards, until_at_rest, worker_processes
from tests.support.waiting import until
from tests.support.workers import worker_process

pytestmark = [pytest.mark.slow]

QUICK_TOKENS: Final = 16
SLOW_TOKENS: Final = 300
"""With the likeliest five of each, some times what the buffers of a connection hold."""
LONG_TOKENS: Final = 1000
"""Of those that hang up, who see the first."""
PIECE_BYTES: Final = 1 << 10
"""What a token may take in the gateway that was drawn, and that its reader has not taken."""
CALLER_BYTES: Final = 128 << 10
"""What a caller may take beside that: a connection, a request, buffers."""
PAUSE: Final = 1.5
"""Seconds between two reads of a slow one."""
RECEIVED: Final = 4096
"""Bytes of a slow reader's buffer, and of what it reads at a time."""


@dataclass
class Crowd:
    """How many there are of each, and what they have seen."""

    quick: int
    slow: int
    gone: int
    port: int
    quick_ones_are_done: asyncio.Event = field(default_factory=asyncio.Event)
    whole: int = 0
    """Streams that came to their end, with every token."""

    @property
    def bound(self) -> int:
        """Bytes by which the gateway may grow."""
        callers = self.quick + self.slow + self.gone
        tokens = self.quick * QUICK_TOKENS + self.slow * SLOW_TOKENS + self.gone * LONG_TOKENS
        held = tokens * PIECE_BYTES
        cached = min(held, GatewayOptions(()).cache_bytes)
        return callers * CALLER_BYTES + held + cached + (16 << 20)

    async def come(self) -> None:
        """All at once."""

        async def quick_ones() -> None:
            await asyncio.gather(*(self._quick(number) for number in range(self.quick)))
            self.quick_ones_are_done.set()

        slow = [self._slow(self.quick + number) for number in range(self.slow)]
        gone = [self._gone(self.quick + self.slow + number) for number in range(self.gone)]
        await asyncio.gather(quick_ones(), *slow, *gone)

    async def _quick(self, number: int) -> None:
        async with self._asked(number, QUICK_TOKENS) as reader:
            self._check(await reader.read(), QUICK_TOKENS)

    async def _slow(self, number: int) -> None:
        """Reads little by little, and faster once all quick ones are done."""
        data = b""
        async with self._asked(number, SLOW_TOKENS, logprobs=5) as reader:
            while part := await reader.read(RECEIVED):
                data += part
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.quick_ones_are_done.wait(), PAUSE)
        self._check(data, SLOW_TOKENS)

    async def _gone(self, number: int) -> None:
        async with self._asked(number, LONG_TOKENS) as reader:
            assert b"200" in await reader.readline()
            await reader.readuntil(b'"text":')

    @contextlib.asynccontextmanager
    async def _asked(self, number: int, tokens: int, **more: Any) -> Any:
        body = {"prompt": [number % 256, number // 256], "max_tokens": tokens, "seed": number}
        body |= {"stream": True, "ignore_eos": True, "return_token_ids": True, **more}
        content = json.dumps(body).encode()
        raw = socket.socket()
        raw.setblocking(False)
        if tokens == SLOW_TOKENS:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self.port))
        limit = RECEIVED if tokens == SLOW_TOKENS else 1 << 16
        reader, writer = await asyncio.open_connection(sock=raw, limit=limit)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += "Connection: close\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        try:
            yield reader
        finally:
            writer.transport.abort()

    def _check(self, data: bytes, tokens: int) -> None:
        head, _, body = data.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), data[:1000]
        # An event is a chunk: what frames chunks is on lines of its own.
        lines = [line for line in body.split(b"\n") if line.startswith(b"data: ")]
        assert lines.pop() == b"data: [DONE]"
        chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert sum(len(choice["token_ids"]) for choice in choices) == tokens
        assert choices[-1]["finish_reason"] == "length"
        self.whole += 1


@contextmanager
def watched(gateway: GatewayProcess) -> Iterator[list[int]]:
    """The bytes that it has, over and over, while the block runs."""
    found = [gateway.resident()]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            found.append(gateway.resident())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


@contextmanager
def files(count: int) -> Iterator[None]:
    """So many may be open, here and in what is started here, until it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"needs {count} open files, and may have {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.one_server
@pytest.mark.parametrize(
    ("quick", "slow", "gone"),
    [
        pytest.param(60, 12, 6, id="some"),
        pytest.param(
            1000, 200, 100, id="many", marks=[pytest.mark.chaos, pytest.mark.timeout(1200)]
        ),
    ],
)
def test_a_crowd_is_answered_in_bounded_memory_and_leaves_no_job(
    server_url: str,
    pool_name: str,
    redis_client: redis.Redis,
    quick: int,
    slow: int,
    gone: int,
    record_property: Any,
) -> None:
    places = quick + slow + gone
    bounds = ("--max-in-flight", str(places), "--max-prompts", str(places))
    settings = {"engine_opts": {"delay": 0.002}, "batch_size": 256}
    with (
        files(places + 1024),
        worker_processes(server_url, pool_name, 2, **settings),
        GatewayProcess(
            server_url, pool_name, options=(*bounds, "--queue-timeout", "45")
        ) as gateway,
        httpx.Client(base_url=gateway.base_url, timeout=600) as http,
    ):
        until(lambda: http.get("/ready").is_success, 60, what="it to be ready", every=0.1)
        body = {"prompt": [[1]] * 8, "max_tokens": 2, "logprobs": 5}
        assert http.post("/v1/completions", json=body).status_code == 200
        crowd = Crowd(quick, slow, gone, gateway.port)
        began = time.monotonic()
        with watched(gateway) as resident:
            asyncio.run(crowd.come())
        took = time.monotonic() - began
        grown = max(resident) - resident[0]
        record_property("bytes", grown)
        print(
            f"{places} callers, {took:.1f} s: the gateway had {resident[0] >> 20} MiB before, "
            f"{max(resident) >> 20} at most, and may grow by {crowd.bound >> 20}"
        )
        assert crowd.whole == quick + slow
        assert grown < crowd.bound
        until_at_rest(redis_client, pool_name, 60)
        for shard in pool_shards(redis_client, pool_name):
            for stream in shard.streams:  # of every lane and priority
                assert redis_client.xlen(stream.key) == 0
        # Nobody holds a place any more: this takes all of them.
        body = {"prompt": [[3, 4]] * places, "max_tokens": 1}
        assert http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.one_server
def test_a_gateway_that_can_take_no_more_connections_says_so_once(
    server_url: str, pool_name: str
) -> None:
    """It is as fine as before where there is room again."""
    with (
        worker_process(server_url, pool_name),
        GatewayProcess(server_url, pool_name) as gateway,
    ):
        with httpx.Client(base_url=gateway.base_url, timeout=60) as http:
            until(lambda: http.get("/ready").is_success, 60, what="it to be ready", every=0.1)
        there = len(os.listdir(f"/proc/{gateway.process.pid}/fd"))
        most = there + 20
        _, hard = resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, (most, hard))
        began = time.monotonic()
        for _ in range(2):
            with ExitStack() as crowd:
                for _ in range(40):
                    caller = socket.create_connection(("127.0.0.1", gateway.port))
                    crowd.enter_context(caller)
                until(partial(_is_ended, caller), what="the last to be turned away")
                until(lambda: "connections are turned away" in gateway.log(), what="it to say so")
            with httpx.Client(base_url=gateway.base_url, timeout=60) as http:
                until(lambda: _answers(http), 60, what="it to take another", every=0.1)
        said = [line for line in gateway.log().splitlines() if "turned away" in line]
        assert len(said) <= 1 + (time.monotonic() - began) // SAID_EVERY
        assert f"may have {most} open: raise that (ulimit -n" in said[0]


def _is_ended(caller: socket.socket) -> bool:
    try:
        return not caller.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _answers(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").is_success
    except httpx.TransportError:
        return False


@pytest.mark.one_server
def test_a_shells_usual_bound_of_open_files_is_none_of_connections(
    server_url: str, pool_name: str
) -> None:
    """It is 1,024 mostly, of 4,096 requests that a gateway may have."""
    with files(128):
        gateway = GatewayProcess(server_url, pool_name)
    with files(1024), ExitStack() as stack:
        stack.enter_context(gateway)
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=60))
        assert httpx.get(f"{gateway.base_url}/health", timeout=60).status_code == 200
