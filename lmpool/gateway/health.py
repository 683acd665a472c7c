"""Whether the gateway lives, whether it can answer, and what it is."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from lmpool import __version__
from lmpool.gateway.errors import ApiError, responses
from lmpool.gateway.schemas import Answer
from lmpool.gateway.state import gateway_of

router = APIRouter(tags=["health"])


class Health(Answer):
    """The process lives."""

    status: str = "ok"


class Readiness(Answer):
    """Every pool has a worker."""

    status: str = "ready"
    pools: list[str]


class Version(Answer):
    """This lmpool's."""

    version: str


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> Health:
    """200 for as long as the process lives: see `/ready` for more."""
    return Health()


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses=responses(503))
async def ready(request: HttpRequest) -> Readiness:
    """200 while every pool has a worker, 503 while one has none."""
    pools = gateway_of(request).pools.all
    alive = await asyncio.gather(*(pool.has_workers() for pool in pools))
    away = [pool.name for pool, there in zip(pools, alive, strict=True) if not there]
    if away:
        raise ApiError(503, f"without a worker: {', '.join(away)}", retry_after=1)
    return Readiness(pools=[pool.name for pool in pools])


@router.head("/version", include_in_schema=False)
@router.get("/version")
async def version() -> Version:
    """This lmpool's version."""
    return Version(version=__version__)
