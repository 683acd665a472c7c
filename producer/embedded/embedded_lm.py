"""`lmpool.embedded`: a server and workers of one's own, for as long as they are needed."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, Unpack, cast, overload

from lmpool.arguments import (
    AllClientArguments,
    AllWorkerArguments,
    EmbeddedArguments,
    FrameworkName,
    spelled_out,
)
from lmpool.checks import as_integer, as_number, is_text, quoted
from lmpool.errors import SettingsError
from lmpool.producer.client import Client
from lmpool.producer.embedded.private_pool import PrivatePool
from lmpool.producer.frameworks import NumpyRows, RowT_co, TorchRows
from lmpool.producer.pooled_lm import PooledLM
from lmpool.settings import (
    URLS,
    ClientOptions,
    WorkerOptions,
    refuse_unknown_variables,
    unknown_name,
)

DRAIN_TIMEOUT: Final = 3.0
WORKERS_MOST: Final = 1024
"""As `lmpool worker` has it."""
"""Seconds in which a worker may finish its batch when the pool ends: nobody waits for it then."""


class EmbeddedLM(PooledLM[RowT_co]):
    """A `PooledLM` that owns its pool: closing it ends the workers and their server.

    So does losing the last reference to it, and the end of the interpreter or of its process, even
    by SIGKILL. A forked child may use it, and does not own it; what is read from its pickle is a
    `PooledLM` of the same pool.
    """

    def __init__(self, options: ClientOptions, private: PrivatePool) -> None:
        super().__init__(options)
        self._private = private
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _end, self._client, private)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return PooledLM, (self.options,)

    @property
    def folder(self) -> Path:
        """The pool's temporary folder: socket and logs."""
        return self._private.folder

    @property
    def worker_log(self) -> Path:
        """What the workers say; gone with the pool."""
        return self._private.log

    def processes(self) -> dict[str, int]:
        """Process ids of the `reaper`, the `server`, and the launcher of the `workers`.

        The reaper is their parent, and ends them when this process is gone.
        """
        return self._private.processes()


def _end(client: Client, private: PrivatePool, timeout: float | None = None) -> None:
    try:
        client.close_soon(timeout)
    finally:
        private.stop()


@overload
def embedded(
    model: str | os.PathLike[str] = "tiny",
    engine: str = "auto",
    workers: int = 1,
    *,
    pool: str | None = None,
    gpus: Sequence[int | str] | str | None = None,
    start_timeout: float = 300.0,
    verbose: bool = False,
    framework: Literal["numpy"],
    **settings: Unpack[EmbeddedArguments],
) -> EmbeddedLM[NumpyRows]: ...
@overload
def embedded(
    model: str | os.PathLike[str] = "tiny",
    engine: str = "auto",
    workers: int = 1,
    *,
    pool: str | None = None,
    gpus: Sequence[int | str] | str | None = None,
    start_timeout: float = 300.0,
    verbose: bool = False,
    framework: Literal["auto", "torch"] | None = None,
    **settings: Unpack[EmbeddedArguments],
) -> EmbeddedLM[TorchRows]: ...
@spelled_out(EmbeddedArguments)
def embedded(
    model: str | os.PathLike[str] = "tiny",
    engine: str = "auto",
    workers: int = 1,
    *,
    pool: str | None = None,
    gpus: Sequence[int | str] | str | None = None,
    start_timeout: float = 300.0,
    verbose: bool = False,
    framework: FrameworkName | None = None,
    **settings: Unpack[EmbeddedArguments],
) -> EmbeddedLM[NumpyRows | TorchRows]:
    """Start a private server and worker processes, and connect to them.

    Blocks until all workers are ready; in an event loop, run it with `asyncio.to_thread`. Use what
    it returns as a context manager, sync or async, or call its `close`. What is left out, or None,
    is as its ``LMPOOL_*`` variable says.

    Args:
        model: tiny, a folder, or a hub id
        engine: auto, hf, vllm, sglang, mlx, mock, or an added one
        workers: how many worker processes; each sees what this process sees
        pool: the pool's name
        gpus: the GPUs' numbers, one worker for each, instead of `workers`
        start_timeout: seconds in which all workers must be ready
        verbose: show on stderr what the workers log to `worker_log`; so does a `log_level`
        framework: what rows are: torch tensors where torch is installed, else numpy
        cache_bytes: bound of the local cache of rows, e.g. 512MiB; 0 for none
        encoding: how rows travel; auto is the smallest lossless one, f16 is lossy
        request_timeout: seconds a call may wait when it names no timeout of its own
        workers_timeout: seconds to wait, while no worker is alive, before NoWorkers or UnknownPool
        reconnect_timeout: seconds to keep trying to reach a lost server before giving up
        priority: of calls that name none; batch lets interactive jobs go first
        when_busy: at the backlog's bound: wait for room, or raise PoolBusy
        when_replaced: when the pool serves another model: raise PoolMismatch, or ask the new one
        engine_opts: options for the engine, as JSON
        revision: the model's revision on the hub
        dtype: what the model computes in
        batch_size: most prompts in a batch
        timeout: seconds a batch waits to fill, from its first job; it leaves at once where those
            before it waited in vain
        max_batch_tokens: most prompt tokens in a batch, a common beginning counted once; at least
            the longest prompt
        max_prompt_tokens: longest prompt served; at most what the model takes
        shards: parts that the pool's keys are spread over; by default one, on a Redis Cluster two
            for each primary; `lmpool shards` changes it while the pool is served
        lanes: lanes of each shard, in which prompts with a common prefix meet; each has a home
            among the workers; 1 is none, and any worker runs any prompt; by default 64, and at most
            1,024 in all shards; `lmpool shards --lanes` changes it
        block_tokens: tokens of a block; a lane follows from blocks
        blocks: most blocks of a prompt that its lane follows from
        max_backlog: jobs that may wait in a shard, of each priority
        client_backlog: jobs of one client and priority that may wait: the others wait at the
            client
        result_ttl: seconds a row stays in the result cache
        result_bytes: most memory for results, e.g. 4GiB; the oldest go first. By default what the
            server's maxmemory leaves
        near_bytes: memory in which clients of the same machine and user read large rows,
            e.g. 64MiB; 0 is none
        max_deliveries: times a prompt is tried whose workers die of it
        engine_timeout: seconds one step of the engine may take before it counts as hung
        adapter_dirs: folders that adapters may be loaded from, as a JSON list
        replace: take the pool over from workers that serve another model
        worker_name: what the worker is called in logs and statistics
        drain_timeout: seconds a worker that is told to stop may finish its batch in
        metrics_port: where /metrics, /health and /ready are; of several workers on a machine the
            next ones take the ports above
        metrics_host: where they listen; 0.0.0.0: everywhere
        profile: a folder, in which each worker leaves a sampling profile of its life (py-spy)
        log_level: how much a worker says
        log_format: lines that a person can read, or JSON, an object a line

    Raises:
        SettingsError: for what cannot be used, also where a worker finds out (a model that is not
            there), and for an unknown ``LMPOOL_*`` variable.
        PoolError: with the last lines of a worker that died.
        PoolTimeout: after `start_timeout`.
    """
    _check(workers, start_timeout, verbose)
    for_client, for_workers = _split(settings)
    for_client |= {"pool": pool, "framework": framework}
    for_workers |= {"pool": pool, "model": _model(model), "engine": engine}
    # Nonsense is refused before anything is started.
    for_workers["drain_timeout"] = WorkerOptions(**for_workers).drain_timeout
    for_client["pool"] = name = ClientOptions(**for_client).pool
    where = _where(workers, gpus)
    private = PrivatePool(name, where.split(), for_workers)
    try:
        if verbose or "log_level" in settings:
            private.copy_log_to_stderr()
        count = workers if gpus is None else where.count(",") + 1
        private.wait_until_alive(count, start_timeout)
        for_client["url"] = for_client["control_url"] = private.url
        return EmbeddedLM(ClientOptions(**for_client), private)
    except BaseException:
        private.stop()
        raise


def _check(workers: object, start_timeout: object, verbose: object) -> None:
    refuse_unknown_variables()
    if type(workers) is not int or not 1 <= workers <= WORKERS_MOST:
        raise SettingsError(f"workers={quoted(workers)}: write a number from 1 to {WORKERS_MOST}")
    seconds = as_number(start_timeout)
    if seconds is None or not seconds > 0:
        raise SettingsError(
            f"start_timeout={quoted(start_timeout)}: write a positive number of seconds"
        )
    if type(verbose) is not bool:
        raise SettingsError(f"verbose={quoted(verbose)}: write True or False")


def _model(model: object) -> str:
    try:
        name = os.fspath(model)  # type: ignore[call-overload]
    except Exception:  # no path, or one that cannot tell
        name = None
    if not is_text(name) or not name or "\0" in name:
        raise SettingsError(f"model={quoted(model)}: write tiny, a folder, or a hub id")
    return name


def _split(settings: Mapping[str, object]) -> tuple[AllClientArguments, AllWorkerArguments]:
    """What goes to the client, and what to the workers."""
    client, worker = set(ClientOptions.model_fields), set(WorkerOptions.model_fields)
    for name in settings:
        if name not in client | worker or name in URLS:
            raise SettingsError(_unknown(name, client | worker))
    for_client = {name: value for name, value in settings.items() if name in client}
    for_workers = {name: value for name, value in settings.items() if name in worker}
    if "LMPOOL_DRAIN_TIMEOUT" not in os.environ:
        for_workers.setdefault("drain_timeout", DRAIN_TIMEOUT)
    return cast(AllClientArguments, for_client), cast(AllWorkerArguments, for_workers)


def _unknown(name: str, settings: set[str]) -> str:
    if name in URLS:
        own = "an embedded pool has a server of its own; write lmpool.connect(url) for yours"
        return f"{name}: {own}"
    known = settings - {*URLS} | {"workers", "gpus", "start_timeout", "verbose"}
    return unknown_name(name, known, "argument")


def _gpu(gpu: object) -> str:
    """A GPU's number or name, or '' for what is none."""
    number = as_integer(gpu)
    is_number = number is not None and 0 <= number < 10_000
    name = gpu.strip() if isinstance(gpu, str) else str(number) if is_number else ""
    return name if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_./:+-]*", name) and name != "all" else ""


def _where(workers: int, gpus: Sequence[int | str] | str | None) -> str:
    """The arguments of ``lmpool worker`` that say how many there are, and where."""
    if gpus is None:
        return f"--workers {workers}"
    given = gpus.split(",") if isinstance(gpus, str) else gpus
    is_some = isinstance(given, (list, tuple, range))
    names = [_gpu(gpu) for gpu in given[: WORKERS_MOST + 1]] if is_some else []
    if not 0 < len(names) <= WORKERS_MOST or "" in names:
        raise SettingsError(f"gpus={quoted(gpus)}: write the GPUs' numbers, such as [0, 1]")
    if workers not in (1, len(names)):
        raise SettingsError(f"workers={workers} and {len(names)} gpus: leave workers= out")
    return f"--gpus {','.join(names)}"
