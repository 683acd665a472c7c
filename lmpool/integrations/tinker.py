"""A pool as a teacher where Tinker's sampling client would be asked for log-probabilities.

::

    teacher = PoolSampler(lm)
    logprobs = await teacher.compute_logprobs_async(sequence)  # [None, -1.3, ...]

Tinker itself is not needed: a sequence is whatever has `to_ints()`, as its `ModelInput` does, or a
list of token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from lmpool import PooledLM
from lmpool.producer.blocking import run_blocking
from lmpool.wants import Score, TextScores

__all__ = ["PoolSampler"]


@runtime_checkable
class ModelInput(Protocol):
    """What Tinker has for a sequence of tokens."""

    def to_ints(self) -> list[int]:
        """Its token ids."""
        ...


Tokens = ModelInput | Sequence[int]


class PoolSampler:
    """The methods of Tinker's `SamplingClient` that a teacher is asked by.

    Args:
        lm: a client, which the caller closes.
        lora_name: the adapter to ask.
        timeout: seconds for each sequence.

    Raises `TypeError` for what is no `PooledLM`; its methods what `PooledLM.score` raises.
    """

    def __init__(
        self, lm: PooledLM[Any], lora_name: str | None = None, timeout: float | None = None
    ) -> None:
        if not isinstance(lm, PooledLM):
            raise TypeError(f"a PooledLM is needed, not {type(lm).__name__}: see lmpool.connect")
        self._lm = lm
        self._lora_name = lora_name
        self._timeout = timeout

    async def compute_logprobs_async(self, prompt: Tokens) -> list[float | None]:
        """The log-probability of each token given those before it; None of the first.

        Those that are awaited together are one request.
        """
        ids = _ids(prompt)
        scores = await self._scores(ids, 0)
        return [None, *([] if scores is None else scores.logprobs.tolist())][: len(ids)]

    def compute_logprobs(self, prompt: Tokens) -> Future[list[float | None]]:
        """`compute_logprobs_async` as a future that is done."""
        future: Future[list[float | None]] = Future()
        try:
            future.set_result(run_blocking(self.compute_logprobs_async(prompt)))
        except Exception as error:
            future.set_exception(error)
        return future

    async def compute_topk_logprobs_async(
        self, prompt: Tokens, k: int
    ) -> list[list[tuple[int, float]] | None]:
        """At each position but the first the `k` likeliest tokens, as pairs of id and value.

        What `topk_prompt_logprobs` of Tinker's `sample` gives.
        """
        ids = _ids(prompt)
        scores = await self._scores(ids, k)
        found: list[list[tuple[int, float]] | None] = [None]
        if scores is not None and scores.top_logprobs is not None:
            top = scores.top_logprobs
            for tokens, values in zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True):
                found.append(list(zip(tokens, values, strict=True)))
        else:  # with a k of 0, whose positions have none
            found += [[] for _ in ids[1:]]
        return found[: len(ids)]

    async def _scores(self, ids: list[int], k: int) -> TextScores | None:
        if len(ids) < 2:
            return None
        return await self._lm.ask(ids, Score(1, k), self._lora_name, timeout=self._timeout)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, of transformers."""
        return self._lm.tokenizer

    def get_base_model(self) -> str:
        """The name of the pool's model."""
        return self._lm.info.model


def _ids(prompt: Tokens) -> list[int]:
    if isinstance(prompt, ModelInput):
        return list(prompt.to_ints())
    return list(prompt)
