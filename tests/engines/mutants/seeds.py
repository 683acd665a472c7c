"""Engines that take one seed for another."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lmpool.backends import Engine, Request
from lmpool.wants import Generate
from tests.engines.mutants.engines import Bent, Wrapper
from tests.engines.mutants.registry import BOTH, mutant
from tests.engines.mutants.witnesses import (
    ask,
    continuations,
    requests_of,
    scenario,
)

PLAIN = Generate(8, (), 1.0, 1)


class Asked(Bent):
    """Runs another want than the one that was asked for."""

    def taken(self, request: Request) -> Request:
        want = request.want
        if not isinstance(want, Generate):
            return request
        return replace(request, want=self.instead(want, request))

    def instead(self, want: Generate, request: Request) -> Generate:
        return want


@mutant("seeds-cut-to-32-bits", continuations(replace(PLAIN, seed=(1 << 32) + 5)), forms=BOTH)
class SeedsCutTo32Bits(Asked):
    """Seeds that differ in 64 bits draw apart."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return replace(want, seed=None if want.seed is None else want.seed & 0xFFFFFFFF)


@mutant("seeds-rounded-to-doubles", continuations(replace(PLAIN, seed=(1 << 62) + 1)), subtle=True)
class SeedsRoundedToDoubles(Asked):
    """All 64 bits of a seed matter, past 2**53 as well."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return replace(want, seed=None if want.seed is None else int(float(want.seed)))


@mutant("seeds-past-2-to-the-63-refused", continuations(replace(PLAIN, seed=1 << 63)), forms=BOTH)
class SeedsPast63BitsRefused(Bent):
    """Any integer is a seed."""

    def taken(self, request: Request) -> Request:
        want = request.want
        if isinstance(want, Generate) and (want.seed or 0) >= 1 << 63:
            return replace(request, tokens=np.empty(0, np.uint32))
        return request


@mutant(
    "seeds-past-64-bits-are-the-largest",
    continuations(replace(PLAIN, seed=(1 << 64) + 3)),
    subtle=True,
)
class SeedsClipped(Asked):
    """Seeds that are equal modulo 2**64 draw alike."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return replace(want, seed=None if want.seed is None else min(want.seed, (1 << 64) - 1))


@mutant("seeds-lose-their-sign", continuations(replace(PLAIN, seed=-7)), subtle=True)
class SeedsLoseTheirSign(Asked):
    """Any integer is a seed: -7 draws as 2**64 - 7 does."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return replace(want, seed=None if want.seed is None else abs(want.seed))


@mutant("seed-0-taken-for-none", continuations(replace(PLAIN, seed=0)), subtle=True)
class SeedZeroTakenForNone(Asked):
    """Zero is a seed as others are."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return replace(want, seed=want.seed or 0x5EED)


def _unseeded(engine: Engine) -> None:
    want = Generate(8, (), 1.0, None)
    outcomes = [
        *ask(engine, requests_of([[1, 2]] * 4, want=want)),
        *ask(engine, requests_of([[1, 2]], want=want)),
    ]
    found = {tuple(o.answer.token_ids.tolist()) for o in outcomes}
    assert len(found) == 5


@mutant("no-seed-is-seed-0", scenario(_unseeded), forms=BOTH)
class NoSeedIsZero(Asked):
    """Without a seed every ask draws anew."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return replace(want, seed=want.seed or 0)


@mutant("no-seed-is-one-seed-for-all-of-a-batch", scenario(_unseeded), subtle=True)
class NoSeedIsOneSeedABatch(Wrapper):
    """Without a seed every prompt draws on its own."""

    batches = 0

    def submit(self, requests: Sequence[Request]) -> None:
        self.batches += 1
        super().submit(
            [
                replace(r, want=replace(r.want, seed=self.batches))
                if isinstance(r.want, Generate) and r.want.seed is None
                else r
                for r in requests
            ]
        )


@mutant("seeds-plus-the-place-in-the-batch", continuations(PLAIN, prompts=[[1], [2]]), forms=BOTH)
class SeedsPlusPlace(Wrapper):
    """One seed and prompt give one continuation, alone or in company."""

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(
            [
                replace(r, want=replace(r.want, seed=r.want.seed + n))
                if isinstance(r.want, Generate) and r.want.seed is not None
                else r
                for n, r in enumerate(requests)
            ]
        )


@mutant("seeds-mixed-with-the-id", continuations(PLAIN, prompts=[[1], [2]]))
class SeedsMixedWithTheId(Asked):
    """One seed and prompt give one continuation, whatever the request is called."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return replace(want, seed=None if want.seed is None else want.seed ^ zlib.crc32(request.id))
