"""Any want of any prompt: what `PooledLM` can ask besides what genlm's models are asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Generic, Literal, TypeVar, cast, overload

import numpy as np

from lmpool.checks import is_text
from lmpool.errors import LmpoolError, PromptError, UnknownAdapter
from lmpool.keys import Priority
from lmpool.model_info import ModelInfo
from lmpool.producer.answering_lm import (
    AdapterOf,
    AnsweringLM,
    AnswerTo,
    Logprobs,
    adapter_of,
)
from lmpool.producer.asks import Ask, Asks, all_asks, check_want, each_ask
from lmpool.producer.call_options import CallOptions, Errors
from lmpool.producer.frameworks import RowT_co
from lmpool.producer.jobs import JobMaker
from lmpool.producer.stacking import Conversions
from lmpool.producer.window import Window
from lmpool.rows import EncodedRow
from lmpool.token_ids import TokenIds
from lmpool.wants import (
    Answer,
    AskedIds,
    Draw,
    Draws,
    Generate,
    Generation,
    OfPrompt,
    Reduced,
    Row,
    Score,
    StopSequences,
    TextScores,
    Tokens,
    TokenSet,
    Top,
    TopLogprobs,
    Want,
)
from lmpool.wire import Job

AnswerT = TypeVar("AnswerT", bound=Reduced)


class AskingLM(AnsweringLM[RowT_co], Generic[RowT_co]):
    """A model that a pool serves, asked for any want: see `lmpool.wants`."""

    # --- any want ------------------------------------------------------------------------------

    @overload
    async def ask(
        self, token_ids: TokenIds, want: Row, lora_name: str | None = None, *,
        timeout: float | None = None, priority: Priority | None = None,
    ) -> RowT_co: ...  # fmt: skip
    @overload
    async def ask(
        self, token_ids: TokenIds, want: OfPrompt[AnswerT], lora_name: str | None = None, *,
        timeout: float | None = None, priority: Priority | None = None,
    ) -> AnswerT: ...  # fmt: skip

    async def ask(
        self,
        token_ids: TokenIds,
        want: Want | OfPrompt[AnswerT],
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> AnswerTo[RowT_co] | AnswerT:
        """The answer to one want of one prompt.

        Raises:
            PromptError: (a ValueError) a prompt or a want that cannot be, before anything is sent.
            UnknownAdapter: (a ValueError) no adapter `lora_name`.
            PoolTimeout, NoWorkers, PoolBusy, PromptFailed, ServerError: see `lmpool.errors`.
        """
        check_want(want)
        options = self._options(timeout, priority)
        answer = await self._one(token_ids, cast(Want, want), lora_name, options)
        return await self._hand_out(answer, options)

    @overload
    async def ask_many(
        self, asks: Asks, *, errors: Literal["raise"] = "raise", timeout: float | None = None,
        priority: Priority | None = None, progress: bool = False,
    ) -> list[AnswerTo[RowT_co]]: ...  # fmt: skip
    @overload
    async def ask_many(
        self, asks: Asks, *, errors: Errors, timeout: float | None = None,
        priority: Priority | None = None, progress: bool = False,
    ) -> list[AnswerTo[RowT_co] | LmpoolError]: ...  # fmt: skip

    async def ask_many(
        self,
        asks: Asks,
        *,
        errors: Errors = "raise",
        timeout: float | None = None,
        priority: Priority | None = None,
        progress: bool = False,
    ) -> Sequence[AnswerTo[RowT_co] | LmpoolError]:
        """The answers to several asks, of any wants and adapters, in their order.

        Each ask is an `Ask`, or a pair of a prompt and a want. Equal ones are one job. With
        ``errors="raise"`` the first failure is raised, before anything is sent where a prompt or a
        want cannot be, and its `.index` says which ask it was; with ``"return"`` errors stand where
        the answers would, but for what is no ask at all. Raises what `ask` raises.
        """
        options = self._options(timeout, priority, progress, errors)
        given = all_asks(asks)
        bad: dict[int, LmpoolError] = {}

        def make(jobs: JobMaker, adapter: AdapterOf, before: Sequence[Job]) -> list[Job]:
            asked = iter(before)
            prompts = [
                next(asked).token_ids() if before and number not in bad else ask.token_ids
                for number, ask in enumerate(given)
            ]
            bad.clear()
            made = []
            for number, (ask, prompt) in enumerate(zip(given, prompts, strict=True)):
                try:
                    want = self._checked(jobs, ask.want)
                    made.append(jobs.one(prompt, want, adapter(ask.lora_name)))
                except (PromptError, UnknownAdapter) as error:
                    mine = type(error)(f"ask {number}: {error}").of(number)
                    if not options.keeps_errors:
                        raise mine from None
                    bad[number] = mine
            return made

        names = {ask.lora_name for ask in given if is_text(ask.lora_name)}
        conversions = Conversions(self._framework)
        _, answers = await self._answers(make, names, options, conversions)
        if not self._framework.is_there and any(isinstance(each, EncodedRow) for each in answers):
            try:
                await self._with_framework(options)
            except LmpoolError as error:
                if not options.keeps_errors:
                    raise
                answers = [error if isinstance(each, EncodedRow) else each for each in answers]
        left = iter(conversions.whole(answers))
        return [self._given(bad[n] if n in bad else next(left), n) for n in range(len(given))]

    async def ask_iter(
        self,
        asks: Asks,
        *,
        in_flight: int = 1024,
        ordered: bool = False,
        errors: Errors = "raise",
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> AsyncIterator[tuple[int, AnswerTo[RowT_co] | LmpoolError]]:
        """The answers to asks of any number, as they come: pairs of an ask's number and its answer.

        `asks` is gone through as answers are taken: at most `in_flight` of them are held at once,
        those that wait to be yielded among them. With `ordered` they come in the order of the asks.
        Each ask has `timeout` seconds of its own. Ending the loop withdraws what is left of it.
        """
        window = self._window(asks, in_flight, ordered, errors, timeout, priority)
        try:
            while (found := await window.next()) is not None:
                yield found
        finally:
            window.close()

    def _window(
        self,
        asks: Asks,
        in_flight: int,
        ordered: bool,
        errors: Errors,
        timeout: float | None,
        priority: Priority | None,
    ) -> Window[AnswerTo[RowT_co]]:
        def options() -> CallOptions:
            return self._options(timeout, priority, errors=errors)

        async def alone(ask: Ask, options: CallOptions) -> Answer:
            return await self._one(ask.token_ids, ask.want, ask.lora_name, options)

        async def job(ask: Ask, options: CallOptions) -> tuple[ModelInfo, Job]:
            model = await self._served((ask.lora_name,), options)
            want = self._checked(model.jobs, ask.want)
            return model.info, model.jobs.one(ask.token_ids, want, adapter_of(model, ask.lora_name))

        return Window(
            self._client, each_ask(asks), in_flight, ordered, options, job, alone, self._hand_out
        )

    # --- by name -------------------------------------------------------------------------------

    async def top_logprobs(
        self,
        token_ids: TokenIds,
        k: int = 20,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> TopLogprobs:
        """The `k` likeliest next tokens; see `TopLogprobs`. Raises what `ask` raises."""
        return await self.ask(token_ids, Top(k), lora_name, timeout=timeout, priority=priority)

    async def batch_top_logprobs(
        self,
        token_ids_list: Sequence[TokenIds],
        k: int = 20,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
        progress: bool = False,
    ) -> list[TopLogprobs]:
        """`top_logprobs` of several prompts, in their order."""
        options = self._options(timeout, priority, progress)
        _, found = await self._several(token_ids_list, Top(k), lora_name, options)
        return cast(list[TopLogprobs], found)

    async def token_logprobs(
        self,
        prompt_token_ids: TokenIds,
        token_ids: TokenIds,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> Logprobs:
        """The log-probabilities of these tokens coming next, float32 [n], in their order.

        Normalized over the whole vocabulary. Raises what `ask` raises.
        """
        want = Tokens(token_ids)
        return await self.ask(prompt_token_ids, want, lora_name, timeout=timeout, priority=priority)

    async def batch_token_logprobs(
        self,
        prompt_token_ids_list: Sequence[TokenIds],
        token_ids: TokenIds,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
        progress: bool = False,
    ) -> Logprobs:
        """`token_logprobs` after several prompts, float32 [prompts, n]."""
        options = self._options(timeout, priority, progress)
        want = Tokens(token_ids)
        info, found = await self._several(prompt_token_ids_list, want, lora_name, options)
        if not found:  # as many columns as there would be
            checked = want.checked(info)
            return np.empty((0, checked.stored_bytes(info) // 4), np.float32)
        return np.array(found, np.float32)

    async def score(
        self,
        text_token_ids: TokenIds,
        start: int = 1,
        top_logprobs: int = 0,
        token_ids: AskedIds | None = None,
        temperature: float = 1.0,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> TextScores:
        """The log-probability of each token of a text from position `start` on; see `TextScores`.

        One forward pass over the text, of what is not kept of it. `top_logprobs` and `token_ids`
        ask for more at each position, and a text may be one token longer than the longest prompt:
        see `lmpool.wants.Score`. Raises what `ask` raises.
        """
        want = Score(start, top_logprobs, token_ids, temperature)
        return await self.ask(text_token_ids, want, lora_name, timeout=timeout, priority=priority)

    async def batch_score(
        self,
        text_token_ids_list: Sequence[TokenIds],
        start: int = 1,
        top_logprobs: int = 0,
        token_ids: AskedIds | None = None,
        temperature: float = 1.0,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
        progress: bool = False,
    ) -> list[TextScores]:
        """`score` of several texts, in their order."""
        want = Score(start, top_logprobs, token_ids, temperature)
        options = self._options(timeout, priority, progress)
        _, found = await self._several(text_token_ids_list, want, lora_name, options)
        return cast(list[TextScores], found)

    async def draw(
        self,
        token_ids: TokenIds,
        n: int = 1,
        seed: int | None = None,
        temperature: float = 1.0,
        replacement: bool = True,
        allowed: TokenSet | None = None,
        excluded: TokenSet | None = None,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> Draws:
        """`n` next tokens, drawn on the worker; see `lmpool.wants.Draw`, and `Draws`.

        Raises what `ask` raises.
        """
        want = Draw(n, seed, temperature, replacement, allowed, excluded)
        return await self.ask(token_ids, want, lora_name, timeout=timeout, priority=priority)

    async def batch_draw(
        self,
        token_ids_list: Sequence[TokenIds],
        n: int = 1,
        seed: int | None = None,
        temperature: float = 1.0,
        replacement: bool = True,
        allowed: TokenSet | None = None,
        excluded: TokenSet | None = None,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
        progress: bool = False,
    ) -> list[Draws]:
        """`draw` after several prompts, in their order; that of prompt i by `seed` + i."""
        want = Draw(n, seed, temperature, replacement, allowed, excluded)
        options = self._options(timeout, priority, progress)
        _, found = await self._several(token_ids_list, want, lora_name, options)
        return cast(list[Draws], found)

    async def generate(
        self,
        token_ids: TokenIds,
        max_tokens: int = 20,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        stop: StopSequences = (),
        logprobs: bool = False,
        top_logprobs: int = 0,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> Generation:
        """A continuation, drawn on the worker; see `lmpool.wants.Generate`, and `Generation`.

        Raises what `ask` raises.
        """
        want = Generate(
            max_tokens, eos_token_ids, temperature, seed,
            top_p, top_k, min_p, stop, logprobs, top_logprobs,
        )  # fmt: skip
        return await self.ask(token_ids, want, lora_name, timeout=timeout, priority=priority)

    async def batch_generate(
        self,
        token_ids_list: Sequence[TokenIds],
        max_tokens: int = 20,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        stop: StopSequences = (),
        logprobs: bool = False,
        top_logprobs: int = 0,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
        progress: bool = False,
    ) -> list[Generation]:
        """`generate` after several prompts, in their order; that of prompt i by `seed` + i."""
        want = Generate(
            max_tokens, eos_token_ids, temperature, seed,
            top_p, top_k, min_p, stop, logprobs, top_logprobs,
        )  # fmt: skip
        options = self._options(timeout, priority, progress)
        _, found = await self._several(token_ids_list, want, lora_name, options)
        return cast(list[Generation], found)
