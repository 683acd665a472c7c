"""inspect_ai on a pool: models called ``lmpool/POOL``, with exact log-probabilities.

::

    LMPOOL_URL=redis://server:6379/0 inspect eval task.py --model lmpool/llama --logprobs

inspect_ai finds the provider by its entry point. Options go into ``-M``: ``lora_name`` chooses an
adapter, ``chat_template`` stands in for the model's own, ``raw=true`` takes prompts as they are.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import numpy as np

import lmpool
from lmpool import PooledLM
from lmpool.errors import NoWorkers, PoolBusy, PoolTimeout, PromptError, ServerUnreachable
from lmpool.integrations.continuing import Continued, check_stops, continue_text
from lmpool.producer.blocking import run_blocking
from lmpool.server_url import mask_url
from lmpool.wants import FinishReason, Generate, Score, TextScores, TopLogprobs

try:
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessage,
        ChatMessageAssistant,
        GenerateConfig,
        Logprob,
        Logprobs,
        ModelAPI,
        ModelOutput,
        ModelUsage,
        TopLogprob,
        modelapi,
    )
    from inspect_ai.tool import ToolChoice, ToolInfo

    import anyio  # isort: skip -- inspect_ai brings it: without that, it is not what is missing
    import anyio.to_thread  # isort: skip
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: lmpool.integrations.inspect_ai needs inspect_ai, "
        "pip install 'lmpool[inspect-ai]'",
        name=error.name,
    ) from error

__all__ = ["LmpoolAPI"]

T = TypeVar("T")

MAX_TOKENS: Final = 2048
"""Of an answer where the evaluation says nothing."""
CONNECTIONS: Final = 100
"""Answers that are asked at once where the evaluation says nothing."""
_STOP_REASONS: Final[dict[FinishReason, str]] = {
    "eos": "stop",
    "stop": "stop",
    "length": "max_tokens",
    "context": "model_length",
}
_NOT_SERVED: Final = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": None,
    "best_of": 1,
    "response_schema": None,
}
"""What a pool does not draw by, with the value that asks for nothing."""


class LmpoolAPI(ModelAPI):  # type: ignore[misc]
    """A pool as inspect_ai asks a model.

    `logprobs`, `top_logprobs` and `prompt_logprobs` are the model's own, at temperature 1 and with
    nothing left out. `stop_seqs` end the text exactly where they begin, however tokens divide them.

    Args:
        model_name: the pool.
        base_url: the pool's server; without it ``LMPOOL_URL``, which no log shows.
        lora_name: the adapter to ask.
        chat_template: how a conversation becomes a prompt, by default as the model was taught.
        raw: take a single user message as it is, without any template. Its metadata may have
            ``prompt_token_ids``.
        **options: whatever else `lmpool.connect` takes.

    The first answer connects. Raises what `lmpool.connect` raises, and `PromptError` for what a
    pool does not do.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - as inspect_ai's own have it
        lora_name: str | None = None,
        chat_template: str | None = None,
        raw: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        self._options = options
        self._lora_name = lora_name
        self._template = chat_template
        self._raw = raw
        self._opening = threading.Lock()
        self._client: PooledLM[Any] | None = None

    @property
    def _lm(self) -> PooledLM[Any]:
        """The client, made when it is first needed: inspect_ai makes models to look at alone."""
        with self._opening:
            if self._client is None:
                given = self._options
                lm = lmpool.connect(self.base_url, self.model_name, framework="numpy", **given)
                try:
                    self._check_template(lm.tokenizer, lm.info.model)
                except BaseException:
                    lm.close()
                    raise
                self._client = lm
            return self._client

    def _check_template(self, tokenizer: Any, model: str) -> None:
        if not self._raw and (self._template or tokenizer.chat_template) is None:
            raise PromptError(
                f"{model} has no chat template: give one, -M chat_template=..., or have prompts "
                "taken as they are, -M raw=true"
            )

    # --- generation ----------------------------------------------------------------------------

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        """Answers to a conversation, `num_choices` of them."""
        _check(tools, config)
        lm = self._client
        if lm is None:
            opened: PooledLM[Any] = await anyio.to_thread.run_sync(lambda: self._lm)
            lm = opened
        ids = self._prompt(lm, input)
        most = lm.info.max_prompt_tokens
        if len(ids) > most:
            said = f"a prompt of {len(ids)} tokens: this model's maximum context length is {most}"
            return ModelOutput.from_content(self.model_name, said, "model_length", said)
        found: list[Continued | None] = [None] * (config.num_choices or 1)
        prompt: list[Logprobs | None] = [None]

        async def draw(number: int) -> None:
            want = _want(config, number)
            stop = check_stops(config.stop_seqs)
            found[number] = await _waited(
                lambda: continue_text(lm, ids, want, stop, self._lora_name)
            )

        async def score(k: int) -> None:
            prompt[0] = await self._prompt_logprobs(ids, k)

        try:
            async with anyio.create_task_group() as group:
                for number in range(len(found)):
                    group.start_soon(draw, number)
                if config.prompt_logprobs is not None and len(ids) > 1:
                    group.start_soon(score, config.prompt_logprobs)
        except ExceptionGroup as several:  # as one alone, too, which decides whether to retry
            raise several.exceptions[0] from None
        drawn = [each for each in found if each is not None]
        output = sum(len(each.token_ids) for each in drawn)
        return ModelOutput(
            model=self.model_name,
            choices=[self._choice(each, config, prompt[0]) for each in drawn],
            usage=ModelUsage(
                input_tokens=len(ids), output_tokens=output, total_tokens=len(ids) + output
            ),
        )

    def _prompt(self, lm: PooledLM[Any], messages: list[ChatMessage]) -> list[int]:
        if self._raw:
            if len(messages) != 1 or messages[0].role != "user":
                raise PromptError(
                    f"{len(messages)} messages: with raw=true a prompt is one message of the user's"
                )
            given = (messages[0].metadata or {}).get("prompt_token_ids")
            return list(given) if given is not None else lm.encode(messages[0].text)
        for message in messages:
            if not isinstance(message.content, str):
                kinds = {part.type for part in message.content} - {"text", "reasoning"}
                if kinds:
                    raise PromptError(f"{', '.join(sorted(kinds))}: a pool's models read text")
        tokenizer: Any = lm.tokenizer
        text = tokenizer.apply_chat_template(
            [{"role": message.role, "content": message.text} for message in messages],
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=True,
        )
        return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))

    async def _prompt_logprobs(self, ids: list[int], k: int) -> Logprobs:
        want = Score(1, k if k > 1 else 0)
        scores: TextScores = await _waited(lambda: self._lm.ask(ids, want, self._lora_name))
        content = []
        for at, (token, logprob) in enumerate(zip(ids[1:], scores.logprobs.tolist(), strict=True)):
            others = _top(scores.top_logprobs, at)
            content.append(self._logprob(token, logprob, [o for o in others if o[0] != token]))
        return Logprobs(content=content)

    def _choice(
        self, drawn: Continued, config: GenerateConfig, prompt: Logprobs | None
    ) -> ChatCompletionChoice:
        logprobs = None
        if drawn.logprobs is not None:
            # The EOS token is none of the answer's.
            count = len(drawn.token_ids) - (drawn.finish_reason == "eos")
            logprobs = Logprobs(
                content=[
                    self._logprob(token, logprob, _top(drawn.top_logprobs, at))
                    for at, (token, logprob) in enumerate(
                        zip(drawn.token_ids[:count], drawn.logprobs[:count].tolist(), strict=True)
                    )
                ]
            )
        return ChatCompletionChoice(
            message=ChatMessageAssistant(
                content=drawn.text, model=self.model_name, source="generate"
            ),
            stop_reason=_STOP_REASONS[drawn.finish_reason],
            logprobs=logprobs,
            prompt_logprobs=prompt,
        )

    def _logprob(self, token: int, logprob: float, top: list[tuple[int, float]]) -> Logprob:
        text, data = self._token(token)
        others = [
            TopLogprob(token=name, logprob=value, bytes=given)
            for (name, given), value in ((self._token(other), value) for other, value in top)
        ]
        return Logprob(token=text, logprob=logprob, bytes=data, top_logprobs=others or None)

    def _token(self, token: int) -> tuple[str, list[int]]:
        vocabulary = self._lm.byte_vocab
        data = bytes(vocabulary[token]) if token < len(vocabulary) else b""
        return data.decode("utf-8", "replace"), list(data)

    # --- what inspect_ai asks besides ----------------------------------------------------------

    async def tokenize(self, text: str) -> list[int]:
        """A text as token ids."""
        return self._lm.encode(text)

    async def count_text_tokens(self, text: str) -> int:
        """How many tokens a text has, without those that a model wants around it."""
        return len(self._lm.encode(text, bos=False))

    def max_tokens(self) -> int | None:
        """Of an answer where the evaluation says nothing."""
        return MAX_TOKENS

    def max_connections(self) -> int:
        """Answers that are asked at once where the evaluation says nothing."""
        return CONNECTIONS

    def connection_key(self) -> str:
        """What bounds the answers asked at once: the pool."""
        return f"{mask_url(self.base_url or '')} {self.model_name}"

    def should_retry(self, ex: Exception) -> bool:
        """Whether it may be different later: no worker, no server, no room, no time."""
        return isinstance(ex, NoWorkers | PoolBusy | PoolTimeout | ServerUnreachable)

    def close(self) -> None:
        """End the client, if there is one."""
        with self._opening:
            if self._client is not None:
                self._client.close()


@modelapi(name="lmpool")  # type: ignore[untyped-decorator]
def lmpool_provider() -> type[ModelAPI]:
    """The provider, under the name by which inspect_ai knows it."""
    return LmpoolAPI


def _check(tools: list[ToolInfo], config: GenerateConfig) -> None:
    if tools:
        raise PromptError(f"{len(tools)} tools: a pool calls none; evaluate without them")
    for name, nothing in _NOT_SERVED.items():
        given = getattr(config, name)
        if given is not None and given != nothing:
            raise PromptError(f"{name}={given!r:.60}: a pool does not draw by it; leave it out")


def _want(config: GenerateConfig, number: int) -> Generate:
    return Generate(
        MAX_TOKENS if config.max_tokens is None else config.max_tokens,
        temperature=1.0 if config.temperature is None else config.temperature,
        seed=None if config.seed is None else config.seed + number,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=config.top_k or 0,
        logprobs=bool(config.logprobs),
        top_logprobs=(config.top_logprobs or 0) if config.logprobs else 0,
    )


def _top(top: TopLogprobs | None, at: int) -> list[tuple[int, float]]:
    if top is None:
        return []
    ids, logprobs = np.asarray(top.token_ids[at]), np.asarray(top.logprobs[at])
    return list(zip(ids.tolist(), logprobs.tolist(), strict=True))


async def _waited(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Wait for the pool, in a thread where the evaluation runs in trio's loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        found: T = await anyio.to_thread.run_sync(lambda: run_blocking(work()))
        return found
    return await work()
