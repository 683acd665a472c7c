"""The live page of a pool with lanes: who is home of what, what waits where, what was stolen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from lmpool.affinity import own_lanes
from lmpool.producer.statistics import LanesStatistics
from tests.support.browser import NARROW, chromium, tab
from tests.support.clients import connected
from tests.support.gate import Gate
from tests.support.gateways import GatewayProcess
from tests.support.pools import some_prompts, worker_processes
from tests.support.server import RealServer
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.one_server]

LANES = 64


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def test_lanes_homes_and_steals_are_shown(
    browser: Browser, server_binary: str, pool_name: str, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    settings = {"lanes": LANES, "batch_size": 2, **gate.settings()}
    prompts = some_prompts(200, seed=6)
    with (
        RealServer(binary=server_binary) as server,
        ThreadPoolExecutor(1) as thread,
        worker_processes(server.url, pool_name, 2, **settings),
        connected(server.url, pool_name) as lm,
        GatewayProcess(server.url, pool_name) as gateway,
    ):

        def homes() -> dict[str, int]:
            return {w["id"]: w["lanes"] for w in lm.pool_statistics_sync()["workers"]}

        until(lambda: sum(homes().values()) == 32, what="all lanes to have a home")
        asked = thread.submit(lm.sync.batch_next_token_logprobs, prompts)
        try:
            until(lambda: lm.pool_statistics_sync()["backlog"] == 200, what="all jobs to be there")

            def taken() -> tuple[int, int]:
                told = lm.pool_statistics_sync()
                return told["own_jobs"], told["stolen_jobs"]

            def lanes() -> LanesStatistics:
                """As it is now: what a batch holds up is given back."""
                return lm.pool_statistics_sync()["lanes"]

            with tab(browser, gateway.base_url) as page:
                page.state("serving")
                page.shows("#lanes-used", "32")
                page.shows("#lanes-all", f"of {LANES}")
                until(
                    lambda: f"in {lanes()['waiting_lanes']}, " in page["#lanes-more"].inner_text()
                )
                for name, count in homes().items():
                    (mine,) = page["#workers-rows tr"].filter(has_text=name).all()
                    expect(mine.locator("[data-label=Lanes]")).to_have_text(str(count))
                rows = page["#lanes-rows tr"]
                expect(rows).to_have_count(5)
                # Each lane and its home in one look: rows are made anew.
                said = """rows => rows.map(row => ["Lane", "Home"].map(label =>
                    row.querySelector(`[data-label=${label}]`).innerText))"""
                for lane, home in rows.evaluate_all(said):
                    assert int(lane) in own_lanes(home, homes(), 0, LANES)
                first = rows.first.locator("[data-label=Waiting]")
                until(lambda: first.inner_text() == str(lanes()["longest"][0]["waiting"]))
                assert page.barriers() == []
                assert page.overflow() <= 0
            with tab(browser, gateway.base_url, viewport=NARROW) as page:
                expect(page["#lanes-rows tr"]).to_have_count(5)
                assert page.overflow() <= 0
                gate.open()
                assert asked.result(60).shape == (200, 256)
                page.shows("#lanes-none", "Every job has a worker")
                expect(page["#lanes-table"]).to_be_hidden()
                # What was given back was taken again.

                def shown() -> bool:
                    own, stolen = taken()
                    words = page["#stolen-more"].inner_text(), page["#stolen"].inner_text()
                    said = f"of {own + stolen} jobs that workers took" in words[0]
                    return (
                        said
                        and own + stolen >= 200
                        and (f"{100 * stolen / (own + stolen):.1f} %" in words[1])
                    )

                until(shown, what="what workers took to be shown")
                page.shows("#kept", "0.0 %")
                page.shows("#kept-more", re.compile(r"at least, of [\d,]+"))
        finally:
            gate.open()


def test_one_lane_has_no_home(browser: Browser, server_binary: str, pool_name: str) -> None:
    with (
        RealServer(binary=server_binary) as server,
        worker_processes(server.url, pool_name, 1, lanes=1),
        GatewayProcess(server.url, pool_name) as gateway,
        tab(browser, gateway.base_url) as page,
    ):
        page.state("serving")
        page.shows("#lanes-more", "every worker reads all")
        expect(page["#lanes"]).to_be_hidden()
        expect(page["#to-lanes"]).to_be_hidden()
