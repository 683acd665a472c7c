"""From the logits of a batch to the outcomes of its requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from lmpool.backends.device import HostCopies, to_device
from lmpool.backends.engine import Outcome, Request, Tokens
from lmpool.backends.hf.packed_layout import Indices
from lmpool.backends.reduction import score_logits
from lmpool.backends.small_answers import reduce_logits
from lmpool.backends.words import alike, asked_of_row, outcome_of
from lmpool.wants import Score, TextScores

Scales = npt.NDArray[np.float32]
Block = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
Finish = Callable[[], list[int]]


@dataclass(slots=True, eq=False)
class _Text:
    """A text, or a part of one, that is scored: what its positions have got so far."""

    request: Request
    want: Score
    scores: TextScores
    ids: npt.NDArray[np.int32] | None
    spoiled: float | None = None
    """A logsumexp that is not finite."""

    def outcome(self) -> Outcome:
        if self.spoiled is not None:
            return Outcome.of_row(self.request.id, np.empty(0, np.float32), self.spoiled)
        return Outcome(self.request.id, answer=self.scores)


@dataclass(slots=True, eq=False)
class _Asked:
    """What is asked after one distinct prompt: its row, small answers that are reduced from it
    where it is, and the scores of what follows it."""

    tokens: Tokens
    rows: list[Request] = field(default_factory=list)
    small: list[Request] = field(default_factory=list)
    texts: list[_Text] = field(default_factory=list)

    @property
    def count(self) -> int:
        """After how many of its last tokens logits are wanted."""
        counts = [text.scores.logprobs.size for text in self.texts]
        return max([*counts, 1] if self.rows or self.small else counts)


class _Scored:
    """Positions of one block that are reduced alike: those of all texts with like wants."""

    def __init__(self) -> None:
        self.texts: list[tuple[int, _Text, slice]] = []
        self.rows: list[Indices] = []
        self.targets: list[Tokens] = []
        self.ids: list[npt.NDArray[np.int32]] = []


class Batch:
    """Requests by one adapter, as `prompts` to compute, each once, and what comes of them.

    `counts` are after how many of a prompt's last tokens logits are wanted; None where it is the
    last alone. A text's last token is no part of its prompt: it is only a target.

    With `reduce` the small answers to what rows say are reduced on the device: that is for a GPU,
    which need not copy a row then. On a CPU NumPy is as fast, or faster, and copies nothing either.
    """

    def __init__(
        self, requests: Sequence[Request], copies: HostCopies, *, bfloat16: bool, reduce: bool
    ) -> None:
        self._copies = copies
        self._bfloat16 = bfloat16
        asked: dict[bytes, _Asked] = {}
        for request in requests:
            want, tokens = request.want, request.tokens
            if isinstance(want, Score):
                tokens = tokens[:-1]
            found = asked.setdefault(tokens.tobytes(), _Asked(tokens))
            if isinstance(want, Score):
                count = request.tokens.size - want.start
                text = _Text(request, want, want.blank(count), want.ids_of(count))
                found.texts.append(text)
            elif reduce and alike(asked_of_row(request)) is not None:
                found.small.append(request)
            else:
                found.rows.append(request)
        self._asked: Final = list(asked.values())
        self._outcomes: list[Outcome] = []
        self.prompts: Final[list[Tokens]] = [each.tokens for each in self._asked]
        scored = any(each.texts for each in self._asked)
        self.counts: Final = [each.count for each in self._asked] if scored else None

    def outcomes(self) -> Iterator[Outcome]:
        """One of each request, once all logits were taken and finished."""
        yield from self._outcomes
        for asked in self._asked:
            for text in asked.texts:
                yield text.outcome()

    def take(
        self, numbers: Sequence[int], depths: Indices, logits: torch.Tensor, *, last: bool
    ) -> Finish:
        """Begin to make outcomes of logits [outputs, vocab], of these prompts after these tokens.

        The end returns the numbers of those that are worth another try: none at the `last`.
        """
        owners = np.asarray(numbers)
        finishing = []
        ends = [
            place
            for place, (number, depth) in enumerate(zip(numbers, depths.tolist(), strict=True))
            if depth == self.prompts[number].size - 1
        ]
        rows = [place for place in ends if self._asked[numbers[place]].rows]
        if rows:
            finishing.append(self._take_rows(owners[rows].tolist(), _chosen(logits, rows), last))
        finishing += self._take_small(numbers, ends, logits, last)
        if self.counts is not None:
            finishing += self._take_scores(owners, depths, logits, last)
        return lambda: [number for finish in finishing for number in finish()]

    def _take_rows(self, numbers: Sequence[int], logits: torch.Tensor, last: bool) -> Finish:
        copied = rows_of(logits, self._copies, bfloat16=self._bfloat16)

        def finish() -> list[int]:
            again = []
            rows, logsumexp = copied()
            for number, row, scale in zip(numbers, rows, logsumexp.tolist(), strict=True):
                if last or math.isfinite(scale):
                    asking = self._asked[number].rows
                    self._outcomes.extend(Outcome.of_row(r.id, row, scale) for r in asking)
                else:
                    again.append(number)
            return again

        return finish

    def _take_small(
        self, numbers: Sequence[int], ends: Sequence[int], logits: torch.Tensor, last: bool
    ) -> list[Finish]:
        kinds: dict[Hashable, list[tuple[int, int, Request]]] = {}
        for place in ends:
            for request in self._asked[numbers[place]].small:
                same = kinds.setdefault(alike(asked_of_row(request)), [])
                same.append((place, numbers[place], request))
        return [self._reduce_small(asked, logits, last) for asked in kinds.values()]

    def _reduce_small(
        self, asked: Sequence[tuple[int, int, Request]], logits: torch.Tensor, last: bool
    ) -> Finish:
        places = to_device(np.array([place for place, _, _ in asked]), logits.device)
        with torch.inference_mode():
            wants = [asked_of_row(request) for _, _, request in asked]
            reduced = reduce_logits(logits, places, wants)
            copied = self._copies.start(*reduced)

        def finish() -> list[int]:
            words, logsumexp = (tensor.numpy() for tensor in copied())
            words.flags.writeable = False
            again = []
            found = zip(asked, words, logsumexp.tolist(), strict=True)
            for (_, number, request), answer, scale in found:
                if not last and not math.isfinite(scale):
                    again.append(number)
                else:
                    self._outcomes.append(outcome_of(request, answer, scale))
            return again

        return finish

    def _take_scores(
        self, owners: Indices, depths: Indices, logits: torch.Tensor, last: bool
    ) -> list[Finish]:
        alike: dict[tuple[float, int, int], _Scored] = {}
        for number in np.unique(owners).tolist():
            places = np.flatnonzero(owners == number)
            for text in self._asked[number].texts:
                want = text.want
                mine = places[depths[places] >= want.start - 1]
                if not mine.size:
                    continue
                # A prompt's positions come in order, in blocks without gaps.
                first = int(depths[mine[0]]) + 1 - want.start
                to = slice(first, first + mine.size)
                width = 0 if text.ids is None else text.ids.shape[1]
                key = (want.temperature, want.top_logprobs, width)
                scored = alike.setdefault(key, _Scored())
                scored.texts.append((number, text, to))
                scored.rows.append(mine)
                scored.targets.append(text.request.tokens[want.start :][to])
                if text.ids is not None:
                    scored.ids.append(text.ids[to])
        return [self._reduce(key, scored, logits, last) for key, scored in alike.items()]

    def _reduce(
        self, key: tuple[float, int, int], scored: _Scored, logits: torch.Tensor, last: bool
    ) -> Finish:
        temperature, top, _ = key
        rows = np.concatenate(scored.rows)
        whole = rows.size == len(logits) and bool((rows == np.arange(rows.size)).all())
        targets = np.concatenate(scored.targets).astype(np.int64)
        ids = np.concatenate(scored.ids).astype(np.int64) if scored.ids else None
        with torch.inference_mode():
            reduced = score_logits(
                logits,
                to_device(targets, logits.device),
                rows=None if whole else to_device(rows, logits.device),
                token_ids=None if ids is None else to_device(ids, logits.device),
                top=top,
                temperature=temperature,
            )
            copied = self._copies.start(*(part for part in reduced if part is not None))

        def finish() -> list[int]:
            *found, logsumexp = [tensor.numpy() for tensor in copied()]
            again, at = [], 0
            for number, text, to in scored.texts:
                some = slice(at, at := at + to.stop - to.start)
                scale = _first_bad(logsumexp[some])
                if scale is not None and not last:
                    again.append(number)
                elif scale is not None and text.spoiled is None:
                    text.spoiled = scale
                for whole, part in zip(text.scores.arrays(), found, strict=True):
                    whole[to] = part[some]
            return again

        return finish


def _first_bad(logsumexp: Scales) -> float | None:
    bad = ~np.isfinite(logsumexp)
    return float(logsumexp[bad.argmax()]) if bad.any() else None


def _chosen(logits: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    if len(places) == len(logits):
        return logits
    return logits[to_device(np.array(places), logits.device)]


def rows_of(
    logits: torch.Tensor, copies: HostCopies, *, bfloat16: bool
) -> Callable[[], tuple[Block, Scales]]:
    """Begin to bring rows [prompts, vocab] of these logits, and the logsumexp of each, home.

    With `bfloat16` they are the bits of logits that lose nothing by that.
    """
    with torch.inference_mode():
        wide = logits.float()
        as_bits = bfloat16 and fits_bfloat16(logits)
        if as_bits:
            rows = logits.to(torch.bfloat16).view(torch.int16)
            scales = torch.logsumexp(wide, dim=-1)
        else:
            rows = torch.log_softmax(wide, dim=-1)
            scales = wide[:, 0] - rows[:, 0]
        copied = copies.start(rows, scales)

    def finish() -> tuple[Block, Scales]:
        block, logsumexp = (tensor.numpy() for tensor in copied())
        if as_bits:
            block = block.view(np.uint16)
        elif not np.isfinite(logsumexp).all():
            # A row is one where a single token, the first, is impossible.
            sound = np.isfinite(block.max(axis=1))
            logsumexp = np.where(sound & ~np.isfinite(logsumexp), np.float32(0), logsumexp)
        block.flags.writeable = False
        return block, logsumexp

    return finish


def fits_bfloat16(logits: torch.Tensor) -> bool:
    """Whether a cast to bfloat16 loses nothing."""
    if logits.dtype == torch.bfloat16:
        return True
    return bool((logits.to(torch.bfloat16).to(logits.dtype) == logits).all())
