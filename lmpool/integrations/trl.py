"""A pool as TRL's teacher, or as whatever else asks through TRL's `VLLMClient`, without HTTP.

::

    with pool_as_server(lm):
        trainer = ServerDistillationTrainer(model="student", args=args, train_dataset=texts)

`PoolClient` has the methods of `trl.generation.vllm_client.VLLMClient` with their arguments and
results. A pool's weights are its own: those that would change them say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, NoReturn
from unittest.mock import patch

import numpy as np

from lmpool import Ask, PooledLM
from lmpool.errors import PromptError
from lmpool.integrations.continuing import (
    Continued,
    check_stops,
    continue_text,
    continued,
)
from lmpool.producer.blocking import run_blocking
from lmpool.wants import Generate, Generation, Score, TextScores

__all__ = ["PoolClient", "pool_as_server"]

Lists = dict[str, Any]
"""Lists of lists, by what they are, as TRL's client returns them."""

CONCURRENT: Final = 64
"""Completions with texts that end them, which are drawn at once."""
LOOK: Final = 5.0
"""Seconds for one look at a pool, as TRL asks for it: with a timeout of 0."""
_VLLM_CLIENT: Final = "trl.generation.vllm_client.VLLMClient"
_GENERATION: Final = frozenset(
    {"n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "logprobs", "seed", "stop",
     "stop_token_ids"}
)  # fmt: skip
_NEUTRAL: Final[Mapping[str, object]] = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "length_penalty": 1.0,
    "structured_outputs": None,
    "structured_outputs_regex": None,
    "logit_bias": None,
    "features": None,
    "ignore_eos": False,
    "best_of": 1,
}
"""What a pool does not draw by, with the values that ask for nothing."""


class PoolClient:
    """TRL's `VLLMClient` on a client of a pool.

    Args:
        lm: the client, which the caller closes.
        lora_name: the adapter to ask.
        apply_temperature: whether the teacher's log-probabilities are those at the temperature
            that the trainer gives. vLLM leaves them at 1, whatever it is given, and so does this
            client by default: the losses are those of a trainer that asks a vLLM server.
        timeout: seconds for each call.

    Raises `TypeError` for what is no `PooledLM`; its methods what `PooledLM.score` and `generate`
    raise, and `PromptError` for what a pool does not do.
    """

    def __init__(
        self,
        lm: PooledLM[Any],
        lora_name: str | None = None,
        apply_temperature: bool = False,
        timeout: float | None = None,
    ) -> None:
        if not isinstance(lm, PooledLM):
            raise TypeError(f"a PooledLM is needed, not {type(lm).__name__}: see lmpool.connect")
        self._lm = lm
        self._lora_name = lora_name
        self._apply_temperature = apply_temperature
        self._timeout = timeout
        self.model = lm.pool
        self.communicator = None

    # --- the teacher ---------------------------------------------------------------------------

    def get_sequence_logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        top_logprobs: int = 100,
        temperature: float = 1.0,
        chunk_size: int = 0,
        max_concurrent_requests: int = 4,
    ) -> Lists:
        """The teacher's log-probabilities of every token from `prompt_lengths` on, as lists.

        ``logprobs`` and ``logprob_token_ids`` [sequences, tokens, top_logprobs]: the likeliest,
        likeliest first; ``actual_logprobs`` and ``actual_token_ids`` [sequences, tokens, 1]: of the
        tokens themselves, also where they are none of those. A sequence may be one token longer
        than the pool's longest prompt. `chunk_size` and `max_concurrent_requests` are of no
        consequence, as workers make the batches.
        """
        del chunk_size, max_concurrent_requests
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        if len(sequences) != len(prompt_lengths):
            raise PromptError(
                f"{len(sequences)} sequences and {len(prompt_lengths)} prompt_lengths: write one "
                "for each"
            )
        most = min(top_logprobs, self._lm.info.vocab_size)
        heat = float(temperature) if self._apply_temperature else 1.0
        asked, asks = [], []
        for number, (ids, start) in enumerate(zip(sequences, prompt_lengths, strict=True)):
            if not 0 <= start <= len(ids):
                raise PromptError(
                    f"prompt_lengths[{number}]={start}: its sequence has {len(ids)} tokens"
                )
            if max(1, start) < len(ids):
                want = Score(max(1, start), most, temperature=heat)
                asked.append(number)
                asks.append(Ask(ids, want, self._lora_name))
        answers = dict(zip(asked, self._lm.sync.ask_many(asks, timeout=self._timeout), strict=True))
        found = [
            _of_sequence(ids, start, answers.get(number), top_logprobs)
            for number, (ids, start) in enumerate(zip(sequences, prompt_lengths, strict=True))
        ]
        names = ("logprobs", "logprob_token_ids", "actual_logprobs", "actual_token_ids")
        return {name: [each[name] for each in found] for name in names}

    # --- completions ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        features: Sequence[Any] | None = None,
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
    ) -> Lists:
        """`n` completions of each prompt, which is text or token ids, those of one together.

        ``prompt_ids`` [prompts], ``completion_ids`` [prompts * n], each with what ended it, and
        ``logprobs`` and ``logprob_token_ids`` [prompts * n, tokens, ...]: of the token itself and
        the `logprobs` likeliest, likeliest first, or None for both. They are the model's own, at
        temperature 1 and with nothing left out. `generation_kwargs` may have ``seed``, ``stop`` and
        ``stop_token_ids``, and overrides the rest.
        """
        told = _told(
            generation_kwargs, features=features, n=n, repetition_penalty=repetition_penalty,
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, max_tokens=max_tokens,
            logprobs=logprobs, structured_outputs_regex=structured_outputs_regex,
        )  # fmt: skip
        given = [self._lm.encode(each) if isinstance(each, str) else list(each) for each in prompts]
        return self._completions(given, told)

    def chat(
        self,
        messages: Sequence[Sequence[Mapping[str, Any]]],
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        max_concurrent_requests: int = CONCURRENT,
    ) -> Lists:
        """`generate` of conversations, by the model's chat template or `chat_template`.

        `tools` are written into the prompt; calls are for the caller to find in the completion.
        """
        del max_concurrent_requests
        told = _told(
            generation_kwargs, n=n, repetition_penalty=repetition_penalty, temperature=temperature,
            top_p=top_p, top_k=top_k, min_p=min_p, max_tokens=max_tokens, logprobs=logprobs,
            structured_outputs_regex=structured_outputs_regex,
        )  # fmt: skip
        tokenizer: Any = self._lm.tokenizer
        if (chat_template or tokenizer.chat_template) is None:
            raise PromptError(f"{self._lm.info.model} has no chat template: give chat_template")
        given = []
        for conversation in messages:
            if any(not isinstance(message.get("content"), str) for message in conversation):
                raise PromptError("a content that is no text: a pool's models read text")
            text = tokenizer.apply_chat_template(
                list(conversation), tools=list(tools) if tools else None,
                chat_template=chat_template, tokenize=False, add_generation_prompt=True,
                **(chat_template_kwargs or {}),
            )  # fmt: skip
            given.append(list(tokenizer.encode(text, add_special_tokens=False, verbose=False)))
        return self._completions(given, told)

    def _completions(self, prompts: Sequence[list[int]], told: Mapping[str, Any]) -> Lists:
        n, k, seed = told["n"], told["logprobs"], told.get("seed")
        if type(n) is not int or n < 1:
            raise PromptError(f"n={n!r:.40}: write an integer of 1 or more")
        stop = check_stops(told.get("stop"))
        ends = None
        if told.get("stop_token_ids"):
            ends = [*self._lm.info.eos_token_ids, *told["stop_token_ids"]]
        wants = [
            Generate(
                told["max_tokens"], ends, told["temperature"],
                None if seed is None else seed + number, told["top_p"],
                max(0, told["top_k"]), told["min_p"], logprobs=k is not None, top_logprobs=k or 0,
            )
            for number in range(len(prompts) * n)
        ]  # fmt: skip
        found = self._drawn([ids for ids in prompts for _ in range(n)], wants, stop)
        ranked = None if k is None else [_ranked(each) for each in found]
        return {
            "prompt_ids": list(prompts),
            "completion_ids": [each.token_ids for each in found],
            "logprobs": None if ranked is None else [values for values, _ in ranked],
            "logprob_token_ids": None if ranked is None else [ids for _, ids in ranked],
        }

    def _drawn(
        self, prompts: Sequence[list[int]], wants: Sequence[Generate], stop: Sequence[str]
    ) -> list[Continued]:
        """The completion of each prompt."""
        if not stop:
            asks = [
                Ask(ids, want, self._lora_name) for ids, want in zip(prompts, wants, strict=True)
            ]
            whole = self._lm.sync.ask_many(asks, timeout=self._timeout)
            return [continued(self._lm, each) for each in whole if isinstance(each, Generation)]

        def draw(ids: list[int], want: Generate) -> Continued:
            return run_blocking(
                continue_text(self._lm, ids, want, stop, self._lora_name, self._timeout)
            )

        with ThreadPoolExecutor(min(CONCURRENT, len(prompts)) or 1) as threads:
            return list(threads.map(draw, prompts, wants))

    # --- the server that is none ---------------------------------------------------------------

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Return once a worker is alive; raises `PoolTimeout` after `total_timeout` seconds, of 0
        after the few that one look may take."""
        del retry_interval
        self._lm.sync.wait_for_workers(total_timeout or LOOK)

    def get_server_info(self) -> dict[str, Any]:
        """What the pool serves; its ``weight_transfer_config`` is None, as no weights move."""
        info = self._lm.info
        return {
            "model_config": {"model": info.model, "max_model_len": info.max_prompt_tokens},
            "lora_config": None,
            "weight_transfer_config": None,
        }

    def reset_prefix_cache(self) -> None:
        """Have workers drop the states that they keep of prompts."""
        self._lm.clear_kv_cache(timeout=self._timeout)

    def close_communicator(self) -> None:
        """Nothing: there is none."""

    def init_communicator(self, device: object = 0) -> NoReturn:
        """Not offered: a pool's weights are its own."""
        del device
        _no_weights()

    def get_world_size(self) -> NoReturn:
        """Not offered, as `init_communicator`."""
        _no_weights()

    def weight_update(self) -> NoReturn:
        """Not offered, as `init_communicator`."""
        _no_weights()

    def update_named_param(self, name: str, weights: object) -> NoReturn:
        """Not offered, as `init_communicator`."""
        del name, weights
        _no_weights()

    def update_named_params(self, metadata: object, named_params: object) -> NoReturn:
        """Not offered, as `init_communicator`."""
        del metadata, named_params
        _no_weights()

    def update_model_params(self, model: object) -> NoReturn:
        """Not offered, as `init_communicator`."""
        del model
        _no_weights()

    def image_features(
        self, images: Sequence[Any], max_concurrent_requests: int = CONCURRENT
    ) -> list[None]:
        """None for prompts without images; raises `PromptError` for one."""
        del max_concurrent_requests
        if any(images):
            raise PromptError("images: a pool's models read text")
        return [None] * len(images)


@contextmanager
def pool_as_server(
    lm: PooledLM[Any],
    lora_name: str | None = None,
    apply_temperature: bool = False,
    timeout: float | None = None,
) -> Iterator[PoolClient]:
    """Trainers that are made in here ask the pool wherever they would ask a vLLM server.

    Of TRL 1.16 those are `ServerDistillationTrainer`, and of the trainers `SDPO`, `SDFT` and
    `IWOPD` those with a teacher on a server. Whatever URL they are given is not connected to.
    The arguments are those of `PoolClient`, which is what the ``with`` hands out.
    """
    client = PoolClient(lm, lora_name, apply_temperature, timeout)
    with patch(_VLLM_CLIENT, lambda *args, **options: client):
        yield client


def _no_weights() -> NoReturn:
    raise NotImplementedError(
        "a pool's workers serve the weights that they were started with: register what was trained "
        "as a LoRA adapter, lm.add_new_lora(path, name), and ask it by lora_name"
    )


def _told(overriding: Mapping[str, Any] | None, **given: Any) -> dict[str, Any]:
    """What completions are drawn by. Raises `PromptError` for what a pool does not draw by."""
    given |= overriding or {}
    for name, value in given.items():
        if name in _GENERATION or value is None:
            continue
        if name not in _NEUTRAL or value != _NEUTRAL[name]:
            raise PromptError(
                f"{name}={value!r:.60}: a pool draws by {', '.join(sorted(_GENERATION))}; leave it "
                "out"
            )
    return given


def _of_sequence(
    ids: Sequence[int], start: int, answer: object, width: int
) -> dict[str, list[list[Any]]]:
    """One sequence's part of what `get_sequence_logprobs` returns."""
    count = len(ids) - start
    logprobs = np.full((count, width), -np.inf, np.float32)
    token_ids = np.zeros((count, width), np.int64)
    actual = np.full((count, 1), -np.inf, np.float32)
    if isinstance(answer, TextScores):
        first = count - answer.logprobs.size  # 1 where position 0 is asked for, which has none
        actual[first:, 0] = answer.logprobs
        if answer.top_logprobs is not None:
            k = answer.top_logprobs.token_ids.shape[1]
            logprobs[first:, :k] = answer.top_logprobs.logprobs
            token_ids[first:, :k] = answer.top_logprobs.token_ids
    return {
        "logprobs": logprobs.tolist(),
        "logprob_token_ids": token_ids.tolist(),
        "actual_logprobs": actual.tolist(),
        "actual_token_ids": [[int(token)] for token in ids[start:]],
    }


def _ranked(drawn: Continued) -> tuple[list[list[float]], list[list[int]]]:
    """Each token and the likeliest beside it, likeliest first: their values, and their ids."""
    assert drawn.logprobs is not None
    values, tokens = [], []
    for at, (token, logprob) in enumerate(
        zip(drawn.token_ids, drawn.logprobs.tolist(), strict=True)
    ):
        found = {token: logprob}
        if drawn.top_logprobs is not None:
            ids = drawn.top_logprobs.token_ids[at].tolist()
            found |= dict(zip(ids, drawn.top_logprobs.logprobs[at].tolist(), strict=True))
        items = sorted(found.items(), key=lambda item: -item[1])
        tokens.append([each for each, _ in items])
        values.append([value for _, value in items])
    return values, tokens
