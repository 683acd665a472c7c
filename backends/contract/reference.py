"""What is right: one float32 forward pass a prompt, with adapters merged into the weights."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmpool.backends.model_files import resolve_model

PromptTokens = Sequence[int]
_PREFIX = "base_model.model."


class Reference:
    """A causal model of transformers in float32 on the CPU, with no option of any kind."""

    def __init__(self, model: str) -> None:
        self.folder = resolve_model(model)
        transformers: Any = importlib.import_module("transformers")
        self._torch: Any = importlib.import_module("torch")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=self._torch.float32
        ).eval()
        self._known: dict[tuple[str, bytes], npt.NDArray[np.float32]] = {}

    @classmethod
    @functools.cache
    def of(cls, model: str) -> Reference:
        """The reference of `model`, loaded once."""
        return cls(model)

    def rows(
        self, prompts: Sequence[PromptTokens], adapter: str | os.PathLike[str] | None = None
    ) -> npt.NDArray[np.float32]:
        """Log-probabilities after each prompt, float32 [prompts, vocab].

        `adapter` is the folder of a LoRA adapter as PEFT writes it.
        """
        model = self._model if adapter is None else self._merged(os.fspath(adapter))
        rows = []
        for prompt in prompts:
            key = (os.fspath(adapter or ""), np.asarray(prompt, "<u4").tobytes())
            if key not in self._known:
                self._known[key] = self._row(model, prompt)
            rows.append(self._known[key])
        return np.stack(rows)

    def _row(self, model: Any, prompt: PromptTokens) -> npt.NDArray[np.float32]:
        torch = self._torch
        with torch.inference_mode():
            logits = model(torch.tensor([[int(t) for t in prompt]]), use_cache=False).logits[0, -1]
            row: npt.NDArray[np.float32] = torch.log_softmax(logits.float(), dim=-1).numpy()
        return row

    @functools.cache  # noqa: B019 -- there is one reference for each model, for the whole run
    def _merged(self, folder: str) -> Any:
        """The model with the adapter in `folder` added to its weights."""
        load_file = importlib.import_module("safetensors.torch").load_file
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
        rank, alpha = config["r"], config["lora_alpha"]
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        model = copy.deepcopy(self._model)
        modules = dict(model.named_modules())
        with self._torch.no_grad():
            for name, a in tensors.items():
                if not name.endswith(".lora_A.weight"):
                    continue
                b = tensors[name.replace(".lora_A.", ".lora_B.")]
                module = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
                modules[module].weight += scale * (b @ a)
        return model


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

    `targets` are the names of the linear layers that it changes; rows move by tenths of a nat and
    more.
    """
    torch: Any = importlib.import_module("torch")
    save_file = importlib.import_module("safetensors.torch").save_file
    chosen = sorted(targets)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in Reference.of(model)._model.named_modules():
        if name.rpartition(".")[2] in chosen:
            outputs, inputs = module.weight.shape
            a = torch.randn(rank, inputs, generator=random) / math.sqrt(inputs)
            b = torch.randn(outputs, rank, generator=random) * (0.5 / math.sqrt(rank))
            tensors[f"{_PREFIX}{name}.lora_A.weight"] = a
            tensors[f"{_PREFIX}{name}.lora_B.weight"] = b
    if not tensors:
        raise ValueError(f"targets={chosen!r}: the model {model!r} has no such layers")
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place / "adapter_model.safetensors")
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
    (place / "adapter_config.json").write_text(json.dumps(config))
    return str(place)
