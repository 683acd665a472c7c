"""What is counted has one name everywhere."""

from __future__ import annotations

import re
from importlib.resources import files

from lmpool.counters import COUNTERS


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
