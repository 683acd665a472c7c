"""The load of ``lmpool demo``: what each client asks, and the processes that ask it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from lmpool.cli.demo.client import Report, Work
from lmpool.errors import LmpoolError
from lmpool.producer import NumpyRows, PooledLM
from lmpool.variables import as_variables

CLIENTS: Final = 2
ROUNDS: Final = 12
CHECKED: Final = 8
"""Prompts whose rows all clients compare."""


def run_load(
    lm: PooledLM[NumpyRows],
    works: Sequence[Work],
    *,
    patience: float = 3.0,
    group: int = 0,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Report]:
    """Have one process for each work ask it, all at once, and do something `meanwhile`.

    They try for `patience` seconds to reach a server that is lost: should the demo be killed, they
    need not wait for its server. They join a process group, or have one each.
    """
    with _clients(lm, works, patience, group) as clients:
        meanwhile()
        return [_result(client) for client in clients]


def make_work(
    prompts: int, vocab_size: int, longest: int, beginnings: int = 0, beginning_tokens: int = 0
) -> list[Work]:
    """What each client asks: rounds of prompts, of which many repeat. Each begins as one of so many
    `beginnings`, if there are any.

    Of a round's prompts, about four in ten are new and asked by all clients at once, three new and
    its own, two its own of earlier rounds, one another client's of earlier rounds.
    """
    chance = random.Random(5)

    begin = [
        [chance.randrange(vocab_size) for _ in range(beginning_tokens)] for _ in range(beginnings)
    ]
    rest = longest - (beginning_tokens if beginnings else 0)

    def new(count: int) -> list[list[int]]:
        lengths = [chance.randint(min(4, rest), min(16, rest)) for _ in range(count)]
        found = [[chance.randrange(vocab_size) for _ in range(n)] for n in lengths]
        return [chance.choice(begin) + each for each in found] if begin else found

    each = prompts // CLIENTS
    works: list[Work] = [{"rounds": [], "check": []} for _ in range(CLIENTS)]
    mine: list[list[list[int]]] = [[] for _ in range(CLIENTS)]
    shared: list[list[int]] = []
    for number in range(ROUNDS):
        width = max(1, each * (number + 1) // ROUNDS - each * number // ROUNDS)
        together = new(-(-width * 4 // 10))
        shared += together
        olds = [list(old) for old in mine]
        for client, work in enumerate(works):
            own = new((width - len(together)) // 2 if number else width - len(together))
            left = width - len(together) - len(own)
            theirs = olds[(client + 1) % CLIENTS]
            again = [
                chance.choice(theirs if i % 3 == 0 else olds[client])
                for i in range(left if theirs and olds[client] else 0)
            ]
            asked = together + own + again
            mine[client] += own
            chance.shuffle(asked)
            work["rounds"].append(asked)
    for work in works:
        work["check"] = shared[:CHECKED]
    return works


@contextmanager
def _clients(
    lm: PooledLM[NumpyRows], works: Sequence[Work], patience: float, group: int
) -> Iterator[list[subprocess.Popen[str]]]:
    """One process for each client, all told to begin at the same moment."""
    environment = {
        **os.environ,
        **as_variables({"url": lm.url, "pool": lm.pool, "reconnect_timeout": patience}),
    }
    clients = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "lmpool.cli.demo.client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            process_group=group,  # Ctrl-C is for us, and we end them
        )
        for _ in works
    ]
    try:
        for client, work in zip(clients, works, strict=True):
            _tell(client, json.dumps(work))
        for client in clients:
            _hear(client)
        for client in clients:
            _tell(client, "go")
        yield clients
    finally:
        for client in clients:
            client.kill()
            client.communicate()


def _tell(client: subprocess.Popen[str], line: str) -> None:
    assert client.stdin is not None
    try:
        client.stdin.write(line + "\n")
        client.stdin.flush()
    except BrokenPipeError:
        raise LmpoolError(f"a client process ended with status {client.wait()}") from None


def _hear(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    line = client.stdout.readline()
    if not line:
        raise LmpoolError(f"a client process ended with status {client.wait()}")
    return line


def _result(client: subprocess.Popen[str]) -> Report:
    found: Report = json.loads(_hear(client))
    return found
