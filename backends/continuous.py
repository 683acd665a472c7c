"""Engines that are fed while they run."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar

from lmpool.backends.admission import reason_to_refuse
from lmpool.backends.answers import answered, head_part
from lmpool.backends.engine import Engine, Outcome, Part, Request, Tokens
from lmpool.backends.sampling import Continuation, Sampler
from lmpool.backends.scoring import Scorings
from lmpool.backends.streaming import Streaming
from lmpool.errors import AdapterError, PromptFailed
from lmpool.wants import Generate, HeadPart, OfRow, Score, Stream

Adapter = TypeVar("Adapter", bound=Hashable)
"""What an engine knows a loaded adapter by: a value that is used for one loading only."""


@dataclass(frozen=True, slots=True, eq=False)
class Admitted(Generic[Adapter]):
    """A request that was accepted.

    `adapter` is the one that its name stood for then; `continuation` is what a `Generate` draws.
    With `alone` it is to be run without company.
    """

    request: Request
    adapter: Adapter | None
    continuation: Continuation | None
    alone: bool = False


class ContinuousEngine(Engine, Generic[Adapter]):
    """An engine that is fed while it runs: prompts join what is running, and leave it as they end.

    Write `begin`, `advance` and `abort`; `drop_state` where state is kept between prompts;
    `load_adapter` and `unload_adapter` where there are adapters. Who joins when, refusals,
    cancelling, and adapters that are removed while requests use them are dealt with here.
    """

    continuous: ClassVar[bool] = True

    def __init__(self) -> None:
        self.adapters: dict[str, Adapter] = {}
        self.waiting: deque[Admitted[Adapter]] = deque()
        """Accepted, and not running yet."""
        self.running: dict[str, Admitted[Adapter]] = {}
        """By the names that `begin` gave them."""
        self._names: dict[bytes, str] = {}
        self._reduced: dict[bytes, Request] = {}
        """Those in flight that want what follows from a row, by id."""
        self._streaming = Streaming()
        self._scorings = Scorings()
        self._scoring_adapters: dict[bytes, Adapter | None] = {}
        """Those of the texts in flight, by id."""
        self._outcomes: list[Outcome] = []
        self.leaving: list[Adapter] = []
        """Removed adapters that are loaded as long as requests in flight use them."""
        self._clearing = False
        """Whether kept state is to be dropped before anything else joins."""

    # --- what an engine writes -----------------------------------------------------------------

    @abstractmethod
    def begin(self, admitted: Admitted[Adapter]) -> str:
        """Let a request join, and return the name by which `advance` and `abort` know it.

        Its prompt was checked: 1 to `max_prompt_tokens` ids, all below `vocab_size`; a continuation
        has room for a token. A `Score` joins where `scores` says so: else the rows that it needs.
        """

    @abstractmethod
    def advance(self) -> Iterable[Outcome]:
        """Work once, while something runs: say what `ended`, and return its outcomes.

        Raises `EngineBroken` when it cannot go on.
        """

    @abstractmethod
    def abort(self, names: Sequence[str]) -> None:
        """End these requests, which nobody waits for."""

    def drop_state(self) -> None:
        """Drop every state kept between prompts. Nothing runs."""

    def load_adapter(self, name: str, path: str) -> Adapter:
        """Load the LoRA adapter in folder `path`. Raises `AdapterError`."""
        raise AdapterError(f"the {self.info.engine} engine has no adapters")

    def unload_adapter(self, adapter: Adapter) -> None:
        """Unload an adapter that nothing in flight uses."""

    # --- what it may write otherwise -----------------------------------------------------------

    def scores(self, adapter: Adapter | None) -> bool:
        """Whether texts by this adapter are scored as they are, and not by a row for each token."""
        return False

    def reason_to_refuse(self, request: Request) -> str | None:
        """Why a request cannot be run; None where it can."""
        return reason_to_refuse(request, self.info, self.adapters)

    def next_to_join(self) -> Iterable[Admitted[Adapter]]:
        """Take those out of `waiting`, of which there are some, that may join what runs now.

        Each joins before the next one is asked for.
        """
        running = next(iter(self.running.values()), None)
        if running is not None and (running.alone or self.waiting[0].alone):
            return ()
        if self.waiting[0].alone:
            return [self.waiting.popleft()]
        joining = list(self.waiting)
        self.waiting.clear()
        return joining

    def adapters_in_use(self) -> set[Adapter]:
        """Those that must stay loaded for requests in flight."""
        held = [admitted.adapter for admitted in (*self.waiting, *self.running.values())]
        held.extend(self._scoring_adapters.values())
        return {adapter for adapter in held if adapter is not None}

    # --- requests ------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            reason = self.reason_to_refuse(request)
            if reason is not None:
                self._outcomes.append(Outcome(request.id, error=PromptFailed(reason)))
                continue
            continuation = None
            if isinstance(request.want, Generate):
                sampler = Sampler.of(request.want, request.tokens.size, self.info)
                continuation = Continuation(request, sampler)
                if continuation.finished:
                    self._outcomes.append(Outcome(request.id, answer=continuation.answer()))
                    continue
                if isinstance(request.want, Stream):
                    self._streaming.begin(continuation)
            if isinstance(request.want, HeadPart):
                self._outcomes.append(head_part(self, request.id, request.want))
                continue
            if isinstance(request.want, OfRow):
                self._reduced[request.id] = request
            adapter = None if request.adapter is None else self.adapters[request.adapter]
            if isinstance(request.want, Score) and not self.scores(adapter):
                self._scorings.begin(request, request.want)
                self._scoring_adapters[request.id] = adapter
                continue
            self.waiting.append(Admitted(request, adapter, continuation))
        self._feed()

    def step(self) -> Sequence[Outcome]:
        self.work()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def work(self) -> None:
        """Work once, where something runs; what ends is given out by the next `step`."""
        if self.running:
            for outcome in self.advance():
                self._take(outcome)
            self._drop(self._scorings.orphans())
        self._feed()
        self._unload_unused()

    def _take(self, outcome: Outcome) -> None:
        """Keep what an engine computed: of a text's rows, when it is scored."""
        if outcome.id in self._scorings:
            scored = self._scorings.take(outcome)
            if scored is None:
                return
            del self._scoring_adapters[scored.id]
            outcome = scored
        elif outcome.id in self._reduced:
            outcome = answered(self._reduced.pop(outcome.id), outcome)
        elif outcome.error is not None:
            self._streaming.end([outcome.id])
        self._outcomes.append(outcome)

    def parts(self) -> Sequence[Part]:
        return self._streaming.parts() if self._streaming else ()

    def ended(self, name: str) -> Admitted[Adapter] | None:
        """The request of this name, which runs no more; None for one that was cancelled."""
        admitted = self.running.pop(name, None)
        if admitted is not None:
            del self._names[admitted.request.id]
        return admitted

    def retry_alone(self, admitted: Admitted[Adapter]) -> None:
        """Run a request again that has `ended`, in no company and with no state kept before it."""
        begun = admitted.continuation
        anew = None if begun is None else begun.anew()
        if anew is not None and isinstance(admitted.request.want, Stream):
            self._streaming.begin(anew)
        self.waiting.appendleft(replace(admitted, continuation=anew, alone=True))
        self._clearing = True

    def _feed(self) -> None:
        """Let those join that may run beside what runs."""
        if self._clearing and not self.running:
            self.drop_state()
            self._clearing = False
        for row in self._scorings.next_rows(self.info.vocab_size):
            adapter = self._scoring_adapters[self._scorings.text(row.id)]
            self.waiting.append(Admitted(row, adapter, None))
        if self.waiting and not self._clearing:
            for admitted in self.next_to_join():
                name = self.begin(admitted)
                self.running[name] = admitted
                self._names[admitted.request.id] = name

    def in_flight(self) -> int:
        texts = len(self._scorings) - self._scorings.asked  # the rows asked for are in the others
        return len(self.waiting) + len(self.running) + texts + len(self._outcomes)

    def cancel(self, ids: Collection[bytes]) -> None:
        wanted = set(ids)
        for cancelled in wanted & self._reduced.keys():
            del self._reduced[cancelled]
        for cancelled in wanted & self._scoring_adapters.keys():
            del self._scoring_adapters[cancelled]
        self._streaming.end(wanted)
        self._scorings.cancel(wanted)
        self._outcomes = [outcome for outcome in self._outcomes if outcome.id not in wanted]
        self._drop(wanted.union(self._scorings.orphans()))
        self._feed()
        self._unload_unused()

    def _drop(self, ids: Collection[bytes]) -> None:
        """End what waits or runs under these ids."""
        if not ids:
            return
        wanted = set(ids)
        self.waiting = deque(w for w in self.waiting if w.request.id not in wanted)
        names = [self._names[cancelled] for cancelled in wanted & self._names.keys()]
        for name in names:
            self.ended(name)
        if names:
            self.abort(names)

    def run_to_end(self, request: Request) -> Outcome:
        """Run one request to its end; what else ends meanwhile is given out by the next `step`."""
        self.submit([request])
        while True:
            for outcome in self._outcomes:
                if outcome.id == request.id:
                    self._outcomes.remove(outcome)
                    return outcome
            self.work()

    # --- kept state and adapters ---------------------------------------------------------------

    def cache_prefix(self, tokens: Tokens) -> None:
        """Compute a prefix, which the engine then keeps as long as it has room.

        Raises `PromptFailed` for one that is no prompt.
        """
        outcome = self.run_to_end(Request(b"lmpool-prefix", tokens))
        if outcome.error is not None:
            raise outcome.error

    def clear_cache(self) -> None:
        """Drop every state kept, as soon as what runs has ended; nothing joins before."""
        self._clearing = True
        self._feed()

    def add_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in folder `path` as `name`, replacing one of that name.

        Requests in flight keep the one that they were submitted with. Raises `AdapterError` where
        it cannot be used; nothing has changed then.
        """
        adapter = self.load_adapter(name, path)
        self.remove_adapter(name)
        self.adapters[name] = adapter

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; its requests in flight are answered before it is unloaded."""
        adapter = self.adapters.pop(name, None)
        if adapter is not None:
            self.leaving.append(adapter)
            self._unload_unused()

    def _unload_unused(self) -> None:
        if not self.leaving:
            return
        used = self.adapters_in_use()
        for adapter in [adapter for adapter in self.leaving if adapter not in used]:
            self.unload_adapter(adapter)
            self.leaving.remove(adapter)
