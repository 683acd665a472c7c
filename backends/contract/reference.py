"""What is right: transformers in float32 without any padding, adapters merged into the weights."""

from __future__ import annotations

import copy
import functools
import hashlib
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

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_TOGETHER = 64
_Key = tuple[bytes, bytes]
_PREFIX = "base_model.model."


class Reference:
    """A causal model of transformers in float32 on the CPU, with no option of any kind.

    Prompts of one length share a forward pass; nothing is padded, and nothing kept but the rows.
    """

    def __init__(self, model: str) -> None:
        self.folder = resolve_model(model)
        transformers: Any = importlib.import_module("transformers")
        self._torch: Any = importlib.import_module("torch")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=self._torch.float32
        ).eval()
        self._adapted: dict[bytes, Any] = {}
        self._known: dict[_Key, npt.NDArray[np.float32]] = {}

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
        model, name = (self._model, b"") if adapter is None else self._with_adapter(Path(adapter))
        keys = [(name, np.asarray(prompt, "<u4").tobytes()) for prompt in prompts]
        by_length: dict[int, list[_Key]] = {}
        for key in dict.fromkeys(keys):
            if key not in self._known:
                by_length.setdefault(len(key[1]), []).append(key)
        for alike in by_length.values():
            for start in range(0, len(alike), _TOGETHER):
                part = alike[start : start + _TOGETHER]
                self._known.update(zip(part, self._rows(model, part), strict=True))
        return np.stack([self._known[key] for key in keys])

    def _rows(self, model: Any, keys: Sequence[_Key]) -> npt.NDArray[np.float32]:
        torch = self._torch
        tokens = np.stack([np.frombuffer(prompt, "<u4") for _, prompt in keys]).astype(np.int64)
        with torch.inference_mode():
            logits = model(torch.from_numpy(tokens), use_cache=False).logits[:, -1]
            rows: npt.NDArray[np.float32] = torch.log_softmax(logits.float(), dim=-1).numpy()
        return rows

    def _with_adapter(self, folder: Path) -> tuple[Any, bytes]:
        """The model with an adapter added to its weights, and what it is known by."""
        contents = [(folder / file).read_bytes() for file in (_CONFIG, _WEIGHTS)]
        # Not by its folder, which may hold another one later.
        name = hashlib.blake2b(b"".join(contents), digest_size=16).digest()
        if name not in self._adapted:
            self._adapted[name] = self._merged(*contents)
        return self._adapted[name], name

    def _merged(self, written: bytes, weights: bytes) -> Any:
        config = json.loads(written)
        tensors = importlib.import_module("safetensors.torch").load(weights)
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
    save_file(tensors, place / _WEIGHTS)
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
    (place / _CONFIG).write_text(json.dumps(config))
    return str(place)
