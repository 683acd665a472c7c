"""The owner's side of texts that are scored in vLLM's workers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from lmpool.backends.engine import Outcome, Request
from lmpool.backends.vllm import internals
from lmpool.backends.vllm.scheduler import MOST_CACHED, is_bound
from lmpool.backends.vllm.scorer import SCORE, TARGETS, WANT, Scored
from lmpool.errors import PromptFailed
from lmpool.wants import Score, TextScores

logger = logging.getLogger(__name__)


class ScoredTexts:
    """Texts that vLLM's workers score, by the numbers of their requests.

    Where that is not `possible` texts are scored by rows; the log says why. `prefix` is the secret
    by which the workers know the owner of requests, None where they know nobody.
    """

    def __init__(self, engine: Any, prefix: str | None) -> None:
        self._core = engine.engine_core
        self._prefix = prefix
        self.unfit: set[str] = set()
        """The names of adapters whose texts are scored by rows: those that change the head."""
        self._numbers: set[int] = set()
        self._shares = is_bound(engine.vllm_config)
        """Whether the scheduler heeds how much of a text may come from the prefix cache."""
        reason = self._attach(engine.vllm_config)
        self.possible = reason is None
        if reason is not None:
            logger.warning(
                "texts are scored by a row for each token, many times slower: %s", reason
            )

    def _attach(self, config: Any) -> str | None:
        """Have texts scored; why they cannot be, if so."""
        if self._prefix is None:
            return "this vLLM captures nothing"
        context_ranks = config.parallel_config.prefill_context_parallel_size
        for unfit, reason in (
            (config.cache_config.kv_sharing_fast_prefill, "kv_sharing_fast_prefill skips states"),
            (config.kv_transfer_config, "kv_transfer_config brings keys and values alone"),
            (context_ranks > 1, "prefill_context_parallel_size gives each rank a part of a text"),
        ):
            if unfit:
                return reason
        if not any(internals.call_workers(self._core, "lmpool_attach_scorer")):
            return "its model runner has no place for lmpool's scorer"
        return None

    def heed(self, adapter: str, modules: Iterable[str]) -> None:
        """Note whether an adapter of these modules changes the head, as vLLM knows it."""
        if any("lm_head" in module for module in modules):
            self.unfit.add(adapter)

    def params(self, number: int, request: Request) -> dict[str, Any]:
        """What `SamplingParams` must have so that a text is scored as request `number`.

        vLLM is given the text without its last token.
        """
        want = request.want
        assert isinstance(want, Score)
        self._numbers.add(number)
        return {
            "skip_reading_prefix_cache": not self._shares,
            "extra_args": {
                SCORE: f"{self._prefix}{number}",
                WANT: want.fields(),
                TARGETS: request.tokens[want.start :].astype("<u4").tobytes(),
                MOST_CACHED: want.start - 1,
            },
        }

    def take(self, numbers: Sequence[int]) -> dict[int, Scored]:
        """What came of the texts among the requests that have ended."""
        return self._call(self._numbers.intersection(numbers), ())

    def forget(self, numbers: Sequence[int]) -> None:
        """These requests were aborted."""
        self._call((), self._numbers.intersection(numbers))

    def _call(self, taken: Collection[int], forgotten: Collection[int]) -> dict[int, Scored]:
        if not taken and not forgotten:
            return {}
        self._numbers.difference_update(taken, forgotten)
        replies = internals.call_workers(
            self._core, "lmpool_take_scores", list(map(str, taken)), list(map(str, forgotten))
        )
        return {int(reply[0]): reply for replied in replies for reply in replied or ()}


def outcome_of(request: Request, scored: Scored | None) -> Outcome:
    """What became of a text."""
    want = request.want
    assert isinstance(want, Score)
    if scored is None or scored[1] is None:
        bad = 0.0 if scored is None else scored[2]
        reason = "vLLM computed no scores for some of this text's tokens"
        if not np.isfinite(bad):
            reason = f"the model's logits are not finite in this dtype ({bad})"
        return Outcome(request.id, error=PromptFailed(reason))
    return Outcome(request.id, answer=_unpacked(want, request.tokens.size - want.start, scored[1]))


def is_unsound(scored: Scored | None) -> bool:
    """Whether logits were not finite."""
    return scored is not None and not np.isfinite(scored[2])


def _unpacked(want: Score, count: int, data: bytes) -> TextScores:
    scores, at = want.blank(count), 0
    for array in scores.arrays():
        array[...] = np.frombuffer(data, array.dtype, array.size, at).reshape(array.shape)
        at += array.nbytes
        array.flags.writeable = False
    return scores
