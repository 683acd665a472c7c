"""One client process of ``lmpool demo``: it reads what to ask, asks, and says how it went.

Its server and pool come as ``LMPOOL_*`` variables, its `Work` as a line of JSON on standard input.
It says ``ready``, waits for another line so that all clients begin together, and ends with its
`Report` as a line of JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from lmpool.errors import LmpoolError
from lmpool.producer import NumpyRows, PooledLM, connect


class Work(TypedDict):
    """What a client asks: each round's prompts at once; then those whose rows are compared."""

    rounds: list[list[list[int]]]
    check: list[list[int]]


class Examination(TypedDict):
    """What clients compare: a hash of the rows' bytes, and how far from 1 the rows sum."""

    hash: str
    off_by: float


class Report(TypedDict):
    """How it went: rows in seconds, those of the longest call, `PooledLM.statistics`, and the rows
    that are compared."""

    rows: int
    seconds: float
    longest: float
    statistics: dict[str, int]
    checked: Examination


async def ask(lm: PooledLM[NumpyRows], rounds: list[list[list[int]]]) -> tuple[int, float]:
    """As a particle filter does: each round asks for all its prompts, then goes on.

    Returns how many rows came, and how long the longest call was.
    """
    rows, longest = 0, 0.0

    async def one(prompt: list[int]) -> None:
        nonlocal rows, longest
        began = time.perf_counter()
        await lm.next_token_logprobs(prompt)
        rows += 1
        longest = max(longest, time.perf_counter() - began)

    for prompts in rounds:
        await asyncio.gather(*map(one, prompts))
    return rows, longest


def examine(rows: npt.NDArray[np.float32]) -> Examination:
    """What another client's same rows are compared with."""
    totals = np.exp(rows.astype(np.float64)).sum(axis=1)
    return {
        "hash": hashlib.blake2b(np.ascontiguousarray(rows).tobytes(), digest_size=16).hexdigest(),
        "off_by": float(np.abs(totals - 1.0).max()),
    }


def main() -> None:
    """Run once."""
    line = sys.stdin.readline()
    if not line:
        return  # whoever was to say what is gone
    work: Work = json.loads(line)
    with connect(framework="numpy") as lm:
        print("ready", flush=True)
        if not sys.stdin.readline():
            return
        started = time.perf_counter()
        rows, longest = asyncio.run(ask(lm, work["rounds"]))
        seconds = time.perf_counter() - started
        report: Report = {
            "rows": rows,
            "seconds": seconds,
            "longest": longest,
            "statistics": lm.statistics(),
            "checked": examine(lm.batch_next_token_logprobs_sync(work["check"])),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(1)  # whoever was to hear is gone
    except LmpoolError as error:
        sys.exit(f"error: {error}")
