"""Settings as keyword arguments, for editors and type checkers: what each may be given as.

`lmpool.settings` has the defaults, the bounds and what each is. None is as if it were left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, ParamSpec, TypeAlias, TypedDict, TypeVar, get_type_hints

from lmpool.keys import Priority
from lmpool.logs import LogFormat, LogLevel

P = ParamSpec("P")
T = TypeVar("T")

FrameworkName: TypeAlias = Literal["auto", "torch", "numpy"]
RowEncoding: TypeAlias = Literal["auto", "f32", "bf16", "f16"]


class ClientArguments(TypedDict, total=False):
    """A client's, but for where the pool is and what rows are."""

    cache_bytes: int | str | None
    encoding: RowEncoding | None
    request_timeout: float | None
    workers_timeout: float | None
    reconnect_timeout: float | None
    priority: Priority | None
    when_busy: Literal["wait", "raise"] | None
    when_replaced: Literal["raise", "follow"] | None


class WorkerArguments(TypedDict, total=False):
    """A worker's, but for where the pool is and what it serves."""

    engine_opts: Mapping[str, object] | None
    revision: str | None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None
    batch_size: int | None
    timeout: float | None
    max_batch_tokens: int | None
    max_prompt_tokens: int | None
    shards: int | None
    lanes: int | None
    block_tokens: int | None
    blocks: int | None
    max_backlog: int | None
    client_backlog: int | None
    result_ttl: float | None
    result_bytes: int | str | None
    near_bytes: int | str | None
    max_deliveries: int | None
    engine_timeout: float | None
    adapter_dirs: Sequence[str] | None
    replace: bool | None
    worker_name: str | None
    drain_timeout: float | None
    metrics_port: int | None
    metrics_host: str | None
    profile: str | None
    log_level: LogLevel | None
    log_format: LogFormat | None


class EmbeddedArguments(ClientArguments, WorkerArguments, total=False):
    """Those of a private pool, for its client and its workers alike."""


class _Pool(TypedDict, total=False):
    url: str | None
    pool: str | None
    control_url: str | None


class AllClientArguments(_Pool, ClientArguments, total=False):
    """Every setting of a client."""

    framework: FrameworkName | None


class AllWorkerArguments(_Pool, WorkerArguments, total=False):
    """Every setting of a worker."""

    model: str | None
    engine: str | None


def spelled_out(arguments: type) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Name every key of a TypedDict in the signature of a function that takes ``**`` of it.

    Type checkers see them; this is for `help`, notebooks and documentation.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        *parameters, _ = signature.parameters.values()
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in get_type_hints(arguments).items()
        ]
        setattr(function, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
        return function

    return decorate
