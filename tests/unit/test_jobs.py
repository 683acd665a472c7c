from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lmpool.errors import PromptError
from lmpool.model_info import ModelInfo
from lmpool.producer.jobs import Asking
from lmpool.producer.pending import Ask
from lmpool.wire import Digester, Job, pack_job, unpack_job

INFO = ModelInfo(
    model="tiny",
    revision=None,
    fingerprint="0123456789abcdef" * 2,
    vocab_size=300,
    max_prompt_tokens=8,
    dtype="bfloat16",
    engine="mock",
    encoding="bf16",
)


def asking(encoding: Any = "auto") -> Asking:
    return Asking(INFO, encoding)


def sample(
    prompt: Any = (1, 2),
    max_tokens: Any = 5,
    eos: Any = (2,),
    temperature: Any = 1.0,
    seed: Any = 7,
    adapter: str | None = None,
) -> Ask:
    (ask,) = asking().samples([prompt], max_tokens, eos, temperature, seed, adapter)
    return ask


def as_job(ask: Ask) -> Job:
    """The job that a client sends for it, as a worker reads it."""
    digest = bytes.fromhex(ask.digest.decode())
    return unpack_job(
        pack_job(Job(ask.op, digest, ask.tokens, ask.adapter, ask.want))  # type: ignore[arg-type]
    )


def test_rows_are_asked_in_the_pools_encoding_or_in_the_one_that_is_wanted() -> None:
    assert asking().logprobs([1], None).want == {"encoding": "bf16"}
    assert asking("f16").logprobs([1], None).want == {"encoding": "f16"}


def test_what_is_asked_is_what_a_worker_takes() -> None:
    asks = [
        asking().logprobs([1, 299], None),
        asking("f32").logprobs([1], "a@77"),
        sample(),
        sample(eos=()),
        sample(temperature=0, seed=-1, max_tokens=2**31 - 1),
    ]
    for ask in asks:
        job = as_job(ask)
        assert Digester(INFO.fingerprint).job(job.op, job.tokens, job.want, job.adapter) == (
            job.digest
        )


def test_an_error_in_a_batch_names_the_prompt() -> None:
    with pytest.raises(PromptError, match=r"^prompt 2: token id 300 at position 1"):
        asking().batch([[1], [2], [3, 300]], None)


@pytest.mark.parametrize("prompts", [None, 5])
def test_what_is_no_list_of_prompts_is_refused(prompts: Any) -> None:
    asking = Asking(INFO, "auto")
    with pytest.raises(PromptError, match=f"prompts of type {type(prompts).__name__}: a list"):
        asking.batch(prompts, None)
    with pytest.raises(PromptError, match="a list of prompts is needed"):
        asking.samples(prompts, 1, [], 1.0, None, None)


def test_a_seed_repeats_and_none_never_does() -> None:
    assert sample(seed=3).digest == sample(seed=3).digest
    assert sample(seed=3).digest != sample(seed=4).digest
    assert len({sample(seed=None).digest for _ in range(10)}) == 10


def test_whatever_is_wanted_changes_the_digest() -> None:
    asks = [
        sample(),
        sample(prompt=[1]),
        sample(max_tokens=6),
        sample(eos=(3,)),
        sample(eos=()),
        sample(temperature=0.5),
        sample(seed=8),
        sample(adapter="a@77"),
        asking().logprobs([1, 2], None),
    ]
    assert len({ask.digest for ask in asks}) == len(asks)


def test_numbers_come_from_any_library() -> None:
    expected = sample(max_tokens=5, eos=[1, 2], temperature=0.5, seed=7)
    for same in (
        sample(max_tokens=np.int64(5), eos=[1, 2], temperature=0.5, seed=np.uint32(7)),
        sample(eos=np.array([2, 1, 2]), temperature=np.float32(0.5)),
        sample(eos=(t for t in (1, 2)), temperature=np.float64(0.5)),
    ):
        assert same == expected
    assert sample(temperature=1).digest == sample(temperature=1.0).digest
    assert as_job(expected).want["temperature"] == 0.5


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"max_tokens": 0}, "max_tokens=0: write a positive integer"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"max_tokens": 1.5}, "max_tokens=1.5"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"max_tokens": "5"}, "max_tokens='5'"),
        ({"max_tokens": None}, "max_tokens=None"),
        ({"max_tokens": 2**70}, "max_tokens="),
        ({"temperature": -0.1}, r"temperature=-0\.1: write a number of 0 \(greedy\) or more"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": None}, "temperature=None"),
        ({"temperature": True}, "temperature=True"),
        ({"temperature": 1j}, "temperature="),
        ({"seed": 1.0}, r"seed=1\.0: write an integer, or None"),
        ({"seed": True}, "seed=True"),
        ({"seed": "1"}, "seed='1'"),
        ({"eos": [300]}, r"eos_token_ids=\[300\]: .*in \[0, 300\)"),
        ({"eos": [-1]}, "eos_token_ids="),
        ({"eos": [1.0]}, "eos_token_ids="),
        ({"eos": [True]}, "eos_token_ids="),
        ({"eos": ["1"]}, "eos_token_ids="),
        ({"eos": "1"}, "eos_token_ids="),
        ({"eos": 1}, "eos_token_ids=1"),
        ({"eos": None}, "eos_token_ids=None"),
        ({"eos": range(257)}, "at most 256"),
        ({"prompt": []}, "empty prompt"),
        ({"prompt": [300]}, "token id 300"),
    ],
    ids=str,
)
def test_what_cannot_be_sampled_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        sample(**changed)
