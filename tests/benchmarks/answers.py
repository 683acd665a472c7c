"""Answers that are smaller than rows: what they cost, and what is stored of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import numpy as np

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.wants import Draw, Row, Tokens, Top, Want
from tests.benchmarks.asking import processor, timed_answers
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, ratio
from tests.benchmarks.pool import (
    Cpu,
    Pool,
    Prompts,
    WrongRows,
    make_prompts,
    serving,
)
from tests.support.server import RealServer

NAME = "answers"
LINE = "the likeliest 20 of 128,256 tokens through the pool, against whole rows"

VOCAB_SIZE: Final = 128_256
PER_CALL: Final = 250
RESULT_TTL: Final = 3.0
"""Seconds; the rows of a few runs must fit into the server's memory."""

WANTS: Final[dict[str, tuple[Want, int, int]]] = {
    "rows": (Row(), 600, 120),
    "top 20": (Top(20), 8_000, 1_000),
    "8 tokens": (Tokens(range(8)), 8_000, 1_000),
    "draws of 8": (Draw(8, seed=1), 1_000, 200),
}
"""By name: the want, and how many are asked in a run, full and quick."""
STORED_MOST: Final = {"top 20": 200, "draws of 8": 100}

Sample = tuple[float, Cpu]


def measure(scale: Scale) -> Report:
    """Alternate between the wants."""
    watch = Bystanders()
    with ExitStack() as stack:
        server = stack.enter_context(RealServer())
        far = {"near_bytes": 0, "result_ttl": RESULT_TTL}
        pool = stack.enter_context(serving(server, "answers", VOCAB_SIZE, **far))
        for number, (want, _, _) in enumerate(WANTS.values(), 1):  # once, untimed
            _timed(pool, want, make_prompts(100, VOCAB_SIZE, 2**31, number))
        found = facts(server.url)
        sides = {
            name: partial(_side, pool, want, scale.of(full, quick), salt)
            for salt, (name, (want, full, quick)) in enumerate(WANTS.items())
        }
        taken = alternate(sides, scale.runs)
        sizes = {
            name: _stored(pool, want, number)
            for number, (name, (want, _, _)) in enumerate(WANTS.items())
        }
    report = Report(NAME, f"A vocabulary of {VOCAB_SIZE:,}, prompts of 32 tokens, one mock worker")
    pace = {name: tuple(sample[0] for sample in samples) for name, samples in taken.items()}
    spent = {name: tuple(cpu.total for _, cpu in samples) for name, samples in taken.items()}
    for name, values in pace.items():
        report.add("Pace", Measured(name, "answers/s", values))
    for name in list(WANTS)[1:]:
        top = name == "top 20"
        goals = (8.0, 1 / 8) if top else (None, None)
        faster = ratio(f"{name} / rows", pace[name], pace["rows"], at_least=goals[0])
        cheaper = ratio(f"{name} / a row", spent[name], spent["rows"], at_most=goals[1])
        report.add("Ratios of pace", faster)
        report.add("Ratios of processor time, all three processes", cheaper)
    for name, samples in taken.items():
        report.add("Processor time", *processor(name, [cpu for _, cpu in samples], "us/answer"))
    for name, size in sizes.items():
        most = STORED_MOST.get(name)
        report.add("Stored", Measured(name, "bytes", (float(size),), at_most=most))
    report.note("as for a client elsewhere: all answers come through the server, rows, too")
    report.note(
        f"{PER_CALL} distinct prompts a call; the mock engine knows the likeliest tokens of its "
        "rows beforehand, and reduces rows by NumPy for the other wants"
    )
    report.facts = {**found, **watch.report()}
    return report


def _side(pool: Pool, want: Want, count: int, salt: int, run: int) -> Sample:
    return _timed(pool, want, make_prompts(count, VOCAB_SIZE, run, salt))


def _timed(pool: Pool, want: Want, prompts: Prompts) -> Sample:
    """Answers a second, and processor time in us an answer. A sample is checked, untimed."""

    def ask(lm: lmpool.PooledLM, part: Sequence[list[int]]) -> Sequence[Any]:
        return lm.sync.ask_many([(prompt, want) for prompt in part])

    return timed_answers(pool, ask, prompts, PER_CALL, partial(_check, want))


def _check(want: Want, found: Sequence[Any], prompts: Sequence[Sequence[int]]) -> None:
    """Raise `WrongRows` unless each of these answers is right."""
    for answer, prompt in zip(found, prompts, strict=True):
        row = mock_row(prompt, VOCAB_SIZE)
        match want:
            case Top():
                right = np.array_equal(answer.token_ids, want.of_row(row).token_ids)
            case Tokens():
                right = np.allclose(answer, row[:8], atol=1e-6)
            case Draw():
                right = np.array_equal(answer.token_ids, want.of_row(row).token_ids)
            case _:
                right = np.array_equal(answer, row)
        if not right:
            raise WrongRows(f"an answer to {want.kind} is not that of its prompt")


def _stored(pool: Pool, want: Want, number: int) -> int:
    """Bytes of the value that is stored of one answer."""
    lm = pool.lm
    (prompt,) = make_prompts(1, VOCAB_SIZE, 2**30, number)
    model = lm._models.of(lm.info)
    job = model.jobs.one(prompt, model.jobs.check(want), None)
    with pool.until_stored():
        lm.sync.ask(prompt, want)
    with pool.server.client() as client:
        return int(client.strlen(lm.shards[0].result(job.digest)))
