"""The owner's side of texts that are scored in vLLM's workers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmpool.backends.engine import Outcome, Request
from lmpool.backends.vllm import internals
from lmpool.backends.vllm.known_scores import Beginning, KnownScores, ScoredText
from lmpool.backends.vllm.scheduler import MOST_CACHED, is_bound
from lmpool.backends.vllm.scorer import SCORE, TARGETS, WANT, Scored
from lmpool.errors import PromptFailed
from lmpool.wants import Score, TextScores

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What came of a text: its scores, or None; `bad` is the logsumexp of logits that were not
    finite, and else 0."""

    scores: TextScores | None
    bad: float = 0.0

    @property
    def is_unsound(self) -> bool:
        """Whether logits were not finite."""
        return not np.isfinite(self.bad)


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """A text in flight: what is asked of vLLM, and what is known of it."""

    want: Score
    rest: Score
    count: int
    """Positions that are asked of vLLM."""
    text: ScoredText | None
    beginning: Beginning | None


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
        self._begun: dict[int, _Begun] = {}
        self._known = KnownScores()
        self._waiting: dict[bytes, ScoredText] = {}
        """By the ids of requests, the texts that they wait for."""
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

    def waits(self, request: Request, adapter: str | None) -> bool:
        """Whether a text begins like one that is being scored, whose scores it will need."""
        if request.id in self._waiting:
            return True
        begins, want = self._beginning(request, adapter), request.want
        if begins is None or not isinstance(want, Score):
            return False
        if not begins.is_worth_waiting_for(request.tokens, want):
            return False
        self._waiting[request.id] = begins.text
        return True

    def _beginning(self, request: Request, adapter: str | None) -> Beginning | None:
        want = request.want
        if not self._shares or not isinstance(want, Score):
            return None
        return self._known.beginning(adapter, request.tokens, want)

    def params(
        self, number: int, request: Request, adapter: str | None, alone: bool
    ) -> dict[str, Any]:
        """What `SamplingParams` must have so that a text is scored as request `number`.

        vLLM is given the text without its last token. One that is scored `alone` owes nothing to
        others.
        """
        want = request.want
        assert isinstance(want, Score)
        begins, text = None, None
        if not alone:
            begins = self._beginning(request, adapter)
            text = self._known.begin(adapter, request.tokens, want)
        if begins is not None and begins.text.scores is None:
            begins = None
        rest = want if begins is None else begins.rest(want)
        count = request.tokens.size - rest.start
        self._begun[number] = _Begun(want, rest, count, text, begins)
        return {
            "skip_reading_prefix_cache": not self._shares,
            "extra_args": {
                SCORE: f"{self._prefix}{number}",
                WANT: rest.fields(),
                TARGETS: request.tokens[rest.start :].astype("<u4").tobytes(),
                MOST_CACHED: rest.start - 1,
            },
        }

    def take(self, numbers: Sequence[int]) -> dict[int, Taken]:
        """What came of the texts among the requests that have ended."""
        asked = self._begun.keys() & set(numbers)
        replies = self._call(asked, ())
        return {n: self._taken(self._begun.pop(n), replies.get(n)) for n in asked}

    def _taken(self, begun: _Begun, reply: Scored | None) -> Taken:
        _, data, bad = reply or ("", None, 0.0)
        scores = None if data is None else _unpacked(begun.rest, begun.count, data)
        if scores is not None and begun.beginning is not None:
            scores = begun.beginning.with_rest(begun.want, scores)
        self._end(begun.text, scores)
        return Taken(scores, bad)

    def _end(self, text: ScoredText | None, scores: TextScores | None) -> None:
        if text is not None:
            self._known.end(text, scores)
            self._waiting = {i: other for i, other in self._waiting.items() if other is not text}

    def forget(self, numbers: Sequence[int]) -> None:
        """These requests were aborted."""
        asked = self._begun.keys() & set(numbers)
        self._call((), asked)
        for number in asked:
            self._end(self._begun.pop(number).text, None)

    def clear(self) -> None:
        """Forget the scores of texts that have ended."""
        self._known.clear()

    def _call(self, taken: Collection[int], forgotten: Collection[int]) -> dict[int, Scored]:
        if not taken and not forgotten:
            return {}
        replies = internals.call_workers(
            self._core, "lmpool_take_scores", list(map(str, taken)), list(map(str, forgotten))
        )
        return {int(reply[0]): reply for replied in replies for reply in replied or ()}


def outcome_of(request: Request, taken: Taken | None) -> Outcome:
    """What became of a text."""
    if taken is not None and taken.scores is not None:
        return Outcome(request.id, answer=taken.scores)
    reason = "vLLM computed no scores for some of this text's tokens"
    if taken is not None and taken.is_unsound:
        reason = f"the model's logits are not finite in this dtype ({taken.bad})"
    return Outcome(request.id, error=PromptFailed(reason))


def _unpacked(want: Score, count: int, data: bytes) -> TextScores:
    scores, at = want.blank(count), 0
    for array in scores.arrays():
        array[...] = np.frombuffer(data, array.dtype, array.size, at).reshape(array.shape)
        at += array.nbytes
        array.flags.writeable = False
    return scores
