"""docs/models.md, made of what `python -m tests.families` found."""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "models.md"

_HEAD: Final = """\
# Models

How the `hf` engine runs the families of transformers' causal language models. `make families`
makes this page: it builds each family small from its configuration, with random weights, and
compares rows with one plain forward pass a prompt, `model(ids[None])`, in float32.

Measured with transformers {transformers} and torch {torch}, on a CPU, seed {seed}: {families}
families and {variants} variants of them, {rows:,} rows. A row is right when no entry is off by
more than {tolerance:g} nats. {verdicts}.

Each is tried at three scales. Its selections, windows and chunks, original lengths of rotary
positions, and longest prompts are of {scales} tokens. Its prompts share prefixes, are nested, end
alike, and have lengths around each of these limits; all beginnings of a text are asked for at
once; texts grow by a token a step while a small cache evicts; and rows with a random LoRA adapter
mix with rows without.

The engine goes by nothing that a model says of itself. When it loads a model it measures which
way gives the rows of plain forward passes, and takes the first that does:

| runs | what it does |
|---|---|
| each position once | prompts share what they begin with, and it is kept between batches |
| padded | prompts of like length share a forward pass; nothing is kept |
| one length | only prompts of one length share a forward pass |
| one by one | a forward pass each |
| refused | the engine does not start, and says why |

`lmpool stats` and the worker's log say which way a model runs. Limits in this table (N) are those
of the small models.

"""


def document(results: Sequence[dict[str, Any]], seed: int) -> str:
    """The page, without a date or a figure that another run of these versions would change."""
    from tests.families.check import TOLERANCE
    from tests.families.small import SCALES

    families = [found for found in results if found["name"] == found["model_type"]]
    variants = [found for found in results if found["name"] != found["model_type"]]
    head = _HEAD.format(
        transformers=importlib.metadata.version("transformers"),
        torch=importlib.metadata.version("torch").partition("+")[0],
        seed=seed,
        families=len(families),
        variants=len(variants),
        rows=sum(found["rows"] for found in results),
        tolerance=TOLERANCE,
        verdicts=_verdicts(results),
        scales="; ".join(", ".join(map(str, limits.all)) for limits in SCALES),
    )
    return head + _table("Families", families) + "\n" + _table("Variants", variants)


def listed(text: str) -> tuple[str, list[str]]:
    """The version of transformers that a page names, and the families in its first table."""
    version = re.search(r"transformers (\S+) and torch", text)
    table = text.partition("## Families")[2].partition("## Variants")[0]
    return version[1] if version else "", re.findall(r"^\| `([^`]+)` ", table, re.MULTILINE)


def _verdicts(results: Sequence[dict[str, Any]]) -> str:
    counts = dict.fromkeys(("right", "refused", "wrong", "crash", "unclear", "unbuilt"), 0)
    for found in results:
        counts[found["verdict"]] += 1
    words = {
        "right": "are right",
        "refused": "are refused in a sentence",
        "wrong": "are wrong",
        "crash": "crash",
        "unclear": "are refused without being named",
        "unbuilt": "could not be built small",
    }
    return ", ".join(f"{counts[name]} {word}" for name, word in words.items() if counts[name])


def _table(title: str, results: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"## {title}\n",
        "| model | class | runs | off by less than | adapters | remarks |",
        "|---|---|---|---|---|---|",
    ]
    for found in results:
        cells = (
            f"`{found['name']}`",
            f"`{found['cls']}`",
            _way(found),
            _bound(found["worst"]) if found["verdict"] == "right" else "",
            _adapters(found["adapters"]),
            _remarks(found),
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


_WAYS: Final = (
    ("each distinct position once up to", "each position once up to N"),
    ("each distinct position once", "each position once"),
    ("prompts of like length", "padded"),
    ("prompts of one length", "one length"),
    ("one prompt at a time", "one by one"),
)


def _way(found: dict[str, Any]) -> str:
    if found["verdict"] != "right":
        return str(found["verdict"])
    names = []
    for way in found["ways"]:
        first, _, then = way.partition(":")[0].partition(", then ")
        parts = [
            next(name for begin, name in _WAYS if p.startswith(begin)) for p in (first, then) if p
        ]
        names.append(", then ".join(parts))
    return ", or ".join(dict.fromkeys(names))


def _bound(worst: float) -> str:
    return f"1e{math.floor(math.log10(max(worst, 1e-7))) + 1:+03d}".replace("+00", "0")


def _adapters(said: str) -> str:
    if said.startswith("PEFT cannot"):
        return "not tried: PEFT makes none"
    return said.partition(":")[0]


def _remarks(found: dict[str, Any]) -> str:
    reasons = dict.fromkeys(_plain(way.partition(":")[2]) for way in found["ways"] if ":" in way)
    said = list(filter(None, reasons))
    if found["said"]:
        said = [_plain(found["said"])]
    if found["flipped"]:
        said.append(
            f"{found['flipped']} of {found['rows']} rows are those of a router's other choice, at "
            f"margins below {_bound(found['margin'])} of its score"
        )
    return "; ".join(said)


def _plain(text: str) -> str:
    """Without figures that rounding decides, and on one line."""
    text = re.sub(r",? by \d[\d.e+-]*,?", "", " ".join(text.split()))
    text = re.sub(r"\(?'FOLDER[^']*'\)?", "the folder", text)
    return re.sub(r"\b(more than|up to|first|after|in rows of|than|from) \d+\b", r"\1 N", text)[
        :400
    ]
