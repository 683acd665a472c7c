"""LoRA adapters of PEFT on an MLX model: read once, their weights exchanged between batches."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lmpool.backends.mlx.model import mx, nn
from lmpool.errors import AdapterError

lora: Any = importlib.import_module("mlx_lm.tuner.lora")

_TENSOR: Final = re.compile(r"^base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight$")
_UNSUPPORTED: Final = {
    "use_dora": "DoRA",
    "alpha_pattern": "an alpha of its own for some layers",
    "modules_to_save": "layers trained in full",
    "use_qalora": "QALoRA",
}


@dataclass(frozen=True, slots=True, eq=False)
class _Delta:
    """What an adapter adds to a layer: x @ a @ b, with a [inputs, rank] and b [rank, outputs]."""

    a: Any
    b: Any


class Adapters:
    """The adapters of one model. Layers are wrapped for the first adapter that changes them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._loaded: dict[str, Mapping[str, _Delta]] = {}
        self._wrapped: dict[str, tuple[Any, _Delta]] = {}
        self._active: str | None = None

    def add(self, name: str, folder: Path) -> None:
        """Read the adapter in `folder`. Raises `AdapterError` for one that does not fit."""
        deltas = self._read(folder)
        self.remove(name)
        for path in deltas:
            self._wrap(path)
        self._loaded[name] = deltas

    def remove(self, name: str) -> None:
        """Forget an adapter; unknown names are ignored."""
        if self._active == name:
            self.activate(None)
        self._loaded.pop(name, None)

    def activate(self, name: str | None) -> None:
        """Have the model compute with this adapter, or with none."""
        if name == self._active:
            return
        deltas = {} if name is None else self._loaded[name]
        for path, (layer, nothing) in self._wrapped.items():
            delta = deltas.get(path, nothing)
            layer.lora_a, layer.lora_b = delta.a, delta.b
        self._active = name

    def _wrap(self, path: str) -> None:
        if path in self._wrapped:
            return
        parent, _, name = path.rpartition(".")
        holder = dict(self._model.named_modules())[parent]
        layer = lora.LoRALinear.from_base(getattr(holder, name), r=1, scale=1.0)
        layer.eval()
        nothing = _Delta(mx.zeros_like(layer.lora_a), mx.zeros_like(layer.lora_b))
        layer.lora_a, layer.lora_b = nothing.a, nothing.b
        setattr(holder, name, layer)
        self._wrapped[path] = layer, nothing

    def _read(self, folder: Path) -> dict[str, _Delta]:
        try:
            config = json.loads((folder / "adapter_config.json").read_bytes())
            tensors = mx.load(str(folder / "adapter_model.safetensors"))
            mx.eval(tensors)
            alpha, rank = float(config["lora_alpha"]), int(config["r"])
        except Exception as error:
            raise AdapterError(
                f"adapter folder {str(folder)!r} cannot be read: {type(error).__name__}: {error}"
            ) from error
        for option, what in _UNSUPPORTED.items():
            if config.get(option):
                raise AdapterError(
                    f"adapter folder {str(folder)!r} has {option}={config[option]!r}: the mlx "
                    f"engine has no {what}"
                )
        halves: dict[str, dict[str, Any]] = {}
        for name, tensor in tensors.items():
            found = _TENSOR.match(name)
            if found is None:
                raise AdapterError(
                    f"adapter folder {str(folder)!r} has the tensor {name!r}, which is no LoRA "
                    "weight of a linear layer"
                )
            halves.setdefault(found[1], {})[found[2]] = tensor
        layers = self._linear_layers()
        deltas: dict[str, _Delta] = {}
        for module, pair in halves.items():
            path = _find(module, layers)
            if pair.keys() != {"A", "B"}:
                raise AdapterError(f"adapter folder {str(folder)!r} has half of {module!r} only")
            a, b = pair["A"], pair["B"]
            _check_shapes(folder, path, layers[path], a, b)
            own = a.shape[0]
            if own != rank and not config.get("rank_pattern"):
                raise AdapterError(
                    f"adapter folder {str(folder)!r} has rank {own} for {module!r} and r={rank}"
                )
            scale = alpha / (math.sqrt(own) if config.get("use_rslora") else own)
            dtype = a.dtype if a.dtype in (mx.float32, mx.bfloat16, mx.float16) else mx.float32
            deltas[path] = _Delta(a.T.astype(dtype), (b.T * scale).astype(dtype))
        mx.eval([(delta.a, delta.b) for delta in deltas.values()])
        return deltas

    def _linear_layers(self) -> dict[str, Any]:
        """The model's linear layers by their place; a wrapped one is where it was."""
        kinds = nn.Linear | nn.QuantizedLinear
        found = {p: m for p, m in self._model.named_modules() if isinstance(m, kinds)}
        for path, (wrapper, _) in self._wrapped.items():
            found.pop(f"{path}.linear")
            found[path] = wrapper.linear
        return found


def _find(module: str, layers: Mapping[str, Any]) -> str:
    """Where in the model the layer is that PEFT calls `module`.

    mlx-lm calls what holds a model's layers otherwise at times; the rest of the name, from the
    layer's number on, is the same.
    """
    parts = module.split(".")
    for start in range(len(parts)):
        ending = ".".join(parts[start:])
        found = [path for path in layers if path == ending or path.endswith(f".{ending}")]
        if len(found) == 1 and found[0].rpartition(".")[2] != "lm_head":
            return found[0]
        if parts[start].isdigit() or found:
            break
    raise AdapterError(
        f"the adapter changes {module!r}: the mlx engine has no linear layer of that name that an "
        "adapter could change"
    )


def _check_shapes(folder: Path, path: str, layer: Any, a: Any, b: Any) -> None:
    outputs, inputs = layer.weight.shape
    if isinstance(layer, nn.QuantizedLinear):
        inputs = inputs * 32 // layer.bits
    if a.shape[1:] != (inputs,) or b.shape != (outputs, a.shape[0]):
        raise AdapterError(
            f"adapter folder {str(folder)!r} has A {a.shape} and B {b.shape} for {path!r}, which "
            f"takes {inputs} numbers and gives {outputs}: it is another model's"
        )
