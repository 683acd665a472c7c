"""The next tokens of SGLang's continuations, drawn where it has the logits, or beside it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
import torch

from lmpool.backends.device import HostCopies
from lmpool.backends.engine import NextToken, Outcome
from lmpool.backends.sampling import Continuation
from lmpool.backends.sglang.scheduler import Drawn
from lmpool.backends.small_answers import reduce_logits
from lmpool.backends.words import alike, next_of

_CANCELLED: Drawn = (0, True)


def draw_by_rows(continuations: Sequence[Continuation | None], logits: torch.Tensor) -> list[Drawn]:
    """The next token of each, by its logits [continuations, vocab], whose rows are copied."""
    rows = torch.log_softmax(logits.float(), dim=-1).cpu().numpy()
    found: list[Drawn] = []
    for continuation, row in zip(continuations, rows, strict=True):
        if continuation is None:
            found.append(_CANCELLED)
            continue
        try:
            found.append((continuation.take(row), continuation.finished))
        except ValueError as error:  # a row with NaN has no token to draw
            found.append(str(error))
    return found


def draw_there(
    continuations: Sequence[Continuation | None], logits: torch.Tensor, copies: HostCopies
) -> list[Drawn]:
    """The same, drawn where the logits are: the tokens are copied, and what is asked of them."""
    found = [_CANCELLED] * len(continuations)
    kinds: dict[Hashable, list[tuple[int, Continuation, NextToken]]] = {}
    for place, continuation in enumerate(continuations):
        if continuation is not None:
            want = continuation.next_token()
            kinds.setdefault(alike(want), []).append((place, continuation, want))
    for same in kinds.values():
        places = torch.tensor([place for place, _, _ in same], device=logits.device)
        copied = copies.start(*reduce_logits(logits, places, [want for _, _, want in same]))
        words, scales = (tensor.numpy() for tensor in copied())
        for (place, continuation, _), each, scale in zip(same, words, scales.tolist(), strict=True):
            if math.isfinite(scale):
                drawn = next_of(each)
                continuation.go_on(drawn)
                found[place] = int(drawn.token_ids[0]), continuation.finished
            else:
                found[place] = str(Outcome.of_row(b"", np.empty(0, np.float32), scale).error)
    return found
