"""Jobs that no client of lmpool makes: each is refused alone, and hurts nobody."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import redis

from lmpool.backends.mock import mock_row
from lmpool.keys import PoolKeys
from lmpool.model_info import ModelInfo
from lmpool.wants import Choice, Digester, Draw, Row, Tokens, Top, Want
from lmpool.wire import Job
from tests.support.clients import connected
from tests.support.fake import FakeServer
from tests.support.protocol import Caller
from tests.support.waiting import until
from tests.support.workers import in_process_worker

VOCAB = 256


@dataclass(frozen=True, eq=False)
class Forged:
    """Whatever may stand in the place of a want."""

    kind: str
    values: tuple[Any, ...]
    cached = False

    def fields(self) -> list[Any]:
        return list(self.values)


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<u4").tobytes()


MISFITS: list[tuple[Any, str]] = [
    (Top(VOCAB + 1), "k=257: at most 256 expected"),
    (Tokens(ids(3, VOCAB)), "token id 256: below 256 expected"),
    (Tokens(ids(2**32 - 1)), "token id 4294967295"),
    (Draw(1, 1, allowed=Choice("only", ids(VOCAB))), "token id 256"),
    (Draw(1, 1, allowed=Choice("but", ids(*range(VOCAB)))), "no token may be drawn"),
    (Draw(1, 1, allowed=Choice("mask", bytes(32))), "no token may be drawn"),
    (Draw(1, 1, allowed=Choice("mask", b"\xff" * 36)), "a mask of 36 bytes: 32 expected"),
    (Draw(3, 1, 1.0, False, Choice("only", ids(1, 2))), "2 of the tokens that may be drawn"),
    (Draw(VOCAB + 1, 1, 1e-300, False), "n=257 without replacement: 256 tokens may be drawn"),
]
FORGED: list[tuple[Any, str]] = [
    (Forged("top", (0,)), "k=0"),
    (Forged("top", (2**40,)), "k=1099511627776"),
    (Forged("tokens", (b"123",)), "token_ids are not"),
    (Forged("tokens", ([1, 2],)), "token_ids are not"),
    (Forged("draw", (1 << 30, 1, 1.0, True, None, None)), "n=1073741824"),
    (Forged("draw", (1, 1, math.nan, True, None, None)), "temperature=nan"),
    (Forged("draw", (1, 1, 1.0, True, "mask", b"")), "a set of tokens"),
    (Forged("draw", (1, {"a": 1}, 1.0, True, None, None)), "seed="),
]
ODD: list[Want] = [
    Draw(4096, 2**63 - 1, 1.7e308),
    Draw(255, -(2**63), 5e-324, False, Choice("but", ids(0))),
    Draw(3, 1, 1.0, True, Choice("only", ids(9, 9, 4))),
    Tokens(ids(*[7] * 5000)),
]
"""Strange, and answered."""


def test_wants_that_do_not_fit_are_refused_alone() -> None:
    with (
        FakeServer() as server,
        in_process_worker(server.url, "toy", shards=1),
        connected(server.url, "toy") as lm,
        redis.Redis.from_url(server.url, protocol=2) as client,
    ):
        lm.sync.wait_for_workers(timeout=60)
        keys = PoolKeys("toy")
        info = ModelInfo.unpack(cast(bytes, client.get(keys.info)))
        (shard,) = info.shard_keys(keys)
        digester = Digester(info.fingerprint)
        wrong = [*MISFITS, *FORGED]
        wants = [want for want, _ in wrong] + ODD + [Row("f32"), Top(3)]
        prompt = ids(1, 2, 3)
        jobs = [Job(w, digester.digest(w, prompt), prompt, None, None, 0) for w in wants]
        caller = Caller(client, shard)
        caller.enqueue(*jobs)
        told: dict[bytes, tuple[str, str]] = {}

        def all_told() -> bool:
            told.update({n.digest: (n.status, n.error) for n in caller.notices()})
            return len(told) == len(jobs)

        until(all_told)
        for job, (want, reason) in zip(jobs, wrong, strict=False):
            status, error = told[job.digest]
            assert status != "ok", want
            assert reason in error, (want, error)
        assert [told[job.digest] for job in jobs[len(wrong) :]] == [("ok", "")] * (len(ODD) + 2)
        row = lm.sync.next_token_logprobs([1, 2, 3], timeout=60)
        assert np.array_equal(row, mock_row([1, 2, 3], VOCAB))
