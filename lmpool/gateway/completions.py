"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Final

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lmpool.gateway.calls import (
    NUMBER_BYTES,
    TOKEN_BYTES,
    Answered,
    Call,
    Prompt,
    with_tops,
)
from lmpool.gateway.drawing import Part, drawn_together, parts
from lmpool.gateway.errors import ASKING, ApiError
from lmpool.gateway.json_parts import Raw, dumps
from lmpool.gateway.logprobs import joined
from lmpool.gateway.pools import Model
from lmpool.gateway.prompt_logprobs_json import completion_logprobs
from lmpool.gateway.sampling import Prompts, SamplingRequest, drawing, prompts_of
from lmpool.gateway.schemas import Answer, JsonRoute, Usage
from lmpool.gateway.sse import EVENTS
from lmpool.gateway.state import Gateway, gateway_of
from lmpool.gateway.text_offsets import prompt_offsets
from lmpool.gateway.words import Words
from lmpool.producer.deadline import Deadline
from lmpool.wants import TextScores

router = APIRouter(route_class=JsonRoute)

USUAL_TOKENS: Final = 16
KIND: Final = "text_completion"


class CompletionRequest(SamplingRequest):
    """A completion: of a text, of texts, of token ids, or of lists of them."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    logprob_token_ids: None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None
    add_special_tokens: bool | None = None


class CompletionChoice(Answer):
    """One continuation."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: dict[str, Any] | None


class Completion(Answer):
    """Continuations, those of a prompt together."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None


class _Completions(Call):
    """A request for completions, checked by `of`."""

    body: CompletionRequest

    @classmethod
    async def of(
        cls, gateway: Gateway, model: Model, body: CompletionRequest, deadline: Deadline
    ) -> _Completions:
        """Raises `ApiError` for what cannot be answered."""
        call = cls(gateway, model, body, deadline, "cmpl")
        call.check_tops("logprobs", body.logprobs)
        call.check_tops("prompt_logprobs", body.prompt_logprobs)
        asked = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        drawn = USUAL_TOKENS if asked is None else asked
        given = prompts_of(body.prompt)
        call.check_count(len(given))
        ids = await model.ids_of(given, body.add_special_tokens is not False)
        for each in ids:
            model.check_ids(each, "prompt")
        call.check_prompts([Prompt(each) for each in ids], drawn)
        if body.echo:
            size = TOKEN_BYTES * sum(map(len, ids))
            call.prompts = await call.beside(size, _with_texts, model.words, given, ids)
        shortest = min(len(prompt.ids) for prompt in call.prompts)
        call.drawing = await drawing(body, model, drawn, body.logprobs, shortest)
        if call.echoes_scores and body.prompt_logprobs_temperature not in (None, 1.0):
            raise ApiError(
                400,
                "prompt_logprobs_temperature beside echo and logprobs: ask for one of them",
                param="prompt_logprobs_temperature",
            )
        if call.echoes_scores:
            call.scored(body.logprobs or 0)
        if body.prompt_logprobs is not None:
            call.scored(body.prompt_logprobs)
        await call.check_size()
        return call

    @property
    def echoes_scores(self) -> bool:
        """Whether the prompt's log-probabilities stand before those of what was drawn."""
        return bool(self.body.echo) and self.body.logprobs is not None

    # --- telling -------------------------------------------------------------------------------

    def choice(
        self,
        index: int,
        prompt: Prompt,
        scores: TextScores | None,
        part: Part,
        first: bool = True,
    ) -> dict[str, Any]:
        """A choice, or of a stream a part of one, whose `first` tells of the prompt."""
        body = self.body
        found: dict[str, Any] = {
            "index": index,
            "text": prompt.with_text(part.text) if first and body.echo else part.text,
            "logprobs": None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if body.logprobs is not None:
            echoed = first and self.echoes_scores
            found["logprobs"] = self.logprobs(prompt, scores, part, echoed)
        if body.return_token_ids:
            found["token_ids"] = part.token_ids
        return found | self.of_prompt(prompt, scores) if first else found

    def logprobs(
        self,
        prompt: Prompt,
        scores: TextScores | None,
        part: Part,
        echoed: bool = False,
    ) -> Raw:
        """Those of a part, and where it is `echoed` those of its prompt before it."""
        first, offsets = None, list(part.text_offsets)
        if self.body.echo:
            offsets = [len(prompt.text) + offset for offset in offsets]
        if echoed:
            offsets = prompt_offsets(self.model.words, prompt.ids, prompt.text) + offsets
            blank = TextScores(np.zeros(0, np.float32), np.zeros(0, np.int32))
            cut = with_tops(scores, self.body.logprobs or 0)
            first = (np.asarray(prompt.ids, np.int32), cut or blank)
        ids, logprobs, top = joined(first, part.token_ids, part.logprobs, part.top_logprobs)
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return Raw(completion_logprobs(self.model.words, ids, logprobs, top, as_ids, offsets))

    def whole(self, answered: list[Answered]) -> bytes:
        """The answer as JSON."""
        choices = []
        for number, (prompt, found) in enumerate(zip(self.prompts, answered, strict=True)):
            for j, part in enumerate(found.drawn):
                choices.append(self.choice(number * self.n + j, prompt, found.scores, part))
        drawn = sum(len(part.token_ids) for found in answered for part in found.drawn)
        return dumps(self.answer(KIND, choices=choices, usage=self.usage(drawn)))

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """The events of a stream."""
        drawn = [0] * (len(self.prompts) * self.n)
        scores = await self.scores()
        sources = [
            parts(self.gateway, self.model, prompt.ids, self.nth(prompt, j), self.deadline)
            for prompt in self.prompts
            for j in range(self.n)
        ]
        size = self.numbers * NUMBER_BYTES
        begun: set[int] = set()
        async with aclosing(drawn_together(self.gateway, sources)) as found:
            async for index, part in found:
                prompt, its = self.prompts[index // self.n], scores[index // self.n]
                first = index not in begun
                begun.add(index)
                choice = await self.beside(size, self.choice, index, prompt, its, part, first)
                drawn[index] += len(part.token_ids)
                used = self.usage_of_chunk(len(prompt.ids), drawn[index])
                yield self.answer(KIND, choices=[choice], **used)
        if self.tells_usage:
            yield self.answer(KIND, choices=[], usage=self.usage(sum(drawn)))


def _with_texts(
    words: Words, given: Sequence[str | list[int]], ids: Sequence[list[int]]
) -> list[Prompt]:
    """Prompts and their texts, of which those that were given as ids have theirs."""
    texts = (each if isinstance(each, str) else words.decode(each) for each in given)
    return list(map(Prompt, ids, texts))


@router.post(
    "/v1/completions",
    responses={**ASKING, 200: {"model": Completion, "content": EVENTS}},
    response_class=Response,
    tags=["openai"],
)
async def completions(body: CompletionRequest, request: HttpRequest) -> Response:
    """Continue texts or token ids, and tell how likely they are."""
    gateway = gateway_of(request)
    deadline = gateway.deadline()
    model = await gateway.model(body.model, deadline)
    call = await _Completions.of(gateway, model, body, deadline)
    return await call.reply(request)
