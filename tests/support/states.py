"""Hidden states of an engine, beside what it says of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lmpool.backends import Outcome
from lmpool.backends.contract import ask
from lmpool.backends.contract.heads import read_head
from lmpool.wants import Hidden
from tests.support.engines import requests_of, rows_of

F32 = npt.NDArray[np.float32]

PROMPTS: Final = [[5, 9, 11], [7], [5, 9], [5, 9, 11, 200, 3], [3] * 60, [5, 9, 11]]


def states_of(
    engine: Any, prompts: Sequence[Sequence[int]] = PROMPTS, adapter: str | None = None
) -> F32:
    """The state after each prompt, float32 [prompts, hidden]."""
    outcomes = ask(engine, requests_of(prompts, want=Hidden(), adapter=adapter))
    return np.stack([state_in(outcome) for outcome in outcomes])


def state_in(outcome: Outcome) -> F32:
    """That of an outcome, which has one."""
    assert outcome.error is None, outcome.error
    assert isinstance(outcome.answer, np.ndarray)
    assert outcome.answer.dtype == np.float32
    return outcome.answer


def check_states(engine: Any, within: float = 1e-4, adapter: str | None = None) -> None:
    """That the engine's own head makes the rows of its states."""
    head = read_head(engine)
    assert head is not None, engine.info.no_head
    made = head.logprobs(states_of(engine, PROMPTS, adapter))
    np.testing.assert_allclose(made, rows_of(engine, PROMPTS, adapter=adapter), atol=within)
