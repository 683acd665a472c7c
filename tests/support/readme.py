"""The README's parts that come from the code. `python -m tests.support.readme` writes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lmpool.settings import PREFIX, ClientOptions, WorkerOptions

README = Path(__file__).parents[2] / "README.md"


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


def _default(name: str, field: Any) -> str:
    if name == "worker_name":
        return "the host's name"
    value = field.get_default(call_default_factory=True)
    if name == "cache_bytes":
        return f"`{value >> 20}MiB`"
    if value is None:
        return ""
    if isinstance(value, str):
        return f"`{value}`"
    return f"`{json.dumps(value)}`"


def section(text: str, name: str) -> str:
    """What stands between ``<!-- name -->`` and ``<!-- /name -->``."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
    assert found is not None, f"the README has no section {name}"
    return found.group(1).strip()


def with_section(text: str, name: str, content: str) -> str:
    """The text with that section replaced."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    head, _, rest = text.partition(start)
    _, _, tail = rest.partition(end)
    return f"{head}{start}\n{content}\n\n{end}{tail}"


if __name__ == "__main__":
    README.write_text(
        with_section(README.read_text("utf-8"), "settings", settings_table()), "utf-8"
    )
