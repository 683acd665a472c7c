"""What engines are asked, how they are compared, and what ``lmpool doctor`` says of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from typer.testing import CliRunner

from lmpool import engine_check
from lmpool.backends import load
from lmpool.cli import app
from lmpool.engine_check import EngineRun, check_engines, compare, make_prompts
from lmpool.errors import SettingsError


def run(
    engine: str, off: float = 0.0, token: int = 1, drawn: int = 2, repeats: bool = True
) -> EngineRun:
    rows = np.full((4, 8), -2.0, np.float32)
    rows[3, 7] += off
    return EngineRun(engine, rows, [[1, token]], [[2, drawn]], repeats, 100.0)


def test_prompts_of_many_lengths_and_of_one_beginning() -> None:
    prompts = make_prompts(50, 40)
    assert prompts == make_prompts(50, 40)
    assert len(prompts) == engine_check.PROMPTS
    assert {min(map(len, prompts)), max(map(len, prompts))} <= set(range(1, 41))
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)
    beginnings = {tuple(prompt[:-1]) for prompt in prompts[24:] if len(prompt) > 1}
    assert any(tuple(p[: len(b)]) == b for b in beginnings for p in prompts[:24])


@pytest.mark.parametrize(
    ("other", "good"),
    [
        (run("b"), True),
        (run("b", off=9e-5), True),
        (run("b", off=2e-4), False),
        (run("b", off=float("nan")), False),
        (run("b", token=3), False),
        (run("b", drawn=3), True),
        (run("b", repeats=False), False),
        (EngineRun("b", np.zeros((4, 9), np.float32), [[1, 1]], [[2, 2]], True, 1.0), False),
    ],
)
def test_one_row_or_one_token_tells_engines_apart(other: EngineRun, good: bool) -> None:
    first, second = compare([run("a"), other])
    assert first.good
    assert second.good == good


def stand_in(
    installed: dict[str, EngineRun | SettingsError],
) -> Callable[[str, str], EngineRun]:
    """For `run_engine`: no pool is started."""

    def run_engine(engine: str, model: str) -> EngineRun:
        assert model == "some-model"
        found = installed[engine]
        if isinstance(found, SettingsError):
            raise found
        return found

    return run_engine


def test_an_engine_that_does_not_run_is_told_beside_those_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {"a": SettingsError("no GPU"), "b": run("b"), "c": run("c", off=1.0)}
    monkeypatch.setattr(engine_check, "run_engine", stand_in(installed))
    started: list[str] = []
    found = check_engines([*installed], "some-model", on_start=started.append)
    assert started == ["a", "b", "c"]
    assert {name: str(error) for name, error in found.failures.items()} == {"a": "no GPU"}
    assert [each.engine for each in found.comparisons] == ["b", "c"]
    assert found.different == ["c"]
    assert not found.good


def test_engines_that_agree_are_good_and_none_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: dict[str, EngineRun | SettingsError] = {"a": run("a"), "b": run("b", drawn=3)}
    monkeypatch.setattr(engine_check, "run_engine", stand_in(installed))
    assert check_engines(["a", "b"], "some-model").good
    assert not check_engines([], "some-model").good


@pytest.mark.parametrize(
    ("installed", "status", "said"),
    [
        ({"a": run("a"), "b": run("b", off=5e-5)}, 0, "the same tokens, and rows within"),
        ({"a": run("a"), "b": run("b", drawn=3)}, 0, "b: draws with a sampler of its own"),
        ({"a": run("a"), "b": run("b", off=1.0)}, 1, "wrong  b: not the same tokens"),
        ({"a": run("a"), "b": SettingsError("no GPU")}, 1, "wrong  b: no GPU"),
        ({"a": SettingsError("no GPU")}, 1, "wrong  a: no GPU"),
        ({"a": run("a")}, 0, "a alone is installed here"),
        ({}, 1, "no engine is installed here: pip install 'lmpool[hf]'"),
    ],
)
def test_what_doctor_says_of_engines(
    monkeypatch: pytest.MonkeyPatch,
    installed: dict[str, EngineRun | SettingsError],
    status: int,
    said: str,
) -> None:
    monkeypatch.setattr(load, "installed_engines", lambda: [*installed])
    monkeypatch.setattr(engine_check, "run_engine", stand_in(installed))
    done = CliRunner().invoke(app, ["doctor", "--engines", "--model", "some-model"])
    assert done.exit_code == status
    assert said in " ".join(done.stdout.split("  ")).replace("\n", " ") or said in done.stdout
