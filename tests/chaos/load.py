"""Callers who keep asking for prompts with known answers, and what became of every one."""

from __future__ import annotations

import math
import random
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import numpy as np

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import LmpoolError
from tests.support.streams import continuation

VOCAB = 256
PREFIXES = 12
"""Beginnings that many prompts share, the first ones more often: lanes fill unevenly."""
LONGEST_PREFIX = 64


class Prompts:
    """Prompts that begin alike, or not at all, of tokens from 16 on."""

    def __init__(self, seed: int) -> None:
        chosen = random.Random(f"{seed} prefixes")
        self._prefixes = [_tokens(chosen, 0, LONGEST_PREFIX) for _ in range(PREFIXES)]
        self._weights = [1 / (number + 1) for number in range(PREFIXES)]

    def one(self, random: random.Random) -> list[int]:
        """A prompt, with or without a beginning of others."""
        (prefix,) = random.choices([[], *self._prefixes], [2.0, *self._weights])
        return [*prefix, *_tokens(random, 2, 8)]


def _tokens(random: random.Random, least: int, most: int) -> list[int]:
    return [random.randrange(16, VOCAB) for _ in range(random.randint(least, most))]


@dataclass
class Outcomes:
    """What became of the prompts: each is in exactly one of these numbers."""

    asked: int = 0
    right: int = 0
    wrong: int = 0
    failed: list[str] = field(default_factory=list)
    streams: int = 0
    """How many of them were continuations that were read piece by piece."""
    resubmitted: int = 0
    """Prompts that clients asked again, as the server had forgotten them."""
    calls: list[tuple[float, float, int]] = field(default_factory=list)
    """When each call began and ended, and how many rows it brought."""

    def longest_wait(self, since: float) -> float:
        """Seconds that the slowest call took of those that were not over at `since`."""
        return max(
            (end - max(begin, since) for begin, end, _ in self.calls if end > since), default=0.0
        )

    def longest_gap(self, since: float) -> float:
        """Seconds, at most, from `since` on in which no call ended with its rows."""
        ends = sorted(end for _, end, rows in self.calls if rows and end > since)
        return max(
            (later - earlier for earlier, later in pairwise((since, *ends))), default=math.inf
        )

    def rate(self, since: float, until: float) -> float:
        """Rows a second, between two times."""
        rows = sum(rows for _, end, rows in self.calls if since <= end < until)
        return rows / max(1e-9, until - since)

    def back_after(self, began: float, over: float, window: float = 1.0) -> float | None:
        """Seconds after a fault until the pace was 90 % of that before it; None if it never was.

        The pace is taken over `window` seconds, which the answer includes.
        """
        before = self.rate(began - window, began)
        last = max((end for _, end, _ in self.calls), default=over)
        for start in np.arange(over, last - window, 0.1):
            if self.rate(start, start + window) >= 0.9 * before:
                return float(start + window - over)
        return None


class Load:
    """Callers, each in a thread with a client of its own, who ask again once they are answered.

    `streams` more of them read one continuation after another, piece by piece; each counts as a
    prompt, right if it is the whole of it and nothing is there twice. (None where rows are of
    another `vocab_size`.)
    """

    def __init__(
        self,
        url: str,
        pool: str,
        *,
        seed: int,
        callers: int = 2,
        size: int = 32,
        timeout: float = 60.0,
        most: int | None = None,
        streams: int = 1,
        longest_stream: int = 16,
        vocab_size: int = VOCAB,
        **options: Any,
    ) -> None:
        self.outcomes = Outcomes()
        self._prompts = Prompts(seed)
        self._url, self._pool, self._size, self._timeout = url, pool, size, timeout
        self._options = options
        self._most = most
        self._longest_stream = longest_stream
        self._vocab_size = vocab_size
        self._waiting: dict[int, float] = {}
        """When the call began that a thread waits for."""
        self._connected = 0
        self._enough = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed} {number}"),))
            for number in range(callers)
        ]
        self._readers = [
            threading.Thread(target=self._read, args=(random.Random(f"{seed} reader {number}"),))
            for number in range(streams if vocab_size == VOCAB else 0)
        ]

    def __enter__(self) -> Self:
        threads = self._threads + self._readers
        for thread in threads:
            thread.start()
        # Whoever connects as a fault begins is told at once that nobody is there.
        while self._connected < len(threads) and all(thread.is_alive() for thread in threads):
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self.wait()

    def wait(self) -> None:
        """Until every caller has what it asked for."""
        for thread in self._threads:
            thread.join()
        self._enough.set()
        for thread in self._readers:
            thread.join()

    def answered(self) -> int:
        """Rows that were brought."""
        with self._lock:
            return self.outcomes.right

    def waits_since(self) -> float:
        """When the oldest call began that is not answered, on the monotonic clock."""
        with self._lock:
            return min(self._waiting.values(), default=time.monotonic())

    def _begin(self) -> float:
        with self._lock:
            begin = self._waiting[threading.get_ident()] = time.monotonic()
        return begin

    def _run(self, random: random.Random) -> None:
        options = {"framework": "numpy", "cache_bytes": 0, "workers_timeout": 60, **self._options}
        with lmpool.connect(self._url, self._pool, **options) as lm:
            with self._lock:
                self._connected += 1
            while self._may_ask():
                self._ask(lm, random)
            self._count_resubmitted(lm)

    def _may_ask(self) -> bool:
        with self._lock:
            enough = self._most is not None and self.outcomes.asked >= self._most
            if enough or self._enough.is_set():
                return False
            self.outcomes.asked += self._size
            return True

    def _count_resubmitted(self, lm: lmpool.PooledLM) -> None:
        with self._lock:
            self.outcomes.resubmitted += lm.statistics()["resubmitted"]

    def _read(self, random: random.Random) -> None:
        options = {"framework": "numpy", "cache_bytes": 0, "workers_timeout": 60, **self._options}
        with lmpool.connect(self._url, self._pool, **options) as lm:
            with self._lock:
                self._connected += 1
            while not self._enough.is_set():
                self._read_one(lm, random)
            self._count_resubmitted(lm)

    def _read_one(self, lm: lmpool.PooledLM, random: random.Random) -> None:
        prompt = self._prompts.one(random)
        count, seed = random.randint(2, self._longest_stream), random.randrange(1 << 40)
        begin = self._begin()
        right, failed = False, []
        try:
            pieces = list(
                lm.sync.stream(prompt, count, seed=seed, eos_token_ids=[], timeout=self._timeout)
            )
        except LmpoolError as error:
            failed = [f"{type(error).__name__}: {error}"]
        else:
            numbers = [piece.number for piece in pieces]
            found = [token for piece in pieces for token in piece.token_ids.tolist()]
            ends = np.cumsum([0, *(piece.token_ids.size for piece in pieces)])
            right = found == continuation(prompt, count, seed) and numbers == [*ends[:-1]]
        with self._lock:
            del self._waiting[threading.get_ident()]
            self.outcomes.asked += 1
            self.outcomes.streams += 1
            self.outcomes.right += right
            self.outcomes.wrong += not right and not failed
            self.outcomes.failed += failed
            self.outcomes.calls.append((begin, time.monotonic(), 0))

    def _ask(self, lm: lmpool.PooledLM, random: random.Random) -> None:
        prompts = [self._prompts.one(random) for _ in range(self._size)]
        begin = self._begin()
        try:
            rows = lm.batch_next_token_logprobs_sync(prompts, timeout=self._timeout)
        except LmpoolError as error:
            with self._lock:
                del self._waiting[threading.get_ident()]
                self.outcomes.failed += [f"{type(error).__name__}: {error}"] * self._size
            return
        end = time.monotonic()
        right = sum(
            bool((row == mock_row(prompt, self._vocab_size)).all())
            for row, prompt in zip(rows, prompts, strict=True)
        )
        with self._lock:
            del self._waiting[threading.get_ident()]
            self.outcomes.right += right
            self.outcomes.wrong += len(rows) - right
            self.outcomes.calls.append((begin, end, len(rows)))
