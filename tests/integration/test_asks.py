"""Wants of every kind, asked by name, together, and without end."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import (
    ClientClosed,
    LmpoolError,
    PoolTimeout,
    PromptError,
    PromptFailed,
    SettingsError,
    UnknownAdapter,
)
from lmpool.producer.asks import Ask
from lmpool.servers import Servers
from lmpool.wants import Draw, Generate, Row, Tokens, Top, TopLogprobs
from tests.support.clients import connected
from tests.support.hold import Hold
from tests.support.waiting import until
from tests.support.workers import in_process_worker

V = 256
FAILS = {"engine_opts": {"fail_token": 66}}
SLOW = {"engine_opts": {"delay": 0.3}}


@pytest.fixture
def lm(any_server: str, pool_name: str) -> Iterator[lmpool.PooledLM]:
    with (
        in_process_worker(any_server, pool_name, **FAILS),
        connected(any_server, pool_name, request_timeout=60) as lm,
    ):
        yield lm


def row(*ids: int) -> np.ndarray[Any, Any]:
    return mock_row(list(ids), V)


def same_top(found: TopLogprobs, ids: list[int], k: int) -> None:
    expected = Top(k).of_row(row(*ids))
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-6)
    np.testing.assert_allclose(found.rest, expected.rest, atol=1e-6)


def test_each_want_by_its_name_and_for_a_batch(lm: lmpool.PooledLM) -> None:
    sync = lm.sync
    same_top(sync.top_logprobs([1, 2], 5), [1, 2], 5)
    for ids, top in zip([[1], [2], [1]], sync.batch_top_logprobs([[1], [2], [1]], 3), strict=True):
        same_top(top, ids, 3)
    some = sync.token_logprobs([1, 2], [7, 9, 7])
    np.testing.assert_allclose(some, row(1, 2)[[7, 9, 7]], atol=1e-6)
    both = sync.batch_token_logprobs([[1], [2]], np.array([3, 4]))
    np.testing.assert_allclose(both, [row(1)[[3, 4]], row(2)[[3, 4]]], atol=1e-6)
    drawn = sync.draw([5], 4, seed=9, temperature=0.7)
    expected = Draw(4, 9, 0.7).of_row(row(5))
    np.testing.assert_array_equal(drawn.token_ids, expected.token_ids)
    np.testing.assert_allclose(drawn.proposal_logprobs, expected.proposal_logprobs, atol=1e-6)
    first, second = sync.batch_draw([[5], [5]], 4, seed=9, temperature=0.7)
    np.testing.assert_array_equal(first.token_ids, drawn.token_ids)
    np.testing.assert_array_equal(second.token_ids, Draw(4, 10, 0.7).of_row(row(5)).token_ids)
    only = sync.draw([5], 20, allowed=[3, 8], excluded=[8])
    assert set(only.token_ids.tolist()) == {3}


def test_texts_are_scored_token_by_token(lm: lmpool.PooledLM) -> None:
    texts = [[1, 2, 3, 4], [1, 2, 3], [9, 9]]
    found = lm.sync.batch_score(texts, top_logprobs=2, token_ids=[7], temperature=0.5)
    for text, scores in zip(texts, found, strict=True):
        rows = np.array([row(*text[:p]) for p in range(1, len(text))]) / np.float32(0.5)
        rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
        given = rows[np.arange(len(rows)), text[1:]]
        np.testing.assert_allclose(scores.logprobs, given, atol=1e-5)
        assert scores.total == pytest.approx(float(given.sum()), abs=1e-4)
        np.testing.assert_array_equal(scores.ranks, (rows >= given[:, None]).sum(axis=1))
        assert scores.top_logprobs is not None
        np.testing.assert_array_equal(scores.top_logprobs.token_ids[:, 0], rows.argmax(axis=1))
        assert scores.token_logprobs is not None
        np.testing.assert_allclose(scores.token_logprobs[:, 0], rows[:, 7], atol=1e-5)
    alone = lm.sync.score(texts[0], start=3)
    np.testing.assert_allclose(alone.logprobs, [row(1, 2, 3)[4]], atol=1e-5)
    with pytest.raises(PromptError, match=r"prompt 1: .*start=3") as caught:
        lm.sync.batch_score([[1, 2, 3, 4], [1, 2, 3]], start=3)
    assert caught.value.index == 1
    longest = lm.info.max_prompt_tokens + 1
    assert lm.sync.score([5] * longest, start=longest - 1).logprobs.shape == (1,)
    with pytest.raises(PromptError, match=str(longest + 1)):
        lm.sync.score([5] * (longest + 1))


def test_without_a_seed_equal_draws_are_draws_of_their_own(lm: lmpool.PooledLM) -> None:
    drawn = [tuple(d.token_ids) for d in lm.sync.batch_draw([[5]] * 32, 8)]
    assert len(set(drawn)) == 32
    assert tuple(lm.sync.draw([5], 8).token_ids) != tuple(lm.sync.draw([5], 8).token_ids)


def test_one_call_mixes_wants_and_equal_ones_are_one_job(lm: lmpool.PooledLM) -> None:
    before = lm.sync.pool_statistics()["computed"]
    asks = [([1, 2], Top(4)), Ask([1, 2]), ([1, 2], Tokens([3])), ([1, 2], Top(4))] * 3
    found = lm.sync.ask_many(asks, progress=True)
    for top, whole, some, again in zip(*[iter(found)] * 4, strict=True):
        same_top(top, [1, 2], 4)
        np.testing.assert_array_equal(again.token_ids, top.token_ids)
        np.testing.assert_array_equal(whole, row(1, 2))
        np.testing.assert_allclose(some, [row(1, 2)[3]], atol=1e-6)
    assert lm.sync.pool_statistics()["computed"] - before == 3
    assert lm.sync.ask_many([]) == []
    assert len(lm.sync.ask([9], Generate(3, (), 1.0, 1)).token_ids) == 3


def test_a_row_in_the_local_cache_answers_what_follows_from_it(lm: lmpool.PooledLM) -> None:
    lm.sync.next_token_logprobs([4, 4])
    asked = lm.sync.pool_statistics()["computed"]
    same_top(lm.sync.top_logprobs([4, 4], 7), [4, 4], 7)
    lm.sync.ask_many([([4, 4], Tokens([1])), ([4, 4], Draw(2, seed=1))])
    assert lm.sync.pool_statistics()["computed"] == asked
    assert lm.statistics()["local_hits"] == 3


def test_what_the_local_cache_answers_is_nobodys_to_write(lm: lmpool.PooledLM) -> None:
    lm.sync.next_token_logprobs([4, 5])
    asks = [([4, 5], Tokens([1, 2])), ([4, 5], Top(3)), ([4, 5], Draw(2, seed=1))]
    some, top, drawn = lm.sync.ask_many(asks)
    for array in (some, top.token_ids, top.logprobs, drawn.token_ids, drawn.proposal_logprobs):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(PromptError, match="encoding"):
        lm.sync.ask([4], Row(np.zeros(3)))  # type: ignore[arg-type]


BAD: list[tuple[Any, str]] = [
    (([1], Top(0)), "k=0"),
    (([1], Top(V + 1)), f"k={V + 1}"),
    (([1], Tokens([V])), f"token id {V}"),
    (([1], Draw(allowed=[])), "allowed"),
    (([1], Draw(excluded=range(V))), "excluded"),
    (([], Top(1)), "empty prompt"),
    (([V], Top(1)), f"token id {V}"),
    (([1], "row"), "want='row'"),
    ("x", "write an Ask, or a pair"),
    (None, "write an Ask, or a pair"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_what_cannot_be_asked_is_named_before_anything_is_sent(
    lm: lmpool.PooledLM, bad: Any, reason: str
) -> None:
    requests = lm.statistics()["requests"]
    with pytest.raises(PromptError, match=f"ask 2: .*{reason}") as caught:
        lm.sync.ask_many([([1], Top(1)), ([2], Top(1)), bad])
    assert caught.value.index == 2
    assert lm.statistics()["requests"] == requests
    if not isinstance(bad, tuple) or isinstance(bad[1], str):
        with pytest.raises(PromptError, match=f"ask 1: .*{reason}"):
            lm.sync.ask_many([([1], Top(1)), bad], errors="return")
        return
    found = lm.sync.ask_many([([1], Top(1)), bad, ([2], Top(1))], errors="return")
    same_top(found[0], [1], 1)
    assert isinstance(found[1], PromptError)
    assert found[1].index == 1
    same_top(found[2], [2], 1)


@pytest.mark.parametrize("asks", [7, "ab", {1: 2}, Ask([1])])
def test_asks_must_be_a_list_of_them(lm: lmpool.PooledLM, asks: Any) -> None:
    with pytest.raises(PromptError, match="a list of asks is needed"):
        lm.sync.ask_many(asks)
    with pytest.raises(PromptError, match="a list of asks is needed"):
        list(lm.sync.ask_iter(asks))


def test_errors_stand_where_the_answers_would(lm: lmpool.PooledLM) -> None:
    asks = [([n], Top(2)) for n in (1, 66, 2, 66)] + [Ask([3], Top(2), "none")]
    with pytest.raises(LmpoolError) as caught:
        lm.sync.ask_many(asks[:4])
    assert isinstance(caught.value, PromptFailed)
    assert caught.value.index in (1, 3)
    found = lm.sync.ask_many(asks, errors="return")
    kinds = [TopLogprobs, PromptFailed, TopLogprobs, PromptFailed, UnknownAdapter]
    assert [type(each) for each in found] == kinds
    assert [each.index for each in found if isinstance(each, LmpoolError)] == [1, 3, 4]
    with pytest.raises(SettingsError, match="errors='ignore'"):
        lm.sync.ask_many(asks, errors="ignore")  # type: ignore[call-overload]


def test_what_takes_too_long_is_an_error_in_its_place(any_server: str, pool_name: str) -> None:
    with (
        in_process_worker(any_server, pool_name, batch_size=1),
        connected(any_server, pool_name) as lm,
        Hold() as hold,
    ):
        hold.open()
        lm.sync.ask([1], Top(1))  # and keep it
        hold.close()
        found = lm.sync.ask_many([([n], Top(1)) for n in range(1, 6)], errors="return", timeout=0.5)
        assert [type(each) for each in found] == [TopLogprobs] + 4 * [PoolTimeout]
        with pytest.raises(PoolTimeout):
            list(lm.sync.ask_iter([([n], Top(1)) for n in range(10, 16)], timeout=0.5))
        later = dict(
            lm.sync.ask_iter([([n], Top(1)) for n in range(20, 26)], timeout=0.5, errors="return")
        )
        assert sorted(later) == list(range(6))
        assert all(isinstance(each, PoolTimeout) for each in later.values())


# --- without end -------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
def test_asks_without_end_hold_a_window_of_them(lm: lmpool.PooledLM, ordered: bool) -> None:
    given = 0

    def endless() -> Iterator[tuple[list[int], Top]]:
        nonlocal given
        for n in itertools.count():
            given += 1
            yield [n % 60, n // 60 % 60], Top(3)

    seen = []
    with_end = lm.sync.ask_iter(endless(), in_flight=100, ordered=ordered)
    for number, top in with_end:
        assert isinstance(top, TopLogprobs)
        same_top(top, [number % 60, number // 60 % 60], 3)
        seen.append(number)
        assert given <= len(seen) + 100
        if len(seen) == 1000:
            break
    with_end.close()  # type: ignore[attr-defined]
    assert len(set(seen)) == 1000
    assert not ordered or seen == list(range(1000))
    until(lambda: not lm._client._session.table.flights)


async def gone_through(lm: lmpool.PooledLM, **options: Any) -> list[tuple[int, Any]]:
    asks = [([n % 7], Top(2)) if n % 3 else Ask([n % 7]) for n in range(500)]
    return [found async for found in lm.ask_iter(asks, **options)]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("in_flight", [1, 3, 1024])
def test_they_are_awaited_too(lm: lmpool.PooledLM, ordered: bool, in_flight: int) -> None:
    found = asyncio.run(gone_through(lm, in_flight=in_flight, ordered=ordered))
    assert sorted(number for number, _ in found) == list(range(500))
    assert not ordered or [number for number, _ in found] == list(range(500))
    for number, answer in found:
        if number % 3:
            same_top(answer, [number % 7], 2)
        else:
            np.testing.assert_array_equal(answer, row(number % 7))


def test_answers_come_while_further_asks_are_slow_to_come(lm: lmpool.PooledLM) -> None:
    answered = threading.Event()

    def slow() -> Iterator[tuple[list[int], Top]]:
        for number in range(200):
            if number > 1 and answered.wait(0.3):
                return
            yield [number], Top(1)

    found = lm.sync.ask_iter(slow())
    next(found)
    answered.set()
    assert len(list(found)) < 199


def test_an_error_ends_the_loop_or_stands_in_its_place(lm: lmpool.PooledLM) -> None:
    asks: list[Any] = [([1], Top(1)), ([66], Top(1)), ([2], Top(0)), ([3], Top(1))]
    with pytest.raises(LmpoolError) as caught:
        list(lm.sync.ask_iter(asks, ordered=True))
    assert isinstance(caught.value, PromptFailed)
    assert caught.value.index == 1
    found = dict(lm.sync.ask_iter(asks, errors="return"))
    kinds = [TopLogprobs, PromptFailed, PromptError, TopLogprobs]
    assert [type(found[n]) for n in range(4)] == kinds
    for bad in ({"in_flight": 0}, {"in_flight": "x"}, {"ordered": 1}, {"errors": None}):
        with pytest.raises(SettingsError, match=next(iter(bad))):
            next(lm.sync.ask_iter(asks, **bad))  # type: ignore[arg-type]


@pytest.mark.parametrize("want", [Top(2), Top(0)], ids=["cached", "refused"])
def test_an_event_loop_runs_on_where_nothing_is_waited_for(lm: lmpool.PooledLM, want: Top) -> None:
    async def both() -> int:
        if want.k:
            await lm.ask([1], want)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        asks = (([1], want) for _ in range(3_000))
        async for _ in lm.ask_iter(asks, errors="return"):
            pass
        ticking.cancel()
        return ticks

    assert asyncio.run(both()) >= 3


def test_a_loop_that_the_garbage_collector_finds_waits_for_no_lock(lm: lmpool.PooledLM) -> None:
    # None of them fails: any may be the first to come.
    asks = lm.sync.ask_iter([([n % 50, n // 50], Top(1)) for n in range(200)], in_flight=200)
    next(asks)
    session = lm._client._session
    with session.lock:  # of which the collector knows nothing
        ended = threading.Thread(target=asks.close, daemon=True)  # type: ignore[attr-defined]
        ended.start()
        ended.join(60)
        assert not ended.is_alive()
    until(lambda: not session.table.flights)


def test_who_leaves_a_loop_withdraws_what_is_left(any_server: str, pool_name: str) -> None:
    with (
        in_process_worker(any_server, pool_name, batch_size=1, **SLOW),
        connected(any_server, pool_name) as lm,
        Hold(after=1) as rest,  # one is answered, however late it is left
    ):

        async def leave() -> None:
            asks = [([n], Top(1)) for n in range(50)]
            async for _ in lm.ask_iter(asks):
                break

        with Hold() as hold, ThreadPoolExecutor(1) as threads:
            leaving = threads.submit(asyncio.run, leave())
            until(lambda: lm.statistics()["queued"] == 50)
            hold.open()
            leaving.result(60)
        until(lambda: lm.statistics()["withdrawn"] == 49)

        async def cancelled() -> None:
            async for _ in lm.ask_iter([([n], Top(1)) for n in range(100, 150)]):
                pass

        async def cancel() -> None:
            task = asyncio.ensure_future(cancelled())
            await asyncio.to_thread(until, lambda: lm.statistics()["queued"] == 100)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        until(lambda: lm.statistics()["withdrawn"] == 99)
        rest.open()
        left = lm.sync.ask_iter([([n], Row()) for n in range(200, 250)], errors="return")
        next(left)
        lm.close()
        with pytest.raises(ClientClosed):
            list(left)  # what has come by then, and no more


def test_of_several_adapters_all_shards_are_asked(
    any_server: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first shard that has one of them may have yet to be told of another."""
    with (
        in_process_worker(any_server, pool_name),
        lmpool.connect(any_server, pool_name, framework="numpy") as lm,
    ):
        asked: list[str | None] = []
        read = lm._read_adapters

        def note_and_read(servers: Servers, name: str | None = None) -> dict[str, str]:
            asked.append(name)
            return read(servers, name)

        monkeypatch.setattr(lm, "_read_adapters", note_and_read)
        for names, expected in ((["one"], "one"), (["one", "two"], None), ([None, "two"], "two")):
            with pytest.raises(UnknownAdapter):
                lm.sync.ask_many([Ask([1, 2], Row(), name) for name in names])
            assert set(asked) == {expected}
            asked.clear()
