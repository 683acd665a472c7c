"""Texts scored inside vLLM's model runner, as their hidden states are computed.

A request is scored whose sampling parameters carry an id under `SCORE` that begins with its owner's
secret, as `capture` has it, a `Score` of the text under `WANT`, and the scored tokens under
`TARGETS`. Its prompt is the text without the last token, which is only a target.

Of each step the rows that somebody wants go through the head, a block at a time, and are reduced
there. A text that was preempted is computed again, and then written again. All ranks of a
tensor-parallel group compute the same blocks; one keeps what comes of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from lmpool.backends.hf.reduction import Reduced, score_logits
from lmpool.backends.vllm import internals
from lmpool.backends.vllm.hidden_states import Head, Span, Spans, adapters_off_the_head, watch
from lmpool.backends.vllm.row_store import MOST_BYTES, HostCopy
from lmpool.wants import Score

SCORE: Final = "lmpool_score"
"""The key of `SamplingParams.extra_args` whose value, a str, asks for scores and names them."""

WANT: Final = "lmpool_want"
"""The key of what is asked: the fields of a `Score`."""

TARGETS: Final = "lmpool_targets"
"""The key of the tokens that are scored, little-endian uint32."""

BLOCK_BYTES: Final = {"cpu": 30 << 20, "cuda": 256 << 20}
"""Of logits in float32 that the head computes at once. On a CPU what is over 32 MiB would be mapped
anew each time."""

Scored = tuple[str, bytes | None, float]
"""A name, and its scores: the arrays of a `TextScores`, one after another. None where positions
were not computed, or where logits were not finite: then the float is their logsumexp."""

_Key = tuple[float, int, int]
"""Temperature, likeliest tokens, ids a position: texts that agree in these are reduced together."""


class _Text:
    """A text that is being scored."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        self.want = Score.from_fields(extra[WANT])
        self.targets = np.frombuffer(extra[TARGETS], "<u4").astype(np.int64)
        self.ids = self.want.ids_of(self.targets.size)
        self.scores = self.want.blank(self.targets.size)
        self.nbytes = self.scores.nbytes
        self.key: _Key = (
            self.want.temperature,
            self.want.top_logprobs,
            0 if self.ids is None else self.ids.shape[1],
        )
        self._parts: list[tuple[slice, HostCopy, slice]] = []
        self._missing = np.ones(self.targets.size, bool)

    def wanted(self, span: Span) -> tuple[slice, int]:
        """The scored positions among those of a span, and the row of the first one."""
        # The row after position p scores the token after it, which is position p + 1 of the text.
        start = self.want.start - 1
        first = max(span.first, start)
        stop = min(span.first + span.count, start + self.targets.size)
        return slice(first - start, max(first, stop) - start), span.offset + first - span.first

    def put(self, some: slice, copy: HostCopy, place: slice) -> None:
        """Scores of `some` positions are at `place` of what is copied."""
        self._parts.append((some, copy, place))
        self._missing[some] = False

    def read(self) -> tuple[bytes | None, float]:
        """As `Scored` has them. Waits for the copies."""
        bad = 0.0
        for some, copy, place in self._parts:
            *found, logsumexp = copy.read()
            for whole, part in zip(self.scores.arrays(), found, strict=True):
                whole[some] = part[place]
            mine = logsumexp[place]
            if not np.isfinite(mine).all():
                bad = float(mine[~np.isfinite(mine)][0])
        if self._missing.any() or not math.isfinite(bad):
            return None, bad
        return b"".join(array.tobytes() for array in self.scores.arrays()), bad


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Positions of a text, in order, and the row of hidden states that scores the first of them."""

    text: _Text
    some: slice
    row: int

    @property
    def count(self) -> int:
        return int(self.some.stop - self.some.start)


class _Group:
    """Pieces of a step that are reduced alike, one after another from row `start` on."""

    def __init__(self, pieces: Sequence[_Piece], start: int, device: torch.device) -> None:
        self._pieces = pieces
        self._start = start
        self._temperature, self._top, _ = pieces[0].text.key
        targets = np.concatenate([piece.text.targets[piece.some] for piece in pieces])
        ids = [p.text.ids[p.some] for p in pieces if p.text.ids is not None]
        self._targets = _to_device(targets, device)
        self._ids = _to_device(np.concatenate(ids).astype(np.int64), device) if ids else None
        self._reduced: list[Reduced] = []

    @property
    def stop(self) -> int:
        """The row after the last one."""
        return self._start + len(self._targets)

    def reduce(self, logits: torch.Tensor, at: int) -> None:
        """Reduce those of its rows that are in a block of logits [rows, vocab] from row `at` on."""
        first, last = max(at, self._start), min(at + len(logits), self.stop)
        if first >= last:
            return
        mine = slice(first - self._start, last - self._start)
        self._reduced.append(
            score_logits(
                logits[first - at : last - at],
                self._targets[mine],
                token_ids=None if self._ids is None else self._ids[mine],
                top=self._top,
                temperature=self._temperature,
            )
        )

    def copy(self, stream: torch.cuda.Stream | None) -> None:
        """Have all that was reduced copied to the host."""
        if not self._reduced:
            return  # another rank keeps it
        parts = [
            torch.cat(part) for part in zip(*self._reduced, strict=True) if part[0] is not None
        ]
        copy, at = HostCopy(parts, stream), 0
        for piece in self._pieces:
            piece.text.put(piece.some, copy, slice(at, at := at + piece.count))


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
        block_bytes = BLOCK_BYTES.get(model_runner.device.type, max(BLOCK_BYTES.values()))
        self.block_rows = max(1, block_bytes // (4 * vocab_size))
        self.most_bytes = MOST_BYTES
        self._asking = asking
        self._keep = keep
        self._texts: dict[str, _Text] = {}
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        return len(self._texts)

    def take(self, names: Iterable[str]) -> list[Scored]:
        """The scores of texts that have ended; names without any are left out."""
        found = [(name, self._texts.pop(name, None)) for name in names]
        return [(name, *text.read()) for name, text in found if text is not None]

    def clear(self) -> None:
        """Drop what is kept."""
        self._texts.clear()

    def see(self, hidden: torch.Tensor, spans: Spans, head: Head) -> None:
        """Score what a step has computed, before any of it is written again."""
        asking = list(self._asking())
        if not asking:
            return
        pieces = self._pieces(asking, spans([place for place, _, _ in asking]))
        if not pieces:
            return
        with adapters_off_the_head(self._model):
            groups = self._reduced(pieces, hidden, head)
        if self._stream is None and hidden.is_cuda:
            self._stream = torch.cuda.Stream(hidden.device)
        for group in groups:
            group.copy(self._stream)
        self._bound()

    def _pieces(
        self, asking: Iterable[tuple[int, str, Mapping[str, Any]]], where: Mapping[int, Span]
    ) -> list[_Piece]:
        """What the step has of the texts that ask, those together that are reduced alike."""
        pieces = []
        for place, name, extra in asking:
            if place not in where:
                continue
            text = self._texts.get(name) or _Text(extra)
            some, row = text.wanted(where[place])
            if some.stop > some.start:
                pieces.append(_Piece(text, some, row))
                if self._keep:
                    self._texts[name] = text
        return sorted(pieces, key=lambda piece: piece.text.key)

    def _reduced(
        self, pieces: Sequence[_Piece], hidden: torch.Tensor, head: Head
    ) -> Sequence[_Group]:
        groups: list[_Group] = []
        for _, alike in groupby(pieces, key=lambda piece: piece.text.key):
            start = groups[-1].stop if groups else 0
            groups.append(_Group(list(alike), start, hidden.device))
        rows = np.concatenate([np.arange(p.row, p.row + p.count) for p in pieces])
        wanted = _to_device(rows, hidden.device)
        for at in range(0, len(rows), self.block_rows):
            logits = head(hidden.index_select(0, wanted[at : at + self.block_rows]))
            if logits is not None and self._keep:
                for group in groups:
                    group.reduce(logits, at)
            del logits  # one block at a time
        return groups

    def _bound(self) -> None:
        held = sum(text.nbytes for text in self._texts.values())
        while held > self.most_bytes:
            held -= self._texts.pop(next(iter(self._texts))).nbytes


def _to_device(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


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
            scorer = Scorer(self.model_runner, capture.asking_for_scores, keep=capture.publishes)
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
