"""What a figure must be read with: the hardware, the versions, and what else was running."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
import time
from pathlib import Path

import psutil
import redis

BUSY = 0.05
"""Cores that another process must have used to be named."""


def facts(url: str | None = None, packages: tuple[str, ...] = ()) -> dict[str, str]:
    """Hardware and versions; the server's where `url` names one."""
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": f"{cpu_model()}, {psutil.cpu_count()} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        # With who built it when: that makes a tenth of a difference.
        "python": f"{platform.python_implementation()} {' '.join(sys.version.split())}",
    }
    for package in ("lmpool", "redis", "hiredis", "arq", "numpy", *packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    if url is not None:
        with redis.Redis.from_url(url, protocol=2) as client:
            info = client.info("server")
        found["server"] = (
            f"Valkey {info['valkey_version']}"
            if "valkey_version" in info
            else f"Redis {info['redis_version']}"
        ) + (", unix socket" if url.startswith("unix") else ", loopback")
    return found


def cpu_model() -> str:
    """What the processor calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_seconds(pid: int | None = None) -> float:
    """Seconds of processor time that a process has used, this one's without `pid`."""
    if pid is None:
        return time.process_time()
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in use and in RAM."""
    return int(psutil.Process(pid).memory_info().rss)


class Bystanders:
    """Measures what the rest of the machine does, from being made until `report`."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._load = os.getloadavg()[0]
        self._busy = _busy_seconds()
        self._ours = _our_seconds()
        self._others = _process_seconds()

    def report(self) -> dict[str, str]:
        """Load averages, cores that others kept busy, and their busiest programs."""
        took = max(1e-9, time.monotonic() - self._began)
        ours = _our_seconds() - self._ours
        others = max(0.0, _busy_seconds() - self._busy - ours) / took
        return {
            "load average": f"{self._load:.2f} before, {os.getloadavg()[0]:.2f} after",
            "others used": f"{others:.2f} of {psutil.cpu_count()} cores in {took:.0f} s",
            "others": self._names(took) or "nothing to speak of",
        }

    def _names(self, took: float) -> str:
        used: dict[str, float] = {}
        for (pid, created, name), seconds in _process_seconds().items():
            share = (seconds - self._others.get((pid, created, name), 0.0)) / took
            if share >= BUSY:
                used[name] = used.get(name, 0.0) + share
        busiest = sorted(used.items(), key=lambda item: -item[1])[:5]
        return ", ".join(f"{name} {share:.2f}" for name, share in busiest)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
    # Guests are counted in user already.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - idle - guests)


def _our_seconds() -> float:
    """This process and the children that have ended: a benchmark ends those it starts."""
    total = 0.0
    for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(whose)
        total += usage.ru_utime + usage.ru_stime
    return total


def _process_seconds() -> dict[tuple[int, float, str], float]:
    """Processor time of every process that is neither this one nor a child of it."""
    mine = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    found = {}
    for process in psutil.process_iter(["pid", "create_time", "name", "cpu_times"]):
        fields = process.info
        if fields["pid"] not in mine and fields["cpu_times"] is not None:
            key = (fields["pid"], fields["create_time"], fields["name"])
            found[key] = fields["cpu_times"].user + fields["cpu_times"].system
    return found


def command(names: list[str]) -> str:
    """How to run these benchmarks again, in the environment of an engine if it is that one."""
    place = Path(sys.prefix).name
    engine = place.removeprefix(".venv") if place.startswith(".venv-") else ""
    engine = engine.removesuffix("-gpu")  # which `make bench` finds by itself
    return f"make bench{engine} ARGS={' '.join([*names, '--save'])!r}"


def interactive() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()
