"""Token sequences with much in common, and their right rows by transformers and PEFT."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import load_file, save_file

from lmpool.backends import Engine
from tests.support.engines import rows_of
from tests.support.models import VOCAB

TOLERANCE = 5e-5
"""What two ways of adding up in float32 may differ by: half of what is promised. Which of them a
processor takes is its own affair, and with some adapters they lie more than 1e-5 apart."""


def save_adapter(
    model: str,
    folder: Path,
    *,
    seed: int = 1,
    save_embedding_layers: bool = False,
    **options: Any,
) -> str:
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
    adapted.save_pretrained(str(folder), save_embedding_layers=save_embedding_layers)
    return str(folder)


def save_patterned_adapter(model: str, folder: Path) -> str:
    """An adapter of unlike ranks and scales, in the first layer alone, beside a saved embedding."""
    path = save_adapter(
        model,
        folder,
        target_modules=["k_proj", "o_proj", "up_proj"],
        rank_pattern={"k_proj": 2, "model.layers.0.mlp.up_proj": 7},
        alpha_pattern={"^model.layers.0.self_attn.o_proj": 3},
        layers_to_transform=[0],
    )
    weights = Path(path, "adapter_model.safetensors")
    embedding = transformers.AutoModelForCausalLM.from_pretrained(model).get_input_embeddings()
    saved = {"base_model.model.model.embed_tokens.weight": embedding.weight.detach().clone()}
    save_file({**load_file(weights), **saved}, weights, {"format": "pt"})
    return path


def hide_modules(folder: str) -> None:
    """Have the configuration tell its modules by a pattern on which `re` would spend ages."""
    file = Path(folder, "adapter_config.json")
    backtracking = r"^(([a-z_.0-9])+)+!"
    changes = {"target_modules": backtracking, "layers_to_transform": None, "modules_to_save": []}
    patterns = {"rank_pattern": {backtracking: 3}, "exclude_modules": backtracking}
    config = {**json.loads(file.read_text()), **changes, **patterns}
    file.write_text(json.dumps({**config, "target_parameters": [], "eva_config": {}}))


def reference_model(model: str, adapter: str | None = None, dtype: str = "float32") -> Any:
    """transformers' model, or PEFT's around it, with no device of ours."""
    lm = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    if adapter is not None:
        import peft

        with warnings.catch_warnings(action="ignore"):
            lm = peft.PeftModel.from_pretrained(lm, adapter)
    return lm.eval()


def logits_by(model: Any, text: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """What a model of transformers makes of each token of a text but the last, [len - 1, vocab]."""
    with torch.inference_mode():
        logits = model(torch.from_numpy(text[:-1].astype(np.int64))[None]).logits[0]
    found: npt.NDArray[np.float64] = logits.double().numpy()
    return found


def right_logits(
    model: str, adapter: str | None = None, dtype: str = "float32"
) -> Callable[[npt.NDArray[np.uint32]], npt.NDArray[np.float64]]:
    """`logits_by` a model that is loaded for it."""
    return functools.partial(logits_by, reference_model(model, adapter, dtype))


def reference_rows(
    model: str,
    prompts: Sequence[Sequence[int]],
    adapter: str | None = None,
    dtype: str = "float32",
) -> npt.NDArray[np.float32]:
    """One forward pass a prompt, with no option of any kind: float32 [prompts, vocab]."""
    lm = reference_model(model, adapter, dtype)
    with torch.inference_mode():
        logits = [lm(torch.tensor([list(p)])).logits[0, -1].float() for p in prompts]
        rows: npt.NDArray[np.float32] = torch.log_softmax(torch.stack(logits), dim=-1).numpy()
    return rows


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

    def compare(self, engine: Engine, batch: Sequence[tuple[int, int]]) -> None:
        rows = rows_of(engine, [self.sequences[i][:n] for i, n in batch])
        for (i, n), row in zip(batch, rows, strict=True):
            error = np.abs(row - self.rows[i][n - 1].numpy()).max()
            assert error < TOLERANCE, f"{n} tokens of sequence {i}: {error}"
