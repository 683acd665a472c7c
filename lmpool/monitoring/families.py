"""From what was counted to what Prometheus is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from lmpool.counters import Metric
from lmpool.monitoring.spread import Spread

Shown = float | Spread | Mapping[Any, float] | Mapping[Any, Spread]
"""A value, or by the value of the one label, or by those of all labels."""


def family(metric: Metric, common: Mapping[str, str], values: Shown) -> Family:
    """A metric with its values: one, or by the value of its label, or by those of its labels."""
    names = [*common, *metric.labels]
    shared = tuple(common.values())
    by_label = values if isinstance(values, Mapping) else {(): values}
    if metric.kind == "histogram":
        spreads = HistogramMetricFamily(metric.name, metric.meaning, labels=names)
        for label, spread in by_label.items():
            assert isinstance(spread, Spread)
            spreads.add_metric(
                [*shared, *_tuple(label)], spread.cumulated(), sum_value=spread.total
            )
        return spreads
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    found = kind(metric.name, metric.meaning, labels=names)
    for label, value in by_label.items():
        assert not isinstance(value, Spread)
        found.add_metric([*shared, *_tuple(label)], float(value))
    return found


def _tuple(label: object) -> Sequence[str]:
    return label if isinstance(label, tuple) else (str(label),)


def merged(families: Iterable[Family]) -> list[Family]:
    """The same, those of one name as one."""
    found: dict[str, Family] = {}
    for each in families:
        known = found.setdefault(each.name, each)
        if known is not each:
            known.samples.extend(each.samples)
    return [*found.values()]


def registry(*collectors: Collector) -> CollectorRegistry:
    """Those, and what Prometheus' client says of the process."""
    made = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        made.register(collector)
    ProcessCollector(registry=made)
    PlatformCollector(registry=made)
    GCCollector(registry=made)
    return made
