"""Who may look at the live page and act on it: keys, addresses, and other sites' pages."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import redis
from playwright.sync_api import Browser, expect

from lmpool.gateway.keys import line, new_key
from lmpool.keys import ShardKeys
from tests.support.browser import chromium, tab
from tests.support.gateways import GatewayProcess
from tests.support.pools import pool_shards
from tests.support.server import RealServer
from tests.support.workers import in_process_worker

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.one_server]

POOL = "guarded"
LOOKS, ACTS, SEES = new_key(), new_key(), new_key()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(server_binary: str) -> Iterator[RealServer]:
    with (
        RealServer(binary=server_binary, requirepass="secret") as server,
        in_process_worker(server.url, POOL),
    ):
        yield server


@pytest.fixture(scope="module")
def keyed(server: RealServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    # One request at once, beside the page's own stream.
    lines = [line("looks", LOOKS, 1), line("sees", SEES), line("acts", ACTS, operator=True)]
    keys.write_text("\n".join(lines))
    with GatewayProcess(server.url, POOL, options=("--api-keys", str(keys))) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def unkeyed(server: RealServer) -> Iterator[GatewayProcess]:
    with GatewayProcess(server.url, POOL) as gateway:
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
def letter(client: redis.Redis, shard: ShardKeys) -> Iterator[str]:
    yield client.xadd(shard.dead, {"job": b"garbage", "reason": "not msgpack"}).decode()
    client.delete(shard.dead)


def test_a_key_is_asked_for_kept_in_the_tab_and_forgotten(
    browser: Browser, keyed: GatewayProcess, letter: str
) -> None:
    with tab(browser, keyed.base_url) as page:
        page.state("locked")
        expect(page["#key"]).to_be_focused()
        expect(page["#content"]).to_be_hidden()
        assert page.barriers() == []
        page.page.keyboard.type("wrong")
        page.press("Enter")
        page.shows("#door-error", "Incorrect API key")
        page.page.keyboard.type(LOOKS)
        page.press("Enter")
        page.state("serving")
        page.shows("#pool-name", POOL)
        page.page.reload()
        page.state("serving")
        # It may look and ask, and no more. Where the server is, it is not told.
        page.shows("#letters-rows", "not msgpack")
        page.shows("#letters-right", "for keys whose line says operator")
        assert page["#letters-rows button"].count() == 0
        assert "unix://" not in page["body"].inner_text()
        page["#text"].fill("ab")
        page.shows("#text-status", "the likeliest next")
        # As a cookie it would be sent by whatever site has the browser ask.
        assert page.page.context.cookies() == []
        assert LOOKS not in page.page.url
        page["#forget-key"].click()
        page.state("locked")
        assert page.page.evaluate("sessionStorage.length") == 0


def test_a_key_that_says_operator_may_act(
    browser: Browser, keyed: GatewayProcess, letter: str
) -> None:
    with tab(browser, keyed.base_url) as page:
        page["#key"].fill(ACTS)
        page.press("Enter")
        page.page.get_by_role("button", name=f"Drop {letter}").click()
        page.page.get_by_role("button", name="Drop it").click()
        page.shows("#letters-status", f"{letter} was dropped")
        page.shows("#dead", "0")


def asked(gateway: GatewayProcess, path: str, key: str | None = None, **headers: str) -> int:
    sent = {"content-type": "application/json", **headers}
    if key is not None:
        sent["authorization"] = f"Bearer {key}"
    body = {"names": ["1-1"]} if "letters" in path else {"text": "ab"}
    with httpx.Client(base_url=gateway.base_url, timeout=60) as http:
        if path in ACTIONS:
            return http.post(path, headers=sent, json=body).status_code
        return http.get(path, headers=sent).status_code


ACTIONS = (
    "/live/dead-letters/drop",
    "/live/dead-letters/retry",
    "/live/next-tokens",
    "/live/surprise",
)
VIEWS = ("/live/view", "/live/dead-letters")


def test_without_a_key_there_is_nothing_but_files(keyed: GatewayProcess) -> None:
    for path in (*ACTIONS, *VIEWS, "/live/events"):
        assert asked(keyed, path) == asked(keyed, path, "wrong") == 401
    for path in ("/", "/page/page.js", "/page/page.css"):
        assert asked(keyed, path) == 200


def test_rights_are_the_gateways_to_give(
    keyed: GatewayProcess, letter: str, client: redis.Redis, shard: ShardKeys
) -> None:
    with httpx.Client(base_url=keyed.base_url, timeout=60) as http:
        for key, status, left in ((SEES, 403, 1), (ACTS, 200, 0)):
            headers = {"authorization": f"Bearer {key}"}
            body = {"pool": POOL, "names": [letter]}
            answer = http.post("/live/dead-letters/drop", json=body, headers=headers)
            assert answer.status_code == status, answer.text
            assert client.xlen(shard.dead) == left
            found = http.get("/live/view", headers=headers)
            assert found.status_code == 200, found.text
            view = found.json()
            assert (view["operator"], bool(view["view"]["url"])) == (status == 200, status == 200)
            assert "secret" not in str(view)


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"host": "evil.example"},  # whose owner has the name point here
        {"host": "evil.example:80", "origin": "http://evil.example:80"},
        {"host": ""},
    ],
    ids=str,
)
def test_another_sites_page_gets_nothing_out_of_a_browser(
    unkeyed: GatewayProcess, headers: dict[str, str]
) -> None:
    for path in (*ACTIONS, *(() if "origin" in headers and "host" not in headers else VIEWS)):
        assert asked(unkeyed, path, **headers) == 403


def test_a_name_that_anyone_may_have_lead_here_shows_nothing(
    browser: Browser, unkeyed: GatewayProcess, keyed: GatewayProcess
) -> None:
    with tab(browser, f"http://evil.example:{unkeyed.port}/") as page:
        page.shows("#banner", "may be anyone's: open the page by the machine's IP address")
        page.shows("#state", "Refused")
        expect(page["#workers-rows"]).to_be_empty()
    with tab(browser, f"http://pool.example:{keyed.port}/") as page:  # whose key says it
        page["#key"].fill(ACTS)
        page.press("Enter")
        page.state("serving")


def test_a_form_of_another_site_is_no_json(unkeyed: GatewayProcess) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        assert asked(unkeyed, "/live/dead-letters/drop", **{"content-type": kind}) in (415, 422)


def test_without_keys_this_machine_acts_and_no_proxy_of_it(unkeyed: GatewayProcess) -> None:
    drop = "/live/dead-letters/drop"
    port = unkeyed.port
    own: tuple[dict[str, str], ...] = (
        {},
        {"host": f"localhost:{port}", "origin": f"http://localhost:{port}"},
        {"sec-fetch-site": "same-origin"},
    )
    for headers in own:
        assert asked(unkeyed, drop, **headers) == 200
    for name in ("x-forwarded-for", "forwarded", "via", "x-real-ip"):
        assert asked(unkeyed, drop, **{name: "127.0.0.1"}) == 403


def test_with_keys_any_name_will_do(keyed: GatewayProcess) -> None:
    assert asked(keyed, "/live/view", ACTS, host="pool.example") == 200
    assert asked(keyed, "/live/next-tokens", ACTS, host="pool.example") == 200


def test_the_pages_files_allow_nothing_but_themselves(unkeyed: GatewayProcess) -> None:
    with httpx.Client(base_url=unkeyed.base_url, timeout=60) as http:
        page = http.get("/")
        rules = dict(
            each.strip().split(" ", 1)
            for each in page.headers["content-security-policy"].split(";")
        )
        assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
        assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
        assert page.headers["x-content-type-options"] == "nosniff"
        again = http.get("/", headers={"if-none-match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert http.head("/").status_code == 200
        assert http.get("/page/other.js").status_code == 404
        assert http.get("/page/../app.py").status_code == 404
