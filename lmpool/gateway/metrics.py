"""What a gateway counts of its own work, at ``/metrics``."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, Final

from fastapi import APIRouter
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lmpool.counters import LABELS, SECONDS
from lmpool.counters import Gateway as Names
from lmpool.gateway.door import App, Message, Receive, Send
from lmpool.gateway.state import Gateway, gateway_of
from lmpool.monitoring.families import family, merged, registry
from lmpool.monitoring.spread import Spread

OTHER: Final = "other"
"""The route of every path that there is none for: callers may make up as many as they like."""
GONE: Final = "499"
"""The status of a request whose caller went away before it was answered."""
ANSWERED_BY: Final = {
    "local_hits": "gateway_cache",
    "cache_hits": "pool_cache",
    "joined": "another_request",
    "queued": "worker",
    "failed": "error",
}
"""A client's statistics, and what stands for each as a label."""

router = APIRouter(tags=["health"])


class Requests:
    """Counts requests: an application in front of another. Of the event loop's thread."""

    def __init__(self, app: App, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        ours = [route for route in routes if isinstance(route, Route)]
        self._exact = {route.path for route in ours if "{" not in route.path}
        self._patterns = [route for route in ours if "{" in route.path]
        self.answered: Counter[tuple[str, str]] = Counter()
        """By route and status."""
        self.seconds: defaultdict[str, Spread] = defaultdict(lambda: Spread(SECONDS))
        self.first: defaultdict[str, Spread] = defaultdict(lambda: Spread(SECONDS))
        self.running = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = self._route(scope["path"])
        began = time.monotonic()
        status = GONE
        waits = True

        async def counted(message: Message) -> None:
            nonlocal status, waits
            if message["type"] == "http.response.start":
                status = str(message["status"])
            elif waits and message.get("body"):
                waits = False
                self.first[route].add(time.monotonic() - began)
            await send(message)

        self.running += 1
        try:
            await self._app(scope, receive, counted)
        finally:
            self.running -= 1
            self.answered[route, status] += 1
            self.seconds[route].add(time.monotonic() - began)

    def _route(self, path: str) -> str:
        if path in self._exact:
            return path
        found = (route.path for route in self._patterns if route.path_regex.match(path))
        return next(found, OTHER)


class GatewayCollector(Collector):
    """Gives them to Prometheus, with what each pool's client says."""

    def __init__(self, gateway: Gateway, requests: Requests) -> None:
        self._gateway = gateway
        self._requests = requests

    def collect(self) -> Iterator[Family]:
        """Every metric of a gateway, as it is now."""
        requests = self._requests
        yield family(Names.REQUESTS, {}, dict(requests.answered))
        yield family(Names.SECONDS, {}, dict(requests.seconds))
        yield family(Names.FIRST, {}, dict(requests.first))
        yield family(Names.RUNNING, {}, requests.running)
        yield family(Names.FREE, {}, self._gateway.room.free)
        yield from merged(self._asked())

    def _asked(self) -> Iterator[Family]:
        for pool in self._gateway.pools.all:
            if pool.served is None:
                continue
            common = dict(zip(LABELS, (pool.name, pool.served.info.model), strict=True))
            found = pool.served.lm.statistics()
            yield family(
                Names.ASKED, common, {label: found[name] for name, label in ANSWERED_BY.items()}
            )


def observe(gateway: Gateway, app: App, routes: Iterable[BaseRoute]) -> Requests:
    """Count the requests to `app`, whose `routes` these are, for the gateway's ``/metrics``."""
    requests = Requests(app, routes)
    gateway.registry = registry(GatewayCollector(gateway, requests))
    return requests


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: HttpRequest) -> Response:
    """This gateway's metrics, as Prometheus reads them."""
    try:
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
    except (TypeError, ValueError):  # a version that is none
        encode, media_type = choose_encoder("")
    return Response(encode(gateway_of(request).registry), headers={"content-type": media_type})
