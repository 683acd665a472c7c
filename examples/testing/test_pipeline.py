"""The tests of `pipeline.py`: no model, no server, no GPU, and no torch.

pip install 'lmpool[testing]'
pytest examples/testing
"""

from __future__ import annotations

import asyncio
import math

import pytest
from pipeline import choose

from lmpool.errors import PoolTimeout, PromptFailed
from lmpool.testing import MockPool
from lmpool.wants import Score

PROMPT = [3, 1, 4]
WORDS = [[10], [20, 21]]


def chosen(pool: MockPool, timeout: float = 30.0) -> int | None:
    return asyncio.run(choose(pool.lm, PROMPT, WORDS, timeout))


def test_the_likelier_word_is_chosen(lmpool_fake: MockPool) -> None:
    lmpool_fake.answer(PROMPT, {10: 0.2, 20: 0.7})
    lmpool_fake.answer([*PROMPT, 20], {21: 0.9})
    assert chosen(lmpool_fake) == 1


def test_all_tokens_of_a_word_count(lmpool_fake: MockPool) -> None:
    lmpool_fake.answer(PROMPT, {10: 0.2, 20: 0.7})
    lmpool_fake.answer([*PROMPT, 20], {21: 0.1})
    assert chosen(lmpool_fake) == 0


def test_no_word_is_chosen_where_none_stands_out(lmpool_fake: MockPool) -> None:
    three = [*WORDS, [30]]
    lmpool_fake.answer(PROMPT, {10: 0.3, 20: 0.3, 30: 0.3})
    lmpool_fake.answer([*PROMPT, 20], {21: 1.0})
    assert asyncio.run(choose(lmpool_fake.lm, PROMPT, three)) is None


def test_a_prompt_that_fails_once_is_asked_again(lmpool_fake: MockPool) -> None:
    lmpool_fake.answer(PROMPT, {10: 1.0})
    lmpool_fake.fail([*PROMPT, 10], "out of luck", times=1)
    assert chosen(lmpool_fake) == 0


def test_a_prompt_that_fails_always_is_an_error(lmpool_fake: MockPool) -> None:
    lmpool_fake.fail([*PROMPT, 10], "out of luck")
    with pytest.raises(PromptFailed, match="out of luck"):
        chosen(lmpool_fake)


def test_a_pool_that_does_not_answer_is_not_waited_for(lmpool_fake: MockPool) -> None:
    lmpool_fake.delay(math.inf)
    with pytest.raises(PoolTimeout):
        chosen(lmpool_fake, timeout=0.05)


def test_each_word_is_one_question(lmpool_fake: MockPool) -> None:
    chosen(lmpool_fake)
    assert [call.prompt for call in lmpool_fake.calls] == [(3, 1, 4, 10), (3, 1, 4, 20, 21)]
    assert all(call.want == Score(start=3) for call in lmpool_fake.calls)
