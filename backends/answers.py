"""From what an engine has to what was asked of it: of its rows, and of its head."""

from __future__ import annotations

import numpy as np

from lmpool.backends.engine import Engine, Outcome, Request
from lmpool.errors import PromptFailed
from lmpool.wants import HeadPart, OfRow, Row


def answered(request: Request, outcome: Outcome) -> Outcome:
    """An outcome as `request` wants it: a row is reduced where less was asked for.

    One that an engine has reduced itself, and an error, stay as they are.
    """
    want = request.want
    if type(want) is Row or outcome.row is None or not isinstance(want, OfRow):
        return outcome
    try:
        return Outcome(outcome.id, answer=want.reduce(outcome.logprobs()))
    except PromptFailed as error:
        return Outcome(outcome.id, error=error)


def head_part(engine: Engine, asked: bytes, want: HeadPart) -> Outcome:
    """The outcome of a part of the engine's head, which it has."""
    head, vocab_size = engine.info.head, engine.info.vocab_size
    assert head is not None
    if want.number == head.weight_parts(vocab_size):
        part = engine.head_bias()
    else:
        part = engine.head_weights(head.rows_of(want.number, vocab_size))
    data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    answer = want.of_part(data)
    answer.data.flags.writeable = False
    return Outcome(asked, answer=answer)
