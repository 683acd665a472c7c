"""What a pipeline imports: `PooledLM`, and how to get one."""

from lmpool.producer.embedded import EmbeddedLM, embedded
from lmpool.producer.pooled_lm import PooledLM, connect

__all__ = ["EmbeddedLM", "PooledLM", "connect", "embedded"]
