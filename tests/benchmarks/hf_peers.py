"""The Hugging Face engine and what it is measured against, each in the caller's process.

Every side answers a workload's batches one after another, with rows as numpy arrays, and starts
each workload with empty caches.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lmpool.backends import Request
from tests.benchmarks.hf_workloads import Rows, Workload

BY_HAND_BATCH = 32
"""Prompts in a forward pass by hand: 1,024 tokens, which a CPU does best."""

Side = Callable[[Workload], Rows]
"""Answers a workload: rows [rows, vocab], in order."""


def engine(folder: str, threads: int) -> Side:
    """The engine without a pool."""
    from lmpool.backends.hf import HFEngine

    made = HFEngine(folder, device="cpu", threads=threads)

    def answer(batch: Sequence[Sequence[int]]) -> Rows:
        made.submit(
            [
                Request(number.to_bytes(4, "big"), np.array(prompt, dtype=np.uint32))
                for number, prompt in enumerate(batch)
            ]
        )
        rows = {}
        while made.in_flight():
            rows.update((outcome.id, outcome.logprobs()) for outcome in made.step())
        return np.stack([rows[number.to_bytes(4, "big")] for number in range(len(batch))])

    def run(work: Workload) -> Rows:
        made.clear_cache()
        return np.concatenate([answer(batch) for batch in work.batches])

    return run


def by_hand(folder: str) -> Side:
    """What one would write for each workload without a library."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    from lmpool.backends.hf.head import cache_name

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    named = cache_name(model)

    def rows_of(ids: torch.Tensor, cache: Any = None) -> Rows:
        given = {named: cache, "use_cache": cache is not None}
        logits = model(ids, logits_to_keep=1, **given).logits[:, -1]
        rows: Rows = torch.log_softmax(logits, dim=-1).numpy()
        return rows

    def particles(work: Workload) -> Rows:
        """One cache with a row for each particle, reordered where they were resampled."""
        cache = DynamicCache()
        model(torch.tensor([work.shared]), use_cache=True, logits_to_keep=1, **{named: cache})
        cache.batch_repeat_interleave(len(work.batches[0]))
        before: list[list[int]] = [work.shared] * len(work.batches[0])
        parts = []
        for batch in work.batches:
            places = {tuple(prompt): place for place, prompt in enumerate(before)}
            chosen = [places[tuple(prompt[:-1])] for prompt in batch]
            if chosen != list(range(len(batch))) and len(places) > 1:
                cache.reorder_cache(torch.tensor(chosen))
            parts.append(rows_of(torch.tensor([prompt[-1:] for prompt in batch]), cache))
            before = batch
        return np.concatenate(parts)

    def run(work: Workload) -> Rows:
        with torch.inference_mode():
            if work.shared:
                return particles(work)
            parts = [
                rows_of(torch.tensor(batch[i : i + BY_HAND_BATCH]))
                for batch in work.batches
                for i in range(0, len(batch), BY_HAND_BATCH)
            ]
            return np.concatenate(parts)

    return run


def has_genlm() -> bool:
    """Whether genlm-backend is installed."""
    try:
        return importlib.util.find_spec("genlm.backend") is not None
    except ModuleNotFoundError:
        return False


def genlm(folder: str, *, prepared: bool) -> Side:
    """genlm-backend's model; `prepared`: with `cache_kv` of what the prompts share, timed too."""
    import torch
    from genlm.backend.llm import AsyncTransformer

    model = AsyncTransformer.from_name(folder, hf_opts={"dtype": torch.float32})

    async def ask(work: Workload) -> Rows:
        parts = []
        for batch in work.batches:
            found = await asyncio.gather(*(model.next_token_logprobs(p) for p in batch))
            parts.append(torch.stack(found).numpy())
        return np.concatenate(parts)

    def run(work: Workload) -> Rows:
        model.clear_cache()
        if prepared and work.shared:
            model.cache_kv(work.shared)
        return asyncio.run(ask(work))

    return run
