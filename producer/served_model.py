"""What a client knows of the model that its pool serves."""

from __future__ import annotations

from functools import cached_property

from lmpool.errors import PoolError
from lmpool.model_info import ModelInfo
from lmpool.producer.adapters import KnownAdapters
from lmpool.producer.client import Client
from lmpool.producer.jobs import JobMaker
from lmpool.producer.tokens import (
    ByteToken,
    Tokenizer,
    byte_tokens,
    load_tokenizer,
    string_tokens,
)
from lmpool.vocabulary import Vocabulary


class ServedModel:
    """One model: how it is asked, its adapters, its vocabulary. A pool may come to serve another,
    and that is another `ServedModel`.
    """

    def __init__(self, client: Client, info: ModelInfo) -> None:
        self.info = info
        self.jobs = JobMaker(info)
        self.adapters = KnownAdapters()
        self._client = client

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Tokens and tokenizer files, as the pool published them."""
        key = self._client.keys.vocabulary(self.info.fingerprint8)
        found = self._client.run(lambda servers: servers.pool.get(key)).result()
        if found is None:
            raise PoolError(f"pool {self._client.options.pool!r} has published no vocabulary")
        return Vocabulary.unpack(found)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer (transformers)."""
        return load_tokenizer(self.vocabulary, self.info)

    @cached_property
    def byte_vocab(self) -> list[ByteToken]:
        """Every token: its bytes, with its `token_id`."""
        return byte_tokens(self.vocabulary.tokens)

    @cached_property
    def str_vocab(self) -> list[str]:
        """Every token as text."""
        return string_tokens(self.vocabulary.tokens, self.tokenizer)


class ServedModels:
    """The model that the pool serves now, made anew when the pool comes to serve another."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._last: ServedModel | None = None

    def of(self, info: ModelInfo) -> ServedModel:
        """What is known of the model `info`."""
        served = self._last
        if served is None or served.info is not info:
            served = self._last = ServedModel(self._client, info)
        return served
