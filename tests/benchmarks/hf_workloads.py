"""What the Hugging Face engine is measured with: a random Llama, and prompts as samplers ask."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from lmpool.backends import tiny
from tests.benchmarks.measure import Scale

VOCAB_SIZE = 16_000
LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4_096,
}
"""The random Llama's shape, as its configuration has it."""

Tokens = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Workload:
    """Batches of prompts, each asked after the one before it was answered.

    All prompts begin with `shared`, which may be empty.
    """

    name: str
    shared: list[int]
    batches: list[list[list[int]]]

    @property
    def rows(self) -> int:
        """How many prompts there are."""
        return sum(map(len, self.batches))


def workloads(scale: Scale, number: int) -> dict[str, Workload]:
    """The workloads of one run, each with tokens that no other run has."""
    rng = np.random.default_rng(number)

    def tokens(*shape: int) -> Tokens:
        return rng.integers(0, VOCAB_SIZE, shape)

    count, steps = scale.of(32, 8), scale.of(32, 4)
    long_steps, long_prompt = scale.of(8, 2), scale.of(2_000, 200)
    singles = tokens(scale.of(64, 8), 32).tolist()
    made = [
        Workload("distinct", [], [tokens(scale.of(512, 64), 32).tolist()]),
        Workload("single", [], [[prompt] for prompt in singles]),
        _particles("particles", rng, tokens(256), count, steps),
        _particles("resampled", rng, tokens(256), count, steps, resample=True),
        _particles("long", rng, tokens(long_prompt), count, long_steps),
    ]
    return {workload.name: workload for workload in made}


def _particles(
    name: str,
    rng: np.random.Generator,
    prompt: Tokens,
    count: int,
    steps: int,
    *,
    resample: bool = False,
) -> Workload:
    """Particles that each draw a token of their own a step; `resample`: and are then resampled.

    After resampling with equal weights about a third of the particles are copies of others.
    """
    shared = prompt.tolist()
    particles: list[list[int]] = [[] for _ in range(count)]
    batches = []
    for _ in range(steps):
        drawn = rng.integers(0, VOCAB_SIZE, count).tolist()
        particles = [[*p, token] for p, token in zip(particles, drawn, strict=True)]
        if resample:
            particles = [particles[i] for i in rng.integers(0, count, count)]
        batches.append([[*shared, *particle] for particle in particles])
    return Workload(name, shared, batches)


@contextmanager
def random_llama(**shape: int) -> Iterator[str]:
    """A folder with a Llama of random weights, and a tokenizer for those who want one.

    `shape` is what is to be otherwise than in `LLAMA`.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**(LLAMA | shape), tie_word_embeddings=False)
    torch.manual_seed(0)
    with TemporaryDirectory(prefix="lmpool-llama-") as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        for file in Path(tiny.path()).glob("*token*"):
            shutil.copy(file, folder)
        yield folder
