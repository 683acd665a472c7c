"""What a model's forward pass bears, measured when it is loaded.

Nothing that a model says of itself is believed: short prompts are computed as the engine would
compute them, and compared with a plain forward pass of each.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmpool.backends.engine import Tokens
from lmpool.backends.hf.forward import Forward, Sharing
from lmpool.backends.hf.numbers import numbers
from lmpool.errors import SettingsError

logger = logging.getLogger(__name__)

_FIRST: Final = 4
_SHORT: Final = 9
_LONG: Final = 66
"""More than a usual chunk of 64: attention by chunks differs from there on."""
_VERY_LONG: Final = 1_024
_TRIED: Final = 17
"""As many as suffice to see what a lowered number changes."""
_NEAR: Final = 7
"""So many tokens near a position stand for a prompt that long."""
_LOOKUPS: Final = (
    torch.ops.aten.embedding,
    torch.ops.aten.gather,
    torch.ops.aten.index_select,
)
_RANDOM: Final = ("bernoulli", "multinomial", "native_dropout", "normal", "rand", "uniform")
"""How operations begin that draw random numbers."""


def first_row(forward: Forward) -> torch.Tensor:
    """The logits [1, vocab] after a prompt of one token.

    Raises `SettingsError` where the model cannot compute that.
    """
    with _refusing(forward):
        return forward([np.zeros(1, np.uint32)])


def longest_placed(forward: Forward, longest: int) -> int:
    """The longest prompt, up to this, for which the model's tables of positions have entries.

    They need not begin with the first entry, as a config supposes.
    """
    tokens = np.random.default_rng(0).integers(0, forward.embedded, _FIRST + 1).astype(np.uint32)
    seen: list[list[tuple[int, int]]] = []
    with _refusing(forward):
        for size in (_FIRST, _FIRST + 1):
            with _Record() as record:
                forward.every(tokens[: min(size, longest)])
            seen.append(record.tables)
    # In a table of positions a further token looks one entry further.
    ends: set[int] = {
        rows - (last + 1 - _FIRST)
        for (rows, last), (same, further) in zip(seen[0], seen[1], strict=False)
        if rows == same and further == last + 1
    }
    for end in sorted(end for end in ends if _FIRST < end < longest):
        try:
            with _Record():
                forward.every(np.resize(tokens, end + 1))
        except _NoEntry:
            return end
    return longest


@contextmanager
def _refusing(forward: Forward) -> Iterator[None]:
    """Say that a model which raises computes no prompts."""
    try:
        yield
    except (SettingsError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        raise SettingsError(
            f"{forward.name} cannot compute a prompt ({type(error).__name__}: {error}): serve a "
            "causal language model that takes token ids alone"
        ) from error


def measure(forward: Forward, longest: int) -> Sharing:
    """Which prompts of up to `longest` tokens may share a forward pass of this model.

    Raises `SettingsError` where not even one prompt at a time gives rows that mean anything.
    """
    began = time.monotonic()
    logger.info("%s is measured against plain forward passes", forward.name)
    with _refusing(forward):
        sharing = _measure(forward, longest)
    logger.info(
        "%s was measured in plain and padded forward passes, in %.1f s",
        forward.name,
        time.monotonic() - began,
    )
    if not sharing.padded:
        logger.warning(
            "%s runs without padding, %s, which is slower: %s",
            forward.name,
            "prompts of one length together" if sharing.alike else "one prompt at a time",
            sharing.reason,
        )
    elif sharing.limit < longest:
        logger.info(
            "%s computes no prompt of up to %d tokens beside a longer one: %s",
            forward.name,
            sharing.limit,
            sharing.reason,
        )
    return sharing


def _measure(forward: Forward, longest: int) -> Sharing:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, forward.embedded, min(_LONG, longest)).astype(np.uint32)
    # Some models leave out what a special token stands for, wherever it is.
    tokens[1 : _NEAR - 1 : 2] = np.resize(
        forward.special or tokens[:1], tokens[1 : _NEAR - 1 : 2].size
    )
    rows = _repeat(forward, tokens, longest)
    short, selects = _causality(forward, tokens[:_SHORT])
    near = tokens[:_NEAR]
    _head(forward, tokens[:_SHORT], short[-1])
    limit, by = _company(forward, near, short[: near.size], longest)
    alone = forward.alone(near)
    reason = f"a row beside a longer one differs by {by:.2g}" if limit < longest else ""
    if selects:
        # Exact ties are broken by the length of the row, which padding would change.
        padded, reason = False, "it selects among the positions of a prompt, by their number too"
    else:
        long = tokens[: max(1, limit)]
        last = rows[-1] if long.size == tokens.size else forward.alone(long)
        error = _together(forward, [near, long], torch.stack([alone, last]))
        padded = error is None
        if error is not None:
            reason = f"a padded batch gives other rows, by {error:.2g}"
    beyond = padded and _alike_beyond(forward, near, limit, longest)
    alike = padded or _alike(forward, near)
    sharing = Sharing(alike, padded, limit, beyond, reason)
    return _within_numbers(forward, sharing, tokens[:_TRIED], rows[:_TRIED], longest)


def _within_numbers(
    forward: Forward, sharing: Sharing, tokens: Tokens, rows: torch.Tensor, longest: int
) -> Sharing:
    """Find which of the model's numbers may be lengths, and whether padding is right beyond."""
    forward.numbers = numbers(
        forward._model, lambda: forward.difference(forward.every(tokens), rows), longest
    )
    for number in forward.numbers if sharing.padded else ():
        with number.lowered():
            _, fewer = _recorded(forward, tokens[:_SHORT])
            long, selections = _recorded(forward, tokens)
            if selections != fewer:
                reason = f"it selects among positions, by their number too, from {number.value} on"
            else:
                alone = torch.stack([long[_NEAR - 1], long[-1]])
                if _together(forward, [tokens[:_NEAR], tokens], alone) is None:
                    continue
                reason = f"padding gives other rows from {number.name}={number.value} on"
        if number.value <= sharing.limit:
            sharing = Sharing(sharing.alike, True, number.value - 1, False, reason)
    return sharing


def _recorded(forward: Forward, tokens: Tokens) -> tuple[torch.Tensor, set[int]]:
    """The rows for `tokens`, and among how many things the greatest are selected.

    Where more tokens are more of these, exact ties are broken by the number of positions.
    """
    with _Record() as record:
        rows = forward.every(tokens)
    return rows, record.selections


def _repeat(forward: Forward, tokens: Tokens, longest: int) -> torch.Tensor:
    """Refuse a model whose forward pass does not repeat itself; else its rows for `tokens`."""
    with _Record() as record:
        rows = forward.every(tokens)
    error = forward.difference(forward.every(tokens), rows)
    if error is None and record.draws and longest > tokens.size:
        # What it draws may show in longer prompts only.
        tokens = np.resize(tokens, min(_VERY_LONG, longest))
        error = forward.difference(forward.every(tokens), forward.every(tokens))
    if error is not None:
        raise SettingsError(
            f"{forward.name} gives other rows for the same prompt each time, by {error:.2g} (a "
            f"prompt of {tokens.size} tokens, twice): nothing that it answers can be relied on; "
            "serve a model without randomness in its forward pass"
        )
    return rows


def _causality(forward: Forward, tokens: Tokens) -> tuple[torch.Tensor, bool]:
    """Refuse a model whose rows depend on later tokens.

    Else the rows for `tokens`, and whether it selects among positions.
    """
    rows, selections = _recorded(forward, tokens)
    if rows.shape[0] != tokens.size:
        raise SettingsError(
            f"{forward.name} gives {rows.shape[0]} rows for {tokens.size} tokens: serve a causal "
            "language model, which gives one for each"
        )
    first = min(_FIRST, tokens.size - 1)
    if first < 1:
        return rows, False
    alone, fewer = _recorded(forward, tokens[:first])
    errors = [forward.difference(rows[i], alone[i]) for i in range(first)]
    if None in errors:
        # As many other tokens after them: less to see, but no rounding hides it.
        other = np.concatenate((tokens[:first], tokens[first - 1 :: -1], tokens))[: tokens.size]
        found = forward.every(other)
        errors = [forward.difference(found[i], rows[i], same_shapes=True) for i in range(first)]
    # By rounding a router may choose otherwise for one of them, but hardly for all.
    if all(error is not None for error in errors):
        raise SettingsError(
            f"{forward.name} is not causal: its row after {first} tokens depends, by "
            f"{errors[-1]:.2g}, on the {tokens.size - first} that follow; serve a model that was "
            "trained to predict the next token (if this one was, its config.json may lack "
            '"is_decoder": true)'
        )
    return rows, selections != fewer


def _head(forward: Forward, tokens: Tokens, last: torch.Tensor) -> None:
    """Have the head see all positions where it gives other rows for the wanted ones alone."""
    assert forward.head is not None
    if _together(forward, [tokens], last[None]) is not None:
        forward.head.close()


def _alike(forward: Forward, tokens: Tokens) -> bool:
    """Whether prompts of one length bear each other's company."""
    prompts = [tokens, tokens[::-1].copy()]
    alone = torch.stack([forward.alone(prompt) for prompt in prompts])
    return _together(forward, prompts, alone) is None


def _together(forward: Forward, prompts: list[Tokens], alone: torch.Tensor) -> float | None:
    """By how much these prompts' rows differ in one forward pass from those of each alone."""
    try:
        found = forward(prompts)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        logger.info("%s cannot compute several prompts at once: %s", forward.name, error)
        return float("inf")
    return forward.difference(found, alone)


def _company(
    forward: Forward, tokens: Tokens, alone: torch.Tensor, longest: int
) -> tuple[int, float]:
    """How long the prompts are that a prompt may have beside it, and by how much longer ones hurt.

    A prompt is stood for by a few tokens at its last positions: a long one costs no more.
    """
    size = tokens.size
    twice = np.stack([tokens, tokens])

    def beside(length: int) -> float | None:
        places = np.stack([np.arange(size), np.arange(length - size, length)])
        found = forward.placed(twice, places)[0]
        return forward.difference(found, same, same_shapes=True)

    if longest <= size:
        return longest, 0.0
    try:
        same = forward.placed(twice, np.stack([np.arange(size)] * 2))[0]
        if forward.difference(same, alone) is not None:
            return longest, 0.0  # it does not heed positions as given: padding will tell
        by = beside(longest)
        if by is None:
            return longest, 0.0
        limit = greatest(lambda length: beside(length) is None, size, longest)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception:
        return longest, 0.0  # it takes no positions
    _history(forward, tokens, limit, longest)
    return limit, by


def _history(forward: Forward, tokens: Tokens, limit: int, longest: int) -> None:
    """Refuse prompts whose rows depend on what was computed before them."""
    places = np.arange(tokens.size)[None]
    after: list[torch.Tensor] = []
    for before in (tokens.size, longest):
        forward.placed(tokens[None], places + before - tokens.size)
        after.append(forward.placed(tokens[None], places + limit + 1 - tokens.size))
    error = forward.difference(after[0], after[1])
    if error is not None:
        raise SettingsError(
            f"{forward.name} gives other rows for prompts of more than {limit} tokens once it has "
            f"computed a longer one, by {error:.2g} (rotary positions of the kind 'dynamic' do): "
            f"write max_prompt_tokens={limit}, or serve it with rotary positions of another kind"
        )


def _alike_beyond(forward: Forward, tokens: Tokens, limit: int, longest: int) -> bool:
    """Whether prompts longer than `limit` bear each other's company."""
    if limit >= longest:
        return True
    size = tokens.size
    twice = np.stack([tokens, tokens])
    least = np.arange(limit + 1 - size, limit + 1)
    alone = forward.placed(tokens[None], least[None])[0]
    found = forward.placed(twice, np.stack([least, np.arange(longest - size, longest)]))[0]
    return forward.difference(found, alone) is None


def greatest(right: Callable[[int], bool], low: int, high: int) -> int:
    """The greatest number for which it is right, where it is for `low` and not for `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if right(middle) else (low, middle)
    return low


class _NoEntry(IndexError):
    """A table has no entry for what is looked up."""


class _Record(TorchDispatchMode):  # pyright: ignore[reportUntypedBaseClass]
    """Records what of a forward pass is worth a closer look."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.selections: set[int] = set()
        """Among how many things the greatest are selected."""
        self.draws = False
        """Whether random numbers are drawn."""
        self.tables: list[tuple[int, int]] = []
        """What is looked up in tables, in order: how many entries, and the last that is taken."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func.overloadpacket is torch.ops.aten.topk:
            dim = args[2] if len(args) > 2 else given.get("dim", -1)
            self.selections.add(args[0].shape[dim])
        if func.overloadpacket in _LOOKUPS:
            whole = func.overloadpacket is torch.ops.aten.embedding
            dim, index = (0, args[1]) if whole else args[1:3]
            if index.numel():
                self.tables.append((args[0].shape[dim], int(index.max())))
                if self.tables[-1][1] >= args[0].shape[dim]:
                    raise _NoEntry  # a GPU would never recover from it
        self.draws = self.draws or func.name().removeprefix("aten::").startswith(_RANDOM)
        return func(*args, **given)
