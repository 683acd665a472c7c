"""The engine under test, and what is right of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from lmpool.backends.contract.adapter_files import write_adapter
from lmpool.backends.contract.reference import PromptTokens, Reference
from lmpool.backends.engine import Engine
from lmpool.backends.load import load_engine
from lmpool.backends.model_files import ModelFiles

FEATURES: Final = frozenset({"adapters", "adapter files"})
"""What an engine may lack. Without ``adapter files`` it has adapters, but reads no folder."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: the name that the engine knows it by, and its folder."""

    name: str
    folder: str


class Subject:
    """What is set and overridden for an engine; `EngineContract` says what it means."""

    engine: ClassVar[str]
    model: ClassVar[str] = "tiny"
    options: ClassVar[Mapping[str, Any]] = {}
    bounded: ClassVar[Mapping[str, Any]] = {}
    otherwise: ClassVar[Mapping[str, Any]] = {}
    tolerance: ClassVar[float] = 1e-4
    lacks: ClassVar[Mapping[str, str]] = {}
    most_adapters: ClassVar[int] = 70
    left_by_adapter: ClassVar[int] = 64
    most_temperature: ClassVar[float] = math.inf
    own_draws: ClassVar[bool] = False
    seed: ClassVar[int] = 0

    @classmethod
    def open_engine(cls, **options: Any) -> Engine:
        """A new engine."""
        return load_engine(cls.engine, cls.model, **{**cls.options, **options})

    @classmethod
    def reference(
        cls, prompts: Sequence[PromptTokens], adapter: Adapter | None = None
    ) -> npt.NDArray[np.float32]:
        """The right rows, float32 [prompts, vocab]."""
        return Reference.of(cls.model).rows(prompts, None if adapter is None else adapter.folder)

    @classmethod
    def make_adapter(cls, name: str, folder: Path, seed: int, **how: Any) -> Adapter:
        """A new adapter for the model, different for each `seed`, in `folder` / `seed`.

        `how` are the options of `write_adapter`.
        """
        return Adapter(name, write_adapter(folder / str(seed), cls.model, seed=seed, **how))

    @classmethod
    def vocabulary(cls) -> list[bytes] | None:
        """The bytes of each token id as the engine is to tell them; None where that is not known.

        By default those of the model's own tokenizer, where rows are compared with the model.
        """
        if cls.reference.__func__ is not Subject.reference.__func__:  # type: ignore[attr-defined]
            return None
        return ModelFiles(cls.model).byte_vocabulary()
