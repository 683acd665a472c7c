"""Texts and conversations as token ids, and back, by what the pool published."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import lmpool
from lmpool.errors import LmpoolError, PoolError, PromptError
from tests.support.clients import connected
from tests.support.workers import in_process_worker

pytest.importorskip("transformers")

TEMPLATE = """{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}\
{% if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture
def lm(server_url: str, pool_name: str) -> Iterator[lmpool.PooledLM]:
    with in_process_worker(server_url, pool_name), connected(server_url, pool_name) as lm:
        yield lm


def test_a_text_goes_there_and_back(lm: lmpool.PooledLM) -> None:
    for text in ("abc", "naïve ☃", "", " \n"):
        ids = lm.encode(text)
        assert ids == [*text.encode()]
        assert lm.decode(ids) == text
    assert lm.sync.encode("abc") == lm.encode("abc")
    with pytest.raises(PromptError, match="token id 256"):
        lm.decode([256])
    for bad in (None, b"abc", ["a"], "\ud800"):
        with pytest.raises(PromptError, match="text in UTF-8"):
            lm.encode(bad)  # type: ignore[arg-type]


def test_the_token_that_begins_a_text_is_there_once(lm: lmpool.PooledLM) -> None:
    assert lm.encode("abc", bos=False) == [*b"abc"]
    first = lm.info.bos_token_id
    if first is None:
        with pytest.raises(PromptError, match="bos=True"):
            lm.encode("abc", bos=True)
    else:
        assert lm.encode("abc", bos=True) == [first, *b"abc"]
    with pytest.raises(PromptError, match="bos='yes'"):
        lm.encode("abc", bos="yes")  # type: ignore[arg-type]


def test_a_conversation_is_read_as_the_model_was_taught(lm: lmpool.PooledLM) -> None:
    hello = [{"role": "user", "content": "hi"}]
    with pytest.raises(PoolError, match="no chat template"):
        lm.encode_chat(hello)
    tokenizer: Any = lm.tokenizer
    tokenizer.chat_template = TEMPLATE
    assert lm.decode(lm.encode_chat(hello)) == "[user]hi[assistant]"
    assert lm.decode(lm.encode_chat(hello, add_generation_prompt=False)) == "[user]hi"
    for bad in (None, 3, ["hi"], [{"role": "user"}], [{"role": "user", "content": "\udc80"}]):
        with pytest.raises(LmpoolError, match="messages=") as caught:
            lm.encode_chat(bad)  # type: ignore[arg-type]
        assert isinstance(caught.value, PromptError)
