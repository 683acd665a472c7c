"""Parts of documents that come from the code. `python -m tests.support.readme` writes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from pydantic import ByteSize

from lmpool.counters import LABELS, METRICS
from lmpool.settings import (
    GATEWAY_PREFIX,
    PREFIX,
    ClientOptions,
    GatewaySettings,
    WorkerOptions,
)
from tests.support.figures import (
    comparison_figures,
    engine_figures,
    readme_figures,
    smaller_figures,
    vllm_figures,
)
from tests.support.performance import gpu_table, measures_table
from tests.support.scale import scale_table

README = Path(__file__).parents[2] / "README.md"
COMPARISON, ENGINES, GATEWAY, OPERATING, PERFORMANCE, SCALE, SETTINGS = (
    README.parent / "docs" / f"{name}.md"
    for name in (
        *("comparison", "engines", "gateway", "operating"),
        *("performance", "scale", "settings"),
    )
)


def settings_table() -> str:
    """Every setting: its variable, its default, who reads it, and what it is."""
    lines = ["| variable | default | of | what |", "|---|---|---|---|"]
    fields: dict[str, tuple[Any, list[str]]] = {}
    for who, options in (("client", ClientOptions), ("worker", WorkerOptions)):
        for name, field in options.model_fields.items():
            fields.setdefault(name, (field, []))[1].append(who)
    for name, (field, who) in fields.items():
        lines.append(
            f"| `{PREFIX}{name.upper()}` | {_default(name, field)} | {', '.join(who)} "
            f"| {field.description} |"
        )
    return "\n".join(lines)


def gateway_table() -> str:
    """Every setting of a gateway: its option, its variable, its default, and what it is."""
    lines = ["| option | variable | default | what |", "|---|---|---|---|"]
    for name, field in GatewaySettings.model_fields.items():
        option = f"`--{name.replace('_', '-')}`"
        variable = f"`{GATEWAY_PREFIX}{name.upper()}`"
        lines.append(f"| {option} | {variable} | {_default(name, field)} | {field.description} |")
    return "\n".join(lines)


def metrics_table() -> str:
    """Every metric: its name, its kind, its labels, and what it means."""
    lines = ["| metric | kind | labels | what |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.meaning} |")
    everywhere = " and ".join(f"`{label}`" for label in LABELS)
    return "\n".join([*lines, "", f"Each also has {everywhere}, where a model is meant."])


def _default(name: str, field: Any) -> str:
    if name == "worker_name":
        return "the host's name"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, ByteSize):
        return f"`{value >> 20}MiB`"
    if value is None:
        return ""
    if isinstance(value, str):
        return f"`{value}`"
    return f"`{json.dumps(value)}`"


def section(text: str, name: str) -> str:
    """What stands between ``<!-- name -->`` and ``<!-- /name -->``."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
    assert found is not None, f"there is no section {name}"
    return found.group(1).strip()


def with_section(text: str, name: str, content: str) -> str:
    """The text with that section replaced."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    head, _, rest = text.partition(start)
    _, _, tail = rest.partition(end)
    return f"{head}{start}\n{content}\n\n{end}{tail}"


SECTIONS: Final = (
    (SETTINGS, "settings", settings_table),
    (GATEWAY, "settings", gateway_table),
    (OPERATING, "metrics", metrics_table),
    (PERFORMANCE, "measures", measures_table),
    (PERFORMANCE, "gpu", gpu_table),
    (SCALE, "plan", scale_table),
    (README, "figures", readme_figures),
    (COMPARISON, "figures", comparison_figures),
    (COMPARISON, "smaller", smaller_figures),
    (ENGINES, "vllm", vllm_figures),
    (ENGINES, "figures", engine_figures),
)
"""Which page has which part, and what makes it."""


if __name__ == "__main__":
    for page, name, made in SECTIONS:
        page.write_text(with_section(page.read_text("utf-8"), name, made()), "utf-8")
