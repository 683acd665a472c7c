"""Asking an engine under test, and ``lmpool doctor --engines`` with one beside transformers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lmpool.backends import Engine, Outcome, Request
from lmpool.backends.contract import ask
from lmpool.wants import Generation
from tests.support.workers import clean_environment


def requests_of(
    prompts: Iterable[Sequence[int] | npt.NDArray[Any]], start: int = 0, **options: Any
) -> list[Request]:
    """A request for each prompt, with their numbers as ids."""
    return [
        Request(b"%d" % number, np.asarray(prompt, dtype=np.uint32), **options)
        for number, prompt in enumerate(prompts, start)
    ]


def rows_of(
    engine: Engine, prompts: Iterable[Sequence[int] | npt.NDArray[Any]], **options: Any
) -> npt.NDArray[np.float32]:
    """The rows of prompts that are asked for at once, float32 [prompts, vocab]."""
    outcomes = ask(engine, requests_of(prompts, **options))
    return np.stack([outcome.logprobs() for outcome in outcomes])


def drawn(outcome: Outcome) -> list[int]:
    """The token ids of a continuation, its ending included."""
    assert outcome.error is None, outcome.error
    assert isinstance(outcome.answer, Generation)
    assert outcome.answer.token_ids.dtype == np.int32
    return outcome.answer.token_ids.tolist()


def check_engines(name: str, drawn: str = "same", **engine_opts: object) -> None:
    """The command ends well, and has asked a pool of `name`, which draws so, and one of hf.

    `engine_opts` are those of `name`.
    """
    own = {"LMPOOL_ENGINE": name, "LMPOOL_ENGINE_OPTS": json.dumps(engine_opts)}
    done = subprocess.run(
        [sys.executable, "-m", "lmpool", "doctor", "--engines"],
        env={**clean_environment(), **own, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    for engine, draws in (("hf", "same"), (name, drawn)):
        assert re.search(rf"{engine}\W+[\d.e+-]+\W+same\W+{draws}\W+[\d,]+", shown), shown
    assert "the same tokens, and rows within 0.0001" in shown
