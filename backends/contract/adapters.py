"""Adapters: rows by the right one, whatever comes and goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from lmpool.backends.contract.asking import ask, finish, request_for
from lmpool.backends.contract.reference import PromptTokens
from lmpool.backends.contract.subject import Adapter, Subject
from lmpool.backends.engine import Engine
from lmpool.errors import AdapterError, PromptFailed

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: Final = ("gate_proj", "up_proj", "down_proj")


class AdapterContract(Subject):
    """LoRA adapters."""

    def test_an_engine_without_adapters_says_so(self, opened: Engine, tmp_path: Path) -> None:
        if "adapters" not in self.lacks:
            pytest.skip(f"the engine {self.engine} has adapters")
        with pytest.raises(AdapterError):
            opened.add_adapter(versioned("french", 1), str(tmp_path))
        self.check(opened, [[1, 2, 3]])

    @pytest.mark.usefixtures("needs_adapters")
    def test_adapters_in_one_batch(self, opened: Engine, tmp_path: Path) -> None:
        """Base and adapters of unlike ranks and layers, the same prompts for each."""
        adapters: list[Adapter | None] = [
            None,
            self.make_adapter(versioned("french", 1), tmp_path, 1, rank=4),
            self.make_adapter(
                versioned("legal", 2),
                tmp_path,
                2,
                rank=8,
                alpha=12.0,
                targets=(*ATTENTION, *MLP),
            ),
            self.make_adapter(
                versioned("rs", 3), tmp_path, 3, rank=2, alpha=2.0, targets=MLP, rslora=True
            ),
        ]
        prompts = self.mixed_prompts(opened, 12, seed=12)
        with loaded(opened, adapters):
            for _ in range(2):  # the second time out of what was kept
                self.check_mixed(opened, prompts, adapters)
        base, french = self.reference(prompts), self.reference(prompts, adapters[1])
        assert np.abs(base - french).max() > 100 * self.tolerance, "adapters that do nothing"

    @pytest.mark.usefixtures("needs_adapters")
    def test_as_many_adapters_as_a_worker_loads(self, opened: Engine, tmp_path: Path) -> None:
        adapters = [
            self.make_adapter(versioned(f"a{n}", n), tmp_path, n, rank=1 + n % 4) for n in range(32)
        ]
        with loaded(opened, adapters):
            self.check_mixed(opened, self.mixed_prompts(opened, 2, seed=13), adapters)

    def check_mixed(
        self,
        engine: Engine,
        prompts: Sequence[PromptTokens],
        adapters: Sequence[Adapter | None],
    ) -> None:
        """Ask for each prompt by each adapter, all in one batch, and compare."""
        asked = [(prompt, adapter) for prompt in prompts for adapter in adapters]
        outcomes = ask(
            engine, [request_for(p, adapter=None if a is None else a.name) for p, a in asked]
        )
        for (prompt, adapter), outcome in zip(asked, outcomes, strict=True):
            self.check_rows(engine, [prompt], [outcome], adapter)

    @pytest.mark.usefixtures("needs_adapters")
    def test_adapters_are_added_replaced_and_removed(self, opened: Engine, tmp_path: Path) -> None:
        first = self.make_adapter("x", tmp_path, 4)
        second = self.make_adapter("x", tmp_path, 5, rank=8, targets=ATTENTION)
        prompts = self.mixed_prompts(opened, 8, seed=14)
        opened.add_adapter("x", first.folder)
        self.check_rows(opened, prompts, self.ask_rows(opened, prompts, adapter="x"), first)
        opened.add_adapter("x", second.folder)
        if "adapter files" not in self.lacks:
            self.check_rows(opened, prompts, self.ask_rows(opened, prompts, adapter="x"), second)
        opened.remove_adapter("x")
        opened.remove_adapter("x")
        for _ in range(2):  # an engine that finds the folder again must not load it again
            for outcome in self.ask_rows(opened, prompts, adapter="x"):
                assert isinstance(outcome.error, PromptFailed)
        self.check(opened, prompts)
        opened.add_adapter("x", first.folder)
        self.check_rows(opened, prompts, self.ask_rows(opened, prompts, adapter="x"), first)
        opened.remove_adapter("x")

    @pytest.mark.usefixtures("needs_adapters")
    def test_an_adapter_that_goes_while_it_is_asked_for(
        self, opened: Engine, tmp_path: Path
    ) -> None:
        """Its requests get its row or an error, never another row; the others do not notice."""
        adapter = self.make_adapter("x", tmp_path, 6)
        opened.add_adapter("x", adapter.folder)
        prompts = self.mixed_prompts(opened, 12, seed=15)
        mine = [request_for(prompt, adapter="x") for prompt in prompts]
        others = [request_for(prompt) for prompt in prompts]
        opened.submit([*mine, *others])
        opened.remove_adapter("x")
        outcomes = finish(opened, [*mine, *others])
        self.check_rows(opened, prompts, outcomes[12:])
        for prompt, outcome in zip(prompts, outcomes[:12], strict=True):
            if outcome.error is None:
                self.check_rows(opened, [prompt], [outcome], adapter)
            else:
                assert isinstance(outcome.error, PromptFailed)

    @pytest.mark.usefixtures("needs_adapters")
    @pytest.mark.parametrize("wrong", ["no folder", "no json", "other model", "cut short"])
    def test_a_folder_that_holds_no_adapter_of_the_model(
        self, opened: Engine, tmp_path: Path, wrong: str
    ) -> None:
        if "adapter files" in self.lacks:
            pytest.skip(f"the engine {self.engine} reads none: {self.lacks['adapter files']}")
        folder = Path(self.make_adapter("x", tmp_path, 7).folder)
        weights = folder / "adapter_model.safetensors"
        if wrong == "no folder":
            folder = tmp_path / "nowhere"
        elif wrong == "no json":
            (folder / "adapter_config.json").write_text("{")
        elif wrong == "cut short":
            weights.write_bytes(weights.read_bytes()[:-100])
        else:
            from safetensors.numpy import load_file, save_file

            save_file({k: v[:, :-1].copy() for k, v in load_file(weights).items()}, weights)
        with pytest.raises(AdapterError):
            opened.add_adapter("x", str(folder))
        (outcome,) = self.ask_rows(opened, [[1, 2]], adapter="x")
        assert isinstance(outcome.error, PromptFailed)
        self.check(opened, [[1, 2, 3]])


def versioned(name: str, number: int) -> str:
    """An adapter's name as workers write it: with its fingerprint."""
    return f"{name}@{number:032x}"


@contextmanager
def loaded(engine: Engine, adapters: Sequence[Adapter | None]) -> Iterator[None]:
    """The adapters, loaded while the block runs."""
    there = [adapter for adapter in adapters if adapter is not None]
    for adapter in there:
        engine.add_adapter(adapter.name, adapter.folder)
    try:
        yield
    finally:
        for adapter in there:
            engine.remove_adapter(adapter.name)
