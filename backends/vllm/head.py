"""The owner's side of hidden states and of the head, which vLLM's workers have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lmpool.backends.engine import EngineInfo, Outcome, Request
from lmpool.backends.head_fit import NoHead, numbers_of, probes
from lmpool.backends.vllm import internals
from lmpool.backends.vllm.states import HIDDEN, LAST
from lmpool.head_form import HeadForm, Numbers
from lmpool.wants import Hidden, Row

_DTYPES: Final[dict[Numbers, str]] = {"f32": "<f4", "bf16": "<u2", "f16": "<f2"}


class ModelHead:
    """The head of the model that vLLM's one worker has, and its states, by numbers of requests.

    `prefix` is the secret by which the worker knows the owner of requests, None where it knows
    nobody. What lies behind the matrix is known once it `fit`. Raises `NoHead` where there are no
    states to be had.
    """

    def __init__(self, engine: Any, prefix: str | None) -> None:
        self._core = engine.engine_core
        self._prefix = prefix
        config = engine.vllm_config
        self._known = numbers_of(config.model_config.hf_text_config.to_dict())
        if prefix is None:
            raise NoHead("this vLLM captures nothing")
        if config.parallel_config.world_size > 1:
            raise NoHead("tensor_parallel_size and pipeline_parallel_size part its head")
        if config.cache_config.kv_sharing_fast_prefill:
            raise NoHead("kv_sharing_fast_prefill skips states")
        self.form: HeadForm = _form(internals.call_workers(self._core, "lmpool_attach_states")[0])
        if self.form.hidden_size > config.model_config.get_vocab_size():
            raise NoHead("its states have more numbers than its rows")

    def params(self, number: int, request: Request) -> dict[str, Any]:
        """What `SamplingParams` must have so that the state after a prompt is kept as a row is."""
        extra = {HIDDEN: f"{self._prefix}{number}", LAST: request.tokens.size - 1}
        return {"extra_args": extra}

    def fit(self, run: Callable[[Request], Outcome], info: EngineInfo) -> None:
        """Find out what lies behind the matrix, by prompts that `run` computes.

        Raises `NoHead` where rows are not what the matrix makes of states.
        """
        states, rows = [], []
        special = (info.bos_token_id, info.pad_token_id, *info.eos_token_ids)
        for tokens in probes(info.vocab_size, special, info.max_prompt_tokens):
            state = run(Request(b"probe", tokens, want=Hidden()))
            row = run(Request(b"probe", tokens, want=Row()))
            if not isinstance(state.answer, np.ndarray) or row.row is None:
                raise NoHead(f"its first prompts: {state.error or row.error}")
            states.append(state.answer)
            rows.append(row.logprobs())
        given = np.stack(states).tobytes(), np.stack(rows).tobytes(), self._known
        self.form = _form(internals.call_workers(self._core, "lmpool_fit_head", *given)[0])

    def weights(self, rows: slice) -> npt.NDArray[Any]:
        """These rows of the matrix, the bits of bfloat16 as uint16."""
        given = rows.start, rows.stop
        (data,) = internals.call_workers(self._core, "lmpool_head_weights", *given)
        found = np.frombuffer(data, _DTYPES[self.form.numbers])
        return found.reshape(-1, self.form.hidden_size)

    def bias(self) -> npt.NDArray[np.float32]:
        """The bias, float32 [vocab]."""
        (data,) = internals.call_workers(self._core, "lmpool_head_bias")
        return np.frombuffer(data, np.float32)


def _form(found: dict[str, Any] | str) -> HeadForm:
    if isinstance(found, str):
        raise NoHead(found)
    return HeadForm.of(found)
