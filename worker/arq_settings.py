"""What arq runs: the worker's life, its signals, and its control functions.

``arq lmpool.worker.WorkerSettings`` starts one worker, told by ``LMPOOL_*`` variables. Prompts do
not travel as arq jobs; see `lmpool.worker.service`.
"""

from __future__ import annotations

import asyncio
import logging
import logging.config
import os
import re
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgpack
from arq.connections import ArqRedis, RedisSettings
from redis.asyncio.client import Pipeline
from redis.connection import SSLConnection, parse_url
from redis.exceptions import RedisError

from lmpool.address import Sentinels, async_connection_pool, is_sentinel
from lmpool.errors import LmpoolError, SettingsError
from lmpool.garbage import keep_what_is_there
from lmpool.logs import logging_config
from lmpool.server import greet
from lmpool.servers import Servers
from lmpool.settings import WorkerOptions, refuse_unknown_variables
from lmpool.tracing import set_up
from lmpool.worker.control import FUNCTIONS, LONGEST
from lmpool.worker.patience import patiently
from lmpool.worker.service import Service, place_name

if TYPE_CHECKING:
    from lmpool.monitoring.server import MonitoringServer

logger = logging.getLogger(__name__)

ARQ_TIMEOUT: Final = 5.0
"""Seconds after which arq's connection gives a command up."""
EXIT_REFUSED: Final = 78
"""Exit status when starting again cannot help: settings, another model in the pool."""
EXIT_BROKEN: Final = 70
"""Exit status after a failure that a fresh start may mend."""


_TLS: Final = frozenset(
    {"ssl_keyfile", "ssl_certfile", "ssl_cert_reqs", "ssl_ca_certs", "ssl_check_hostname"}
)


def redis_settings(url: str) -> RedisSettings:
    """The server at `url` as arq takes it (its own reader leaves %-escapes in passwords)."""
    if is_sentinel(url):
        known = Sentinels.parse(url)
        return RedisSettings(
            host=list(known.hosts),
            sentinel=True,
            sentinel_master=known.service,
            database=known.options.get("db", 0),
            username=known.options.get("username"),
            password=known.options.get("password"),
            ssl=known.tls,
        )
    found = parse_url(url)
    return RedisSettings(
        host=found.get("host", "localhost"),
        port=found.get("port", 6379),
        unix_socket_path=found.get("path"),
        database=found.get("db", 0),
        username=found.get("username"),
        password=found.get("password"),
        ssl=found.get("connection_class") is SSLConnection,
        **{name: value for name, value in found.items() if name in _TLS},
    )


class _ServerReport(Pipeline):
    """What arq logs of the server before it calls `startup`, which waits where there is none."""

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        try:
            return await super().execute(raise_on_error)
        except (RedisError, OSError) as error:
            logger.debug("arq's look at the server failed: %s", error)
            return [{}, {}, {}, "?"]


class PatientRedis(ArqRedis):
    """arq's connection, which a server that restarts, hangs or is full must not end.

    The streams outlive that, and so must the process that reads them: what arq asks again and again
    is answered as if there were nothing.
    """

    _NOTHING: ClassVar[dict[str, Any]] = {
        "ZRANGEBYSCORE": [],
        "ZCARD": 0,
        "PSETEX": None,
        "DEL": 0,
    }

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """As redis-py's; arq's only one that is no transaction is its report of the server."""
        if transaction:
            return super().pipeline(transaction, shard_hint)
        pool: Any = self.connection_pool
        return _ServerReport(pool, self.response_callbacks, transaction, shard_hint)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """As redis-py's, less those failures."""
        try:
            answer = await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            if args[0] not in self._NOTHING:
                raise
            logger.debug("arq's %s failed: %s", args[0], error)
            answer = self._NOTHING[args[0]]
        if args[0] == "ZRANGEBYSCORE":
            answer = [job for job in answer if _is_job_id(job)] if type(answer) is list else []
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # redis-py waits with asyncio.wait_for, and that of Python 3.11 loses a cancellation
            # that comes together with the answer: a worker would not hear of its SIGTERM.
            raise asyncio.CancelledError
        return answer


def _is_job_id(found: object) -> bool:
    """Whether it is what arq calls a job: all else is not from a client of ours."""
    return isinstance(found, bytes) and re.fullmatch(rb"[0-9a-f]{32}", found) is not None


def _new_redis(url: str, queue: str) -> PatientRedis:
    pool = async_connection_pool(
        url, protocol=2, socket_connect_timeout=ARQ_TIMEOUT, socket_timeout=ARQ_TIMEOUT
    )
    return PatientRedis(pool, msgpack.packb, msgpack.unpackb, default_queue_name=queue)


def _log(options: WorkerOptions) -> None:
    level, form = options.log_level, options.log_format
    who = {"pool": options.pool, "worker": options.worker_name}
    logging.config.dictConfig(logging_config(level, form, **who))


async def startup(ctx: dict[str, Any]) -> None:
    """Load the engine and join the pool."""
    options: WorkerOptions = ctx["options"]
    _log(options)
    service = ctx["service"]
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def start() -> None:
        failure: BaseException | None = None
        try:
            service.start()
            keep_what_is_there()
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(_settle, done, failure)
        except RuntimeError:
            pass  # told to stop meanwhile: the loop is closed

    try:
        _be_seen()
        ctx["end_traces"] = set_up("lmpool-worker", service.consumer)
        # Not an executor: a thread of its own does not keep the process when it is told to stop.
        threading.Thread(target=start, name="lmpool-start", daemon=True).start()
        await done
    except LmpoolError as error:
        logger.error("%s", error)
        refused = isinstance(error, SettingsError) or type(error).__name__ == "PoolMismatch"
        raise SystemExit(EXIT_REFUSED if refused else EXIT_BROKEN) from None


def _settle(done: asyncio.Future[None], failure: BaseException | None) -> None:
    if done.done():
        return
    if failure is None:
        done.set_result(None)
    else:
        done.set_exception(failure)


async def shutdown(ctx: dict[str, Any]) -> None:
    """Drain and leave the pool."""
    service: Service = ctx["service"]
    await asyncio.to_thread(service.stop)
    await asyncio.to_thread(ctx.get("end_traces", int))
    if service.status.failure is not None:
        raise SystemExit(EXIT_BROKEN)


def wait_for_server() -> None:
    """Return once the server answers. For before arq connects: its failure is a traceback.

    Raises what `patiently` does.
    """
    _log(_options)  # arq does only later
    _new_service.start_progress.enter("server")
    servers = Servers.of_url(_options.url, name="lmpool-worker")

    def pause(seconds: float) -> None:
        _be_seen()  # not before: `arq --check` comes here, too
        time.sleep(seconds)

    try:
        patiently(lambda: greet(servers.anywhere, _options.url), pause)
    finally:
        servers.close()


_monitoring: MonitoringServer | None = None


def _be_seen() -> None:
    """Offer ``/metrics``, ``/health`` and ``/ready``, where there is a port for them. Once."""
    global _monitoring
    if _monitoring is None and _options.metrics_port is not None:
        try:
            # With its packages, which only this needs.
            from lmpool.worker.monitoring import monitoring
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"metrics_port={_options.metrics_port} needs {error.name}, which is not "
                "installed: pip install 'lmpool[metrics]'"
            ) from None
        _monitoring = monitoring(_new_service)
        _monitoring.start()


def _end() -> None:
    """End this process in order, from whichever thread found that it must."""
    os.kill(os.getpid(), signal.SIGTERM)


refuse_unknown_variables()
_options = WorkerOptions()
_new_service = Service(_options, _end)


class WorkerSettings:
    """For ``arq lmpool.worker.WorkerSettings``."""

    functions: ClassVar = FUNCTIONS
    queue_name: ClassVar = _new_service.keys.control_queue(_new_service.consumer)
    health_check_key: ClassVar = _new_service.keys.health(place_name(_options))
    redis_settings: ClassVar = redis_settings(_options.url)
    redis_pool: ClassVar = _new_redis(_options.url, queue_name)
    on_startup: ClassVar = startup
    on_shutdown: ClassVar = shutdown
    job_serializer: ClassVar = msgpack.packb
    job_deserializer: ClassVar = msgpack.unpackb
    ctx: ClassVar = {"options": _options, "service": _new_service}
    max_tries: ClassVar = 1
    keep_result: ClassVar = 60
    job_timeout: ClassVar = LONGEST
    health_check_interval: ClassVar = 30
    poll_delay: ClassVar = 0.2
    # One that is cancelled while arq notes its end would end this process in the middle of leaving.
    job_completion_wait: ClassVar = 1
    log_results: ClassVar = False
