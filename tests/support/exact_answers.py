"""What engines answer of rows, beside the rows of transformers in float64."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lmpool.backends import Engine
from lmpool.backends.contract import Adapter, EngineContract, Reference, ask, write_adapter
from lmpool.backends.contract.drawn import DrawReference
from lmpool.backends.contract.heads import ReadHead, read_head
from lmpool.backends.contract.hidden import ROWS_OF_STATES
from lmpool.backends.contract.operations import Asked, Prompt
from lmpool.backends.contract.reduced import (
    ReducedReference,
    TokensReference,
    TopReference,
    Within,
    check_values,
)
from lmpool.backends.contract.reference import ADAPTER_CONFIG, ADAPTER_WEIGHTS, changes
from lmpool.backends.contract.truth import Truth
from lmpool.backends.contract.want_reference import Answered
from lmpool.errors import PromptFailed
from lmpool.wants import Hidden, Row

WITHIN: Final = Within(values=1e-4, order=1e-5)
"""Log-probabilities within 1e-4; the same tokens, but where two lie within 1e-5 of each other."""

F64 = npt.NDArray[np.float64]
RowOf = Callable[[Prompt, str | None], F64]
"""The right row of a prompt by an adapter's name, float64 [vocab]."""

_TEXTS: Final = 24
_LONGEST: Final = 48
_TOGETHER: Final = 25


class ExactRows:
    """A causal model of transformers in float64; adapters, by their names, merged in float64."""

    def __init__(self, model: str, adapters: Mapping[str, str]) -> None:
        import torch

        self._torch: Any = torch
        base = Reference.of(model).model
        self._models: dict[str | None, Any] = {None: copy.deepcopy(base).double()}
        for name, folder in adapters.items():
            self._models[name] = self._merged(base, Path(folder))
        self._known: dict[tuple[Prompt, str | None], F64] = {}

    def _merged(self, base: Any, folder: Path) -> Any:
        from safetensors.torch import load_file

        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        model = copy.deepcopy(base).double()
        with self._torch.no_grad():
            for name, value in list(changes(model, config, load_file(folder / ADAPTER_WEIGHTS))):
                model.get_parameter(name).copy_(value)
        return model

    def __call__(self, prompt: Prompt, adapter: str | None) -> F64:
        found = self._known.get((prompt, adapter))
        if found is None:
            with self._torch.inference_mode():
                logits = self._models[adapter](self._torch.tensor([prompt])).logits[0]
                rows = self._torch.log_softmax(logits.double(), dim=-1).numpy()
            for n in range(len(prompt)):  # those of its beginnings as well
                self._known[prompt[: n + 1], adapter] = rows[n]
            found = self._known[prompt, adapter]
        return found


class StatesReference(ReducedReference[Hidden]):
    """Hidden states, of which the engine's own head makes the row."""

    answer_type = np.ndarray

    def __init__(self, head: ReadHead) -> None:
        self._head = head

    def draw(self, random: Any, prompt: Prompt, adapter: Adapter | None, truth: Truth) -> Hidden:
        return Hidden()

    def check(self, asked: Asked, answer: Any, row: F64, within: Within) -> None:
        found = self._head.logprobs(answer[None])[0]
        check_values(found, row, within.values, ROWS_OF_STATES, asked)


def two_adapters(folder: Path, model: str = "tiny") -> dict[str, str]:
    """Adapters by their names."""
    return {
        f"{name}@{seed:032x}": write_adapter(folder / name, model, seed=seed, targets=targets)
        for seed, (name, targets) in enumerate(
            {"one": ("q_proj", "v_proj"), "two": ("v_proj", "down_proj")}.items(), 1
        )
    }


def check_answers(
    engine: Engine,
    rows: RowOf,
    adapters: Mapping[str, str],
    asks: int,
    seed: int = 0,
) -> None:
    """Ask `asks` random questions of each kind, with all that can happen to kept states between.

    Prompts are nested, repeated, and begin alike; `adapters` are folders by name.
    """
    random = np.random.default_rng(seed)
    truth = Truth(EngineContract, engine.info, Path())
    references: list[ReducedReference[Any]] = [TopReference(), TokensReference(), DrawReference()]
    head = read_head(engine)
    if head is not None:
        references.append(StatesReference(head))
    for reference in references:
        reference.bad = 0.0
    texts = nested_texts(random, engine.info.vocab_size)
    loaded: list[str] = []
    for start in range(0, len(references) * asks, _TOGETHER):
        disturb(engine, random, adapters, loaded, texts)
        asked: list[Asked] = []
        for number in range(start, start + _TOGETHER):
            prompt = beginning_of(random, texts)
            by = [None, *loaded][int(random.integers(1 + len(loaded)))]
            want = references[number % len(references)].draw(random, (), None, truth)
            asked.append(Asked(number, prompt, by, want))
        for each, outcome in zip(asked, ask(engine, [a.request() for a in asked]), strict=True):
            assert outcome.error is None, (each, outcome.error)
            adapter = None if each.adapter is None else Adapter(each.adapter, "")
            rows(whole(each.prompt, texts), each.adapter)
            row = rows(each.prompt, each.adapter)
            judge = references[each.number % len(references)].judge_one
            judge(Answered(each, adapter, outcome), row, WITHIN)


def nested_texts(random: np.random.Generator, vocab: int) -> list[Prompt]:
    """Some that share their beginnings, some that differ late."""
    found: list[Prompt] = []
    for _ in range(_TEXTS):
        length = int(random.integers(2, _LONGEST))
        text = random.integers(0, vocab, length)
        if found and random.random() < 0.6:
            other = found[int(random.integers(len(found)))]
            shared = int(random.integers(1, min(len(other), length) + 1))
            text[:shared] = other[:shared]
        found.append(tuple(text.tolist()))
    return found


def beginning_of(random: np.random.Generator, texts: Sequence[Prompt]) -> Prompt:
    """A text, or the beginning of one."""
    text = texts[int(random.integers(len(texts)))]
    return text[: int(random.integers(1, len(text) + 1))] if random.random() < 0.7 else text


def whole(prompt: Prompt, texts: Sequence[Prompt]) -> Prompt:
    """The longest text that begins so: by its row the exact model knows those of all beginnings."""
    return max((text for text in texts if text[: len(prompt)] == prompt), key=len)


def disturb(
    engine: Engine,
    random: np.random.Generator,
    adapters: Mapping[str, str],
    loaded: list[str],
    texts: Sequence[Prompt],
) -> None:
    """What happens between batches: states are dropped or kept, rows asked for, adapters move."""
    kind = random.random()
    if kind < 0.1:
        engine.clear_cache()
    elif kind < 0.25:
        with suppress(PromptFailed):  # there is no room
            engine.cache_prefix(np.array(beginning_of(random, texts), np.uint32))
    elif kind < 0.4:
        rows = [Asked(-n, beginning_of(random, texts), None, Row()) for n in range(1, 6)]
        ask(engine, [each.request() for each in rows])
    elif kind < 0.6 and adapters:
        name = list(adapters)[int(random.integers(len(adapters)))]
        if name in loaded:
            engine.remove_adapter(name)
            loaded.remove(name)
        else:
            engine.add_adapter(name, adapters[name])
            loaded.append(name)
