from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lmpool.errors import PromptError
from lmpool.model_info import ModelInfo
from lmpool.producer import jobs
from lmpool.producer.jobs import TOGETHER, JobMaker
from lmpool.wants import Digester, Generate, Row, Score, Want
from lmpool.wire import Job, pack_job, unpack_job

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


MAKER = JobMaker(INFO)


def row(prompt: Any = (1, 2), encoding: Any = None, adapter: str | None = None) -> Job:
    return MAKER.one(prompt, MAKER.check(Row(encoding)), adapter)


def generate(
    prompt: Any = (1, 2),
    max_tokens: Any = 5,
    eos: Any = (2,),
    temperature: Any = 1.0,
    seed: Any = 7,
    adapter: str | None = None,
) -> Job:
    want = MAKER.check(Generate(max_tokens, eos, temperature, seed))
    job = MAKER.one(prompt, want, adapter)
    # Many at once are asked as each alone, but for the seeds that nobody gave.
    if seed is not None:
        assert MAKER.many([prompt, prompt], want, adapter, one_seed=True) == [job, job]
        first, second = MAKER.many([prompt, prompt], want, adapter)
        assert (first, second.want) == (job, MAKER.check(replace(want, seed=seed + 1)))
    return job


def test_rows_are_asked_in_the_pools_encoding_or_in_the_one_that_is_wanted() -> None:
    assert row().want == Row("bf16")
    assert row(encoding="f16").want == Row("f16")


def test_what_is_asked_is_what_a_worker_takes() -> None:
    jobs = [
        row([1, 299]),
        row([1], "f32", "a@77"),
        generate(),
        generate(eos=()),
        generate(temperature=0, seed=-1, max_tokens=2**31 - 1),
        generate(temperature=-0.0),
        generate(seed=None),
        *MAKER.many([[1], [2, 3]], MAKER.check(Row()), "a@77"),
        *MAKER.many([[1], [1]], MAKER.check(Generate(3)), None),
    ]
    for job in jobs:
        found = unpack_job(pack_job(job))
        assert found == job
        digest = Digester(INFO.fingerprint).digest(found.want, found.tokens, found.adapter)
        assert digest == job.digest


def test_many_prompts_are_many_jobs_in_their_order() -> None:
    prompts = [[1], [2, 3], [1]]
    jobs = MAKER.many(prompts, Row("f32"), "a@77")
    assert [job.token_ids().tolist() for job in jobs] == prompts
    assert jobs == [MAKER.one(prompt, Row("f32"), "a@77") for prompt in prompts]
    assert MAKER.many([], Row("f32"), None) == []


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_a_large_batch_is_asked_as_each_prompt_alone(kind: Any) -> None:
    prompts = [kind([number % 300, *range(number % 7)]) for number in range(2 * TOGETHER)]
    wants: list[Want] = [MAKER.check(Row()), MAKER.check(Score(1))]
    for want in wants:
        given = prompts if isinstance(want, Row) else [kind([1, *ids]) for ids in prompts]
        alone = [MAKER.one(prompt, want, "a@77") for prompt in given]
        assert MAKER.many(given, want, "a@77") == alone


@pytest.mark.parametrize("bad", [[], [1] * 10, [300], [-1], [True], ["a"], "abc", None, [1]])
def test_an_error_in_a_large_batch_names_the_prompt(bad: Any) -> None:
    prompts = [[1, 2]] * 2 * TOGETHER
    prompts[TOGETHER + 3] = bad
    with pytest.raises(PromptError, match=f"^prompt {TOGETHER + 3}: ") as raised:
        MAKER.many(prompts, MAKER.check(Score(1)), None)
    assert raised.value.index == TOGETHER + 3


def test_an_error_in_a_batch_names_the_prompt() -> None:
    for want in (Row("f32"), Generate(1, ())):
        with pytest.raises(PromptError, match=r"^prompt 2: token id 300 at position 1"):
            MAKER.many([[1], [2], [3, 300]], want, None)


@pytest.mark.parametrize("prompts", [None, 5])
def test_what_is_no_list_of_prompts_is_refused(prompts: Any) -> None:
    with pytest.raises(PromptError, match=f"prompts of type {type(prompts).__name__}: a list"):
        MAKER.many(prompts, Row("f32"), None)


def test_prompts_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ASKS_MOST", 100)
    want = MAKER.check(Row())
    with pytest.raises(PromptError, match="more than 100 prompts in one call: ask by ask_iter"):
        MAKER.many(itertools.repeat([1], 1000), want, None)
    assert len(MAKER.many(itertools.repeat([1], 100), want, None)) == 100


def test_a_seed_repeats_and_none_never_does() -> None:
    assert generate(seed=3).digest == generate(seed=3).digest
    assert generate(seed=3).digest != generate(seed=4).digest
    assert len({generate(seed=None).digest for _ in range(10)}) == 10
    (first, *others) = MAKER.many([[1]] * 10, MAKER.check(Generate(2)), None)
    assert first.digest not in {job.digest for job in others}
    assert len({job.digest for job in others}) == 9


def test_whatever_is_wanted_changes_the_digest() -> None:
    jobs = [
        generate(),
        generate(prompt=[1]),
        generate(max_tokens=6),
        generate(eos=(3,)),
        generate(eos=()),
        generate(temperature=0.5),
        generate(seed=8),
        generate(adapter="a@77"),
        row(),
        row(encoding="f32"),
    ]
    assert len({job.digest for job in jobs}) == len(jobs)


def test_numbers_come_from_any_library() -> None:
    expected = generate(max_tokens=5, eos=[1, 2], temperature=0.5, seed=7)
    for same in (
        generate(max_tokens=np.int64(5), eos=[1, 2], temperature=0.5, seed=np.uint32(7)),
        generate(eos=np.array([2, 1, 2]), temperature=np.float32(0.5)),
        generate(eos=frozenset([1, 2]), temperature=np.float64(0.5)),
        generate(max_tokens=np.array(5), eos=[1, 2], temperature=np.array(0.5), seed=np.array(7)),
        generate(
            eos=[-1, 1, 2, 300, 2**70], temperature=0.5
        ),  # what the vocabulary has not ends nothing
    ):
        assert same == expected
    generated = MAKER.check(Generate(5, (t for t in (1, 2)), 0.5, 7))  # type: ignore[arg-type]
    assert generated == expected.want
    assert generate(temperature=1).digest == generate(temperature=1.0).digest
    found: Want = unpack_job(pack_job(expected)).want
    assert isinstance(found, Generate)
    assert found.temperature == 0.5


def test_nothing_said_of_the_end_is_the_models_own() -> None:
    info = replace(INFO, eos_token_ids=(9, 11))
    assert JobMaker(info).check(Generate(5)) == Generate(5, (9, 11), 1.0, None)


@pytest.mark.parametrize("encoding", ["f64", "", "u32", 3, ["f32"]])
def test_an_encoding_that_there_is_not_is_refused(encoding: Any) -> None:
    with pytest.raises(PromptError, match=r"encoding=.*: write one of f32, bf16, f16"):
        row(encoding=encoding)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
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
        ({"eos": b"1"}, "eos_token_ids=b'1'"),
        ({"temperature": 10**400}, "temperature=10000"),
        pytest.param({"max_tokens": 10**5000}, "max_tokens=<int>", id="max_tokens of 5,001 digits"),
        pytest.param(
            {"temperature": 10**5000}, "temperature=<int>", id="a temperature of 5,001 digits"
        ),
        ({"eos": [1.0]}, "eos_token_ids="),
        ({"eos": [True]}, "eos_token_ids="),
        ({"eos": ["1"]}, "eos_token_ids="),
        ({"eos": "1"}, "eos_token_ids="),
        ({"eos": 1}, "eos_token_ids=1"),
        ({"eos": range(257)}, "at most 256"),
        ({"prompt": []}, "empty prompt"),
        ({"prompt": [300]}, "token id 300"),
    ],
    ids=str,
)
def test_what_cannot_be_sampled_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        generate(**changed)
