"""A client's first row as a tensor, in a process that has not imported torch yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TORCH = """
import builtins, time

STATE = builtins.torch_is
STATE["begun"].set()
if not STATE["may"].wait(60):
    raise AssertionError("whoever lets it go on stood still")
STATE["loaded"] = True


def from_numpy(array):
    return "tensor", array
"""
"""Stands for torch, which takes seconds: until it may, its import does not end."""

PROGRAM = """
import asyncio, builtins, sys, threading

torch_is = builtins.torch_is = {"begun": threading.Event(), "may": threading.Event()}
import lmpool
from lmpool.errors import PoolTimeout
from lmpool.testing import MockPool
from lmpool.wants import Row

WAYS = {
    "next": lambda lm, t: lm.next_token_logprobs([1], timeout=t),
    "batch": lambda lm, t: lm.batch_next_token_logprobs([[1], [2]], timeout=t),
    "ask": lambda lm, t: lm.ask([1], Row(), timeout=t),
    "ask_many": lambda lm, t: lm.ask_many([([1], Row()), ([2], Row())], timeout=t),
    "ask_iter": lambda lm, t: anext(lm.ask_iter([([1], Row())], timeout=t)),
    "positions": lambda lm, t: lm.logprobs_at([1, 2], [1, 2], timeout=t),
}


async def let_it_go_on():
    while not torch_is["begun"].is_set():
        await asyncio.sleep(0.01)
    torch_is["may"].set()


async def main(pool, way):
    async with lmpool.connect(pool.url, pool.pool) as lm:
        await lm.top_logprobs([1], 1)
        assert not torch_is["begun"].is_set(), "nobody has asked for a tensor"
        late = ""
        while "torch" not in late:  # a busy worker may be late, too
            try:
                late = f"torch too soon: {await way(lm, 0.5)}"
            except PoolTimeout as error:
                late = str(error)
        print(late)
        going_on = asyncio.create_task(let_it_go_on())
        print(str(await way(lm, 60)).count("tensor"), "torch" in sys.modules)
        await going_on


with MockPool() as pool:
    asyncio.run(main(pool, WAYS[sys.argv[1]]))
"""


def run(tmp_path: Path, program: str, *arguments: str) -> list[str]:
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py", *arguments],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("way", "tensors"),
    [("next", 1), ("batch", 1), ("ask", 1), ("ask_many", 2), ("ask_iter", 1), ("positions", 1)],
)
def test_an_event_loop_goes_on_while_torch_is_imported(
    tmp_path: Path, way: str, tensors: int
) -> None:
    late, found = run(tmp_path, PROGRAM, way)
    assert "torch was not imported" in late
    assert "after 0.5 s" in late
    assert "framework='numpy'" in late
    assert found == f"{tensors} True"


BLOCKING = """
import builtins, sys, threading

torch_is = builtins.torch_is = {"begun": threading.Event(), "may": threading.Event()}
from lmpool.errors import PoolTimeout
from lmpool.testing import MockPool
import lmpool

with MockPool() as pool, lmpool.connect(pool.url, pool.pool) as lm:
    late = ""
    while "torch" not in late:
        try:
            late = f"torch too soon: {lm.sync.next_token_logprobs([1], timeout=0.5)}"
        except PoolTimeout as error:
            late = str(error)
    print(late)
    threading.Timer(0.1, torch_is["may"].set).start()
    print(lm.sync.next_token_logprobs([1])[0], lm.sync.batch_next_token_logprobs([[1]])[0])
"""


def test_a_blocking_call_is_over_at_its_time(tmp_path: Path) -> None:
    late, found = run(tmp_path, BLOCKING)
    assert "torch was not imported" in late
    assert found == "tensor tensor"


def test_a_torch_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    program = BLOCKING.replace("PoolTimeout", "SettingsError").replace(
        "builtins.torch_is = {", "builtins.broken = {"
    )
    late, *_ = run(tmp_path, program.partition("    threading.Timer")[0])
    assert "torch cannot be imported" in late
    assert "torch_is" in late
    assert "framework='numpy'" in late


FORKING = (
    BLOCKING.partition("    threading.Timer")[0]
    + """
    import os, time
    from lmpool.wants import Row, Top

    first, last = lm.sync.ask_many([([1], Top(1)), ([1], Row())], errors="return", timeout=0.5)
    while not hasattr(first, "token_ids"):  # a busy worker was late
        first, last = lm.sync.ask_many([([1], Top(1)), ([1], Row())], errors="return", timeout=0.5)
    print(type(first).__name__, type(last).__name__, last.index, flush=True)
    threading.Timer(0.3, torch_is["may"].set).start()
    child = os.fork()
    if not child:
        try:
            print(lm.sync.next_token_logprobs([1], timeout=60)[0], flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""
)


def test_a_process_that_forks_meanwhile_has_torch_too(tmp_path: Path) -> None:
    _, kept, found = run(tmp_path, FORKING)
    assert kept == "TopLogprobs PoolTimeout 1"  # what is there is not thrown away
    assert found == "tensor"
