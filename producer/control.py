"""Control jobs: what a client asks of each worker by its own arq queue."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from lmpool.checks import said
from lmpool.errors import AdapterError, LmpoolError, NoWorkers, PoolError, PoolTimeout
from lmpool.producer.blocking import in_thread, result
from lmpool.producer.deadline import Deadline
from lmpool.server import understood
from lmpool.server_url import mask_url, place_of
from lmpool.settings import ClientOptions

if TYPE_CHECKING:
    from lmpool.producer.control_jobs import Alive, ControlJobs

CONTROL_TIMEOUT: Final = 120.0
"""Seconds that a worker may take where nobody says how long: loading an adapter takes long."""

Argument: TypeAlias = str | bytes


def ask_workers(
    options: ClientOptions,
    workers: list[str],
    function: str,
    *arguments: Argument,
    deadline: Deadline,
    listening: Mapping[str, str | None] | None = None,
    alive: Alive | None = None,
) -> dict[str, object]:
    """Run a control function on every worker; returns what each returned, by worker.

    The jobs go through the server of `control_url`, which is that of the pool where it is not set:
    clients need the one that their workers have. `listening` is what workers say of theirs
    (`WorkerStatistics`): that it is another one is told where nobody answers. `alive` reads who
    lives: who dies meanwhile is not waited for.

    Raises `NoWorkers` where none is left, `AdapterError` or `PoolError` with every worker's error,
    `PoolTimeout` when one does not answer until the deadline: it drops what it has not begun.
    """
    if not workers:
        raise NoWorkers(
            f"pool {options.pool!r} has no worker alive to {function.replace('_', ' ')}"
        )
    if importlib.util.find_spec("arq") is None:
        raise PoolError(f"{function} travels as an arq job: pip install 'lmpool[worker]'")
    if deadline.at is None:
        deadline = Deadline(CONTROL_TIMEOUT)
    from lmpool.producer.control_jobs import ControlJobs

    jobs = ControlJobs(options, function, arguments, deadline, alive)
    asking = in_thread(lambda: _run(jobs, options.control, workers), "lmpool-control")
    missing = f"{function} was not answered by every one of {', '.join(workers)}"
    try:
        answers = result(asking, deadline, missing)
    except (PoolTimeout, TimeoutError):
        away = "" if jobs.lost is None else f": {mask_url(options.control)} is lost: {jobs.lost}"
        raise deadline.error(missing, away or _elsewhere(options, listening or {})) from None
    if not answers:
        raise NoWorkers(
            f"pool {options.pool!r} has no worker left to {function.replace('_', ' ')}: "
            f"{', '.join(workers)} gave no sign of life before they answered; call "
            "again once one serves"
        )
    errors = {worker: a["error"] for worker, a in answers.items() if "error" in a}
    if errors:
        text = "; ".join(f"{worker}: {error}" for worker, error in errors.items())
        kind = AdapterError if "lora" in function else PoolError
        raise kind(f"{function} failed on {len(errors)} of {len(workers)} workers: {text}")
    return {worker: answer.get("result") for worker, answer in answers.items()}


def _elsewhere(options: ClientOptions, listening: Mapping[str, str | None]) -> str:
    """That workers take control jobs from another server than these went to; '' where they do not.

    It may go by another name for them: so it is no reason not to try.
    """
    own, mine = place_of(options.url), place_of(options.control)
    others = {w: said or own for w, said in listening.items() if said is not None}
    others = {worker: server for worker, server in others.items() if server != mine}
    if not others:
        return ""
    text = (
        f": {', '.join(others)} take control jobs from {', '.join(sorted(set(others.values())))}, "
        f"and this client puts them into {mine}. "
    )
    if set(others.values()) == {own}:
        return text + "Leave LMPOOL_CONTROL_URL (control_url) out, or set it for workers, too"
    return text + "Set LMPOOL_CONTROL_URL (control_url) to that server's URL for this client, too"


def _run(jobs: ControlJobs, url: str, workers: list[str]) -> dict[str, dict[str, Any]]:
    """What the workers answer. Raises `TimeoutError` and ours."""
    try:
        with understood(url):
            # An event loop of its own: the caller's thread may be running one.
            return asyncio.run(jobs.run(workers))
    except (LmpoolError, TimeoutError):
        raise
    except Exception as error:  # of arq's: a job that failed in another way than ours do
        raise PoolError(f"{jobs.function} failed: {said(error)}") from error
