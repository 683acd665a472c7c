"""Settings of clients, workers and gateways: arguments, ``LMPOOL_*`` variables, or a file.

A value that cannot be used is refused when it is read, with a message that names it and says what
to write instead. Passwords stay out of messages and reprs.
"""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self, Unpack

from pydantic import AfterValidator, ByteSize, FailFast, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from lmpool.affinity import BLOCK_TOKENS, BLOCKS
from lmpool.arguments import (
    AllClientArguments,
    AllWorkerArguments,
    FrameworkName,
    RowEncoding,
)
from lmpool.checks import is_text, quoted, said
from lmpool.config_file import VARIABLE as CONFIG
from lmpool.config_file import ConfigFile, read_config
from lmpool.errors import SettingsError
from lmpool.keys import Priority, check_pool_name
from lmpool.logs import LogFormat, LogLevel
from lmpool.masking import mask_secrets, mask_text
from lmpool.model_info import MAX_LANES, MAX_SHARDS
from lmpool.server_url import check_url, mask_url

__all__ = [
    "ClientOptions",
    "GatewaySettings",
    "Priority",
    "WorkerOptions",
    "pool_addresses",
    "refuse_unknown_variables",
    "settings_of",
    "variable_of",
]

PREFIX: Final = "LMPOOL_"
GATEWAY_PREFIX: Final = "LMPOOL_GATEWAY_"
URLS: Final = ("url", "control_url")
"""Settings that may hold a password."""


def _check_control_url(url: str) -> str:
    try:
        return check_url(url)
    except SettingsError as error:
        raise SettingsError(f"control_{error}") from None


Url = Annotated[str, AfterValidator(check_url), Field(repr=False)]
ControlUrl = Annotated[str, AfterValidator(_check_control_url)]
Pool = Annotated[str, AfterValidator(check_pool_name)]
Seconds = Annotated[float, Field(gt=0, le=86_400 * 30, allow_inf_nan=False)]


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        env_ignore_empty=True,
        arbitrary_types_allowed=False,
        protected_namespaces=(),
    )

    never_empty: ClassVar[tuple[str, ...]] = ()
    """Settings that keep others out: without a word an empty variable would let them in."""

    def __init__(self, **given: Any) -> None:
        unknown = [name for name in given if name not in type(self).model_fields]
        if unknown:
            raise SettingsError(unknown_name(unknown[0], type(self).model_fields, "argument"))
        given = {name: value for name, value in given.items() if value is not None}
        _refuse_empty(type(self), given)
        for name, value in given.items():
            _refuse_misfits(name, value, type(self).model_fields[name])
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise SettingsError(_explain(error, type(self), given)) from None
        except SettingsError:
            raise
        except Exception as error:
            # pydantic-settings: a variable that should be JSON and is not.
            if type(error).__name__ != "SettingsError":
                raise SettingsError(f"settings that cannot be read ({said(error)})") from error
            raise SettingsError(_not_json(str(error), type(self).model_fields)) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, variables, and the file, of which the first one that says something counts."""
        return init_settings, env_settings, _FileSource(settings_cls)


class _FileSource(PydanticBaseSettingsSource):
    """What the file says of a class of settings."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Not asked: all come at once."""
        raise NotImplementedError

    def __call__(self) -> dict[str, Any]:
        """Those that nothing else has said: pydantic-settings would merge a dict with a dict."""
        file = read_config()
        found = {} if file is None else settings_of(file, self.settings_cls)
        return {name: value for name, value in found.items() if name not in self.current_state}


class _Options(_Settings):
    url: Url = Field("redis://localhost:6379/0", description="the Redis-compatible server")
    pool: Pool = Field("default", description="the pool's name")
    control_url: ControlUrl | None = Field(
        None,
        repr=False,
        description="the server of control jobs (adapters, prefixes), where not the pool's own; "
        "workers and clients need the same",
    )

    @property
    def control(self) -> str:
        """The URL of the server that control jobs go through."""
        return self.control_url or self.url

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in type(self).model_fields}
        for name in URLS:
            shown[name] = shown[name] and mask_url(shown[name])
        if "engine_opts" in shown:
            shown["engine_opts"] = mask_secrets(shown["engine_opts"])
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    __str__ = __repr__


class ClientOptions(_Options):
    """What a `PooledLM` can be told."""

    if TYPE_CHECKING:

        def __init__(self, **given: Unpack[AllClientArguments]) -> None: ...

    cache_bytes: ByteSize = Field(
        ByteSize(256 << 20), description="bound of the local cache of rows, e.g. 512MiB; 0 for none"
    )
    encoding: RowEncoding = Field(
        "auto", description="how rows travel; auto is the smallest lossless one, f16 is lossy"
    )
    framework: FrameworkName = Field(
        "auto", description="what rows are: torch tensors where torch is installed, else numpy"
    )
    request_timeout: Seconds | None = Field(
        None, description="seconds a call may wait when it names no timeout of its own"
    )
    workers_timeout: Seconds = Field(
        10.0,
        description="seconds to wait, while no worker is alive, before NoWorkers or UnknownPool",
    )
    reconnect_timeout: Seconds = Field(
        60.0, description="seconds to keep trying to reach a lost server before giving up"
    )
    priority: Priority = Field(
        "interactive", description="of calls that name none; batch lets interactive jobs go first"
    )
    when_busy: Literal["wait", "raise"] = Field(
        "wait", description="at the backlog's bound: wait for room, or raise PoolBusy"
    )
    when_replaced: Literal["raise", "follow"] = Field(
        "raise",
        description="when the pool serves another model: raise PoolMismatch, or ask the new one",
    )


class WorkerOptions(_Options):
    """What a worker can be told."""

    if TYPE_CHECKING:

        def __init__(self, **given: Unpack[AllWorkerArguments]) -> None: ...

    model: str = Field("tiny", min_length=1, description="tiny, a folder, or a hub id")
    engine: str = Field(
        "auto", min_length=1, description="auto, hf, vllm, sglang, mlx, mock, or an added one"
    )
    engine_opts: dict[str, Any] = Field(
        default_factory=dict, description="options for the engine, as JSON"
    )
    revision: str | None = Field(None, description="the model's revision on the hub")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="what the model computes in"
    )
    batch_size: int = Field(64, ge=1, le=65_536, description="most prompts in a batch")
    timeout: float = Field(
        0.0005,
        ge=0,
        le=60,
        allow_inf_nan=False,
        description="seconds a batch waits to fill, from its first job; it leaves at once where "
        "those before it waited in vain",
    )
    max_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="most prompt tokens in a batch, a common beginning counted once; at least the "
        "longest prompt",
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="longest prompt served; at most what the model takes"
    )
    shards: int | None = Field(
        None,
        ge=1,
        le=MAX_SHARDS,
        description="parts that the pool's keys are spread over; by default one, on a Redis "
        "Cluster two for each primary; `lmpool shards` changes it while the pool is served",
    )
    lanes: int | None = Field(
        None,
        ge=1,
        le=MAX_LANES,
        description="lanes of each shard, in which prompts with a common prefix meet; each has a "
        "home among the workers; 1 is none, and any worker runs any prompt; by default 64, and at "
        "most 1,024 in all shards; `lmpool shards --lanes` changes it",
    )
    block_tokens: int = Field(
        BLOCK_TOKENS, ge=1, le=65_536, description="tokens of a block; a lane follows from blocks"
    )
    blocks: int = Field(
        BLOCKS, ge=1, le=65_536, description="most blocks of a prompt that its lane follows from"
    )
    max_backlog: int = Field(
        100_000, ge=1, description="jobs that may wait in a shard, of each priority"
    )
    client_backlog: int = Field(
        4096,
        ge=1,
        description="jobs of one client and priority that may wait: the others wait at the client",
    )
    result_ttl: Seconds = Field(600.0, description="seconds a row stays in the result cache")
    result_bytes: ByteSize | None = Field(
        None,
        ge=1,
        description="most memory for results, e.g. 4GiB; the oldest go first. By default what the "
        "server's maxmemory leaves",
    )
    near_bytes: ByteSize = Field(
        ByteSize(32 << 20),
        ge=0,
        le=16 << 30,
        description="memory in which clients of the same machine and user read large rows, e.g. "
        "64MiB; 0 is none",
    )
    max_deliveries: int = Field(
        3, ge=1, le=100, description="times a prompt is tried whose workers die of it"
    )
    engine_timeout: Seconds = Field(
        300.0, description="seconds one step of the engine may take before it counts as hung"
    )
    # The first that is wrong is enough: of iterables without end there would be errors without end.
    adapter_dirs: Annotated[tuple[str, ...], FailFast()] = Field(
        (), max_length=1024, description="folders that adapters may be loaded from, as a JSON list"
    )
    replace: bool = Field(
        False, description="take the pool over from workers that serve another model"
    )
    worker_name: str = Field(
        default_factory=lambda: socket.gethostname().split(".")[0] or "worker",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$",
        description="what the worker is called in logs and statistics",
    )
    drain_timeout: Seconds = Field(
        60.0, description="seconds a worker that is told to stop may finish its batch in"
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65_535,
        description="where /metrics, /health and /ready are; of several workers on a machine the "
        "next ones take the ports above",
    )
    metrics_host: str = Field(
        "127.0.0.1", min_length=1, description="where they listen; 0.0.0.0: everywhere"
    )
    profile: str | None = Field(
        None,
        min_length=1,
        description="a folder, in which each worker leaves a sampling profile of its life (py-spy)",
    )
    log_level: LogLevel = Field("info", description="how much a worker says")
    log_format: LogFormat = Field(
        "text", description="lines that a person can read, or JSON, an object a line"
    )

    default_max_batch_tokens: ClassVar[int] = 16_384

    @model_validator(mode="after")
    def _budget_holds_a_prompt(self) -> Self:
        budget, longest = self.max_batch_tokens, self.max_prompt_tokens
        if budget is not None and longest is not None and budget < longest:
            raise ValueError(
                f"max_batch_tokens={budget} is below max_prompt_tokens={longest}: "
                f"raise it to {longest} or serve shorter prompts"
            )
        return self


def pool_addresses(texts: Sequence[str]) -> list[tuple[str, str | None]]:
    """Pools that are written as ``NAME`` or ``NAME=URL``, and the URL of each that has one.

    Raises `SettingsError` for what is no name or no URL, and for a name that is there twice.
    """
    found: dict[str, str | None] = {}
    for text in texts:
        name, equals, url = text.partition("=")
        check_pool_name(name)
        if name in found:
            raise SettingsError(f"pool={name!r} is there more than once: a name is one pool's")
        try:
            found[name] = check_url(url) if equals else None
        except SettingsError as error:
            raise SettingsError(f"pool={name!r}: {error}") from None
    return list(found.items())


def _check_pools(text: str) -> str:
    pool_addresses(text.split())
    return text


class GatewaySettings(_Settings):
    """What ``lmpool gateway`` can be told, but for the server that it asks."""

    model_config = SettingsConfigDict(env_prefix=GATEWAY_PREFIX)
    never_empty: ClassVar[tuple[str, ...]] = ("api_keys",)

    if TYPE_CHECKING:

        def __init__(self, **given: Any) -> None: ...

    pool: Annotated[str, AfterValidator(_check_pools)] | None = Field(
        None,
        repr=False,
        description="pools, with blanks between: NAME, or NAME=URL where it has a server of its "
        "own; by default the one of LMPOOL_POOL",
    )
    host: str = Field("127.0.0.1", min_length=1, description="where to listen; 0.0.0.0: everywhere")
    port: int = Field(8000, ge=0, le=65_535, description="0 takes any that is free")
    api_keys: Path | None = Field(
        None, description="a file of the keys that may ask, a line each as gateway-key writes it"
    )
    chat_template: Path | None = Field(
        None, description="a file with a chat template, in place of the model's own"
    )
    queue_timeout: Seconds = Field(240.0, description="seconds to wait for room or workers")
    timeout: Seconds = Field(600.0, description="seconds a request may take")
    body_timeout: Seconds = Field(
        30.0, description="seconds the head of a request, and then its body, may take to come"
    )
    max_body: ByteSize = Field(ByteSize(16 << 20), ge=1, description="most bytes of a request")
    max_response: ByteSize = Field(ByteSize(512 << 20), ge=1, description="most bytes of an answer")
    max_prompts: int = Field(2048, ge=1, description="most prompts of a request, times n")
    max_n: int = Field(128, ge=1, description="most choices of a prompt")
    max_logprobs: int = Field(100, ge=0, description="most of the likeliest tokens at a position")
    max_in_flight: int = Field(2048, ge=1, description="most prompts that are asked at once")
    key_requests: int | None = Field(
        None, ge=1, description="most requests of a key at once, if its line says nothing else"
    )
    compress: Literal["auto", "always", "never"] = Field(
        "auto",
        description="whether an answer is compressed that may be; auto leaves out callers on "
        "this machine",
    )
    log_level: LogLevel = Field("info", description="how much a gateway says")
    log_format: LogFormat = Field(
        "text", description="lines that a person can read, or JSON, an object a line"
    )


def _refuse_empty(options: type[_Settings], given: Iterable[str]) -> None:
    """Refuse empty variables of settings that are not to be empty. Raises `SettingsError`."""
    for name in options.never_empty:
        variable, field = variable_of(options, name), options.model_fields[name]
        empty = any(each.upper() == variable and not its for each, its in os.environ.items())
        if empty and name not in given:
            raise SettingsError(
                f"{variable}='': empty, as where what it should have is missing; write "
                f"{field.description}, or unset it to have none"
            )


def _refuse_misfits(name: str, value: object, field: FieldInfo) -> None:
    """What pydantic takes, and nobody means or no process can be told. Raises `SettingsError`."""
    if isinstance(value, bool) and field.annotation is not bool:
        raise SettingsError(
            f"{name}={value}: True and False are none of its values ({field.description})"
        )
    for text in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(text, str) and not (is_text(text) and "\0" not in text):
            raise SettingsError(
                f"{name}={quoted(mask_url(text))}: write text in Unicode, without lone surrogates "
                f"and null characters ({field.description})"
            )


def settings_of(file: ConfigFile, options: type[BaseSettings]) -> dict[str, Any]:
    """What a file says of a class of settings. Raises `SettingsError`.

    All names of the file are checked: one that nothing reads is mostly a typo.
    """
    found: dict[str, Any] = {}
    for table, classes in (("", (ClientOptions, WorkerOptions)), ("gateway", (GatewaySettings,))):
        known = {name: field for each in classes for name, field in each.model_fields.items()}
        for name, value in file.table(table).items():
            if name not in known:
                raise SettingsError(f"{file.path}: {unknown_name(name, known, 'setting')}")
            try:
                _refuse_misfits(name, value, known[name])
            except SettingsError as error:
                raise SettingsError(f"{file.path}: {error}") from None
            if options in classes and name in options.model_fields:
                found[name] = value
    return found


def refuse_unknown_variables(environ: Iterable[str] | None = None) -> None:
    """Check the names of variables, those of this process if `environ` is left out.

    Raises `SettingsError` for a ``LMPOOL_*`` variable that nothing reads: mostly a typo.
    """
    known = [
        variable_of(options, field)
        for options in (ClientOptions, WorkerOptions, GatewaySettings)
        for field in options.model_fields
    ]
    known.append(CONFIG)
    for name in os.environ if environ is None else environ:
        rest = name.removeprefix(PREFIX)
        # LMPOOL_TEST_* and the like belong to the project's own tools.
        if rest == name or rest.startswith(("TEST_", "REQUIRE_", "BENCH_")):
            continue
        if name.upper() not in known:
            raise SettingsError(unknown_name(name, dict.fromkeys(known), "variable"))


def variable_of(options: type[BaseSettings], field: str) -> str:
    """The variable of a setting."""
    return options.model_config.get("env_prefix", PREFIX) + field.upper()


def unknown_name(name: str, known: Iterable[str], what: str) -> str:
    """What to say of a name that is none of the `known` ones; `what` it is, as users call it."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, 1, 0.75)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
    return f"unknown {what} {name}: {hint}"


def _not_json(message: str, names: Iterable[str]) -> str:
    """What is wrong with a variable that should be JSON, from pydantic-settings' message."""
    field = next((name for name in names if f'"{name}"' in message), "engine_opts")
    example = '["/srv/adapters"]' if field == "adapter_dirs" else '{"device": "cpu"}'
    variable = PREFIX + field.upper()
    value = mask_text(os.environ.get(variable, ""))
    return f"{variable}={value!r:.200} is not JSON: write for example {variable}='{example}'"


def _shown(field: str, value: Any) -> str:
    """A value that is refused, without what is secret in it."""
    if field in URLS and isinstance(value, str):
        return mask_url(value)
    if field == "engine_opts":
        value = mask_text(value) if isinstance(value, str) else mask_secrets(value)
    return quoted(value, 200)


def _explain(error: ValidationError, options: type[BaseSettings], given: dict[str, Any]) -> str:
    """pydantic's findings, each with the name as the user wrote it, the value and the remedy."""
    lines, file = [], read_config()
    in_file = {} if file is None else settings_of(file, options)
    for found in error.errors(include_url=False, include_input=False):
        field = str(found["loc"][0]) if found["loc"] else ""
        variable = variable_of(options, field)
        cause = found.get("ctx", {}).get("error")
        if isinstance(cause, SettingsError):
            text = str(cause)
            if field not in given and os.environ.get(variable):
                text = text.replace(field, variable, 1)
            elif field not in given and file is not None and field in in_file:
                text = f"{file.path}: {text}"
            lines.append(text)
            continue
        if not field:
            lines.append(str(cause) if cause else found["msg"])
            continue
        name, value = field, given.get(field)
        if field not in given:
            name, value = variable, os.environ.get(variable)
            if not value and file is not None and field in in_file:
                name, value = f"{file.path}: {field}", in_file[field]
        text = _shown(field, value)
        what = f"{found['msg'][0].lower()}{found['msg'][1:]}"
        if found["type"].startswith("byte_size"):
            what = "a number of bytes expected, such as 512MiB"
        lines.append(f"{name}={text:.200}: {what} ({options.model_fields[field].description})")
    return "; ".join(lines)
