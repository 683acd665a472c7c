"""What a pipeline imports: `PooledLM`, and how to get one."""

from lmpool.producer.asks import Ask
from lmpool.producer.connecting import connect
from lmpool.producer.embedded import EmbeddedLM, embedded
from lmpool.producer.frameworks import NumpyRows, TorchRows
from lmpool.producer.heads import Head
from lmpool.producer.pooled_lm import PooledLM, SyncPooledLM
from lmpool.producer.stream import Piece

# `embedded` is the function, though there is a package of that name: what is bound last stays.
# `from lmpool.producer.embedded import ...` finds the package.

__all__ = [
    "Ask",
    "EmbeddedLM",
    "Head",
    "NumpyRows",
    "Piece",
    "PooledLM",
    "SyncPooledLM",
    "TorchRows",
    "connect",
    "embedded",
]
