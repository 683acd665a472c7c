"""Adapters to test with: random ones, as PEFT writes them."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lmpool.backends.contract.reference import (
    ADAPTER_CONFIG,
    ADAPTER_PREFIX,
    ADAPTER_WEIGHTS,
    Reference,
)
from lmpool.backends.model_files import resolve_model


def write_adapter(
    folder: str | os.PathLike[str],
    model: str = "tiny",
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Iterable[str] = ("q_proj", "v_proj"),
    rslora: bool = False,
) -> str:
    """Write a random LoRA adapter for `model` into `folder`, as PEFT writes one; the folder.

    `targets` are the names of the linear layers, or of the embeddings, that it changes; rows move
    by tenths of a nat and more.
    """
    torch: Any = importlib.import_module("torch")
    save_file = importlib.import_module("safetensors.torch").save_file
    chosen = sorted(targets)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in Reference.of(model).model.named_modules():
        if name.rpartition(".")[2] in chosen:
            weight: Any = module.weight
            outputs, inputs = weight.shape
            embedding = isinstance(module, torch.nn.Embedding)
            if embedding or type(module).__name__ == "Conv1D":
                outputs, inputs = inputs, outputs
            a = torch.randn(rank, inputs, generator=random) / math.sqrt(inputs)
            b = torch.randn(outputs, rank, generator=random) * (0.5 / math.sqrt(rank))
            if embedding:  # a token takes one column of A, not a sum over all
                a *= 0.1 * math.sqrt(inputs)
            kinds = ("embedding_A", "embedding_B") if embedding else ("A.weight", "B.weight")
            for kind, tensor in zip(kinds, (a, b), strict=True):
                tensors[f"{ADAPTER_PREFIX}{name}.lora_{kind}"] = tensor.contiguous()
    if not tensors:
        raise ValueError(f"targets={chosen!r}: the model {model!r} has no such layers")
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place / ADAPTER_WEIGHTS)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(resolve_model(model)),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": chosen,
        "bias": "none",
        "use_rslora": rslora,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    (place / ADAPTER_CONFIG).write_text(json.dumps(config))
    return str(place)
