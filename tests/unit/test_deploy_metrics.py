"""Dashboard, alerts and autoscaling ask for metrics that there are, by labels that these have."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.deploy import (
    ALERT_TESTS,
    DASHBOARD,
    ROOT,
    alerts,
    expressions,
    kept_labels,
    panels,
    problems,
    read_yaml,
    scaled_by,
    shown_labels,
)


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_names_and_labels_are_there(where: str, expression: str) -> None:
    assert not problems(expression)


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("sum(lmpool_backlog)", ["there is no lmpool_backlog"]),
        ("lmpool_worker_batch_prompts", ["there is no lmpool_worker_batch_prompts"]),
        ("lmpool_up_total", ["there is no lmpool_up_total"]),
        ('lmpool_up{priority="batch"}', ["lmpool_up has no label priority"]),
        ("max by (lane) (lmpool_up)", ["nothing there has a label lane"]),
        ('max by (pool) (lmpool_up{instance="a", pool="lmpool_x"})', []),
        ("sum by (le) (rate(lmpool_worker_batch_prompts_bucket[5m]))", []),
    ],
)
def test_names_and_labels_that_are_not_there_are_found(expression: str, found: list[str]) -> None:
    assert problems(expression) == found


def test_pools_of_one_name_in_two_namespaces_are_two() -> None:
    for where, text in expressions():
        if where.startswith(("alert", "panel")):
            for labels in re.findall(r"(?:by|on) \((.*?)\)", text):
                assert "namespace" in labels or "pool" not in labels, (where, text)
        if not where.startswith("alert") and where != "variable namespace":
            chosen = re.findall(r"lmpool_\w+(\{[^}]*\})?", text)
            assert all("namespace=~" in labels for labels in chosen), (where, text)


def test_more_may_be_computed_than_prompts_have_and_no_less_than_nothing_is_kept() -> None:
    shares = [text for _, text in expressions() if "computed_tokens" in text and "prompt_" in text]
    assert shares
    assert all(re.fullmatch(r"clamp_min\(1 - .*, 0\)", text) for text in shares)


def test_the_backlog_is_what_scales_and_never_a_lag() -> None:
    queries = scaled_by()
    assert queries
    assert all("lmpool_backlog_jobs" in query for query in queries)
    template = ROOT / "deploy" / "helm" / "lmpool" / "templates" / "scaledobject.yaml"
    asked = re.sub(r"#.*", "", template.read_text("utf-8"))
    # Either makes KEDA ask for something else than XLEN.
    for name in ("lagCount", "consumerGroup", "pendingEntriesCount"):
        assert name not in asked
    assert "streamLength" in asked


# --- alerts ------------------------------------------------------------------------------------

each_alert = pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])


@each_alert
def test_an_alert_says_what_is_wrong_and_where_to_read_on(alert: dict) -> None:  # type: ignore[type-arg]
    assert alert["labels"]["severity"] in ("critical", "warning")
    texts = alert["annotations"]
    assert texts["summary"]
    assert texts["description"].endswith(".")
    name = alert["alert"]
    assert texts["runbook_url"] == (
        f"https://github.com/lmpool/lmpool/blob/main/docs/operating.md#{name.lower()}"
    )
    assert f"### {name}\n" in (ROOT / "docs" / "operating.md").read_text("utf-8")
    shown = shown_labels(texts["summary"]) | shown_labels(texts["description"])
    assert shown <= kept_labels(alert["expr"])


@each_alert
def test_an_alert_is_tested_to_fire_and_not_to(alert: dict) -> None:  # type: ignore[type-arg]
    name = alert["alert"]
    calm, *tests = read_yaml(ALERT_TESTS)["tests"]
    asked = {
        bool(check["exp_samples"])
        for test in tests
        for check in test["promql_expr_test"]
        if f'alertname="{name}"' in check["expr"]
    }
    assert asked == {True, False}
    # Each of its series is there while all is well, too: see test rules.
    series = re.findall(r"lmpool_\w+", alert["expr"])
    there = " ".join(series["series"] for series in calm["input_series"])
    assert all(name in there for name in series)


# --- dashboard ---------------------------------------------------------------------------------


def test_panels_are_whole() -> None:
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert dashboard["id"] is None, "of one Grafana alone"
    assert {row["title"] for row in dashboard["panels"] if row["type"] == "row"} == {
        "Pool",
        "Server",
        "Workers",
        "Gateway",
    }
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["targets"]
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        if panel["type"] in ("stat", "timeseries"):
            assert panel["fieldConfig"]["defaults"]["unit"]
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    text = json.dumps(dashboard["panels"])
    assert set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval"} <= variables
    assert variables == {"datasource", "namespace", "pool", "instance", "gateway"}


def test_panels_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_legends_show_labels_that_are_left() -> None:
    for panel in panels():
        for target in panel["targets"]:
            shown = shown_labels(target["legendFormat"]) - {"le"}
            wrong = shown - kept_labels(target["expr"])
            assert not wrong, (panel["title"], target["expr"])
