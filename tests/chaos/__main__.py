"""``python -m tests.chaos``: every fault in turn, as the tables of docs/faults.md."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

from tests.chaos.clustered import CLUSTER_FAULTS, ClusterPool
from tests.chaos.faults import FAULTS
from tests.chaos.pool import ChaosPool, run_fault
from tests.support.waiting import until


def main() -> None:
    """Print a row for each fault whose name contains the argument, if one is given."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    of_one_server(wanted)
    print()
    of_a_cluster(wanted)


def of_one_server(wanted: str) -> None:
    """Those of a server and of Sentinels."""
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


def of_a_cluster(wanted: str) -> None:
    """Those of a cluster, whose engines hold every batch for a while."""
    columns = "prompts | lost | wrong | no answer, s | wait, s | asked again | taken over | stolen"
    print(f"| fault | {columns} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for number, fault in enumerate(CLUSTER_FAULTS):
        if wanted not in fault.name:
            continue
        with (
            tempfile.TemporaryDirectory(prefix="lmpool-chaos-") as folder,
            ClusterPool(Path(folder), seed=number) as pool,
        ):
            with pool.load() as load:
                until(lambda load=load: load.answered() > 100)  # type: ignore[misc]
                with contextlib.redirect_stdout(sys.stderr):
                    gap, wait = pool.befall(load, fault)
            found = load.outcomes
            print(
                f"| {fault.name} | {found.asked:,} | {found.asked - found.right - found.wrong} | "
                f"{found.wrong} | {gap:.1f} | {wait:.1f} | {found.resubmitted} | "
                f"{pool.taken_over()} | {pool.stolen} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
