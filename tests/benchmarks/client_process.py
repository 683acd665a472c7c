"""Clients in processes of their own: what several pipelines do, and what one of them keeps."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests.benchmarks.asking import gathered, in_batches
from tests.benchmarks.pool import WrongRows, check_rows, make_prompts
from tests.support.clients import connected

TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Order:
    """What a client process is to ask: `count` prompts of a seed, in calls of `per_call`.

    With `alternately` every other call is gathered single calls instead of a batch.
    """

    count: int
    per_call: int
    seed: tuple[int, ...]
    alternately: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """When it began and ended, on the clock that processes share, and the client's statistics."""

    began: float
    ended: float
    statistics: dict[str, int]


class ClientProcess:
    """A process with one client of a pool."""

    def __init__(self, url: str, pool: str, vocab_size: int, options: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, url, pool, vocab_size, options), daemon=True
        )
        self.process.start()
        theirs.close()
        self._receive()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid is not None
        return self.process.pid

    def start(self, order: Order) -> None:
        """Let it ask; `answer` waits for it."""
        self._ours.send(order)

    def answer(self) -> Answer:
        """What came of the last order."""
        found = self._receive()
        assert isinstance(found, Answer)
        return found

    def _receive(self) -> object:
        if not self._ours.poll(TIMEOUT):
            raise TimeoutError(f"the client process was silent for {TIMEOUT:g} s")
        try:
            found = self._ours.recv()
        except EOFError:
            raise RuntimeError("the client process ended") from None
        if isinstance(found, str):
            raise WrongRows(found)
        return found

    def close(self) -> None:
        """End it."""
        try:
            self._ours.send(None)
        except OSError:
            pass
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)


@contextmanager
def client_processes(
    number: int, url: str, pool: str, vocab_size: int, **options: Any
) -> Iterator[list[ClientProcess]]:
    """So many processes, each connected."""
    clients: list[ClientProcess] = []
    try:
        clients.extend(ClientProcess(url, pool, vocab_size, options) for _ in range(number))
        yield clients
    finally:
        for client in clients:
            client.close()


def together(clients: Sequence[ClientProcess], orders: Sequence[Order]) -> list[Answer]:
    """Let each ask what is ordered, at the same time; all answers."""
    for client, order in zip(clients, orders, strict=True):
        client.start(order)
    return [client.answer() for client in clients]


def wall_seconds(answers: Sequence[Answer]) -> float:
    """From the first one's begin to the last one's end."""
    return max(a.ended for a in answers) - min(a.began for a in answers)


def _serve(pipe: Connection, url: str, pool: str, vocab_size: int, options: dict[str, Any]) -> None:
    with connected(url, pool, **options) as lm:
        lm.next_token_logprobs_sync([1])
        pipe.send(True)
        while (order := pipe.recv()) is not None:
            try:
                pipe.send(_ask(lm, order, vocab_size))
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}")


def _ask(lm: Any, order: Order, vocab_size: int) -> Answer:
    prompts = make_prompts(order.count, vocab_size, *order.seed)
    before = lm.statistics()
    began = time.monotonic()
    for number, i in enumerate(range(0, order.count, order.per_call)):
        part = prompts[i : i + order.per_call]
        gather = order.alternately and number % 2
        rows = (gathered if gather else in_batches)(lm, part)
        check_rows(rows, part, vocab_size)
    ended = time.monotonic()
    after = lm.statistics()
    return Answer(began, ended, {name: after[name] - before[name] for name in after})
