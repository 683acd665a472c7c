"""The contract suite against the engines of the base environment, and the suite itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmpool.backends import Outcome, Request
from lmpool.backends.contract import Adapter, EngineContract
from lmpool.backends.mock import MockEngine, mock_row
from lmpool.wants import Generate
from tests.support.fed_engine import FedEngine

VOCAB = 2000


class TestMock(EngineContract):
    """Its rows are known without a model, and an adapter's depend on its name alone."""

    engine = "mock"
    options = {"vocab_size": VOCAB, "max_prompt_tokens": 512}
    lacks = {"adapter files": "its rows depend on the adapter's name alone"}

    @classmethod
    def reference(
        cls, prompts: Sequence[Sequence[int]], adapter: Adapter | None = None
    ) -> npt.NDArray[np.float32]:
        name = None if adapter is None else adapter.name
        return np.stack([mock_row(prompt, VOCAB, name) for prompt in prompts])

    @classmethod
    def make_adapter(cls, name: str, folder: Any, seed: int, **how: Any) -> Adapter:
        return Adapter(name, str(folder))


class TestFed(TestMock):
    """The same rows from an engine that is fed while it runs."""

    @classmethod
    def open_engine(cls, **options: Any) -> FedEngine:
        return FedEngine(**{**cls.options, "most": 64, **options})


class TestHF(EngineContract):
    """On one thread of torch: threads that wait for each other take most of the time."""

    engine = "hf"
    options = {"threads": 1}
    bounded = {"kv_cache_bytes": 8 << 20}


# --- the suite itself: engines that break one promise each are found out -------------------------


class Swapped(MockEngine):
    """Gives two prompts each other's rows, in large batches only."""

    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        outcomes = list(super().compute(requests))
        if len(outcomes) > 100:
            a, b = outcomes[40], outcomes[41]
            outcomes[40:42] = Outcome(a.id, b.row), Outcome(b.id, a.row)
        return outcomes


class Suffixed(MockEngine):
    """Takes prompts of one length with the same last tokens for the same."""

    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        rows: dict[tuple[int, bytes], Any] = {}
        for outcome, request in zip(super().compute(requests), requests, strict=True):
            ending = request.tokens.size, request.tokens[-3:].tobytes()
            yield Outcome(outcome.id, rows.setdefault(ending, outcome.row))


class Reusing(MockEngine):
    """Writes every batch's rows into the same memory."""

    block = np.empty((512, VOCAB), np.float32)

    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        for i, outcome in enumerate(super().compute(requests)):
            self.block[i] = outcome.logprobs()
            yield Outcome(outcome.id, self.block[i])


class Hoarding(MockEngine):
    """Keeps every row."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, **options)
        self.kept: list[Any] = []

    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        for outcome in super().compute(requests):
            self.kept.append(np.tile(outcome.logprobs(), 8))  # more than a process has to spare
            yield outcome


class Haunted(MockEngine):
    """Finds a removed adapter again when it is asked for."""

    def remove_adapter(self, name: str) -> None:
        pass


class Mixing(MockEngine):
    """Runs a whole batch with the adapter of its first request."""

    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        first = requests[0].adapter
        return super().compute([Request(request.id, request.tokens, first) for request in requests])


class Deaf(MockEngine):
    """Cannot be told to stop."""

    def cancel(self, ids: Any) -> None:
        pass


class Forgetful(MockEngine):
    """Loses what was in flight when its cache is cleared."""

    def clear_cache(self) -> None:
        self._waiting.clear()


class Cold(MockEngine):
    """Draws at another temperature than it was told."""

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(
            [
                replace(r, want=replace(r.want, temperature=r.want.temperature / 2))
                if isinstance(r.want, Generate)
                else r
                for r in requests
            ]
        )


class Careless(MockEngine):
    """Lets one bad prompt fail its whole batch."""

    def submit(self, requests: Sequence[Request]) -> None:
        if any(r.tokens.size == 0 or r.tokens.max() >= VOCAB for r in requests):
            requests = [replace(request, tokens=request.tokens[:0]) for request in requests]
        super().submit(requests)


@pytest.mark.parametrize(
    ("kind", "test", "arguments"),
    [
        (Swapped, "test_rows_of_mixed_prompts", {"count": 300}),
        (Suffixed, "test_shared_prefixes", {}),
        (Reusing, "test_rows_that_were_handed_out_stay_as_they_are", {}),
        (Hoarding, "test_memory_is_flat", {}),
        (Haunted, "test_adapters_are_added_replaced_and_removed", {"tmp_path": None}),
        (Mixing, "test_adapters_in_one_batch", {"tmp_path": None}),
        (Deaf, "test_cancelling_in_flight", {}),
        (Forgetful, "test_state_is_dropped_in_flight", {}),
        (Cold, "test_draws_follow_the_model", {}),
        (Careless, "test_a_bad_prompt_fails_alone", {"wrong": "id"}),
    ],
)
def test_an_engine_that_breaks_a_promise_is_found_out(
    kind: type[MockEngine], test: str, arguments: dict[str, Any]
) -> None:
    class Broken(TestMock):
        @classmethod
        def open_engine(cls, **options: Any) -> MockEngine:
            return kind("mock", **{**cls.options, **options})

    suite = Broken()
    if test != "test_memory_is_flat":
        arguments = {"opened": suite.open_engine(), **arguments}
    with pytest.raises((AssertionError, KeyError)):
        getattr(suite, test)(**arguments)
    # The promise is what makes the difference, not the test's way of being called.
    right = TestMock()
    if "opened" in arguments:
        arguments["opened"] = right.open_engine()
    getattr(right, test)(**arguments)
