"""Numbers that a model computes by, some of which are lengths from where it attends otherwise.

No prompt of a trial is as long as the window of a real model. So each number that a model holds, in
its configuration or in a module, is lowered in turn, whatever its name: where that changes its
rows, trials are made with it lowered.

Most of them only built the model, and no forward pass looks at them again. Those are found
together: a forward pass in which something that cannot be computed with stands for each of them
gives the same rows.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
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
        with _standing_in(self.model, [(self, LOWERED)]):
            yield


_OPERATIONS: Final = {
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"),
    *("__format__", "__repr__", "__str__", "__reduce_ex__"),
    *(name for name in vars(int).keys() - vars(object).keys() if name.startswith("__")),
}


class _Used(Exception):
    """A forward pass uses a number."""


class _Tripwire:
    """Stands in for a number, and notes its name and raises where it is more than handed on."""

    def __init__(self, name: str, used: set[str]) -> None:
        self._name = name
        self._used = used

    def _use(self, *_: object) -> Any:
        self._used.add(self._name)
        raise _Used(self._name)

    def __getattr__(self, name: str) -> Any:  # torch asks for attributes of what it is given
        return self._use()

    # isinstance asks for it.
    __class__ = property(_use)  # pyright: ignore[reportIncompatibleMethodOverride]


for _operation in _OPERATIONS:
    setattr(_Tripwire, _operation, _Tripwire._use)


@contextmanager
def _standing_in(model: Any, stand_ins: Sequence[tuple[Number, object]]) -> Iterator[None]:
    """Have `model` find these in the places of its numbers, and forget what it made of them."""
    modules = [(m.__dict__, dict(m.__dict__), dict(m._buffers)) for m in model.modules()]
    # Rotary positions write into what their configuration says of them.
    configs = [(state, copy.deepcopy(state)) for state in _configurations(model)]
    for number, stand_in in stand_ins:
        for place in number.places:
            place[number.name] = stand_in
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
        for number, _ in stand_ins:
            for place in number.places:
                place[number.name] = number.value


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
        if isinstance(value, dict) and issubclass(type(state.get(name)), dict):
            _restore(state[name], value)
        elif isinstance(value, int | float | str | bool | list | tuple | dict | set | None):
            state[name] = value
        else:  # a copy of an object would be another one
            state.setdefault(name, value)


def numbers(model: Any, changed: Callable[[], object], longest: int) -> list[Number]:
    """Those below `longest` that change rows, as `changed` tells by a forward pass."""
    candidates = _candidates(model, longest)
    used = _used(model, candidates, changed)
    found = []
    for number in candidates:
        if number.name not in used:
            continue
        with number.lowered():
            heeded = _changes(changed, raising=False)  # a size of its matrices
        if heeded:
            logger.info("%s=%d changes rows, and may be a length", number.name, number.value)
            found.append(number)
    return found


def _used(model: Any, candidates: Sequence[Number], changed: Callable[[], object]) -> set[str]:
    """The names of those that a forward pass uses, or that may be used unseen."""
    used: set[str] = set()
    while unused := [number for number in candidates if number.name not in used]:
        seen: set[str] = set()
        tripwires = [(number, _Tripwire(number.name, seen)) for number in unused]
        with _standing_in(model, tripwires):
            differs = _changes(changed, raising=True)
        if not seen:
            # Code that asks for the very type of a number passes by every tripwire.
            with _standing_in(model, [(number, LOWERED) for number in unused]):
                differs = differs or _changes(changed, raising=True)
            return used if not differs else {number.name for number in candidates}
        used |= seen
    return used


def _changes(changed: Callable[[], object], *, raising: bool) -> bool:
    """Whether rows changed; `raising` where the forward pass raises."""
    try:
        return bool(changed())
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception:
        return raising


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
