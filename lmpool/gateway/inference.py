"""``/inference/v1/generate``: token ids in, token ids out, as vLLM 0.32 has it."""

from __future__ import annotations

import asyncio
import base64
import io
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lmpool.gateway.aside import aside
from lmpool.gateway.calls import OBJECT_BYTES, TOKEN_BYTES, check_bytes, tokens_used
from lmpool.gateway.drawing import Part, drawn_together, parts, together
from lmpool.gateway.errors import ASKING, ApiError
from lmpool.gateway.json_parts import Raw, dumps
from lmpool.gateway.logprobs import finite
from lmpool.gateway.merging import gathered
from lmpool.gateway.pools import Model
from lmpool.gateway.prompt_logprobs_json import prompt_logprobs
from lmpool.gateway.responding import respond
from lmpool.gateway.sampling import (
    MAX_PROMPT_IDS,
    Drawing,
    Id,
    SamplingRequest,
    StreamOptions,
    check_bound,
    check_length,
    drawing,
)
from lmpool.gateway.schemas import Answer, JsonRoute, Request
from lmpool.gateway.sse import EVENTS, event_stream
from lmpool.gateway.state import Gateway, gateway_of
from lmpool.producer.deadline import Deadline
from lmpool.wants import Score, TextScores
from lmpool.wants.position_ids import MAX_TOKEN_IDS

router = APIRouter(route_class=JsonRoute)

PAD: Final = -1
"""Stands for no id in a row of ``prompt_logprob_token_ids``, and scores -inf."""
MAX_LOGPROB_IDS: Final = 128
"""Ids of ``logprob_token_ids``, as vLLM has it."""

PaddedId = Annotated[int, Field(ge=PAD, le=2**31 - 1)]


class SamplingParams(SamplingRequest):
    """vLLM's. Those that are not supported must be neutral."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    prompt_logprob_token_ids: (
        Annotated[
            list[Annotated[list[PaddedId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]],
            Field(min_length=1, max_length=MAX_TOKEN_IDS, fail_fast=True),
        ]
        | None
    ) = None
    prompt_logprob_start: Annotated[int, Field(ge=0)] | None = None
    logprob_token_ids: (
        Annotated[list[Id], Field(min_length=1, max_length=MAX_LOGPROB_IDS, fail_fast=True)] | None
    ) = None
    detokenize: bool | None = None
    extra_args: Annotated[dict[str, Any], Field(max_length=0)] | None = None


class GenerateRequest(Request):
    """A prompt's token ids, and how they are continued."""

    request_id: str | None = Field(None, max_length=256)
    token_ids: Annotated[list[Id], Field(min_length=1, max_length=MAX_PROMPT_IDS, fail_fast=True)]
    sampling_params: SamplingParams
    model: str | None = Field(None, max_length=512)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] | None = None
    # What this gateway has nothing of.
    features: None = None
    content_parts: Annotated[list[Any], Field(max_length=0)] | None = None
    kv_transfer_params: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    ec_transfer_params: Annotated[dict[str, Any], Field(max_length=0)] | None = None


class GenerateChoice(Answer):
    """One continuation."""

    index: int
    finish_reason: str | None
    token_ids: list[int] | None


class GenerateResponse(Answer):
    """Continuations of a prompt; `prompt_token_id_logprobs` is a .npy file in base64."""

    request_id: str
    output_mode: str
    choices: list[GenerateChoice]
    prompt_token_id_logprobs: str | None


class _Call:
    """One request, checked."""

    def __init__(
        self, gateway: Gateway, model: Model, body: GenerateRequest, deadline: Deadline
    ) -> None:
        self._gateway = gateway
        self._model = model
        self.body = body
        self._params = body.sampling_params
        self._deadline = deadline
        self.ids = body.token_ids
        self.n = 1
        self.drawing: Drawing
        self._rows: npt.NDArray[np.int64] | None = None
        self.id = f"generate-tokens-{body.request_id or uuid.uuid4().hex}"
        self.text_mode = body.output_mode == "text"

    async def check(self) -> None:
        """Refuse what cannot be answered. Raises `ApiError`."""
        params, options, info = self._params, self._gateway.options, self._model.info
        self.n = check_bound("n", 1 if params.n is None else params.n, options.max_n)
        check_bound("logprobs", params.logprobs, options.max_logprobs)
        check_bound("prompt_logprobs", params.prompt_logprobs, options.max_logprobs)
        room = info.max_prompt_tokens + 1 - len(self.ids)
        most = max(1, room) if params.max_tokens is None else params.max_tokens
        check_length(len(self.ids), info.max_prompt_tokens, "token_ids", scored=most == 0)
        self._model.check_ids(self.ids, "token_ids")
        self._model.check_ids(params.logprob_token_ids or (), "logprob_token_ids")
        asked = params.logprob_token_ids
        if asked and params.logprobs is not None and params.logprobs != len(asked):
            raise ApiError(
                400,
                f"logprobs={params.logprobs} beside {len(asked)} logprob_token_ids: write as many",
                param="logprobs",
            )
        if self.text_mode and (params.detokenize is False or not self._model.words.has_text):
            raise ApiError(400, "output_mode='text' needs detokenize and a pool with a vocabulary")
        self._rows = self._id_rows()
        if self.body.stream and (self._rows is not None or params.prompt_logprobs is not None):
            raise ApiError(
                400, "log-probabilities of a prompt do not come in a stream", param="stream"
            )
        top = None if params.logprobs is None else 0 if asked else params.logprobs
        self.drawing = await drawing(params, self._model, most, top, len(self.ids))
        check_bytes(self._numbers() * OBJECT_BYTES + self._told_ids() * TOKEN_BYTES, self._gateway)

    def _numbers(self) -> int:
        """How many log-probabilities the answer has at most."""
        params, count = self._params, 0
        if self._rows is not None:
            count += self._rows.size
        if params.prompt_logprobs is not None:
            count += len(self.ids) * (1 + params.prompt_logprobs)
        if params.logprobs is not None:
            count += self.n * self.drawing.max_tokens * (1 + params.logprobs)
        return count

    def _told_ids(self) -> int:
        """How many token ids it has at most besides."""
        prompt = len(self.ids) if self.body.return_token_ids else 0
        return prompt + self.n * self.drawing.max_tokens

    def _id_rows(self) -> npt.NDArray[np.int64] | None:
        """``prompt_logprob_token_ids`` as an array [rows, ids]. Raises `ApiError`."""
        given, start = self._params.prompt_logprob_token_ids, self._params.prompt_logprob_start
        name = "prompt_logprob_token_ids"
        if given is None:
            if start is not None:
                raise ApiError(
                    400, f"prompt_logprob_start needs {name}", param="prompt_logprob_start"
                )
            return None
        width = max(map(len, given))
        if not width:
            raise ApiError(400, f"{name}: at least one id is needed", param=name)
        expected = max(0, len(self.ids) - 1 - (start or 0))
        if len(given) != expected:
            raise ApiError(
                400,
                f"{name} has {len(given)} rows, but the prompt has {expected} scored rows "
                "(prompt_len - 1 - prompt_logprob_start)",
                param=name,
            )
        if len(given) * width > MAX_TOKEN_IDS:  # one wide row fills up all others
            raise ApiError(
                400,
                f"{name} has {len(given)} rows, of up to {width} ids: {len(given) * width} together"
                f", and at most {MAX_TOKEN_IDS} are scored at once; ask in parts, by "
                "prompt_logprob_start",
                param=name,
            )
        rows = np.full((len(given), width), PAD, np.int64)
        for row, ids in zip(rows, given, strict=True):
            row[: len(ids)] = ids
        self._model.check_ids([int(rows.max())], name)
        return rows

    # --- what is asked -------------------------------------------------------------------------

    async def prompt_scores(self) -> tuple[TextScores | None, npt.NDArray[np.float32] | None]:
        """The prompt's scores, and those of the ids that were asked for. Raises `ApiError`."""
        params, rows = self._params, self._rows
        top = min(params.prompt_logprobs or 0, self._model.info.vocab_size)
        heat = float(params.prompt_logprobs_temperature or 1.0)
        scored = params.prompt_logprobs is not None and len(self.ids) > 1
        asks: list[tuple[Sequence[int], Any]] = []
        if scored:
            asks.append((self.ids, Score(1, top, None, heat)))
        if rows is not None:
            some = np.maximum(rows, 0)
            start = 1 + (self._params.prompt_logprob_start or 0)
            asks.append((self.ids, Score(start, 0, some, heat)))
        answers = await self._gateway.answers(self._model, asks, self._deadline) if asks else []
        logprobs = None
        if rows is not None:
            given = answers[-1].token_logprobs
            logprobs = np.where(rows == PAD, np.float32(-np.inf), given).astype(np.float32)
        return (answers[0] if scored else None), logprobs

    async def drawn(self) -> list[Part]:
        """Every continuation. Raises `ApiError`."""
        # What is greedy is drawn once.
        different = self.n if self.drawing.temperature else 1
        turns = self._gateway.turns()
        found = await gathered([self._one(number, turns) for number in range(different)])
        return (found * self.n)[: self.n]

    async def _one(self, number: int, turns: asyncio.Semaphore) -> Part:
        async with turns:
            return together([part async for part in self.each(number)])

    def each(self, number: int) -> AsyncGenerator[Part]:
        """One continuation as it is drawn."""
        drawn = self.drawing.nth(number, len(self.ids))
        return parts(self._gateway, self._model, self.ids, drawn, self._deadline)

    def all_together(self) -> AsyncGenerator[tuple[int, Part]]:
        """Every one with its number, as they are drawn."""
        return drawn_together(self._gateway, [self.each(number) for number in range(self.n)])

    async def at_ids(self, before: Sequence[int], part: Part) -> npt.NDArray[np.float32] | None:
        """The log-probabilities of ``logprob_token_ids`` at each token of a part, [T, ids]."""
        asked = self._params.logprob_token_ids
        if asked is None or self._params.logprobs is None or not part.token_ids:
            return None
        text = [*self.ids, *before, *part.token_ids]
        want = Score(len(text) - len(part.token_ids), 0, asked)
        (scores,) = await self._gateway.answers(
            self._model, [(text, want)], self._deadline, within=bool(self.body.stream)
        )
        found: npt.NDArray[np.float32] = scores.token_logprobs
        return found

    # --- what is told --------------------------------------------------------------------------

    def choice(
        self, index: int, part: Part, at_ids: npt.NDArray[np.float32] | None
    ) -> dict[str, Any]:
        """One choice, of the answer or of a chunk."""
        logprobs = None
        if self._params.logprobs is not None and part.logprobs is not None:
            logprobs = Raw(orjson.dumps({"content": self._content(part, at_ids)}))
        found: dict[str, Any] = {
            "index": index,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
            "token_ids": part.token_ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
            "logprobs": logprobs,
        }
        if self.text_mode:
            found["text"] = part.text
        return found

    def _content(self, part: Part, at_ids: npt.NDArray[np.float32] | None) -> list[dict[str, Any]]:
        """An entry for each token: it first, then the likeliest, or those that were asked for."""
        assert part.logprobs is not None
        content = []
        for at, token in enumerate(part.token_ids):
            number, rank = finite(part.logprobs[at]), None
            others: list[tuple[int, float, int | None]] = []
            if at_ids is not None:
                asked = self._params.logprob_token_ids or []
                pairs = zip(asked, at_ids[at].tolist(), strict=True)
                others = [(i, finite(its), None) for i, its in pairs]
            elif part.top_logprobs is not None:
                values = part.top_logprobs.logprobs[at]
                ids = part.top_logprobs.token_ids[at].tolist()
                ranks = np.searchsorted(-values, -values, side="right").tolist()
                others = [
                    (i, finite(its), its_rank)
                    for i, its, its_rank in zip(ids, values.tolist(), ranks, strict=True)
                ]
            known = next((each for each in others if each[0] == token), None)
            if known is not None:
                _, number, rank = known
            own = (token, number, rank)
            entries = [own, *(each for each in others if each[0] != token)]
            if at_ids is None:
                entries = entries[: max(1, self._params.logprobs or 0)]
            content.append({**self._entry(own), "top_logprobs": list(map(self._entry, entries))})
        return content

    def _entry(self, entry: tuple[int, float, int | None]) -> dict[str, Any]:
        token, logprob, rank = entry
        if not self.text_mode:
            return {"token_id": token, "logprob": logprob, "rank": rank}
        text = self._model.words.text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def usage(self, drawn: int) -> dict[str, int]:
        """Tokens read and drawn."""
        return tokens_used(len(self.ids), drawn)

    def head(self, **fields: Any) -> dict[str, Any]:
        """What answers and chunks have in common."""
        return {
            "request_id": self.id,
            "output_mode": "text" if self.text_mode else "tokens",
            **fields,
        }

    def answer(
        self,
        scores: TextScores | None,
        at_rows: npt.NDArray[np.float32] | None,
        drawn: Sequence[Part],
        at_ids: Sequence[npt.NDArray[np.float32] | None],
    ) -> bytes:
        """The whole answer."""
        told = None
        if self._params.prompt_logprobs is not None:
            told = Raw(prompt_logprobs(self._model.words, self.ids, scores))
        return dumps(
            self.head(
                model=self._model.name,
                created=int(time.time()),
                choices=list(map(self.choice, range(len(drawn)), drawn, at_ids)),
                usage=self.usage(sum(len(part.token_ids) for part in drawn)),
                prompt_logprobs=told,
                prompt_token_id_logprobs=None if at_rows is None else npy_base64(at_rows),
                prompt_token_ids=self.ids if self.body.return_token_ids else None,
                mm_placeholders=None,
                metrics=None,
                kv_transfer_params=None,
                ec_transfer_params=None,
            )
        )


@router.post(
    "/inference/v1/generate",
    responses={**ASKING, 200: {"model": GenerateResponse, "content": EVENTS}},
    response_class=Response,
    tags=["vllm"],
)
async def generate(body: GenerateRequest, request: HttpRequest) -> Response:
    """Continue token ids, and score given ids at every position of the prompt."""
    gateway = gateway_of(request)
    deadline = gateway.deadline()
    model = await gateway.model(body.model, deadline)
    call = _Call(gateway, model, body, deadline)
    await call.check()
    if body.stream:
        return await event_stream(_chunks(call))
    both: list[Awaitable[Any]] = [call.prompt_scores(), call.drawn()]
    (scores, at_rows), drawn = await gathered(both)
    at_ids = await gathered([call.at_ids((), part) for part in drawn])
    content = await aside(call.answer, scores, at_rows, drawn, at_ids)
    return await respond(request, content, "application/json")


async def _chunks(call: _Call) -> AsyncGenerator[dict[str, Any]]:
    """A stream's events."""
    options = call.body.stream_options
    told = options is not None and bool(options.include_usage)
    in_each = options is not None and options.in_each
    drawn: list[list[int]] = [[] for _ in range(call.n)]
    first = True
    async with aclosing(call.all_together()) as found:
        async for index, part in found:
            at_ids = await call.at_ids(drawn[index], part)
            drawn[index] += part.token_ids
            chunk = call.head(choices=[call.choice(index, part, at_ids)], usage=None)
            if first and call.body.return_token_ids:
                chunk["prompt_token_ids"] = call.ids
            if in_each:
                chunk["usage"] = call.usage(len(drawn[index]))
            first = False
            yield chunk
    if told:
        yield call.head(choices=[], usage=call.usage(sum(map(len, drawn))))


def npy_base64(array: npt.NDArray[Any]) -> str:
    """An array as `numpy.save` writes it, in base64."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()
