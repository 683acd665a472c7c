"""`lmpool demo --cluster` as a process: what it shows is so, and it leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from lmpool.cli.demo import private_cluster
from lmpool.errors import LmpoolError
from lmpool.producer.embedded.private_server import Program
from tests.support.embedded import program
from tests.support.ports import free_port
from tests.support.processes import short_folder, users_of, wait_until_gone
from tests.support.waiting import until
from tests.support.workers import clean_environment

pytestmark = [pytest.mark.one_server]


@pytest.fixture
def folder(tmp_path: Path, server_binary: str) -> Iterator[Path]:
    """Where the demo puts its cluster. At the end nothing is there, and nobody."""
    with short_folder() as short:
        yield short
        until(lambda: not users_of(short), what="the demo's processes to end", every=0.05)
        until(lambda: not list(short.glob("lmpool*")), what=f"{short} to be empty")


MISSED_AFTER = 5.0
PATIENT = f"""
import sys
from lmpool.cli import app
from lmpool.cli.demo import over_cluster
from lmpool.cli.demo.private_cluster import PrivateCluster

def form_patiently(cluster, form=PrivateCluster._form):
    form(cluster)
    for node in cluster.nodes:
        with cluster._client(node) as client:
            client.config_set("cluster-node-timeout", {round(1000 * MISSED_AFTER)})

PrivateCluster._form = form_patiently
over_cluster.REPLACED_WITHIN = over_cluster.SETTLED_WITHIN = 60.0
over_cluster.MOCK_BATCH, over_cluster.BEAT_MS = 0.3, 5000
app(sys.argv[1:], prog_name="lmpool")
"""
"""`lmpool` with a demo for busy machines: no node is missed that stands still for a moment, the
load lasts until a primary was killed, however late, and what workers say late is shown."""


def demo(
    folder: Path, server_binary: str, *options: str, program: Sequence[str] = ("-m", "lmpool")
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, "demo", "--cluster", *options],
        env={
            **clean_environment(),
            "TMPDIR": str(folder),
            "COLUMNS": "160",
            "LMPOOL_TEST_SERVER": server_binary,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def test_a_primary_is_killed_and_nothing_is_lost(folder: Path, server_binary: str) -> None:
    patient = ("-c", PATIENT)
    with demo(folder, server_binary, "--prompts", "6000", program=patient) as running:
        output, errors = running.communicate(timeout=250)
    assert running.returncode == 0, errors
    assert errors == ""
    assert "\x1b" not in output  # piped
    before, after = output.split("Load: 6,000 prompts from 2 client processes at once")
    nodes = re.findall(r"^  primary  pid (\d+) +([\d.:]+): slots .*, shards (.*)$", before, re.M)
    assert [shards for _, _, shards in nodes] == ["0, 1", "2, 3", "4, 5"]
    replicas = re.findall(r"^  replica  pid (\d+) +([\d.:]+)$", before, re.M)
    assert len(replicas) == 3
    (killed,) = re.findall(r"kill -9 of ([\d.:]+),", after)
    assert killed == nodes[0][1]
    now = re.findall(r"^  primary  pid (\d+) +([\d.:]+): slots .*, shards (.*)$", after, re.M)
    # Its replica has its slots, and the shards in them.
    assert now[0] == (*replicas[0], "0, 1")
    assert now[1:] == nodes[1:]
    numbers = {
        words: float(number.replace(",", ""))
        for number, words in re.findall(r"^ +([\d,.]+)  (\w+(?:,? \w+)*)", after, re.M)
    }
    assert next(numbers[words] for words in numbers if words.startswith("rows in")) == 6000
    assert numbers["prompts lost"] == 0
    assert re.search(r"had its place after [\d.]+ s", after)
    # It was killed under load: somebody waited for what lay there, most of the time until others
    # missed it, and for less than a client waits for a server that is lost.
    assert MISSED_AFTER / 2 < numbers["seconds, the longest call"] < 60
    assert "rows are the same bytes in all 3 clients" in after
    # Each lane in use has one home, and every job that was computed was taken by somebody.
    (used, lanes) = re.findall(r"^Lanes: (\d+) of (\d+) in use$", before, re.M)[0]
    assert (used, lanes) == ("192", "384")
    homes = re.findall(r"^  worker   pid (\d+) +home of (\d+) lanes$", before, re.M)
    assert len(homes) == 2
    assert sum(int(count) for _, count in homes) == 192
    assert min(int(count) for _, count in homes) > 50
    ran = re.findall(r"^  worker   pid (\d+) +([\d,]+) of its lanes, ([\d,]+) stolen$", after, re.M)
    assert [pid for pid, *_ in ran] == [pid for pid, _ in homes]
    own, stolen = (sum(int(each[n].replace(",", "")) for each in ran) for n in (1, 2))
    part = {
        words: int(share) for share, words in re.findall(r"^ +<?(\d+) %  (\S.*?)  ", after, re.M)
    }
    computed = 6000 * (100 - part["not computed anew"]) / 100
    assert own + stolen >= 0.95 * computed
    assert own > stolen
    assert abs(part["stolen"] - 100 * stolen / (own + stolen)) <= 1
    # Each of two workers keeps more than its share of the beginnings, and less than all.
    assert part["of prompt tokens kept"] > 60
    assert max(map(len, output.splitlines())) <= 85


@pytest.mark.parametrize("ending", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_demo_that_is_ended_leaves_nothing(folder: Path, server_binary: str, ending: str) -> None:
    with demo(folder, server_binary, "--prompts", "200000") as running:
        assert running.stdout is not None
        shown = ""
        while "kill -9" not in shown:
            line = running.stdout.readline()
            assert line, running.communicate()[1]
            shown += line
        pids = [int(pid) for pid in dict.fromkeys(re.findall(r"pid (\d+)", shown))]
        assert len(pids) == 8
        pids += [child.pid for child in psutil.Process(running.pid).children(recursive=True)]
        if ending == "SIGINT":
            os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        else:
            running.send_signal(signal.Signals[ending])
        _, errors = running.communicate(timeout=150)
        assert running.returncode == {"SIGINT": 130, "SIGTERM": 143, "SIGKILL": -9}[ending]
        assert "Traceback" not in errors
        wait_until_gone(pids)


NODES = 6


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], range]:
    """Some that are free, and no more, for the nodes of a demo."""

    def some(count: int) -> range:
        above = [at + bus for bus in (0, private_cluster.BUS) for at in range(count)]
        first = free_port(*above[1:])
        monkeypatch.setattr(private_cluster, "PORTS", range(first, first + count))
        return private_cluster.PORTS

    return some


def test_no_two_nodes_want_one_port(ports: Callable[[int], range]) -> None:
    few = ports(NODES)
    with private_cluster.PrivateCluster(NODES // 2, "few") as cluster:
        assert {node.port for node in cluster.nodes} == {*few}
        assert len(cluster.layout()) == NODES // 2


def test_a_port_that_is_taken_before_its_node_listens_is_left(
    ports: Callable[[int], range], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ports(NODES + 2)
    monkeypatch.setattr(private_cluster, "_is_free", lambda _: True)
    with (
        socket.create_server((private_cluster.HOST, few[0])),
        socket.create_server((private_cluster.HOST, few[1] + private_cluster.BUS)),
        private_cluster.PrivateCluster(NODES // 2, "others") as cluster,
    ):
        assert {node.port for node in cluster.nodes} == {*few[2:]}


def test_too_few_ports_are_told(ports: Callable[[int], range]) -> None:
    few = ports(NODES)
    with (
        socket.create_server((private_cluster.HOST, few[3])),
        pytest.raises(LmpoolError, match=rf"5 of 6 free from {few[0]} to {few[-1]}"),
        private_cluster.PrivateCluster(NODES // 2, "none"),
    ):
        pass


def test_a_node_that_cannot_begin_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ports: Callable[[int], range]
) -> None:
    ports(NODES)
    broken = Program(str(program(tmp_path / "server", "out of luck")), "Redis 7")
    monkeypatch.setattr(private_cluster, "find_server", lambda: broken)
    with (
        pytest.raises(LmpoolError, match="ended at its start:\nout of luck"),
        private_cluster.PrivateCluster(NODES // 2, "none"),
    ):
        pass


def test_it_goes_with_no_gateway(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "lmpool", "demo", "--cluster", "--gateway"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert said.returncode == 2
    assert "--gateway and --cluster: one of them at a time" in said.stderr
