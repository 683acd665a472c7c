"""A pool as the teacher of verl's on-policy distillation.

::

    teacher = PoolTeacher(lm, topk=64)
    ids, logprobs = await teacher.compute_teacher_logprobs_single(sequence_ids)

The method is that of verl's `AsyncTeacherLLMServerManager`, with its shapes; verl itself is not
needed. Many sequences at once are one request: await them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lmpool import PooledLM
from lmpool.checks import as_integer, quoted
from lmpool.errors import PromptError
from lmpool.wants import Score

__all__ = ["PoolTeacher"]


class PoolTeacher:
    """Teachers on pools: one for every sequence, or several by verl's routing key.

    Args:
        lm: a client, or clients by routing key (verl's `distillation.teacher_key`). The caller
            closes them.
        topk: how many of the likeliest tokens; 0 is the log-probability of the given token alone.
        lora_name: the adapter to ask, of every pool.
        timeout: seconds for each sequence.

    Raises `TypeError` for what is no `PooledLM`, `PromptError` for a `topk` that cannot be.
    """

    def __init__(
        self,
        lm: PooledLM[Any] | Mapping[str, PooledLM[Any]],
        topk: int = 0,
        lora_name: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self._teachers = dict(lm) if isinstance(lm, Mapping) else {"": lm}
        for each in self._teachers.values():
            if not isinstance(each, PooledLM):
                raise TypeError(
                    f"a PooledLM is needed, not {type(each).__name__}: see lmpool.connect"
                )
        count = as_integer(topk)
        if count is None or count < 0:
            raise PromptError(f"topk={quoted(topk)}: write an integer of 0 or more")
        self._topk = count
        self._lora_name = lora_name
        self._timeout = timeout

    async def compute_teacher_logprobs_single(
        self,
        sequence_ids: Sequence[int],
        multi_modal_data: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        routing_key: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids, int32, and their log-probabilities, float32, both [S, K], of S tokens.

        Row i is of the token after position i: the `topk` likeliest, likeliest first, or with
        `topk` 0 (K is 1) the sequence's own. The last row, which no token follows, is zero. A
        sequence may be one token longer than the pool's longest prompt. Raises `PromptError` for
        what is no sequence, an unknown routing key, and images; and what `PooledLM.score` raises.
        """
        if any((multi_modal_data or {}).values()) or mm_processor_kwargs:
            raise PromptError("multi_modal_data: a pool's models read text alone")
        lm = self._teacher(routing_key)
        width = max(1, self._topk)
        size = len(sequence_ids)
        ids = torch.zeros((size, width), dtype=torch.int32)
        logprobs = torch.zeros((size, width), dtype=torch.float32)
        if size < 2:
            return ids, logprobs
        want = Score(1, self._topk)
        scores = await lm.ask(sequence_ids, want, self._lora_name, timeout=self._timeout)
        top = scores.top_logprobs
        if top is None:
            ids[:-1, 0] = torch.tensor([int(token) for token in sequence_ids[1:]])
            logprobs[:-1, 0] = torch.tensor(scores.logprobs)
        else:
            ids[:-1] = torch.tensor(top.token_ids)
            logprobs[:-1] = torch.tensor(top.logprobs)
        return ids, logprobs

    def _teacher(self, routing_key: str | None) -> PooledLM[Any]:
        """As verl routes: one teacher takes every sequence."""
        if len(self._teachers) == 1:
            return next(iter(self._teachers.values()))
        if routing_key not in self._teachers:
            raise PromptError(
                f"routing_key={quoted(routing_key)}: write one of {sorted(self._teachers)}"
            )
        return self._teachers[routing_key]
