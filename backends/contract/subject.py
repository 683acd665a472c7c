"""The engine under test, what is right, and how the two are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pytest

from lmpool.backends.contract.asking import ask, request_for
from lmpool.backends.contract.reference import PromptTokens, Reference, write_adapter
from lmpool.backends.engine import Engine, Outcome
from lmpool.backends.load import load_engine

FEATURES: Final = frozenset({"adapters", "adapter files"})
"""What an engine may lack. Without ``adapter files`` it has adapters, but reads no folder."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: the name that the engine knows it by, and its folder."""

    name: str
    folder: str


class Subject:
    """What the suites share; `EngineContract` says what the attributes mean."""

    engine: ClassVar[str]
    model: ClassVar[str] = "tiny"
    options: ClassVar[Mapping[str, Any]] = {}
    bounded: ClassVar[Mapping[str, Any]] = {}
    tolerance: ClassVar[float] = 1e-4
    lacks: ClassVar[Mapping[str, str]] = {}

    served: ClassVar[Engine | None] = None

    # --- what may be overridden ----------------------------------------------------------------

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
        """A new adapter for the model, different for each `seed`, in `folder` / `seed`."""
        return Adapter(name, write_adapter(folder / str(seed), cls.model, seed=seed, **how))

    # --- the engine under test -----------------------------------------------------------------

    @classmethod
    def setup_class(cls) -> None:
        unknown = set(cls.lacks) - FEATURES
        assert not unknown, f"lacks={sorted(unknown)}: {sorted(FEATURES)} can be lacking"
        cls.served = None
        # Before the engine: its library may change how models are loaded in this process.
        cls.reference([[0]])

    @classmethod
    def teardown_class(cls) -> None:
        cls._close()

    @classmethod
    def _close(cls) -> None:
        served, cls.served = cls.served, None
        if served is not None:
            served.close()

    @pytest.fixture
    def opened(self) -> Engine:
        """The engine that the tests share; a new one after a test that left it running."""
        cls = type(self)
        if cls.served is not None and cls.served.in_flight():
            cls._close()
        if cls.served is None:
            cls.served = cls.open_engine()
        return cls.served

    @pytest.fixture
    def needs_adapters(self) -> None:
        if "adapters" in self.lacks:
            pytest.skip(f"the engine {self.engine} lacks adapters: {self.lacks['adapters']}")

    # --- prompts and rows ----------------------------------------------------------------------

    def mixed_prompts(self, engine: Engine, count: int, seed: int) -> list[list[int]]:
        """Prompts of every length: mostly short, some long, some of them prefixes of others."""
        random = np.random.default_rng([seed, count])
        vocab, longest = engine.info.vocab_size, engine.info.max_prompt_tokens
        prompts: list[list[int]] = []
        while len(prompts) < count:
            kind = random.random()
            if prompts and kind < 0.2:  # a relative: the beginning of another, and something else
                other = prompts[int(random.integers(len(prompts)))]
                kept = other[: int(random.integers(1, len(other) + 1))]
                added = random.integers(0, vocab, int(random.integers(0, 4)))
                prompts.append([*kept, *added.tolist()][:longest])
                continue
            bound = min(longest, 48 if kind < 0.95 else 300)
            prompts.append(random.integers(0, vocab, int(random.integers(1, bound + 1))).tolist())
        return prompts

    def check_rows(
        self,
        engine: Engine,
        prompts: Sequence[PromptTokens],
        outcomes: Sequence[Outcome],
        adapter: Adapter | None = None,
    ) -> None:
        """Each outcome has its own prompt's row."""
        expected = self.reference(prompts, adapter)
        for prompt, outcome, right in zip(prompts, outcomes, expected, strict=True):
            assert outcome.error is None, f"{outcome.error} (a prompt of {len(prompt)} tokens)"
            row = outcome.logprobs()
            assert row.dtype == np.float32
            assert row.shape == (engine.info.vocab_size,)
            worst = float(np.abs(row - right).max())
            assert worst <= self.tolerance, (
                f"off by {worst:.3g} nats, after a prompt of {len(prompt)} tokens"
            )

    def ask_rows(
        self, engine: Engine, prompts: Sequence[PromptTokens], **options: Any
    ) -> list[Outcome]:
        return ask(engine, [request_for(prompt, **options) for prompt in prompts])

    def check(self, engine: Engine, prompts: Sequence[PromptTokens]) -> None:
        """Ask for the prompts at once and compare."""
        self.check_rows(engine, prompts, self.ask_rows(engine, prompts))
