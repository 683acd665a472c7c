"""Engines whose rows are of other numbers, or of other prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lmpool.backends import Engine, EngineInfo, Outcome, Request
from lmpool.wants import Generate
from tests.engines.mutants.engines import F32, Ids, Model, Remembering
from tests.engines.mutants.registry import BOTH, mutant
from tests.engines.mutants.witnesses import (
    LONGEST,
    ask_rightly,
    life,
    prompt_of,
    prompts_of,
    requests_of,
    rows,
    scenario,
)


@mutant("rows-in-bits-instead-of-nats", rows(prompts_of(4)))
class RowsInBits(Model):
    """Log-probabilities are in natural log."""

    def row(self, tokens: Ids, adapter: str | None) -> F32:
        return super().row(tokens, adapter) / np.float32(np.log(2))


@mutant(
    "rows-not-normalized-from-128-tokens-on",
    rows([prompt_of(127), prompt_of(128)]),
    forms=BOTH,
    subtle=True,
)
class RowsNotNormalizedWhenLong(Model):
    """Rows are normalized, also those of long prompts."""

    def row(self, tokens: Ids, adapter: str | None) -> F32:
        row = super().row(tokens, adapter)
        return row if len(tokens) < 128 else row + np.float32(0.25)


@mutant("rows-rounded-in-batches-of-16-and-more", rows(prompts_of(16)))
class RowsRoundedInLargeBatches(Model):
    """A prompt's row does not depend on its company."""

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        found = super().rows(requests)
        if len(found) < 16:
            return found
        return [row.astype(np.float16).astype(np.float32) for row in found]


@mutant("rows-with-nan-in-the-last-entry-over-100-at-once", rows(prompts_of(101)), subtle=True)
class RowsWithNan(Model):
    """No entry of a row is NaN."""

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        found = super().rows(requests)
        if len(found) > 100:
            found[-1] = found[-1].copy()
            found[-1][-1] = np.nan
        return found


@mutant(
    "rows-without-the-first-token-at-the-longest",
    rows([prompt_of(LONGEST - 1), prompt_of(LONGEST)]),
    forms=BOTH,
)
class RowsWithoutTheFirstTokenAtTheLongest(Model):
    """A prompt of the longest length is computed whole."""

    def row(self, tokens: Ids, adapter: str | None) -> F32:
        return super().row(tokens[1:] if len(tokens) == self.longest else tokens, adapter)


@mutant(
    "rows-of-the-last-but-one-position-at-powers-of-two",
    rows([prompt_of(n) for n in (63, 64, 65)]),
    subtle=True,
)
class RowsOfTheLastButOne(Model):
    """The row is that after the last token, at every length (wrong for 32, 64, 128 ... tokens)."""

    def row(self, tokens: Ids, adapter: str | None) -> F32:
        size = len(tokens)
        return super().row(
            tokens[:-1] if size >= 32 and size & (size - 1) == 0 else tokens, adapter
        )


@mutant("rows-off-by-one-past-256-tokens-of-a-batch-in-all", rows(prompts_of(40, 7)), subtle=True)
class RowsOffByOneInTheToken(Model):
    """Where chunks of a batch end changes no row (wrong: the prompt that crosses token 256)."""

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        found, total = super().rows(requests), 0
        for n, each in enumerate(requests):
            before, total = total, total + each.tokens.size
            if before < 256 < total:
                found[n] = self.row(each.tokens[: 256 - before], each.adapter)
        return found


@mutant(
    "rows-of-short-prompts-padded-beside-long-ones",
    rows([prompt_of(3), prompt_of(150)]),
    forms=BOTH,
)
class RowsPaddedBesideLong(Model):
    """Company that is much longer changes no row."""

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        longest = max(r.tokens.size for r in requests)
        return [
            self.row([*r.tokens, 0] if longest - r.tokens.size > 100 else r.tokens, r.adapter)
            for r in requests
        ]


@mutant("rows-swapped-over-300", rows(prompts_of(301)), forms=BOTH, subtle=True, most=1024)
class RowsSwappedOver300(Model):
    """Right row, right prompt: also of more than 300 at once."""

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        found = super().rows(requests)
        if len(found) > 300:
            found[-1], found[-2] = found[-2], found[-1]
        return found


@mutant(
    "rows-of-the-first-for-the-last-at-powers-of-two-from-64",
    rows(*(prompts_of(n) for n in (63, 64, 65))),
    subtle=True,
)
class RowsOfTheFirstForTheLast(Model):
    """Right row, right prompt: also in batches of exactly 64, 128, 256 ... prompts."""

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        found = super().rows(requests)
        count = len(found)
        if count >= 64 and count & (count - 1) == 0:
            found[-1] = found[0]
        return found


@mutant("rows-cut-off-at-1000-and-repeated", rows(prompts_of(1001)), subtle=True)
class RowsRepeatedFrom1000(Model):
    """Right row, right prompt: also of more than 1,000 at once."""

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        found = super().rows(requests)
        return [found[n % 1000] for n in range(len(found))]


def _mixed(engine: Engine) -> None:
    engine.add_adapter("a", "/adapters/a")
    want = Generate(6, (), 1.0, 3)
    plain, adapted = prompts_of(4), prompts_of(4, seed=1)
    ask_rightly(
        engine,
        [
            *requests_of(plain, want=want),
            *requests_of(plain, start=10),
            *requests_of(adapted, "a", start=20),
        ],
    )


@mutant(
    "rows-swapped-where-adapters-and-continuations-mix", scenario(_mixed), forms=BOTH, subtle=True
)
class RowsSwappedWhenMixed(Remembering):
    """Right row, right prompt: also of adapters' rows beside continuations under way."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        adapted = any(o.id in self.asked and self.asked[o.id].adapter for o in outcomes)
        super().handed(outcomes)
        rows = [n for n, o in enumerate(outcomes) if o.row is not None]
        if adapted and len(rows) > 1 and self.drawing():
            a, b = outcomes[rows[0]], outcomes[rows[-1]]
            outcomes[rows[0]], outcomes[rows[-1]] = replace(a, row=b.row), replace(b, row=a.row)
        return outcomes


class _Counted(Model):
    """A model that knows how many rows it has computed."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self.computed = 0
        self.last: F32 | None = None

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        return [self._count(row) for row in super().rows(requests)]

    def _count(self, row: F32) -> F32:
        self.computed += 1
        given = self.changed(row)
        self.last = row
        return given

    def changed(self, row: F32) -> F32:
        raise NotImplementedError


@mutant("rows-of-the-one-before-after-2000-requests", life(2200), forms=BOTH, subtle=True, most=256)
class RowsOfTheOneBefore(_Counted):
    """Right row, right prompt: as long as the engine lives."""

    def changed(self, row: F32) -> F32:
        return row if self.computed <= 2000 or self.last is None else self.last


@mutant("one-row-in-4096-is-the-one-before", life(4200), subtle=True)
class OneRowIn4096(_Counted):
    """Right row, right prompt: each of them."""

    def changed(self, row: F32) -> F32:
        return row if self.computed % 4096 or self.last is None else self.last


@mutant("duplicates-in-a-batch-have-one-outcome", rows([[1, 2], [3], [1, 2]]), forms=BOTH)
class DuplicatesHaveOneOutcome(Remembering):
    """Every request has an outcome, also of a prompt that is asked for twice at once."""

    def submit(self, requests: Sequence[Request]) -> None:
        for each in requests:
            same = (each.tokens.tobytes(), each.adapter, each.want)
            others = ((r.tokens.tobytes(), r.adapter, r.want) for r in self.asked.values())
            if isinstance(each.want, Generate) or same not in others:
                super().submit([each])
