"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lmpool.gateway.aside import aside
from lmpool.gateway.calls import NUMBER_BYTES, Answered, Call, Prompt
from lmpool.gateway.drawing import Part, drawn_together, parts
from lmpool.gateway.errors import ASKING, ApiError
from lmpool.gateway.json_parts import Raw, dumps
from lmpool.gateway.pools import Model
from lmpool.gateway.prompt_logprobs_json import chat_content
from lmpool.gateway.sampling import SamplingRequest, drawing
from lmpool.gateway.schemas import Answer, JsonRoute, Request, Usage
from lmpool.gateway.sse import EVENTS
from lmpool.gateway.state import Gateway, gateway_of
from lmpool.producer.deadline import Deadline

router = APIRouter(route_class=JsonRoute)

KIND: Final = "chat.completion"
CHUNK: Final = "chat.completion.chunk"
NO_TEMPLATE: Final = (
    "The model has no chat template: use /v1/completions, or start the gateway with --chat-template"
)


class TextPart(Request):
    """A part of a message; text is the only kind."""

    type: Literal["text"]
    text: str


class Message(Request):
    """Somebody's words. What it has besides is given to the chat template as it is."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: str
    content: str | Annotated[list[TextPart], Field(max_length=4096, fail_fast=True)] | None = None


class ChatTurns(Request):
    """A conversation, and how it becomes text."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=65_536, fail_fast=True)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(ChatTurns, SamplingRequest):
    """A conversation, whose next turn is the model's."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: Literal[False] | None = None
    logprob_token_ids: None = None
    chat_template: None = None
    documents: Annotated[list[Any], Field(max_length=0)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None = None


class AnswerMessage(Answer):
    """The model's words."""

    role: str
    content: str | None


class ChatChoice(Answer):
    """One way that the conversation goes on."""

    index: int
    message: AnswerMessage
    finish_reason: str | None
    logprobs: dict[str, Any] | None


class ChatCompletion(Answer):
    """Ways that the conversation goes on."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None


async def chat_ids(model: Model, body: ChatTurns) -> list[int]:
    """The conversation as token ids. Raises `ApiError`."""
    template = model.served.template
    if template is None:
        raise ApiError(400, NO_TEMPLATE, param="messages", code="no_chat_template")
    goes_on = bool(body.continue_final_message)
    prompted = body.add_generation_prompt
    if goes_on and prompted:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt: only one of them can be true",
            param="continue_final_message",
        )
    text = await aside(
        template.render,
        [_plain(message) for message in body.messages],
        add_generation_prompt=not goes_on if prompted is None else prompted,
        continue_final_message=goes_on,
        arguments=body.chat_template_kwargs,
    )
    special = bool(body.add_special_tokens)
    return await model.words.encode(text, special, "messages", model.info.max_prompt_tokens)


def _plain(message: Message) -> dict[str, Any]:
    """A message for a template: text parts are one text, and what is null is not there.

    Templates ask whether a message has something, such as calls of tools, and would write None. The
    content of a message that has something else in its place is null for them, who ask for that.
    """
    given = message.model_dump(exclude_unset=True)
    found = {name: value for name, value in given.items() if value is not None}
    if "content" in given and found.keys() > {"role"}:
        found["content"] = given["content"]
    if isinstance(message.content, list):
        found["content"] = "".join(part.text for part in message.content)
    return found


class _Chat(Call):
    """A request for the next turn, checked by `of`."""

    body: ChatRequest

    @classmethod
    async def of(
        cls, gateway: Gateway, model: Model, body: ChatRequest, deadline: Deadline
    ) -> _Chat:
        """Raises `ApiError` for what cannot be answered."""
        call = cls(gateway, model, body, deadline, "chatcmpl")
        call.check_tops("top_logprobs", body.top_logprobs)
        call.check_tops("prompt_logprobs", body.prompt_logprobs)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        ids = await chat_ids(model, body)
        asked = body.max_tokens
        if body.max_completion_tokens is not None:
            asked = body.max_completion_tokens
        drawn = model.info.max_prompt_tokens if asked is None else asked
        call.check_prompts([Prompt(ids)], drawn, "messages")
        tops = (body.top_logprobs or 0) if body.logprobs else None
        call.drawing = await drawing(body, model, drawn, tops, len(ids))
        if body.prompt_logprobs is not None:
            call.scored(body.prompt_logprobs)
        await call.check_size()
        return call

    # --- telling -------------------------------------------------------------------------------

    def content_logprobs(self, part: Part) -> dict[str, Any] | None:
        """The ``logprobs`` of a part."""
        if not self.body.logprobs or part.logprobs is None:
            return None
        as_ids = bool(self.body.return_tokens_as_token_ids)
        told = chat_content(
            self.model.words, part.token_ids, part.logprobs, part.top_logprobs, as_ids
        )
        return {"content": Raw(told), "refusal": None}

    def whole(self, answered: list[Answered]) -> bytes:
        """The answer as JSON."""
        (prompt,), (of_it,) = self.prompts, answered
        choices = []
        for index, part in enumerate(of_it.drawn):
            choice: dict[str, Any] = {
                "index": index,
                "message": {"role": "assistant", "content": part.text, "refusal": None},
                "logprobs": self.content_logprobs(part),
                "finish_reason": part.finish_reason,
                "stop_reason": part.stop_reason,
            }
            if self.body.return_token_ids:
                choice["token_ids"] = part.token_ids
            choices.append(choice)
        drawn = sum(len(part.token_ids) for part in of_it.drawn)
        found = self.answer(KIND, choices=choices, usage=self.usage(drawn))
        found |= self.of_prompt(prompt, of_it.scores)
        return dumps(found)

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """The events of a stream."""
        (prompt,), drawn = self.prompts, [0] * self.n
        (scores,) = await self.scores()
        sources = [
            parts(self.gateway, self.model, prompt.ids, self.nth(prompt, j), self.deadline)
            for j in range(self.n)
        ]
        size = self.numbers * NUMBER_BYTES
        begun: set[int] = set()
        async with aclosing(drawn_together(self.gateway, sources)) as found:
            async for index, part in found:
                if index not in begun:
                    delta = {"role": "assistant", "content": ""}
                    chunk = self._chunk(index, delta, drawn[index])
                    if not begun:
                        chunk |= await self.beside(size, self.of_prompt, prompt, scores)
                    begun.add(index)
                    yield chunk
                drawn[index] += len(part.token_ids)
                yield self._chunk(index, {"content": part.text}, drawn[index], part)
        if self.tells_usage:
            yield self.answer(CHUNK, choices=[], usage=self.usage(sum(drawn)))

    def _chunk(
        self, index: int, delta: dict[str, str], drawn: int, part: Part | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None if part is None else self.content_logprobs(part),
            "finish_reason": None if part is None else part.finish_reason,
        }
        if part is not None:
            choice["stop_reason"] = part.stop_reason
            if self.body.return_token_ids:
                choice["token_ids"] = part.token_ids
        used = self.usage_of_chunk(len(self.prompts[0].ids), drawn)
        return self.answer(CHUNK, choices=[choice], **used)


@router.post(
    "/v1/chat/completions",
    responses={**ASKING, 200: {"model": ChatCompletion, "content": EVENTS}},
    response_class=Response,
    tags=["openai"],
)
async def chat_completions(body: ChatRequest, request: HttpRequest) -> Response:
    """Go on with a conversation, by the model's chat template."""
    gateway = gateway_of(request)
    deadline = gateway.deadline()
    model = await gateway.model(body.model, deadline)
    call = await _Chat.of(gateway, model, body, deadline)
    return await call.reply(request)
