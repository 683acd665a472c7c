"""The live page's playground in a real browser, by keyboard alone, over a trained model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Route, expect

import lmpool
from lmpool.producer import EmbeddedLM, NumpyRows
from tests.support.browser import Tab, chromium, tab
from tests.support.gateways import GatewayProcess
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.one_server]

TEXT = "Return the number of"
LEVELS = (1, 3, 6, 10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def lm() -> Iterator[EmbeddedLM[NumpyRows]]:
    with lmpool.embedded("tiny", engine="hf", workers=1, pool="tiny", framework="numpy") as lm:
        yield lm


@pytest.fixture(scope="module")
def gateway(lm: EmbeddedLM[NumpyRows]) -> Iterator[GatewayProcess]:
    with GatewayProcess(lm.url, "tiny", options=("--max-logprobs", "20")) as gateway:
        with httpx.Client(base_url=gateway.base_url, timeout=60) as http:
            until(lambda: http.get("/ready").is_success, 120, what="it to be ready", every=0.1)
        yield gateway


def typed(page: Tab, text: str = TEXT) -> None:
    """Write a text, from the keyboard, and wait for what comes of it."""
    page["#text"].focus()
    page.page.keyboard.type(text)
    settled(page)


def settled(page: Tab) -> None:
    expect(page["#bars button"]).to_have_count(12)
    expect(page["#bars"]).not_to_have_attribute("aria-busy", "true")
    page.shows("#surprise-sum", "bits a token")


def bars(page: Tab) -> list[tuple[str, str]]:
    """What they say now, in one look: a later answer makes all of them anew."""
    said = """bars => bars.map(bar => [".token", ".share"].map(part =>
        bar.querySelector(part).innerText))"""
    return [(token, share) for token, share in page["#bars button"].evaluate_all(said)]


def shows_likeliest(page: Tab, lm: EmbeddedLM[NumpyRows], ids: list[int]) -> None:
    """Until then it may show what comes after less of a text that is typed slowly."""
    wanted = likeliest(lm, ids)
    until(lambda: bars(page) == wanted, what=f"the bars to say {wanted}", every=0.1)


def likeliest(lm: EmbeddedLM[NumpyRows], ids: list[int]) -> list[tuple[str, str]]:
    """What the bars are to say after these ids."""
    top = lm.sync.top_logprobs(ids, 12)
    tokens = [lm.decode([token]) for token in top.token_ids.tolist()]
    shown = [t.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") for t in tokens]
    return [(t, share(math.exp(p))) for t, p in zip(shown, top.logprobs.tolist(), strict=True)]


def share(p: float) -> str:
    return f"{100 * p:.1f} %" if 100 * p >= 0.05 else "< 0.1 %"


def test_it_is_used_from_the_keyboard_alone_and_keeps_the_ids_that_were_taken(
    browser: Browser, gateway: GatewayProcess, lm: EmbeddedLM[NumpyRows]
) -> None:
    ids = lm.encode(TEXT)
    top = lm.sync.top_logprobs(ids, 12).token_ids.tolist()
    with tab(browser, gateway.base_url) as page:
        page.state("serving")
        page.press("Tab")
        expect(page[".skip"]).to_be_focused()
        page.press("Enter")
        expect(page["#main"]).to_be_focused()
        page.press("Tab", "Tab")  # an example, and the text
        expect(page["#text"]).to_be_focused()
        typed(page)
        shows_likeliest(page, lm, ids)

        page.press("Tab")  # there is nothing to undo
        expect(page["#bars button"].first).to_be_focused()
        page.press("ArrowDown", "ArrowDown", "ArrowUp")
        expect(page["#bars button"].nth(1)).to_be_focused()
        page.press("Enter")
        page.shows("#text-status", f"{len(ids) + 1} tokens read")
        settled(page)
        shows_likeliest(page, lm, [*ids, top[1]])
        expect(page["#bars button"].nth(1)).to_be_focused()  # and goes on from there
        page.press("Home", "Space")
        page.shows("#text-status", f"{len(ids) + 2} tokens read")
        page.press("Backspace")
        page.shows("#text-status", f"{len(ids) + 1} tokens read")
        settled(page)
        shows_likeliest(page, lm, [*ids, top[1]])
        page.shows("#chosen", lm.decode([top[1]]).strip())
        page.press("Shift+Tab", "Enter")  # start over
        page.shows("#text-status", f"{len(ids)} tokens read")
        expect(page["#chosen"]).to_be_hidden()


def test_a_text_is_coloured_by_how_surprising_it_is(
    browser: Browser, gateway: GatewayProcess, lm: EmbeddedLM[NumpyRows]
) -> None:
    text = "Return the number of <items> in the list. Zqx"
    ids = lm.encode(text)
    scores = lm.sync.score(ids)
    bits = [-p / math.log(2) for p in scores.logprobs.tolist()]
    with tab(browser, gateway.base_url) as page:
        typed(page, text)
        page.shows("#surprise-sum", f"{sum(bits) / len(bits):.2f} bits a token")
        page.shows("#surprise-sum", f"{len(bits)} tokens scored")
        parts = page["#coloured .part"]
        expect(parts).to_have_count(len(ids))
        classes = [each.get_attribute("class") for each in parts.all()]
        wanted = [f"part s{sum(each >= level for level in LEVELS)}" for each in bits]
        assert classes == ["part unscored", *wanted]
        assert len(set(wanted)) > 2
        assert page["#coloured"].inner_text().endswith(text)
        # The colour is never the only sign: a line below is thicker, and there are words.
        widths = [
            float(each.evaluate("e => parseFloat(getComputedStyle(e).borderBottomWidth)"))
            for each in page[".legend .part"].all()
        ]
        assert widths == sorted(set(widths))
        title = parts.nth(1).get_attribute("title") or ""
        assert f"{bits[0]:.1f} bits" in title
        assert f"rank {scores.ranks[0]}" in title
        page["#surprise-details summary"].click()
        row = page["#surprise-rows tr"].nth(1).inner_text()
        assert row.split("\t")[1:] == [f"{bits[0]:.1f}", share(2 ** -bits[0]), f"{scores.ranks[0]}"]


def test_tokens_that_are_parts_of_a_character_are_shown_whole(
    browser: Browser, gateway: GatewayProcess, lm: EmbeddedLM[NumpyRows]
) -> None:
    text = "naïve 漢字 🦊\tend"
    assert len(lm.encode(text)) > len(text)  # characters of several tokens
    with tab(browser, gateway.base_url) as page:
        typed(page, text)
        coloured, wanted = page["#coloured"], text.replace("\t", r"\u{9}")
        until(lambda: coloured.inner_text().endswith(wanted), what=f"{wanted!r} in colours")
        assert "\ufffd" not in coloured.inner_text()


def test_an_earlier_question_is_ended_by_a_later_one(
    browser: Browser, gateway: GatewayProcess
) -> None:
    ended: list[str] = []
    with tab(browser, gateway.base_url) as page:
        page.state("serving")
        held: list[Route] = []
        pattern = re.compile("/live/(next-tokens|surprise)")
        page.page.route(pattern, lambda route: held.append(route), times=1)
        page.page.on("requestfailed", lambda request: ended.append(request.url))
        page["#text"].fill("first")
        expect(page["#bars"]).to_have_attribute("aria-busy", "true")
        until(lambda: page.page.wait_for_timeout(20) or held)
        page["#text"].fill("second")
        settled(page)
        page.shows("#coloured", "second")
        assert [url.rpartition("/")[2] for url in ended] == ["next-tokens"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("x" * 8000, "maximum context length", id="long"),
        pytest.param("nobody answers", "the gateway does not answer", id="away"),
    ],
)
def test_what_is_wrong_is_said_beside_the_field_until_it_is_right(
    browser: Browser, gateway: GatewayProcess, text: str, said: str
) -> None:
    with tab(browser, gateway.base_url, complains=True) as page:
        page.state("serving")
        if said.startswith("the gateway"):
            page.page.route("**/live/next-tokens", lambda route: route.abort(), times=1)
        page["#text"].fill(text)
        page.shows("#text-error", said)
        expect(page["#text"]).to_have_attribute("aria-invalid", "true")
        page["#text"].fill("")
        typed(page)
        expect(page["#text-error"]).to_be_empty()
        expect(page["#text"]).to_have_attribute("aria-invalid", "false")


# --- what it asks, without a browser ------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"text": "x" * 8001}, 400, "8000"),
        ({"text": "a", "appended": [1] * 501}, 400, "appended"),
        ({"text": "a", "appended": [2000]}, 400, "ids from 0 to 1999"),
        ({"text": "a", "appended": [-1]}, 400, "appended"),
        ({"text": 1}, 422, "text"),
        ({"text": "a", "pool": "none"}, 404, "no such pool"),
        ({"text": "a", "adapter": "none"}, 404, "no such adapter"),
        ({"text": "\ud800"}, 422, "unicode"),
    ],
)
@pytest.mark.parametrize("path", ["/live/next-tokens", "/live/surprise"])
def test_what_is_out_of_bounds_is_refused(
    gateway: GatewayProcess, path: str, body: dict[str, Any], status: int, said: str
) -> None:
    sent, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    answer = httpx.post(gateway.base_url + path, content=sent, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]


def test_no_more_of_the_likeliest_are_told_than_the_gateway_tells(gateway: GatewayProcess) -> None:
    path = gateway.base_url + "/live/next-tokens"
    assert httpx.post(path, json={"text": "a", "k": 51}, timeout=60).status_code == 400
    answer = httpx.post(path, json={"text": "a", "k": 50}, timeout=60).json()
    assert len(answer["likeliest"]) == 20
    total = sum(each["probability"] for each in answer["likeliest"]) + answer["rest"]
    assert total == pytest.approx(1, abs=1e-4)
