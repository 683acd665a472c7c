"""Prompts from text, with what a pool publishes."""

from __future__ import annotations

import threading

import pytest
import redis

from lmpool.backends.mock import MockEngine
from lmpool.errors import PoolError, PromptError
from lmpool.keys import PoolKeys
from lmpool.producer import served_model
from lmpool.prompt_text import decode, encoder, read_vocabulary
from lmpool.vocabulary import Vocabulary
from tests.support.clients import connected
from tests.support.workers import in_process_worker

BYTES = Vocabulary([bytes([i]) for i in range(256)], {})


def test_a_vocabulary_is_read_from_the_pool(fake_url: str, pool_name: str) -> None:
    with in_process_worker(fake_url, pool_name), connected(fake_url, pool_name) as lm:
        vocabulary = read_vocabulary(lm)
        assert list(vocabulary.tokens) == list(BYTES.tokens)
        encode = encoder(lm, vocabulary)
        assert encode("aé") == [97, 0xC3, 0xA9]
        with pytest.raises(PromptError, match=r"udc80'.*no text in UTF-8.*PYTHONUTF8=1"):
            encode("\udc80")


def test_a_pool_whose_engine_has_no_vocabulary_says_so(
    fake_url: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MockEngine, "byte_vocabulary", lambda engine: None)
    with in_process_worker(fake_url, pool_name), connected(fake_url, pool_name) as lm:
        for _ in range(2):
            with pytest.raises(PoolError, match="ask by token ids"):
                read_vocabulary(lm)


def test_a_vocabulary_that_is_about_to_be_published_is_waited_for(
    fake_url: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients know of a pool a moment before its first worker has published it."""
    monkeypatch.setattr(served_model, "VOCABULARY_PATIENCE", 60.0)
    with (
        in_process_worker(fake_url, pool_name),
        connected(fake_url, pool_name) as lm,
        redis.Redis.from_url(fake_url) as server,
    ):
        key = PoolKeys(pool_name).vocabulary(lm.info.fingerprint8)
        server.rename(key, "elsewhere")
        back = threading.Timer(0.3, server.rename, ("elsewhere", key))
        back.start()
        assert lm.encode("a") == [97]
        back.join()


def test_ids_become_text() -> None:
    assert decode(BYTES.tokens, [97, 0xC3, 0xA9, 999]) == "aé"
    assert decode(BYTES.tokens, [0xC3]) == "\ufffd"
