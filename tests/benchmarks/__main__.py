"""``python -m tests.benchmarks``: the measurements, by name or all."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

from lmpool.profiling import profile
from tests.benchmarks.measure import NotHere, Report, Scale, progress
from tests.benchmarks.pool import WrongRows
from tests.benchmarks.tables import save, show, write_json

NAMES = (
    "jobs", "rows", "answers", "full", "latency", "memory", "dedup", "hf", "hf_memory", "hf_start",
    "scores", "scores_memory", "masks", "streams", "observed", "cluster", "vllm", "vllm_scores",
    "gateway", "awrs", "affinity", "gpu",
)  # fmt: skip


class Benchmark(Protocol):
    """What each module has."""

    NAME: str
    LINE: str

    def measure(self, scale: Scale) -> Report:
        """Take the figures."""


def load(name: str) -> Benchmark:
    """The module of one benchmark."""
    return cast(Benchmark, importlib.import_module(f"tests.benchmarks.{name}"))


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line, read."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(NAMES)}; or all")
    parser.add_argument("--list", action="store_true", help="what there is, one line each")
    parser.add_argument("--runs", type=int, metavar="N", help="alternating runs (5; quick: 2)")
    parser.add_argument("--quick", action="store_true", help="everything small: no real figures")
    parser.add_argument("--device", default="cuda", help="of gpu (cuda); cpu: its code, in small")
    parser.add_argument(
        "--profile", type=Path, metavar="FOLDER", help="where a profile of all processes is put"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--save", action="store_true", help="write tests/benchmarks/results")
    found = parser.parse_args(given)
    unknown = [name for name in found.names if name not in NAMES]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}: there are {', '.join(NAMES)}")
    if found.runs is not None and found.runs < 1:
        parser.error(f"--runs {found.runs}: at least one")
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 when a benchmark could not be taken."""
    options = arguments(given)
    names = options.names or list(NAMES)
    if options.list:
        for name in names:
            print(f"{name:10} {load(name).LINE}")
        return 0
    # The developer's own settings would change what is measured.
    for variable in [name for name in os.environ if name.startswith("LMPOOL_")]:
        if not variable.startswith("LMPOOL_TEST_"):
            del os.environ[variable]
    scale = Scale(options.runs or (2 if options.quick else 5), options.quick, options.device)
    end_profile: Callable[[], object] = int
    if options.profile is not None:
        end_profile = profile(options.profile, "bench", children=True)
    reports: list[Report] = []
    failed = []
    for name in names:
        progress(f"{name}: {load(name).LINE}")
        needs = getattr(load(name), "NEEDS", None)
        if needs is not None and not options.names and importlib.util.find_spec(needs) is None:
            progress(f"{name} left out: {needs} is not installed here")
            continue
        try:
            report = load(name).measure(scale)
        except NotHere as error:
            if options.names:
                progress(f"{name} cannot be taken: {error}")
                failed.append(name)
            else:
                progress(f"{name} left out: {error}")
            continue
        except Exception as error:  # the other benchmarks' figures are worth having
            if not isinstance(error, WrongRows):
                traceback.print_exc()
            progress(f"{name} FAILED: {type(error).__name__}: {error}")
            failed.append(name)
            continue
        reports.append(report)
        show(report)
        if options.save:
            progress(f"  saved: {save(report, options.quick, options.runs).name}")
    end_profile()
    if options.json is not None:
        write_json(reports, options.json)
    return 1 if failed else 0


if __name__ == "__main__":
    # Told to end, it ends what it has started: servers, workers, clients.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
