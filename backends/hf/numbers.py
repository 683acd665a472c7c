"""Numbers that a model computes by, some of which are lengths from where it attends otherwise.

No prompt of a trial is as long as the window of a real model. So each number that a model holds, in
its configuration or in a module, is lowered in turn, whatever its name: where that changes its
rows, trials are made with it lowered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

logger = logging.getLogger(__name__)

_LEAST: Final = 16
"""Smaller ones show in prompts of a usual trial."""
LOWERED: Final = 7


@dataclass(frozen=True, slots=True, eq=False)
class Number:
    """A number that changes rows, by its name; the same in all `places` that have it."""

    name: str
    value: int
    places: tuple[dict[str, Any], ...]
    model: Any

    @contextmanager
    def lowered(self) -> Iterator[None]:
        """Have the model compute with a small number instead, and forget that it did."""
        kept = [(m.__dict__, dict(m.__dict__), dict(m._buffers)) for m in self.model.modules()]
        for place in self.places:
            place[self.name] = LOWERED
        try:
            yield
        finally:
            for state, attributes, buffers in kept:
                state.clear()
                state.update(attributes)
                state["_buffers"].clear()
                state["_buffers"].update(buffers)
            for place in self.places:
                place[self.name] = self.value


def numbers(model: Any, changed: Callable[[], object], longest: int) -> list[Number]:
    """Those below `longest` that change rows, as `changed` tells by a forward pass."""
    found = []
    for number in _candidates(model, longest):
        with number.lowered():
            try:
                heeded = bool(changed())
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception:
                heeded = False  # a size of its matrices
        if heeded:
            logger.info("%s=%d changes rows, and may be a length", number.name, number.value)
            found.append(number)
    return found


def _candidates(model: Any, longest: int) -> list[Number]:
    holders: dict[int, dict[str, Any]] = {}
    for module in model.modules():
        holders[id(module)] = module.__dict__
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "__dict__"):
            holders[id(config)] = config.__dict__
    text = model.config.get_text_config()
    holders[id(text)] = text.__dict__
    places: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for state in holders.values():
        for name, value in state.items():
            if type(value) is int and _LEAST <= value < longest:
                places.setdefault((name, value), []).append(state)
    return [Number(name, value, tuple(found), model) for (name, value), found in places.items()]
