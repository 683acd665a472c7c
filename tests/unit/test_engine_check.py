from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from lmpool import engine_check
from lmpool.cli import app
from lmpool.engine_check import Answers, compare, make_prompts
from lmpool.errors import SettingsError


def answers(
    engine: str, off: float = 0.0, token: int = 1, drawn: int = 2, repeats: bool = True
) -> Answers:
    rows = np.full((4, 8), -2.0, np.float32)
    rows[3, 7] += off
    return Answers(engine, rows, [[1, token]], [[2, drawn]], repeats, 100.0)


def test_prompts_of_many_lengths_and_of_one_beginning() -> None:
    prompts = make_prompts(50, 40)
    assert prompts == make_prompts(50, 40)
    assert len(prompts) == engine_check.CHECKED
    assert {min(map(len, prompts)), max(map(len, prompts))} <= set(range(1, 41))
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)
    beginnings = {tuple(prompt[:-1]) for prompt in prompts[24:] if len(prompt) > 1}
    assert any(tuple(p[: len(b)]) == b for b in beginnings for p in prompts[:24])


@pytest.mark.parametrize(
    ("other", "good"),
    [
        (answers("b"), True),
        (answers("b", off=9e-5), True),
        (answers("b", off=2e-4), False),
        (answers("b", off=float("nan")), False),
        (answers("b", token=3), False),
        (answers("b", drawn=3), True),
        (answers("b", repeats=False), False),
        (Answers("b", np.zeros((4, 9), np.float32), [[1, 1]], [[2, 2]], True, 1.0), False),
    ],
)
def test_one_row_or_one_token_tells_engines_apart(other: Answers, good: bool) -> None:
    first, second = compare([answers("a"), other])
    assert first.good
    assert second.good == good


@pytest.mark.parametrize(
    ("installed", "status", "said"),
    [
        ({"a": answers("a"), "b": answers("b", off=5e-5)}, 0, "the same tokens, and rows within"),
        ({"a": answers("a"), "b": answers("b", drawn=3)}, 0, "b: draws with a sampler of its own"),
        ({"a": answers("a"), "b": answers("b", off=1.0)}, 1, "wrong  b: not the same tokens"),
        ({"a": answers("a"), "b": SettingsError("no GPU")}, 1, "wrong  b: no GPU"),
        ({"a": SettingsError("no GPU")}, 1, "wrong  a: no GPU"),
        ({"a": answers("a")}, 0, "a alone is installed here"),
        ({}, 1, "no engine is installed here: pip install 'lmpool[hf]'"),
    ],
)
def test_what_doctor_says_of_engines(
    monkeypatch: pytest.MonkeyPatch,
    installed: dict[str, Answers | SettingsError],
    status: int,
    said: str,
) -> None:
    def ask(engine: str, model: str) -> Answers:
        assert model == "some-model"
        found = installed[engine]
        if isinstance(found, SettingsError):
            raise found
        return found

    monkeypatch.setattr(engine_check, "installed_engines", lambda: [*installed])
    monkeypatch.setattr(engine_check, "ask_engine", ask)
    done = CliRunner().invoke(app, ["doctor", "--engines", "--model", "some-model"])
    assert done.exit_code == status
    assert said in " ".join(done.stdout.split("  ")).replace("\n", " ") or said in done.stdout
