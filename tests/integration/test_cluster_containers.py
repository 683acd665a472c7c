"""Clusters of the chart and of compose, as processes: what their containers run forms one, which
serves a pool to the users that make-secrets made, and comes together again at other addresses."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool import inspection
from lmpool.backends.mock import mock_row
from tests.integration.test_deploy_tools import one, rendered
from tests.support.clients import connected
from tests.support.containers import Containers
from tests.support.deploy import CLUSTER, COMPOSE, DEPLOY, read_yaml
from tests.support.processes import short_folder
from tests.support.waiting import until
from tests.support.workers import in_process_worker

VOCAB = 256
SERVICE = "one-lmpool-server"


def make_secrets(folder: Path, host: str) -> dict[str, str]:
    """The files of passwords of a cluster."""
    script = DEPLOY / "compose" / "make-secrets"
    subprocess.run([script, "--cluster", folder, host], check=True, capture_output=True, timeout=60)
    return {path.name: path.read_text("utf-8") for path in folder.iterdir()}


def of_the_chart(folder: Path, binary: str) -> tuple[Containers, dict[str, str]]:
    """The chart's pods, and the Secret that they are given."""
    secret = make_secrets(folder / "secrets", SERVICE)
    pods = one("cluster", "StatefulSet")["spec"]
    keeper = one("cluster", "Deployment", "-keeper")["spec"]["template"]["spec"]["containers"][0]
    (server,) = pods["template"]["spec"]["containers"]
    config: dict[str, Any] = one("cluster", "ConfigMap", "-server")["data"]
    projected = next(v for v in pods["template"]["spec"]["volumes"] if v["name"] == "config")
    sources = projected["projected"]["sources"]
    given = {item["key"] for source in sources for it in source.values() for item in it["items"]}
    files = {name: text for name, text in {**config, **secret}.items() if name in given}
    nodes: dict[str, list[str]] = {}
    for number in range(pods["replicas"]):
        command = [word.replace("$(POD)", f"{SERVICE}-{number}") for word in server["command"]]
        nodes[command[command.index("--cluster-announce-hostname") + 1]] = command
    assert set(keeper["command"][3:]) == {f"{name}:6379" for name in nodes}
    (auth,) = [each for each in keeper["env"] if each["name"] == "REDISCLI_AUTH"]
    password = secret[auth["valueFrom"]["secretKeyRef"]["key"]]
    files["keep-cluster"] = config["keep-cluster"]
    made = Containers(folder, binary, nodes, keeper["command"], files, "/data", password)
    # The service of that name leads to any of them.
    first = next(iter(nodes))
    urls = {name: url.replace(SERVICE, first) for name, url in secret.items() if "-url" in name}
    return made, urls


def of_compose(folder: Path, binary: str, *directives: str) -> tuple[Containers, dict[str, str]]:
    """The services of compose with `cluster.yaml`, and their URLs; nodes have these, too."""
    services = read_yaml(CLUSTER)["services"]
    secret = make_secrets(folder / "secrets", "server,server-2,server-3")
    nodes = {
        name: [
            *(re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in service["command"]),
            *directives,
        ]
        for name, service in services.items()
        if name.startswith("server")
    }
    files = {name: secret[name] for name in ("users.acl", "replica.conf")}
    for service in services.values():
        for volume in service.get("volumes", ()):
            source, target, *_ = volume.split(":")
            if target.startswith("/etc/lmpool/"):
                files[Path(target).name] = (COMPOSE.parent / source).read_text("utf-8")
    password = secret["administrator.env"].strip().removeprefix("REDISCLI_AUTH=")
    keeper = services["keeper"]["command"]
    made = Containers(folder, binary, nodes, keeper, files, "/nodes", password)
    return made, {name: url for name, url in secret.items() if "-url" in name}


def assert_serves(containers: Containers, urls: dict[str, str], pool: str) -> None:
    """As `worker` and `producer`, prompts of all shards; and `operator` finds nothing wrong."""
    worker, producer, operator = (
        containers.here(urls[f"{name}-url"]) for name in ("worker", "producer", "operator")
    )
    prompts = [[i % VOCAB, i // VOCAB] for i in range(600)]
    with in_process_worker(worker, pool), connected(producer, pool, cache_bytes=0) as lm:
        assert lm.info.shards == 6
        rows = lm.batch_next_token_logprobs_sync(prompts, timeout=60)
        for prompt, row in zip(prompts, rows, strict=True):
            np.testing.assert_allclose(row, mock_row(prompt, VOCAB), atol=1e-5)

        def complaints() -> list[str]:
            found = inspection.diagnose(operator, pool)
            texts = [each.what for each in found]
            if not any("to 3 primaries" in text for text in texts):
                return texts  # one was late to answer
            return [each.what for each in found if each.level == "wrong" or "replica" in each.what]

        until(
            lambda: complaints() == ["each primary has a replica in sync"],
            what="the replicas to follow",
            every=0.5,
        )


PROBE = ["sh", "/etc/lmpool/node-ready", "127.0.0.1:6379"]
"""That of the chart's nodes."""
CLI = shutil.which("redis-cli") or shutil.which("valkey-cli")


def asking(words: str) -> list[str]:
    """What asks a node, as `administrator`."""
    command = f"{CLI} --user administrator -h ${{0%:*}} -p ${{0#*:}} {words}"
    return ["sh", "-c", command, PROBE[-1]]


@contextmanager
def formed(binary: str, *directives: str) -> Iterator[tuple[Containers, Callable[[str], str]]]:
    """A cluster of compose, all of whose nodes may be relied on; and what a node is, ``primary`` or
    ``replica``, or why it may not."""
    if CLI is None:
        pytest.skip("there is no redis-cli")
    with short_folder() as folder:
        containers, _ = of_compose(folder, binary, *directives)

        def role(name: str) -> str:
            done = containers.probe(name, PROBE)
            if done.returncode:
                return done.stderr.partition(": ")[2].strip()
            info = containers.probe(name, asking("info")).stdout
            return {"master": "primary", "slave": "replica"}[re.findall(r"role:(\w+)", info)[0]]

        with containers:
            shutil.copy(DEPLOY / "redis" / "node-ready", folder / "etc")
            all_well(containers, role)
            try:
                yield containers, role
            except AssertionError as error:
                raise AssertionError(f"{error}: {containers.said}") from None


def all_well(containers: Containers, role: Callable[[str], str]) -> None:
    """Wait for three primaries, each with its replica."""
    wanted = ["primary"] * 3 + ["replica"] * 3
    until(lambda: sorted(map(role, containers.addresses)) == wanted, what="all to be ready")


@pytest.mark.parametrize("which", ["replica", "primary"])
def test_a_node_that_lost_its_disk_becomes_a_replica(which: str, server_binary: str) -> None:
    with formed(server_binary) as (containers, role):
        lost = next(name for name in containers.addresses if role(name) == which)
        containers.end(lost)
        until(lambda: not containers.formed.exists(), what="the keeper to miss it")
        containers.begin(lost, blank=True)
        # Unless it was mended in the meantime, which is said before it is done.
        is_ready = role(lost) in ("primary", "replica")
        assert not is_ready or "which has no slots, becomes a replica of" in containers.said
        until(containers.formed.exists, what="it to be mended")
        all_well(containers, role)
        assert role(lost) == "replica"
        assert "which has no slots, becomes a replica of" in containers.said
        assert containers.said.count("forming a cluster") == 1


def test_a_node_without_its_primary_is_relied_on_when_it_has_its_place(server_binary: str) -> None:
    # None takes its place before it was seen without, as each look takes a while.
    alone = ("--cluster-replica-no-failover", "yes")
    with formed(server_binary, *alone) as (containers, role):
        lost = next(name for name in containers.addresses if role(name) == "primary")
        followed = f"master_host:{containers.addresses[lost]}"
        # Another may lose sight of its primary for a moment.
        heir = next(
            name
            for name in containers.addresses
            if followed in containers.probe(name, asking("info")).stdout.splitlines()
        )
        containers.end(lost)
        lacks = "it has not copied its primary's rows yet"
        until(lambda: role(heir) == lacks, what="it to be missed")

        def has_its_place() -> bool:
            containers.probe(heir, asking("cluster failover force"))  # tried for some seconds
            return role(heir) == "primary"

        until(has_its_place, what="another primary", every=1.0)
        assert role(lost) == "it loads, does not answer, or refuses administrator"


@pytest.mark.parametrize("of", [of_the_chart, of_compose], ids=["chart", "compose"])
def test_containers_form_a_cluster_that_serves(of: Any, server_binary: str, pool_name: str) -> None:
    if CLI is None:
        pytest.skip("there is no redis-cli")
    if of is of_the_chart:
        rendered("cluster")  # skips where there is no Helm
    with short_folder() as folder:
        containers, urls = of(folder, server_binary)
        with containers:
            assert_serves(containers, urls, pool_name)
            before = containers.addresses
            containers.move()
            assert not set(before.values()) & set(containers.addresses.values())
            assert_serves(containers, urls, pool_name)
            assert containers.said.count("forming a cluster") == 1, containers.said
