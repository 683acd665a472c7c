"""LoRA adapters of a transformers model, by PEFT: checked, loaded, chosen and removed.

An adapter is checked against the model before any of its weights are used: its config, then the
name and the shape of every matrix in its file. Weights are read as safetensors only.
"""

from __future__ import annotations

import importlib
import itertools
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lmpool.backends.lora import CONFIG, WEIGHTS, Lora, Pair, mistaken, read_lora
from lmpool.errors import AdapterError
from lmpool.tensor_files import StoredTensor

logger = logging.getLogger(__name__)


class LoraAdapters:
    """The adapters loaded into one model, of which at most one is in use.

    `known_as` are the names of the model that an adapter may say it was made for.
    """

    def __init__(self, model: Any, known_as: Collection[str] = ()) -> None:
        self._model = model
        self._known_as = frozenset(known_as)
        self._names: dict[str, str] = {}
        self._serial = 0
        self.in_use: str | None = None

    def add(self, reference: str, folder: Path) -> None:
        """Load the adapter in `folder` as `reference`, replacing one of that name.

        Raises `AdapterError` where it is none, or none of this model; nothing has changed then.
        """
        lora = read_lora(folder)
        self._check_modules(lora)
        lora.check_saved(self._same)
        peft: Any = importlib.import_module("peft")
        config = self._peft_config(peft, lora)
        # PEFT finds an adapter's tensors by a part of their names: none may begin like another.
        name = f"adapter{self._serial:08d}"
        self._serial += 1
        try:
            self._inject(config, name, lora)
        except BaseException:
            self._delete(name)
            raise
        base = str(lora.config.get("base_model_name_or_path") or "")
        if base and Path(base).name not in self._known_as:
            logger.warning(
                "adapter folder %s says that it was made for the model %r; its matrices fit this "
                "one, and are used with it",
                folder,
                base,
            )
        self._choose(None)  # PEFT takes up what it loads
        self.remove(reference)
        self._names[reference] = name

    def remove(self, reference: str) -> None:
        """Unload an adapter; unknown names are ignored."""
        name = self._names.pop(reference, None)
        if name is not None:
            self._delete(name)

    def use(self, reference: str | None) -> None:
        """Compute with this adapter from now on; None: with the base model."""
        if reference != self.in_use:
            self._choose(reference)

    def changes_head(self, reference: str | None) -> bool:
        """Whether an adapter has the model's head compute something else."""
        name = None if reference is None else self._names[reference]
        head = self._model.get_output_embeddings()
        return any(
            name in getattr(head, part, {}) for part in ("lora_A", "lora_embedding_A") if name
        )

    def _choose(self, reference: str | None) -> None:
        chosen = [] if reference is None else [self._names[reference]]
        for layer in self._layers():
            layer.set_adapter(chosen, inference_mode=True)
        self.in_use = reference

    def _layers(self) -> list[Any]:
        if not self._serial:
            return []
        tuners: Any = importlib.import_module("peft.tuners.tuners_utils")
        return [m for m in self._model.modules() if isinstance(m, tuners.BaseTunerLayer)]

    # --- checks --------------------------------------------------------------------------------

    def _modules(self) -> list[str]:
        """The model's own modules, by the names that they have without adapters."""
        names = (name for name, _ in self._model.named_modules())
        return [name for name in names if ".lora_" not in name and ".base_layer" not in name]

    def _check_modules(self, lora: Lora) -> None:
        place, model = f"{WEIGHTS} in {str(lora.folder)!r}", _described(self._model)
        names = self._modules()
        if strange := sorted(lora.pairs.keys() - set(names)):
            raise AdapterError(
                f"{place} holds matrices of {strange[0]!r}, one of {len(strange)} modules that "
                f"are not found in {model}: the adapter is another model's"
            )
        asked = [name for name in names if lora.asks_for(name)]
        if missing := sorted(set(asked) - lora.pairs.keys()):
            raise AdapterError(
                f"{place} lacks the matrices of {len(missing)} of the {len(asked)} modules that "
                f"{CONFIG} lists, {missing[0]!r} for one: save the adapter again"
            )

    def _same(self, name: str, tensor: StoredTensor) -> bool:
        """Whether the model has this parameter, as far as the narrower dtype of the two tells."""
        module, _, parameter = name.rpartition(".")
        try:
            owner = self._model.get_submodule(module)
            base = owner.get_base_layer() if hasattr(owner, "get_base_layer") else owner
            own = base.get_parameter(parameter)
        except AttributeError:
            return False
        saved = _loaded(tensor)
        if saved.shape != own.shape:
            return False
        narrow = min(saved.dtype, own.dtype, key=lambda dtype: dtype.itemsize)
        return torch.equal(saved.to(own.device, narrow), own.detach().to(narrow))

    # --- PEFT ----------------------------------------------------------------------------------

    def _peft_config(self, peft: Any, lora: Lora) -> Any:
        """What PEFT is told: whole names in lists, so that it searches for nothing."""
        modules = list(lora.pairs)
        try:
            return peft.LoraConfig(
                target_modules=modules,
                exclude_modules=mistaken(modules, self._modules()) or None,
                fan_in_fan_out=bool(lora.config.get("fan_in_fan_out")),
                init_lora_weights=False,
                inference_mode=True,
                **lora.explicit(),
            )
        except (ValueError, TypeError) as error:
            raise AdapterError(f"{CONFIG} in {str(lora.folder)!r}: {error}") from error

    def _inject(self, config: Any, name: str, lora: Lora) -> None:
        functional: Any = importlib.import_module("peft.functional")
        # PEFT would warn of the adapters that are there, as if that were a mistake.
        others = self._model.__dict__.pop("peft_config", {})
        try:
            # On the meta device: nothing is allocated before the shapes are known to fit.
            functional.inject_adapter_in_model(config, self._model, name, low_cpu_mem_usage=True)
        except (ValueError, TypeError, RuntimeError) as error:
            raise AdapterError(
                f"adapter folder {str(lora.folder)!r} does not fit {_described(self._model)}: "
                f"{error}"
            ) from error
        finally:
            self._model.peft_config = {**others, name: config}
        for module, pair in lora.pairs.items():
            self._fill(self._model.get_submodule(module), name, module, pair, lora.folder)

    def _fill(self, layer: Any, name: str, module: str, pair: Pair, folder: Path) -> None:
        """Give a layer its matrices, in float32 as PEFT does, whatever the model computes in."""
        base = layer.get_base_layer()
        # Quantized layers call their weights otherwise, or hold them in buffers.
        device = next(itertools.chain(base.parameters(), base.buffers())).device
        for half, stored in (("A", pair.a), ("B", pair.b)):
            holder = getattr(layer, f"lora_{'embedding_' * pair.embedding}{half}", {})
            if name not in holder:
                raise AdapterError(
                    f"{WEIGHTS} in {str(folder)!r} has {stored.name}: {module!r} in "
                    f"{_described(self._model)} takes no such matrix"
                )
            wanted = holder[name] if pair.embedding else holder[name].weight
            if stored.shape != tuple(wanted.shape):
                raise AdapterError(
                    f"{WEIGHTS} in {str(folder)!r} has {stored.name} of shape {stored.shape}: "
                    f"{tuple(wanted.shape)} is expected of {module!r} in "
                    f"{_described(self._model)}; the adapter is another model's"
                )
            matrix = torch.nn.Parameter(_loaded(stored).to(device, torch.float32), False)
            if pair.embedding:
                holder[name] = matrix
            else:
                holder[name].weight = matrix

    def _delete(self, name: str) -> None:
        self._choose(None)
        for layer in self._layers():
            layer.delete_adapter(name)
        getattr(self._model, "peft_config", {}).pop(name, None)


def _loaded(tensor: StoredTensor) -> torch.Tensor:
    with safe_open(tensor.file, framework="pt") as file:
        found: torch.Tensor = file.get_tensor(tensor.name)
    return found


def _described(model: Any) -> str:
    config = model.config.get_text_config()
    hidden = getattr(config, "hidden_size", None)
    return f"{type(model).__name__} with hidden_size={hidden}"
