"""What is counted has one name everywhere."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from lmpool.counters import (
    COUNTERS,
    LABELS,
    METRICS,
    Gateway,
    Metric,
    Pool,
    Worker,
)


def test_names_are_distinct_and_follow_prometheus() -> None:
    assert len({counter.field for counter in COUNTERS}) == len(COUNTERS)
    assert len({counter.metric for counter in COUNTERS}) == len(COUNTERS)
    for counter in COUNTERS:
        assert re.fullmatch(r"lmpool_[a-z_]+_total", counter.metric)
        assert re.fullmatch(r"[A-Z].*\.", counter.meaning)


def test_scripts_count_under_these_names() -> None:
    counted = set()
    for script in (files("lmpool") / "lua").iterdir():
        text = script.read_text("utf-8")
        counted |= set(re.findall(r"'HINCRBY',[^,\n]+,\s*'(\w+)'", text))
    assert counted <= {counter.field for counter in COUNTERS}


def test_each_metric_is_named_once_and_as_prometheus_wants_it() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"lmpool(_[a-z]+)+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert re.fullmatch(r"[A-Z1-9].*\.", metric.meaning)
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert not {*metric.labels} & {*LABELS, "le", "instance", "job"}
        if metric.name.endswith("_seconds") and metric.buckets:
            assert (metric.buckets[0], metric.buckets[-1]) == (0.001, 60.0)


@pytest.mark.parametrize(
    ("source", "start"), [(Worker, "lmpool_worker_"), (Gateway, "lmpool_gateway_")]
)
def test_a_name_says_who_counts(source: type, start: str) -> None:
    for metric in METRICS:
        is_theirs = metric in [each for each in vars(source).values() if isinstance(each, Metric)]
        assert metric.name.startswith(start) == is_theirs


def test_no_label_is_of_a_callers_making() -> None:
    known = {"priority", "want", "reason", "layer", "stage", "route", "status", "by"}
    who = {"worker", "engine", "gpu", "version"}
    for metric in METRICS:
        assert {*metric.labels} <= known | (who if metric is Worker.INFO else set())


def test_what_the_hash_counts_has_the_same_name_as_a_metric() -> None:
    names = {each.name for each in vars(Pool).values() if isinstance(each, Metric)}
    assert {counter.metric for counter in COUNTERS} <= names
