"""Small models of random weights that show what goes wrong, and that rounding does not disturb."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, Final

import numpy as np
import peft
import torch

from tests.families.small import Limits
from tests.support.models import VOCAB

transformers: Any = importlib.import_module("transformers")

_SCALES: Final = (3.0, 2.0, 1.5, 1.0)
_ROUNDING: Final = 1e-7
_AMPLIFIED: Final = 5e-5
"""By how many nats rows may change by rounding, for a check in thousandths to mean something."""


def save_small(config: Any, folder: Path, limits: Limits, seed: int) -> None:
    """Write a model of this configuration, its weights as large as rounding allows."""
    if config.is_encoder_decoder:
        config.save_pretrained(folder)  # no row follows from token ids alone
        return
    for scale in _SCALES:
        model = _made(config, seed, scale)
        if scale == _SCALES[-1] or _amplified(model, limits, seed) < _AMPLIFIED:
            break
    model.save_pretrained(folder)
    if type(model.config) is not type(config):
        config.save_pretrained(folder)  # of a model of text and more, only the text is made


def _made(config: Any, seed: int, scale: float) -> Any:
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: torch.Tensor, size: float) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator).to(tensor) * size

    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() < 2:
                parameter.add_(noise(parameter, 0.05))  # biases and sinks that begin with zeros
            elif float(parameter.abs().max()) == 0:
                parameter.add_(noise(parameter, 0.02))
            else:
                parameter.mul_(scale)
        for name, buffer in made.named_buffers():
            if buffer.is_floating_point() and "bias" in name:
                buffer.add_(noise(buffer, 0.01))  # routers' corrections
    return made


def _amplified(model: Any, limits: Limits, seed: int) -> float:
    """By how many nats most rows of a long prompt change where weights change by rounding."""
    ids = torch.from_numpy(np.random.default_rng(seed).integers(0, VOCAB, (1, limits.longest)))
    try:
        plain = _rows(model, ids)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                drawn = torch.randn(parameter.shape, generator=generator).to(parameter)
                saved = parameter.clone()
                parameter.mul_(1 + _ROUNDING * drawn)
                del saved
        moved = _rows(model, ids)
    except Exception:
        return 0.0  # it computes no such prompt: that is for the engine to say
    if not bool(plain.isfinite().all()):
        return float("inf")
    worst = (moved - plain).abs().amax(dim=-1)
    return float(worst.quantile(0.9)) if worst.numel() else 0.0


def _rows(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)


def save_random_adapter(model: Any, folder: Path, seed: int) -> Any:
    """Write a LoRA adapter of up to six kinds of modules, as PEFT saves it; the model with it, or
    None of one that has no such modules.

    PEFT's own loading names some models' weights otherwise than their saving does.
    """
    kinds = _linear_kinds(model)
    if not kinds:
        return None
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=kinds)
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    return adapted.eval()


def _linear_kinds(model: Any) -> list[str]:
    """The last parts of the names of linear layers inside the model's layers."""
    head = model.get_output_embeddings()
    # PEFT adapts what makes up experts as a whole, which no engine serves.
    experts = any(parameter.dim() == 3 for parameter in model.parameters())
    kinds: dict[str, None] = {}
    for name, module in model.named_modules():
        linear = type(module) in (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
        numbered = any(part.isdecimal() for part in name.split("."))
        if experts and re.search("mlp|moe|feed_forward|expert", name):
            continue
        if linear and numbered and module is not head and not name.rpartition(".")[2].isdecimal():
            kinds[name.rpartition(".")[2]] = None
    return list(kinds)[:6]
