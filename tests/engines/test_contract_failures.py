"""What the contract says of an engine that fails it, and of one that draws in a way of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lmpool.backends import Outcome, Request
from lmpool.backends.contract import Failure, examine
from lmpool.backends.contract.breaches import BrokenPromise
from lmpool.backends.contract.draws import Draws
from lmpool.backends.contract.operations import Submit
from lmpool.backends.mock import MockEngine
from lmpool.wants import Generate
from tests.engines.test_contract import TestMock as Mock


class Swapped(MockEngine):
    """Gives two prompts each other's rows where a third is beside them."""

    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        outcomes = list(super().compute(requests))
        if len(outcomes) > 2:
            a, b = outcomes[:2]
            outcomes[:2] = Outcome(a.id, b.row), Outcome(b.id, a.row)
        return outcomes


def found(kind: type[MockEngine], **options: Any) -> Failure | None:
    class Suite(Mock):
        own_draws = kind is not Swapped

        @classmethod
        def open_engine(cls, **options: Any) -> MockEngine:
            return kind("mock", **{**cls.options, **options})

    return examine(Suite, **options)


def test_a_failure_is_made_small_and_repeats_by_its_seed() -> None:
    failure = found(Swapped, seed=5, shrink_seconds=30.0)
    assert failure is not None
    (submitted,) = [each for each in failure.operations if isinstance(each, Submit)]
    assert len(submitted.asked) == 3
    assert len(failure.operations) <= 2
    assert failure.promise == "each row is that of its own prompt and adapter"
    assert f"has the row of #{submitted.asked[1].number}" in str(failure)
    assert "--engine-seed 5 -k rows" in str(failure)
    assert len(str(failure).splitlines()) <= 8
    again = found(Swapped, seed=failure.seed, shrink_seconds=30.0, parts=[failure.part])
    assert str(again) == str(failure)


# --- an engine that draws by a generator of its own -----------------------------------------------


class Own(MockEngine):
    """Draws otherwise than `lmpool.backends.sampling`, and as well."""

    @staticmethod
    def drawn_as(want: Generate) -> Generate:
        """What is asked of lmpool's sampling instead."""
        return replace(want, seed=mixed(want.seed))

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(
            [
                replace(request, want=self.drawn_as(request.want))
                if isinstance(request.want, Generate)
                else request
                for request in requests
            ]
        )


def mixed(seed: int | None, bits: int = 63) -> int | None:
    """Another seed for each one, of which so many bits count."""
    if seed is None:
        return None
    low = seed & (1 << bits) - 1
    return int.from_bytes(hashlib.blake2b(b"%d" % low, digest_size=8).digest(), "little")


BROKEN: dict[str, Callable[[Generate], Generate]] = {
    "half the temperature": lambda w: replace(w, temperature=w.temperature / 2),
    "a third colder": lambda w: replace(w, temperature=w.temperature * 0.66),
    "greedy when cold": lambda w: replace(w, temperature=w.temperature * (w.temperature > 0.3)),
    "seeds of 32 bits": lambda w: replace(w, seed=mixed(w.seed, 32)),
    "no seeds": lambda w: replace(w, seed=None),
    "one seed": lambda w: replace(w, seed=1),
    "no ends": lambda w: replace(w, eos_token_ids=()),
    "no stops": lambda w: replace(w, stop=()),
    "all of the mass": lambda w: replace(w, top_p=1.0 if 0 < w.top_p <= 1 else w.top_p),
    "one of the likeliest more": lambda w: replace(w, top_k=w.top_k + (w.top_k > 0)),
    "half of min_p": lambda w: replace(w, min_p=w.min_p / (1 + (0 < w.min_p <= 1))),
    "one token less": lambda w: replace(w, max_tokens=max(0, w.max_tokens - 1)),
}


def test_an_engine_that_draws_otherwise_passes() -> None:
    assert found(Own, parts=["life", "continuations", "company"]) is None


@pytest.mark.parametrize("wrong", BROKEN)
def test_draws_of_another_distribution_are_found(wrong: str) -> None:
    class Broken(Own):
        @staticmethod
        def drawn_as(want: Generate) -> Generate:
            return BROKEN[wrong](Own.drawn_as(want) if "seed" not in wrong else want)

    assert found(Broken, parts=["life", "continuations", "company"]) is not None


def test_one_unlikely_event_is_no_sign_and_many_are() -> None:
    draws = Draws()
    for drawn in [False] * 66 + [True]:
        draws._event("tokens drawn twice", drawn, 3e-4)
    draws.check()
    for _ in range(20):
        draws._event("tokens drawn twice", True, 3e-4)
    with pytest.raises(BrokenPromise, match="standard deviations off"):
        draws.check()
