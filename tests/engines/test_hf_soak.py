"""Random batches on the Hugging Face engine, one after another, with all that can happen between.

`make test` runs a few hundred; ``--soak-batches 10000`` asks for more.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from lmpool.backends import Request
from lmpool.backends.contract import ask
from lmpool.errors import PromptFailed

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from lmpool.backends.hf import HFEngine
from tests.support.hf_texts import TOLERANCE, Texts, save_adapter
from tests.support.models import save_model

POSITIONS = 150
"""Fewer than the prompts of a batch may need, so that there is eviction in the middle of it."""


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_random_batches(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Rows, the trie's invariants and the bound of memory hold after each of them.

    Prompts are nested, repeated, beginnings of others, or end alike below other beginnings; they
    are computed in chunks, under eviction, with adapters that come and go, and with kept prefixes.
    """
    batches: int = request.config.getoption("--soak-batches")
    folder = save_model(tmp_path / "model", name, num_hidden_layers=2)
    adapters = {f"a{n}": save_adapter(folder, tmp_path / f"a{n}", seed=n) for n in range(2)}
    texts = Texts(folder, seed=0, sequences=60, adapters=adapters)
    slot_bytes = HFEngine(folder, kv_cache_bytes=1 << 20).kv_cache_bytes() // (1 << 12)
    assert (1 << 20) % slot_bytes == 0
    bound = POSITIONS * slot_bytes
    engine = HFEngine(folder, kv_cache_bytes=bound, forward_tokens=29)
    packed = engine._packed
    assert packed is not None
    loaded: set[str] = set()
    rng = np.random.default_rng(1)
    rows = 0
    for number in range(batches):
        match int(rng.integers(0, 60)):
            case 0:
                engine.clear_cache()
            case 1 | 2 | 3:
                adapter = f"a{rng.integers(0, 2)}"
                if adapter in loaded:
                    engine.remove_adapter(adapter)
                    loaded.remove(adapter)
                else:
                    engine.add_adapter(adapter, adapters[adapter])
                    loaded.add(adapter)
            case 4:
                with suppress(PromptFailed):  # half of the memory is kept already
                    engine.cache_prefix(texts.sequences[rng.integers(0, 60)][: rng.integers(1, 60)])
        batch = texts.batch(12)
        choices: list[str | None] = [None, *sorted(loaded)]
        drawn = [choices[i] for i in rng.integers(0, len(choices), len(batch))]
        requests = [
            Request(place.to_bytes(2, "big"), texts.sequences[i][:n], adapter)
            for place, ((i, n), adapter) in enumerate(zip(batch, drawn, strict=True))
        ]
        for (i, n), adapter, outcome in zip(batch, drawn, ask(engine, requests), strict=True):
            error = np.abs(outcome.logprobs() - texts.rows_with[adapter][i][n - 1].numpy()).max()
            assert error < TOLERANCE, f"batch {number}, {n} tokens of {i}, {adapter}: {error}"
        rows += len(batch)
        packed.check()
        statistics = packed.statistics()
        assert statistics.held <= statistics.slots
        assert statistics.pinned <= statistics.slots // 2
        assert sum(t.nbytes for t in (*packed._arena.keys, *packed._arena.values)) <= bound
    assert rows > 5 * batches
    assert statistics.found > 0
    assert statistics.evicted > 0
