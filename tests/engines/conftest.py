"""Fixtures of the engines' suites."""

from __future__ import annotations

import importlib.util
import json
import urllib.request
from collections.abc import Iterator

import pytest

import lmpool
from tests.support.gateways import GatewayProcess
from tests.support.waiting import until

CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Of torch: two threads on cores that are not theirs alone wait for each other mostly."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def answers(request: pytest.FixtureRequest) -> int:
    """How many questions of each kind an engine is asked."""
    return int(request.config.getoption("--answers"))


@pytest.fixture(scope="session")
def tiny_pool() -> Iterator[lmpool.EmbeddedLM]:
    """The tiny model on the `hf` engine, for all who change nothing of it."""
    with lmpool.embedded("tiny", engine="hf", workers=1, framework="numpy") as lm:
        yield lm


@pytest.fixture(scope="session")
def tiny_gateway(
    tiny_pool: lmpool.EmbeddedLM, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway in front of `tiny_pool`, which reads conversations by `CHAT_TEMPLATE`."""
    template = tmp_path_factory.mktemp("gateway") / "template.jinja"
    template.write_text(CHAT_TEMPLATE, "utf-8")
    options = ("--chat-template", str(template))
    with GatewayProcess(tiny_pool.url, tiny_pool.pool, options=options) as gateway:
        until(lambda: serves(gateway), 200, what="the gateway to serve its pool")
        yield gateway


def serves(gateway: GatewayProcess) -> bool:
    """Whether it knows its pool's model."""
    try:
        with urllib.request.urlopen(f"{gateway.base_url}/v1/models", timeout=60) as found:
            return bool(json.load(found)["data"])
    except OSError:
        return False
