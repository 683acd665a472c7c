"""The live page's own parts: its files, its looks at a pool, whose names it trusts."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.requests import Request

from lmpool.errors import ServerError
from lmpool.gateway.door import KEY
from lmpool.gateway.errors import ApiError
from lmpool.gateway.keys import Key
from lmpool.gateway.options import GatewayOptions, PoolAddress
from lmpool.gateway.page import live, rights, watch
from lmpool.gateway.page.assets import _ASSETS, HOME
from lmpool.gateway.page.live import LivePage
from lmpool.gateway.page.playground import _parts
from lmpool.gateway.page.watch import Seen, Watch, plain
from lmpool.gateway.state import Gateway
from lmpool.gateway.words import Words
from tests.support.waiting import until

OPTIONS = GatewayOptions((PoolAddress("pool"), PoolAddress("other")))


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 30)

    asyncio.run(bounded())


# --- its files -----------------------------------------------------------------------------------


def test_the_files_are_small_and_fetch_nothing_from_elsewhere() -> None:
    assert HOME in _ASSETS
    assert sum(len(asset.data) for asset in _ASSETS.values()) < 60_000
    for path, asset in _ASSETS.items():
        text = asset.data.decode()
        assert not re.search(r"(?<!xmlns=\")https?://|//cdn|@import|url\(", text), path
        if path != HOME:
            continue
        # What its security policy would stop.
        assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?! type=\"module\" src)", text)
        for linked in re.findall(r"(?:src|href)=\"(/[^\"]*)\"", text):
            assert linked in _ASSETS, linked


def test_no_text_is_ever_read_as_html() -> None:
    for path, asset in _ASSETS.items():
        if path.endswith(".js"):
            written = re.compile(
                r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function)\b"
            )
            assert not written.findall(asset.data.decode()), path


def test_every_element_that_a_script_asks_for_is_there() -> None:
    page = _ASSETS[HOME].data.decode()
    there = set(re.findall(r"\sid=\"([^\"]+)\"", page))
    assert len(there) == len(re.findall(r"\sid=\"", page))
    for path, asset in _ASSETS.items():
        if path.endswith(".js"):
            asked = set(re.findall(r"(?:\$|put|show|changed)\(\"([^\"]+)\"", asset.data.decode()))
            assert asked <= there, (path, asked - there)
    for name in re.findall(r"(?:for|aria-labelledby|aria-describedby)=\"([^\"]+)\"", page):
        assert set(name.split()) <= there, name


# --- looking -------------------------------------------------------------------------------------


class Viewer:
    """A pool's view as a test has it."""

    looks = 0
    open = 0
    computed = 0
    clock = 1000.0
    workers: int | Exception = 1
    hangs = threading.Event()

    def __init__(self, *_: object, **__: object) -> None:
        Viewer.open += 1

    def close(self) -> None:
        Viewer.open -= 1

    def read(self) -> Any:
        Viewer.looks += 1
        while Viewer.hangs.is_set():
            time.sleep(0.005)
        if isinstance(Viewer.workers, Exception):
            raise Viewer.workers
        Viewer.clock += 1
        workers = [
            {"id": f"w{n}", "failures": [{"at": n + m, "reason": "so", "jobs": 1} for m in (0, 5)]}
            for n in range(Viewer.workers)
        ]
        found = {
            "read_at": Viewer.clock,
            "model": {"model": "m"} if Viewer.computed >= 0 else None,
            "statistics": {"computed": Viewer.computed, "workers": workers},
        }
        return type("View", (), {"as_dict": lambda self: found})()


@pytest.fixture(autouse=True)
def viewer(monkeypatch: pytest.MonkeyPatch) -> type[Viewer]:
    for name, at_first in (("looks", 0), ("open", 0), ("computed", 0), ("workers", 1)):
        monkeypatch.setattr(Viewer, name, at_first)
    monkeypatch.setattr(Viewer, "hangs", threading.Event())
    monkeypatch.setattr(watch, "PoolViewer", Viewer)
    monkeypatch.setattr(watch, "EVERY", 0.02)
    monkeypatch.setattr(watch, "LINGER", 0.1)
    monkeypatch.setattr(watch, "SLOW", 60.0)  # of no look it is told first that it takes long
    return Viewer


def looked() -> Watch:
    return Watch(Gateway(OPTIONS).pools.all[0])


async def until_state(found: Watch, state: str) -> Seen:
    while found.seen.state != state:
        await found.after(found.seen.number)
    return found.seen


def test_a_pool_is_looked_at_once_for_all_and_only_while_somebody_does(
    viewer: type[Viewer],
) -> None:
    async def test() -> None:
        found = looked()
        await asyncio.sleep(0.1)
        assert viewer.looks == 0
        with found.watching(), found.watching(), found.watching():
            seen = await found.after(3)
            assert (viewer.open, viewer.looks) == (1, seen.number)
        await asyncio.to_thread(until, lambda: not found.is_looking and viewer.open == 0)
        looks = viewer.looks
        await asyncio.sleep(0.1)
        assert (viewer.open, viewer.looks) == (0, looks)
        with found.watching():  # and again
            await found.after(found.seen.number)
        await found.stop()
        assert not found.is_looking

    run(test)


def test_what_is_wrong_is_told_with_since_when(viewer: type[Viewer]) -> None:
    async def test() -> None:
        found = looked()
        with found.watching():
            seen = await until_state(found, "serving")
            since = seen.since
            assert (await found.after(seen.number)).since == since
            viewer.workers = 0
            assert (await until_state(found, "no workers")).since >= since
            viewer.workers = ServerError("it is away")
            seen = await until_state(found, "no server")
            assert (seen.why, seen.view is None) == ("it is away", False)
            viewer.workers = ValueError("made up by somebody")
            seen = await found.after(seen.number + 1)
            assert "made up by somebody" in seen.why
            viewer.workers, viewer.computed = 0, -1
            await until_state(found, "no pool")
        await found.stop()

    run(test)


def test_a_server_that_hangs_is_said_not_to_answer_meanwhile(
    viewer: type[Viewer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SLOW", 0.1)

    async def test() -> None:
        found = looked()
        with found.watching():
            await until_state(found, "serving")
            viewer.hangs.set()
            await until_state(found, "no server")
            viewer.hangs.clear()
            await until_state(found, "serving")
        await found.stop()

    run(test)


def test_the_pace_is_measured_by_the_servers_clock_and_begins_anew_with_the_counters(
    viewer: type[Viewer],
) -> None:
    found = looked()
    views = [(10.0, 0), (11.0, 10), (12.0, 30), (13.0, 60), (14.0, 100), (15.0, 7), (16.0, 9)]
    assert [found._pace(*each) for each in views] == [
        None,
        10.0,
        15.0,
        20.0,
        pytest.approx(90 / 3),  # over the last seconds alone
        None,
        2.0,
    ]
    assert found._pace(90.0, 1000) is None  # nobody looked for a while
    assert found._pace(80.0, 1001) is None  # the clock was set


def test_failures_of_all_workers_are_told_the_newest_first(viewer: type[Viewer]) -> None:
    async def test() -> None:
        viewer.workers = 15
        found = looked()
        with found.watching():
            seen = await found.after(0)
        await found.stop()
        assert [(each["at"], each["worker"]) for each in seen.failures[:2]] == [
            (19, "w14"),
            (18, "w13"),
        ]
        assert len(seen.failures) == watch.MOST_FAILURES
        assert seen.view is not None
        assert not any(each["failures"] for each in seen.view["statistics"]["workers"])

    run(test)


def test_of_more_workers_than_are_shown_it_is_told_how_many_there_are(
    viewer: type[Viewer],
) -> None:
    async def test() -> None:
        viewer.workers = watch.MOST_ITEMS + 45
        found = looked()
        with found.watching():
            seen = await found.after(0)
        await found.stop()
        assert seen.view is not None
        assert len(seen.view["statistics"]["workers"]) == watch.MOST_ITEMS
        assert seen.view["alive"] == watch.MOST_ITEMS + 45

    run(test)


def test_what_a_browser_is_told_is_bounded_and_json() -> None:
    wide = {"a" * 1000: ["b" * 1000] * 1000, "n": [float("nan"), float("-inf"), 1.5, None, True]}
    found = plain(wide)
    ((name, values), (_, numbers)) = found.items()
    assert len(name) == len(values[0]) == watch.MOST_TEXT + 1
    assert len(values) == watch.MOST_ITEMS
    assert numbers == [None, None, 1.5, None, True]
    json.dumps(found, allow_nan=False)


def test_so_many_pages_are_open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "STREAMS", 3)
    monkeypatch.setattr(live, "STREAMS_OF_KEY", 2)
    page = LivePage(Gateway(OPTIONS))
    with page.place("a"), page.place("a"):
        with pytest.raises(ApiError, match="close one"), page.place("a"):
            pass
        with page.place("b"), pytest.raises(ApiError, match="close one"), page.place(None):
            pass
    with page.place("a"):
        pass
    monkeypatch.setattr(live, "STREAMS_OF_ADDRESS", 1)
    with page.place(None, "10.0.0.1"), page.place(None, "10.0.0.2"):
        refused = pytest.raises(ApiError, match="close one")
        with refused, page.place(None, "10.0.0.1"):
            pass
    page._letters.shutdown()


def test_who_leaves_a_retry_gives_its_thread_back_once_it_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    going_on, entered = threading.Event(), threading.Event()

    @contextmanager
    def connected(*_: object, **__: object) -> Iterator[None]:
        yield None

    def retried(*_: object) -> list[dict[str, Any]]:
        entered.set()
        going_on.wait(60)
        return []

    monkeypatch.setattr(live, "connect", connected)
    monkeypatch.setattr(live, "_retried", retried)

    async def test() -> None:
        page = LivePage(Gateway(OPTIONS))
        pool = page.pool(None)
        leaving = asyncio.create_task(page.retry(pool, ["1-1"]))
        await asyncio.to_thread(entered.wait, 10)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert page._retries == live.RETRIES - 1, "its thread is at work still"
        going_on.set()
        await asyncio.to_thread(until, lambda: page._retries == live.RETRIES)
        page._letters.shutdown()

    run(test)


# --- whose name it is ----------------------------------------------------------------------------


def request(key: Key | None = None, client: str = "127.0.0.1", **headers: str) -> Request:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request(
        {"type": "http", "method": "GET", "headers": named, "client": (client, 1), KEY: key}
    )


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("192.168.3.4", True),
        ("localhost:8000", True),
        ("LOCALHOST", True),
        ("page.localhost", True),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost@evil.example", False),
        ("", False),
        ("[", False),
    ],
)
def test_without_keys_a_name_that_may_be_anothers_is_refused(host: str, is_own: bool) -> None:
    if is_own:
        rights.check_caller(request(host=host))
    else:
        with pytest.raises(ApiError, match="may be anyone's") as refused:
            rights.check_caller(request(host=host))
        assert refused.value.status == 403
    rights.check_caller(request(Key("a", b""), host=host))


def test_this_machines_own_name_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights.socket, "gethostname", lambda: "Box")
    rights.check_caller(request(host="box:8000"))


def test_who_may_act() -> None:
    for client, may in (("127.0.0.1", True), ("::1", True), ("10.0.0.1", False), ("", False)):
        assert rights.may_operate(request(client=client)) is may
    assert not rights.may_operate(request(x_forwarded_for="127.0.0.1"))
    # A key says it, wherever it comes from.
    assert not rights.may_operate(request(Key("a", b"")))
    assert rights.may_operate(request(Key("a", b"", operator=True), client="10.0.0.1"))
    with pytest.raises(ApiError, match="own machine"):
        rights.check_operator(request(client="10.0.0.1"))
    with pytest.raises(ApiError, match="write operator"):
        rights.check_operator(request(Key("a", b"")))


# --- a text in parts -----------------------------------------------------------------------------


def test_tokens_that_make_a_character_together_are_one_part() -> None:
    tokens = [b"<s>", b"a", "ï".encode()[:1], "ï".encode()[1:], b"\xf0\x9f", b""]
    words = Words(tokens, len(tokens))
    found = list(
        _parts(words, [0, 1, 2, 3, 1, 5, 4], [1.0, 2.0, 3.0, 4.0, 5.0, float("inf")], [1] * 6)
    )
    assert [(part["text"], part["tokens"], part["bits"]) for part in found] == [
        ("<s>", 1, None),
        ("a", 1, 1.0),
        ("ï", 2, 5.0),
        ("a", 1, 4.0),
        ("<5>", 1, 5.0),
        ("\ufffd", 1, 9999.0),  # an end that is none
    ]
