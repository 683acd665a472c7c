"""``python -m tests.families``: every family of transformers on the hf engine, or some of them.

Each runs in a process of its own, with bounds of time and memory. With all of them docs/models.md
is written. The exit status is 1 where a row is wrong, a model ends in a crash, or is refused
without being named.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.families.table import DOCUMENT, document

SECONDS: Final = 600.0
BAD: Final = ("wrong", "crash", "unclear")


@dataclass(slots=True)
class _Running:
    process: BaseProcess
    ends: float


def main(given: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 where one of them is neither right nor clearly refused."""
    options = _arguments(given)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.families.check"])
    from tests.families.check import names

    chosen = [name for name in names() if not options.only or name in options.only]
    if unknown := sorted(set(options.only) - set(chosen)):
        print(f"no family {unknown[0]!r} in this transformers, and no variant", file=sys.stderr)
        return 2
    known = _read(options.json) if options.resume else {}
    found = {name: known[name] for name in chosen if name in known}
    left = [name for name in chosen if name not in found]
    with tempfile.TemporaryDirectory(prefix="families-") as folder:
        for result in _shown(_run(context, left, Path(folder), options), len(left)):
            found[result["name"]] = result
            if options.json is not None:
                ordered = [found[name] for name in chosen if name in found]
                options.json.write_text(json.dumps(ordered, indent=1) + "\n")
    results = [found[name] for name in chosen if name in found]
    if not options.only:
        DOCUMENT.write_text(document(results, options.seed))
    return _conclude(results)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__)
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=[], metavar="NAME,NAME",
        help="these model types and variants",
    )  # fmt: skip
    parser.add_argument("--together", type=int, default=2, metavar="N", help="at a time (2)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    parser.add_argument(
        "--resume", action="store_true", help="keep what FILE has; run the others alone"
    )
    options = parser.parse_args(given)
    if options.resume and options.json is None:
        parser.error("--resume: name the file with --json")
    return options


def _read(file: Path) -> dict[str, dict[str, Any]]:
    found = json.loads(file.read_text()) if file.exists() else []
    return {result["name"]: result for result in found}


def _run(
    context: Any, names: Iterable[str], folder: Path, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """What was found of each, as they end."""
    from tests.families.check import check_alone

    waiting, running = list(names), dict[str, _Running]()
    try:
        while waiting or running:
            while waiting and len(running) < options.together:
                name = waiting.pop(0)
                place = folder / name.replace(" ", "_")
                place.mkdir()
                process = context.Process(
                    target=check_alone, args=(name, str(place), f"{place}.json", options.seed)
                )
                process.start()
                running[name] = _Running(process, time.monotonic() + SECONDS)
            time.sleep(0.05)
            for name, one in list(running.items()):
                late = time.monotonic() > one.ends
                if one.process.is_alive() and not late:
                    continue
                one.process.kill()
                one.process.join()
                del running[name]
                yield _result(name, folder / f"{name.replace(' ', '_')}.json", late)
    finally:
        for one in running.values():
            one.process.kill()


def _result(name: str, file: Path, late: bool) -> dict[str, Any]:
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    from tests.families.check import failed

    how = f"it took longer than {SECONDS:.0f} s" if late else "its process died"
    return failed(name, how).as_json()


def _shown(results: Iterable[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    """The same, while a bar shows how far it is and lines what is not right."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns) as progress:
        task = progress.add_task("families", total=count)
        for result in results:
            progress.advance(task)
            ways = dict.fromkeys(way.split(":")[0] for way in result["ways"])
            said = result["said"] or "; ".join(ways)
            line = (
                f"{result['name']:28} {result['verdict']:8} {result['worst']:8.1e} "
                f"{result['rows']:4} rows {result['seconds']:5.1f} s  "
                f"{result['adapters'][:24]:24} {said}"
            )
            progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
            sys.stdout.flush()
            yield result


def _conclude(results: Sequence[dict[str, Any]]) -> int:
    verdicts = [result["verdict"] for result in results]
    print(", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts)))
    return int(any(verdict in BAD for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
