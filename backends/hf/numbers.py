"""Numbers that a model computes by, some of which are lengths from where it attends otherwise.

No prompt of a trial is as long as the window of a real model. So each number that a model holds, in
its configuration or in a module, is lowered in turn, whatever its name: where that changes its
rows, trials are made with it lowered.
"""

from __future__ import annotations

import copy
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
        modules = [(m.__dict__, dict(m.__dict__), dict(m._buffers)) for m in self.model.modules()]
        # Rotary positions write into what their configuration says of them.
        configs = [(state, copy.deepcopy(state)) for state in _configurations(self.model)]
        for place in self.places:
            place[self.name] = LOWERED
        try:
            yield
        finally:
            for state, attributes, buffers in modules:
                state.clear()
                state.update(attributes)
                state["_buffers"].clear()
                state["_buffers"].update(buffers)
            for state, saved in configs:
                _restore(state, saved)
            for place in self.places:
                place[self.name] = self.value


def _configurations(model: Any) -> list[dict[str, Any]]:
    """What the configurations of a model and of its modules hold, each once."""
    found = [model.config.get_text_config()]
    found += [module.config for module in model.modules() if hasattr(module, "config")]
    states = [vars(config) for config in found if hasattr(config, "__dict__")]
    return list({id(state): state for state in states}.values())


def _restore(state: dict[str, Any], saved: dict[str, Any]) -> None:
    """Write back what was saved, into the dictionaries that are there."""
    for name in state.keys() - saved.keys():
        del state[name]
    for name, value in saved.items():
        if isinstance(value, dict) and isinstance(state.get(name), dict):
            _restore(state[name], value)
        elif isinstance(value, int | float | str | bool | list | tuple | dict | set | None):
            state[name] = value
        else:  # a copy of an object would be another one
            state.setdefault(name, value)


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
    states = _configurations(model)
    for module in model.modules():
        if not type(module).__module__.startswith("torch."):  # those know sizes alone
            states.append(module.__dict__)
    places: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for state in states:
        for name, value in state.items():
            if type(value) is int and _LEAST <= value < longest:
                places.setdefault((name, value), []).append(state)
    return [Number(name, value, tuple(found), model) for (name, value), found in places.items()]
