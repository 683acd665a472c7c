"""What mutants are made of: the mock engine in two forms, with parts that a mutant replaces.

Every mutant is one of three: a `Wrapper` (the whole engine, with a method or two of its own), a
`Model` (what computes rows), or a `Sampler` (what draws tokens). Each can be put around, or into,
an engine that takes a batch at a time, and into one that is fed while it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from lmpool.backends import Engine, EngineInfo, Outcome, Request
from lmpool.backends.continuous import Admitted
from lmpool.backends.engine import Measures, Part, Tokens
from lmpool.backends.mock import MockEngine, mock_row
from lmpool.backends.sampling import Continuation, Sampler
from lmpool.wants import Generate, OfRow, Row, Stream
from tests.support.fed_engine import FedEngine

Form = Literal["batch", "fed"]
F32 = npt.NDArray[np.float32]
Ids: TypeAlias = Tokens | Sequence[int]


class Model:
    """Computes the mock engine's rows, and is told what the engine is told."""

    def __init__(self, info: EngineInfo) -> None:
        self.vocab_size: Final = info.vocab_size
        self.longest: Final = info.max_prompt_tokens

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        """Those of requests that are computed at once; of a continuation, with all it has drawn."""
        return [self.row(request.tokens, request.adapter) for request in requests]

    def row(self, tokens: Ids, adapter: str | None) -> F32:
        return mock_row(tokens, self.vocab_size, adapter)

    def cache_prefix(self, tokens: Tokens) -> None: ...

    def clear_cache(self) -> None: ...

    def add_adapter(self, name: str) -> None: ...

    def remove_adapter(self, name: str) -> None: ...


class BatchForm(MockEngine):
    """The mock engine, with a model and a sampler that can be replaced."""

    def __init__(
        self,
        name: str,
        model: type[Model],
        sampler: type[Sampler],
        by_folder: bool,
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        self.model = model(self.info)
        self.sampler = sampler
        self._by_folder = by_folder

    def compute(self, requests: Sequence[Request]) -> list[Outcome]:
        outcomes = super().compute(requests)
        if self._by_folder:
            folders = {None: None, **self.adapters}
            requests = [replace(r, adapter=folders[r.adapter]) for r in requests]
        elif type(self.model) is Model:
            return list(outcomes)
        rows = self.model.rows(requests)
        return [Outcome(o.id, row) for o, row in zip(outcomes, rows, strict=True)]

    def _begin(self, request: Request, want: Generate, outcomes: list[Outcome]) -> None:
        sampler = self.sampler.of(want, request.tokens.size, self.info)
        continuation = Continuation(request, sampler)
        if continuation.finished:
            outcomes.append(Outcome(request.id, answer=continuation.answer()))
        else:
            self._continuations[request.id] = continuation
            if isinstance(want, Stream):
                self._streaming.begin(continuation)

    def cache_prefix(self, tokens: Tokens) -> None:
        self.model.cache_prefix(tokens)

    def clear_cache(self) -> None:
        self.model.clear_cache()

    def add_adapter(self, name: str, path: str) -> None:
        super().add_adapter(name, path)
        self.model.add_adapter(name)

    def remove_adapter(self, name: str) -> None:
        super().remove_adapter(name)
        self.model.remove_adapter(name)


class FedForm(FedEngine):
    """The mock engine that is fed while it runs, with a model and a sampler to be replaced."""

    def __init__(
        self,
        name: str,
        model: type[Model],
        sampler: type[Sampler],
        by_folder: bool,
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        own = {key: value for key, value in options.items() if key not in ("most", "steps")}
        self._mock = MockEngine(name, **own)
        self.model = model(self.info)
        self.sampler = sampler
        self._by_folder = by_folder
        self._folders: dict[str, str] = {}

    def next_to_join(self) -> Sequence[Admitted[str]]:
        return [self._with_sampler(admitted) for admitted in super().next_to_join()]

    def _with_sampler(self, admitted: Admitted[str]) -> Admitted[str]:
        request = admitted.request
        if not isinstance(request.want, Generate) or self.sampler is Sampler:
            return admitted
        sampler = self.sampler.of(request.want, request.tokens.size, self.info)
        continuation = Continuation(request, sampler)
        if isinstance(request.want, Stream):
            self._streaming.begin(continuation)
        return replace(admitted, continuation=continuation)

    def advance(self) -> list[Outcome]:
        due: list[str] = []
        for name, admitted in self.running.items():
            if isinstance(admitted.request.want, (Row, OfRow)):
                self._steps_of[name] += 1
                if self._steps_of[name] < self._steps:
                    continue
            due.append(name)
        if not due:
            return []
        rows = self.model.rows([self._asked(name) for name in due])
        found = [self._hand_on(name, row) for name, row in zip(due, rows, strict=True)]
        return [outcome for outcome in found if outcome is not None]

    def _asked(self, name: str) -> Request:
        """What the model computes for it now."""
        admitted = self.running[name]
        request, tokens = admitted.request, admitted.request.tokens
        if admitted.continuation is not None:
            tokens = admitted.continuation.next_request().tokens
        return Request(request.id, tokens, self._adapter(admitted.adapter))

    def _adapter(self, loaded: str | None) -> str | None:
        if loaded is None:
            return None
        return self._folders[loaded] if self._by_folder else loaded.rpartition("#")[0]

    def load_adapter(self, name: str, path: str) -> str:
        loaded = super().load_adapter(name, path)
        self._folders[loaded] = path
        return loaded

    def unload_adapter(self, adapter: str) -> None:
        super().unload_adapter(adapter)
        del self._folders[adapter]

    def _hand_on(self, name: str, row: F32) -> Outcome | None:
        admitted = self.running[name]
        request, continuation = admitted.request, admitted.continuation
        if continuation is None:
            outcome = Outcome(request.id, row=row)
        else:
            continuation.take(row)
            if not continuation.finished:
                return None
            outcome = Outcome(request.id, answer=continuation.answer())
        self.ended(name)
        return outcome

    def ended(self, name: str) -> Admitted[str] | None:
        self._steps_of.pop(name, None)
        return super().ended(name)

    def abort(self, names: Sequence[str]) -> None:
        """Nothing is noted of them, or it would be a leak."""

    def cache_prefix(self, tokens: Tokens) -> None:
        super().cache_prefix(tokens)
        self.model.cache_prefix(tokens)

    def drop_state(self) -> None:
        super().drop_state()
        self.model.clear_cache()

    def add_adapter(self, name: str, path: str) -> None:
        super().add_adapter(name, path)
        self.model.add_adapter(name)

    def remove_adapter(self, name: str) -> None:
        known = name in self.adapters
        super().remove_adapter(name)
        if known:
            self.model.remove_adapter(name)

    def byte_vocabulary(self) -> list[bytes]:
        return self._mock.byte_vocabulary()

    def tokenizer_files(self) -> Mapping[str, bytes]:
        return self._mock.tokenizer_files()


def open_form(
    form: Form,
    name: str = "mock",
    model: type[Model] = Model,
    sampler: type[Sampler] = Sampler,
    by_folder: bool = False,
    **options: Any,
) -> BatchForm | FedForm:
    """An engine of that form with these parts; right, where no part is given.

    Its rows are `mock_row` of an adapter's name, or, `by_folder`, of the folder that it is loaded
    from: of those, a name that stands for another folder has other rows.
    """
    make = BatchForm if form == "batch" else FedForm
    return make(name, model, sampler, by_folder, **options)


Inner: TypeAlias = BatchForm | FedForm


class Wrapper(Engine):
    """A right engine, all of whose methods go through here."""

    def __init__(self, inner: Inner) -> None:
        self.inner: Any = inner
        self.continuous = inner.continuous  # type: ignore[misc]
        self.info = inner.info

    def submit(self, requests: Sequence[Request]) -> None:
        self.inner.submit(requests)

    def step(self) -> Sequence[Outcome]:
        return self.handed(list(self.inner.step()))

    def parts(self) -> Sequence[Part]:
        found: Sequence[Part] = self.inner.parts()
        return found

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        """What `step` returns of what the right engine gave out."""
        return outcomes

    def in_flight(self) -> int:
        return int(self.inner.in_flight())

    def cancel(self, ids: Collection[bytes]) -> None:
        self.inner.cancel(ids)

    def add_adapter(self, name: str, path: str) -> None:
        self.inner.add_adapter(name, path)

    def remove_adapter(self, name: str) -> None:
        self.inner.remove_adapter(name)

    def cache_prefix(self, tokens: Tokens) -> None:
        self.inner.cache_prefix(tokens)

    def clear_cache(self) -> None:
        self.inner.clear_cache()

    def measures(self) -> Measures:
        return self.counted(self.inner.measures())

    def counted(self, found: Measures) -> Measures:
        """What `measures` returns of what the right engine counts."""
        return found

    def tokenizer_files(self) -> Mapping[str, bytes]:
        found: Mapping[str, bytes] = self.inner.tokenizer_files()
        return found

    def byte_vocabulary(self) -> list[bytes] | None:
        found: list[bytes] | None = self.inner.byte_vocabulary()
        return found

    def close(self) -> None:
        self.inner.close()


class Bent(Wrapper):
    """A wrapper that changes each row, or each request on its way in."""

    def step(self) -> Sequence[Outcome]:
        return [
            outcome if outcome.row is None else self.bend(outcome)
            for outcome in self.handed(list(self.inner.step()))
        ]

    def bend(self, outcome: Outcome) -> Outcome:
        return outcome

    def submit(self, requests: Sequence[Request]) -> None:
        self.inner.submit([self.taken(request) for request in requests])

    def taken(self, request: Request) -> Request:
        return request


class Remembering(Wrapper):
    """A wrapper that knows the requests in flight: `asked`, by id, until `handed` or cancelled."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.asked: dict[bytes, Request] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        self.asked |= {r.id: r for r in requests}
        super().submit(requests)

    def cancel(self, ids: Collection[bytes]) -> None:
        super().cancel(ids)
        for name in ids:
            self.asked.pop(name, None)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        for outcome in outcomes:
            self.asked.pop(outcome.id, None)
        return outcomes

    def drawing(self) -> list[bytes]:
        """The continuations under way."""
        return [name for name, each in self.asked.items() if isinstance(each.want, Generate)]
