"""What is right: transformers in float32 without any padding, adapters merged into the weights."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from lmpool.backends.model_files import resolve_model
from lmpool.backends.soft_caps import capped_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PromptTokens = Sequence[int]

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
ADAPTER_PREFIX: Final = "base_model.model."
"""What PEFT writes before the names of a model's own modules."""

_TOGETHER = 64
_KEPT_BYTES = 64 << 20
_Key = tuple[bytes, bytes]


class Reference:
    """A causal model of transformers in float32 on the CPU, with no option of any kind.

    Prompts of one length share a forward pass; nothing is padded, and nothing kept but rows.
    """

    def __init__(self, model: str) -> None:
        self.folder = resolve_model(model)
        transformers: Any = importlib.import_module("transformers")
        self._torch: Any = importlib.import_module("torch")
        config = transformers.AutoConfig.from_pretrained(self.folder)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=self._torch.float32, **capped_attention(config, {})
        ).eval()
        self._base: dict[str, Any] = {}
        """What the weights were that the merged adapter changed."""
        self._merged = b""
        self._known: dict[_Key, npt.NDArray[np.float32]] = {}
        self._known_bytes = 0

    @classmethod
    @functools.cache
    def of(cls, model: str) -> Reference:
        """The reference of `model`, loaded once."""
        return cls(model)

    @property
    def model(self) -> PreTrainedModel:
        """The model itself, with no adapter in its weights whatever rows were asked for before."""
        if self._merged:
            self._merge(b"", None)
        model: PreTrainedModel = self._model
        return model

    def rows(
        self, prompts: Sequence[PromptTokens], adapter: str | os.PathLike[str] | None = None
    ) -> npt.NDArray[np.float32]:
        """Log-probabilities after each prompt, float32 [prompts, vocab].

        `adapter` is the folder of a LoRA adapter as PEFT writes it. Raises `ValueError` for one
        that is more than matrices A and B, biases and saved tensors.
        """
        contents = None if adapter is None else _read(Path(adapter))
        # Not by its folder, which may hold another one later.
        name = b"" if contents is None else hashlib.blake2b(b"".join(contents)).digest()
        keys = [(name, np.asarray(prompt, "<u4").tobytes()) for prompt in prompts]
        if self._known_bytes > _KEPT_BYTES:
            self._known.clear()
            self._known_bytes = 0
        by_length: dict[int, list[_Key]] = {}
        for key in dict.fromkeys(keys):
            if key not in self._known:
                by_length.setdefault(len(key[1]), []).append(key)
        if by_length and name != self._merged:
            self._merge(name, contents)
        for alike in by_length.values():
            for start in range(0, len(alike), _TOGETHER):
                part = alike[start : start + _TOGETHER]
                rows = self._rows(part)
                self._known.update(zip(part, rows, strict=True))
                self._known_bytes += rows.nbytes
        return np.stack([self._known[key] for key in keys])

    def _rows(self, keys: Sequence[_Key]) -> npt.NDArray[np.float32]:
        torch = self._torch
        tokens = np.stack([np.frombuffer(prompt, "<u4") for _, prompt in keys]).astype(np.int64)
        with torch.inference_mode():
            logits = self._model(torch.from_numpy(tokens), use_cache=False).logits[:, -1]
            rows: npt.NDArray[np.float32] = torch.log_softmax(logits.float(), dim=-1).numpy()
        return rows

    # --- adapters ------------------------------------------------------------------------------

    def _merge(self, name: bytes, contents: tuple[bytes, bytes] | None) -> None:
        """Have the model compute with an adapter, or with none."""
        with self._torch.no_grad():
            while self._base:
                parameter, value = self._base.popitem()
                self._own(parameter).copy_(value)
            self._merged = b""
            if contents is not None:
                tensors = importlib.import_module("safetensors.torch").load(contents[1])
                for parameter, value in changes(self._model, json.loads(contents[0]), tensors):
                    own = self._own(parameter)
                    if parameter not in self._base:
                        self._base[parameter] = own.clone()
                    own.copy_(value)
            self._merged = name

    def _own(self, parameter: str) -> Any:
        """A parameter of the model, which no other module has from now on."""
        module, _, name = parameter.rpartition(".")
        owner = self._model.get_submodule(module)
        found = getattr(owner, name)
        others = (m for m in self._model.modules() if m is not owner)
        if any(found is own for m in others for own in m._parameters.values()):
            # PEFT changes what one module computes, never another's by way of a tied weight.
            found = self._torch.nn.Parameter(found.detach().clone(), requires_grad=False)
            setattr(owner, name, found)
        return found


def _read(folder: Path) -> tuple[bytes, bytes]:
    return (folder / ADAPTER_CONFIG).read_bytes(), (folder / ADAPTER_WEIGHTS).read_bytes()


def changes(
    model: Any, config: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Each parameter that an adapter changes in `model`, and its value, as PEFT computes."""
    biases: dict[str, Any] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.removeprefix(ADAPTER_PREFIX).partition(".lora_")
        if not kind:  # a bias, or a module that was trained as a whole
            yield module.replace(".base_layer.", "."), tensor.float()
        elif kind == "B.bias":
            biases[module] = tensor.float() * _scale(config, module, tensors)
        elif kind not in ("A.weight", "B.weight", "embedding_A", "embedding_B"):
            raise ValueError(f"{name}: the reference knows matrices A and B alone")
    for name, a in tensors.items():
        module, _, kind = name.removeprefix(ADAPTER_PREFIX).partition(".lora_")
        if kind not in ("A.weight", "embedding_A"):
            continue
        b = tensors[name.replace("lora_A", "lora_B").replace("embedding_A", "embedding_B")]
        own = model.get_submodule(module).weight
        delta = (b.float() @ a.float()) * _scale(config, module, tensors)
        # An embedding's matrix, and that of GPT-2's layers, has its inputs first.
        turned = kind == "embedding_A" or type(model.get_submodule(module)).__name__ == "Conv1D"
        yield f"{module}.weight", own + (delta.T if turned else delta)
    for module, bias in biases.items():
        yield f"{module}.bias", model.get_submodule(module).bias + bias


def _scale(config: Mapping[str, Any], module: str, tensors: Mapping[str, Any]) -> float:
    kinds = (".lora_A.weight", ".lora_embedding_A")
    rank = next(tensors[n].shape[0] for k in kinds if (n := ADAPTER_PREFIX + module + k) in tensors)
    alpha = float(config["lora_alpha"])
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = float(value)
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
