"""Engines whose rows are wrong, or in a form that nobody can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lmpool.backends import Engine, Outcome, Request
from lmpool.backends.mock import mock_row
from lmpool.errors import PromptFailed
from lmpool.wants import Generate, Row
from tests.engines.mutants.engines import F32, Bent, Model, Wrapper
from tests.engines.mutants.registry import BOTH, Make, mutant
from tests.engines.mutants.witnesses import (
    LONGEST,
    OPTIONS,
    VOCAB,
    ask,
    ask_rightly,
    check,
    life,
    prompt_of,
    prompts_of,
    request,
    requests_of,
    rows,
    run,
    scenario,
)

SOME = prompts_of(4)


# --- their form ----------------------------------------------------------------------------------


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
class RowsInHalfPrecision(Wrapper):
    """How a row travels is the worker's to do: the engine's row is float32 all the same."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.half: set[bytes] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        self.half |= {
            r.id for r in requests if isinstance(r.want, Row) and r.want.encoding == "f16"
        }
        super().submit(requests)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        half = self.half & {o.id for o in outcomes}
        self.half -= half
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
class RowsAndErrorsAtOnce(Wrapper):
    """An outcome is one of a row, another answer, or an error."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.long: set[bytes] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        longest = self.info.max_prompt_tokens
        self.long |= {r.id for r in requests if r.tokens.size == longest}
        super().submit(requests)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        error = PromptFailed("this prompt fills the context")
        long = self.long & {o.id for o in outcomes}
        self.long -= long
        return [replace(o, error=error) if o.id in long else o for o in outcomes]


# --- their numbers -------------------------------------------------------------------------------


@mutant("rows-in-bits-instead-of-nats", rows(SOME))
class RowsInBits(Model):
    """Log-probabilities are in natural log."""

    def row(self, tokens, adapter) -> F32:
        return super().row(tokens, adapter) / np.float32(np.log(2))


@mutant(
    "rows-not-normalized-from-128-tokens-on",
    rows([prompt_of(127), prompt_of(128)]),
    forms=BOTH,
    subtle=True,
)
class RowsNotNormalizedWhenLong(Model):
    """Rows are normalized, also those of long prompts."""

    def row(self, tokens, adapter) -> F32:
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

    def row(self, tokens, adapter) -> F32:
        return super().row(tokens[1:] if len(tokens) == self.longest else tokens, adapter)


@mutant(
    "rows-of-the-last-but-one-position-at-powers-of-two",
    rows([prompt_of(n) for n in (63, 64, 65)]),
    subtle=True,
)
class RowsOfTheLastButOne(Model):
    """The row is that after the last token, at every length (wrong for 32, 64, 128 ... tokens)."""

    def row(self, tokens, adapter) -> F32:
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


# --- whose they are ------------------------------------------------------------------------------


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
class RowsSwappedWhenMixed(Wrapper):
    """Right row, right prompt: also of adapters' rows beside continuations under way."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.wants: dict[bytes, Request] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        self.wants |= {r.id: r for r in requests}
        super().submit(requests)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        rows = [n for n, o in enumerate(outcomes) if o.row is not None]
        adapted = any(o.id in self.wants and self.wants[o.id].adapter for o in outcomes)
        for outcome in outcomes:
            self.wants.pop(outcome.id, None)
        if (
            adapted
            and len(rows) > 1
            and any(isinstance(r.want, Generate) for r in self.wants.values())
        ):
            a, b = outcomes[rows[0]], outcomes[rows[-1]]
            outcomes[rows[0]], outcomes[rows[-1]] = replace(a, row=b.row), replace(b, row=a.row)
        return outcomes


class _Counted(Model):
    """A model that knows how many rows it has computed."""

    def __init__(self, info) -> None:
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
class DuplicatesHaveOneOutcome(Wrapper):
    """Every request has an outcome, also of a prompt that is asked for twice at once."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.keys: dict[bytes, tuple[bytes, object, object]] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        for each in requests:
            key = (
                each.tokens.tobytes(),
                each.adapter,
                each.want if isinstance(each.want, Row) else each.id,
            )
            if key not in self.keys.values():
                self.keys[each.id] = key
                super().submit([each])

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        for outcome in outcomes:
            self.keys.pop(outcome.id, None)
        return outcomes


# --- what becomes of them ------------------------------------------------------------------------


def _held(engine: Engine) -> None:
    first, second = requests_of(prompts_of(6)), requests_of(prompts_of(6, seed=1))
    outcomes = ask(engine, first)
    ask(engine, second)
    engine.clear_cache()
    ask(engine, second[:1])
    for each, outcome in zip(first, outcomes, strict=True):
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

    def __init__(self, inner) -> None:
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

    def __init__(self, inner) -> None:
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

    def row(self, tokens, adapter) -> F32:
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

    def __init__(self, info) -> None:
        super().__init__(info)
        self.last: bytes = b""

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        found = super().rows(requests)
        stayed = [n for n, r in enumerate(requests) if r.id == self.last]
        self.last = requests[0].id if requests else b""
        if stayed and len(found) == 2:
            found[1 - stayed[0]] = found[stayed[0]]
        return found
