"""A GPU's own account of its time: when it computed, when it copied, how long it had nothing to do.

On a CPU the same code runs, by the clock of the host: that is for its tests.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from lmpool.backends.device import Copied, HostCopies
from tests.benchmarks.measure import NotHere, progress

Span = tuple[float, float]
"""When something began and ended, in seconds."""

NVML_PERIOD: Final = 0.1
"""Seconds between two looks; the driver's own period is a sixth of a second at least."""


def find_device(name: str) -> torch.device:
    """The device of this name. Raises `NotHere` where this machine has none."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch (CUDA {built}) finds none" if built else "torch was built without CUDA"
        raise NotHere(f"there is no GPU here: {why}; --device cpu tries the same code in small")
    return device


def describe(device: torch.device) -> dict[str, str]:
    """What a report says of a device."""
    if device.type != "cuda":
        return {"gpu": "none: the same code on a CPU, whose figures say nothing of a GPU"}
    found = torch.cuda.get_device_properties(device)
    return {
        "gpu": f"{found.name}, {found.total_memory / 2**30:.0f} GiB",
        "cuda": str(torch.version.cuda),
    }


def wait_for(device: torch.device) -> None:
    """Until it has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Timeline:
    """Moments of a device's streams, on one clock: CUDA events, which cost the streams nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first = self.mark()

    def mark(self, stream: Any = None) -> Any:
        """When a stream, by default the one that computes, has done what it was given so far."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: Any) -> float:
        """The time of a mark, once the device has come to it."""
        if self._device.type != "cuda":
            return float(mark - self._first)
        return float(self._first.elapsed_time(mark)) / 1000

    def spans(self, marks: Sequence[tuple[Any, Any]]) -> list[Span]:
        """The times of pairs of marks. Waits for the device."""
        wait_for(self._device)
        return [(self.seconds(begin), self.seconds(end)) for begin, end in marks]


class TimedCopies(HostCopies):
    """Copies as the engine makes them, with the times of each."""

    def __init__(self, device: torch.device, timeline: Timeline) -> None:
        super().__init__(device)
        self._timeline = timeline
        self.marks: list[tuple[Any, Any]] = []
        self.nbytes = 0
        self.pinned: list[bool] = []
        """Whether what was copied to is pinned, of each tensor."""

    def start(self, *tensors: torch.Tensor) -> Copied:
        if self._stream is not None:  # it is to begin where what is copied has been computed
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        begin = self._timeline.mark(self._stream)
        copied = super().start(*tensors)
        self.marks.append((begin, self._timeline.mark(self._stream)))
        self.nbytes += sum(tensor.nbytes for tensor in tensors)

        def finish() -> Sequence[torch.Tensor]:
            found = copied()
            self.pinned += [tensor.is_pinned() for tensor in found]
            return found

        return finish


@contextmanager
def timed_forwards(model: Any, timeline: Timeline) -> Iterator[list[tuple[Any, Any]]]:
    """The marks of each forward pass of a model, as they are made."""
    marks: list[tuple[Any, Any]] = []
    begun: list[Any] = []
    before = model.register_forward_pre_hook(lambda *_: begun.append(timeline.mark()))
    after = model.register_forward_hook(lambda *_: marks.append((begun.pop(), timeline.mark())))
    try:
        yield marks
    finally:
        before.remove()
        after.remove()


def union(spans: Sequence[Span]) -> list[Span]:
    """The same time without overlaps, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def length(spans: Sequence[Span]) -> float:
    """Seconds in any of them."""
    return sum(end - begin for begin, end in union(spans))


def together(one: Sequence[Span], other: Sequence[Span]) -> float:
    """Seconds in which something of both went on."""
    return max(0.0, length(one) + length(other) - length([*one, *other]))


def idle_share(device: torch.device, work: Callable[[], object]) -> float | None:
    """The part of the time of `work`, in this process, in which no kernel ran and nothing was
    copied, as CUPTI has it; None where it tells of no kernel."""
    if device.type != "cuda":
        work()
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    wait_for(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        began = time.perf_counter()
        work()
        wait_for(device)
        took = time.perf_counter() - began
    spans = [
        (event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return 1 - length(spans) / took if spans else None


def idle_share_of_others(
    device: torch.device, work: Callable[[], object]
) -> tuple[float, int] | None:
    """The same of whoever computes, as NVML has it: the part of its periods without a kernel, and
    how many times it was read. None where NVML cannot be asked or does not answer."""
    if device.type != "cuda" or importlib.util.find_spec("pynvml") is None:
        work()
        return None
    found: list[int] = []
    over = threading.Event()

    def look() -> None:
        over.wait(1.0)  # its first period lies before the work
        while not over.wait(NVML_PERIOD):
            try:
                found.append(torch.cuda.utilization(device))
            except Exception as error:  # no driver's library, no right to ask, none of this device
                progress(f"  NVML does not tell: {type(error).__name__}: {error}")
                found.clear()
                return

    thread = threading.Thread(target=look, name="utilization")
    thread.start()
    try:
        work()
    finally:
        over.set()
        thread.join()
    return (1 - sum(found) / len(found) / 100, len(found)) if found else None


def copying_pace(device: torch.device, nbytes: int, *, pinned: bool) -> float:
    """Bytes a second from the device into memory of the host that is there already."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
    target.copy_(source)  # its pages are there
    timeline = Timeline(device)
    marks = []
    for _ in range(10):
        begin = timeline.mark()
        target.copy_(source, non_blocking=pinned)
        marks.append((begin, timeline.mark()))
    return nbytes / (sum(end - begin for begin, end in timeline.spans(marks)) / len(marks))


def pinned_blocks() -> int | None:
    """How many pinned blocks torch has asked CUDA for; None where it does not count them."""
    stats = getattr(torch.cuda, "host_memory_stats", dict)()
    return stats.get("num_host_alloc")
