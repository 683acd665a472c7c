"""LoRA adapters of PEFT for SGLang, which finds out what does not fit when a batch breaks on it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

from lmpool.backends.lora import WEIGHTS, Lora, Pair, read_lora
from lmpool.errors import AdapterError
from lmpool.tensor_files import ModelTensors

_TOGETHER: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that SGLang computes as one: it wants matrices for all of them, or for none."""


class AdapterReader:
    """Reads adapters of the model in folder `model`, of a rank up to `max_rank`."""

    def __init__(self, model: Path, max_rank: int) -> None:
        self._model = model
        self._max_rank = max_rank

    def read(self, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Its config as SGLang takes it, and its matrices. Raises `AdapterError`.

        SGLang knows one rank and one scale: smaller matrices are padded with zeros, and where the
        scales differ they are part of B.
        """
        lora = read_lora(folder)
        lora.check_saved(ModelTensors(self._model).same)
        self._check_shapes(lora)
        rank = max(pair.rank for pair in lora.pairs.values())
        if rank > self._max_rank:
            raise AdapterError(
                f"adapter folder {str(folder)!r} has rank {rank}: write "
                f"engine_opts={{'max_lora_rank': {rank}}}"
            )
        scales = {pair.scale for pair in lora.pairs.values()}
        scale = scales.pop() if len(scales) == 1 else 1.0
        tensors: dict[str, torch.Tensor] = {}
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            for module, pair in lora.pairs.items():
                a, b = file.get_tensor(pair.a.name), file.get_tensor(pair.b.name)
                if pair.scale != scale:
                    b = (b.float() * pair.scale).to(b.dtype)
                more = rank - pair.rank
                _put(
                    tensors,
                    module,
                    torch.nn.functional.pad(a, (0, 0, 0, more)),
                    torch.nn.functional.pad(b, (0, more)),
                )
        like = next(iter(tensors.values()))
        for module in self._zeros(lora):
            outputs, inputs = self._layer_shapes[module]
            _put(tensors, module, like.new_zeros(rank, inputs), like.new_zeros(outputs, rank))
        modules = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": scale * rank,
            "target_modules": sorted(modules),
            "bias": "none",
        }
        return config, tensors

    def _zeros(self, lora: Lora) -> Iterator[str]:
        """Layers that the adapter leaves alone, and SGLang computes with one that it changes."""
        for module in lora.pairs:
            parent, _, own = module.rpartition(".")
            group = next((group for group in _TOGETHER if own in group), ())
            for other in group:
                name = f"{parent}.{other}"
                if name not in lora.pairs and name in self._layer_shapes:
                    yield name

    def _check_shapes(self, lora: Lora) -> None:
        """SGLang copies what fits and breaks on the rest, a batch later."""
        for module, pair in lora.pairs.items():
            layer = self._layer_shapes.get(module)
            if layer is None or pair.embedding or _shape(pair) != layer:
                raise AdapterError(
                    f"adapter folder {str(lora.folder)!r} has {pair.a.name!r} of shape "
                    f"{pair.a.shape} with B of shape {pair.b.shape}, and the model has "
                    + (
                        "no linear layer of that name"
                        if layer is None
                        else f"a layer [outputs, inputs] of {layer}"
                    )
                    + ": it is another model's"
                )

    @functools.cached_property
    def _layer_shapes(self) -> dict[str, tuple[int, int]]:
        """[outputs, inputs] of each linear layer, by the name that PEFT calls it."""
        transformers: Any = importlib.import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(self._model)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        return {
            name: (module.weight.shape[0], module.weight.shape[1])
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }


def _shape(pair: Pair) -> tuple[int, int] | None:
    whole = len(pair.a.shape) == len(pair.b.shape) == 2
    return (pair.b.shape[0], pair.a.shape[1]) if whole else None


def _put(tensors: dict[str, torch.Tensor], module: str, a: torch.Tensor, b: torch.Tensor) -> None:
    tensors[f"base_model.model.{module}.lora_A.weight"] = a.contiguous()
    tensors[f"base_model.model.{module}.lora_B.weight"] = b.contiguous()
