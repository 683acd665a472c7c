"""An engine's life: cancelling, kept state, threads, memory, its end."""

from __future__ import annotations

import gc
import threading
from typing import Final

import numpy as np
import psutil
import pytest

from lmpool.backends.contract.asking import ask, request_for, tokens_of
from lmpool.backends.contract.subject import Subject
from lmpool.backends.engine import Engine
from lmpool.errors import EngineBroken
from lmpool.wants import Generate

MEMORY_PROMPTS: Final = 5_000
MEMORY_LENGTH: Final = 4
MEMORY_WARM_UP: Final = 1_500
MEMORY_GROWTH: Final = 16 << 20


class LifeContract(Subject):
    """What happens to an engine between its opening and its end."""

    def test_cancelling_in_flight(self, opened: Engine) -> None:
        """Cancelled requests may still have an outcome; the others have their own row."""
        prompts = self.mixed_prompts(opened, 30, seed=24)
        rows = [request_for(prompt) for prompt in prompts]
        room = opened.info.max_prompt_tokens - 2
        endless = [request_for([n + 1, 1], want=Generate(room, (), 1.0, n)) for n in range(4)]
        opened.submit([*rows, *endless])
        cancelled = {request.id for request in rows[::2]} | {request.id for request in endless}
        outcomes = {outcome.id: outcome for outcome in opened.step()}
        opened.cancel(cancelled)
        steps = 0
        while opened.in_flight():
            outcomes |= {outcome.id: outcome for outcome in opened.step()}
            steps += 1
        assert steps < room / 2, "continuations ran on after they were cancelled"
        kept = [
            (p, outcomes[r.id]) for p, r in zip(prompts, rows, strict=True) if r.id not in cancelled
        ]
        self.check_rows(opened, [p for p, _ in kept], [outcome for _, outcome in kept])
        # The same ids may be asked for again, and nothing of before answers them.
        self.check_rows(opened, prompts, ask(opened, rows))

    def test_state_that_is_kept_and_dropped(self, opened: Engine) -> None:
        random = np.random.default_rng(25)
        vocab, longest = opened.info.vocab_size, opened.info.max_prompt_tokens
        prefix = random.integers(0, vocab, min(100, longest // 2)).tolist()
        prompts = [prefix, [*prefix, 3], [*prefix, 3, 4], prefix[:-1], [*prefix[:-1], 9]]
        opened.cache_prefix(tokens_of(prefix))
        opened.cache_prefix(tokens_of(prefix))
        self.check(opened, prompts)
        opened.clear_cache()
        self.check(opened, prompts)
        opened.clear_cache()
        opened.clear_cache()
        self.check(opened, prompts[::-1])

    def test_state_is_dropped_in_flight(self, opened: Engine) -> None:
        prompts = self.mixed_prompts(opened, 40, seed=26)
        requests = [request_for(prompt) for prompt in prompts]
        requests.append(request_for([1], want=Generate(5, (), 0.0, 0)))
        opened.submit(requests[:20])
        opened.clear_cache()
        outcomes = {outcome.id: outcome for outcome in opened.step()}
        opened.submit(requests[20:])
        opened.clear_cache()
        while opened.in_flight():
            outcomes |= {outcome.id: outcome for outcome in opened.step()}
            opened.clear_cache()
        self.check_rows(opened, prompts, [outcomes[request.id] for request in requests[:40]])

    def test_close_and_reopen_on_a_thread(self) -> None:
        """A worker opens, uses and closes its engine on a thread that is not the main one."""
        type(self)._close()
        failures: list[BaseException] = []

        def live() -> None:
            try:
                for _ in range(2):
                    engine = self.open_engine()
                    try:
                        self.check(engine, self.mixed_prompts(engine, 9, seed=27))
                    finally:
                        engine.close()
                    engine.close()
                    with pytest.raises(EngineBroken):
                        self.ask_rows(engine, [[1, 2]])
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=live, name="engine-contract")
        thread.start()
        thread.join()
        if failures:
            raise failures[0]

    def test_memory_is_flat(self) -> None:
        type(self)._close()
        engine = self.open_engine(**self.bounded)
        try:
            random = np.random.default_rng(28)
            after_warm_up = 0
            for done in range(100, MEMORY_PROMPTS + 1, 100):
                prompts = random.integers(0, engine.info.vocab_size, (100, MEMORY_LENGTH))
                outcomes = self.ask_rows(engine, prompts.tolist())
                assert all(outcome.error is None for outcome in outcomes)
                del outcomes
                if done == MEMORY_WARM_UP:
                    after_warm_up = resident_bytes()
            grown = resident_bytes() - after_warm_up
            assert grown < MEMORY_GROWTH, f"{grown / 2**20:.1f} MiB more after 3,500 prompts"
            self.check(engine, [[1, 2, 3]])
        finally:
            engine.close()


def resident_bytes() -> int:
    """The memory of this process and of those that it has started."""
    gc.collect()
    process = psutil.Process()
    total: int = process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
