"""Small models of random weights, token sequences with much in common, and their right rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from lmpool.backends import Outcome, Request
from lmpool.backends.hf import HFEngine

VOCAB = 211
TOLERANCE = 1e-5


def make(folder: Path, config: Any) -> str:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if config.model_type != "mamba":
        with torch.no_grad():
            for parameter in model.parameters():  # rows that differ by nats
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return str(folder)


def save_adapter(model: str, folder: Path, *, seed: int = 1, **options: Any) -> str:
    """A LoRA adapter that moves rows, as PEFT saves it."""
    import peft

    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **options}
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    with warnings.catch_warnings(action="ignore"):  # PEFT's own, on its way to a new transformers
        adapted = peft.get_peft_model(base, config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.15)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    return str(folder)


def reference_model(model: str, adapter: str | None = None) -> Any:
    """transformers' model, or PEFT's around it, with no device of ours."""
    lm = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        import peft

        with warnings.catch_warnings(action="ignore"):
            lm = peft.PeftModel.from_pretrained(lm, adapter)
    return lm.eval()


class Texts:
    """Token sequences with much in common, and the row after each beginning of each of them.

    `adapters` are folders by name; without a name, or under None, are the model's own rows.
    """

    def __init__(
        self,
        folder: str,
        *,
        seed: int,
        sequences: int = 40,
        length: int = 64,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        pieces = [self.rng.integers(0, VOCAB, n) for n in (1, 1, 2, 3, 5, 8, 13, 21)]
        self.sequences = []
        for _ in range(sequences):
            parts = [pieces[i] for i in self.rng.integers(0, len(pieces), length)]
            cut = int(self.rng.integers(0, length))
            begun = (
                self.sequences[self.rng.integers(len(self.sequences))][:cut]
                if parts and (self.sequences and self.rng.random() < 0.7)
                else parts[0]
            )
            whole = np.concatenate([begun, *parts])[:length]
            self.sequences.append(whole.astype(np.uint32))
        self.rows_with = {
            name: self._rows(reference_model(folder, path))
            for name, path in {None: None, **(adapters or {})}.items()
        }
        self.rows = self.rows_with[None]

    def _rows(self, model: Any) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [
                torch.log_softmax(model(torch.from_numpy(s.astype(np.int64))[None]).logits[0], -1)
                for s in self.sequences
            ]

    def batch(self, most: int) -> list[tuple[int, int]]:
        """Which sequence, and how much of it, for each prompt."""
        few = self.rng.integers(0, len(self.sequences), 3)
        return [
            (
                int(
                    self.rng.choice(few)
                    if self.rng.random() < 0.6
                    else self.rng.integers(len(self.sequences))
                ),
                int(self.rng.integers(1, self.sequences[0].size + 1)),
            )
            for _ in range(self.rng.integers(1, most + 1))
        ]

    def compare(self, engine: HFEngine, batch: Sequence[tuple[int, int]]) -> None:
        outcomes = run(engine, requests_of([self.sequences[i][:n] for i, n in batch]))
        for (i, n), outcome in zip(batch, outcomes, strict=True):
            error = np.abs(outcome.logprobs() - self.rows[i][n - 1].numpy()).max()
            assert error < TOLERANCE, f"{n} tokens of sequence {i}: {error}"


def requests_of(prompts: Sequence[Any], **options: Any) -> list[Request]:
    return [
        Request(i.to_bytes(2, "big"), np.array(p, dtype=np.uint32), **options)
        for i, p in enumerate(prompts)
    ]


def run(engine: HFEngine, requests: Sequence[Request]) -> list[Outcome]:
    engine.submit(requests)
    outcomes: dict[bytes, Outcome] = {}
    while engine.in_flight():
        outcomes.update((outcome.id, outcome) for outcome in engine.step())
    return [outcomes[r.id] for r in requests]


def rows_of(engine: HFEngine, prompts: Sequence[Any]) -> npt.NDArray[np.float32]:
    return np.stack([outcome.logprobs() for outcome in run(engine, requests_of(prompts))])
