"""What the page for operators says is what they meet: the alerts."""

from __future__ import annotations

import inspect
import re

import yaml

from tests.support.markdown import ROOT
from tests.support.readme import OPERATING

TEXT = OPERATING.read_text("utf-8")
RULES = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text("utf-8"))
ALERTS = [rule["alert"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
SECTIONS = dict(re.findall(r"^### (Lmpool\w+)\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL))


def test_each_alert_has_its_section_and_each_section_an_alert() -> None:
    assert len(ALERTS) > 10
    assert list(SECTIONS) == ALERTS


def test_each_section_says_what_it_means_where_to_look_and_what_to_do() -> None:
    for name, text in SECTIONS.items():
        said = re.findall(r"^\*\*(\w+)\.\*\* \S", text, re.MULTILINE)
        assert said == ["Means", "Look", "Do"], name


def test_the_exporters_port_is_the_one_that_it_takes() -> None:
    from lmpool.cli.exporter import exporter

    port = inspect.signature(exporter).parameters["port"].default
    assert f"127.0.0.1:{port} " in TEXT
    assert f"| {port} | `lmpool exporter` |" in (ROOT / "docs" / "security.md").read_text("utf-8")


def test_metrics_that_sections_name_are_there() -> None:
    table = set(re.findall(r"^\| `(lmpool_\w+)` \|", TEXT, re.MULTILINE))
    named = set(re.findall(r"`(lmpool_\w+)`", "".join(SECTIONS.values())))
    assert named - table - {"lmpool_worker_", "lmpool_gateway_"} == set()
