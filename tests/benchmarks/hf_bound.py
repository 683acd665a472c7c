"""The Hugging Face engine behind a bare Redis: what any pool on that server can reach at most.

A process reads prompts off a list, computes their rows, stores them and says so on another list.
Nothing is kept of a pool's promises: there is one worker and one caller, nothing is checked, and
what either of them loses is lost.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np

from lmpool.bulk import Gathered
from lmpool.rows import PackedRow
from lmpool.server import open_server
from tests.benchmarks.hf_workloads import VOCAB_SIZE, Rows, Workload

ASKS, DONE = "bound:asks", "bound:done"
BLOCK = 5
"""Seconds that one read blocks."""
ROW = 4 * VOCAB_SIZE
TTL_MS = b"60000"


@contextmanager
def by_redis_alone(url: str, folder: str, threads: int) -> Iterator[Any]:
    """A side of the benchmark: asks that process for each batch, and copies no row twice."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(url, folder, threads), daemon=True)
    process.start()
    server: Any = open_server(url, blocks_for=BLOCK, name="bound")

    def ask(batch: Sequence[Sequence[int]]) -> Rows:
        numbers = [len(batch), *map(len, batch), *chain.from_iterable(batch)]
        server.execute_command("RPUSH", ASKS, np.array(numbers, np.uint32).tobytes())
        while server.execute_command("BLPOP", DONE, BLOCK) is None:
            if not process.is_alive():
                raise RuntimeError("the bound's process has ended")
        rows = np.empty((len(batch), VOCAB_SIZE), np.float32)
        rooms = [PackedRow(b"", row.view(np.uint8).data) for row in rows]
        server.values([f"bound:{i}" for i in range(len(batch))], [ROW] * len(batch), rooms)
        return rows

    def run(work: Workload) -> Rows:
        return np.concatenate([ask(batch) for batch in work.batches])

    try:
        ask([[1]])
        yield run
    finally:
        process.terminate()
        process.join()
        server.close()


def _serve(url: str, folder: str, threads: int) -> None:
    from lmpool.backends import Request
    from lmpool.backends.hf import HFEngine

    engine = HFEngine(folder, device="cpu", threads=threads)
    server: Any = open_server(url, blocks_for=BLOCK, name="bound")
    while True:
        asked = server.execute_command("BLPOP", ASKS, BLOCK)
        if asked is None:
            continue
        numbers = np.frombuffer(asked[1], np.uint32)
        count = int(numbers[0])
        lengths, ids = numbers[1 : count + 1], numbers[count + 1 :]
        engine.submit(
            [
                Request(b"%d" % i, prompt)
                for i, prompt in enumerate(np.split(ids, np.cumsum(lengths)[:-1]))
            ]
        )
        while engine.in_flight():
            _store(server, [(outcome.id, outcome.logprobs()) for outcome in engine.step()])
        server.execute_command("RPUSH", DONE, "")


def _store(server: Any, rows: Sequence[tuple[bytes, Any]]) -> None:
    """SET rows from where they are."""
    if not rows:
        return
    pieces: list[bytes | memoryview] = []
    for name, row in rows:
        key = b"bound:" + name
        pieces += (
            b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, ROW),
            row.view(np.uint8).data,
            b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(TTL_MS), TTL_MS),
        )
    connection = server.connection_pool.get_connection()
    connection.send_packed_command(Gathered(connection, pieces), check_health=False)
    for _ in rows:
        connection.read_response()
