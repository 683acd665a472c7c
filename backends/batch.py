"""Engines that compute one batch at a time."""

from __future__ import annotations

import logging
import sys
from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import assert_never

from lmpool.backends.admission import are_plain, reason_to_refuse
from lmpool.backends.answers import answered
from lmpool.backends.engine import Engine, Outcome, Request
from lmpool.backends.sampling import Continuation, Sampler
from lmpool.errors import EngineBroken, PromptFailed
from lmpool.wants import Generate, Generation, OfRow, Row

logger = logging.getLogger(__name__)


class BatchEngine(Engine):
    """An engine that computes one batch at a time.

    A step computes every row asked for since the last one, and one token of every continuation
    under way. `submit` may be called between any two steps.
    """

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self._most_prompts = sys.maxsize
        """What fits into memory, once a batch did not."""
        self._waiting: list[Request] = []
        self._continuations: dict[bytes, Continuation] = {}
        self._outcomes: list[Outcome] = []
        """What the next step gives out first."""

    @abstractmethod
    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        """One outcome with a row, an answer or an error for each request, in any order.

        The prompts were checked: 1 to `max_prompt_tokens` ids, all below `vocab_size`, the adapter
        one of `adapters`. Each wants a row, or what follows from one (`OfRow`): whoever can reduce
        it where it was computed gives the answer, others the row. An exception fails the batch,
        which is then halved until the request that caused it stands alone; `EngineBroken` passes
        through.
        """

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)

    def in_flight(self) -> int:
        return len(self._waiting) + len(self._continuations) + len(self._outcomes)

    def cancel(self, ids: Collection[bytes]) -> None:
        self._waiting = [r for r in self._waiting if r.id not in ids]
        self._outcomes = [o for o in self._outcomes if o.id not in ids]
        for cancelled in ids:
            self._continuations.pop(cancelled, None)

    def finish_adapter(self, name: str) -> None:
        """Answer the requests in flight by an adapter; call it before another takes its name.

        What else ends meanwhile is given out by the next step as well.
        """
        while self._asking(name):
            # The step gives out what is kept, too: only then is there something to add to.
            given = self.step()
            self._outcomes.extend(given)

    def refuse_adapter(self, name: str) -> None:
        """Let the requests in flight by an adapter fail; call it when it is removed."""
        asking = self._asking(name)
        if asking:
            self.cancel(asking)
            gone = PromptFailed(f"the adapter {name!r} was removed before this was computed")
            self._outcomes += [Outcome(asked, error=gone) for asked in asking]

    def _asking(self, name: str) -> set[bytes]:
        """The ids in flight by an adapter."""
        asking = {r.id for r in self._waiting if r.adapter == name}
        return asking | {c.id for c in self._continuations.values() if c.adapter == name}

    def step(self) -> Sequence[Outcome]:
        batch, self._waiting = self._waiting, []
        accepted, outcomes = self._check(batch)
        if self._outcomes:
            outcomes = [*self._outcomes, *outcomes]
            self._outcomes = []
        rows: list[Request] = []
        for request in accepted:
            match request.want:
                case Row() | OfRow():
                    rows.append(request)
                case Generate() as want:
                    self._begin(request, want, outcomes)
                case _:
                    assert_never(request.want)
        going_on, refused = self._check([c.next_request() for c in self._continuations.values()])
        for outcome in refused:  # its adapter was removed
            del self._continuations[outcome.id]
        outcomes.extend(refused)
        rows.extend(going_on)
        if rows:
            computed = self._attempt(rows)
            outcomes.extend(self._continue(computed) if self._continuations else computed)
        return outcomes

    def _check(self, batch: Sequence[Request]) -> tuple[Sequence[Request], list[Outcome]]:
        """The requests that can be run, and the refusals of the others."""
        if not batch or are_plain(batch, self.info):
            return batch, []
        accepted: list[Request] = []
        refused: list[Outcome] = []
        for request in batch:
            reason = self._reason_to_refuse(request)
            if reason is None:
                accepted.append(request)
            else:
                refused.append(Outcome(request.id, error=PromptFailed(reason)))
        return accepted, refused

    def _reason_to_refuse(self, request: Request) -> str | None:
        return reason_to_refuse(request, self.info, self.adapters)

    def _begin(self, request: Request, want: Generate, outcomes: list[Outcome]) -> None:
        continuation = Continuation(request, Sampler.of(want, request.tokens.size, self.info))
        if continuation.finished:
            outcomes.append(_generated(continuation))
        else:
            self._continuations[request.id] = continuation

    def _continue(self, computed: Sequence[Outcome]) -> list[Outcome]:
        """Draw a token of each continuation from its row; return what is not needed for that."""
        outcomes: list[Outcome] = []
        for outcome in computed:
            continuation = self._continuations.get(outcome.id)
            if continuation is None:
                outcomes.append(outcome)
                continue
            if outcome.error is None:
                try:
                    continuation.take(outcome.logprobs())
                except ValueError as error:
                    outcome = Outcome(outcome.id, error=PromptFailed(str(error)))
            if outcome.error is not None:
                del self._continuations[outcome.id]
                outcomes.append(outcome)
            elif continuation.finished:
                del self._continuations[outcome.id]
                outcomes.append(_generated(continuation))
        return outcomes

    def _attempt(self, batch: Sequence[Request]) -> list[Outcome]:
        """Outcomes of a batch, in as many portions as fit into memory."""
        if len(batch) > self._most_prompts:
            most = self._most_prompts
            portions = [batch[i : i + most] for i in range(0, len(batch), most)]
            return [outcome for portion in portions for outcome in self._attempt(portion)]
        half = len(batch) // 2
        try:
            computed = {outcome.id: outcome for outcome in self.compute(batch)}
        except EngineBroken:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if len(batch) == 1:
                logger.warning("a prompt failed: %s", reason)
                return [Outcome(batch[0].id, error=PromptFailed(reason))]
            if is_out_of_memory(error):
                self._most_prompts = half
                logger.warning(
                    "out of memory at %d prompts, from now on %d at most: %s",
                    len(batch),
                    half,
                    reason,
                )
            else:
                logger.warning("a batch of %d failed (%s): halving it", len(batch), reason)
        else:
            return [
                answered(r, computed.get(r.id) or Outcome(r.id, error=_forgotten())) for r in batch
            ]
        return self._attempt(batch[:half]) + self._attempt(batch[half:])


def _generated(continuation: Continuation) -> Outcome:
    return Outcome(continuation.id, answer=Generation(continuation.drawn))


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was short, of the machine or of its GPU: another time it may do."""
    # torch.OutOfMemoryError, and what libraries of a GPU say under names of their own.
    text = f"{type(error).__name__} {error}".lower()
    return isinstance(error, MemoryError) or "outofmemory" in text or "out of memory" in text


def _forgotten() -> PromptFailed:
    return PromptFailed("the engine gave no outcome for this prompt")
