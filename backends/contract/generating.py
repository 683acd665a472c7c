"""Continuations to be asked for, made up."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lmpool.backends.contract.operations import Prompt
from lmpool.backends.contract.prompts import Random
from lmpool.backends.contract.subject import Adapter
from lmpool.backends.contract.truth import Truth
from lmpool.backends.sampling import sample_token
from lmpool.wants import Generate, Stream

TEMPERATURES: Final = (0.0, 0.0, 0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 1.0, 1.0, 1.3, 1.9, 2.5, 20.0)
_NAN: Final = float("nan")
_BAD: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": -1.0},
    {"temperature": _NAN},
    {"temperature": float("inf")},
    {"top_p": 0.0},
    {"top_p": 1.25},
    {"top_p": _NAN},
    {"top_k": -1},
    {"min_p": -0.5},
    {"min_p": 1.5},
    {"min_p": _NAN},
    {"stop": ((1,), ())},
    {"top_logprobs": -1},
)
_TRIES: Final = 3_000


def draw_generate(
    random: Random, prompt: Prompt, adapter: Adapter | None, truth: Truth
) -> Generate:
    """A continuation that takes few tokens; one in 25 is one that no engine can draw."""
    temperature = min(float(random.choice(TEMPERATURES)), truth.suite.most_temperature)
    most = int(random.choice((0, 1, 1, 2, 3, 4, 6, 9)))
    want = Generate(most, (), temperature, random_seed(random))
    if random.random() < 0.4:
        want = replace(want, **some_left(random, truth.info.vocab_size))
    if random.random() < 0.3:
        top = int(random.choice((0, 0, 1, 3, truth.info.vocab_size)))
        want = replace(want, logprobs=bool(random.random() < 0.7), top_logprobs=top)
    if prompt and len(prompt) <= truth.info.max_prompt_tokens:
        want = replace(want, eos_token_ids=_end_tokens(random, prompt, adapter, truth, want))
        if random.random() < 0.3:
            want = replace(want, stop=stops(random, prompt, adapter, truth, want))
    if random.random() < 0.04:
        bad = _BAD[int(random.integers(len(_BAD)))]
        if bad.get("top_logprobs"):
            bad = {"top_logprobs": truth.info.vocab_size + 1}
        want = replace(want, **bad)
    return want


def streamed(want: Generate) -> Stream:
    """The same continuation, told as it is drawn."""
    return Stream(**{field.name: getattr(want, field.name) for field in fields(want)})


def refuses(want: Generate, vocab_size: int) -> bool:
    """Whether no engine of such a vocabulary can draw this continuation."""
    sound = (
        0 <= want.temperature < np.inf
        and 0 < want.top_p <= 1
        and want.top_k >= 0
        and 0 <= want.min_p <= 1
        and 0 <= want.top_logprobs <= vocab_size
        and all(want.stop_sequences)
    )
    return not sound


def some_left(random: Random, vocab: int) -> dict[str, Any]:
    """Some of `top_p`, `top_k` and `min_p`, of which each leaves tokens out."""
    found: dict[str, Any] = {}
    if random.random() < 0.5:
        found["top_p"] = float(random.choice((1e-6, 0.2, 0.5, 0.8, 0.95, 0.999)))
    if random.random() < 0.5:
        found["top_k"] = int(random.choice((1, 2, 5, 20, vocab - 1, vocab, 2**20)))
    if random.random() < 0.5:
        found["min_p"] = float(random.choice((1e-4, 0.05, 0.3, 0.9, 1.0)))
    return found


def random_seed(random: Random) -> int | None:
    """Small ones, of 63 and of 64 bits, and some that are alike in their lower 32."""
    kind = random.random()
    if kind < 0.05:
        return None
    low = int(random.integers(5))
    if kind < 0.3:
        return low
    if kind < 0.7:
        return low + (int(random.integers(1, 2**31)) << 32)
    seed = int(random.integers(2**64, dtype=np.uint64)) | (1 << 63)
    if kind < 0.85:
        return seed
    # Any integer is a seed: equal ones modulo 2**64 draw alike.
    return -low - 1 if kind < 0.92 else seed + (low + 1 << 64)


def _end_tokens(
    random: Random, prompt: Prompt, adapter: Adapter | None, truth: Truth, want: Generate
) -> tuple[int, ...] | None:
    """None, no, and some tokens, among which may be those that come first."""
    kind, vocab = random.random(), truth.info.vocab_size
    if kind < 0.2:
        return None
    if kind < 0.55:
        return ()
    if kind < 0.75:
        (likely,) = likely_tokens(prompt, adapter, truth, want, 1)
        return tuple({likely, int(random.integers(vocab))})
    row = truth.rows([prompt], adapter)[0]
    count = min(100, vocab // 2)
    return tuple(int(token) for token in np.argpartition(row, -count)[-count:])


def stops(
    random: Random, prompt: Prompt, adapter: Adapter | None, truth: Truth, want: Generate
) -> tuple[tuple[int, ...], ...]:
    """Stop sequences: some that may come, and some that come nearly, or across the prompt's end."""
    room = truth.info.max_prompt_tokens - len(prompt)
    first, *others = likely_tokens(prompt, adapter, truth, want, min(3, room + 1))
    other = int(random.integers(truth.info.vocab_size))
    found = [(prompt[-1], first), (first, other), (first, *others), (first, *others[:1])]
    found += [(each,) for each in others[:1]] + [tuple(others)] * bool(others)
    found.append((*prompt, first))
    chosen = random.random(len(found)) < 0.5
    return tuple(ids for ids, taken in zip(found, chosen, strict=True) if taken)


def likely_tokens(
    prompt: Prompt, adapter: Adapter | None, truth: Truth, want: Generate, count: int
) -> list[int]:
    """The first tokens of a continuation, of an engine that draws as lmpool does; or greedy."""
    tokens = list(prompt)
    own = truth.suite.own_draws
    while len(tokens) < len(prompt) + count:
        row = truth.rows([tuple(tokens)], adapter)[0]
        step, seed = len(tokens) - len(prompt), want.seed or 0
        temperature = 0.0 if own else want.temperature
        left = {"top_p": want.top_p, "top_k": want.top_k, "min_p": want.min_p}
        tokens.append(sample_token(row, temperature, seed, step, **left))  # type: ignore[arg-type]
    return tokens[len(prompt) :]


def seed_that_draws(
    random: Random, row: npt.NDArray[np.float32], temperature: float, tokens: Collection[int]
) -> int | None:
    """A seed whose first draw from this row is one of `tokens`; None where none is found soon."""
    for _ in range(_TRIES):
        seed = int(random.integers(2**62))
        if sample_token(row, temperature, seed, 0) in tokens:
            return seed
    return None
