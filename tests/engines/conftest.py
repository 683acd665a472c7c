"""Fixtures of the engines' suites."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Of torch: two threads on cores that are not theirs alone wait for each other mostly."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def answers(request: pytest.FixtureRequest) -> int:
    """How many questions of each kind an engine is asked."""
    return int(request.config.getoption("--answers"))
