"""The measurements' own code, and that each of them runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lmpool.backends.mock import mock_row
from tests.benchmarks import __main__ as command_line
from tests.benchmarks import tables
from tests.benchmarks.asking import timed
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import (
    Measured,
    Report,
    Scale,
    alternate,
    number,
    quantile,
    ratio,
    slope,
    spread,
)
from tests.benchmarks.pool import Cpu, Pool, WrongRows, check_rows, make_prompts
from tests.benchmarks.rows import mean
from tests.support.benchmarks import quick_figures

ELSEWHERE = {"awrs", "gateway", "vllm", "vllm_scores"}
"""Those that run in another environment than the base one, where their engine's tests try them."""


def test_sides_take_turns() -> None:
    order: list[str] = []

    def side(name: str, run: int) -> int:
        order.append(f"{name}{run}")
        return run

    taken = alternate({"a": lambda run: side("a", run), "b": lambda run: side("b", run)}, 2)
    assert order == ["a0", "b0", "a1", "b1"]
    assert taken == {"a": [0, 1], "b": [0, 1]}


def test_a_ratio_is_taken_run_by_run() -> None:
    found = ratio("pool / peer", [10.0, 100.0, 30.0], [5.0, 10.0, 15.0], at_least=2.0)
    assert found.values == (2.0, 10.0, 2.0)
    assert found.median == 2.0
    assert found.reached is True
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        ratio("of other runs", [1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("goal", "reached", "words"),
    [
        ({}, None, ""),
        ({"at_least": 2.0}, True, ">= 2.00"),
        ({"at_least": 2.5}, False, ">= 2.50"),
        ({"at_most": 15_000.0}, True, "<= 15,000"),
        ({"at_most": 1.0}, False, "<= 1.00"),
    ],
)
def test_a_goal_is_for_the_median(goal: dict[str, float], reached: bool | None, words: str) -> None:
    found = Measured("pace", "rows/s", (1.0, 2.0, 9.0), **goal)
    assert found.reached is reached
    assert found.goal == words


def test_a_figure_needs_a_value() -> None:
    with pytest.raises(ValueError, match="'pace' was never measured"):
        Measured("pace", "rows/s", ())


def test_a_spread_is_a_part_of_the_median() -> None:
    found = spread(Measured("pace", "rows/s", (9.0, 10.0, 12.0)), at_most=0.15)
    assert found.values == (pytest.approx(0.3),)
    assert (found.what, found.unit) == ("pace: spread over runs", "of the median")
    assert found.reached is False


def test_the_mean_processor_time_of_turns_leaves_out_who_is_not_measured() -> None:
    assert mean([Cpu(1.0, 2.0, 3.0), Cpu(3.0, 6.0, 9.0)]) == Cpu(2.0, 4.0, 6.0)
    assert mean([None, None]) is None


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert [quantile(values, part) for part in (0.0, 0.5, 0.9, 0.99, 1.0)] == [1, 50, 90, 99, 100]
    assert quantile([3.0], 0.99) == 3.0


def test_growth_is_a_slope() -> None:
    assert slope([0.0, 1.0, 2.0], [5.0, 7.0, 9.0]) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(15_234.4, "15,234"), (12.34, "12.3"), (1.239, "1.24"), (0.04512, "0.0451"), (0.0, "0.00")],
)
def test_figures_have_the_digits_that_count(value: float, text: str) -> None:
    assert number(value) == text


def test_wrong_rows_fail_a_run() -> None:
    prompts = make_prompts(100, 64, 1)
    rows = np.stack([mock_row(prompt, 64) for prompt in prompts])
    check_rows(rows, prompts, 64)
    with pytest.raises(WrongRows, match="99 rows for 100 prompts"):
        check_rows(rows[:-1], prompts, 64)
    with pytest.raises(WrongRows, match="not that of its prompt"):
        check_rows(rows[::-1], prompts, 64)


class LatePool:
    """A pool whose answers are in the callers' hands before they are stored."""

    def __init__(self) -> None:
        self.done = self.asked = 0
        self.said: list[str] = []
        self.lm: Any = None

    def ask(self, lm: object, prompts: Sequence[list[int]]) -> list[np.ndarray]:
        self.said.append("asked")
        self.asked += len(prompts)
        return [mock_row(prompt, 64) for prompt in prompts]

    def queued(self) -> int:
        return self.asked

    def computed(self) -> int:
        return self.done

    def until_computed(self, count: int) -> None:
        self.said.append(f"stored {count}")
        self.done = count

    def cpu(self) -> Cpu:
        self.said.append("looked")
        return Cpu(0.0, 0.0, float(self.done))


def test_a_run_lasts_until_what_the_callers_have_is_stored() -> None:
    pool: Any = LatePool()
    pool.done = 7
    pace, used = timed(pool, pool.ask, make_prompts(100, 64, 1), 40, 64)
    assert pool.said == ["looked", *["asked"] * 3, "stored 107", "looked"]
    assert pace > 0
    assert used.server == 1e6


def test_what_a_call_answered_is_checked_as_it_was() -> None:
    pool: Any = LatePool()
    reused = np.empty((40, 64), np.float32)

    def ask(lm: object, prompts: Sequence[list[int]]) -> np.ndarray:
        reused[: len(prompts)] = pool.ask(lm, prompts)
        return reused[: len(prompts)]

    timed(pool, ask, make_prompts(100, 64, 1), 40, 64)
    with pytest.raises(WrongRows, match="not that of its prompt"):
        timed(pool, lambda lm, part: ask(lm, part)[::-1], make_prompts(100, 64, 2), 40, 64)
    with pytest.raises(WrongRows, match="39 answers to 40 prompts"):
        timed(pool, lambda lm, part: ask(lm, part)[1:], make_prompts(100, 64, 3), 40, 64)


def test_rows_of_all_places_of_a_call_are_checked() -> None:
    pool: Any = LatePool()
    calls: list[int] = []

    class Looked(list[Any]):
        def __getitem__(self, place: Any) -> Any:
            places[len(calls) - 1].add(place)
            return super().__getitem__(place)

    def ask(lm: object, prompts: Sequence[list[int]]) -> Looked:
        calls.append(len(prompts))
        return Looked(pool.ask(lm, prompts))

    for count, per_call in ((3200, 32), (2000, 250), (100, 40), (320, 32)):
        calls.clear()
        places: list[set[int]] = [set() for _ in range(count // per_call + 1)]
        timed(pool, ask, make_prompts(count, 64, count), per_call, 64)
        assert 64 <= sum(map(len, places)) <= 128
        assert len(set().union(*places)) >= min(32, per_call)


def test_what_is_never_stored_fails_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = iter((b"3", b"3", b"4", b"4", b"4", b"4"))
    shard = SimpleNamespace(hget=lambda key, field: next(counters))
    servers = SimpleNamespace(for_shard=lambda _: shard, close=lambda: None)
    monkeypatch.setattr("tests.benchmarks.pool.Servers.of_url", lambda url: servers)
    lm = SimpleNamespace(shards=[SimpleNamespace(counters="counters")])
    pool = Pool(cast(Any, lm), cast(Any, None), cast(Any, SimpleNamespace(url="redis://here")))
    assert pool.computed() == 3
    pool.until_computed(4)
    monkeypatch.setattr("tests.benchmarks.pool.STORED_WITHIN", 0.0)
    with pytest.raises(WrongRows, match="4 jobs were stored where 5 were to be"):
        pool.until_computed(5)


def test_each_seed_gives_other_prompts_and_always_the_same() -> None:
    prompts = make_prompts(50, 256, 1, 2)
    assert prompts == make_prompts(50, 256, 1, 2)
    others = make_prompts(50, 256, 2, 2)
    assert len({tuple(prompt) for prompt in prompts + others}) == 100


def test_processor_time_of_a_job() -> None:
    used = Cpu(1.5, 2.0, 3.0).per_job(Cpu(1.0, 1.0, 1.0), 1_000_000)
    assert used == Cpu(0.5, 1.0, 2.0)
    assert used.total == 3.5


def report() -> Report:
    found = Report("jobs", "Rows of 256 float32", notes=["a note"], series={"MiB": [1.0, 2.0]})
    found.add("Pace", Measured("pool", "jobs/s", (10.0, 30.0, 20.0), at_least=15.0))
    found.add("Pace", Measured("peer", "jobs/s", (1.0,)))
    found.facts = {"cpu": "one", "others": "somebody 0.50"}
    return found


def test_a_report_as_markdown() -> None:
    text = tables.markdown(report(), "make bench")
    assert "| Pace | unit | min | median | max | goal |  |" in text
    assert "| pool | jobs/s | 10.0 | 20.0 | 30.0 | >= 15.0 | reached |" in text
    assert "| peer | jobs/s | 1.00 | 1.00 | 1.00 |  |  |" in text
    assert text.endswith("\n`make bench`\n")


def test_a_report_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "interactive", lambda: True)
    tables.show(report())
    printed = capsys.readouterr().out
    assert "reached" in printed
    assert "a note" in printed


def test_saving_keeps_the_figures_and_not_who_else_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    path = tables.save(report(), quick=True, runs=11)
    text = path.read_text()
    assert path.name == "jobs.md"
    assert "make bench ARGS='jobs --quick --runs 11 --save'" in text
    assert "somebody" not in text
    (saved,) = json.loads(path.with_suffix(".json").read_text())
    assert saved["facts"] == {"cpu": "one"}
    assert saved["figures"]["Pace"][0]["median"] == 20.0


def test_facts_name_hardware_and_versions() -> None:
    found = facts(packages=("no-such-package",))
    assert found["no-such-package"] == "not installed"
    assert {"cpu", "python", "redis", "arq", "lmpool"} <= found.keys()


def test_bystanders_are_counted() -> None:
    found = Bystanders().report()
    assert found.keys() == {"load average", "others used", "others"}


def test_what_there_is_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(command_line.NAMES)


@pytest.mark.parametrize(
    ("given", "message"),
    [(["job"], "no benchmark 'job'"), (["jobs", "--runs", "0"], "at least one")],
)
def test_a_command_line_that_cannot_be_used(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main(given)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_benchmark_that_fails_leaves_the_others_running(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Failing:
        NAME = LINE = "fails"

        @staticmethod
        def measure(scale: Scale) -> Report:
            raise WrongRows("row 3 is not that of its prompt")

    class Working:
        NAME = LINE = "works"

        @staticmethod
        def measure(scale: Scale) -> Report:
            assert scale == Scale(2, quick=True)
            return report()

    modules = {"jobs": Failing, "rows": Working}
    monkeypatch.setattr(command_line, "load", modules.__getitem__)
    written = tmp_path / "all.json"
    assert command_line.main(["jobs", "rows", "--quick", "--json", str(written)]) == 1
    assert "jobs FAILED: WrongRows: row 3" in capsys.readouterr().err
    assert len(json.loads(written.read_text())) == 1


@pytest.mark.bench
@pytest.mark.usefixtures("server_binary")
@pytest.mark.parametrize("name", sorted({*command_line.NAMES} - ELSEWHERE))
def test_each_benchmark_runs_and_its_rows_are_right(name: str, tmp_path: Path) -> None:
    quick_figures(name, tmp_path, *(("--device", "cpu") if name == "gpu" else ()))
