"""One request's prompts: what is asked of the pool for them, and what came of it.

Completions and chats differ in how they are read and written, and share this.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, ParamSpec, TypeVar

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lmpool.gateway.aside import aside
from lmpool.gateway.drawing import Part, parts, together, told
from lmpool.gateway.errors import ApiError
from lmpool.gateway.first_token import FirstToken
from lmpool.gateway.json_parts import Raw
from lmpool.gateway.merging import gathered
from lmpool.gateway.pools import Model
from lmpool.gateway.prompt_logprobs_json import prompt_logprobs
from lmpool.gateway.responding import respond
from lmpool.gateway.sampling import Drawing, SamplingRequest, check_bound, check_length
from lmpool.gateway.sse import event_stream
from lmpool.gateway.state import Gateway
from lmpool.producer.deadline import Deadline
from lmpool.wants import Score, TextScores, TopLogprobs

P = ParamSpec("P")
T = TypeVar("T")

NUMBER_BYTES: Final = 48
"""What one log-probability takes as JSON, about."""
TOKEN_BYTES: Final = 8
"""What one token takes, as its id or as text, about."""
FEW_BYTES: Final = 5000 * NUMBER_BYTES
"""Of JSON, that are written without leaving the event loop to others."""
OBJECT_BYTES: Final = 512
"""What it takes where it is an object of Python's first."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, and its text where that is told again.

    Each of its choices tells it: it becomes JSON once for all of them.
    """

    ids: list[int]
    text: str = ""

    @cached_property
    def ids_json(self) -> Raw:
        """Its ids as a list."""
        return Raw(orjson.dumps(self.ids))

    @cached_property
    def text_json(self) -> bytes:
        """Its text as the beginning of a string, without what quotes it."""
        return json.dumps(self.text).encode()[1:-1]

    def with_text(self, text: str) -> Raw:
        """Its text and what was drawn after it, as one string."""
        return Raw(b'"%b%b' % (self.text_json, json.dumps(text).encode()[1:]))


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt's scores, where they were asked for and it has more than one token, and what was
    drawn after it, `n` times."""

    scores: TextScores | None
    drawn: list[Part]


class Call(ABC):
    """The prompts of a request, each of which goes on `n` times."""

    def __init__(
        self,
        gateway: Gateway,
        model: Model,
        body: SamplingRequest,
        deadline: Deadline,
        prefix: str,
    ) -> None:
        self.gateway = gateway
        self.model = model
        self.body = body
        self.deadline = deadline
        self.prompts: list[Prompt] = []
        self.n = check_bound("n", 1 if body.n is None else body.n, gateway.options.max_n)
        self.drawing: Drawing
        self.score_tops: int | None = None
        """How many of the likeliest are needed at each position of the prompts; None: no scores."""
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)

    def usage_of_chunk(self, read: int, drawn: int) -> dict[str, Any]:
        """What a chunk says of usage: that of its choice so far, where it is asked for in each."""
        options = self.body.stream_options
        if options is None or not options.include_usage:
            return {}
        return {"usage": tokens_used(read, drawn) if options.in_each else None}

    def check_tops(self, name: str, found: int | None) -> None:
        """Refuse more of the likeliest than there may be. Raises `ApiError`."""
        check_bound(name, found, self.gateway.options.max_logprobs)

    def scored(self, tops: int) -> None:
        """Have prompts scored, with at least so many of the likeliest."""
        tops = min(tops, self.model.info.vocab_size)
        self.score_tops = max(tops, self.score_tops or 0)

    def check_count(self, count: int) -> None:
        """Refuse more prompts than there may be, or none. Raises `ApiError`."""
        most = self.gateway.options.max_prompts
        if not count:
            raise ApiError(400, "an empty list of prompts: send one or more", param="prompt")
        if count * self.n > most:
            raise ApiError(
                400,
                f"{count} prompts times n={self.n}: this gateway takes at most {most} at once; "
                "send them in parts",
                param="prompt",
            )

    def check_prompts(self, prompts: Sequence[Prompt], drawn: int, param: str = "prompt") -> None:
        """Take these prompts, or refuse them, after each of which `drawn` tokens are asked for.

        Raises `ApiError`.
        """
        most = self.model.info.max_prompt_tokens
        for prompt in prompts:
            check_length(len(prompt.ids), most, param, scored=drawn == 0)
        self.prompts = list(prompts)

    @property
    def numbers(self) -> int:
        """How many log-probabilities the answer has at most."""
        if self.score_tops is None and not self.drawing.logprobs:
            return 0
        k = max(self.score_tops or 0, self.drawing.top_logprobs)
        tokens = sum(len(p.ids) + self.drawing.max_tokens for p in self.prompts)
        return self.n * tokens * (k + 1)

    @property
    def tokens(self) -> int:
        """How many are drawn at most."""
        return self.n * len(self.prompts) * self.drawing.max_tokens

    @property
    def told_bytes(self) -> int:
        """Of the prompts as JSON, which each of their choices tells."""
        texts = sum(len(prompt.text_json) for prompt in self.prompts)
        if not self.body.return_token_ids:
            return self.n * texts
        return self.n * (texts + sum(len(prompt.ids_json.data) for prompt in self.prompts))

    async def check_size(self) -> None:
        """Refuse what would be too long an answer. Raises `ApiError`."""
        told = await self.beside(self._told_characters, lambda: self.told_bytes)
        ids = TOKEN_BYTES * self.tokens if self.body.return_token_ids else 0
        check_bytes(self.numbers * NUMBER_BYTES + told + ids, self.gateway)

    @property
    def _told_characters(self) -> int:
        """Of the prompts, about, each of them once."""
        return sum(TOKEN_BYTES * len(prompt.ids) + len(prompt.text) for prompt in self.prompts)

    # --- asking --------------------------------------------------------------------------------

    async def answered(self) -> list[Answered]:
        """What came of each prompt. Raises `ApiError`."""
        if self.drawing.stops is not None and self.drawing.max_tokens:
            asked: list[Awaitable[list[Any]]] = [self.scores(), self._drawn_to_stops()]
            scores, drawn = await gathered(asked)
            return [Answered(s, d) for s, d in zip(scores, drawn, strict=True)]
        first = self._first_token()
        if first is not None:
            return [Answered(s, [p] * self.n) for s, p in await first.answered(self.prompts)]
        return await self._all_at_once()

    async def scores(self) -> list[TextScores | None]:
        """Of each prompt, where they are asked for."""
        asks = [(p.ids, self._score()) for p in self.prompts if self._is_scored(p)]
        found = iter(await self.gateway.answers(self.model, asks, self.deadline) if asks else ())
        return [next(found) if self._is_scored(p) else None for p in self.prompts]

    def _is_scored(self, prompt: Prompt) -> bool:
        return self.score_tops is not None and len(prompt.ids) > 1

    def _score(self) -> Score:
        return Score(1, self.score_tops or 0, None, self._score_temperature)

    @property
    def _score_temperature(self) -> float:
        return float(self.body.prompt_logprobs_temperature or 1.0)

    def _first_token(self) -> FirstToken | None:
        """How the one token that is asked for comes with the scores, where it can."""
        if self.score_tops is None or self._score_temperature != 1 or self.n > 1:
            return None
        return FirstToken.of(self.gateway, self.model, self.drawing, self.score_tops, self.deadline)

    async def _drawn_to_stops(self) -> list[list[Part]]:
        turns = self.gateway.turns()
        asked = [self._to_stop(p, j, turns) for p in self.prompts for j in range(self.n)]
        drawn = await gathered(asked)
        return [drawn[i * self.n : (i + 1) * self.n] for i in range(len(self.prompts))]

    def nth(self, prompt: Prompt, number: int) -> Drawing:
        """How choice `number` of a prompt is drawn."""
        return self.drawing.nth(number, len(prompt.ids))

    async def _to_stop(self, prompt: Prompt, number: int, turns: asyncio.Semaphore) -> Part:
        drawing = self.nth(prompt, number)
        async with turns:
            asked = parts(self.gateway, self.model, prompt.ids, drawing, self.deadline)
            return together([part async for part in asked])

    async def _all_at_once(self) -> list[Answered]:
        """One call for all scores and continuations. What is greedy is drawn once a prompt."""
        asks: list[tuple[Sequence[int], Any]] = []
        different = self.n if self.drawing.temperature else 1
        draws = different if self.drawing.max_tokens else 0
        for prompt in self.prompts:
            if self._is_scored(prompt):
                asks.append((prompt.ids, self._score()))
            asks += [(prompt.ids, self.nth(prompt, j).generate()) for j in range(draws)]
        found = iter(await self.gateway.answers(self.model, asks, self.deadline) if asks else ())
        return await self.beside(TOKEN_BYTES * self.tokens, self._told, found, draws)

    def _told(self, found: Iterator[Any], draws: int) -> list[Answered]:
        """What is told of a pool's answers, of which `draws` of each prompt are continuations."""
        answered = []
        for prompt in self.prompts:
            scores = next(found) if self._is_scored(prompt) else None
            drawn = [told(self.model.words, self.drawing, next(found)) for _ in range(draws)]
            drawn = drawn or [Part("", [], finish_reason="length")]
            answered.append(Answered(scores, (drawn * self.n)[: self.n]))
        return answered

    # --- telling -------------------------------------------------------------------------------

    @abstractmethod
    def whole(self, answered: list[Answered]) -> bytes:
        """The answer as JSON."""

    @abstractmethod
    def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """The events of a stream."""

    async def reply(self, request: HttpRequest) -> Response:
        """The answer, or the stream where that was asked for. Raises `ApiError`."""
        if self.body.stream:
            return await event_stream(self.chunks())
        size = self.numbers * NUMBER_BYTES + self.told_bytes + TOKEN_BYTES * self.tokens
        content = await self.beside(size, self.whole, await self.answered())
        return await respond(request, content, "application/json")

    async def beside(
        self, size: int, write: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What `write` makes of about so many bytes; where these are many, the event loop serves
        others meanwhile."""
        if size <= FEW_BYTES:
            return write(*args, **kwargs)
        return await aside(write, *args, **kwargs)

    def of_prompt(self, prompt: Prompt, scores: TextScores | None) -> dict[str, Any]:
        """What is told of a prompt, where it was asked for."""
        found: dict[str, Any] = {}
        if self.body.prompt_logprobs is not None:
            cut = with_tops(scores, self.body.prompt_logprobs)
            found["prompt_logprobs"] = Raw(prompt_logprobs(self.model.words, prompt.ids, cut))
        if self.body.return_token_ids:
            found["prompt_token_ids"] = prompt.ids_json
        return found

    def usage(self, drawn: int) -> dict[str, int]:
        """Tokens: a prompt counts once, whatever `n`."""
        read = sum(len(prompt.ids) for prompt in self.prompts)
        return tokens_used(read, drawn)

    def answer(self, kind: str, **fields: Any) -> dict[str, Any]:
        """What every answer and every chunk begins with."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            **fields,
        }


def tokens_used(read: int, drawn: int) -> dict[str, int]:
    """Tokens that were read and drawn, as answers have them."""
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


def check_bytes(size: int, gateway: Gateway) -> None:
    """Refuse an answer of about so many bytes where that is too long. Raises `ApiError`."""
    if size > 2 * gateway.options.max_response_bytes:
        raise ApiError(
            413,
            f"an answer of about {size} bytes: ask for fewer prompts, choices or log-probabilities "
            "at once",
        )


def with_tops(scores: TextScores | None, k: int) -> TextScores | None:
    """Scores with the `k` likeliest, of those with more."""
    if scores is None or scores.top_logprobs is None:
        return scores
    top = scores.top_logprobs
    cut = None
    if k:
        cut = TopLogprobs(top.token_ids[:, :k], top.logprobs[:, :k], top.rest)
    return TextScores(scores.logprobs, scores.ranks, cut)
