"""Ports that tests pick for servers of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support.ports import BUS, PORTS, PortHolder

FEW = range(PORTS.start, PORTS.start + 400)


def _another(file: Path, count: int, said: Connection) -> None:
    holder = PortHolder(file, FEW)
    said.send([holder.pick() for _ in range(count)])
    with suppress(EOFError):
        said.recv()


@contextmanager
def picked_elsewhere(file: Path, count: int) -> Iterator[list[int]]:
    """What another process picks, which lives as long as the block."""
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    other = spawn.Process(target=_another, args=(file, count, theirs))
    other.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        other.join()


def test_a_port_that_another_process_picked_is_not_picked_before_that_ends(tmp_path: Path) -> None:
    file = tmp_path / "ports"
    with picked_elsewhere(file, 100) as taken:
        holder = PortHolder(file, FEW)
        picked = {holder.pick() for _ in range(200)}
        assert len(picked) == 200
        assert not picked & set(taken)
        with pytest.raises(OSError, match="no port of range"):  # 100 at most are left
            _ = [holder.pick() for _ in range(101)]
    assert holder.pick() in taken


def test_a_bus_is_no_other_node_nor_its_bus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.ports._is_free", lambda *_: True)
    holder = PortHolder(tmp_path / "ports", range(20_000, 20_000 + BUS + 1, BUS))
    holder.pick("127.0.0.1", BUS)
    with pytest.raises(OSError, match="no port of range"):
        holder.pick("127.0.0.1", BUS)


def test_a_port_that_was_busy_is_picked_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = {FEW.start + 1}
    monkeypatch.setattr("tests.support.ports._is_free", lambda _, port: port not in busy)
    holder = PortHolder(tmp_path / "ports", range(FEW.start, FEW.start + 1))
    with pytest.raises(OSError, match="no port of range"):
        holder.pick("127.0.0.1", 1)
    busy.clear()
    assert holder.pick("127.0.0.1", 1) == FEW.start


def test_the_oldest_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.ports._is_free", lambda *_: True)
    file = tmp_path / "ports"
    holder = PortHolder(file, FEW, kept=20)
    picked = [holder.pick() for _ in range(len(FEW))]
    assert len({*picked[-20:]}) == 20
    # What it no longer holds is there for another process, and no more than that.
    with picked_elsewhere(file, 200) as others:
        assert not {*others} & {*picked[-20:]}
