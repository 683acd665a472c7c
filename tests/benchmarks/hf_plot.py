"""``python -m tests.benchmarks.hf_plot``: the saved figures of the hf benchmark as bars."""

from __future__ import annotations

import json
from typing import Any

from tests.benchmarks.measure import number
from tests.benchmarks.tables import RESULTS

COLOURS = {
    "engine": "#1b6ca8",
    "pool": "#6fb1e0",
    "by hand": "#b7b7b7",
    "genlm-backend after cache_kv": "#e8b98a",
    "genlm-backend": "#d98032",
}
LABELS = {"engine": "lmpool, engine alone", "pool": "lmpool, through the pool"}


def draw(report: dict[str, Any]) -> Any:
    """Rows a second of each side, workload by workload, on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.4), layout="constrained")
    workloads = list(report["figures"].items())
    width = 0.8 / len(COLOURS)
    for place, (side, colour) in enumerate(COLOURS.items()):
        for at, (_, figures) in enumerate(workloads):
            for found in figures:
                if found["what"] != side or found["unit"] != "rows/s":
                    continue
                x = at + (place - (len(COLOURS) - 1) / 2) * width
                axes.bar(x, found["median"], width * 0.92, color=colour)
                axes.annotate(
                    number(round(found["median"])),
                    (x, found["median"]),
                    ha="center",
                    va="bottom",
                    fontsize=7,
                )
    for side, colour in COLOURS.items():
        axes.bar(0, 0, color=colour, label=LABELS.get(side, side))
    axes.set_yscale("log")
    axes.set_ylabel("rows a second (median)")
    axes.set_xticks(range(len(workloads)), [_wrapped(heading) for heading, _ in workloads])
    axes.tick_params(axis="x", length=0, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def _wrapped(text: str) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, 24))


def main() -> None:
    """Draw results/hf.json into results/hf.png."""
    (report,) = json.loads((RESULTS / "hf.json").read_text("utf-8"))
    draw(report).savefig(RESULTS / "hf.png", dpi=110)


if __name__ == "__main__":
    main()
