"""From the rows that an engine computes to what was asked of them."""

from __future__ import annotations

from lmpool.backends.engine import Outcome, Request
from lmpool.errors import PromptFailed
from lmpool.wants import OfRow, Row


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
