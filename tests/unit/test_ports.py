"""Ports that tests pick for servers of their own."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support.ports import BUS, PORTS, PortHolder

FEW = range(PORTS.start, PORTS.start + 400)


def _another(file: Path, count: int, said: Connection) -> None:
    holder = PortHolder(file, FEW)
    said.send([holder.pick() for _ in range(count)])
    said.recv()


def test_a_port_that_another_process_picked_is_not_picked_before_that_ends(tmp_path: Path) -> None:
    file = tmp_path / "ports"
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    other = spawn.Process(target=_another, args=(file, 100, theirs))
    other.start()
    try:
        taken = ours.recv()
        holder = PortHolder(file, FEW)
        picked = {holder.pick() for _ in range(200)}
        assert len(picked) == 200
        assert not picked & set(taken)
        with pytest.raises(OSError, match="no port of range"):  # 100 at most are left
            _ = [holder.pick() for _ in range(101)]
    finally:
        ours.send(None)
        other.join()
    assert holder.pick() in taken


def test_a_bus_is_no_other_node_nor_its_bus(tmp_path: Path) -> None:
    holder = PortHolder(tmp_path / "ports", range(PORTS.start, PORTS.start + BUS + 1, BUS))
    holder.pick("127.0.0.1", BUS)
    with pytest.raises(OSError, match="no port of range"):
        holder.pick("127.0.0.1", BUS)


def test_the_oldest_go_back(tmp_path: Path) -> None:
    holder = PortHolder(tmp_path / "ports", FEW, kept=20)
    assert len({holder.pick() for _ in range(60)}) > 20
    assert len([holder.pick() for _ in range(2 * len(FEW))]) == 2 * len(FEW)
