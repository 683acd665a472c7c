"""The scenario of continuations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from lmpool.backends.contract.generating import likely_tokens, seed_that_draws
from lmpool.backends.contract.prompts import LONGEST, random_prompt
from lmpool.backends.contract.script import Script, versioned
from lmpool.wants import Generate, Stream


def continuations(script: Script) -> None:
    """Answers other than rows, alone and in company."""
    random, longest = script.random, script.longest
    if script.has_adapters:
        script.add_adapter(versioned("drawn", 1), 1)
    for _ in range(3):
        script.submit(script.mixed(40, others=1.0, bad=0.0, most=12))
        script.submit(script.mixed(10, others=0.0), portions=2)
        script.settle()
    # One prompt: many seeds of which some are alike in part, then again in other company.
    for adapter in (None, *script.loaded):
        prompt, temperature = script.prompt(10), float(random.choice((0.7, 1.0, 1.4)))
        seeds = [n + (high << 32) for n in range(3) for high in (0, 1, 5, 2**20, 2**31 - 1)]
        seeds += [2**63 + 5, 2**64 - 1, 2**63 - 1]
        wants = [Generate(8, (), temperature, seed) for seed in seeds]
        wants += [Generate(8, (), temperature)] * 2
        script.submit([script.ask(prompt, adapter, want) for want in wants])
        script.settle()
        again = [Generate(n, (), temperature, seed) for seed in seeds[::3] for n in (3, 10)]
        script.submit([script.ask(prompt, adapter, want) for want in again], portions=3)
        script.submit(script.mixed(10))
        script.settle()
    # Where the model ends, the continuation does; and nothing is asked for.
    whole = random_prompt(random, script.vocab, min(longest, LONGEST))
    ends = [Generate(6, (), 0.0, 0), Generate(6, (), 0.8, 3)]
    script.submit(
        [script.ask(prompt, None, want) for prompt in (whole, whole[:-2], (1,)) for want in ends]
        + [script.ask(prompt, None, Generate(0, (), 0.0, 0)) for prompt in (whole, (1,))]
    )
    _long_ones(script)
    _streams(script)
    _own_ends(script)
    _many_draws(script)
    _left_out(script)
    _stop_sequences(script)
    script.remove_adapters()


def _long_ones(script: Script) -> None:
    """Continuations longer than most, among short ones: each token follows all before it."""
    room = script.longest - 6
    for most, temperature in ((20, 0.7), (45, 0.0), (45, 1.0), (90, 1.0)):
        want = Generate(min(most, room), (), temperature, int(script.random.integers(2**62)))
        script.submit([script.ask(script.prompt(4), script.any_adapter(0.3), want)])
    script.submit(script.mixed(5))
    script.settle()


def _streams(script: Script) -> None:
    """Continuations that are told as they are drawn, and such as were begun elsewhere."""
    temperature = 0.0 if script.truth.suite.own_draws else 0.8
    for seed in range(4):
        prompt, adapter = script.prompt(6), script.any_adapter(0.3)
        want = Stream(10, (), temperature, seed)
        drawn = tuple(likely_tokens(prompt, script.written(adapter), script.truth, want, 7))
        wants = [want, Stream(10, (drawn[5],), temperature, seed)]
        wants += [Stream(10, (), temperature, seed, stop=(drawn[3:5],))]
        script.submit(
            [
                replace(script.ask(prompt, adapter, each), begun=drawn[:begun])
                for each in wants
                for begun in (0, 1, 4, 7)
            ],
            portions=2,
        )
        told = Stream(10, (), temperature, seed, logprobs=True, top_logprobs=2)
        script.submit([script.ask(prompt, adapter, told)])
        script.submit(script.mixed(4))
    script.settle()


def _own_ends(script: Script) -> None:
    """The model's own end tokens, which end what names none, and nothing that names others."""
    own = script.info.eos_token_ids
    temperature = min(1.9, script.truth.suite.most_temperature)
    prompts = [script.prompt(10) for _ in range(24)]
    rows = script.truth.rows(prompts, None)
    likely = np.argsort(rows[:, list(own)].max(axis=1, initial=-np.inf))[::-1]
    for place in likely[:3].tolist() if own else ():
        seed = seed_that_draws(script.random, rows[place], temperature, own)
        ends: list[tuple[int, ...] | None] = [None, (), own, (int(own[0] == 0),)]
        wants = [Generate(5, each, temperature, seed) for each in ends]
        script.submit([script.ask(prompts[place], None, want) for want in wants])
    script.settle()


def _many_draws(script: Script) -> None:
    """Two tokens of many seeds at several temperatures: enough to tell distributions apart, and
    more at once than the powers of two that an engine may stop at."""
    for temperature in (0.2, 0.7, 1.3):
        prompt = script.prompt(10)
        first = int(script.random.integers(2**62))
        wants = [Generate(2, (), temperature, first + n) for n in range(70)]
        script.submit([script.ask(prompt, None, want) for want in wants])
        script.settle()


def _left_out(script: Script) -> None:
    """Enough draws of what `top_p`, `top_k` and `min_p` leave, each alone and all together."""
    temperature = min(1.3, script.truth.suite.most_temperature)
    cuts: list[dict[str, Any]] = [
        {"top_p": 0.7},
        {"top_k": 6},
        {"min_p": 0.3},
        {"top_p": 0.9, "top_k": 12, "min_p": 0.15},
        {"top_p": 0.5, "top_k": 12},
    ]
    for cut in cuts:
        prompt, first = script.prompt(10), int(script.random.integers(2**62))
        wants = [Generate(2, (), temperature, first + n, **cut) for n in range(40)]
        wants[::4] = [replace(want, logprobs=True, top_logprobs=3) for want in wants[::4]]
        script.submit([script.ask(prompt, None, want) for want in wants])
        script.settle()


def _stop_sequences(script: Script) -> None:
    """What stops at once, at the second and third token, nearly, and not: some of it at the end."""
    for n in range(12):
        prompt, adapter = script.prompt(10), script.any_adapter(0.3)
        truth, written = script.truth, script.written(adapter)
        temperature = 0.0 if n % 2 or truth.suite.own_draws else 1.0
        plain = Generate(6, (), temperature, n)
        a, b, c = likely_tokens(prompt, written, truth, plain, 3)
        other = int(script.random.integers(script.vocab))
        sequences: list[tuple[tuple[int, ...], ...]] = [
            ((a,),),
            ((a, b),),
            ((b, c), (b, other)),
            ((a, b, c), (c,)),
            ((other, a), (prompt[-1], a), (*prompt, a)),
            ((b, c), (a, c)),
        ]
        wants = [replace(plain, stop=stop) for stop in sequences]
        wants.append(replace(plain, stop=((a, b),), eos_token_ids=(b,)))
        wants.append(replace(plain, stop=((b, c),), max_tokens=2))
        wants.append(replace(plain, stop=((b, c),), max_tokens=3, logprobs=True, top_logprobs=1))
        script.submit([script.ask(prompt, adapter, want) for want in wants], portions=1 + n % 2)
    script.settle()
