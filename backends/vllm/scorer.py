"""Texts scored inside vLLM's model runner, as their hidden states are computed.

A request is scored whose sampling parameters carry an id under `SCORE` that begins with its owner's
secret, as `capture` has it, a `Score` of the text under `WANT`, and the scored tokens under
`TARGETS`. Its prompt is the text without the last token, which is only a target.

A text that was preempted is computed again, and then written again. All ranks of a tensor-parallel
group compute the same blocks; one keeps what comes of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from lmpool.backends.device import HostCopies
from lmpool.backends.text_scores import Head, PartialScores, block_rows, reduce_pieces
from lmpool.backends.vllm import internals
from lmpool.backends.vllm.hidden_states import Spans, adapters_off_the_head, watch
from lmpool.backends.vllm.row_store import MOST_BYTES
from lmpool.wants import Score

SCORE: Final = "lmpool_score"
"""The key of `SamplingParams.extra_args` whose value, a str, asks for scores and names them."""

WANT: Final = "lmpool_want"
"""The key of what is asked: the fields of a `Score`."""

TARGETS: Final = "lmpool_targets"
"""The key of the tokens that are scored, little-endian uint32."""

Scored = tuple[str, bytes | None, float]
"""A name, and its scores: the arrays of a `TextScores`, one after another. None where positions
were not computed, or where logits were not finite: then the float is their logsumexp."""

Asking = Callable[[], Iterable[tuple[int, str, Mapping[str, Any]]]]
"""The requests that ask for scores: the place of each, its name, and its `extra_args`."""


class Scorer:
    """Scores the texts among the requests of each step, and keeps the scores until they are taken.

    `most_bytes` bounds what is kept; beyond, the oldest goes. A rank that does not `keep` helps to
    compute.
    """

    def __init__(self, model_runner: Any, asking: Asking, *, keep: bool = True) -> None:
        self._model: torch.nn.Module = model_runner.get_model()
        vocab_size = model_runner.model_config.get_vocab_size()
        self.block_rows = block_rows(model_runner.device, vocab_size)
        self.most_bytes = MOST_BYTES
        self._asking = asking
        self._keep = keep
        self._texts: dict[str, PartialScores] = {}
        self._copies = HostCopies(model_runner.device)

    def __len__(self) -> int:
        return len(self._texts)

    def take(self, names: Iterable[str]) -> list[Scored]:
        """The scores of texts that have ended; names without any are left out."""
        found = [(name, self._texts.pop(name, None)) for name in names]
        return [_packed(name, text) for name, text in found if text is not None]

    def clear(self) -> None:
        """Drop what is kept."""
        self._texts.clear()

    def see(self, hidden: torch.Tensor, spans: Spans, head: Head) -> None:
        """Score what a step has computed, before any of it is written again."""
        asking = list(self._asking())
        if not asking:
            return
        where, pieces = spans([place for place, _, _ in asking]), []
        for place, name, extra in asking:
            if place not in where:
                continue
            text = self._texts.get(name) or _text(extra)
            if (piece := text.wanted(where[place])) is not None:
                pieces.append(piece)
                if self._keep:
                    self._texts[name] = text
        if pieces:
            with adapters_off_the_head(self._model):
                own = head if self._keep else _helping(head)
                reduce_pieces(pieces, hidden, own, self.block_rows, self._copies)
            self._bound()

    def _bound(self) -> None:
        held = sum(text.nbytes for text in self._texts.values())
        while held > self.most_bytes:
            held -= self._texts.pop(next(iter(self._texts))).nbytes


def _helping(head: Head) -> Head:
    """The same for a rank that only helps others to their logits."""

    def helped(hidden: torch.Tensor) -> None:
        head(hidden)

    return helped


def _text(extra: Mapping[str, Any]) -> PartialScores:
    return PartialScores(Score.from_fields(extra[WANT]), np.frombuffer(extra[TARGETS], "<u4"))


def _packed(name: str, text: PartialScores) -> Scored:
    scores, bad = text.read()
    if scores is None:
        return name, None, bad
    return name, b"".join(array.tobytes() for array in scores.arrays()), bad


class ScoringWorker:
    """What vLLM's workers are extended by for texts, wherever the worker runs."""

    model_runner: Any

    def lmpool_attach_scorer(self) -> bool | None:
        """Score the texts of the capture's owner; whether this runner lets us.

        None where it captures nothing, or this rank does not publish.
        """
        capture = internals.find_capture(self.model_runner)
        if capture is None:
            return None
        if capture.scorer is None:
            asking = functools.partial(capture.asking_for, SCORE)
            scorer = Scorer(self.model_runner, asking, keep=capture.publishes)
            if not watch(self.model_runner, scorer.see):
                return False if capture.publishes else None
            capture.scorer = scorer
        return True if capture.publishes else None

    def lmpool_take_scores(
        self, names: Sequence[str], forget: Sequence[str] = ()
    ) -> list[Scored] | None:
        """Give out scores, and drop those of `forget`; None where this rank does not publish."""
        capture = internals.find_capture(self.model_runner)
        if capture is None or capture.scorer is None or not capture.publishes:
            return None
        capture.scorer.take(forget)
        return capture.scorer.take(names)
