"""The model `lmpool` of lm-evaluation-harness: likelihoods by scores, texts by continuations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar, cast

import lm_eval.models
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

import lmpool
from lmpool import Ask, PooledLM
from lmpool.errors import PromptError
from lmpool.integrations.continuing import check_stops, continue_text
from lmpool.wants import Generate, Score, TextScores

NAME: Final = "lmpool"
TARGET: Final = "lmpool.integrations.lm_eval:LmpoolLM"

T = TypeVar("T")
Pair = tuple[tuple[str, str] | None, list[int], list[int]]
"""A request's texts, if it has any, and the token ids of context and continuation."""

_DRAWN: Final = {"do_sample", "temperature", "top_p", "top_k", "min_p", "seed"}
_NEUTRAL: Final[dict[str, object]] = {
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "use_cache": True,
}
"""What `hf` hands to transformers and a pool does not have, with what asks for nothing."""


def register() -> None:
    """Make the name `lmpool` known to an lm-evaluation-harness that reads no entry points."""
    assert lm_eval.models.MODEL_MAPPING  # whose import registers the models that come with it
    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)


class LmpoolLM(TemplateLM):  # type: ignore[misc]
    """A pool's model as lm-evaluation-harness asks one, with the results of its own `hf`.

    Log-likelihoods are one score a request, of a few bytes a token. Texts that are longer than
    `max_length` are cut from the left as `hf` cuts them: up to `max_length` + 1 tokens are taken,
    of which the last is only a target. A continuation is greedy where each of its tokens is the
    likeliest, and of equally likely ones the first. Normalization is in float32, as that of `hf`
    with ``softmax_dtype=float32`` is.

    Args:
        lm: a client, which the caller closes; without one, `url`, `pool` and whatever else
            `lmpool.connect` takes make one, or the variables ``LMPOOL_URL`` and ``LMPOOL_POOL``.
            (The harness writes its model arguments into its results: have a password in the
            variable.)
        lora_name: the adapter to evaluate.
        max_length: tokens that are taken in at most, by default the pool's longest prompt.
        max_gen_toks: tokens of a text where a task says nothing.
        add_bos_token: whether texts begin with the BOS token; None is as the tokenizer has it.
        prefix_token_id: what stands before a text without a context; by default BOS, else EOS.
        seed: of texts that are drawn; each request has its own, by its number.
        in_flight: requests that are asked at once.
        batch_size, max_batch_size, device: of no consequence, as workers make the batches.

    Raises `PromptError` for values that cannot be, and what `lmpool.connect` raises.
    """

    def __init__(
        self,
        lm: PooledLM[Any] | None = None,
        url: str | None = None,
        pool: str | None = None,
        lora_name: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        seed: int = 1234,
        in_flight: int = 256,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if lm is None:
            # Rows travel nowhere here.
            lm = lmpool.connect(url, pool, framework="numpy", **options)
        elif url is not None or pool is not None or options:
            named = ", ".join(sorted(options)) or "url and pool"
            raise PromptError(f"{named} beside lm: the client is connected, leave them out")
        if not isinstance(lm, PooledLM):
            raise TypeError(f"a PooledLM is needed, not {type(lm).__name__}: see lmpool.connect")
        longest = lm.info.max_prompt_tokens
        self.max_length = _within("max_length", max_length, longest, 1, longest)
        self.max_gen_toks = _within("max_gen_toks", max_gen_toks, 256, 1, 1 << 30)
        self._in_flight = _within("in_flight", in_flight, 256, 1, 1 << 20)
        self._seed = _within("seed", seed, 1234, 0, 1 << 62)
        self._lm = lm
        self._lora_name = lora_name
        self.tokenizer: Any = lm.tokenizer
        self.add_bos_token = add_bos_token
        self.custom_prefix_token_id = prefix_token_id
        self.batch_size = batch_size
        del max_batch_size, device

    # --- tokens --------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        found = self.tokenizer.eos_token_id
        if found is None:
            raise PromptError(f"{self._lm.info.model} has no EOS token: set prefix_token_id")
        return int(found)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        if self.custom_prefix_token_id is not None:
            return self.custom_prefix_token_id
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """What requests that were built with this tokenizer are cached under."""
        return f"{self.tokenizer.name_or_path}--{self._lm.info.fingerprint8}".replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """A text as token ids, without a second BOS where the text begins with it."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and has_bos_prefix(
            string, self.tokenizer.decode([self.prefix_token_id])
        ):
            special = False
        given = {} if special is None else {"add_special_tokens": special}
        return list(self.tokenizer.encode(string, verbose=False, **given))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text, by the model's own chat template."""
        if self.tokenizer.chat_template is None:
            raise PromptError(
                f"{self._lm.info.model} has no chat template: evaluate it without "
                "--apply_chat_template"
            )
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    # --- likelihoods ---------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether it is the greedy one."""
        asked = [self._text(context, continuation) for _, context, continuation in requests]
        asks = (Ask(ids, Score(start, 1), self._lora_name) for ids, start in asked)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Scores of the pool")
        with bar:
            for number, scores in self._lm.sync.ask_iter(asks, in_flight=self._in_flight):
                assert isinstance(scores, TextScores)
                assert scores.top_logprobs is not None
                ids, start = asked[number]
                likeliest = scores.top_logprobs.token_ids[:, 0].tolist()
                found[number] = (scores.total, likeliest == ids[start:])
                texts = requests[number][0]
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, found[number])
                bar.update()
        return found

    def _text(self, context: list[int], continuation: list[int]) -> tuple[list[int], int]:
        """What is asked, and from where on it is scored."""
        if not context or not 0 < len(continuation) <= self.max_length:
            raise PromptError(
                f"a context of {len(context)} tokens and a continuation of {len(continuation)}: "
                f"at least one of each, and a continuation of at most max_length="
                f"{self.max_length}, is needed"
            )
        ids = [*context, *continuation][-(self.max_length + 1) :]
        return ids, len(ids) - len(continuation)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of each text, by windows where it is longer than the model takes."""
        windows: list[Pair] = []
        counts = []
        for request in requests:
            (text,) = request.args
            parts: Iterable[tuple[list[int], list[int]]] = map(
                make_disjoint_window,
                get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                ),
            )
            mine = [(None, context, continuation) for context, continuation in parts]
            counts.append(len(mine))
            windows += mine
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = []
        for request, count in zip(requests, counts, strict=True):
            total = sum(next(scores)[0] for _ in range(count))
            totals.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # --- texts ---------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """A continuation of each context, up to the first text of its ``until``."""
        made = [self._continuation(number, *each.args) for number, each in enumerate(requests)]
        found = [""] * len(made)
        bar = tqdm(total=len(made), disable=disable_tqdm, desc="Texts of the pool")

        async def read(number: int) -> None:
            ids, want, stop = made[number]
            text = await continue_text(self._lm, ids, want, stop, self._lora_name)
            found[number] = text.text
            self.cache_hook.add_partial("generate_until", requests[number].args, text.text)
            bar.update()

        with bar:
            _run(lambda: _each(read, len(made), self._in_flight))
        return found

    def _continuation(
        self, number: int, context: str, given: dict[str, Any]
    ) -> tuple[list[int], Generate, list[str]]:
        """What is asked for one request."""
        told = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        stop = check_stops(told.pop("until", None))
        count = int(cast(int, told.pop("max_gen_toks")))
        unknown = {
            name: value
            for name, value in told.items()
            if name not in _DRAWN and value is not None and value != _NEUTRAL.get(name, _DRAWN)
        }
        if unknown:
            raise PromptError(
                f"{', '.join(f'{name}={value!r:.40}' for name, value in unknown.items())}: a pool "
                f"knows {', '.join(sorted(_DRAWN))}, until and max_gen_toks; leave the rest out"
            )
        room = self.max_length - count
        if room < 1:
            raise PromptError(
                f"max_gen_toks={count}: less than max_length={self.max_length} is needed"
            )
        temperature = float(cast(float, told.get("temperature", 1.0))) if told["do_sample"] else 0.0
        seed = told.get("seed")
        want = Generate(
            count,
            temperature=temperature,
            seed=(self._seed if seed is None else int(cast(int, seed))) + number,
            top_p=cast(float, told.get("top_p") or 1.0),
            top_k=cast(int, told.get("top_k") or 0),
            min_p=cast(float, told.get("min_p") or 0.0),
        )
        return self.tok_encode(context)[-room:], want, stop


def _within(name: str, given: object, default: int, least: int, most: int) -> int:
    """A whole number, or a text of one, as the command line gives it. Raises `PromptError`."""
    if given is None:
        return default
    found = given
    if isinstance(given, str) and given.isdecimal():
        found = int(given)
    if type(found) is not int or not least <= found <= most:
        raise PromptError(f"{name}={given!r:.40}: write an integer from {least} to {most}")
    return found


async def _each(work: Callable[[int], Coroutine[Any, Any, None]], count: int, at_once: int) -> None:
    """Do it for every number below `count`, so many at once; the first failure ends the rest."""
    numbers = iter(range(count))

    async def several() -> None:
        for number in numbers:
            await work(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(count, at_once)):
            group.create_task(several())


def _run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run it to its end, also where an event loop runs in this thread, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _first_failure(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_first_failure, work).result()


def _first_failure(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    try:
        return asyncio.run(work())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
