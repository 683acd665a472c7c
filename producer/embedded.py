"""`lmpool.embedded`: a server and workers of one's own, for as long as they are needed."""

from __future__ import annotations

import difflib
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lmpool.errors import SettingsError
from lmpool.producer.client import Client
from lmpool.producer.pooled_lm import PooledLM
from lmpool.producer.private_pool import PrivatePool
from lmpool.settings import ClientOptions, WorkerOptions, refuse_unknown_variables

DRAIN_TIMEOUT: Final = 3.0
"""Seconds in which a worker may finish its batch when the pool ends: nobody waits for it then."""


class EmbeddedLM(PooledLM):
    """A `PooledLM` that owns its pool: closing it ends the workers and their server.

    So does losing the last reference to it, and the end of the interpreter or of its process, even
    by SIGKILL. A forked child may use it, and does not own it.
    """

    def __init__(self, options: ClientOptions, private: PrivatePool) -> None:
        super().__init__(options)
        self._private = private
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _end, self._client, private)

    @property
    def folder(self) -> Path:
        """The pool's temporary folder: socket and logs."""
        return self._private.folder

    @property
    def worker_log(self) -> Path:
        """What the workers say; gone with the pool."""
        return self._private.log

    def processes(self) -> dict[str, int]:
        """Process ids of the `guard`, the `server`, and the launcher of the `workers`."""
        return self._private.processes()


def _end(client: Client, private: PrivatePool) -> None:
    try:
        client.close_soon()
    finally:
        private.stop()


def embedded(
    model: str | os.PathLike[str] = "tiny",
    engine: str = "auto",
    workers: int = 1,
    *,
    pool: str | None = None,
    gpus: Sequence[int | str] | str | None = None,
    start_timeout: float = 300.0,
    verbose: bool = False,
    **settings: Any,
) -> EmbeddedLM:
    """Start a private server and `workers` worker processes, and connect to them.

    Blocks until all workers are ready, for `start_timeout` seconds at most; in an event loop, run
    it with `asyncio.to_thread`. Use the answer as a context manager, sync or async, or call its
    `close`. `gpus` are the GPUs' numbers, one worker for each (instead of `workers`); without,
    every worker sees what this process sees. `settings` are those of workers and clients
    (`lmpool.settings`), by name, such as ``batch_size=16`` or ``cache_bytes=0``. The workers log to
    a file, `worker_log`; `verbose` or a `log_level` shows it on stderr as well.

    Raises `SettingsError` for what cannot be used, also where a worker finds out (a model that is
    not there); `PoolError` with the last lines of a worker that died; `PoolTimeout`.
    """
    refuse_unknown_variables()
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise SettingsError(f"workers={workers!r}: write a positive integer")
    if not start_timeout > 0:
        raise SettingsError(f"start_timeout={start_timeout!r}: write a positive number of seconds")
    for_client, for_workers = _split(settings)
    for_workers = {"model": os.fspath(model), "engine": engine, **for_workers}
    if "LMPOOL_DRAIN_TIMEOUT" not in os.environ:
        for_workers.setdefault("drain_timeout", DRAIN_TIMEOUT)
    # Nonsense is refused before anything is started.
    worker_options = WorkerOptions(pool=pool, **for_workers)
    client_options = ClientOptions(pool=pool, **for_client)
    for_workers["drain_timeout"] = worker_options.drain_timeout
    where = _where(workers, gpus)
    private = PrivatePool(client_options.pool, where.split(), for_workers)
    try:
        if verbose or "log_level" in settings:
            private.copy_log_to_stderr()
        count = workers if gpus is None else where.count(",") + 1
        private.wait_until_alive(count, start_timeout)
        return EmbeddedLM(
            ClientOptions(url=private.url, pool=client_options.pool, **for_client), private
        )
    except BaseException:
        private.stop()
        raise


def _split(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What goes to the client, and what to the workers."""
    client, worker = set(ClientOptions.model_fields), set(WorkerOptions.model_fields)
    for name in settings:
        if name == "url":
            raise SettingsError(
                "url: an embedded pool has a server of its own; write lmpool.connect(url) for yours"
            )
        if name not in client | worker:
            others = {"model", "engine", "workers", "gpus", "start_timeout", "verbose"}
            known = sorted(client | worker | others)
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise SettingsError(f"unknown argument {name}: {hint}")
    return (
        {name: value for name, value in settings.items() if name in client},
        {name: value for name, value in settings.items() if name in worker},
    )


def _where(workers: int, gpus: Sequence[int | str] | str | None) -> str:
    """The arguments of ``lmpool worker`` that say how many there are, and where."""
    if gpus is None:
        return f"--workers {workers}"
    names = gpus.split(",") if isinstance(gpus, str) else [str(gpu) for gpu in gpus]
    names = [name.strip() for name in names]
    bad = [name for name in names if not name or name == "all" or " " in name or "," in name]
    if not names or bad:
        raise SettingsError(f"gpus={gpus!r}: write the GPUs' numbers, such as [0, 1]")
    if workers not in (1, len(names)):
        raise SettingsError(f"workers={workers} and {len(names)} gpus: leave workers= out")
    return f"--gpus {','.join(names)}"
