"""Which models the packed forward serves, and how much memory it gets.

A model that it does not serve right is told by its configuration, by the cache that it makes, or by
a trial of a few prompts.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from lmpool.backends.hf.forward import Forward, Sharing
from lmpool.backends.hf.graphs import CudaRecorder, PassGraphs
from lmpool.backends.hf.numbers import LOWERED
from lmpool.backends.hf.packed import LayerShape, PackedForward, Reach, cache_utils
from lmpool.backends.hf.packed_layout import RESERVED_SLOTS, Bounds
from lmpool.backends.hf.packed_trial import (
    FEW_WIDTHS,
    Unfit,
    compare,
    longest_by_cache_length,
    try_graphs,
)
from lmpool.cache_memory import MOST_POSITIONS, default_cache_bytes
from lmpool.errors import SettingsError

logger = logging.getLogger(__name__)

_ATTENTION: Final = ("sdpa", "eager")
"""The implementations of attention that take a 4-dimensional mask."""

_WINDOWS: Final = {
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""What a config calls the kinds of layers that do not see all, and how far each of them sees."""

_TRIAL_WINDOW: Final = 7
"""A window for the trial, so that its prompts are longer than that and yet short."""
_LOWERED_TOKENS: Final = 17
_FEWEST_SLOTS: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A packed forward, and the `longest` prompt that it serves right; or why there is none."""

    packed: PackedForward | None = None
    longest: int = 0
    reason: str = ""


def packed_forward(
    model: Any,
    forward: Forward,
    *,
    device: torch.device,
    kv_cache_bytes: int | None,
    longest: int,
    bounds: Bounds,
    recorded: bool = False,
) -> Fit:
    """A packed forward for `model`, whose small passes are `recorded` where they can be.

    There is none where `kv_cache_bytes` is 0, and for a model that it cannot serve; the log says
    why. Raises `SettingsError` where `kv_cache_bytes` is too little for a few positions.
    """
    if kv_cache_bytes == 0:
        return Fit(reason="kv_cache_bytes is 0")
    name = type(model).__name__
    began = time.monotonic()
    try:
        shapes, limit = _requirements(model, forward, device)
        slots = _slots(shapes, device, kv_cache_bytes)
        head = forward.head
        assert head is not None
        packed = PackedForward(
            head, shapes, slots=slots, dtype=model.dtype, device=device, bounds=bounds
        )
        logger.info("%s is tried in packed forward passes", name)
        limit = _longest_right(packed, forward, model, min(limit, longest))
        limit = longest_by_cache_length(packed, forward, limit)
        limit = _within_numbers(packed, forward, limit)
        if recorded:
            _record(packed, forward, limit)
    except Unfit as reason:
        logger.warning(
            "%s keeps nothing between batches, and computes shared prefixes for each prompt: %s",
            name,
            reason,
        )
        return Fit(reason=str(reason))
    logger.info(
        "%s computes each distinct position once, packed with others: trials in %.1f s gave the "
        "rows of plain forward passes",
        name,
        time.monotonic() - began,
    )
    logger.info(
        "%s keeps the keys and values of %s positions in %s bytes%s",
        name,
        f"{slots:,}",
        f"{packed.kv_cache_bytes:,}",
        " (kv_cache_bytes sets another bound)" if kv_cache_bytes is None else "",
    )
    if limit < longest:
        logger.warning(
            "prompts of more than %d tokens, from where %s attends otherwise, keep nothing between "
            "batches",
            limit,
            name,
        )
    return Fit(packed, limit)


def _record(packed: PackedForward, forward: Forward, longest: int) -> None:
    """Have small passes recorded from now on, if the model bears that."""
    recorder = CudaRecorder(packed.device)
    packed.graphs = PassGraphs(recorder, forward.difference, packed.device, recorder.lags)
    try:
        try_graphs(packed, forward, longest)
        reason = packed.graphs.reason
    except Unfit as error:
        reason = str(error)
    if reason:
        packed.graphs = None
        logger.info("%s launches the kernels of every pass: %s", forward.name, reason)
    else:
        logger.info("%s has small passes recorded as CUDA graphs", forward.name)


def execution(fit: Fit, sharing: Sharing, longest: int) -> str:
    """How prompts of up to `longest` tokens are computed, and why not in a faster way."""
    if fit.packed is not None and fit.longest >= longest:
        return "each distinct position once"
    if sharing.padded and (fit.packed is None or sharing.padded_beyond):
        plain = "prompts of like length, padded"
    else:
        plain = "prompts of one length together" if sharing.alike else "one prompt at a time"
    reason = fit.reason or sharing.reason
    if fit.packed is not None:
        plain = f"each distinct position once up to {fit.longest} tokens, then {plain}"
    return f"{plain}: {reason}" if reason else plain


def _slots(shapes: Sequence[LayerShape], device: torch.device, kv_cache_bytes: int | None) -> int:
    """How many positions' keys and values there is memory for."""
    slot_bytes = sum(shape.slot_bytes for shape in shapes)
    memory = kv_cache_bytes
    if memory is None:
        on_gpu = device.type == "cuda"
        memory = default_cache_bytes(torch.cuda.mem_get_info(device)[0] if on_gpu else None)
    slots = min(memory // slot_bytes, MOST_POSITIONS) - RESERVED_SLOTS
    if slots >= _FEWEST_SLOTS:
        return slots
    least = (_FEWEST_SLOTS + RESERVED_SLOTS) * slot_bytes
    if kv_cache_bytes is None:
        raise Unfit(f"there is no memory for {least:,} bytes of keys and values")
    raise SettingsError(
        f"kv_cache_bytes={kv_cache_bytes}: a position of this model takes {slot_bytes:,} "
        f"bytes; write {least} or more, or 0 to keep nothing between batches"
    )


def _longest_right(packed: PackedForward, forward: Forward, model: Any, longest: int) -> int:
    """Try what the packed forward computes; the longest prompt whose row is right, up to this."""
    config = model.config.get_text_config()
    windows = _windows(config)
    try:
        packed.reach = _reach(config, windows)
        with _narrow_windows(config, packed, windows):
            compare(packed, forward, longest)
    except Unfit as reason:
        if not windows:
            raise
        logger.info("%s is served within its window only: %s", type(model).__name__, reason)
        packed.reach = Reach()
        longest = min(longest, *windows.values())
        compare(packed, forward, longest)
    return longest


def _within_numbers(packed: PackedForward, forward: Forward, longest: int) -> int:
    """The longest prompt, up to this, that none of the model's numbers cuts in a way of its own.

    Windows that `packed` heeds were tried with it.
    """
    heeded = _WINDOWS.values() if packed.reach != Reach() else ()
    for number in forward.numbers:
        if number.name in heeded or number.value > longest:
            continue
        try:
            with number.lowered():
                compare(packed, forward, min(longest, _LOWERED_TOKENS), FEW_WIDTHS)
        except Unfit as reason:
            logger.info("from %s=%d on, %s", number.name, number.value, reason)
            longest = min(longest, number.value - 1)
            with number.lowered():  # shorter prompts in rows that may be longer
                compare(packed, forward, LOWERED - 1, FEW_WIDTHS)
    return longest


def _requirements(
    model: Any, forward: Forward, device: torch.device
) -> tuple[list[LayerShape], int]:
    """What a position takes in each layer, and the longest prompt whose positions mean the same."""
    config = model.config.get_text_config()
    if not forward.sharing.padded:
        raise Unfit(forward.sharing.reason)
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in _ATTENTION:
        raise Unfit(
            f"its attention is {implementation!r}, which takes no mask of ours; "
            f"{' and '.join(_ATTENTION)} do"
        )
    # A layer keeps no more than its window: a few tokens that are in the least one.
    windows = [size - 1 for size in _windows(config).values()]
    count = max(1, min([5, forward.places, *windows]))
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.arange(count, device=device)[None] % vocab_size
    assert forward.head is not None
    try:
        with torch.inference_mode():
            cache = getattr(model(input_ids=ids, use_cache=True), forward.head.cache_name)
    except Exception as error:
        raise Unfit(f"it makes no cache ({type(error).__name__}: {error})") from error
    if type(cache) is not cache_utils.DynamicCache:
        raise Unfit(f"it keeps its state in a {type(cache).__name__}")
    shapes = []
    for layer in cache.layers:
        if type(layer) not in (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer):
            raise Unfit(f"it keeps the state of a layer in a {type(layer).__name__}")
        keys, values = layer.keys, layer.values
        if keys is None or keys.dim() != 4 or keys.shape[2] != ids.shape[1]:
            raise Unfit("some of its layers keep no keys of their own")
        if keys.device != values.device or keys.device.type != device.type:
            raise Unfit("its layers are on several devices")
        if (keys.device.index or 0) != (device.index or 0):
            raise Unfit("its layers are on several devices")
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype))
    return shapes, forward.sharing.limit


def _windows(config: Any) -> dict[str, int]:
    """How far those kinds of layers see that do not see all."""
    found = {kind: getattr(config, name, None) for kind, name in _WINDOWS.items()}
    return {kind: size for kind, size in found.items() if isinstance(size, int) and size > 0}


def _reach(config: Any, windows: Mapping[str, int]) -> Reach | dict[str, Reach]:
    """What the model's layers see: a model of several kinds of layers takes a mask for each."""
    if not windows:
        return Reach()
    kinds = set(getattr(config, "layer_types", None) or windows)
    if unknown := kinds - windows.keys() - {"full_attention"}:
        raise Unfit(f"what its layers of the kind {min(unknown)!r} see is not known")
    reaches = {
        kind: Reach(
            window=windows.get(kind) if kind == "sliding_attention" else None,
            chunk=windows.get(kind) if kind == "chunked_attention" else None,
        )
        for kind in sorted(kinds)
    }
    return reaches if len(reaches) > 1 else next(iter(reaches.values()))


@contextlib.contextmanager
def _narrow_windows(
    config: Any, packed: PackedForward, windows: Mapping[str, int]
) -> Iterator[None]:
    """Have the model, and the packed forward, see less far: no prompt of a trial exceeds the real
    windows, and it would say nothing about them.

    A model that does not heed its config here differs from the packed forward, and fails the trial.
    """
    reach = packed.reach
    narrow = dict.fromkeys(windows, _TRIAL_WINDOW)
    try:
        packed.reach = _reach(config, narrow)
        for kind in windows:
            setattr(config, _WINDOWS[kind], _TRIAL_WINDOW)
        yield
    finally:
        packed.reach = reach
        for kind, size in windows.items():
            setattr(config, _WINDOWS[kind], size)
