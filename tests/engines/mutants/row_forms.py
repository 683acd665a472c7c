"""Engines whose rows have a form that nobody can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lmpool.backends import Outcome, Request
from lmpool.errors import PromptFailed
from lmpool.wants import Row
from tests.engines.mutants.engines import F32, Bent, Model, Remembering
from tests.engines.mutants.registry import BOTH, mutant
from tests.engines.mutants.witnesses import (
    LONGEST,
    ask_rightly,
    prompt_of,
    prompts_of,
    requests_of,
    rows,
    scenario,
)

SOME = prompts_of(4)


@mutant("rows-as-float64", rows(SOME), forms=BOTH)
class RowsAsFloat64(Bent):
    """A row is float32."""

    def bend(self, outcome: Outcome) -> Outcome:
        return replace(outcome, row=outcome.row.astype(np.float64))


@mutant("rows-strided", rows(SOME))
class RowsStrided(Bent):
    """A row is one piece of memory, not every second entry of another."""

    def bend(self, outcome: Outcome) -> Outcome:
        return replace(outcome, row=np.repeat(outcome.row, 2)[::2])


@mutant("rows-reversed-in-memory", rows(SOME), forms="fed")
class RowsReversedInMemory(Bent):
    """A row is one piece of memory, not a view that is read from its end."""

    def bend(self, outcome: Outcome) -> Outcome:
        return replace(outcome, row=outcome.row[::-1].copy()[::-1])


@mutant("rows-big-endian", rows(SOME), forms=BOTH)
class RowsBigEndian(Bent):
    """A row is float32 in the machine's byte order."""

    def bend(self, outcome: Outcome) -> Outcome:
        return replace(outcome, row=outcome.row.astype(">f4"))


@mutant("rows-with-a-leading-axis", rows(SOME))
class RowsWithALeadingAxis(Bent):
    """A row is [vocab], not [1, vocab]."""

    def bend(self, outcome: Outcome) -> Outcome:
        return replace(outcome, row=outcome.row[None])


@mutant("rows-padded-to-64-entries", rows(SOME))
class RowsPaddedTo64Entries(Bent):
    """A row has an entry for each id, and none for what pads the head's matrix."""

    def bend(self, outcome: Outcome) -> Outcome:
        padding = np.full(64 - outcome.row.size % 64, -np.inf, np.float32)
        return replace(outcome, row=np.concatenate([outcome.row, padding]))


@mutant("rows-one-entry-short-for-adapters", rows(SOME, adapters="a", adapter="a"))
class RowsOneEntryShortForAdapters(Model):
    """A row has an entry for each id, for an adapter too."""

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        found = super().rows(requests)
        plain = all(r.adapter is None for r in requests)
        return (
            found
            if plain
            else [
                row[: row.size - (r.adapter is not None)]
                for r, row in zip(requests, found, strict=True)
            ]
        )


@mutant("rows-as-lists-of-floats", rows(SOME))
class RowsAsLists(Bent):
    """A row is an array."""

    def bend(self, outcome: Outcome) -> Outcome:
        return replace(outcome, row=outcome.row.tolist())


@mutant(
    "rows-in-half-precision-where-they-travel-so",
    scenario(lambda engine: ask_rightly(engine, requests_of(SOME, want=Row("f16")))),
    subtle=True,
)
class RowsInHalfPrecision(Remembering):
    """How a row travels is the worker's to do: the engine's row is float32 all the same."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        half = {name for name, each in self.asked.items() if each.want == Row("f16")}
        super().handed(outcomes)
        return [
            replace(o, row=o.row.astype(np.float16)) if o.id in half and o.row is not None else o
            for o in outcomes
        ]


@mutant("rows-of-bfloat16-logits-without-their-logsumexp", rows(SOME))
class Bfloat16WithoutLogsumexp(Bent):
    """Bits of bfloat16 logits come with their logsumexp (and where the head computes so alone)."""

    def bend(self, outcome: Outcome) -> Outcome:
        shifted = (outcome.row + np.float32(3)).view(np.uint32) >> 16
        return replace(outcome, row=shifted.astype(np.uint16))


@mutant("rows-and-errors-at-once-for-the-longest-prompts", rows([prompt_of(LONGEST)]), subtle=True)
class RowsAndErrorsAtOnce(Remembering):
    """An outcome is one of a row, another answer, or an error."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        longest, error = self.info.max_prompt_tokens, PromptFailed("this prompt fills the context")
        long = {name for name, each in self.asked.items() if each.tokens.size == longest}
        super().handed(outcomes)
        return [replace(o, error=error) if o.id in long else o for o in outcomes]
