"""What deploy/ asks of metrics, and what of it can be read without the tools that run it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from lmpool.counters import LABELS, METRICS

ROOT: Final = Path(__file__).resolve().parents[2]
DEPLOY: Final = ROOT / "deploy"
CHART: Final = DEPLOY / "helm" / "lmpool"
ALERTS: Final = DEPLOY / "prometheus" / "alerts.yml"
ALERT_TESTS: Final = DEPLOY / "prometheus" / "alerts.test.yml"
DASHBOARD: Final = DEPLOY / "grafana" / "dashboards" / "lmpool.json"
COMPOSE: Final = DEPLOY / "compose" / "compose.yaml"
CLUSTER: Final = DEPLOY / "compose" / "cluster.yaml"
UNITS: Final = tuple(sorted((DEPLOY / "systemd").glob("*.service")))

OF_TARGETS: Final = frozenset({"instance", "job", "namespace"})
"""Labels that Prometheus itself gives, from where it found a process."""

_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_NAME: Final = re.compile(r"\blmpool_\w+")
_SELECTOR: Final = re.compile(r"\b(lmpool_\w+)\s*\{([^}]*)\}")
_GROUPING: Final = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_LABEL: Final = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_SHOWN: Final = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def alerts() -> list[dict[str, Any]]:
    return [rule for group in read_yaml(ALERTS)["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """Those of the dashboard, but for its rows."""
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def scaled_by() -> list[str]:
    """The queries of the chart's ScaledObject, as its template has them."""
    text = (CHART / "templates" / "scaledobject.yaml").read_text("utf-8")
    return [
        query.replace("{{ $.Values.pool | quote }}", '"default"').replace(
            "{{ $.Release.Namespace }}", "models"
        )
        for query in re.findall(r"^\s+query: (.+)$", text, re.MULTILINE)
    ]


def expressions() -> Iterator[tuple[str, str]]:
    """Where metrics are asked for, and by which expression; Grafana's variables filled in."""
    for alert in alerts():
        yield f"alert {alert['alert']}", alert["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield f"panel {panel['title']}, {target['refId']}", filled_in(target["expr"])
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
            assert found is not None
            yield f"variable {variable['name']}", filled_in(f"count by ({found[2]}) ({found[1]})")
    for query in scaled_by():
        yield "ScaledObject", query


def filled_in(expression: str) -> str:
    return re.sub(r"\$\w+", ".*", expression.replace("$__rate_interval", "5m"))


def labels_of(name: str) -> frozenset[str] | None:
    """The labels of a series, those of its target aside; None where there is no such series."""
    for metric in METRICS:
        own = frozenset((*LABELS, *metric.labels))
        if metric.kind != "histogram":
            if name == metric.name:
                return own
        elif name in (f"{metric.name}_sum", f"{metric.name}_count"):
            return own
        elif name == f"{metric.name}_bucket":
            return own | {"le"}
    return None


def problems(expression: str) -> list[str]:
    """What `expression` asks for and nobody has: series, and labels of them."""
    found, bare = [], _STRING.sub('""', expression)
    known = set(OF_TARGETS)
    for name in _NAME.findall(bare):
        labels = labels_of(name)
        if labels is None:
            found.append(f"there is no {name}")
        else:
            known |= labels
    for name, selector in _SELECTOR.findall(bare):
        found += [
            f"{name} has no label {label}"
            for label in _LABEL.findall(selector)
            if label not in (labels_of(name) or ()) and label not in OF_TARGETS
        ]
    for grouping in _GROUPING.findall(bare):
        found += [
            f"nothing there has a label {label}"
            for label in re.findall(r"\w+", grouping)
            if label not in known
        ]
    return found


def shown_labels(text: str) -> set[str]:
    """The labels whose values a legend, or an alert's text, shows."""
    return set(_SHOWN.findall(text))


def kept_labels(expression: str) -> set[str]:
    """The labels that what an expression finds still has."""
    bare = _STRING.sub('""', expression)
    outermost = re.match(r"(?:[a-z_]+\([^a-z]*)?\s*(?:sum|max|count)(?: by \(([^)]*)\))?", bare)
    if outermost is not None:
        return set(re.findall(r"\w+", outermost[1] or "")) - {"le"}
    names = _NAME.findall(bare)
    return set(OF_TARGETS).union(*(labels_of(name) or () for name in names))
