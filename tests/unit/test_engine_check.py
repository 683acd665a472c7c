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
from lmpool.variables import as_variables


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


def stand_in(installed: dict[str, EngineRun | SettingsError]) -> Callable[..., EngineRun]:
    """For `run_engine`: no pool is started."""

    def run_engine(engine: str, model: str, **_: object) -> EngineRun:
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


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], [("a", "its-model", "v2", {}), ("b", "its-model", "v2", {"x": 1})]),
        (["--model", "other"], [("a", "other", None, {}), ("b", "other", None, {"x": 1})]),
    ],
)
def test_what_the_environment_says_is_for_its_model_and_its_engine(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], asked: list[object]
) -> None:
    variables = {"MODEL": "its-model", "REVISION": "v2", "ENGINE": "b", "ENGINE_OPTS": '{"x": 1}'}
    for name, value in variables.items():
        monkeypatch.setenv(f"LMPOOL_{name}", value)
    monkeypatch.setattr(load, "installed_engines", lambda: ["a", "b"])
    found: list[object] = []

    def run_engine(engine: str, model: str, *, revision: object, engine_opts: object) -> EngineRun:
        found.append((engine, model, revision, engine_opts))
        return run(engine)

    monkeypatch.setattr(engine_check, "run_engine", run_engine)
    done = CliRunner().invoke(app, ["doctor", "--engines", *arguments])
    assert done.exit_code == 0, done.stdout
    assert found == asked


def test_a_pool_of_one_engine_heeds_no_option_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, object] = {}

    class Started(Exception):
        pass

    def embedded(*_: object, **settings: object) -> None:
        given.update(as_variables(settings))
        raise Started

    monkeypatch.setattr(engine_check, "embedded", embedded)
    with pytest.raises(Started):
        engine_check.run_engine("a", "tiny")
    assert (given["LMPOOL_ENGINE_OPTS"], given["LMPOOL_REVISION"]) == ("{}", "")
