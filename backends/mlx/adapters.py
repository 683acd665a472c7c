"""LoRA adapters of PEFT on an MLX model: read once, their weights exchanged between batches."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmpool.backends.lora import WEIGHTS, Pair, read_lora
from lmpool.backends.mlx.model import mx, nn
from lmpool.errors import AdapterError
from lmpool.tensor_files import ModelTensors

lora: Any = importlib.import_module("mlx_lm.tuner.lora")


@dataclass(frozen=True, slots=True, eq=False)
class _Delta:
    """What an adapter adds to a layer: x @ a @ b, with a [inputs, rank] and b [rank, outputs]."""

    a: Any
    b: Any


class Adapters:
    """The adapters of the model that lies in `folder`.

    Layers are wrapped for the first adapter that changes them.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        self._model = model
        self._folder = folder
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
        found = read_lora(folder)
        found.check_saved(ModelTensors(self._folder).same)
        tensors = mx.load(str(folder / WEIGHTS))
        layers = self._linear_layers()
        deltas: dict[str, _Delta] = {}
        for module, pair in found.pairs.items():
            if pair.embedding:
                raise AdapterError(
                    f"adapter folder {str(folder)!r} changes the embedding {module!r}: the mlx "
                    "engine changes linear layers only"
                )
            path = _find(module, layers)
            _check_shapes(folder, path, layers[path], pair)
            a, b = tensors[pair.a.name], tensors[pair.b.name]
            dtype = a.dtype if a.dtype in (mx.float32, mx.bfloat16, mx.float16) else mx.float32
            deltas[path] = _Delta(a.T.astype(dtype), (b.T * pair.scale).astype(dtype))
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


def _check_shapes(folder: Path, path: str, layer: Any, pair: Pair) -> None:
    outputs, inputs = layer.weight.shape
    if isinstance(layer, nn.QuantizedLinear):
        inputs = inputs * 32 // layer.bits
    if pair.a.shape != (pair.rank, inputs) or pair.b.shape != (outputs, pair.rank):
        raise AdapterError(
            f"adapter folder {str(folder)!r} has A {pair.a.shape} and B {pair.b.shape} for "
            f"{path!r}, which takes {inputs} numbers and gives {outputs}: it is another model's"
        )
