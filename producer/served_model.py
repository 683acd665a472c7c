"""What a client knows of the model that its pool serves."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Final

from lmpool.errors import PoolError
from lmpool.model_info import ModelInfo
from lmpool.producer.adapters import KnownAdapters
from lmpool.producer.blocking import result
from lmpool.producer.client import Client
from lmpool.producer.deadline import Deadline
from lmpool.producer.heads import HeadNumbers
from lmpool.producer.jobs import JobMaker
from lmpool.producer.tokens import (
    ByteToken,
    Tokenizer,
    byte_tokens,
    load_tokenizer,
    string_tokens,
)
from lmpool.vocabulary import Vocabulary

VOCABULARY_PATIENCE: Final = 2.0
"""Seconds in which a worker publishes the vocabulary once it has joined, or once a server has lost
it. They are waited once."""
VOCABULARY_POLL: Final = 0.05


class ServedModel:
    """One model: how it is asked, its adapters, its vocabulary. A pool may come to serve another,
    and that is another `ServedModel`.
    """

    def __init__(self, client: Client, info: ModelInfo) -> None:
        self.info = info
        self.jobs = JobMaker(info)
        self.adapters = KnownAdapters()
        self.head_numbers: HeadNumbers | None = None
        """Its head, once it was read."""
        self._client = client
        self._vocabulary: Vocabulary | None = None
        self._patience = VOCABULARY_PATIENCE

    def read_vocabulary(self, deadline: Deadline) -> None:
        """Read tokens and tokenizer files, as the pool published them; what follows needs them.

        Raises `PoolError` where the pool published none.
        """
        if self._vocabulary is not None:
            return
        patience, self._patience = Deadline(self._patience), 0.0
        while (found := self._published(deadline)) is None:
            if not patience.left() or deadline.left() == 0.0:
                raise PoolError(
                    f"pool {self._client.options.pool!r} has published no vocabulary: ask by token "
                    "ids"
                )
            time.sleep(VOCABULARY_POLL)
        self._vocabulary = Vocabulary.unpack(found)

    def _published(self, deadline: Deadline) -> bytes | None:
        client = self._client
        key = client.keys.vocabulary(self.info.fingerprint8)
        reading = client.run(lambda servers: servers.for_key(key).get(key))
        return result(reading, deadline, client.no_answer)

    @property
    def vocabulary(self) -> Vocabulary:
        """Tokens and tokenizer files."""
        assert self._vocabulary is not None, "read_vocabulary comes first"
        return self._vocabulary

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
