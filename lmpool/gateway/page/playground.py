"""The playground: the likeliest next tokens of a text, and how surprising each of its tokens is."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lmpool.gateway.errors import ApiError
from lmpool.gateway.page.live import LivePage, page_of
from lmpool.gateway.page.rights import check_caller
from lmpool.gateway.page.telling import tell
from lmpool.gateway.pools import Model
from lmpool.gateway.sampling import Id, check_length
from lmpool.gateway.schemas import JsonRoute, Request
from lmpool.gateway.words import Words
from lmpool.producer.deadline import Deadline
from lmpool.wants import Score, TextScores, Top, TopLogprobs

router = APIRouter(include_in_schema=False, route_class=JsonRoute)

MOST_CHARACTERS: Final = 8000
MOST_APPENDED: Final = 500
MOST_SCORED: Final = 2048
"""Tokens of a text that is coloured: each is an element of the page."""
PATIENCE: Final = 30.0
"""Seconds that somebody who looks at a page waits."""
IMPOSSIBLE: Final = 9999.0
"""Bits of what cannot be, as JSON knows no infinity."""
_BITS: Final = math.log(2)


class Asked(Request):
    """A text and the tokens that were chosen after it, one by one, and who reads them."""

    pool: str | None = Field(None, max_length=512)
    adapter: str | None = Field(None, max_length=512)
    text: Annotated[str, Field(max_length=MOST_CHARACTERS)]
    appended: Annotated[
        list[Id], Field(default_factory=list, max_length=MOST_APPENDED, fail_fast=True)
    ]


class NextTokens(Asked):
    """What comes after them."""

    k: Annotated[int, Field(ge=1, le=50)] = 12


@router.post("/live/next-tokens")
async def next_tokens(body: NextTokens, request: HttpRequest) -> Response:
    """The likeliest next tokens, with their probabilities."""
    check_caller(request)
    page = page_of(request)
    gateway = page.gateway
    deadline = Deadline(min(PATIENCE, gateway.options.request_timeout))
    model = await _model(page, body, deadline)
    words = model.words
    ids = await _ids(model, body, model.info.max_prompt_tokens)
    k = min(body.k, model.info.vocab_size, max(1, gateway.options.max_logprobs))
    (top,) = await gateway.answers(model, [(ids, Top(k))], deadline)
    assert isinstance(top, TopLogprobs)
    pairs = zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)
    return tell(
        {
            "count": len(ids),
            "appended": [_named(words, token) for token in body.appended],
            "appended_text": words.decode(body.appended),
            "likeliest": [
                {**_named(words, token), "probability": math.exp(p)} for token, p in pairs
            ],
            "rest": math.exp(float(top.rest)),
        }
    )


@router.post("/live/surprise")
async def surprise(body: Asked, request: HttpRequest) -> Response:
    """A text in parts, with the bits of surprise of each."""
    check_caller(request)
    page = page_of(request)
    gateway = page.gateway
    deadline = Deadline(min(PATIENCE, gateway.options.request_timeout))
    model = await _model(page, body, deadline)
    ids = await _ids(model, body, min(MOST_SCORED, model.info.max_prompt_tokens), scored=True)
    bits, ranks, size = list[float](), list[int](), 0
    if len(ids) > 1:
        (scores,) = await gateway.answers(model, [(ids, Score(1))], deadline)
        assert isinstance(scores, TextScores)
        bits = [-p / _BITS for p in scores.logprobs.tolist()]
        ranks = scores.ranks.tolist()
        size = sum(len(model.words.token_bytes(token)) for token in ids[1:])
    return tell(
        {
            "parts": list(_parts(model.words, ids, bits, ranks)),
            "scored": len(bits),
            "bits_per_token": _finite(sum(bits) / max(1, len(bits))),
            "bits_per_byte": _finite(sum(bits) / max(1, size)),
        }
    )


async def _model(page: LivePage, body: Asked, deadline: Deadline) -> Model:
    """The pool's model. Raises `ApiError` where it cannot be asked now."""
    pool = page.pool(body.pool)
    served = pool.served
    if served is None and page.watch(pool).seen.state == "serving":
        served = await pool.ready(deadline)  # its tokenizer is being read
    if served is None or not await pool.has_workers():
        raise ApiError(503, "no worker is alive: start one with lmpool worker", retry_after=1)
    if body.adapter and body.adapter not in await served.adapters():
        raise ApiError(404, "the pool has no such adapter any more", param="adapter")
    return Model(pool.name, pool, served, body.adapter or None)


async def _ids(model: Model, body: Asked, most: int, *, scored: bool = False) -> list[int]:
    """Their ids. Where there is no tokenizer the text may be ids itself. Raises `ApiError`."""
    text, words = body.text, body.text.split()
    if model.words.has_text:
        ids = await model.words.encode(text, param="text", most=most) if text else []
    elif all(word.isascii() and word.isdigit() for word in words):
        ids = [int(word[:10]) for word in words]
    else:
        raise ApiError(400, "this pool has no tokenizer: write token ids, as 1 5 9", param="text")
    ids += body.appended
    model.check_ids(ids, "text")
    check_length(len(ids), most, "text", scored=scored)
    return ids


def _parts(
    words: Words, ids: Sequence[int], bits: Sequence[float], ranks: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Tokens, or as many together as make whole characters. The first one has no surprise."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, tokens, total, rank, scored = "", 0, 0.0, 0, False
    for place, token in enumerate(ids):
        data = words.token_bytes(token) or f"<{token}>".encode()
        text += decoder.decode(data, final=place == len(ids) - 1)
        tokens += 1
        if place:
            total, rank = total + bits[place - 1], max(rank, ranks[place - 1])
        if place == len(ids) - 1 or not decoder.getstate()[0]:
            yield {
                "text": text,
                "tokens": tokens,
                "bits": min(total, IMPOSSIBLE) if scored else None,
                "rank": rank if scored else None,
            }
            text, tokens, total, rank, scored = "", 0, 0.0, 0, True


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _named(words: Words, token: int) -> dict[str, Any]:
    data = words.token_bytes(token)
    try:
        text = data.decode()
    except UnicodeDecodeError:  # a part of a character
        text = "".join(f"\\x{byte:02x}" for byte in data)
    special = token in words.special or not data
    return {"id": token, "text": text or f"<{token}>", "special": special}
