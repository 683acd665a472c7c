"""The model of an engine: what was asked of it, and so what it has to answer.

It is told every operation, carries it out, and judges all that the engine says: each outcome, how
much is in flight after each call, and the rows that were handed out before.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from lmpool.backends.contract.breaches import BrokenPromise, expect
from lmpool.backends.contract.continuations import is_cut_short
from lmpool.backends.contract.operations import (
    AdapterFiles,
    AddAdapter,
    Asked,
    CachePrefix,
    Cancel,
    ClearCache,
    Operation,
    RemoveAdapter,
    Settle,
    Step,
    Submit,
)
from lmpool.backends.contract.owners import held_bytes, owner
from lmpool.backends.contract.streams import Told
from lmpool.backends.contract.subject import Adapter
from lmpool.backends.contract.truth import Truth
from lmpool.backends.contract.want_reference import Answered
from lmpool.backends.contract.wants import References
from lmpool.backends.engine import Engine, Outcome, Request, Tokens
from lmpool.errors import AdapterError, PromptFailed
from lmpool.wants import Generate

_ONE_OUTCOME: Final = "each request has exactly one outcome"
_IDLE_STEPS: Final = 1_000
_IDLE_SECONDS: Final = 0.5
_JUDGED_TOGETHER: Final = 2_048
_HELD_ROWS: Final = 96
_HELD_BYTES: Final = 64 << 20
_BLOCKS: Final = 3
"""Large blocks that hold rows: more than a table or two."""

_Numbers: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.uint16]


@dataclass(slots=True, eq=False)
class _Living:
    """A request without an outcome, as it was submitted."""

    asked: Asked
    adapter: Adapter | None
    refused: bool
    """Whether it must fail."""
    tokens: Tokens
    """As they were submitted: an array of the caller's."""
    may_fail: bool = False
    """Whether it may: its adapter went while it was in flight."""
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class _HeldRow:
    row: _Numbers
    checksum: int
    asked: Asked


class Model:
    """Carries operations out on `engine` and raises `BrokenPromise` for what is not right."""

    def __init__(self, engine: Engine, truth: Truth, references: References) -> None:
        self._engine = engine
        self._truth = truth
        self._references = references
        self._living: dict[bytes, _Living] = {}
        self._cancelled: dict[bytes, _Living] = {}
        """They may have an outcome yet, as long as the engine says that something is in flight."""
        self._adapters: dict[str, Adapter] = {}
        self._finished: list[Answered] = []
        self._held: list[_HeldRow] = []
        self._blocks: dict[int, _Numbers] = {}
        self._together = max(1, min(_JUDGED_TOGETHER, _HELD_BYTES // truth.info.vocab_size // 4))
        self._told = Told()
        self._steps = 0

    def apply(self, operation: Operation) -> None:
        """Carry it out and judge what came of it."""
        try:
            self._apply(operation)
        except BrokenPromise:
            raise
        except Exception as error:
            raise BrokenPromise(
                "what a request or an operation does wrong is told by its outcome",
                f"{type(error).__name__}: {error} from: {operation}",
            ) from error
        self._check_in_flight(operation)

    def _apply(self, operation: Operation) -> None:
        if not isinstance(operation, (Submit, Step, Settle, Cancel)):
            self._told.work_through(self._living)
        match operation:
            case Submit(asked):
                self._submit(asked)
            case Step(times):
                for _ in range(times):
                    if self._living or self._cancelled:
                        self._step()
            case Settle():
                self._settle()
            case Cancel(numbers):
                self._cancel(numbers)
            case AddAdapter(files):
                self._add(files)
            case RemoveAdapter(name):
                self._remove(name)
            case ClearCache():
                self._engine.clear_cache()
            case CachePrefix(prompt):
                try:
                    self._engine.cache_prefix(np.array(prompt, np.uint32))
                except PromptFailed:
                    pass
            case _:
                assert_never(operation)

    # --- requests ------------------------------------------------------------------------------

    def _submit(self, asked: Iterable[Asked]) -> None:
        """Submit those whose ids are free, as ids are unique among what is in flight."""
        requests: list[Request] = []
        for each in asked:
            if each.id in self._living:
                continue
            ghost = self._cancelled.get(each.id)
            if ghost is not None and ghost.asked != each:
                continue  # workers ask for the same again under an id, and for nothing else
            adapter = None if each.adapter is None else self._adapters.get(each.adapter)
            refused = self._must_fail(each) or (adapter is None and each.adapter is not None)
            request = each.request()
            self._living[each.id] = _Living(each, adapter, refused, request.tokens)
            requests.append(request)
        self._engine.submit(requests)
        if len(requests) % 2:  # the list is the caller's, who may use it again or not
            requests.clear()

    def _must_fail(self, asked: Asked) -> bool:
        info, prompt, want = self._truth.info, asked.prompt, asked.want
        longest = want.longest_prompt(info.max_prompt_tokens)
        fits = 0 < len(prompt) <= longest and max(prompt) < info.vocab_size
        if not fits or want.misfit_prompt(len(prompt)) is not None:
            return True
        return self._references.of(want).refuses(want, info)

    def _step(self) -> int:
        company = len(self._living) + len(self._cancelled)
        outcomes = self._engine.step()
        for part in self._engine.parts():
            living = self._living.get(part.id)
            if living is not None:
                self._told.take(part, living.asked)
        for outcome in outcomes:
            self._take(outcome, company)
        self._steps += 1
        if len(self._finished) >= self._together:
            self._judge()
        return len(outcomes)

    def _take(self, outcome: Outcome, company: int) -> None:
        """Judge the form of an outcome at once; its value is judged with others'."""
        expect(
            isinstance(outcome, Outcome),
            "step returns Outcomes",
            type(outcome),
        )
        living = self._living.pop(outcome.id, None) or self._cancelled.pop(outcome.id, None)
        if living is None:
            raise BrokenPromise(_ONE_OUTCOME, f"one more came, for the id {outcome.id!r}")
        asked = living.asked
        self._told.end(asked, None if living.cancelled else outcome.answer)
        expect(
            not living.tokens.flags.writeable or tuple(living.tokens.tolist()) == asked.prompt,
            "a request's tokens are the caller's",
            "somebody wrote into those of",
            asked,
        )
        kinds = [outcome.row is not None, outcome.answer is not None, outcome.error is not None]
        expect(sum(kinds) == 1, "an outcome is one of a row, an answer or an error", asked)
        if outcome.error is not None:
            expect(
                isinstance(outcome.error, PromptFailed),
                "a request that fails has a PromptFailed",
                f"{outcome.error!r}: {asked}",
            )
            expect(
                living.refused or living.may_fail or living.cancelled,
                "a request that can be run has an answer",
                f"{outcome.error}: {asked}",
            )
            return
        expect(not living.refused, "what cannot be run fails", "it has an answer:", asked)
        if living.cancelled and isinstance(asked.want, Generate) and asked.want.max_tokens > 100:
            expect(is_cut_short(outcome, asked), "cancelled requests end", f"{asked} ran on")
        self._finished.append(Answered(asked, living.adapter, outcome))
        self._hold(asked, outcome, company)

    def _settle(self) -> None:
        """Step until nothing is in flight, and judge what came."""
        idle, since = 0, time.monotonic()
        needed = sum(self._work_of(living) for living in self._living.values())
        while self._engine.in_flight():
            if self._step():
                idle, since = 0, time.monotonic()
            idle += 1
            if idle > _IDLE_STEPS + needed and time.monotonic() - since > _IDLE_SECONDS:
                some = next(iter((*self._living.values(), *self._cancelled.values())), None)
                raise BrokenPromise(
                    _ONE_OUTCOME,
                    f"none in {idle} steps, and in_flight() is {self._engine.in_flight()}"
                    + ("" if some is None else f": {some.asked}"),
                )
            self._check_in_flight(Step())
        if self._living:
            first = next(iter(self._living.values()))
            raise BrokenPromise(_ONE_OUTCOME, f"{len(self._living)} have none: {first.asked}")
        self._cancelled.clear()
        outcomes = self._engine.step()
        expect(not outcomes, _ONE_OUTCOME, f"an idle engine has {len(outcomes)} more")
        self._judge()

    def _work_of(self, living: _Living) -> int:
        """Steps that a request may take: no more than it has tokens, now and at its end."""
        want = living.asked.want
        return len(living.asked.prompt) + (want.max_tokens if isinstance(want, Generate) else 1)

    def _cancel(self, numbers: Sequence[int]) -> None:
        ids = [Asked(number, (0,)).id for number in numbers]
        # A collection of any kind, which is the caller's.
        wanted = set(ids) if len(ids) % 2 else ids.copy()
        self._engine.cancel(wanted)
        self._told.forget(ids)
        wanted.clear()
        for cancelled in ids:
            living = self._living.pop(cancelled, None)
            if living is not None:
                living.cancelled = True
                self._cancelled[cancelled] = living

    # --- adapters ------------------------------------------------------------------------------

    def _add(self, files: AdapterFiles) -> None:
        adapter = self._truth.adapter(files)
        try:
            self._engine.add_adapter(files.name, adapter.folder)
        except AdapterError as error:
            room = self._truth.suite.most_adapters
            expect(
                len(self._adapters) >= room,
                f"{room} adapters can be loaded",
                f"{error} with {len(self._adapters)} of them",
            )
            return
        # Requests in flight by one that it replaces are answered by that one. Those that came while
        # there was none may be answered by it.
        self._adapters[files.name] = adapter
        for living in (*self._living.values(), *self._cancelled.values()):
            if living.asked.adapter == files.name and living.adapter is None:
                living.refused, living.may_fail = self._must_fail(living.asked), True
                living.adapter = adapter

    def _remove(self, name: str) -> None:
        """The adapter of this name goes: its requests have an answer of it, or fail."""
        self._engine.remove_adapter(name)
        self._adapters.pop(name, None)
        for living in (*self._living.values(), *self._cancelled.values()):
            if living.asked.adapter == name:
                living.may_fail = True

    # --- what is always judged -----------------------------------------------------------------

    def _check_in_flight(self, operation: Operation) -> None:
        found = self._engine.in_flight()
        least, most = len(self._living), len(self._living) + len(self._cancelled)
        expect(
            least <= found <= most,
            "in_flight is the number of requests that have had no outcome",
            found,
            f"instead of {least}" + (f" to {most}" if least < most else "") + ":",
            operation,
        )

    def _judge(self) -> None:
        finished, self._finished = self._finished, []
        self._references.judge(finished, self._truth)
        self._truth.check_info()
        self.check_held()

    def _hold(self, asked: Asked, outcome: Outcome, company: int) -> None:
        """Keep some of the rows, as callers do."""
        row = outcome.row
        if not isinstance(row, np.ndarray):
            return  # the reference of its want tells
        if len(self._held) < min(_HELD_ROWS, _HELD_BYTES // (row.nbytes or 1)):
            self._held.append(_HeldRow(row, zlib.crc32(row.tobytes()), asked))
        elif self._steps % 5 == 0:  # now and then another one, in the place of an old one
            place = zlib.crc32(asked.id) % len(self._held)
            self._held[place] = _HeldRow(row, zlib.crc32(row.tobytes()), asked)
        self._check_block(row, asked, company)

    def _check_block(self, row: _Numbers, asked: Asked, company: int) -> None:
        """See to it that a row lies in no large block, but in a table of which there is one."""
        room = 2 * row.nbytes * max(company, 16) + (64 << 10)
        held = held_bytes(row)
        if held <= room:
            return
        self._blocks[id(owner(row))] = row  # held, so that its owner's id is nobody else's
        expect(
            len(self._blocks) < _BLOCKS,
            "a row keeps no more alive than the rows of its batch",
            f"{row.nbytes} bytes in a block of {held}, with {company} in flight:",
            asked,
        )

    def check_held(self) -> None:
        """See to it that the rows of before are as they were."""
        for held in self._held:
            expect(
                zlib.crc32(held.row.tobytes()) == held.checksum,
                "rows that were handed out stay as they are",
                "this one was written again:",
                held.asked,
            )
