"""A cluster of the files of `deploy/redis`, formed and grown by redis-cli as the documents say."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis

from lmpool import inspection
from tests.support.processes import short_folder
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(120)]

DEPLOY = Path(__file__).parents[2] / "deploy" / "redis"
ADMINISTRATOR = {**os.environ, "REDISCLI_AUTH": "change-this-administrator"}


def redis_cli(*words: str) -> str:
    program = shutil.which("redis-cli") or shutil.which("valkey-cli")
    if program is None:
        pytest.skip("there is no redis-cli")
    done = subprocess.run(
        [program, "--user", "administrator", "--cluster", *words, "--cluster-yes"],
        env=ADMINISTRATOR,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[ERR]" not in done.stdout, done.stdout
    return done.stdout


def _port() -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if 10_000 < port < 55_000:
            return port


@contextmanager
def nodes(binary: str, count: int) -> Iterator[list[int]]:
    """So many nodes with the configuration and the users of `deploy/redis`; their ports."""
    with short_folder() as folder, ExitStack() as stack:
        for name in ("redis.conf", "cluster.conf", "replica.conf"):
            text = (DEPLOY / name).read_text("utf-8")
            (folder / name).write_text(text.replace("/etc/lmpool", str(folder)))
        users = [(DEPLOY / name).read_text("utf-8") for name in ("users.acl", "cluster-users.acl")]
        (folder / "users.acl").write_text("".join(users))
        ports = []
        for _ in range(count):
            port = _port()
            own = folder / str(port)
            own.mkdir()
            process = subprocess.Popen(
                [binary, str(folder / "cluster.conf"), "--port", str(port), "--dir", str(own)],
                stdout=subprocess.DEVNULL,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ports.append(port)
        for port in ports:
            until(lambda port=port: _listens(port), 20, what="a node to listen", every=0.05)
        yield ports


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _all_know(ports: list[int]) -> bool:
    """Whether every node knows as many as there are, and serves."""
    for port in ports:
        url = f"redis://operator:change-this-operator@127.0.0.1:{port}/0"
        with redis.Redis.from_url(url, protocol=2) as client:
            known = client.execute_command("CLUSTER", "NODES").decode().splitlines()
            if b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
                return False
        if len([line for line in known if "handshake" not in line]) != len(ports):
            return False
    return True


def test_it_is_formed_and_grown(server_binary: str, pool_name: str) -> None:
    with nodes(server_binary, 7) as ports:
        *first, seventh = places = [f"127.0.0.1:{port}" for port in ports]
        redis_cli("create", *places[:6], "--cluster-replicas", "1")
        url = f"redis+cluster://operator:change-this-operator@{first[0]},{first[1]}/"

        def is_well() -> bool:
            found = inspection.diagnose(url, pool_name)
            return not [each for each in found if each.level == "wrong"]

        until(is_well, 30, what="the replicas to follow", every=0.5)
        redis_cli("add-node", seventh, first[0])
        until(lambda: _all_know(ports), 20, what="all nodes to know it", every=0.2)
        if "valkey" in Path(server_binary).name:
            return  # which moves slots by CLUSTER MIGRATESLOTS: not with this redis-cli
        redis_cli("rebalance", first[0], "--cluster-use-empty-masters")
        texts = [each.what for each in inspection.diagnose(url, pool_name)]
        assert any("to 4 primaries" in text for text in texts), texts
