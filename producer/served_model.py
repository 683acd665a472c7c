"""What a client knows of the model that its pool serves."""

from __future__ import annotations

from functools import cached_property

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

    def read_vocabulary(self, deadline: Deadline) -> Vocabulary:
        """Tokens and tokenizer files, as the pool published them; what follows needs them."""
        if self._vocabulary is None:
            client = self._client
            key = client.keys.vocabulary(self.info.fingerprint8)
            reading = client.run(lambda servers: servers.for_key(key).get(key))
            found = result(reading, deadline, client.no_answer)
            if found is None:
                raise PoolError(f"pool {client.options.pool!r} has published no vocabulary")
            self._vocabulary = Vocabulary.unpack(found)
        return self._vocabulary

    @property
    def _read(self) -> Vocabulary:
        assert self._vocabulary is not None, "read_vocabulary comes first"
        return self._vocabulary

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer (transformers)."""
        return load_tokenizer(self._read, self.info)

    @cached_property
    def byte_vocab(self) -> list[ByteToken]:
        """Every token: its bytes, with its `token_id`."""
        return byte_tokens(self._read.tokens)

    @cached_property
    def str_vocab(self) -> list[str]:
        """Every token as text."""
        return string_tokens(self._read.tokens, self.tokenizer)


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
