"""`MockPool`: every want is answered as the test has set it, and what was asked is told."""

from __future__ import annotations

import asyncio
import math
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import redis

import lmpool
from lmpool import SyncPooledLM
from lmpool.backends.mock import mock_row
from lmpool.errors import (
    AdapterError,
    ClientClosed,
    EngineBroken,
    PoolError,
    PoolTimeout,
    PromptError,
    PromptFailed,
    ServerUnreachable,
    SettingsError,
    UnknownAdapter,
)
from lmpool.testing import Call, FakeServer, MockPool
from lmpool.wants import (
    Draw,
    Draws,
    Generate,
    Generation,
    HeadPart,
    Hidden,
    Row,
    Score,
    Stream,
    TextScores,
    Tokens,
    Top,
    TopLogprobs,
)
from lmpool.worker import intake
from tests.support.waiting import until

F32 = npt.NDArray[np.float32]
LM = SyncPooledLM[lmpool.NumpyRows]
PROMPT = [1, 2]


def random_row(seed: int, size: int = 256) -> F32:
    logits = np.random.default_rng(seed).normal(scale=3.0, size=size)
    row: F32 = (logits - np.logaddexp.reduce(logits)).astype(np.float32)
    return row


ROW = random_row(0)


@pytest.fixture
def pool() -> Iterator[MockPool]:
    with MockPool() as pool:
        yield pool


@pytest.fixture
def lm(pool: MockPool) -> LM:
    return pool.lm.sync


def i32(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


# --- what follows from a row ---------------------------------------------------------------------


def test_a_row_that_was_set_is_the_row(pool: MockPool, lm: LM) -> None:
    pool.answer(PROMPT, ROW)
    np.testing.assert_array_equal(lm.next_token_logprobs(PROMPT), ROW)
    np.testing.assert_array_equal(lm.logprobs_at([*PROMPT, 3], [2])[0], ROW)


def test_likeliest_tokens_follow_from_it(pool: MockPool, lm: LM) -> None:
    pool.answer(PROMPT, ROW)
    found, expected = lm.top_logprobs(PROMPT, 5), Top(5).of_row(ROW)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)


def test_log_probabilities_of_tokens_follow_from_it(pool: MockPool, lm: LM) -> None:
    pool.answer(PROMPT, ROW)
    np.testing.assert_array_equal(lm.token_logprobs(PROMPT, [9, 200]), ROW[[9, 200]])


def test_draws_follow_from_it(pool: MockPool, lm: LM) -> None:
    pool.answer(PROMPT, {7: 0.5, 8: 0.5})
    found = lm.draw(PROMPT, 64, seed=1)
    assert set(found.token_ids.tolist()) == {7, 8}
    np.testing.assert_allclose(found.logprobs, math.log(0.5), rtol=1e-6)


def test_scores_of_texts_that_go_through_the_prompt_follow_from_it(pool: MockPool, lm: LM) -> None:
    pool.answer(PROMPT, ROW)
    found = lm.score([*PROMPT, 9, 10], start=2)
    expected = [ROW[9], mock_row([*PROMPT, 9], 256)[10]]
    np.testing.assert_allclose(found.logprobs, expected, rtol=1e-5)
    assert found.ranks[0] == Score(1).of_rows(ROW[None], [9]).ranks[0]


def test_continuations_that_go_through_the_prompt_follow_from_it(pool: MockPool, lm: LM) -> None:
    pool.answer([1], {2: 1.0})
    pool.answer([1, 2], {3: 1.0})
    found = lm.generate([1], 3, seed=1)
    assert found.token_ids[:2].tolist() == [2, 3]
    streamed = [token for piece in lm.stream([1], 3, seed=1) for token in piece.token_ids]
    assert streamed == found.token_ids.tolist()


def test_the_hidden_state_gives_the_row_by_the_head(pool: MockPool, lm: LM) -> None:
    pool.answer(PROMPT, {7: 0.25, 8: 0.75})
    head = lm.head()
    for prompt in (PROMPT, [5]):
        rows = np.exp(lm.next_token_logprobs(prompt))
        made = np.exp(head.logprobs(lm.last_hidden_state(prompt)))
        np.testing.assert_allclose(made, rows, atol=1e-6)


def test_what_is_not_set_is_the_mock_engines(pool: MockPool, lm: LM) -> None:
    pool.answer(PROMPT, ROW)
    np.testing.assert_array_equal(lm.next_token_logprobs([2, 1]), mock_row([2, 1], 256))


def test_a_vocabulary_may_be_larger() -> None:
    row = random_row(1, 5000)
    with MockPool(vocab_size=5000, max_prompt_tokens=10) as pool:
        pool.answer([4999], row)
        np.testing.assert_array_equal(pool.lm.sync.next_token_logprobs([4999]), row)
        with pytest.raises(PromptError, match="10"):
            pool.lm.sync.next_token_logprobs([1] * 11)


def test_a_continuation_is_certain_by_all_ways(pool: MockPool, lm: LM) -> None:
    pool.continue_with("ab", "cd")
    found = lm.generate(pool.encode("ab"), 10, temperature=2.0)
    assert (pool.decode(found.text_ids), found.finish_reason) == ("cd", "eos")
    assert lm.score(pool.encode("abcd"), start=2).total == 0.0
    pool.continue_with("ab", "ef", ends=False)
    assert pool.decode(lm.generate(pool.encode("ab"), 2).token_ids) == "ef"


def test_a_row_of_some_probabilities_shares_the_rest(pool: MockPool) -> None:
    row = np.exp(pool.row({1: 0.5, 2: 0.25, 3: 0.0}).astype(np.float64))
    np.testing.assert_allclose(row[[1, 2, 3]], [0.5, 0.25, 0.0])
    np.testing.assert_allclose(np.delete(row, [1, 2, 3]), 0.25 / 253, rtol=1e-5)


# --- what is set for a want ----------------------------------------------------------------------


def test_likeliest_tokens_may_be_set(pool: MockPool, lm: LM) -> None:
    pool.answer(PROMPT, TopLogprobs(i32(5, 6), f32(-0.5, -1.5), np.float32(-2.0)))
    found = lm.top_logprobs(PROMPT, 2)
    assert found.token_ids.tolist() == [5, 6]
    assert found.rest == -2.0
    np.testing.assert_array_equal(lm.next_token_logprobs(PROMPT), mock_row(PROMPT, 256))


def test_log_probabilities_of_tokens_may_be_set(pool: MockPool, lm: LM) -> None:
    pool.answer(PROMPT, [-1.0, -2.0], want=Tokens)
    assert lm.token_logprobs(PROMPT, [30, 40]).tolist() == [-1.0, -2.0]


def test_scores_may_be_set(pool: MockPool, lm: LM) -> None:
    pool.answer(PROMPT, TextScores(f32(-1.25), i32(3)))
    found = lm.score(PROMPT)
    assert (found.logprobs.tolist(), found.ranks.tolist()) == ([-1.25], [3])


def test_draws_may_be_set(pool: MockPool, lm: LM) -> None:
    pool.answer(PROMPT, Draws(i32(9, 9), f32(-1, -1), f32(-1, -1), np.float32(0)))
    assert lm.draw(PROMPT, 2).token_ids.tolist() == [9, 9]


def test_continuations_may_be_set(pool: MockPool, lm: LM) -> None:
    pool.answer(PROMPT, Generation(i32(9, 8, 255), 1, "eos"))
    found = lm.generate(PROMPT, 5)
    assert (found.text_ids.tolist(), found.finish_reason) == ([9, 8], "eos")
    pieces = list(lm.stream(PROMPT, 5))
    assert [int(token) for piece in pieces for token in piece.token_ids] == [9, 8, 255]
    assert pieces[-1].finish_reason == "eos"


def test_streamed_continuations_may_be_set_apart(pool: MockPool, lm: LM) -> None:
    pool.answer(PROMPT, Generation(i32(9), 0, "length"))
    pool.answer(PROMPT, Generation(i32(7), 0, "length"), want=Stream)
    assert lm.generate(PROMPT, 1).token_ids.tolist() == [9]
    assert [int(t) for piece in lm.stream(PROMPT, 1) for t in piece.token_ids] == [7]


def test_hidden_states_may_be_set(pool: MockPool, lm: LM) -> None:
    state = np.arange(256, dtype=np.float32)
    pool.answer(PROMPT, state, want=Hidden)
    np.testing.assert_array_equal(lm.last_hidden_state(PROMPT), state)


def test_the_closest_that_is_set_counts(pool: MockPool, lm: LM) -> None:
    pool.answer(PROMPT, ROW)
    pool.answer(PROMPT, {1: 1.0}, want=Top)
    pool.answer(PROMPT, {2: 1.0}, want=Top(3))
    first = [int(lm.top_logprobs(PROMPT, k).token_ids[0]) for k in (1, 3, 4)]
    assert first == [1, 2, 1]
    assert lm.next_token_logprobs(PROMPT).argmax() == ROW.argmax()


def test_a_want_without_a_seed_is_meant_with_any(pool: MockPool, lm: LM) -> None:
    pool.answer(PROMPT, Generation(i32(9), 0, "length"), want=Generate(1))
    pool.answer(PROMPT, {8: 1.0})
    assert [lm.generate(PROMPT, 1, seed=seed).token_ids[0] for seed in (None, 5)] == [9, 9]
    assert [int(t) for piece in lm.stream(PROMPT, 1) for t in piece.token_ids] == [9]
    assert lm.generate(PROMPT, 1, temperature=0.5).token_ids[0] == 8


def test_what_is_set_later_counts_from_then_on(pool: MockPool, lm: LM) -> None:
    for token in (3, 4):
        pool.answer(PROMPT, {token: 1.0})
        assert lm.next_token_logprobs(PROMPT).argmax() == token
        assert lm.top_logprobs(PROMPT, 1).token_ids[0] == token


def test_what_the_test_does_with_its_arrays_changes_nothing(pool: MockPool, lm: LM) -> None:
    row, top = ROW.copy(), TopLogprobs(i32(5), f32(-0.5), np.float32(-2.0))
    pool.answer(PROMPT, row, want=Row)
    pool.answer(PROMPT, top)
    row[:], top.token_ids[:] = 0.0, 7
    np.testing.assert_array_equal(lm.next_token_logprobs(PROMPT), ROW)
    assert lm.top_logprobs(PROMPT, 1).token_ids[0] == 5


def test_an_answer_that_does_not_fit_the_want_is_an_error(pool: MockPool, lm: LM) -> None:
    pool.answer(PROMPT, TopLogprobs(i32(5), f32(-0.5), np.float32(-2.0)))
    with pytest.raises(PromptFailed, match=r"the answer that was set is none to Top\(k=3\)"):
        lm.top_logprobs(PROMPT, 3)
    pool.answer(PROMPT, Generation(i32(5), 0, "length"))
    with pytest.raises(PromptFailed, match="other log-probabilities than were asked for"):
        lm.generate(PROMPT, 1, logprobs=True)


# --- failing, waiting ----------------------------------------------------------------------------


def test_a_prompt_fails_alone(pool: MockPool, lm: LM) -> None:
    pool.fail(PROMPT, "no luck")
    found = lm.ask_many([(PROMPT, Top(1)), ([3], Top(1))], errors="return")
    assert isinstance(found[0], PromptFailed)
    assert str(found[0]) == "no luck"
    assert isinstance(found[1], TopLogprobs)


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda lm: lm.next_token_logprobs(PROMPT), id="row"),
        pytest.param(lambda lm: lm.top_logprobs(PROMPT), id="top"),
        pytest.param(lambda lm: lm.token_logprobs(PROMPT, [1]), id="tokens"),
        pytest.param(lambda lm: lm.draw(PROMPT), id="draw"),
        pytest.param(lambda lm: lm.score(PROMPT), id="score"),
        pytest.param(lambda lm: lm.score([*PROMPT, 3]), id="a text through it"),
        pytest.param(lambda lm: lm.generate(PROMPT, 1), id="generate"),
        pytest.param(lambda lm: list(lm.stream(PROMPT, 1)), id="stream"),
        pytest.param(lambda lm: lm.last_hidden_state(PROMPT), id="hidden"),
    ],
)
def test_every_want_of_it_fails(pool: MockPool, lm: LM, ask: Callable[[LM], Any]) -> None:
    pool.fail(PROMPT, "no luck")
    with pytest.raises(PromptFailed, match="no luck"):
        ask(lm)


def test_a_continuation_that_comes_to_it_fails(pool: MockPool, lm: LM) -> None:
    pool.answer([1], {2: 1.0})
    pool.fail([1, 2], "no luck")
    with pytest.raises(PromptFailed, match="no luck"):
        lm.generate([1], 5)


def test_it_fails_so_many_times(pool: MockPool, lm: LM) -> None:
    pool.answer(PROMPT, ROW)
    pool.fail(PROMPT, "no luck", times=2, want=Row)
    for _ in range(2):
        with pytest.raises(PromptFailed):
            lm.next_token_logprobs(PROMPT)
    np.testing.assert_array_equal(lm.next_token_logprobs(PROMPT), ROW)


@pytest.mark.parametrize("times", [(1,), (3, 1), (None, 1)], ids=str)
def test_what_was_set_holds_again_after_so_many_failures(
    times: tuple[int | None, ...], pool: MockPool, lm: LM
) -> None:
    pool.answer(PROMPT, ROW)
    for each in times:  # the last one counts
        pool.fail(PROMPT, times=each)
    with pytest.raises(PromptFailed):
        lm.next_token_logprobs(PROMPT)
    np.testing.assert_array_equal(lm.next_token_logprobs(PROMPT), ROW)


def test_it_fails_for_a_want_alone_and_until_it_is_answered(pool: MockPool, lm: LM) -> None:
    pool.fail(PROMPT, want=Top)
    lm.next_token_logprobs(PROMPT)
    with pytest.raises(PromptFailed, match="a failure that the test has set"):
        lm.top_logprobs(PROMPT, 1)
    pool.answer(PROMPT, ROW, want=Top)
    lm.top_logprobs(PROMPT, 1)


def test_a_delay_outlasts_a_timeout_and_ends_when_the_test_says_so(pool: MockPool, lm: LM) -> None:
    pool.delay(math.inf)
    with pytest.raises(PoolTimeout):
        lm.next_token_logprobs(PROMPT, timeout=0.05)
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(lm.next_token_logprobs([3])))
    asking.start()
    assert not found
    pool.delay(0)
    asking.join(60)
    assert len(found) == 1


def test_a_delay_passes(pool: MockPool, lm: LM) -> None:
    pool.delay(0.01)
    lm.next_token_logprobs(PROMPT)


def test_a_pool_that_waits_can_be_closed() -> None:
    with MockPool() as pool:
        pool.delay(math.inf)
        with pytest.raises(PoolTimeout):
            pool.lm.sync.next_token_logprobs(PROMPT, timeout=0.05)


# --- what was asked ------------------------------------------------------------------------------


def test_calls_are_in_order(pool: MockPool, lm: LM) -> None:
    prompts = [[n, n + 1] for n in range(200)]
    lm.ask_many([(prompt, Top(3)) for prompt in prompts])
    assert pool.calls == [Call(tuple(prompt), Top(3)) for prompt in prompts]
    lm.score([4, 5, 6])
    assert pool.calls[200:] == [Call((4, 5, 6), Score(1))]


def test_they_are_where_a_batch_takes_long(
    pool: MockPool, lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "GIVE_BACK_AFTER", 0.01)
    lm.next_token_logprobs([1])
    pool.delay(math.inf)
    prompts = [[n, n + 1] for n in range(200)]
    asking = threading.Thread(target=lm.ask_many, args=([(each, Top(3)) for each in prompts],))
    asking.start()
    asking.join(0.8)
    pool.delay(0)
    asking.join(60)
    assert [call.prompt for call in pool.calls[1:]] == [*map(tuple, prompts)]


def test_equal_asks_are_one_call(pool: MockPool) -> None:
    async def ask() -> None:
        await asyncio.gather(*(pool.lm.next_token_logprobs(PROMPT) for _ in range(20)))

    asyncio.run(ask())
    assert [call.prompt for call in pool.calls] == [(1, 2)]


def test_the_list_of_calls_is_the_tests_own(pool: MockPool, lm: LM) -> None:
    lm.next_token_logprobs(PROMPT)
    pool.calls.clear()
    assert len(pool.calls) == 1


def test_what_fails_and_what_is_set_is_a_call_too(pool: MockPool, lm: LM) -> None:
    pool.fail([1])
    pool.answer([2], Generation(i32(5), 0, "length"))
    with pytest.raises(PromptFailed):
        lm.generate([1], 1)
    lm.generate([2], 1, seed=3)
    assert [call.prompt for call in pool.calls] == [(1,), (2,)]
    assert isinstance(pool.calls[1].want, Generate)
    assert pool.calls[1].want.seed == 3


def test_adapters_are_told_apart(pool: MockPool, lm: LM) -> None:
    with pytest.raises(UnknownAdapter):
        lm.next_token_logprobs(PROMPT, lora_name="fr")
    pool.add_adapter("fr")
    pool.answer(PROMPT, {5: 1.0}, lora_name="fr")
    pool.answer(PROMPT, {6: 1.0})
    assert lm.next_token_logprobs(PROMPT, lora_name="fr").argmax() == 5
    assert lm.next_token_logprobs(PROMPT).argmax() == 6
    assert [call.lora_name for call in pool.calls] == ["fr", None]
    other = lm.next_token_logprobs([3], lora_name="fr")
    with MockPool() as second:
        second.add_adapter("fr")
        again = second.lm.sync.next_token_logprobs([3], lora_name="fr")
    np.testing.assert_array_equal(again, other)


def test_its_tokenizer_is_the_clients(pool: MockPool, lm: LM) -> None:
    pytest.importorskip("transformers")
    assert lm.encode("né") == pool.encode("né")
    assert lm.decode(pool.encode("né")) == pool.decode(pool.encode("né")) == "né"


# --- its life ------------------------------------------------------------------------------------


def test_pools_do_not_disturb_each_other(pool: MockPool) -> None:
    with MockPool(pool.url) as other:  # of one server
        pool.answer(PROMPT, {1: 1.0})
        other.answer(PROMPT, {2: 1.0})
        assert pool.lm.sync.next_token_logprobs(PROMPT).argmax() == 1
        assert other.lm.sync.next_token_logprobs(PROMPT).argmax() == 2
        assert len(pool.calls) == len(other.calls) == 1


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(threading.enumerate())
    with MockPool() as outer, MockPool(outer.url) as pool:
        pool.add_adapter("fr")
        kept = pool.connect(cache_bytes="1MiB")
        kept.sync.next_token_logprobs(PROMPT)
        pool.lm.sync.next_token_logprobs(PROMPT)
        assert list(tmp_path.iterdir())
        pool.close()
        pool.close()
        outer.lm.sync.next_token_logprobs(PROMPT)  # what is not its own it leaves alone
        with pytest.raises(ClientClosed):
            kept.sync.next_token_logprobs(PROMPT)
        assert _keys(outer.url, pool.pool) == []
        assert _keys(outer.url, outer.pool)
    until(lambda: set(threading.enumerate()) <= before)  # some of before may end meanwhile
    assert not list(tmp_path.iterdir())


def _keys(url: str, pool: str) -> list[bytes]:
    import redis

    with redis.Redis.from_url(url, protocol=2) as client:
        return [key for key in client.scan_iter() if pool.encode() in key]


def test_a_worker_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise EngineBroken("the engine is broken")

    pool = MockPool()
    with pool:
        monkeypatch.setattr(pool._engine, "step", broken)
        service = pool._running()

        def has_failed() -> bool:  # a prompt that is slow is withdrawn before the engine has it
            with pytest.raises((PoolTimeout, PoolError)):
                pool.lm.sync.next_token_logprobs(PROMPT, timeout=0.5)
            return service.status.failure is not None

        until(has_failed)
        with pytest.raises(PoolError, match=r"the worker of .* failed: the engine is broken"):
            pool.close()


@pytest.mark.parametrize(
    ("set_wrongly", "says"),
    [
        (lambda pool: pool.answer([1], ROW[:9]), "a row of 9 numbers.* write 256"),
        (lambda pool: pool.answer([1], ROW + 1), "the mass 2.7"),
        (lambda pool: pool.answer([1], f32(*[math.nan] * 256)), "NaN"),
        (lambda pool: pool.answer([1], "abc"), "'abc': write float numbers"),
        (lambda pool: pool.answer([1], {256: 0.5}), "{256: 0.5}: write token ids below 256"),
        (lambda pool: pool.answer([1], {1: 1.5}), "{1: 1.5}"),
        (lambda pool: pool.answer([1], {1: 0.8, 2: 0.8}), "make 1.6 together"),
        (lambda pool: pool.answer([1], ROW, want=Score), "does not follow from one row"),
        (lambda pool: pool.answer([1], ROW, want=HeadPart), "write a want of lmpool.wants"),
        (lambda pool: pool.answer([1], ROW, want="top"), "want='top'"),
        (lambda pool: pool.answer([1], ROW[:9], want=Hidden), "write 256 numbers"),
        (
            lambda pool: pool.answer([1], Generation(i32(1), 0, "length"), want=Draw),
            "Generation is no answer to it",
        ),
        (lambda pool: pool.fail([1], ""), "reason='': write a text"),
        (lambda pool: pool.fail([1], times=0), "times=0: write a positive integer"),
        (lambda pool: pool.delay(-1), "seconds=-1"),
        (lambda pool: pool.delay(math.nan), "seconds=nan"),
    ],
)
def test_nonsense_is_refused(pool: MockPool, set_wrongly: Callable[[Any], None], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        set_wrongly(pool)


def test_prompts_are_checked(pool: MockPool) -> None:
    with pytest.raises(PromptError, match="token id 256 at position 1"):
        pool.answer([1, 256], ROW)
    with pytest.raises(PromptError, match="k=300"):
        pool.answer([1], ROW, want=Top(300))
    with pytest.raises(PromptError, match="empty prompt"):
        pool.answer("", ROW)
    with pytest.raises(PromptError, match="empty prompt"):
        pool.fail([])
    with pytest.raises(PromptError, match="empty prompt"):
        pool.continue_with("", "a")


def test_a_pool_that_does_not_run_says_so() -> None:
    for use in (lambda pool: pool.url, lambda pool: pool.answer([1], {1: 1.0})):
        with pytest.raises(SettingsError, match="use it by `with MockPool"):
            use(MockPool())


def test_variables_of_a_shell_are_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LMPOOL_ENGINE_OPTS", '{"vocab_size": 9}')
    monkeypatch.setitem(os.environ, "LMPOOL_URL", "redis://nowhere.invalid:1/0")
    with MockPool() as pool:
        assert pool.info.vocab_size == 256
        pool.lm.sync.next_token_logprobs(PROMPT)


def test_a_pool_that_is_there_is_left_alone() -> None:
    """Nor is one whose name begins with that of another."""
    with FakeServer() as server:
        with MockPool(server.url, "made-1") as longer:
            with pytest.raises(SettingsError, match=r"pool='made-1' is on that server"):
                MockPool(server.url, "made-1").__enter__()
            with MockPool(server.url, "made") as shorter:
                shorter.answer([1], {5: 1.0})
                assert shorter.lm.sync.next_token_logprobs([1])[5] == 0.0
            longer.answer([1, 2], {9: 1.0})
            assert longer.connect().sync.next_token_logprobs([1, 2])[9] == 0.0
        with redis.Redis.from_url(server.url, protocol=2) as client:
            assert not list(client.scan_iter("*lmpool:made*"))


# --- what cannot be used -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("localhost:6379", "has no scheme"),
        ("redis+cluster://u:s3cret@h", r"url='redis\+cluster://u:\*\*\*@h': a MockPool is on one"),
        ("redis+sentinel://h/s", "is on one server"),
        (6379, "url=6379: write redis://"),
    ],
)
def test_a_url_that_is_no_servers_is_refused_as_it_is_given(url: Any, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        MockPool(url)


def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(ServerUnreachable, match=r"no answer from redis://127\.0\.0\.1:1"):
        MockPool("redis://127.0.0.1:1").__enter__()


@pytest.mark.parametrize("given", [[0.5, 0.5], 5, None, "row"])
def test_what_are_no_probabilities_is_told(pool: MockPool, given: Any) -> None:
    with pytest.raises(SettingsError, match=r"probabilities=.*write \{token id: probability\}"):
        pool.row(given)


@pytest.mark.parametrize("name", [5, None, "", "a@b", b"a"])
def test_what_is_no_adapters_name_is_told(pool: MockPool, name: Any) -> None:
    with pytest.raises(AdapterError, match=f"lora_name={re.escape(repr(name))}"):
        pool.add_adapter(name)


def test_an_answer_of_what_is_no_adapter_is_refused(pool: MockPool) -> None:
    with pytest.raises(UnknownAdapter, match="lora_name=5"):
        pool.answer([1], {5: 1.0}, lora_name=5)  # type: ignore[arg-type]


def test_a_pool_that_has_ended_takes_no_answers_and_may_begin_anew() -> None:
    pool = MockPool()
    for token in (5, 6):
        with pool:
            pool.answer([1], {token: 1.0})
            assert pool.lm.sync.top_logprobs([1], 1).token_ids.tolist() == [token]
        with pytest.raises(SettingsError, match="does not run"):
            pool.answer([1], {7: 1.0})
        with pytest.raises(SettingsError, match="no server yet"):
            pool.connect()
