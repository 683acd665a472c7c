"""What a want is given to hold on to."""

from __future__ import annotations

from lmpool.token_ids import held


def hold(want: object, **most: int) -> None:
    """Have a want that is being made hold its ids as they are now: it may be read again, where a
    call is asked anew. Of an iterator so many are read, and one more.

    Raises `PromptError` for an iterator that fails.
    """
    for name, count in most.items():
        given = getattr(want, name)
        if given is not None and type(given) is not bytes:
            kept = held(given, count, name)
            if kept is not given:
                object.__setattr__(want, name, kept)
