"""What a model does behind its head's matrix, found out by trying.

Some models scale the logits, some cap them by a tanh, under names that differ. So an engine's
matrix and its model are given the same states, small ones and such that a cap would show, and what
lies between the two is fitted: then a head that ships is the model's own, whatever its name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from lmpool.head_form import HeadForm, Numbers

logger = logging.getLogger(__name__)

Logits = npt.NDArray[np.float32]
"""float32 [states, vocab]."""
States = npt.NDArray[np.float32]
"""float32 [states, hidden_size]."""

LARGEST: Final = (0.02, 2.0, 50.0, 5e3)
"""The largest product of each state that is tried: a cap of 50 shows above it, and float16 has
numbers for all of them."""
_MADE_UP: Final = 2
_PROBES: Final = (1, 3)
_EXACT: Final = 1e-4
_HALF: Final = 2e-2
"""By how much of a row's largest logit logits may differ: float32, and narrower ones."""
_SNAP: Final = 5e-3
_SNAP_HALF: Final = 2e-2

Head = TypeVar("Head")
"""What an engine has of a head."""


class NoHead(Exception):
    """Why hidden states and a head cannot be told apart in a model: for people."""


def fitted(
    real: States,
    rows: Logits,
    products: Callable[[States], Logits],
    model: Callable[[States], tuple[Logits, States]],
    known: Iterable[float],
    numbers: Numbers,
    *,
    bias: bool,
) -> HeadForm:
    """The head of a model that makes the logits `rows` of `real` states.

    `products` are those of the head's matrix, with its bias; `model` says what logits the model
    makes of states, and what the head sees of them. `known` are the numbers that the model's
    configuration has. Raises `NoHead` where logits are not the products, scaled and capped.
    """
    made, seen = model(_states(real, products))
    logits = np.concatenate([made, rows]).astype(np.float64)
    raw = np.concatenate([products(seen), products(real)]).astype(np.float64)
    if raw.shape != logits.shape or not np.isfinite(logits).all():
        raise NoHead("its logits are not those of its head's matrix")
    exact = numbers == "f32"
    names = _candidates(known)
    tried = len(made)
    within = _SNAP if exact else _SNAP_HALF
    scale, cap = _scale_and_cap(raw[:tried], logits[:tried], names, within)
    right = scale * raw if cap is None else cap * np.tanh(scale * raw / cap)
    error = np.abs(right - logits).max(axis=1) / np.abs(logits).max(axis=1)
    if not (error <= (_EXACT if exact else _HALF)).all():
        raise NoHead(
            f"its logits differ by {error.max():.2g} of the largest from its head's matrix times "
            f"{scale:g}" + ("" if cap is None else f", capped at {cap:g}")
        )
    return HeadForm(real.shape[1], numbers, scale, cap, bias)


def probes(
    vocab_size: int, special: Collection[int | None], longest: int
) -> list[npt.NDArray[np.uint32]]:
    """Prompts of up to `longest` tokens whose states are looked at, of no `special` token: some of
    those have no state."""
    plainest = [token for token in range(vocab_size) if token not in special] or [0]
    sizes = sorted({min(size, longest) for size in _PROBES})
    return [np.array(plainest[:size], np.uint32) for size in sizes]


def _states(real: States, products: Callable[[States], Logits]) -> States:
    """Real states and made-up ones, as large as is to be tried."""
    random = np.random.default_rng(0)
    made = random.standard_normal((_MADE_UP, real.shape[1])).astype(np.float32)
    directions = np.concatenate([real, made])
    largest = np.abs(products(directions)).max(axis=1, keepdims=True)
    if not (np.isfinite(largest) & (largest > 0)).all():
        raise NoHead("its head makes nothing of a hidden state")
    return np.concatenate([directions * (size / largest) for size in LARGEST]).astype(np.float32)


def _candidates(known: Iterable[float]) -> npt.NDArray[np.float64]:
    found = {1.0}
    for number in known:
        if 1e-6 < abs(number) < 1e6:
            found |= {abs(float(number)), 1 / abs(float(number))}
    return np.array(sorted(found))


def _snapped(measured: float, candidates: npt.NDArray[np.float64], within: float) -> float:
    """The known number that this one is meant to be, if there is one."""
    nearest = float(candidates[np.abs(candidates - measured).argmin()])
    return nearest if abs(nearest - measured) <= within * abs(measured) else measured


def _scale_and_cap(
    raw: npt.NDArray[np.float64],
    logits: npt.NDArray[np.float64],
    candidates: npt.NDArray[np.float64],
    within: float,
) -> tuple[float, float | None]:
    each = len(raw) // len(LARGEST)
    small, large = slice(0, each), slice(-each, None)
    measured = float((raw[small] * logits[small]).sum() / (raw[small] ** 2).sum())
    scale = _snapped(measured, candidates, within)
    most = float(np.abs(logits[large]).max())
    if most > 0.9 * scale * float(np.abs(raw[large]).max()):
        return scale, None
    return scale, _snapped(most, candidates, within)


def numbers_of(config: Mapping[str, Any]) -> list[float]:
    """The numbers of a model's configuration, those of its parts too."""
    found: list[float] = []
    for value in config.values():
        if isinstance(value, Mapping):
            found += numbers_of(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append(float(value))
    return found


def head_or_reason(
    model: str, find: Callable[[], Head], fatal: tuple[type[Exception], ...] = ()
) -> tuple[Head | None, str]:
    """What `find` finds of a model of this name, or why there is no head that others may apply.

    Errors other than the `fatal` ones are the reason, `NoHead` among them.
    """
    try:
        return find(), ""
    except fatal:
        raise
    except NoHead as error:
        reason = str(error)
    except Exception as error:  # of a model's own code
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    logger.info("%s gives no hidden states: %s", model, reason)
    return None, f"{model}: {reason}"
