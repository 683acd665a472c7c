"""What a request asks for is refused before anything of its size is made."""

from __future__ import annotations

import asyncio
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from lmpool.gateway.errors import ApiError
from lmpool.gateway.inference import GenerateRequest, _Call
from lmpool.gateway.options import GatewayOptions
from lmpool.gateway.words import Words
from lmpool.producer.deadline import Deadline

BYTES = Words([bytes([i]) for i in range(256)], 256)


def a_gateway(**options: Any) -> Any:
    return SimpleNamespace(options=GatewayOptions((), **options))


def a_model(max_prompt_tokens: int = 4096, words: Words = BYTES) -> Any:
    info = SimpleNamespace(
        max_prompt_tokens=max_prompt_tokens, vocab_size=words.vocab_size, eos_token_ids=(0,)
    )
    return SimpleNamespace(
        info=info, words=words, name="m", lora_name=None, check_ids=lambda ids, param: None
    )


def peak_bytes_of(work: Any) -> int:
    """The most that was allocated at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_one_wide_row_of_ids_is_refused_before_the_others_are_filled_up() -> None:
    rows: list[list[int]] = [[], [5] * 100_000, *([[]] * 300)]
    body = GenerateRequest.model_validate(
        {
            "token_ids": [5] * (len(rows) + 1),
            "sampling_params": {"max_tokens": 1, "prompt_logprob_token_ids": rows},
        }
    )
    call = _Call(a_gateway(), a_model(), body, Deadline(None))

    def check() -> None:
        with pytest.raises(ApiError, match="has 302 rows, of up to 100000 ids: 30200000") as found:
            asyncio.run(call.check())
        assert (found.value.status, found.value.param) == (400, "prompt_logprob_token_ids")

    assert peak_bytes_of(check) < 8 << 20
