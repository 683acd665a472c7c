"""The contract on the engines of the base environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmpool.backends.contract import Adapter, EngineContract
from lmpool.backends.mock import mock_row
from tests.support.fed_engine import FedEngine

VOCAB = 2000


class TestMock(EngineContract):
    """Its rows are known without a model, and an adapter's depend on its name alone."""

    engine = "mock"
    options = {"vocab_size": VOCAB, "max_prompt_tokens": 512}
    otherwise = {"vocab_size": 1000}
    left_by_adapter = 0
    lacks = {"adapter files": "its rows depend on the adapter's name alone"}

    @classmethod
    def reference(
        cls, prompts: Sequence[Sequence[int]], adapter: Adapter | None = None
    ) -> npt.NDArray[np.float32]:
        name = None if adapter is None else adapter.name
        return np.stack([mock_row(prompt, VOCAB, name) for prompt in prompts])

    @classmethod
    def vocabulary(cls) -> list[bytes] | None:
        return [bytes([i]) if i < 256 else f"<{i}>".encode() for i in range(VOCAB)]

    @classmethod
    def make_adapter(cls, name: str, folder: Path, seed: int, **how: Any) -> Adapter:
        (folder / str(seed)).mkdir(parents=True, exist_ok=True)
        (folder / str(seed) / "adapter_model.safetensors").write_bytes(b"not looked at")
        return Adapter(name, str(folder / str(seed)))


class TestFed(TestMock):
    """The same rows from an engine that is fed while it runs, and has no tokenizer."""

    @classmethod
    def vocabulary(cls) -> None:
        return None

    @classmethod
    def open_engine(cls, **options: Any) -> FedEngine:
        return FedEngine(**{**cls.options, "most": 64, **options})


class TestHF(EngineContract):
    """On one thread of torch: threads that wait for each other take most of the time."""

    engine = "hf"
    options = {"threads": 1}
    bounded = {"kv_cache_bytes": 8 << 20}
    otherwise = {"dtype": "bfloat16"}
