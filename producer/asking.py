"""Checked prompts as asks: what is wanted of the pool, and what it is called."""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import numpy as np

from lmpool.errors import PromptError
from lmpool.model_info import Encoding, ModelInfo
from lmpool.producer.calls import Ask
from lmpool.producer.prompts import TokenIds, is_number, prompt_bytes
from lmpool.wire import MAX_EOS_IDS, Digester, Job


class Asking:
    """Makes asks of one model; every prompt is checked before anything is sent."""

    def __init__(self, info: ModelInfo, encoding: Literal["auto"] | Encoding) -> None:
        self._info = info
        self._encoding: Encoding = info.encoding if encoding == "auto" else encoding
        self._digester = Digester(info.fingerprint)

    def logprobs(self, token_ids: TokenIds, adapter: str | None) -> Ask:
        """Ask for the row after a prompt; `adapter` is ``name@fingerprint``."""
        info = self._info
        tokens = prompt_bytes(token_ids, info.vocab_size, info.max_prompt_tokens)
        encoding = self._encoding
        digest = self._digester.logprobs(tokens, encoding, adapter)
        return Ask(digest.hex().encode(), "logprobs", tokens, adapter, {"encoding": encoding})

    def batch(self, prompts: Sequence[TokenIds], adapter: str | None) -> list[Ask]:
        """Ask for several rows. An error names the prompt by its place."""
        asks = []
        for number, prompt in enumerate(_several(prompts)):
            try:
                asks.append(self.logprobs(prompt, adapter))
            except PromptError as error:
                raise PromptError(f"prompt {number}: {error}") from None
        return asks

    def samples(
        self,
        prompts: Sequence[TokenIds],
        max_tokens: int,
        eos_token_ids: Sequence[int],
        temperature: float,
        seed: int | None,
        adapter: str | None,
    ) -> list[Ask]:
        """Ask for a continuation of each prompt."""
        info = self._info
        want = _sampling(info, max_tokens, eos_token_ids, temperature, seed)
        asks = []
        for prompt in _several(prompts):
            tokens = prompt_bytes(prompt, info.vocab_size, info.max_prompt_tokens)
            # Without a seed every continuation is its own: a fresh one keeps digests apart.
            mine = {**want, "seed": secrets.randbits(63) if seed is None else want["seed"]}
            digest = self._digester.job("sample", tokens, mine, adapter)
            asks.append(Ask(digest.hex().encode(), "sample", tokens, adapter, mine))
        return asks


def ask_of_job(job: Job) -> Ask:
    """The ask that a job was made of."""
    return Ask(job.digest.hex().encode(), job.op, job.tokens, job.adapter, dict(job.want))


def _several(prompts: Any) -> Sequence[TokenIds]:
    if not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise PromptError(f"prompts of type {kind}: a list of prompts is needed")
    return cast(Sequence[TokenIds], prompts)


def _sampling(
    info: ModelInfo,
    max_tokens: int,
    eos_token_ids: Sequence[int],
    temperature: float,
    seed: int | None,
) -> dict[str, Any]:
    """What a sampling job wants, checked."""
    most = _integer(max_tokens)
    if most is None or not 1 <= most < 2**31:
        raise PromptError(f"max_tokens={max_tokens!r}: write a positive integer")
    if not is_number(temperature) or not 0 <= temperature < math.inf:
        raise PromptError(f"temperature={temperature!r}: write a number of 0 (greedy) or more")
    chosen = 0 if seed is None else _integer(seed)
    if chosen is None:
        raise PromptError(f"seed={seed!r}: write an integer, or None")
    try:
        ids = {_integer(token) for token in eos_token_ids}
    except TypeError:
        ids = {None}
    eos = sorted(token for token in ids if token is not None and 0 <= token < info.vocab_size)
    if len(eos) < len(ids) or len(eos) > MAX_EOS_IDS:
        raise PromptError(
            f"eos_token_ids={eos_token_ids!r:.100}: write a list of at most {MAX_EOS_IDS} token "
            f"ids, each in [0, {info.vocab_size})"
        )
    return {
        "max_tokens": most,
        "eos": eos,
        "temperature": float(temperature),
        "seed": chosen & (2**63 - 1),
    }


def _integer(value: object) -> int | None:
    """An integer of any library as int; None for anything else, bools too."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
