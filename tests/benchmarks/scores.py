"""Scores of texts through the pool, against transformers by hand and against asking rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

import numpy as np
import numpy.typing as npt

from tests.benchmarks.hf_workloads import VOCAB_SIZE, random_llama
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, ratio
from tests.benchmarks.pool import Pool, WrongRows
from tests.support.clients import connected
from tests.support.server import RealServer
from tests.support.workers import worker_process

NAME = "scores"
LINE = "scores of texts through the pool, against transformers by hand, and against rows"

LENGTH: Final = 200
CONTEXT, CHOICE, CHOICES = 400, 20, 8
THREADS: Final = 1
BATCHES: Final = (1, 2, 4, 8, 16)
"""Of texts in a forward pass by hand: the best of them is measured."""
TOLERANCE: Final = 1e-3

POOL, HAND = "batch_score", "by hand"
ROWS, ROW = "rows of all prefixes at once", "rows one after another"
SHARED, DISTINCT = "one context", "contexts of their own"

Texts = list[list[int]]
Scored = list[npt.NDArray[np.float32]]
Score = Callable[[Texts], Scored]
Sample = tuple[float, float]
"""Positions a second, and positions a second of processor time, all processes together."""


def measure(scale: Scale) -> Report:
    """Alternate between the sides."""
    import torch

    torch.set_num_threads(THREADS)
    watch = Bystanders()
    with ExitStack() as stack:
        folder = stack.enter_context(random_llama())
        pool = _pool(stack, folder)
        found = facts(pool.server.url, ("torch", "transformers"))
        hand, batch = _best_by_hand(folder, scale)
        sides: dict[str, tuple[Score, int, int]] = {
            POOL: (_pooled(pool), 500, 6),
            HAND: (hand, 500, 6),
            ROWS: (_by_rows(pool, at_once=True), 8, 1),
            ROW: (_by_rows(pool, at_once=False), 2, 1),
        }
        report = Report(
            NAME,
            f"A Llama of random weights at V={VOCAB_SIZE:,}, texts of {LENGTH} tokens, "
            f"{THREADS} thread",
        )
        taken = alternate(
            {
                name: _timed(pool, score, hand, scale.of(full, quick), salt)
                for salt, (name, (score, full, quick)) in enumerate(sides.items())
            },
            scale.runs,
        )
        _add(report, f"{scale.of(500, 6)} texts", taken, scale)
        questions = scale.of(10, 1)
        taken = alternate(
            {name: _choices(pool, hand, name, questions) for name in (SHARED, DISTINCT)},
            scale.runs,
        )
        _add(report, f"{CHOICES} choices of {CHOICE} tokens after {CONTEXT}", taken, scale)
    report.note(
        f"by hand: batches of {batch} texts, the best of {', '.join(map(str, BATCHES))}, "
        "log_softmax and gather"
    )
    report.note("rows: of 8 texts at once, of 2 one after another; the scores are picked from them")
    report.note(
        "pool: Redis, one worker process, and a client in this one; all its processes' time counts"
    )
    report.facts = {**found, **watch.report()}
    return report


def _add(report: Report, heading: str, taken: dict[str, list[Sample]], scale: Scale) -> None:
    goals = {HAND: 0.8, ROWS: 8.0, ROW: 50.0, DISTINCT: 4.0}
    pace = {side: tuple(each for each, _ in found) for side, found in taken.items()}
    spent = {side: tuple(each for _, each in found) for side, found in taken.items()}
    first = next(iter(taken))
    for side in taken:
        report.add(heading, Measured(side, "positions/s", pace[side]))
    for side in list(taken)[1:]:
        goal = None if scale.quick else goals[side]
        report.add(heading, ratio(f"{first} / {side}", pace[first], pace[side], goal))
        report.add(heading, ratio("the same of processor time", spent[first], spent[side]))
    if HAND in taken:
        bound = "by hand / rows of all prefixes at once: the most that scores can gain"
        report.add(heading, ratio(bound, pace[HAND], pace[ROWS]))


def _pool(stack: ExitStack, folder: str) -> Pool:
    server = stack.enter_context(RealServer())
    worker = stack.enter_context(
        worker_process(
            server.url, NAME, alive=False, engine="hf", model=folder,
            engine_opts={"device": "cpu", "threads": THREADS}, result_ttl=3.0,
        )
    )  # fmt: skip
    worker.wait_until_alive()
    return Pool(stack.enter_context(connected(server.url, NAME)), worker, server)


def _texts(count: int, *seed: int, length: int = LENGTH) -> Texts:
    found: Texts = np.random.default_rng(seed).integers(0, VOCAB_SIZE, (count, length)).tolist()
    return found


def _timed(pool: Pool, score: Score, hand: Score, count: int, salt: int) -> Callable[[int], Sample]:
    def run(number: int) -> Sample:
        texts = _texts(count, number, salt)
        pool.lm.clear_cache()
        with pool.until_stored():
            before, began = pool.cpu().total, time.perf_counter()
            found = score(texts)
        seconds, spent = time.perf_counter() - began, pool.cpu().total - before
        _check(found[:2], hand(texts[:2]))
        positions = count * (LENGTH - 1)
        return positions / seconds, positions / spent

    run(2**31)  # once, untimed
    return run


def _choices(pool: Pool, hand: Score, side: str, questions: int) -> Callable[[int], Sample]:
    """Questions one after another, each of several choices."""

    def texts_of(question: int, number: int) -> Texts:
        seed = (number, question, 7 if side == SHARED else 8)
        contexts = _texts(1 if side == SHARED else CHOICES, *seed, 0, length=CONTEXT)
        choices = _texts(CHOICES, *seed, 1, length=CHOICE)
        return [contexts[n % len(contexts)] + choice for n, choice in enumerate(choices)]

    def run(number: int) -> Sample:
        asked = [texts_of(question, number) for question in range(questions)]
        before, began = pool.cpu().total, time.perf_counter()
        found = [pool.lm.sync.batch_score(texts, start=CONTEXT) for texts in asked]
        seconds, spent = time.perf_counter() - began, pool.cpu().total - before
        right = [scores[CONTEXT - 1 :] for scores in hand(asked[0][:2])]
        _check([scores.logprobs for scores in found[0][:2]], right)
        positions = questions * CHOICES * CHOICE
        return positions / seconds, positions / spent

    run(2**31)
    return run


def _check(found: Scored, right: Scored) -> None:
    for one, other in zip(found, right, strict=True):
        if one.shape != other.shape or not float(np.abs(one - other).max()) < TOLERANCE:
            raise WrongRows("scores differ from those by hand")


# --- the sides ---------------------------------------------------------------------------------


def _pooled(pool: Pool) -> Score:
    return lambda texts: [scores.logprobs for scores in pool.lm.sync.batch_score(texts)]


def _by_rows(pool: Pool, *, at_once: bool) -> Score:
    """Whole rows, of which one number each is picked."""

    def score(texts: Texts) -> Scored:
        found = []
        for text in texts:
            prefixes = [text[:n] for n in range(1, len(text))]
            if at_once:
                rows: Sequence[npt.NDArray[np.float32]]
                rows = pool.lm.batch_next_token_logprobs_sync(prefixes)
                found.append(np.array([row[t] for row, t in zip(rows, text[1:], strict=True)]))
            else:
                picked = [
                    pool.lm.next_token_logprobs_sync(prefix)[text[len(prefix)]]
                    for prefix in prefixes
                ]
                found.append(np.array(picked))
        return found

    return score


def _best_by_hand(folder: str, scale: Scale) -> tuple[Score, int]:
    """What one would write without a library, and with how many texts in a forward pass."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def score(texts: Texts, batch: int) -> Scored:
        found: Scored = []
        with torch.inference_mode():
            for at in range(0, len(texts), batch):
                ids = torch.tensor(texts[at : at + batch])
                logits = model(ids[:, :-1], use_cache=False).logits
                logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])
                found.extend(logprobs[:, :, 0].numpy())
        return found

    def seconds(batch: int) -> float:
        texts = _texts(scale.of(64, 4), batch)
        began = time.process_time()
        score(texts, batch)
        return time.process_time() - began

    score(_texts(4, 0), 4)
    best = min(BATCHES, key=lambda batch: min(seconds(batch) for _ in range(2)))
    return lambda texts: score(texts, best), best
