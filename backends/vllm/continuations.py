"""Continuations as vLLM is asked for them, and what it draws of them.

Tokens are vLLM's sampler's: those of a seed are others than those of lmpool's own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Final

from vllm import SamplingParams

from lmpool.backends.sampling import Continuation
from lmpool.backends.vllm import internals
from lmpool.backends.vllm.capture import ONLY_ROW
from lmpool.wants import MAX_SEED, Top, TopLogprobs


def token_params(max_tokens: int, temperature: float, **options: Any) -> SamplingParams:
    """Parameters of a request that vLLM ends after so many tokens, or at a stop token."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=True,
        detokenize=False,
        skip_clone=True,
        **options,
    )


_ONE_TOKEN: Final = token_params(1, 0.0)


def prompt_params(**options: Any) -> SamplingParams:
    """Those of a request of which nothing but its prompt counts.

    The `options` are ours, and right: for vLLM to check them takes longer than all else here.
    """
    params = copy(_ONE_TOKEN)
    for name, value in options.items():
        setattr(params, name, value)
    if params.extra_args is not None:
        params.extra_args = {**params.extra_args, ONLY_ROW: True}
    return params


def drawing_params(
    continuation: Continuation, vocab_size: int, watched: Mapping[str, Any], *, rows: bool
) -> SamplingParams:
    """Those of a continuation, or of what is left of it; `watched` is what they have in any case.

    With `rows` the output has that of each token: vLLM does not tell what the likeliest tokens
    leave. Stop sequences of more than one token are ours to find: vLLM knows tokens and texts.
    """
    sampler = continuation.sampler
    ends = sampler.eos_token_ids.union(ids[0] for ids in sampler.stop if len(ids) == 1)
    asked: dict[str, Any] = {}
    if rows:
        asked["logprobs"] = -1
    elif sampler.logprobs:
        asked["logprobs"] = 0
    return token_params(
        continuation.left,
        sampler.temperature,
        seed=_spread(sampler.seed, continuation.drawn.size),
        top_p=sampler.top_p,
        top_k=sampler.top_k,
        min_p=sampler.min_p,
        stop_token_ids=[i for i in ends if 0 <= i < vocab_size],
        **{**asked, **watched},
    )


def go_on(continuation: Continuation, output: Any, likeliest: Sequence[TopLogprobs] | None) -> None:
    """Take the tokens that vLLM drew, up to the last one of the continuation.

    `likeliest` are those that it asks for, of each token; None: the output has the rows.
    """
    sampler = continuation.sampler
    for place, token in enumerate(output.new_token_ids):
        if continuation.finished:
            return
        logprob, top = math.nan, None
        if sampler.logprobs:
            logprob = internals.drawn_logprob(output, place, token)
        if sampler.top_logprobs and likeliest is not None:
            top = likeliest[place]
        elif sampler.top_logprobs:
            top = Top(sampler.top_logprobs).of_row(internals.full_logprobs(output, place))
        continuation.add(token, logprob, top)


def _spread(seed: int, drawn: int) -> int:
    """A seed for vLLM, each bit of all of `seed`: torch on a CPU takes the lower 32 alone.

    What goes on behind tokens that were `drawn` elsewhere has another: not their numbers again.
    """
    packed = (seed & MAX_SEED).to_bytes(8, "little")
    if drawn:
        packed += drawn.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") & MAX_SEED
