"""What a request asks for is refused before anything of its size is made."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from lmpool.gateway.calls import Answered
from lmpool.gateway.completions import CompletionRequest, _Completions
from lmpool.gateway.drawing import Part
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

    async def ids_of(prompts: Any, special: bool) -> list[list[int]]:
        return [list(each.encode()) if isinstance(each, str) else each for each in prompts]

    return SimpleNamespace(
        info=info, words=words, name="m", lora_name=None, check_ids=lambda ids, param: None,
        ids_of=ids_of,
    )  # fmt: skip


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


def completions(max_response_bytes: int = 512 << 20, **body: Any) -> _Completions:
    gateway = a_gateway(max_response_bytes=max_response_bytes)
    request = CompletionRequest.model_validate({"max_tokens": 0, **body})
    return asyncio.run(_Completions.of(gateway, a_model(), request, Deadline(None)))


@pytest.mark.parametrize(
    "told",
    [
        {"prompt": [[5] * 1000, [6] * 1000], "return_token_ids": True},
        {"prompt": ["a" * 1000, "b" * 1000], "echo": True},
        {"prompt": ["\x07" * 400, "é" * 400], "echo": True},  # of which each has six in JSON
        {"prompt": [[97] * 1000, [98] * 1000], "echo": True},
        {"prompt": [5], "max_tokens": 4000, "return_token_ids": True},
    ],
    ids=["ids", "texts", "texts that are long as JSON", "texts of ids", "ids that are drawn"],
)
def test_what_each_choice_tells_of_its_prompt_counts_for_the_size_of_an_answer(told: Any) -> None:
    completions(100_000, **told, n=2)
    with pytest.raises(ApiError, match="ask for fewer prompts, choices or") as refused:
        completions(100_000, **told, n=128)
    assert refused.value.status == 413
    plain = {name: told[name] for name in told if name not in ("echo", "return_token_ids")}
    completions(100_000, **plain, n=128)


@pytest.mark.parametrize("told", [{"return_token_ids": True}, {"echo": True}], ids=str)
def test_a_long_answer_without_numbers_is_written_beside_the_event_loop(told: Any) -> None:
    call = completions(prompt=[[97] * 4000], n=128, **told)
    writers: list[threading.Thread] = []

    async def answered() -> list[Answered]:
        return []

    def whole(_: list[Answered]) -> bytes:
        writers.append(threading.current_thread())
        return b"{}"

    call.answered, call.whole = answered, whole  # type: ignore[assignment, method-assign]
    nobody: Any = None
    asyncio.run(call.reply(nobody))
    assert len(writers) == 1
    assert threading.main_thread() not in writers


def test_a_prompt_becomes_json_once_for_all_of_its_choices() -> None:
    call = completions(prompt=[[97] * 4000], n=128, echo=True, return_token_ids=True)
    (prompt,) = call.prompts
    told = [call.of_prompt(prompt, None)["prompt_token_ids"] for _ in range(2)]
    assert told[0] is told[1] is prompt.ids_json
    assert prompt.text_json is prompt.text_json == b"a" * 4000
    content = call.whole([Answered(None, [Part('b"é', [98], finish_reason="length")] * 128)])
    choices = orjson.loads(content)["choices"]
    assert [choice["text"] for choice in choices] == ["a" * 4000 + 'b"é'] * 128
    assert choices[-1]["prompt_token_ids"] == prompt.ids
