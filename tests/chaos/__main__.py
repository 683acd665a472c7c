"""``python -m tests.chaos``: every fault in turn, as the table of docs/faults.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.chaos.faults import FAULTS
from tests.chaos.pool import ChaosPool, run_fault


def main() -> None:
    """Print a row for each fault whose name contains the argument, if one is given."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    print("| fault | prompts | lost | wrong | wait, s | after its end, s | 90 % of its pace, s |")
    print("|---|---|---|---|---|---|---|")
    for number, fault in enumerate(FAULTS):
        if wanted not in fault.name:
            continue
        with (
            tempfile.TemporaryDirectory(prefix="lmpool-chaos-") as folder,
            ChaosPool(Path(folder), seed=number, **fault.pool) as pool,
        ):
            result = run_fault(pool, fault.act, after=6.0)
        found = result.outcomes
        back = "-" if result.back_after is None else f"{result.back_after:.1f}"
        print(
            f"| {fault.name} | {found.asked:,} | {found.asked - found.right - found.wrong} | "
            f"{found.wrong} | {result.longest_wait:.1f} | {result.recovered_in:.1f} | {back} |",
            flush=True,
        )
        for reason in sorted(set(found.failed)):
            print(f"  failed: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
