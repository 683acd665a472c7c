"""The private pool: a server and workers of one's own, started and ended with what uses them."""

from lmpool.producer.embedded.embedded_lm import EmbeddedLM, embedded

__all__ = ["EmbeddedLM", "embedded"]
