"""Which GPUs and variables each worker of a machine gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmpool.errors import SettingsError
from lmpool.worker.launcher import Backoff, how_it_ended
from lmpool.worker.placement import parse_gpus, placements


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0", ["0"]),
        ("0,1, 3", ["0", "1", "3"]),
        ("0+1,2+3", ["0,1", "2,3"]),
        ("GPU-8f2a-11,MIG-1c/2", ["GPU-8f2a-11", "MIG-1c/2"]),
    ],
)
def test_gpus_are_listed_by_worker(text: str, found: list[str]) -> None:
    assert parse_gpus(text, {}) == found


@pytest.mark.parametrize("text", ["", ",", "0,", "a", "-1", "0 1", "0,0", "0+1,1", "0;1", "+"])
def test_what_names_no_gpus_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="gpus="):
        parse_gpus(text, {})


def test_gpus_that_the_environment_hides_are_refused() -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert parse_gpus("3", visible) == ["3"]
    assert parse_gpus("all", visible) == ["2", "3"]
    with pytest.raises(SettingsError, match="CUDA_VISIBLE_DEVICES=2,3"):
        parse_gpus("0,3", visible)
    with pytest.raises(SettingsError, match="hides every GPU"):
        parse_gpus("all", {"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(
    ("answer", "found"),
    [("echo 0; echo 1", ["0", "1"]), ("exit 9", "could not list"), ("true", "lists none")],
)
def test_all_gpus_are_those_of_nvidia_smi(
    answer: str, found: list[str] | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if isinstance(found, list):
        assert parse_gpus("all", {}) == found
    else:
        with pytest.raises(SettingsError, match=found):
            parse_gpus("all", {})


def test_each_gpu_is_one_place() -> None:
    found = placements("0,2+3", None, {})
    assert [place.name for place in found] == ["gpu 0", "gpu 2+3"]
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in found] == ["0", "2,3"]
    assert all("OMP_NUM_THREADS" not in place.environment for place in found)


def test_workers_without_gpus_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmpool.worker.placement._cores", lambda: 8)
    (alone,) = placements(None, None, {})
    assert "OMP_NUM_THREADS" not in alone.environment
    assert [p.environment["OMP_NUM_THREADS"] for p in placements(None, 3, {})] == ["2", "2", "2"]
    assert {p.environment["OMP_NUM_THREADS"] for p in placements(None, 20, {})} == {"1"}
    # What is set stays.
    chosen = {"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": "ACTIVE"}
    assert {len(place.environment) for place in placements(None, 3, chosen)} == {0}


def test_places_are_gpus_or_workers() -> None:
    with pytest.raises(SettingsError, match="one of them"):
        placements("0", 2, {})
    with pytest.raises(SettingsError, match="workers=0"):
        placements(None, 0, {})


def test_pauses_grow_to_a_bound_and_start_again_after_a_life() -> None:
    backoff = Backoff(first=0.5, most=8.0, healthy=60.0, jitter=lambda: 0.5)
    assert [backoff.after(0.1) for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert backoff.after(60.0) == 0.5
    assert backoff.after(1.0) == 1.0


def test_pauses_differ_between_workers() -> None:
    low, high = Backoff(jitter=lambda: 0.0), Backoff(jitter=lambda: 1.0)
    assert low.after(0) < Backoff().after(0) < high.after(0)
    for _ in range(2000):
        high.after(0.0)
    assert high.after(0.0) == 1.25 * high.most


def test_ends_are_told_in_words() -> None:
    assert how_it_ended(3) == "ended with status 3"
    assert how_it_ended(-9) == "was ended by SIGKILL"
    assert how_it_ended(-250) == "was ended by signal 250"
