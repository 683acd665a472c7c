"""A worker as operators see it: its ``/metrics``, ``/health`` and ``/ready``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from lmpool.counters import LABELS, Metric, Worker
from lmpool.liveness import LIFE_MS
from lmpool.monitoring.families import Shown, family, registry
from lmpool.monitoring.server import MonitoringServer, Readiness, application
from lmpool.release import VERSION
from lmpool.worker.service import Service


class WorkerMonitor(Collector):
    """Looks at a worker from outside: it holds nothing up, and calls no engine."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def readiness(self) -> Readiness:
        """Whether the worker serves now: its engine is loaded and the pool knows that it lives."""
        service, status = self._service, self._service.status
        says: dict[str, object] = {"pool": service.options.pool, "worker": service.consumer}
        if status.failure is not None:
            failed = f"{type(status.failure).__name__}: {status.failure}"
            return Readiness(False, {"status": "failed", **says, "error": failed})
        if status.stopping.is_set():
            return Readiness(False, {"status": "stopping", **says})
        start = service.start_progress
        seconds = {stage: round(took, 3) for stage, took in dict(start.stages).items()}
        if service.loop is None or status.metrics.beat_at is None or start.stage is not None:
            at = {"stage": start.stage or "begin", "stage_seconds": round(start.seconds(), 1)}
            return Readiness(False, {"status": "starting", **says, **at, "stages": seconds})
        age = status.metrics.heartbeat_age()
        if age > LIFE_MS / 1000:
            away = "the server has not answered this worker's heartbeats"
            return Readiness(
                False, {"status": "away", **says, "error": away, "seconds": round(age, 1)}
            )
        return Readiness(True, {"status": "ready", **says, "stages": seconds})

    def collect(self) -> Iterator[Family]:
        """Every metric of a worker, as it is now."""
        service, status = self._service, self._service.status
        metrics, description = status.metrics, status.description
        common = dict(zip(LABELS, (service.options.pool, service.options.model), strict=True))

        def give(metric: Metric, values: Shown) -> Family:
            return family(metric, common, values)

        who = tuple(str(description[name]) for name in ("id", "engine", "gpu"))
        yield give(Worker.INFO, {(*who, VERSION): 1.0})
        yield give(Worker.READY, float(self.readiness().ready))
        yield give(Worker.ANSWERS, dict(metrics.answers))
        yield give(Worker.FAILURES, dict(metrics.failures))
        yield give(Worker.CACHE_HITS, dict(metrics.cache_hits))
        yield give(Worker.BATCH, metrics.batch)
        yield give(Worker.QUEUE_WAIT, metrics.queue_wait)
        yield give(Worker.COMPUTE, metrics.compute)
        yield give(Worker.PUBLISH, metrics.publish)
        yield give(Worker.TOKENS_ASKED, metrics.tokens_asked)
        yield give(Worker.HOME_LANES, service.home_lanes())
        yield give(Worker.OWN_JOBS, status.own_jobs)
        yield give(Worker.STOLEN_JOBS, status.stolen_jobs)
        yield give(Worker.WAITING, service.waiting())
        yield give(Worker.RUNNING, metrics.running)
        yield give(Worker.HEARTBEAT_AGE, metrics.heartbeat_age())
        yield give(Worker.ADAPTERS, 0 if service.adapters is None else service.adapters.loaded)
        yield give(Worker.START, dict(service.start_progress.stages))
        measures = metrics.engine
        if measures is None:
            return
        for metric, value in (
            (Worker.TOKENS_COMPUTED, measures.computed_tokens),
            (Worker.STATES, measures.kept_states),
            (Worker.STATES_MOST, measures.room),
            (Worker.STATES_EVICTED, measures.evicted_states),
        ):
            if value is not None:
                yield give(metric, value)


def monitoring(service: Service) -> MonitoringServer:
    """A worker's, at the port that it was given. Not started."""
    options = service.options
    service.status.metrics.on = True
    monitor = WorkerMonitor(service)
    app = application(registry(monitor), monitor.readiness)
    return MonitoringServer(app, options.metrics_host, options.metrics_port or 0)
