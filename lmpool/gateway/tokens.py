"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest

from lmpool.gateway.aside import aside
from lmpool.gateway.chat import ChatTurns, chat_ids
from lmpool.gateway.errors import ASKING
from lmpool.gateway.sampling import Ids
from lmpool.gateway.schemas import Answer, JsonRoute, Request
from lmpool.gateway.state import gateway_of

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


@router.post("/tokenize", responses=ASKING)
async def tokenize(body: TokenizeText | TokenizeChat, request: HttpRequest) -> Tokenized:
    """The token ids of a text or of a conversation."""
    gateway = gateway_of(request)
    model = await gateway.model(body.model, gateway.deadline())
    words = model.words
    if isinstance(body, TokenizeText):
        ids = await words.encode(body.prompt, body.add_special_tokens is not False)
    else:
        ids = await chat_ids(model, body)
    texts = None
    if body.return_token_strs:
        texts = await aside(lambda: [words.text(token) for token in ids])
    longest = model.info.max_prompt_tokens
    return Tokenized(count=len(ids), max_model_len=longest, tokens=ids, token_strs=texts)


@router.post("/detokenize", responses=ASKING)
async def detokenize(body: DetokenizeRequest, request: HttpRequest) -> Detokenized:
    """The text of token ids, special tokens included."""
    gateway = gateway_of(request)
    model = await gateway.model(body.model, gateway.deadline())
    model.check_ids(body.tokens, "tokens")
    return Detokenized(prompt=await aside(model.words.decode, body.tokens))
