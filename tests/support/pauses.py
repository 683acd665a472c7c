"""Pauses at random steps of this process's clients and workers, as a busy machine makes them."""

from __future__ import annotations

import functools
import inspect
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from lmpool.producer import (
    alone,
    answers,
    caller,
    client,
    collector,
    line,
    loop_ear,
    near_answers,
    sender,
    session,
)
from lmpool.worker import intake, publishing

CLIENT = (
    alone, answers, caller, client, collector, line, loop_ear, near_answers, sender, session,
)  # fmt: skip
WORKER = intake, publishing


@contextmanager
def paused(seed: int, share: float = 0.01, longest: float = 0.02) -> Iterator[Counter[str]]:
    """Before and after such a share of the steps, for so many seconds at most: of plain methods of
    the modules above, of clients and workers that are made from now on. Who goes on meanwhile may
    be another at each run, whatever the seed. Yields how often each step was made, as `Class.name`.
    """
    chance, made = random.Random(seed), Counter[str]()

    def pause() -> None:
        if chance.random() < share:
            time.sleep(chance.random() * longest)

    def with_pauses(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            made[step.__qualname__] += 1
            pause()
            try:
                return step(*args, **kwargs)
            finally:
                pause()

        return run

    with pytest.MonkeyPatch.context() as patch:
        for module in (*CLIENT, *WORKER):
            for owner, name, step in _steps(module):
                patch.setattr(owner, name, with_pauses(step))
        yield made


def _steps(module: ModuleType) -> Iterator[tuple[type, str, Callable[..., Any]]]:
    for owner in list(vars(module).values()):
        if not (inspect.isclass(owner) and owner.__module__ == module.__name__):
            continue
        for name, step in list(vars(owner).items()):
            if inspect.isfunction(step) and not name.startswith("__") and _runs_at_once(step):
                yield owner, name, step


def _runs_at_once(step: Callable[..., Any]) -> bool:
    return not (inspect.iscoroutinefunction(step) or inspect.isgeneratorfunction(step))
