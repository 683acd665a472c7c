"""Scenarios in the making: operations that are drawn at random, each knowing those before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from lmpool.backends.contract.operations import (
    AdapterFiles,
    AddAdapter,
    Asked,
    CachePrefix,
    Cancel,
    ClearCache,
    Operation,
    Prompt,
    RemoveAdapter,
    Settle,
    Step,
    Submit,
)
from lmpool.backends.contract.prompts import Random, random_prompt
from lmpool.backends.contract.subject import Adapter
from lmpool.backends.contract.truth import Truth
from lmpool.backends.contract.want_reference import WantReference
from lmpool.backends.contract.wants import References
from lmpool.wants import Row, Want

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: Final = ("gate_proj", "up_proj", "down_proj")

HOW: Final[Sequence[dict[str, object]]] = (
    {"rank": 4},
    {"rank": 8, "alpha": 12.0, "targets": (*ATTENTION, *MLP)},
    {"rank": 2, "alpha": 2.0, "targets": MLP, "rslora": True},
    {"rank": 1, "alpha": 1.0, "targets": ATTENTION},
    {"rank": 3, "alpha": 1.5, "targets": ("v_proj", "down_proj")},
)
"""Adapters of unlike ranks, scales and layers."""

_OF_STATES: Final = 0.3
"""The share of hidden states among wants that take more than a row."""


class Script:
    """A scenario that is being written: `operations` so far, and what they leave behind."""

    def __init__(self, random: Random, truth: Truth, references: References) -> None:
        self.random = random
        self.truth = truth
        self.references = references
        self.info = truth.info
        self.vocab = truth.info.vocab_size
        self.longest = truth.info.max_prompt_tokens
        self.has_adapters = "adapters" not in truth.suite.lacks
        self.operations: list[Operation] = []
        self.loaded: dict[str, AdapterFiles] = {}
        self.pending: list[int] = []
        """Numbers of requests that may still be in flight."""
        self._number = 0

    # --- what is asked -------------------------------------------------------------------------

    def prompt(self, most: int = 6) -> Prompt:
        """A random prompt of 1 to `most` tokens."""
        length = int(self.random.integers(1, min(most, self.longest) + 1))
        return random_prompt(self.random, self.vocab, length)

    def ask(self, prompt: Prompt, adapter: str | None = None, want: Want | None = None) -> Asked:
        """A request with the next number; for its row, unless another want is given."""
        self._number += 1
        return Asked(self._number, prompt, adapter, Row() if want is None else want)

    def row(self) -> Want:
        """The want of a row, which may say how it is to travel."""
        want: Want = self.references.of(Row()).draw(self.random, (), None, self.truth)
        return want

    def other_want(self, prompt: Prompt, adapter: str | None = None) -> Want:
        """A want of any kind that takes more than a row."""
        of_states = self.random.random() < _OF_STATES
        references = self.references.of_states() if of_states else self.references.others()
        return self._drawn(references, prompt, adapter)

    def want_of_row(self, prompt: Prompt, adapter: str | None = None) -> Want:
        """A want of any kind that a row answers."""
        return self._drawn(self.references.of_rows(), prompt, adapter)

    def _drawn(
        self, references: Sequence[WantReference[Any]], prompt: Prompt, adapter: str | None
    ) -> Want:
        reference = references[int(self.random.integers(len(references)))]
        want: Want = reference.draw(self.random, prompt, self.written(adapter), self.truth)
        return want

    def written(self, adapter: str | None) -> Adapter | None:
        """The adapter of this name as it is loaded now."""
        files = None if adapter is None else self.loaded.get(adapter)
        return None if files is None else self.truth.adapter(files)

    def any_adapter(self, share: float) -> str | None:
        """One of those loaded, for this share of requests."""
        if not self.loaded or self.random.random() >= share:
            return None
        return list(self.loaded)[int(self.random.integers(len(self.loaded)))]

    def mixed(
        self,
        count: int,
        *,
        adapters: float = 0.4,
        others: float = 0.15,
        reduced: float = 0.12,
        bad: float = 0.03,
        most: int = 6,
    ) -> list[Asked]:
        """So many requests: these shares by adapters, for more than rows, for less, and bad ones.

        Prompts have 1 to `most` tokens; one in ten is one of before.
        """
        found: list[Asked] = []
        again: list[Prompt] = []
        for _ in range(count):
            if self.random.random() < bad:
                found.append(self.bad())
                continue
            if again and self.random.random() < 0.1:
                prompt = again[int(self.random.integers(len(again)))]
            else:
                prompt = self.prompt(most)
            again.append(prompt)
            adapter = self.any_adapter(adapters)
            kind = self.random.random()
            if kind < others:
                want = self.other_want(prompt, adapter)
            elif kind < others + reduced:
                want = self.want_of_row(prompt, adapter)
            else:
                want = self.row()
            found.append(self.ask(prompt, adapter, want))
        return found

    def bad(self) -> Asked:
        """A request that cannot be run."""
        kind = int(self.random.integers(5))
        if kind == 0:
            return self.ask(())
        if kind == 1 and self.longest < 100_000:
            return self.ask((1,) * (self.longest + 1))
        if kind == 2:
            return self.ask((1, self.vocab, 1))
        if kind == 3:
            return self.ask((2**32 - 1,))
        return self.ask((1, 2), "nobody@" + "0" * 32)

    # --- what is done --------------------------------------------------------------------------

    def do(self, *operations: Operation) -> None:
        """Add operations."""
        self.operations.extend(operations)

    def submit(self, asked: Iterable[Asked], portions: int = 1) -> None:
        """Submit in so many portions, with steps between them."""
        wanted = list(asked)
        cuts = sorted(self.random.integers(0, len(wanted) + 1, portions - 1).tolist())
        for start, end in zip([0, *cuts], [*cuts, len(wanted)], strict=True):
            if start:
                self.do(Step(int(self.random.integers(1, 4))))
            if start < end:
                self.do(Submit(tuple(wanted[start:end])))
        self.pending += [each.number for each in wanted]

    def do_steps(self, times: int = 2) -> None:
        """Have the engine work a little."""
        self.do(Step(times))

    def settle(self) -> None:
        """Have everything answered."""
        self.do(Settle())
        self.pending.clear()

    def cancel(self, count: int, unknown: int = 1) -> None:
        """Cancel up to `count` that may be in flight, and some that are not."""
        chosen = self.random.permutation(self.pending)[:count].tolist()
        strange = [-int(self.random.integers(1, 2**31)) for _ in range(unknown)]
        self.do(Cancel((*map(int, chosen), *strange)))

    def add_adapter(self, name: str, seed: int) -> None:
        """Load an adapter under a name, in the place of another where there is one."""
        how = HOW[seed % len(HOW)]
        files = AdapterFiles(name, seed, tuple(how.items()))
        self.do(AddAdapter(files))
        self.loaded[name] = files

    def remove_adapter(self, name: str) -> None:
        """Unload it."""
        self.do(RemoveAdapter(name))
        self.loaded.pop(name, None)

    def remove_adapters(self) -> None:
        """Leave none, after all was answered."""
        self.settle()
        for name in list(self.loaded):
            self.remove_adapter(name)

    def clear_cache(self) -> None:
        """Have kept state dropped."""
        self.do(ClearCache())

    def cache_prefix(self, prompt: Prompt) -> None:
        """Have the state of a prefix kept."""
        self.do(CachePrefix(prompt))


def versioned(name: str, number: int) -> str:
    """An adapter's name as workers write it: with its fingerprint."""
    return f"{name}@{number:032x}"


def shuffled(random: Random, prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts in another order."""
    found = list(prompts)
    return [found[place] for place in random.permutation(len(found))]
