"""The live page in a real browser: what it shows of a pool, how soon, and to whom."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgpack
import pytest
import redis
from playwright.sync_api import APIResponse, Browser, Route, expect

from lmpool.errors import PromptFailed
from lmpool.keys import GROUP, PoolKeys, ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.wire import pack_job
from tests.support.browser import NARROW, Tab, chromium, tab
from tests.support.clients import connected
from tests.support.gateways import GatewayProcess
from tests.support.heartbeats import beating
from tests.support.pools import pool_shards
from tests.support.protocol import new_job
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import InProcessWorker, in_process_worker

pytestmark = [pytest.mark.slow, pytest.mark.server]

POOL = "shown"
EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"
BAD = 255  # a token that the engine fails on, and no byte of a text
SOON = 2.0
TEXT = "<b>bold</b> & quiet"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(server_binary: str) -> Iterator[RealServer]:
    with RealServer(binary=server_binary, maxmemory="64mb") as server:
        yield server


@pytest.fixture(scope="module")
def worker(server: RealServer) -> Iterator[InProcessWorker]:
    with in_process_worker(server.url, POOL, engine_opts={"fail_token": BAD}) as worker:
        yield worker


@pytest.fixture(scope="module")
def gateway(server: RealServer, worker: InProcessWorker) -> Iterator[GatewayProcess]:
    with GatewayProcess(server.url, POOL, "nobodys") as gateway:
        with httpx.Client(base_url=gateway.base_url, timeout=60) as http:
            tokens = {"model": POOL, "prompt": "a"}
            until(lambda: http.post("/tokenize", json=tokens).is_success, 60, every=0.1)
        yield gateway


@pytest.fixture
def client(server: RealServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


@pytest.fixture
def shard(client: redis.Redis) -> ShardKeys:
    (shard,) = pool_shards(client, POOL)
    return shard


@pytest.fixture
def letters(client: redis.Redis, shard: ShardKeys) -> Iterator[list[str]]:
    """Two jobs that were given up, one of which is none."""
    fingerprint = shard_fingerprint(client)
    job = {"job": pack_job(new_job(5, 6, 8, fingerprint=fingerprint)), "reason": "it died"}
    none = {"job": b"garbage", "reason": "not msgpack"}
    names = [client.xadd(shard.dead, fields).decode() for fields in (job, none)]
    yield names
    client.delete(shard.dead)


def shard_fingerprint(client: redis.Redis) -> str:
    return ModelInfo.unpack(client.get(PoolKeys(POOL).info)).fingerprint  # type: ignore[arg-type]


@pytest.fixture
def failed(server: RealServer) -> None:
    """A prompt that failed."""
    with connected(server.url, POOL) as lm, pytest.raises(PromptFailed):
        lm.next_token_logprobs_sync([BAD, time.time_ns() % 200])


def with_text(page: Tab, text: str = TEXT) -> None:
    page["#text"].fill(text)
    page.shows("#surprise-sum", "bits a token")
    page.shows("#text-status", "the likeliest next")


# --- what is shown -------------------------------------------------------------------------------


def test_it_shows_the_pool_its_workers_and_what_they_did(
    browser: Browser, gateway: GatewayProcess, worker: InProcessWorker, server: RealServer
) -> None:
    with connected(server.url, POOL) as lm:
        lm.sync.batch_next_token_logprobs([[1, i] for i in range(20)])
        done = lm.pool_statistics_sync()
    with tab(browser, gateway.base_url) as page:
        page.state("serving")
        page.shows("#pool-name", POOL)
        page.shows(
            "#model", re.compile(r"tiny · mock, float32 · 256 tokens · prompts up to [\d,]+")
        )
        page.shows("#workers-rows", worker.id)
        assert page["#workers-rows tr"].count() == 1
        assert done["computed"] >= 20
        expect(page["#computed"]).to_have_text(str(done["computed"]))
        page.shows("#held-bound", "of the server's 64 MiB")
        page.shows("#held", "KiB")
        expect(page.page).to_have_title(f"{POOL}: 1 worker · lmpool")
        for name in ("#backlog", "#evicted", "#dead"):
            expect(page[name]).to_have_text("0")
        page.shows("#server", "at unix://")
    assert server.password is None


def test_another_pool_is_chosen_and_one_that_nobody_serves_says_so(
    browser: Browser, gateway: GatewayProcess
) -> None:
    with tab(browser, gateway.base_url) as page:
        page.state("serving")
        page["#pool-choice"].select_option("nobodys")
        page.state("no pool")
        page.shows("#banner", "lmpool worker --pool nobodys")
        page["#text"].fill("is anyone there")
        page.shows("#text-error", "no worker is alive")
        page.page.reload()  # the address says which
        page.state("no pool")
        page["#pool-choice"].select_option(POOL)
        page.state("serving")
        expect(page["#banner"]).to_be_hidden()


@pytest.mark.usefixtures("failed")
def test_the_latest_failures_are_those_that_workers_tell(
    browser: Browser, gateway: GatewayProcess, worker: InProcessWorker
) -> None:
    with tab(browser, gateway.base_url) as page:
        page.shows("#failures-rows", f"a prompt contains the token {BAD}")
        page.shows("#failures-rows", worker.id)
        page.shows("#failed", re.compile(r"^[1-9]"))


def test_a_change_is_seen_within_two_seconds(
    browser: Browser, gateway: GatewayProcess, client: redis.Redis, shard: ShardKeys
) -> None:
    # By the page's own clock, which is this machine's. A machine that is busy may be late at times:
    # then more changes are looked at.
    watch = """
    window.seen = {};
    const dead = document.getElementById('dead');
    new MutationObserver(() => { window.seen[dead.textContent] ??= Date.now() / 1000; })
        .observe(dead, { childList: true, characterData: true, subtree: true });
    """
    took: list[float] = []
    try:
        with tab(browser, gateway.base_url) as page:
            page.shows("#dead", "0")
            page.page.evaluate(watch)
            while len(took) < 5 or (len(took) < 25 and statistics.median(took) >= SOON):
                number = len(took) + 1
                time.sleep(0.23 * number % 1)  # anywhere between two looks
                changed = time.time()
                client.xadd(shard.dead, {"job": b"x", "reason": "so"})
                expect(page["#dead"]).to_have_text(str(number))
                took.append(page.page.evaluate("window.seen")[str(number)] - changed)
    finally:
        client.delete(shard.dead)
    assert 0 < statistics.median(took) < SOON, took


# --- who may write to the server cannot write on the page ----------------------------------------


@contextmanager
def another(
    client: redis.Redis, shard: ShardKeys, worker: str, beat: dict[str, Any]
) -> Iterator[None]:
    """Another worker, as it registers: whoever has no heartbeat would be taken for dead."""
    with beating(client, shard, worker, msgpack.packb(beat)):
        client.xgroup_createconsumer(shard.stream().key, GROUP, worker)
        yield
    client.xgroup_delconsumer(shard.stream().key, GROUP, worker)


def test_names_that_are_html_are_text(
    browser: Browser, gateway: GatewayProcess, client: redis.Redis, shard: ShardKeys
) -> None:
    beat: dict[str, Any] = {
        "id": EVIL, "host": EVIL, "pid": 1, "engine": EVIL, "gpu": EVIL, "execution": EVIL,
        "rows_per_second": float("nan"), "failures": [{"at": 1e300, "reason": EVIL, "jobs": 1}],
    }  # fmt: skip
    client.hset(shard.adapters, EVIL, b"")
    client.hset(shard.adapters, "turned\u202eround", b"")
    client.xadd(shard.dead, {"job": b"x", "reason": EVIL, "worker": EVIL})
    try:
        with another(client, shard, "evil", beat), tab(browser, gateway.base_url) as page:
            for place in ("#workers-rows", "#adapters-list", "#failures-rows", "#letters-rows"):
                page.shows(place, EVIL)
            page.shows("#adapters-list", r"turned\u{202e}round")
            assert EVIL in page["#adapter"].inner_text()
            with_text(page, EVIL)
            expect(page["#coloured"]).to_have_text(re.compile(re.escape(EVIL)))
            assert page["img"].count() == 1  # its own
            assert page["script"].count() == 1
            expect(page["#workers-rows tr"]).to_have_count(2)
    finally:
        client.delete(shard.dead, shard.adapters)


def test_numbers_and_texts_without_bound_leave_the_page_as_it_is(
    browser: Browser, gateway: GatewayProcess, client: redis.Redis, shard: ShardKeys
) -> None:
    beat = {"id": "x" * 1_000_000, "pid": 2**62, "rows_per_second": float("inf")}
    with (
        another(client, shard, "wide", beat),
        tab(browser, gateway.base_url, viewport=NARROW) as page,
    ):
        page.shows("#workers-rows", "x" * 300 + "…")
        assert page.overflow() <= 0
        assert len(httpx.get(f"{gateway.base_url}/live/view", timeout=60).content) < 20_000


# --- for everybody -------------------------------------------------------------------------------


@pytest.mark.usefixtures("failed", "letters")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"color_scheme": "light"}, id="light"),
        pytest.param({"color_scheme": "dark"}, id="dark"),
        pytest.param({"color_scheme": "light", "viewport": NARROW}, id="narrow"),
        pytest.param({"color_scheme": "dark", "viewport": NARROW}, id="narrow-dark"),
    ],
)
def test_axe_finds_nothing_serious(
    browser: Browser,
    gateway: GatewayProcess,
    client: redis.Redis,
    shard: ShardKeys,
    options: dict[str, Any],
) -> None:
    client.hset(shard.adapters, "french", b"")
    try:
        with tab(browser, gateway.base_url, **options) as page:
            page.shows("#letters-rows", "it died")
            page.shows("#failures-rows", f"token {BAD}")
            page.shows("#adapters-list", "french")
            with_text(page)
            page["#bars button"].nth(1).click()
            expect(page["#undo"]).to_be_enabled()
            page["#surprise-details summary"].click()
            page["#letters-rows button"].last.click()
            assert page.barriers() == []
            assert page.overflow() <= 0
        with tab(browser, f"{gateway.base_url}?pool=nobodys", **options) as page:
            page.state("no pool")
            assert page.barriers() == []
            assert page.overflow() <= 0
    finally:
        client.delete(shard.adapters)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_description_is_for_everybody(
    browser: Browser, gateway: GatewayProcess, scheme: str
) -> None:
    where = f"{gateway.base_url}/docs"
    with tab(browser, where, color_scheme=scheme, viewport=NARROW) as page:
        assert page.barriers() == []
        assert page.overflow() <= 0


def test_there_is_room_at_320_pixels(browser: Browser, gateway: GatewayProcess) -> None:
    with tab(browser, gateway.base_url, viewport={"width": 320, "height": 640}) as page:
        page.state("serving")
        with_text(page)
        assert page.overflow() <= 0
        # Tables are cards: each cell says what it is of. Asked in one step: rows are made anew.
        page.page.wait_for_function(
            """() => {
                const cell = document.querySelector("#workers-rows td");
                return cell && getComputedStyle(cell, "::before").content === '"Worker"';
            }"""
        )


# --- dead letters, where there are no keys ------------------------------------------------------


def test_dead_letters_are_retried_and_dropped(
    browser: Browser, gateway: GatewayProcess, letters: list[str], server: RealServer
) -> None:
    with tab(browser, gateway.base_url) as page:
        page.shows("#letters-rows", "it died")
        expect(page["#letters-rows tr"]).to_have_count(2)
        retry = page.page.get_by_role("button", name=f"Retry {letters[0]}")
        retry.click()
        # Who thinks again keeps it, and stands where he was.
        page.page.get_by_role("button", name="Keep it").click()
        retry.click()
        page.page.get_by_role("button", name="Ask again").click()
        page.shows("#letters-status", f"{letters[0]} was answered, and is dropped")
        expect(page["#letters-rows tr"]).to_have_count(1)
        # What is no job cannot be asked for.
        assert page.page.get_by_role("button", name=f"Retry {letters[1]}").count() == 0
        page.page.get_by_role("button", name=f"Drop {letters[1]}").focus()
        page.press("Enter", "Shift+Tab", "Enter")
        page.shows("#letters-status", f"{letters[1]} was dropped")
        page.shows("#letters-none", "No job was given up")
        page.shows("#dead", "0")


def test_a_list_that_was_asked_for_before_one_was_dropped_is_not_shown_after(
    browser: Browser,
    gateway: GatewayProcess,
    letters: list[str],
    client: redis.Redis,
    shard: ShardKeys,
) -> None:
    late: list[tuple[Route, APIResponse]] = []
    with tab(browser, gateway.base_url) as page:
        expect(page["#letters-rows tr"]).to_have_count(2)
        lists = re.compile(r"/live/dead-letters\?")
        page.page.route(lists, lambda route: late.append((route, route.fetch())), times=1)
        client.xdel(shard.dead, letters[0])  # so the page asks for them again
        until(lambda: page.page.wait_for_timeout(20) or late)
        page.page.get_by_role("button", name=f"Drop {letters[1]}").click()
        page.page.get_by_role("button", name="Drop it").click()
        page.shows("#letters-status", f"{letters[1]} was dropped")
        expect(page["#letters-rows tr"]).to_have_count(0)
        page.page.evaluate(
            """() => {
                window.cameBack = 0;
                const rows = document.querySelector("#letters-rows");
                new MutationObserver(() => { cameBack += rows.childElementCount; })
                    .observe(rows, { childList: true });
            }"""
        )
        (route, response) = late[0]
        assert letters[1] in response.text()
        route.fulfill(response=response)
        page.page.wait_for_timeout(500)
        assert page.page.evaluate("cameBack") == 0
