"""What measuring a model adds to the start of the Hugging Face engine."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate

NAME = "hf_start"
LINE = "what the trials add to the start of the hf engine: tiny, and half a billion parameters"

MEASURING = ("first_row", "longest_placed", "measure", "packed_forward")
"""What the engine does at its start besides loading the model."""


def measure(scale: Scale) -> Report:
    """Starts of both models, in turn."""
    watch = Bystanders()
    with _half_billion(scale) as folder:
        sides = {
            "tiny": lambda run: _start("tiny"),
            "0.5 B": lambda run: _start(folder),
        }
        _start("tiny")  # what is imported or built once
        taken = alternate(sides, scale.runs)
    report = Report(NAME, "seconds of wall time in the trials of a start, and of the whole start")
    for name, at_most in (("tiny", 1.0), ("0.5 B", 15.0)):
        trials, whole = zip(*taken[name], strict=True)
        report.add(
            name,
            Measured("trials", "s", trials, at_most=None if scale.quick else at_most),
            Measured("whole start", "s", whole),
        )
    report.facts = {**facts(None, ("torch", "transformers")), **watch.report()}
    return report


def _start(model: str) -> tuple[float, float]:
    """Seconds in the trials, and of the whole start."""
    from lmpool.backends.hf import HFEngine, engine

    spent = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            began = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                spent += time.monotonic() - began

        return call

    patches = {name: timed(getattr(engine, name)) for name in MEASURING}
    began = time.monotonic()
    with mock.patch.multiple(engine, **patches):
        started = HFEngine(model, kv_cache_bytes=1 << 28)
    took = time.monotonic() - began
    started.close()
    return spent, took


@contextmanager
def _half_billion(scale: Scale) -> Iterator[str]:
    """A folder with a Qwen2 of random weights, of the sizes of the published one of 0.5 B."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=scale.of(151_936, 1_000),
        hidden_size=896,
        intermediate_size=4_864,
        num_hidden_layers=scale.of(24, 2),
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    with TemporaryDirectory(prefix="lmpool-qwen2-") as folder:
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        yield folder
