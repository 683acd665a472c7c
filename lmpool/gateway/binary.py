"""``/v1/logprobs``: answers of wants in binary, many prompts a request, streamed as they come."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Annotated, Any, Final, Literal, TypeAlias, cast

from fastapi import APIRouter, Header
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lmpool import Ask
from lmpool.errors import LmpoolError, PoolBusy
from lmpool.gateway.aside import aside
from lmpool.gateway.binary_forms import (
    EVENTS,
    JSON,
    MSGPACK,
    NPY,
    Form,
    Found,
    JsonForm,
    MsgpackForm,
    NpyForm,
    accepted,
    answer_bytes,
    fields_of,
)
from lmpool.gateway.errors import ASKING, ApiError, too_long
from lmpool.gateway.merging import merged
from lmpool.gateway.pools import Model
from lmpool.gateway.responding import respond
from lmpool.gateway.sampling import MAX_PROMPTS, Id, Prompts, prompts_of
from lmpool.gateway.schemas import Answer, JsonRoute, Request
from lmpool.gateway.sse import Streamed
from lmpool.gateway.state import BUSY_PAUSE, Gateway, gateway_of
from lmpool.gateway.unread import Shelf, Unread
from lmpool.producer.deadline import Deadline
from lmpool.wants import Draw, Hidden, Row, Score, Tokens, Top, Want
from lmpool.wants.position_ids import MAX_TOKEN_IDS

router = APIRouter(route_class=JsonRoute)

HELD_BYTES: Final = 64 << 20
"""Of answers that a stream holds for a slow reader."""
IN_FLIGHT: Final = 512
SMALL: Final = 1 << 18
"""Bytes that are written without leaving the event loop to others."""
JSON_TIMES: Final = 3
"""How many times as many bytes an answer has as JSON, about."""
_IN_PLACE: Final = frozenset({400, 500})
"""Statuses of errors that are of one prompt. Any other is of the pool, and of the whole request."""

Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Ids = Annotated[list[Id], Field(min_length=1, max_length=MAX_TOKEN_IDS, fail_fast=True)]


class RowWant(Request):
    """The whole row: float32 [vocab]."""

    kind: Literal["row"]

    def want(self) -> Want:
        """As pools have it."""
        return Row()


class TopWant(Request):
    """The likeliest `k` next tokens."""

    kind: Literal["top"]
    k: Annotated[int, Field(ge=1)] | None = None

    def want(self) -> Want:
        """As pools have it."""
        return Top(20 if self.k is None else self.k)


class TokensWant(Request):
    """The log-probabilities of these tokens coming next."""

    kind: Literal["tokens"]
    token_ids: Ids

    def want(self) -> Want:
        """As pools have it."""
        return Tokens(self.token_ids)


class ScoreWant(Request):
    """The log-probability and rank of each token of the text from position `start` on."""

    kind: Literal["score"]
    start: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    token_ids: (
        Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_TOKEN_IDS, fail_fast=True)]
        | None
    ) = None
    temperature: Annotated[float, Field(gt=0, le=1e6)] | None = None

    def want(self) -> Want:
        """As pools have it."""
        return Score(
            self.start or 1, self.top_logprobs or 0, self.token_ids, self.temperature or 1.0
        )


class DrawWant(Request):
    """`n` next tokens, drawn by a seed; prompt i of a request by `seed` + i."""

    kind: Literal["draw"]
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Seed | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    replacement: bool | None = None
    allowed: Ids | None = None
    excluded: Annotated[list[Id], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)] | None = None

    def want(self) -> Want:
        """As pools have it."""
        return Draw(
            self.n or 1,
            self.seed,
            1.0 if self.temperature is None else self.temperature,
            self.replacement is not False,
            self.allowed,
            self.excluded,
        )


class HiddenWant(Request):
    """The last hidden state, which the model's head is applied to."""

    kind: Literal["hidden"]

    def want(self) -> Want:
        """As pools have it."""
        return Hidden()


WantBody: TypeAlias = Annotated[
    RowWant | TopWant | TokensWant | ScoreWant | DrawWant | HiddenWant, Field(discriminator="kind")
]


class LogprobsRequest(Request):
    """Prompts, and what is wanted of them: one want for all, or one for each."""

    model: str | None = Field(None, max_length=512)
    prompt: Prompts
    want: (
        WantBody | Annotated[list[WantBody], Field(max_length=MAX_PROMPTS, fail_fast=True)] | None
    ) = None
    add_special_tokens: bool | None = None
    stream: bool | None = None


class LogprobsAnswer(Answer):
    """The answer of one prompt: its arrays, or its error."""

    index: int


class LogprobsList(Answer):
    """The answers, in the order of the prompts."""

    object: str
    model: str
    data: list[LogprobsAnswer]


_BINARY: Final[dict[str, Any]] = {"schema": {"type": "string", "format": "binary"}}
_CONTENT: Final[dict[str, Any]] = {
    NPY: _BINARY,
    MSGPACK: _BINARY,
    EVENTS: {},
}


@router.post(
    "/v1/logprobs",
    responses={**ASKING, 200: {"model": LogprobsList, "content": _CONTENT}},
    response_class=Response,
    tags=["lmpool"],
)
async def logprobs(
    body: LogprobsRequest,
    request: HttpRequest,
    accept: Annotated[str | None, Header(description=f"{JSON}, {NPY} or {MSGPACK}")] = None,
) -> Response:
    """Rows, likeliest tokens, log-probabilities, scores, draws or hidden states of many prompts.

    As `Accept` asks: JSON, an array of numpy's, or msgpack. An error of one prompt stands where its
    answer would be; where all prompts fail, the first one's is the answer.
    """
    gateway = gateway_of(request)
    deadline = gateway.deadline()
    kind = accepted(accept)
    model = await gateway.model(body.model, deadline)
    call = _Call(gateway, model, deadline)
    await call.check(body)
    form: Form = JsonForm(model.name)
    if kind == NPY:
        form = NpyForm(call.wants)
    elif kind == MSGPACK:
        form = MsgpackForm()
    form.check(call.wants)
    call.check_size(form)
    if body.stream:
        return Streamed(await _begun(_stream(call, form)), form.stream_type)
    found = await call.all()
    if call.bytes <= SMALL:
        content, headers = form.all(found)
    else:
        content, headers = await aside(form.all, found)
    if form.media_type == JSON:
        return await respond(request, content, JSON)
    return Response(content, media_type=form.media_type, headers=headers)


class _Call:
    """One request, checked."""

    def __init__(self, gateway: Gateway, model: Model, deadline: Deadline) -> None:
        self._gateway = gateway
        self._model = model
        self._deadline = deadline
        self.prompts: list[list[int]] = []
        self._refused: dict[int, ApiError] = {}
        """By their numbers, texts that are not read."""
        self.wants: list[Want] = []
        self.bytes = 0
        """Of all answers in binary, about."""

    async def check(self, body: LogprobsRequest) -> None:
        """Refuse what cannot be answered as a whole. Raises `ApiError`."""
        prompts = list(prompts_of(body.prompt))
        most = self._gateway.options.max_prompts
        if not prompts:
            raise ApiError(400, "an empty list of prompts: send one or more", param="prompt")
        if len(prompts) > most:
            raise ApiError(
                400,
                f"{len(prompts)} prompts: this gateway takes at most {most} at once; send them in "
                "parts",
                param="prompt",
            )
        self.wants = _wants(body.want, len(prompts))
        special = body.add_special_tokens is not False
        most = self._model.info.max_prompt_tokens
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                error = self._model.words.refused(prompt, most=most)
                if error is not None:
                    self._refused[number] = error
                    prompts[number] = []
        self.prompts = await self._model.ids_of(prompts, special)

    def check_size(self, form: Form) -> None:
        """Refuse what would be too long. Raises `ApiError`."""
        info = self._model.info
        hidden = 0 if info.head is None else info.head.hidden_size
        pairs = zip(self.prompts, self.wants, strict=True)
        self.bytes = sum(
            answer_bytes(want, len(prompt), info.vocab_size, hidden) for prompt, want in pairs
        )
        size = self.bytes * (JSON_TIMES if form.media_type == JSON else 1)
        if size > self._gateway.options.max_response_bytes:
            raise ApiError(413, f"an answer of about {size} bytes: ask for fewer at a time")

    async def all(self) -> list[Found]:
        """Every answer, or its error, in the order of the prompts. Raises `ApiError`."""
        found: dict[int, Found] = {}
        async with aclosing(self.each(IN_FLIGHT)) as answers:
            async for number, answer in answers:
                if isinstance(answer, ApiError) and answer.status not in _IN_PLACE:
                    raise answer
                found[number] = answer
        in_order = [found[number] for number in range(len(self.prompts))]
        first = in_order[0]
        if isinstance(first, ApiError) and all(isinstance(each, ApiError) for each in in_order):
            raise first
        return in_order

    @property
    def in_flight(self) -> int:
        """How many a stream asks for at once, so that their answers stay within bounds."""
        each = max(1, self.bytes // len(self.prompts))
        return max(1, min(IN_FLIGHT, HELD_BYTES // each))

    async def read_on(self) -> AsyncGenerator[tuple[int, Found]]:
        """As `each`, for a reader who may be slow: then those that are not asked yet wait for him,
        and nobody waits for those that are."""
        shelf = Shelf[tuple[int, tuple[int, Found]]](Unread(), lambda _: 0)
        async with self._held():
            each = self.each(self.in_flight, shelf)
            async with aclosing(merged([(0, each)], shelf, asyncio.Semaphore())) as answers:
                async for _, answer in answers:
                    yield answer

    def _held(self) -> AbstractAsyncContextManager[None]:
        """Memory for what waits for a reader. Raises `ApiError`."""
        count = min(self.in_flight, len(self.prompts))
        size = count * (self.bytes // len(self.prompts))
        if size <= SMALL:
            return nullcontext()
        patience = self._gateway.patience(self._deadline)
        return self._gateway.places(size, patience, self._gateway.held)

    async def each(
        self, in_flight: int, shelf: Shelf[Any] | None = None
    ) -> AsyncGenerator[tuple[int, Found]]:
        """Answers, or their errors, as they come, with the numbers of their prompts.

        Where as many as `in_flight` wait on the shelf the others are asked once there are fewer.
        """
        left: list[int] = []
        for number, (prompt, want) in enumerate(zip(self.prompts, self.wants, strict=True)):
            most = want.longest_prompt(self._model.info.max_prompt_tokens)
            if number in self._refused:
                yield number, self._refused[number]
            elif len(prompt) > most:
                yield number, too_long(len(prompt), self._model.info.max_prompt_tokens)
            else:
                left.append(number)
        in_flight = min(in_flight, max(1, len(left)))
        patience = self._gateway.patience(self._deadline)
        while left:
            async with self._gateway.places(in_flight, patience):
                asked = self._until_full(left, in_flight, shelf, patience)
                async with aclosing(asked) as answers:
                    async for each in answers:
                        yield each
            if shelf is not None and left:
                await shelf.until_fewer(max(1, in_flight // 2))
                patience = self._deadline  # its reader has a part of it: it waits its turn

    async def _until_full(
        self, left: list[int], in_flight: int, shelf: Shelf[Any] | None, patience: Deadline
    ) -> AsyncGenerator[tuple[int, Found]]:
        """Those that are `left`, which are taken off it, until the shelf is full."""
        pause = BUSY_PAUSE[0]

        def numbers() -> Iterator[int]:
            while left and (shelf is None or len(shelf) < in_flight):
                yield left.pop(0)

        while left and (shelf is None or len(shelf) < in_flight):
            busy: list[int] = []
            async with aclosing(self._asked(numbers(), in_flight)) as answers:
                async for number, answer in answers:
                    if isinstance(answer, PoolBusy) and patience.left() != 0.0:
                        busy.append(number)
                    elif isinstance(answer, LmpoolError):
                        yield number, self._gateway.answer_to(self._model, answer)
                    else:
                        yield number, fields_of(self.wants[number], answer)
            if busy:
                left[:0] = sorted(busy)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, BUSY_PAUSE[1])

    async def _asked(
        self, numbers: Iterator[int], in_flight: int
    ) -> AsyncGenerator[tuple[int, Any]]:
        model = self._model
        asked: list[int] = []

        def asks() -> Iterator[Ask]:
            for number in numbers:
                asked.append(number)
                yield Ask(self.prompts[number], self.wants[number], model.lora_name)

        try:
            found = model.lm.ask_iter(
                asks(), in_flight=in_flight, errors="return", timeout=self._deadline.at_least(0.001)
            )
            async with aclosing(cast("AsyncGenerator[tuple[int, Any]]", found)) as answers:
                async for number, answer in answers:
                    yield asked[number], answer
        except LmpoolError as error:
            raise self._gateway.answer_to(model, error) from None


async def _stream(call: _Call, form: Form) -> AsyncGenerator[bytes]:
    """The answers as they come, each as `form` writes it. Raises `ApiError` before the first."""
    error, begun = None, False
    try:
        async with aclosing(call.read_on()) as answers:
            async for number, answer in answers:
                if not begun and isinstance(answer, ApiError) and answer.status not in _IN_PLACE:
                    raise answer
                begun = True
                long = call.bytes > SMALL * len(call.prompts)
                yield await aside(form.one, number, answer) if long else form.one(number, answer)
    except ApiError as found:
        if not begun:
            raise
        error = found
    end = form.end(error)
    if end:
        yield end


async def _begun(parts: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """A stream whose first part is there. Raises what it raises until then."""
    try:
        first = await anext(parts)
    except BaseException:
        await parts.aclose()
        raise

    async def whole() -> AsyncGenerator[bytes]:
        async with aclosing(parts):
            yield first
            async for part in parts:
                yield part

    return whole()


def _wants(given: Any, count: int) -> list[Want]:
    """A want for each of so many prompts. Raises `ApiError`."""
    if isinstance(given, list):
        if len(given) != count:
            raise ApiError(
                400,
                f"{len(given)} wants for {count} prompts: send one for all, or one for each",
                param="want",
            )
        return [each.want() for each in given]
    want: Want = Row() if given is None else given.want()
    if isinstance(want, Draw):
        return list(want.each(count))
    return [want] * count
