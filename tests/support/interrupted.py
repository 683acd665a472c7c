"""``python -m tests.support.interrupted URL POOL ROUNDS SEED [large]``: blocking calls that Ctrl-C
ends at random moments, of small rows or of large ones, which are decoded as they come. Fails, or
never ends, where that leaves the client of less use than before."""

from __future__ import annotations

import itertools
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.wants import Draw

SIZE = 64
LARGE = 16_384
"""Entries of rows that lie near, and that a call puts together in a block."""
TOGETHER = 6
NUMBERS = itertools.count()


def prompt() -> list[int]:
    """One that was never asked."""
    number = next(NUMBERS)
    return [number % SIZE, number // SIZE % SIZE, number // SIZE**2 % SIZE]


def ask(lm: lmpool.PooledLM, timeout: float) -> None:
    """One prompt."""
    asked = prompt()
    row = lm.sync.next_token_logprobs(asked, timeout=timeout)
    np.testing.assert_array_equal(row, mock_row(asked, SIZE))


def ask_large(lm: lmpool.PooledLM, timeout: float) -> None:
    """One prompt, whose row lies near."""
    asked = prompt()
    row = lm.sync.next_token_logprobs(asked, timeout=timeout)
    np.testing.assert_array_equal(row, mock_row(asked, LARGE))


def ask_some(lm: lmpool.PooledLM, timeout: float) -> None:
    """Several prompts, whose rows come in half their size."""
    asked = [prompt() for _ in range(TOGETHER)]
    rows = lm.sync.batch_next_token_logprobs(asked, timeout=timeout)
    right = [mock_row(each, LARGE) for each in asked]
    np.testing.assert_allclose(rows, np.stack(right), atol=0.02)


def leave_a_stream(lm: lmpool.PooledLM, timeout: float) -> None:
    """A continuation that is left after its first piece."""
    pieces = lm.sync.stream(prompt(), max_tokens=100, timeout=timeout)
    next(pieces)
    pieces.close()


def leave_an_iterator(lm: lmpool.PooledLM, timeout: float) -> None:
    """Asks without end that are left after the first answer."""
    asks = ((prompt(), Draw()) for _ in itertools.count())
    answers = lm.sync.ask_iter(asks, in_flight=8, timeout=timeout)
    next(answers)
    answers.close()


WAYS: Sequence[Callable[[lmpool.PooledLM, float], None]] = (ask, leave_a_stream, leave_an_iterator)


def main(url: str, pool: str, rounds: int, seed: int, rows: str = "small") -> None:
    """Ask, be interrupted, and ask again."""
    chance = random.Random(seed)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    large = rows == "large"
    ways, again, longest = ((ask_some,), ask_some, 8e-3) if large else (WAYS, ask, 1.5e-3)
    encoding = "f16" if large else "auto"
    with lmpool.connect(url, pool, framework="numpy", cache_bytes=0, encoding=encoding) as lm:
        again(lm, 60)
        for number in range(rounds):
            way = ways[number % len(ways)]
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-5, longest))
                while True:
                    way(lm, 60)
            except KeyboardInterrupt:
                pass
            again(lm, 20)  # at once, but for a machine that is busy
        table, until = lm._client._session.table, time.monotonic() + 20
        while table.flights and time.monotonic() < until:
            time.sleep(0.01)  # what was left is withdrawn soon
        if table.flights or any(table._counts.values()) or table.has_unsent():
            sys.exit(f"still waited for: {table.flights} {table._counts}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
