"""What arq runs: the worker's life, its signals, and its control functions.

``arq lmpool.worker.WorkerSettings`` starts one worker, told by ``LMPOOL_*`` variables. Prompts do
not travel as arq jobs; see `lmpool.worker.service`.
"""

from __future__ import annotations

import asyncio
import logging
import logging.config
import os
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import arq.worker
import msgpack

from lmpool.checks import said
from lmpool.control_connections import control_pool
from lmpool.errors import LmpoolError, PoolMismatch, ServerRefused, ServerTooOld, SettingsError
from lmpool.exit_status import EXIT_REFUSED
from lmpool.garbage import keep_what_is_there
from lmpool.logs import logging_config
from lmpool.permissions import control_commands
from lmpool.profiling import profile
from lmpool.server import explained, greet
from lmpool.servers import Servers
from lmpool.settings import WorkerOptions, refuse_unknown_variables
from lmpool.tracing import set_up
from lmpool.worker.control import FUNCTIONS, LONGEST
from lmpool.worker.control_redis import HEALTH_EVERY, CheckingRedis, ControlWorker, PatientRedis
from lmpool.worker.patience import patiently
from lmpool.worker.service import Service, place_name, warn_of_rights
from lmpool.worker.signals import hear_no_more

if TYPE_CHECKING:
    from lmpool.monitoring.server import MonitoringServer

logger = logging.getLogger(__name__)

EXIT_BROKEN: Final = 70
"""Exit status after a failure that a fresh start may mend."""
REFUSALS: Final = (PoolMismatch, ServerRefused, ServerTooOld, SettingsError)
"""Errors that a fresh start does not mend."""


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
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        loop.add_signal_handler(signal.SIGHUP, _end)  # arq hears of the others
    done: asyncio.Future[None] = loop.create_future()

    def start() -> None:
        failure: BaseException | None = None
        try:
            if options.control_url is not None:
                _greet_control(service, options.control_url)
            service.start()
            keep_what_is_there()
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(_settle, done, failure)
        except RuntimeError:
            pass  # told to stop meanwhile: the loop is closed

    try:
        if options.profile is not None:
            begin = partial(profile, options.profile, options.worker_name)
            ctx["end_profile"] = await asyncio.to_thread(begin)
        _be_seen()
        ctx["end_traces"] = set_up("lmpool-worker", service.consumer)
        # Not an executor: a thread of its own does not keep the process when it is told to stop.
        threading.Thread(target=start, name="lmpool-start", daemon=True).start()
        await done
    except LmpoolError as error:
        logger.error("%s", error)
        raise SystemExit(EXIT_REFUSED if isinstance(error, REFUSALS) else EXIT_BROKEN) from None


def _greet_control(service: Service, url: str) -> None:
    """Wait for the server of control jobs: later the worker does without, but not if it never was
    there. Raises what `patiently` does."""
    servers = Servers.of_url(url, name="lmpool-worker")
    try:
        wait = service.status.stopping.wait
        patiently(lambda: greet(servers.anywhere, url), wait)
        commands, its = control_commands(service.options.pool), "the server of control jobs"
        with explained(url):
            patiently(lambda: warn_of_rights(servers.anywhere, commands, its), wait)
    finally:
        servers.close()


async def _server_to_check(settings: object) -> CheckingRedis:
    """In place of arq's: its own settings of a server know of no cluster, and little of TLS."""
    url = _options.control
    return CheckingRedis(control_pool(url, _keys), url, EXIT_BROKEN)


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
    await asyncio.to_thread(ctx.get("end_profile", int))
    hear_no_more()
    if service.status.failure is not None:
        raise SystemExit(EXIT_BROKEN)


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
_keys = _new_service.keys
# Arq puts exceptions into what it says of jobs.
_pack = partial(msgpack.packb, default=said, unicode_errors="backslashreplace")
# What arq has as names of its own, and no settings for.
setattr(arq.worker, "abort_jobs_ss", _keys.aborted)  # noqa: B010
setattr(arq.worker, "create_pool", _server_to_check)  # noqa: B010
setattr(arq.worker, "Worker", ControlWorker)  # noqa: B010


class WorkerSettings:
    """For ``arq lmpool.worker.WorkerSettings``."""

    functions: ClassVar = FUNCTIONS
    queue_name: ClassVar = _keys.control_queue(_new_service.consumer)
    health_check_key: ClassVar = _keys.health(place_name(_options))
    redis_pool: ClassVar = PatientRedis(
        control_pool(_options.control, _keys),
        job_serializer=_pack,
        job_deserializer=msgpack.unpackb,
        default_queue_name=queue_name,
    )
    on_startup: ClassVar = startup
    on_shutdown: ClassVar = shutdown
    job_serializer: ClassVar = _pack
    job_deserializer: ClassVar = msgpack.unpackb
    ctx: ClassVar = {"options": _options, "service": _new_service}
    keep_result: ClassVar = 60
    job_timeout: ClassVar = LONGEST
    health_check_interval: ClassVar = HEALTH_EVERY
    poll_delay: ClassVar = 0.2
    # For what is about to be answered.
    job_completion_wait: ClassVar = 1
    log_results: ClassVar = False
