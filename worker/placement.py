"""Where a machine's workers run: which GPUs each one gets, or how many cores."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lmpool.errors import SettingsError

MOST_WORKERS: Final = 1024
MOST_PORT: Final = 65_535
_NAME: Final = re.compile(r"[0-9]{1,4}|(GPU|MIG)-[A-Za-z0-9/-]+")
_EXAMPLE: Final = "write numbers such as 0,1,2,3, all, or 0+1,2+3 for two GPUs to each worker"


@dataclass(frozen=True)
class Placement:
    """Where one worker runs: what it is called, and its variables."""

    name: str
    environment: Mapping[str, str]


def placements(
    gpus: str | None, workers: int | None, environ: Mapping[str, str]
) -> list[Placement]:
    """One placement for each GPU, or `workers` of them without one of their own."""
    if gpus is not None:
        if workers is not None:
            raise SettingsError(f"gpus={gpus!r} and workers={workers}: write one of them")
        return [
            Placement(
                f"gpu {visible.replace(',', '+')}",
                # Numbers as nvidia-smi shows them.
                {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            )
            for visible in parse_gpus(gpus, environ)
        ]
    count = 1 if workers is None else workers
    if not 1 <= count <= MOST_WORKERS:
        raise SettingsError(f"workers={count}: write a number from 1 to {MOST_WORKERS}")
    # Threads that spin while they wait for each other take the cores from those they wait for: on a
    # busy machine a batch then takes ten times as long.
    mine = {"OMP_WAIT_POLICY": "PASSIVE"}
    if count > 1:
        mine["OMP_NUM_THREADS"] = str(max(1, _cores() // count))
    mine = {name: value for name, value in mine.items() if name not in environ}
    return [Placement(f"worker {number}", mine) for number in range(1, count + 1)]


def with_ports(chosen: Sequence[Placement], first: int | None) -> list[Placement]:
    """The same, with a port for its metrics each: `first` and those above it."""
    if not first:  # none, or any that is free
        return [*chosen]
    if first + len(chosen) - 1 > MOST_PORT:
        raise SettingsError(
            f"metrics_port={first}: {len(chosen)} workers need as many ports, and the last one is "
            f"{MOST_PORT}"
        )
    return [
        replace(
            placement,
            environment={**placement.environment, "LMPOOL_METRICS_PORT": str(first + number)},
        )
        for number, placement in enumerate(chosen)
    ]


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def parse_gpus(text: str, environ: Mapping[str, str]) -> list[str]:
    """What each worker's CUDA_VISIBLE_DEVICES is to be.

    `text` lists GPUs as ``0,1,2,3``, or ``all`` of them; ``0+1,2+3`` gives each worker two.
    """
    allowed = environ.get("CUDA_VISIBLE_DEVICES")
    if text.strip() == "all":
        return _visible(allowed) if allowed is not None else _installed()
    groups = [group.strip().split("+") for group in text.split(",")]
    names = [name for group in groups for name in group]
    for name in names:
        if not _NAME.fullmatch(name):
            raise SettingsError(f"gpus={text!r}: {name!r} is no GPU; {_EXAMPLE}")
        if names.count(name) > 1:
            raise SettingsError(f"gpus={text!r}: GPU {name} is there twice; {_EXAMPLE}")
        if allowed is not None and name not in _visible(allowed):
            raise SettingsError(
                f"gpus={text!r}: GPU {name} is not among CUDA_VISIBLE_DEVICES={allowed}; name "
                "those, or unset that variable"
            )
    return [",".join(group) for group in groups]


def _visible(allowed: str) -> list[str]:
    found = [name.strip() for name in allowed.split(",") if name.strip() not in ("", "-1")]
    if not found:
        raise SettingsError(f"CUDA_VISIBLE_DEVICES={allowed!r} hides every GPU")
    return found


def _installed() -> list[str]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        found = done.stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise SettingsError(
            f"gpus='all': nvidia-smi could not list the GPUs ({error}); {_EXAMPLE}"
        ) from None
    if not found:
        raise SettingsError("gpus='all': nvidia-smi lists none; start CPU workers with --workers")
    return found
