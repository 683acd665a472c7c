"""LoRA adapters of PEFT for SGLang, which finds out what does not fit when a batch breaks on it."""

from __future__ import annotations

import functools
import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lmpool.errors import AdapterError


class AdapterReader:
    """Reads adapters of the model in folder `model`, of a rank up to `max_rank`."""

    def __init__(self, model: Path, max_rank: int) -> None:
        self._model = model
        self._max_rank = max_rank

    def read(self, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Its config as SGLang takes it, and its matrices. Raises `AdapterError`."""
        load_file: Any = importlib.import_module("safetensors.torch").load_file
        try:
            config = json.loads((folder / "adapter_config.json").read_bytes())
            tensors = load_file(folder / "adapter_model.safetensors")
            rank, alpha = int(config["r"]), float(config["lora_alpha"])
        except Exception as error:
            raise AdapterError(
                f"adapter folder {str(folder)!r} cannot be read: {type(error).__name__}: {error}"
            ) from error
        for option in ("use_dora", "alpha_pattern", "rank_pattern", "modules_to_save"):
            if config.get(option):
                raise AdapterError(
                    f"adapter folder {str(folder)!r} has {option}={config[option]!r}: SGLang does "
                    "not compute that"
                )
        if rank > self._max_rank:
            raise AdapterError(
                f"adapter folder {str(folder)!r} has rank {rank}: write "
                f"engine_opts={{'max_lora_rank': {rank}}}"
            )
        self._check_shapes(folder, rank, tensors)
        if config.get("use_rslora"):
            # SGLang scales by alpha / rank.
            config = {**config, "lora_alpha": alpha * math.sqrt(rank), "use_rslora": False}
        return config, tensors

    def _check_shapes(self, folder: Path, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """SGLang copies what fits and breaks on the rest, a batch later."""
        shapes = self._layer_shapes
        for name, tensor in tensors.items():
            module, _, half = name.removeprefix("base_model.model.").rpartition(".lora_")
            layer = shapes.get(module)
            expected = None
            if layer is not None and half in ("A.weight", "B.weight"):
                expected = (rank, layer[1]) if half == "A.weight" else (layer[0], rank)
            if expected is None or tuple(tensor.shape) != expected:
                raise AdapterError(
                    f"adapter folder {str(folder)!r} has {name!r} of shape "
                    f"{tuple(tensor.shape)}, and the model "
                    + ("no such layer" if expected is None else f"takes {expected}")
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
