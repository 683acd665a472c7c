"""``python -m tests.support.interrupted URL POOL ROUNDS SEED``: blocking calls that Ctrl-C ends at
random moments. Fails, or never ends, where that leaves the client of less use than before."""

from __future__ import annotations

import itertools
import random
import signal
import sys

import numpy as np

import lmpool
from lmpool.backends.mock import mock_row

SIZE = 64
NUMBERS = itertools.count()


def ask(lm: lmpool.PooledLM, timeout: float) -> None:
    """One prompt, which was never asked."""
    number = next(NUMBERS)
    prompt = [number % SIZE, number // SIZE % SIZE, number // SIZE**2 % SIZE]
    row = lm.sync.next_token_logprobs(prompt, timeout=timeout)
    np.testing.assert_array_equal(row, mock_row(prompt, SIZE))


def main(url: str, pool: str, rounds: int, seed: int) -> None:
    """Ask, be interrupted, and ask again."""
    chance = random.Random(seed)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    with lmpool.connect(url, pool, framework="numpy", cache_bytes=0) as lm:
        ask(lm, 60)
        for _ in range(rounds):
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-5, 1.5e-3))
                while True:
                    ask(lm, 60)
            except KeyboardInterrupt:
                pass
            ask(lm, 20)  # at once, but for a machine that is busy
        table = lm._client._session.table
        if table.flights or any(table._counts.values()):
            sys.exit(f"still waited for: {table.flights} {table._counts}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
