"""Engines that tell what they draw, and go on with what was begun elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lmpool.backends.engine import Engine, Part, Request
from lmpool.backends.mock import MockEngine
from lmpool.wants import Generate, Generation, Stream
from tests.support.fed_engine import FedEngine
from tests.support.streams import continuation

PROMPT = [1, 2, 3]


def asked(
    want: Generate, begun: Sequence[Generation] = (), id: bytes = b"0" * 16,
    prompt: Sequence[int] = PROMPT,
) -> Request:  # fmt: skip
    return Request(id, np.array(prompt, np.uint32), None, want, tuple(begun))


@pytest.fixture(params=[MockEngine, FedEngine])
def engine(request: pytest.FixtureRequest) -> Engine:
    made: Engine = request.param("mock", max_prompt_tokens=64)
    return made


def run(engine: Engine, *requests: Request) -> tuple[dict[bytes, Any], list[Part]]:
    """What each was answered, and all parts in their order."""
    engine.submit(requests)
    answers: dict[bytes, Any] = {}
    parts: list[Part] = []
    while engine.in_flight():
        outcomes = engine.step()
        parts += engine.parts()
        answers |= {outcome.id: outcome.error or outcome.answer for outcome in outcomes}
    return answers, parts


def test_each_step_of_a_stream_is_told_but_the_last(engine: Engine) -> None:
    want = Stream(12, (), 1.0, 5, logprobs=True, top_logprobs=2)
    other = Request(b"1" * 16, np.array(PROMPT, np.uint32), None, Generate(12, (), 1.0, 6))
    answers, parts = run(engine, asked(want), other)
    whole = answers[b"0" * 16]
    assert whole.token_ids.tolist() == continuation(PROMPT, 12, 5)
    assert [(part.id, part.start) for part in parts] == [(b"0" * 16, n) for n in range(11)]
    for part in parts:
        for mine, rest in zip(part.drawn.arrays(), whole.behind(part.start).arrays(), strict=True):
            np.testing.assert_array_equal(mine, rest[:1])
    assert not engine.parts()


@pytest.mark.parametrize("begun", [1, 5, 11])
def test_what_was_begun_elsewhere_goes_on(engine: Engine, begun: int) -> None:
    want = Stream(12, (), 1.0, 5, logprobs=True, top_logprobs=2)
    answers, parts = run(engine, asked(want))
    whole = answers[b"0" * 16]
    given = [part.drawn for part in parts][:begun]
    answers, parts = run(engine, asked(want, given))
    for mine, right in zip(answers[b"0" * 16].arrays(), whole.arrays(), strict=True):
        np.testing.assert_array_equal(mine, right)
    assert [part.start for part in parts] == list(range(begun, 11))


def test_it_is_gone_on_with_whatever_it_is(engine: Engine) -> None:
    """What the tokens are decides, not what would have been drawn; also where they end it."""
    odd = Generation(np.array([9, 9, 9], np.int32), 0, "length")
    answers, _ = run(engine, asked(Stream(7, (), 0.0, 5), [odd]))
    greedy, _ = run(engine, asked(Generate(4, (), 0.0, 5), prompt=[*PROMPT, 9, 9, 9]))
    drawn = greedy[b"0" * 16].token_ids.tolist()
    assert answers[b"0" * 16].token_ids.tolist() == [9, 9, 9, *drawn]
    for want, reason in (
        (Stream(3, (), 1.0, 5), "length"),
        (Stream(2, (), 1.0, 5), "length"),
        (Stream(9, (9,), 1.0, 5), "eos"),
        (Stream(9, (), 1.0, 5, stop=((9, 9, 9),)), "stop"),
    ):
        answers, parts = run(engine, asked(want, [odd]))
        assert answers[b"0" * 16].finish_reason == reason
        assert not parts
    # A stop sequence of which a part was drawn elsewhere.
    answers, _ = run(engine, asked(Stream(9, (), 1.0, 5), [odd]))
    first = int(answers[b"0" * 16].token_ids[3])
    answers, _ = run(engine, asked(Stream(9, (), 1.0, 5, stop=((9, first),)), [odd]))
    assert answers[b"0" * 16].token_ids.tolist() == [9, 9, 9, first]
    assert (answers[b"0" * 16].finish_reason, answers[b"0" * 16].ending) == ("stop", 2)


def test_those_that_are_cancelled_or_fail_are_told_no_more(engine: Engine) -> None:
    want = Stream(30, (), 1.0, 5)
    engine.submit([asked(want), asked(want, id=b"1" * 16)])
    engine.step()
    assert len(engine.parts()) == 2
    engine.step()
    engine.cancel([b"0" * 16])
    assert [part.id for part in engine.parts()] == [b"1" * 16]
    engine.submit([asked(want)])  # the same id again
    engine.step()
    assert [(part.id, part.start) for part in engine.parts()] == [(b"1" * 16, 2), (b"0" * 16, 0)]
    # As many as there is room for, and nothing of what never began.
    answers, parts = run(engine, asked(want, id=b"2" * 16, prompt=[1] * 60))
    assert len([part for part in parts if part.id == b"2" * 16]) == 4
    assert answers[b"2" * 16].finish_reason == "context"
    answers, parts = run(engine, asked(want, id=b"3" * 16, prompt=[1] * 65))
    assert isinstance(answers[b"3" * 16], Exception)
    assert not parts
