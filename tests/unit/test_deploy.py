"""What deploy/ says of lmpool is so: settings, times, users, files, extras."""

from __future__ import annotations

import json
import logging.config
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from lmpool.address import Cluster
from lmpool.cli import app
from lmpool.cluster_diagnosis import SLOW_FAILOVER
from lmpool.config_file import ConfigFile
from lmpool.server_url import check_url
from lmpool.settings import (
    ClientOptions,
    GatewaySettings,
    WorkerOptions,
    refuse_unknown_variables,
    settings_of,
)
from lmpool.worker.launcher import MARGIN
from tests.support.deploy import CHART, CLUSTER, COMPOSE, DEPLOY, ROOT, UNITS, read_yaml
from tests.support.workers import clean_environment

DRAINS = WorkerOptions.model_fields["drain_timeout"].default + MARGIN
"""Seconds that a worker which is told to stop may take."""
CONTAINERS = sorted((DEPLOY / "containers").glob("*.Containerfile"))
OUTSIDE = {"LMPOOL_SERVER_PORT"}
"""What Kubernetes would set: the chart's notes warn of it."""


def texts() -> Iterator[tuple[Path, str]]:
    for path in sorted(DEPLOY.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path, path.read_text("utf-8")


def test_every_variable_is_a_setting() -> None:
    for path, text in texts():
        names = set(re.findall(r"\bLMPOOL_[A-Z_]*[A-Z]\b", text)) - OUTSIDE
        try:
            refuse_unknown_variables(names)
        except Exception as error:
            pytest.fail(f"{path}: {error}")


def test_no_file_has_a_password() -> None:
    for path, text in texts():
        for secret in re.findall(r"redis://\w+:([^@\s'\"]+)@", text):
            assert re.fullmatch(r"change-this-\w+|PASSWORD|password|%s", secret), path


def test_every_link_leads_somewhere() -> None:
    links = [path for path in DEPLOY.rglob("*") if path.is_symlink()]
    assert len(links) == 6
    for link in links:
        assert not os.readlink(link).startswith("/")
        assert link.is_file()


# --- containers --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.stem)
def test_an_image_runs_as_nobody_and_says_how_it_is(path: Path) -> None:
    lines = path.read_text("utf-8").replace("\\\n", " ").splitlines()
    words = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    last = {word: rest for word, _, rest in words}
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", last["USER"].strip())
    assert '"http://' not in last["HEALTHCHECK"]
    assert "/health'" in last["HEALTHCHECK"]
    # Process 1 is lmpool, or tini, which hands signals on; a shell would keep them to itself.
    entry = json.loads(last["ENTRYPOINT"])
    assert entry in (["lmpool"], ["tini", "--", "lmpool"])
    assert last["STOPSIGNAL"].strip() == "SIGTERM"
    bases = [rest.partition("=")[2] for word, _, rest in words if word == "ARG"]
    assert [base for base in bases if "/" in base and re.search(r":\d+\.\d+", base)]


def test_images_install_extras_that_there_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    worker, gateway = (DEPLOY / "containers" / f"{n}.Containerfile" for n in ("worker", "gateway"))
    (asked,) = re.findall(r'"\.\[([\w,]+)\]"', gateway.read_text("utf-8"))
    assert set(asked.split(",")) <= extras
    text = worker.read_text("utf-8")
    (engines,) = re.findall(r"^# ENGINE: (.+?)\.", text, re.MULTILINE)
    assert set(re.split(r", | or ", engines)) - {"mock"} <= extras
    assert {"worker", "otel"} <= extras
    assert "torch" not in " ".join(project["optional-dependencies"]["gateway"])


def test_what_images_are_built_from_is_let_in() -> None:
    ignored, *let_in = [
        line
        for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines()
        if line and not line.startswith(("#", "**"))
    ]
    assert ignored == "*"
    names = {line.removeprefix("!") for line in let_in}
    linked = {path.resolve().name for path in (ROOT / "lmpool").iterdir() if path.is_symlink()}
    assert linked
    assert names == {"lmpool", *linked, "pyproject.toml", "README.md", "LICENSE"}
    assert all((ROOT / name).exists() for name in names)


# --- compose -----------------------------------------------------------------------------------


def test_compose_names_files_that_are_there() -> None:
    document = read_yaml(COMPOSE)
    for name, service in document["services"].items():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (COMPOSE.parent / source).exists(), (name, source)
            else:
                assert source in document["volumes"], (name, source)
        build = service.get("build")
        if build is not None:
            assert (COMPOSE.parent / build["context"] / build["dockerfile"]).is_file()
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), (name, port)
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert name == "server" or "LMPOOL_URL" not in service.get("environment", {})


def test_compose_waits_for_a_worker_that_drains() -> None:
    services = read_yaml(COMPOSE)["services"]
    assert int(services["worker"]["stop_grace_period"].removesuffix("s")) > DRAINS


def test_engines_may_load_what_they_compile() -> None:
    mounts = read_yaml(COMPOSE)["services"]["worker"]["tmpfs"]
    assert {mount.partition(":")[0] for mount in mounts} == {"/tmp", "/home/lmpool"}
    assert all("exec" in mount.partition(":")[2].split(",") for mount in mounts)


def test_the_server_of_compose_is_in_no_network_that_leads_outside() -> None:
    document = read_yaml(COMPOSE)
    assert document["services"]["server"]["networks"] == ["pool"]
    assert document["networks"]["pool"] == {"internal": True}
    assert "ports" not in document["services"]["server"]


def test_a_cluster_of_compose_has_the_nodes_that_its_keeper_forms() -> None:
    base, document = read_yaml(COMPOSE), read_yaml(CLUSTER)
    services = document["services"]
    nodes = {name: it for name, it in services.items() if name.startswith("server")}
    assert services["keeper"]["command"][3:] == [f"{name}:6379" for name in nodes]
    kept = set()
    for name, service in nodes.items():
        merged = {**base["services"].get(name, {}), **service}
        assert merged["image"] == base["services"]["server"]["image"]
        assert merged["networks"] == ["pool"]
        assert merged["read_only"]
        assert merged["cap_drop"] == ["ALL"]
        assert "ports" not in merged
        words = merged["command"]
        assert words[words.index("--cluster-announce-hostname") + 1] == name
        folder = words[words.index("--dir") + 1]
        (own,) = (v for v in merged["volumes"] if v.endswith(f":{folder}"))
        kept.add(own.partition(":")[0])
        for volume in merged["volumes"]:
            source = volume.partition(":")[0]
            assert source.startswith("./nodes/") or (COMPOSE.parent / source).is_file(), volume
    assert kept == {f"./nodes/{number}" for number in range(1, 7)}
    for name in ("worker", "gateway", "exporter"):
        assert services[name]["depends_on"] == {"keeper": {"condition": "service_healthy"}}
    made = set(document["secrets"]) | set(base["secrets"])
    for service in nodes.values():
        assert {secret["source"] for secret in service["secrets"]} <= made


def test_prometheus_asks_the_services_of_compose() -> None:
    services = read_yaml(COMPOSE)["services"]
    config = read_yaml(DEPLOY / "prometheus" / "prometheus.yml")
    hosts = {}
    for job in config["scrape_configs"]:
        for found in job.get("dns_sd_configs", ()):
            hosts |= dict.fromkeys(found["names"], found["port"])
        for found in job.get("static_configs", ()):
            hosts |= {t.partition(":")[0]: int(t.partition(":")[2]) for t in found["targets"]}
    del hosts["localhost"]
    assert set(hosts) <= set(services)
    container = (DEPLOY / "containers" / "worker.Containerfile").read_text("utf-8")
    assert f"LMPOOL_METRICS_PORT={hosts['worker']}" in container
    assert hosts["gateway"] == GatewaySettings.model_fields["port"].default


# --- passwords ---------------------------------------------------------------------------------


def make_secrets(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = DEPLOY / "compose" / "make-secrets"
    return subprocess.run([script, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("given", "status"),
    [(["-h"], 0), (["--help"], 0), (["--nope"], 2), (["secrets", "--cluster"], 2), (["a"] * 3, 2)],
)
def test_make_secrets_says_how_it_is_used_and_writes_nothing(
    given: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = make_secrets(*given)
    assert done.returncode == status
    assert "usage: make-secrets [--cluster] [DIR" in (done.stderr if status else done.stdout)
    assert not any(tmp_path.iterdir())


def test_passwords_are_made_for_every_user_and_read_by_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    assert make_secrets(str(folder), "redis.example").returncode == 0
    users = (folder / "users.acl").read_text("utf-8")
    assert "change-this" not in users
    passwords = dict(re.findall(r"^user (\w+) on >([0-9a-f]{48}) ", users, re.MULTILINE))
    assert set(passwords) == {"producer", "worker", "exporter", "operator"}
    assert len(set(passwords.values())) == 4
    for name, password in passwords.items():
        url = (folder / f"{name}-url").read_text("utf-8")
        assert check_url(url) == url
        parts = urlsplit(url)
        assert (parts.username, parts.password) == (name, password)
        assert (parts.hostname, parts.port) == ("redis.example", 6379)
        assert (folder / f"{name}.env").read_text("utf-8") == f"LMPOOL_URL={url}\n"
    assert (folder / "exporter-password").read_text("utf-8") == passwords["exporter"]
    for path in (folder, *folder.iterdir()):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize(
    ("arguments", "hosts"),
    [
        (["DIR", "node-1,node-2:7000"], (("node-1", 6379), ("node-2", 7000))),
        (["--cluster", "DIR", "nodes.example"], (("nodes.example", 6379),)),
    ],
)
def test_of_a_cluster_two_users_more_have_passwords(
    arguments: list[str], hosts: tuple[tuple[str, int], ...], tmp_path: Path
) -> None:
    folder = tmp_path / "secrets"
    given = [str(folder) if word == "DIR" else word for word in arguments]
    assert make_secrets(*given).returncode == 0
    users = (folder / "users.acl").read_text("utf-8")
    assert "change-this" not in users
    passwords = dict(re.findall(r"^user (\w+) on >([0-9a-f]{48}) ", users, re.MULTILINE))
    asking = ["producer", "worker", "exporter", "operator"]
    assert list(passwords) == [*asking, "replica", "administrator"]
    assert len(set(passwords.values())) == 6
    for name in asking:
        url = (folder / f"{name}-url").read_text("utf-8")
        assert check_url(url) == url
        cluster = Cluster.parse(url)
        assert cluster.hosts == hosts
        assert cluster.options["username"] == name
        assert (folder / f"{name}.env").read_text("utf-8") == f"LMPOOL_URL={url}\n"
    replica = (folder / "replica.conf").read_text("utf-8")
    assert replica.endswith(f"masteruser replica\nmasterauth {passwords['replica']}\n")
    assert (folder / "administrator-password").read_text("utf-8") == passwords["administrator"]
    auth = (folder / "administrator.env").read_text("utf-8")
    assert auth == f"REDISCLI_AUTH={passwords['administrator']}\n"
    for path in (folder, *folder.iterdir()):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_node_of_a_cluster_has_what_one_server_has_and_what_the_doctor_asks_for() -> None:
    text = (DEPLOY / "redis" / "cluster.conf").read_text("utf-8")
    found = dict(line.split(" ", 1) for line in text.splitlines() if line and line[0] != "#")
    assert re.findall(r"^include (.+)$", text, re.MULTILINE) == [
        "/etc/lmpool/redis.conf",
        "/etc/lmpool/replica.conf",
    ]
    assert found["cluster-require-full-coverage"] == "no"
    assert 1000 <= int(found["cluster-node-timeout"]) <= 1000 * SLOW_FAILOVER
    users = (DEPLOY / "redis" / "cluster-users.acl").read_text("utf-8")
    login = (DEPLOY / "redis" / "replica.conf").read_text("utf-8").splitlines()
    said = dict(line.split(" ", 1) for line in login if line[0] != "#")
    assert users.startswith(f"user {said['masteruser']} on >{said['masterauth']} ")


def test_passwords_that_are_there_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    make_secrets(str(folder))
    before = (folder / "users.acl").read_bytes()
    again = make_secrets(str(folder))
    assert again.returncode == 1
    assert "is there already" in again.stderr
    assert (folder / "users.acl").read_bytes() == before


def test_the_chart_asks_for_keys_that_are_made(tmp_path: Path) -> None:
    make_secrets("--cluster", str(tmp_path / "secrets"), "server")
    made = {path.name for path in (tmp_path / "secrets").iterdir()}
    templates = "".join(path.read_text("utf-8") for path in (CHART / "templates").iterdir())
    asked = set(re.findall(r"\bkey: ([\w.-]+)(?![\w./-])", templates))
    asked |= set(re.findall(r'"lmpool\.url" \(list \S+ "([\w-]+)"\)', templates))
    assert {"worker-url", "producer-url", "exporter-url"} <= asked
    from_files = {"redis.conf", "cluster.conf", "keep-cluster", "node-ready"}
    assert asked - made == {"hf-token"} | from_files
    values = (CHART / "values.yaml").read_text("utf-8")
    assert all(f"#   {key} " in values for key in asked - from_files)


# --- systemd -----------------------------------------------------------------------------------


def unit(path: Path) -> dict[str, list[str]]:
    """Its settings, of all sections: none of their names is in two of them."""
    found: dict[str, list[str]] = {}
    for line in path.read_text("utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def started_by(path: Path) -> list[str]:
    """What the first instance of a unit runs, without the program's name."""
    (started,) = unit(path)["ExecStart"]
    return started.replace("%I", "0").split()[1:]


def down_after(path: Path) -> int:
    """The exit status after which a unit stays down."""
    (status,) = unit(path)["RestartPreventExitStatus"]
    return int(status)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("name", "value"),
    [("LMPOOL_POLO", "x"), ("LMPOOL_POOL", "a b"), ("LMPOOL_CONFIG", "/no/such/file.toml")],
)
def test_a_unit_stays_down_where_its_settings_are_refused(
    path: Path, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.config, "dictConfig", lambda _: None)  # that of the tests stays
    cleared = {other: None for other in os.environ if other.startswith("LMPOOL_")}
    refused = CliRunner(env={**cleared, name: value}).invoke(app, started_by(path))
    assert refused.exit_code == down_after(path), refused.output
    assert refused.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("name", "host", "comes_back"),
    [
        ("gateway", "127.0.0.1", True),  # whose port is taken
        ("exporter", "127.0.0.1", True),
        ("exporter", "192.0.2.1", True),  # which is nobody's
        ("gateway", "no such host", False),
        ("exporter", "no such host", False),
    ],
)
def test_a_unit_comes_back_where_its_address_may_be_free_later(
    name: str, host: str, comes_back: bool
) -> None:
    path = DEPLOY / "systemd" / f"lmpool-{name}.service"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            [sys.executable, "-m", "lmpool", *started_by(path), "--host", host, "--port", port],
            env=clean_environment(), stderr=subprocess.PIPE, text=True, timeout=150, check=False,
        )  # fmt: skip
    assert "cannot listen there" in ended.stderr
    assert ended.returncode != 0
    assert (ended.returncode != down_after(path)) == comes_back


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_hides_its_settings(path: Path) -> None:
    settings = unit(path)
    assert settings["NoNewPrivileges"] == ["yes"]
    credentials = dict(text.split(":", 1) for text in settings["LoadCredential"])
    example = DEPLOY / "systemd" / Path(credentials["lmpool.toml"]).name
    assert example.is_file()
    assert any("LMPOOL_CONFIG=%d/lmpool.toml" in text for text in settings["Environment"])


def test_a_worker_has_time_to_drain_and_its_engine_is_not_ended_under_it() -> None:
    settings = unit(DEPLOY / "systemd" / "lmpool-worker@.service")
    assert int(settings["TimeoutStopSec"][0]) > DRAINS
    assert settings["KillMode"] == ["mixed"]


@pytest.mark.parametrize("name", ["worker", "gateway", "exporter"])
def test_the_examples_of_settings_are_taken(name: str) -> None:
    path = DEPLOY / "systemd" / f"{name}.toml"
    file = ConfigFile(path, tomllib.loads(path.read_text("utf-8")))
    kinds: dict[str, tuple[type[Any], ...]] = {
        "worker": (WorkerOptions,),
        "gateway": (ClientOptions, GatewaySettings),
        "exporter": (ClientOptions,),
    }
    for kind in kinds[name]:
        kind(**settings_of(file, kind))
