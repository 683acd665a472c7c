"""``/v1/models``: what can be asked."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from lmpool.gateway.errors import ApiError, responses
from lmpool.gateway.pools import Pool
from lmpool.gateway.schemas import Answer
from lmpool.gateway.state import gateway_of

router = APIRouter()

STARTED = int(time.time())


class ModelCard(Answer):
    """A model, or an adapter of one: `parent` is its pool. `root` is what the pool serves."""

    id: str
    object: str = "model"
    created: int = STARTED
    owned_by: str = "lmpool"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(Answer):
    """All of them."""

    object: str = "list"
    data: list[ModelCard]


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", responses=responses(401, 408, 413, 429, 500, 503), tags=["openai"])
async def models(request: HttpRequest) -> ModelList:
    """The models that can be asked now, and their adapters.

    Where there is none yet, as right after the start, the answer waits for one. One whose server
    has yet to tell its adapters is left out; where there is no other, that is the error.
    """
    gateway = gateway_of(request)
    await gateway.pools.any_served(gateway.patience(gateway.deadline()))
    found = await asyncio.gather(*map(_cards, gateway.pools.all), return_exceptions=True)
    cards: list[ModelCard] = []
    for each in found:
        if not isinstance(each, BaseException):
            cards += each
        elif not isinstance(each, ApiError):
            raise each
    errors = [each for each in found if isinstance(each, ApiError)]
    if errors and not cards:
        raise errors[0]
    return ModelList(data=cards)


@router.head("/v1/models/{model:path}", include_in_schema=False)
@router.get(
    "/v1/models/{model:path}",
    responses=responses(401, 404, 408, 413, 429, 500, 503),
    tags=["openai"],
)
async def one_model(model: str, request: HttpRequest) -> ModelCard:
    """One of them, by any of its names."""
    gateway = gateway_of(request)
    found = await gateway.model(model, gateway.deadline())
    info = found.info
    return ModelCard(
        id=model,
        root=info.model,
        parent=found.pool.name if found.lora_name else None,
        max_model_len=info.max_prompt_tokens,
    )


async def _cards(pool: Pool) -> list[ModelCard]:
    served = pool.served
    if served is None:
        return []
    info = served.info
    longest = info.max_prompt_tokens
    first = ModelCard(id=pool.name, root=info.model, max_model_len=longest)
    adapters = [
        ModelCard(
            id=f"{pool.name}:{name}", root=info.model, parent=pool.name, max_model_len=longest
        )
        for name in await served.adapters()
    ]
    return [first, *adapters]
