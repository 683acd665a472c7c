"""genlm-control's AWRS on a pool: by draws, against whole rows."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from tests.benchmarks.asking import processor
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, ratio
from tests.benchmarks.pool import Cpu, Pool, Prompts, WrongRows, make_prompts, serving
from tests.support.clients import connected
from tests.support.server import RealServer

NAME = "awrs"
LINE = "AWRS of genlm-control at a vocabulary of 128,256, by draws against whole rows"
NEEDS = "genlm"

VOCAB_SIZE: Final = 128_256
PARTICLES: Final = 32
"""Tokens that are sampled at a time, each after a context of its own."""
RESULT_TTL: Final = 3.0
SIZED: Final = 16
"""Tokens of which the stored values are weighed."""

Sample = tuple[float, Cpu]


def measure(scale: Scale) -> Report:
    """Alternate between samplers on one pool."""
    watch = Bystanders()
    with ExitStack() as stack:
        server = stack.enter_context(RealServer())
        pool = stack.enter_context(serving(server, NAME, VOCAB_SIZE, result_ttl=RESULT_TTL))
        lm = stack.enter_context(connected(server.url, NAME, framework="torch", cache_bytes=0))
        pool = Pool(lm, pool.worker, server)
        samplers = _samplers(lm)
        for number, sampler in enumerate(samplers.values()):  # once, untimed
            _timed(pool, sampler, make_prompts(PARTICLES, VOCAB_SIZE, 2**31, number))
        found = facts(server.url)
        counts = {"rows": scale.of(160, 32), "draws": scale.of(960, 64)}
        sides = {
            name: partial(_side, pool, sampler, counts[name], salt)
            for salt, (name, sampler) in enumerate(samplers.items())
        }
        taken = alternate(sides, scale.runs)
        sizes = {name: _stored(pool, sampler) for name, sampler in samplers.items()}
    report = Report(NAME, f"A vocabulary of {VOCAB_SIZE:,}, contexts of 32 tokens, one mock worker")
    pace = {name: tuple(sample[0] for sample in samples) for name, samples in taken.items()}
    spent = {name: tuple(cpu.total for _, cpu in samples) for name, samples in taken.items()}
    for name, values in pace.items():
        report.add("Pace", Measured(name, "tokens/s", values))
    report.add(
        "Ratios",
        ratio("accepted tokens a second, draws / rows", pace["draws"], pace["rows"], at_least=3.0),
        ratio("processor time a token, draws / rows", spent["draws"], spent["rows"]),
        ratio("bytes of values, draws / rows", (sizes["draws"],), (sizes["rows"],), at_most=0.005),
    )
    for name, samples in taken.items():
        report.add("Processor time", *processor(name, [cpu for _, cpu in samples], "us/token"))
        report.add("Stored", Measured(name, "bytes a token", (sizes[name],)))
    report.note(
        f"{PARTICLES} tokens at a time, each after a context of its own; the condition accepts "
        "tokens of odd ids; rows of the mock engine are flat, so that each token takes a second "
        "question, how likely the likeliest is"
    )
    report.facts = {**found, **watch.report()}
    return report


def _samplers(lm: Any) -> dict[str, Any]:
    from genlm import control
    from genlm.control.potential.built_in.llm import TokenMappings

    from lmpool.integrations.genlm import AWRS, PromptedLLM

    class Odd(control.Potential):  # type: ignore[misc, name-defined]
        """Accepts what ends with a token of an odd id."""

        async def prefix(self, context: Any) -> float:
            return 0.0 if context and context[-1].token_id % 2 else -math.inf

        async def complete(self, context: Any) -> float:
            return -math.inf

    maps = TokenMappings.create(lm.byte_vocab, [b"\x02"])
    found = {}
    for name, potential, sampler in (
        ("rows", control.PromptedLLM, control.AWRS),
        ("draws", PromptedLLM, AWRS),
    ):
        llm = potential(lm, prompt_ids=[1], token_maps=maps)
        found[name] = sampler(llm, Odd(llm.vocab, tables=llm.tables), seed=1)
    return found


def _side(pool: Pool, sampler: Any, count: int, salt: int, run: int) -> Sample:
    return _timed(pool, sampler, make_prompts(count, VOCAB_SIZE, run, salt))


def _timed(pool: Pool, sampler: Any, prompts: Prompts) -> Sample:
    """Accepted tokens a second, and processor time in us for each."""
    decode = sampler.potential.potential.token_maps.decode  # of what batches its calls
    contexts = [[decode[token] for token in prompt] for prompt in prompts]

    async def sample() -> list[Any]:
        found = []
        for at in range(0, len(contexts), PARTICLES):
            found += await asyncio.gather(*map(sampler.sample, contexts[at : at + PARTICLES]))
        return found

    with pool.until_stored():
        before, began = pool.cpu(), time.perf_counter()
        found = asyncio.run(sample())
    took = time.perf_counter() - began
    accepted = [(token, weight) for token, weight, _ in found if weight > -math.inf]
    used = pool.cpu().per_job(before, max(1, len(accepted)))
    weight = sum(math.exp(weight) for _, weight in accepted) / len(found)
    if any(token.token_id % 2 == 0 for token, _ in accepted) or not 0.2 < weight < 0.8:
        raise WrongRows(f"tokens that the condition rejects, or a mean weight of {weight:.2f}")
    return len(accepted) / took, used


def _stored(pool: Pool, sampler: Any) -> float:
    """Bytes of the values that are stored for a token."""
    prompts = make_prompts(SIZED, VOCAB_SIZE, 2**30, id(sampler) % 1000)
    with pool.server.client() as client:
        pattern = f"{pool.lm.shards[0].prefix}:result:*"
        before = set(client.scan_iter(pattern))
        _timed(pool, sampler, prompts)
        new = set(client.scan_iter(pattern)) - before
        return sum(client.strlen(key) for key in new) / len(prompts)
