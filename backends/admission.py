"""Which requests an engine takes: checked before any of them reaches a model.

The libraries below do badly with a bad prompt: some give it a row that means nothing, some fail the
whole batch, some end the process.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

import numpy as np

from lmpool.backends.engine import EngineInfo, Request
from lmpool.wants import HeadPart, Hidden, Row

SHORT: Final = 128
"""Tokens of a prompt for which numpy takes longer than Python."""


def are_plain(requests: Sequence[Request], info: EngineInfo) -> bool:
    """Whether all of these, at least one, are sound and want rows of the model itself.

    One pass over all their tokens: nearly every batch is so.
    """
    prompts = []
    for request in requests:
        if request.adapter is not None or type(request.want) is not Row:
            return False
        prompts.append(request.tokens)
    sizes = [*map(len, prompts)]
    if not (min(sizes) > 0 and max(sizes) <= info.max_prompt_tokens):
        return False
    if len(prompts) == 1 and sizes[0] <= SHORT:
        largest = int(max(prompts[0].tolist()))
    else:
        largest = int(np.concatenate(prompts).max())
    return largest < info.vocab_size


def of_another_head(adapter: str) -> str:
    """Why there are no hidden states by an adapter that changes the head."""
    return f"the adapter {adapter!r} changes the model's head: no other head fits its states"


def reason_to_refuse(request: Request, info: EngineInfo, adapters: Container[str]) -> str | None:
    """Why an engine with these `adapters` cannot run a request; None where it can."""
    tokens, want = request.tokens, request.want
    longest = want.longest_prompt(info.max_prompt_tokens)
    if not 0 < tokens.size <= longest:
        return f"a prompt of {tokens.size} tokens: 1 to {longest} expected"
    if int(tokens.max()) >= info.vocab_size:
        return f"token id {int(tokens.max())}: below {info.vocab_size} expected"
    if request.adapter is not None and request.adapter not in adapters:
        return f"no adapter named {request.adapter!r} is loaded"
    if isinstance(want, Hidden | HeadPart) and info.head is None:
        return f"no hidden states: {info.no_head}"
    if isinstance(want, HeadPart) and info.head is not None:
        parts = info.head.parts(info.vocab_size)
        if want.number >= parts:
            return f"part {want.number} of a head of {parts} parts"
    return want.misfit(info.vocab_size) or want.misfit_prompt(tokens.size)
