"""A small trained English model that ships with lmpool: the demo's model and the tests' model.

A Llama (float32 configuration, bfloat16-exact weights, tied embeddings) with a byte-level BPE
tokenizer, trained by `lmpool.backends.tiny.train` on the prose of Python's standard library. It
writes sentences in the manner of reference manuals and knows nothing. Its use is that every
engine loads it, in a second, without a download.

    from transformers import AutoModelForCausalLM
    from lmpool.backends import tiny

    model = AutoModelForCausalLM.from_pretrained(tiny.path(), dtype="float32")
"""

from pathlib import Path

__all__ = ["path"]


def path() -> str:
    """The folder that holds the model: config, tokenizer and weights, as Hugging Face lays them."""
    return str(Path(__file__).resolve().parent / "model")
