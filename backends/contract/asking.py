"""Requests to an engine under test, and their outcomes."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np

from lmpool.backends.contract.reference import PromptTokens
from lmpool.backends.engine import Engine, Outcome, Request, Tokens
from lmpool.wants import Row, Want

_numbers = itertools.count()
ROW: Final = Row()


def tokens_of(prompt: PromptTokens) -> Tokens:
    """A prompt as engines take it."""
    return np.asarray(prompt, dtype=np.uint32)


def request_for(prompt: PromptTokens, *, adapter: str | None = None, want: Want = ROW) -> Request:
    """A request with an id of its own, and ids as a worker has them: a read-only view of bytes."""
    raw = np.asarray(prompt, dtype="<u4").tobytes()
    name = hashlib.blake2b(b"%d" % next(_numbers), digest_size=16).digest()
    return Request(name, np.frombuffer(raw, dtype="<u4"), adapter, want)


def finish(engine: Engine, requests: Sequence[Request]) -> list[Outcome]:
    """Step until nothing is in flight; the outcomes of `requests`, which were submitted before.

    Fails where one of them got none or two, or where another one's appears.
    """
    outcomes: dict[bytes, Outcome] = {}
    known = {request.id for request in requests}
    while engine.in_flight():
        for outcome in engine.step():
            assert outcome.id in known, "an outcome for a request that was never made"
            assert outcome.id not in outcomes, "a second outcome for one request"
            outcomes[outcome.id] = outcome
    assert outcomes.keys() == known, f"{len(known) - len(outcomes)} requests without an outcome"
    for outcome in outcomes.values():
        given = (outcome.row is not None) + (outcome.answer is not None)
        assert given + (outcome.error is not None) == 1, "one of a row, an answer or an error"
    return [outcomes[request.id] for request in requests]


def ask(engine: Engine, requests: Sequence[Request]) -> list[Outcome]:
    """Submit `requests` and return their outcomes in the same order."""
    engine.submit(requests)
    return finish(engine, requests)
