"""What homes save the Hugging Face engine: tokens computed, counted by the workers.

Its caches hold a third of all prefixes, and those of four workers together a third more than all.
Nothing is timed: a model of toy size will do, on as few cores as there are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

import lmpool
from lmpool.backends.trie import TokenTrie
from tests.benchmarks.measure import Scale, progress
from tests.support.clients import connected
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import WorkerProcess

VOCAB_SIZE = 512
LAYERS, HEADS, HEAD_SIZE = 2, 2, 16
TOY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 2 * HEADS * HEAD_SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2 * HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 1024,
}
"""The shape of the Llama that is asked."""
SLOT_BYTES = LAYERS * 2 * HEADS * HEAD_SIZE * 4
"""Keys and values of a position, in float32."""
PREFIX, OWN = 512, 8
"""Tokens that the prompts of a group share, and those that each has of its own."""
SETTLED = 4.0
"""Seconds after which all workers know each other: two beats."""
CALLERS = 2
"""Who ask for one prompt after another: half of the workers have nothing to do."""


@dataclass(frozen=True, slots=True)
class Groups:
    """`workers` workers, and `each` prompts of `count` groups that begin alike."""

    workers: int
    count: int
    each: int

    @classmethod
    def of(cls, scale: Scale) -> Groups:
        """Those that are measured."""
        return cls(scale.of(4, 2), scale.of(64, 12), scale.of(8, 3))

    @property
    def kept(self) -> int:
        """Positions that a worker keeps: a third of the groups' beginnings."""
        return self.count * PREFIX // 3

    def prompts(self, run: int) -> list[list[int]]:
        """All prompts of a run, in the order in which they are asked."""
        rng = np.random.default_rng(run)
        heads = rng.integers(0, VOCAB_SIZE, (self.count, PREFIX))
        order = rng.permutation(np.repeat(np.arange(self.count), self.each))
        tails = rng.integers(0, VOCAB_SIZE, (order.size, OWN))
        return np.concatenate([heads[order], tails], axis=1).tolist()  # type: ignore[no-any-return]

    def best(self, prompts: Sequence[Sequence[int]]) -> int:
        """Tokens computed where each group has a worker, and each worker as many groups."""
        tries = [TokenTrie(self.kept) for _ in range(self.workers)]
        place: dict[tuple[int, ...], int] = {}
        for prompt in prompts:
            number = place.setdefault(tuple(prompt[:PREFIX]), len(place))
            trie = tries[number % self.workers]
            lease = trie.lease(np.array(prompt, np.uint32))
            assert lease is not None
            trie.commit([lease])
            trie.release([lease])
        return sum(trie.added for trie in tries)


def computed(
    server: RealServer, folder: str, groups: Groups, lanes: int, runs: int, settled: float
) -> list[tuple[int, int]]:
    """Of each run: tokens that the workers computed, and jobs that they stole."""
    engine = {"kv_cache_bytes": (groups.kept + 1) * SLOT_BYTES, "threads": 1, "device": "cpu"}
    settings: dict[str, Any] = {
        "engine": "hf",
        "model": folder,
        "lanes": lanes,
        "engine_opts": engine,
    }
    with ExitStack() as stack:
        workers = []
        for _ in range(groups.workers):
            worker = WorkerProcess(server.url, f"kept-{lanes}", log_level="warning", **settings)
            stack.callback(worker.close)
            workers.append(worker)
        for worker in workers:
            worker.wait_until_alive(120)
        time.sleep(settled)
        lm = stack.enter_context(connected(server.url, f"kept-{lanes}", cache_bytes=0))
        found = []
        for run in range(runs):
            progress(f"  run {run + 1} of {runs}: lanes {lanes}")
            lm.clear_kv_cache(timeout=60)
            found.append(_ask(lm, groups.prompts(run)))
        return found


def _ask(lm: lmpool.PooledLM, prompts: list[list[int]]) -> tuple[int, int]:
    before = lm.pool_statistics_sync()
    left, lock = iter(prompts), threading.Lock()

    def next_one() -> list[int] | None:
        with lock:
            return next(left, None)

    def ask() -> None:
        while (prompt := next_one()) is not None:
            lm.next_token_logprobs_sync(prompt, timeout=120)

    callers = [threading.Thread(target=ask) for _ in range(CALLERS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    asked = before["prompt_tokens"] + sum(map(len, prompts))
    # Workers tell with their heartbeats.
    until(lambda: lm.pool_statistics_sync()["prompt_tokens"] >= asked, 30, every=0.2)
    after = lm.pool_statistics_sync()
    assert after["prompt_tokens"] == asked
    return (
        after["computed_tokens"] - before["computed_tokens"],
        after["stolen_jobs"] - before["stolen_jobs"],
    )
