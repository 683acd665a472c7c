"""How a continuation is drawn: the fields that completions and chats share, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeGuard, cast

from pydantic import AfterValidator, Field

from lmpool.gateway.aside import aside
from lmpool.gateway.errors import ApiError, too_long
from lmpool.gateway.pools import Model
from lmpool.gateway.schemas import Request
from lmpool.gateway.text_stops import MAX_STOP_CHARACTERS, MAX_STOPS, StopTexts
from lmpool.gateway.words import SHORT, Words
from lmpool.wants import Generate, Stream

MAX_ID: Final = 2**31 - 1
TOKEN_ID: Final = "token-id"
"""The format of ids in the description, whose bound is that of the vocabularies."""
MAX_SEED: Final = 2**63 - 1
MAX_EOS: Final = 128
MAX_HINTS: Final = 32
"""Stop texts that a worker is told as tokens; all of them are looked for in the text."""
MAX_HINT_TOKENS: Final = 16

Id = Annotated[int, Field(ge=0, le=MAX_ID, json_schema_extra={"format": TOKEN_ID})]
MAX_PROMPT_IDS: Final = 1 << 20
"""Of a prompt, whatever a model takes."""


def _let_others_on(ids: list[int]) -> list[int]:
    return ids  # as Python does between two calls of its own, and pydantic never


Ids = Annotated[
    list[Id], Field(max_length=MAX_PROMPT_IDS, fail_fast=True), AfterValidator(_let_others_on)
]
"""The first wrong one says enough: of millions, what is said of each would fill the memory."""
MAX_PROMPTS: Final = 65_536
"""Of a request, whatever a gateway takes."""
Prompts: TypeAlias = (
    str
    | Ids
    | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[Ids], Field(max_length=MAX_PROMPTS, fail_fast=True)]
)
"""A text or its token ids, or a list of either."""
Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[float, Field(ge=1, le=1)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopTextList = Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)]


class ResponseFormat(Request):
    """Only plain text."""

    type: Literal["text"]


class StreamOptions(Request):
    """What a stream tells besides."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def in_each(self) -> bool:
        """Whether every chunk tells its usage, so far, which is asked for beside that of all."""
        return bool(self.include_usage) and bool(self.continuous_usage_stats)


class SamplingRequest(Request):
    """Fields of a completion and of a chat alike. Those that are not supported must be neutral."""

    model: str | None = Field(None, max_length=512)
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_ID)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ID)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64)] | None = None
    stop: StopText | StopTextList | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=MAX_EOS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_ID)] | None = None
    prompt_logprobs_temperature: Annotated[float, Field(gt=0, le=1e6)] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    # What would change the meaning, and is not supported.
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    repetition_penalty: One | None = None
    length_penalty: One | None = None
    min_tokens: Annotated[int, Field(ge=0, le=0)] | None = None
    use_beam_search: Literal[False] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    allowed_token_ids: Annotated[list[Any], Field(max_length=0)] | None = None
    bad_words: Annotated[list[Any], Field(max_length=0)] | None = None
    logits_processors: Annotated[list[Any], Field(max_length=0)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    truncate_prompt_tokens: None = None
    thinking_token_budget: None = None
    guided_json: None = None
    guided_regex: None = None
    guided_choice: None = None
    guided_grammar: None = None


@dataclass(frozen=True, slots=True)
class Drawing:
    """How one continuation is drawn, and what of it is told."""

    max_tokens: int
    """As many as were asked for, but no more than behind the shortest prompt."""
    room: int
    """Tokens of a prompt and what is drawn behind it together."""
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    eos_token_ids: tuple[int, ...] | None
    stop_token_ids: frozenset[int]
    stops: StopTexts | None
    hints: tuple[tuple[int, ...], ...]
    include_stop: bool
    skip_special: bool
    logprobs: bool
    top_logprobs: int

    def generate(self) -> Generate:
        """As a want, without the stop texts."""
        return Generate(*self._fields())

    def stream(self) -> Stream:
        """As the want of a stream."""
        return Stream(*self._fields())

    def _fields(self) -> tuple[Any, ...]:
        drawn = (self.temperature, self.seed, self.top_p, self.top_k, self.min_p)
        told = (self.hints, self.logprobs, self.top_logprobs)
        return (self.max_tokens, self.eos_token_ids, *drawn, *told)

    def nth(self, number: int, prompt: int) -> Drawing:
        """That of choice `number` of a prompt of `prompt` tokens: by the seed and those that follow
        it, as far as the model's context goes."""
        seed = self.seed
        if seed is not None and self.temperature:
            seed = (seed + number) & MAX_SEED
        return replace(self, seed=seed, max_tokens=max(0, min(self.max_tokens, self.room - prompt)))


async def drawing(
    body: SamplingRequest, model: Model, max_tokens: int, top_logprobs: int | None, shortest: int
) -> Drawing:
    """What a request asks to be drawn after prompts of `shortest` tokens or more.

    Raises `ApiError`.

    `top_logprobs` None asks for no log-probabilities at all.
    """
    temperature = 1.0 if body.temperature is None else float(body.temperature)
    stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    if sum(map(len, stops)) > MAX_STOP_CHARACTERS:
        raise ApiError(
            400,
            f"stop texts of more than {MAX_STOP_CHARACTERS} characters together: send fewer",
            param="stop",
        )
    if stops and not model.words.has_text:
        raise ApiError(400, "this pool has no vocabulary: stop texts need one", param="stop")
    room = model.info.max_prompt_tokens + 1
    ends = frozenset(body.stop_token_ids or ())
    eos: tuple[int, ...] = () if body.ignore_eos else model.info.eos_token_ids
    hides = body.skip_special_tokens is not False
    return Drawing(
        max_tokens=max(0, min(max_tokens, room - shortest)),
        room=room,
        temperature=temperature,
        top_p=1.0 if body.top_p is None else float(body.top_p),
        top_k=max(0, body.top_k or 0),
        min_p=float(body.min_p or 0.0),
        # What is greedy is drawn once, whatever its seed.
        seed=_seed(body.seed) if temperature else 0,
        eos_token_ids=tuple(sorted({*eos, *ends})),
        stop_token_ids=ends,
        stops=await _stop_texts(stops),
        hints=await _hints(stops, model.words, model.words.special if hides else frozenset()),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=hides,
        logprobs=top_logprobs is not None,
        top_logprobs=min(top_logprobs or 0, model.info.vocab_size),
    )


async def _stop_texts(stops: Sequence[str]) -> StopTexts | None:
    if not stops:
        return None
    if sum(map(len, stops)) <= SHORT:
        return StopTexts(stops)
    return await aside(StopTexts, stops)


def _seed(given: int | None) -> int | None:
    """Within a want's 63 bits."""
    return None if given is None else given & MAX_SEED


async def _hints(
    stops: Sequence[str], words: Words, hidden: frozenset[int]
) -> tuple[tuple[int, ...], ...]:
    """Stop texts as tokens, where these are exactly their text: a worker then ends by itself.

    One with `hidden` tokens beside others is in no text that is told, and ends none.
    """
    found = []
    for stop in stops[:MAX_HINTS]:
        try:
            ids = await words.encode(stop, special=False, param="stop")
        except ApiError:
            return ()
        mixed = not hidden.isdisjoint(ids) and not hidden.issuperset(ids)
        spelled = b"".join(map(words.token_bytes, ids)) == stop.encode()
        if 0 < len(ids) <= MAX_HINT_TOKENS and spelled and not mixed:
            found.append(tuple(ids))
    return tuple(found)


def prompts_of(given: Prompts) -> list[str | list[int]]:
    """The prompts of a request, of which there may be one alone."""
    if isinstance(given, str):
        return [given]
    return [given] if _is_one(given) else cast("list[str | list[int]]", given)


def _is_one(prompt: list[int] | list[str] | list[list[int]]) -> TypeGuard[list[int]]:
    return bool(prompt) and isinstance(prompt[0], int)


def check_length(count: int, most: int, param: str = "prompt", *, scored: bool = False) -> None:
    """Refuse a prompt that the model, which takes `most` tokens, does not take. Raises `ApiError`.

    The last token of a text that is only `scored` needs no answer after it.
    """
    if not count:
        raise ApiError(400, "an empty prompt: at least one token is needed", param=param)
    if count > most + scored:
        raise too_long(count, most, param)


def check_bound(name: str, found: int | None, most: int) -> int:
    """A number of the request within the gateway's bound. Raises `ApiError`."""
    if found is not None and found > most:
        raise ApiError(400, f"{name}={found}: this gateway takes at most {most}", param=name)
    return found or 0
