"""A cluster of the files of `deploy/redis`, formed and grown by redis-cli as the documents say."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from lmpool import inspection
from tests.support.certificates import certificates
from tests.support.ports import listens, node_port
from tests.support.processes import short_folder
from tests.support.waiting import until

DEPLOY = Path(__file__).parents[2] / "deploy" / "redis"
ADMINISTRATOR = {**os.environ, "REDISCLI_AUTH": "change-this-administrator"}


KEEPER = DEPLOY / "keep-cluster"


def keep(*places: str, replicas: int = 1, **given: str) -> tuple[bool, str]:
    """Whether keep-cluster ended well in some minutes, and what it said."""
    if shutil.which("redis-cli") is None and shutil.which("valkey-cli") is None:
        pytest.skip("there is no redis-cli")
    try:
        done = subprocess.run(
            [KEEPER, str(replicas), *places],
            env={**ADMINISTRATOR, **given},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=float(given.get("WITHIN", 150)),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return False, (error.stdout or b"").decode()
    return done.returncode == 0, done.stdout


def keep_in_vain(*places: str, until_said: str, within: float, **given: Any) -> str:
    """What keep-cluster says that ends in nothing, for longer on a machine that is slow."""
    text = ""
    for seconds in (within, 5 * within):
        well, said = keep(*places, WITHIN=str(seconds), **given)
        assert not well, said
        text += said
        if until_said in said:
            break
    return text


def administrator(port: int, *words: str | int | bytes) -> str:
    """Have a node do something, as `administrator`."""
    url = f"redis://administrator:change-this-administrator@127.0.0.1:{port}/0"
    with redis.Redis.from_url(url, protocol=2, decode_responses=True) as client:
        return str(client.execute_command(*words))


def redis_cli(*words: str) -> str:
    program = shutil.which("redis-cli") or shutil.which("valkey-cli")
    if program is None:
        pytest.skip("there is no redis-cli")
    done = subprocess.run(
        [program, "--user", "administrator", "--cluster", *words, "--cluster-yes"],
        env=ADMINISTRATOR,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[ERR]" not in done.stdout, done.stdout
    return done.stdout


@contextmanager
def nodes(binary: str, count: int, **tls: str) -> Iterator[list[int]]:
    """So many nodes with the configuration and the users of `deploy/redis`; their ports. With
    `tls`, a server's directives, they speak nothing else."""
    with short_folder() as folder, ExitStack() as stack:
        for name in ("redis.conf", "cluster.conf", "replica.conf"):
            text = (DEPLOY / name).read_text("utf-8")
            (folder / name).write_text(text.replace("/etc/lmpool", str(folder)))
        users = [(DEPLOY / name).read_text("utf-8") for name in ("users.acl", "cluster-users.acl")]
        (folder / "users.acl").write_text("".join(users))
        ports: list[int] = []
        started: list[subprocess.Popen[bytes]] = []
        for _ in range(count):
            port = node_port()
            own = folder / str(port)
            own.mkdir()
            way = ["--port", str(port)]
            if tls:
                way = ["--port", "0", "--tls-port", str(port)]
                way += ["--tls-cluster", "yes", "--tls-replication", "yes"]
                for name, value in tls.items():
                    way += ["--" + name.replace("_", "-"), value]
            with (own / "log").open("wb") as log:
                process = subprocess.Popen(
                    [binary, str(folder / "cluster.conf"), *way, "--dir", str(own)],
                    stdout=log,
                    stderr=log,
                )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ports.append(port)
            started.append(process)
        for port, process in zip(ports, started, strict=True):

            def has_begun(port: int = port, process: subprocess.Popen[bytes] = process) -> bool:
                assert process.poll() is None, (folder / str(port) / "log").read_text()
                return listens(port)

            until(has_begun, what=f"a node to listen on {port}", every=0.05)
        yield ports


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


def _has_primaries(url: str, count: int) -> bool:
    """Whether the doctor finds so many: one may be late to answer."""
    return any(f"to {count} primaries" in each.what for each in inspection.diagnose(url))


def test_it_is_formed_and_grown(server_binary: str, pool_name: str) -> None:
    with nodes(server_binary, 7) as ports:
        *first, seventh = places = [f"127.0.0.1:{port}" for port in ports]
        redis_cli("create", *places[:6], "--cluster-replicas", "1")
        url = f"redis+cluster://operator:change-this-operator@{first[0]},{first[1]}/"

        def is_well() -> bool:
            found = inspection.diagnose(url, pool_name)
            return not [each for each in found if each.level == "wrong"]

        until(is_well, what="the replicas to follow", every=0.5)
        redis_cli("add-node", seventh, first[0])
        until(lambda: _all_know(ports), what="all nodes to know it", every=0.2)
        if "valkey" in Path(server_binary).name:
            return  # which moves slots by CLUSTER MIGRATESLOTS: not with this redis-cli
        redis_cli("rebalance", first[0], "--cluster-use-empty-masters")
        until(lambda: _has_primaries(url, 4), what="all four to answer", every=0.5)


def _half_formed(ports: list[int]) -> None:
    """What is left of a `--cluster create` that ended between two primaries' slots."""
    administrator(ports[0], "CLUSTER", "ADDSLOTSRANGE", 0, 5460)
    administrator(ports[1], "CLUSTER", "ADDSLOTSRANGE", 5461, 10922)


def test_forming_that_ended_half_way_begins_again_where_there_is_no_key(
    server_binary: str,
) -> None:
    with nodes(server_binary, 6) as ports:
        places = [f"127.0.0.1:{port}" for port in ports]
        _half_formed(ports)
        well, said = keep(*places)
        assert well, said
        assert "10923 of 16384 slots have a node, and there is no key" in said
        assert _all_know(ports)

        def roles(which: str) -> int:
            said = [administrator(port, "INFO", "replication") for port in ports]
            return sum(which in role for role in said)

        assert roles("'role': 'slave'") == 3
        # Each follows as soon as it has found its primary.
        until(lambda: roles("'connected_slaves': 1") == 3, what="the replicas to follow")


def test_half_a_cluster_with_keys_is_not_formed_and_said_with_a_remedy(
    server_binary: str, tmp_path: Path
) -> None:
    with nodes(server_binary, 3) as ports:
        places = [f"127.0.0.1:{port}" for port in ports]
        _half_formed(ports)
        formed = tmp_path / "formed"
        formed.touch()

        def has_key() -> bool:
            # What DUMP says of "1", at a key of slot 5061 (of the first node).
            value = b"\x00\xc0\x01\x0a\x00\x26\x78\xe7\xb6\xd1\x01\x11\xfc"
            try:
                administrator(ports[0], "RESTORE", "bar", 0, value, "REPLACE")
            except redis.RedisError:
                return False
            return True

        until(has_key, what="a node to serve its slots", every=0.2)
        options: dict[str, Any] = {"replicas": 0, "FORMED": str(formed)}
        said = keep_in_vain(*places, until_said="--cluster fix", within=4, **options)
        assert "10923 of 16384 slots are served, not 10923-16383" in said
        assert "--cluster fix" in said
        assert not formed.exists()
        assert administrator(ports[0], "DBSIZE") == "1"


def test_a_primary_without_a_replica_is_said_with_a_remedy(
    server_binary: str, tmp_path: Path
) -> None:
    with nodes(server_binary, 3) as ports:
        places = [f"127.0.0.1:{port}" for port in ports]
        redis_cli("create", *places)
        until(lambda: _all_know(ports), what="all nodes to know it", every=0.2)
        formed = tmp_path / "formed"
        formed.touch()
        remedy = "--cluster-slave --cluster-master-id"
        said = keep_in_vain(*places, until_said=remedy, within=4, FORMED=str(formed))
        assert "has 0 of 1 replicas: start one more node, then" in said
        assert remedy in said
        assert not formed.exists()
        assert keep(*places, replicas=0, FORMED=str(formed))[0]
        assert formed.exists()


def test_nodes_that_speak_tls_alone_form_a_cluster(server_binary: str, tmp_path: Path) -> None:
    tls = certificates(tmp_path)
    trusted = tls["tls_ca_cert_file"]
    with ExitStack() as stack:
        try:
            ports = stack.enter_context(nodes(server_binary, 3, **tls))
        except AssertionError:
            pytest.skip("this server speaks no TLS")
        places = [f"127.0.0.1:{port}" for port in ports]
        well, said = keep(*places, replicas=0, WITHIN="4")
        assert not well, said
        well, said = keep(*places, replicas=0, REDISCLI_TLS=f"--tls --cacert {trusted}")
        assert well, said
        operator = "rediss+cluster://operator:change-this-operator@"
        url = f"{operator}{places[0]},{places[1]}/?ssl_ca_certs={trusted}"
        until(lambda: _has_primaries(url, 3), what="all three to answer", every=0.5)


def test_nodes_that_forming_left_without_a_part_become_replicas(server_binary: str) -> None:
    with nodes(server_binary, 5) as ports:
        places = [f"127.0.0.1:{port}" for port in ports]
        redis_cli("create", *places[:3])
        until(lambda: _all_know(ports[:3]), what="all nodes to know it", every=0.2)
        lacks = "has 0 of 1 replicas: start one more node"
        said = keep_in_vain(*places, until_said=lacks, within=15)
        assert said.count("which has no slots, becomes a replica of") == 2
        # The third primary still lacks one, and there is no node left.
        assert lacks in said
        roles = [administrator(port, "INFO", "replication") for port in ports]
        assert ["'role': 'slave'" in role for role in roles] == [False] * 3 + [True] * 2
