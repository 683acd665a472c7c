"""Whether packed forward passes give the rows of plain ones, on the layouts that they may have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from lmpool.backends.engine import Tokens
from lmpool.backends.hf.forward import Forward
from lmpool.backends.hf.graphs import RECORDED_AFTER
from lmpool.backends.hf.packed import PackedForward
from lmpool.backends.hf.packed_layout import Indices, leaves_one
from lmpool.backends.hf.probes import greatest

_TOKENS: Final = 32
WIDTHS: Final = (1, 2, 3, 5, 8, 13, 1 << 30)
"""Of rows. Where a prompt is cut, and what stands before it in its row, depends on the width."""
FEW_WIDTHS: Final = (3, 1 << 30)
_CLAIMED: Final = 100_003
"""What the length of the cache is said to be: the mask and the positions that are given count."""
_FEWEST_TOKENS: Final = 16


class Unfit(Exception):
    """Why a model is not served in packed forward passes."""


class _Failed(Unfit):
    """It raised."""


def compare(
    packed: PackedForward, forward: Forward, longest: int, widths: Sequence[int] = WIDTHS
) -> None:
    """Compare prompts that share prefixes, are kept, and are computed in parts with each alone.

    Raises `Unfit` where they differ.
    """
    trial = _Trial(packed, forward, longest)
    try:
        _compare(packed, trial, widths)
    except _Failed:
        packed.want_contiguous()  # some models view states as if they were
        _compare(packed, trial, widths)


def _compare(packed: PackedForward, trial: _Trial, widths: Sequence[int]) -> None:
    """Raise `Unfit` where any layout gives other rows."""
    head, long, *branches = trial.family
    with packed.on_trial():
        for batch in ([long], [head, *branches], [long, branches[2], trial.random(1)]):
            trial.check(batch, "a trial")
    if packed.query_block is not None:
        widths = (*widths, packed.query_block + 1)
    for width in widths:
        what = f"a trial in rows of {min(width, trial.positions)}"
        with packed.on_trial(width=width):
            trial.check([head], what)
            trial.check([head, long, *branches], what)


def longest_by_cache_length(packed: PackedForward, forward: Forward, longest: int) -> int:
    """The longest prompt, up to this, whose row does not tell how long the cache says it is.

    A model that counts positions from there is right as long as they make no difference: also the
    rows of `packed` are kept as short. Raises `Unfit` where that is shorter than a few tokens.
    """
    trial = _Trial(packed, forward, longest)
    prompts = [trial.family[0], trial.family[3]]

    def rows(claimed: int) -> torch.Tensor:
        # In rows of one position, so that it counts none but what is claimed.
        with packed.on_trial(width=1, claimed=claimed):
            return trial.rows(prompts)

    def right(claimed: int) -> bool:
        return forward.difference(rows(claimed), plain, same_shapes=True) is None

    plain = rows(0)
    claimed = min(_CLAIMED, longest - 1)
    limit = longest
    if claimed >= 1 and not right(claimed):
        limit = 1 + greatest(right, 0, claimed)
    if limit < longest and limit < _FEWEST_TOKENS:
        raise Unfit("its rows depend on how long its cache says that it is")
    # Rows of a position more, which such a width takes, would be too long.
    widest = limit - leaves_one(limit, packed.query_block)
    packed.bounds = replace(packed.bounds, widest=widest)
    return limit


def try_graphs(packed: PackedForward, forward: Forward, longest: int) -> None:
    """Have a small pass recorded and replayed. Raises `Unfit` where it gives other rows then."""
    trial = _Trial(packed, forward, longest)
    length = trial.family[0].size
    for _ in range(RECORDED_AFTER + 2):
        with packed.on_trial():  # each time others: it is to be computed of what is new
            trial.check([trial.random(length)], "a recorded pass")


class _Trial:
    """Prompts with a common beginning, and their rows by plain forward passes."""

    def __init__(self, packed: PackedForward, forward: Forward, longest: int) -> None:
        self._packed = packed
        self._forward = forward
        self._rng = np.random.default_rng(0)
        self._plain: dict[bytes, torch.Tensor] = {}
        # Of a GPU's kernel some rows are to take more than one block.
        tokens = _TOKENS if packed.query_block is None else 3 * packed.query_block
        long = self.random(min(tokens, longest, packed.slots // 2))
        head, length = long[: (long.size + 1) // 2], long.size
        branches = [np.concatenate((head, self.random(n)))[:length] for n in (1, 3, 9)]
        self.family = [head, long, *branches, self.random(min(3, longest))]
        self.positions = 2 * length

    def random(self, length: int) -> Tokens:
        return self._rng.integers(0, self._forward.embedded, length).astype(np.uint32)

    def check(self, batch: Sequence[Tokens], what: str) -> None:
        """Raise `Unfit` unless the packed forward gives these prompts' rows."""
        try:
            error = self.error(batch)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as failure:
            raise _Failed(f"{what} failed ({type(failure).__name__}: {failure})") from failure
        if error is not None:
            raise Unfit(f"{what} gave other rows than one prompt at a time, by {error:.2g}")

    def error(self, batch: Iterable[Tokens]) -> float | None:
        """By how much the packed forward's rows differ from plain ones, if not by rounding."""
        distinct = list({prompt.tobytes(): prompt for prompt in batch}.values())
        # Those that begin others after them: a causal model's rows are there already.
        for prompt in sorted(distinct, key=len, reverse=True):
            self._alone(prompt)
        plain = torch.stack([self._alone(prompt) for prompt in distinct])
        return self._forward.difference(self.rows(distinct), plain)

    def rows(self, distinct: Sequence[Tokens]) -> torch.Tensor:
        """The packed forward's logits after distinct prompts."""
        rows: dict[int, torch.Tensor] = {}

        def take(numbers: list[int], _: Indices, logits: torch.Tensor) -> Callable[[], list[int]]:
            rows.update(zip(numbers, logits, strict=True))
            return list

        for left in self._packed.run(distinct, take):
            rows[left] = self._alone(distinct[left])
        return torch.stack([rows[i] for i in range(len(distinct))])

    def _alone(self, prompt: Tokens) -> torch.Tensor:
        name = prompt.tobytes()
        for known, rows in self._plain.items():
            if known.startswith(name):
                return rows[prompt.size - 1]
        self._plain[name] = self._forward.every(prompt)
        return self._plain[name][-1]
