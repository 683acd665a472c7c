"""Engines whose rows change, or keep more than themselves, and that write where they may not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lmpool.backends import Engine, EngineInfo, Outcome, Request
from lmpool.backends.mock import mock_row
from lmpool.wants import Generate
from tests.engines.mutants.engines import F32, Bent, Ids, Inner, Model, Wrapper
from tests.engines.mutants.registry import BOTH, Make, mutant
from tests.engines.mutants.witnesses import (
    OPTIONS,
    VOCAB,
    ask,
    ask_rightly,
    check,
    prompts_of,
    request,
    requests_of,
    run,
    scenario,
)


def _held(engine: Engine) -> None:
    asked = requests_of(prompts_of(12))
    outcomes = [*ask(engine, asked[:6]), *ask(engine, asked[6:])]
    engine.clear_cache()
    for each, outcome in zip(asked, outcomes, strict=True):
        check(each, outcome)


@mutant("rows-overwritten-by-the-next-batch", scenario(_held), forms=BOTH)
class RowsOverwritten(Wrapper):
    """The block that a row is a view of is written by nobody again."""

    block: np.ndarray = np.zeros((0, 0), np.float32)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        found = [o for o in outcomes if o.row is not None]
        if len(self.block) < len(found):
            self.block = np.zeros((len(found), self.info.vocab_size), np.float32)
        places = {o.id: row for o, row in zip(found, self.block, strict=False)}
        for outcome in found:
            places[outcome.id][:] = outcome.row
        return [replace(o, row=places[o.id]) if o.id in places else o for o in outcomes]


@mutant("rows-overwritten-as-the-cache-is-cleared", scenario(_held), subtle=True)
class RowsOverwrittenByClearing(Wrapper):
    """`clear_cache` drops what is kept, and not what was handed out."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.kept: list[F32] = []

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        given = [o if o.row is None else replace(o, row=o.row.copy()) for o in outcomes]
        self.kept = [o.row for o in given if o.row is not None] or self.kept
        return given

    def clear_cache(self) -> None:
        for row in self.kept:
            row[:] = 0
        self.kept = []
        super().clear_cache()


def _blocks(make: Make) -> None:
    engine = make(**OPTIONS)
    for count in (1, 3):
        for outcome in ask(engine, requests_of(prompts_of(count))):
            base = outcome.row
            while isinstance(base.base, np.ndarray):
                base = base.base
            # The table of the mock engine is one for all rows, and allocated once.
            shared = np.shares_memory(base, mock_row([0], VOCAB))
            assert shared or base.nbytes <= count * VOCAB * 4, base.nbytes


@mutant("rows-that-keep-a-block-of-256-alive", _blocks, forms=BOTH)
class RowsKeepAHugeBlock(Bent):
    """A row keeps at most its batch's block alive, not that of the largest batch that there is."""

    def bend(self, outcome: Outcome) -> Outcome:
        block = np.zeros((256, self.info.vocab_size), np.float32)
        block[0] = outcome.row
        return replace(outcome, row=block[0])


@mutant("rows-that-keep-the-logits-of-all-positions-alive", _blocks, subtle=True)
class RowsKeepAllPositions(Model):
    """A row keeps at most its batch's block alive, not the logits of each position."""

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        found = super().rows(requests)
        block = np.zeros((sum(r.tokens.size for r in requests), self.vocab_size), np.float32)
        block[: len(found)] = found
        return list(block[: len(found)])


def _tokens_stay(engine: Engine) -> None:
    prompt = request(1, [5, 6, 7])
    before = prompt.tokens.copy()
    ask_rightly(engine, [prompt])
    assert np.array_equal(prompt.tokens, before)


@mutant("prompts-turned-round-in-place", scenario(_tokens_stay))
class PromptsTurnedRound(Wrapper):
    """A request's tokens belong to who asks: nobody else writes into them."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.asked: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.asked.extend(requests)
        super().submit(requests)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        for each in self.asked:
            if each.tokens.flags.writeable:
                each.tokens[:] = each.tokens[::-1].copy()
        self.asked = []
        return outcomes


def _read_only(engine: Engine) -> None:
    tokens = np.frombuffer(np.array([3, 5, 9], "<u4").tobytes(), "<u4")
    ask_rightly(engine, [Request(b"read-only", tokens)])


@mutant("prompts-that-are-read-only-fail", scenario(_read_only))
class ReadOnlyPromptsFail(Model):
    """A worker's tokens are read-only, as they came: an engine must not need to write them."""

    def row(self, tokens: Ids, adapter: str | None) -> F32:
        if isinstance(tokens, np.ndarray):
            tokens[:1] = tokens[:1] + 0
        return super().row(tokens, adapter)


def _two_rounds(engine: Engine) -> None:
    want = Generate(4, (), 1.0, 5)
    engine.submit([request(1, [1, 2], None, want)])
    engine.step()
    later = request(2, [8, 9])
    engine.submit([later])
    found = run(engine, [request(1, []).id, later.id])
    check(later, found[later.id])


@mutant(
    "rows-asked-for-between-two-steps-are-of-the-continuation", scenario(_two_rounds), forms=BOTH
)
class RowsOfTheContinuation(Model):
    """A row that joins a continuation under way is that of its own prompt."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self.last: bytes = b""

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        found = super().rows(requests)
        stayed = [n for n, r in enumerate(requests) if r.id == self.last]
        self.last = requests[0].id if requests else b""
        if stayed and len(found) == 2:
            found[1 - stayed[0]] = found[stayed[0]]
        return found
