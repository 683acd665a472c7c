"""`lmpool.connect`: a client of a pool."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from lmpool.arguments import ClientArguments, FrameworkName, spelled_out
from lmpool.producer.frameworks import NumpyRows, TorchRows
from lmpool.producer.pooled_lm import PooledLM
from lmpool.settings import ClientOptions, refuse_unknown_variables


@overload
def connect(
    url: str | None = None,
    pool: str | None = None,
    *,
    control_url: str | None = None,
    framework: Literal["numpy"],
    **options: Unpack[ClientArguments],
) -> PooledLM[NumpyRows]: ...
@overload
def connect(
    url: str | None = None,
    pool: str | None = None,
    *,
    control_url: str | None = None,
    framework: Literal["auto", "torch"] | None = None,
    **options: Unpack[ClientArguments],
) -> PooledLM[TorchRows]: ...
@spelled_out(ClientArguments)
def connect(
    url: str | None = None,
    pool: str | None = None,
    *,
    control_url: str | None = None,
    framework: FrameworkName | None = None,
    **options: Unpack[ClientArguments],
) -> PooledLM[NumpyRows | TorchRows]:
    """A client of a pool: `PooledLM`, which connects when it is entered or first asked.

    What is left out, or None, is as its ``LMPOOL_*`` variable says. Bytes are numbers, or text such
    as ``"512MiB"``; times are in seconds.

    Args:
        url: the Redis-compatible server
        pool: the pool's name
        control_url: the server of control jobs (adapters, prefixes), where not the pool's own;
            workers and clients need the same
        framework: what rows are: torch tensors where torch is installed, else numpy
        cache_bytes: bound of the local cache of rows, e.g. 512MiB; 0 for none
        encoding: how rows travel; auto is the smallest lossless one, f16 is lossy
        request_timeout: seconds a call may wait when it names no timeout of its own
        workers_timeout: seconds to wait, while no worker is alive, before NoWorkers or UnknownPool
        reconnect_timeout: seconds to keep trying to reach a lost server before giving up
        priority: of calls that name none; batch lets interactive jobs go first
        when_busy: at the backlog's bound: wait for room, or raise PoolBusy
        when_replaced: when the pool serves another model: raise PoolMismatch, or ask the new one

    Raises:
        SettingsError: for a value that cannot be used, and for an unknown ``LMPOOL_*`` variable.
    """
    refuse_unknown_variables()
    return PooledLM(
        ClientOptions(url=url, pool=pool, control_url=control_url, framework=framework, **options)
    )
