"""What the packed forward's attention costs with its mask, and with flex attention in its place."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lmpool.backends.device import all_to_device
from lmpool.backends.hf.packed import PackedForward
from lmpool.backends.hf.packed_layout import RESERVED_SLOTS, Bounds, Layout, Pass, lay_out, passes
from lmpool.backends.trie import TokenTrie
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, ratio
from tests.benchmarks.pool import WrongRows

NAME = "masks"
LINE = "attention of the hf engine's passes: a 4-dimensional mask, or flex attention"
NEEDS = "torch"

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 16, 32, 8, 64
THREADS = 1


def measure(scale: Scale) -> Report:
    """Alternate between both, pass by pass."""
    torch.set_num_threads(THREADS)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    watch = Bystanders()
    report = Report(
        NAME,
        f"{LAYERS} layers of {HEADS} heads over {KV_HEADS} of keys and values, {HEAD_DIM} wide, "
        f"{str(dtype).removeprefix('torch.')} on {device.type}",
    )
    for title, shape in _shapes(scale).items():
        layout, part = _last_pass(*shape)
        rows, width = part.queries.shape
        seen = part.columns.shape[1]
        sides = {
            "mask": _masked(layout, part, device, dtype),
            # A shape that may change does not compile on a CPU (torch 2.13): one kernel a shape.
            "flex": _flexible(layout, part, device, dtype, compiled=not scale.quick),
        }
        first: dict[str, float] = {}
        found = {}
        for name, run in sides.items():
            began = time.perf_counter()
            found[name] = run().float()
            first[name] = time.perf_counter() - began
        real = torch.as_tensor(_real(part)).to(device)
        difference = float((found["mask"] - found["flex"]).abs().amax((1, 3))[real].max())
        if difference > (1e-4 if dtype == torch.float32 else 3e-2):
            raise WrongRows(f"{title}: both differ by {difference:.2g}")
        taken = alternate({name: _timed(run) for name, run in sides.items()}, scale.runs)
        heading = f"{title}: {rows} x {width} positions that see {seen} each"
        for name, seconds in taken.items():
            report.add(heading, Measured(name, "ms", tuple(s * 1000 for s in seconds)))
        report.add(
            heading,
            ratio("flex / mask", taken["flex"], taken["mask"]),
            Measured("flex, first time (it compiles)", "s", (first["flex"],)),
        )
    report.note("the mask, of either kind, is made once, and attention done with it in every layer")
    report.facts = {**facts(None, ("torch",)), **watch.report()}
    return report


def _shapes(scale: Scale) -> dict[str, tuple[int, int, int]]:
    """Prompts, tokens that they share and that are kept, tokens of their own."""
    if scale.quick:
        return {"particles": (4, 32, 1)}
    return {
        "32 particles of one 256-token prompt": (32, 256, 1),
        "32 particles of one 2,000-token prompt": (32, 2_000, 1),
        "32 distinct prompts": (32, 0, 32),
        "8 questions to one 500-token text": (8, 500, 64),
        "the last 1,024 of a 4,096-token prompt": (1, 3_072, 1_024),
    }


def _last_pass(count: int, shared: int, own: int) -> tuple[Layout, Pass]:
    trie = TokenTrie(2 * (shared + count * own))
    prefix = np.arange(shared, dtype=np.uint32)
    if shared:
        kept = trie.lease(prefix)
        assert kept is not None
        trie.commit([kept])
    leases = []
    for number in range(count):
        tail = np.arange(own, dtype=np.uint32) + 10_000 * (number + 1)
        lease = trie.lease(np.concatenate((prefix, tail)))
        assert lease is not None
        leases.append(lease)
    layout = lay_out(leases)
    return layout, list(passes(layout, Bounds(1_024, 1_024)))[-1]


def _real(part: Pass) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which places hold a position of their own, and not one that fills up its row."""
    flat = part.queries.ravel()
    real: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = np.append(True, flat[1:] != flat[:-1])
    return real.reshape(part.queries.shape)


def _states(
    part: Pass, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def states(heads: int, positions: int) -> torch.Tensor:
        shape = (len(part.queries), heads, positions, HEAD_DIM)
        return torch.randn(shape, generator=generator).to(device, dtype)

    width, seen = part.queries.shape[1], part.columns.shape[1]
    return states(HEADS, width), states(KV_HEADS, seen), states(KV_HEADS, seen)


def _masked(
    layout: Layout, part: Pass, device: torch.device, dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    queries, keys, values = _states(part, device, dtype)
    packed = PackedForward(
        lambda *_, **__: torch.empty(0),  # type: ignore[arg-type]
        [],
        slots=RESERVED_SLOTS,
        dtype=dtype,
        device=device,
        bounds=Bounds(1, 1),
    )

    arrays = packed._arrays(layout, part, np.zeros(1, np.int64))

    def run() -> torch.Tensor:
        tensors = all_to_device([*arrays.values()], device)
        mask = packed._mask(dict(zip(arrays, tensors, strict=True)))
        assert isinstance(mask, torch.Tensor)
        for _ in range(LAYERS):
            found = torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, enable_gqa=True
            )
        return found

    return run


def _flexible(
    layout: Layout, part: Pass, device: torch.device, dtype: torch.dtype, *, compiled: bool
) -> Callable[[], torch.Tensor]:
    queries, keys, values = _states(part, device, dtype)
    attend = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention

    def run() -> torch.Tensor:
        at = torch.as_tensor(part.queries).to(device)
        seen = torch.as_tensor(part.columns).to(device)
        ends = torch.as_tensor(layout.ends[part.columns]).to(device)

        def sees(
            row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, column: torch.Tensor
        ) -> torch.Tensor:
            position = at[row, query]
            return (seen[row, column] <= position) & (position < ends[row, column])

        (rows, width), columns = part.queries.shape, part.columns.shape[1]
        mask = create_block_mask(sees, rows, None, width, columns, device=device.type)
        for _ in range(LAYERS):
            found = attend(queries, keys, values, block_mask=mask, enable_gqa=True)
        return found  # type: ignore[no-any-return]

    return run


def _timed(run: Callable[[], torch.Tensor]) -> Callable[[int], float]:
    def timed(_: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            float(run().sum())  # waits for a GPU
        return time.perf_counter() - began

    return timed
