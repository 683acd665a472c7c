"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lmpool.gateway.aside import aside
from lmpool.gateway.chat import ChatTurns, chat_ids
from lmpool.gateway.errors import ASKING
from lmpool.gateway.responding import respond
from lmpool.gateway.sampling import Ids
from lmpool.gateway.schemas import Answer, JsonRoute, Request
from lmpool.gateway.state import gateway_of
from lmpool.gateway.words import Words

router = APIRouter(tags=["tokens"], route_class=JsonRoute)


class TokenizeText(Request):
    """A text."""

    model: str | None = Field(None, max_length=512)
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatTurns):
    """A conversation."""

    model: str | None = Field(None, max_length=512)
    return_token_strs: bool | None = None


class Tokenized(Answer):
    """Token ids, and how many there may be."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Request):
    """Token ids."""

    model: str | None = Field(None, max_length=512)
    tokens: Ids


class Detokenized(Answer):
    """Their text."""

    prompt: str


@router.post("/tokenize", responses={**ASKING, 200: {"model": Tokenized}}, response_class=Response)
async def tokenize(body: TokenizeText | TokenizeChat, request: HttpRequest) -> Response:
    """The token ids of a text or of a conversation."""
    gateway = gateway_of(request)
    model = await gateway.model(body.model, gateway.deadline())
    words = model.words
    if isinstance(body, TokenizeText):
        ids = await words.encode(body.prompt, body.add_special_tokens is not False)
    else:
        ids = await chat_ids(model, body)
    longest = model.info.max_prompt_tokens
    content = await aside(_tokenized, words, ids, longest, bool(body.return_token_strs))
    return await respond(request, content, "application/json")


def _tokenized(words: Words, ids: list[int], longest: int, texts: bool) -> bytes:
    """The answer as JSON."""
    strings = [words.text(token) for token in ids] if texts else None
    return orjson.dumps(
        {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": strings}
    )


@router.post(
    "/detokenize", responses={**ASKING, 200: {"model": Detokenized}}, response_class=Response
)
async def detokenize(body: DetokenizeRequest, request: HttpRequest) -> Response:
    """The text of token ids, special tokens included."""
    gateway = gateway_of(request)
    model = await gateway.model(body.model, gateway.deadline())
    model.check_ids(body.tokens, "tokens")
    content = await aside(lambda: orjson.dumps({"prompt": model.words.decode(body.tokens)}))
    return await respond(request, content, "application/json")
