"""LoRA adapters of a transformers model, by PEFT: checked, loaded, chosen and removed.

An adapter is checked against the model before any of its weights are used: its config, then the
name and the shape of every matrix in its file. Weights are read as safetensors only.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lmpool.errors import AdapterError

logger = logging.getLogger(__name__)

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"

_PREFIX: Final = "base_model.model."
"""What PEFT writes before the names of a model's own modules."""

# Fields of a LoraConfig that the engine heeds, or that change nothing once an adapter is trained.
_HEEDED: Final = frozenset(
    {
        "alpha_pattern", "exclude_modules", "fan_in_fan_out", "init_lora_weights",
        "layers_pattern", "layers_to_transform", "lora_alpha", "peft_type", "r", "rank_pattern",
        "target_modules", "use_rslora",
        "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version",
        "revision", "task_type",
    }
)  # fmt: skip
_HARMLESS_BEGINNINGS: Final = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initial weights that leave the base model as it is; others would change it for everybody."""


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
        config = _config(folder)
        weights = _weights(folder)
        peft: Any = importlib.import_module("peft")
        lora = _lora_config(peft, config, folder)
        # PEFT finds an adapter's tensors by a part of their names: none may begin like another.
        name = f"adapter{self._serial:08d}"
        self._serial += 1
        try:
            self._inject(peft, lora, name, weights, folder)
        except BaseException:
            self._delete(name)
            raise
        base = str(config.get("base_model_name_or_path") or "")
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

    def _inject(
        self, peft: Any, lora: Any, name: str, weights: Mapping[str, torch.Tensor], folder: Path
    ) -> None:
        functional: Any = importlib.import_module("peft.functional")
        # PEFT would warn of the adapters that are there, as if that were a mistake.
        others = self._model.__dict__.pop("peft_config", {})
        try:
            # On the meta device: nothing is allocated before the shapes are known to fit.
            functional.inject_adapter_in_model(lora, self._model, name, low_cpu_mem_usage=True)
        except (ValueError, TypeError, RuntimeError) as error:
            raise AdapterError(
                f"adapter folder {str(folder)!r} does not fit {_described(self._model)}: {error}"
            ) from error
        finally:
            self._model.peft_config = {**others, name: lora}
        expected = functional.get_peft_model_state_dict(
            self._model, adapter_name=name, save_embedding_layers=False
        )
        _compare(weights, expected, lora, _described(self._model), folder)
        functional.set_peft_model_state_dict(
            self._model, dict(weights), name, low_cpu_mem_usage=True
        )
        for layer in self._layers():
            for parameter in layer.parameters():
                parameter.requires_grad_(False)

    def _delete(self, name: str) -> None:
        self._choose(None)
        for layer in self._layers():
            layer.delete_adapter(name)
        getattr(self._model, "peft_config", {}).pop(name, None)


def _config(folder: Path) -> dict[str, Any]:
    """The adapter's config, of which only plain LoRA is taken."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{CONFIG} in {str(folder)!r} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG} in {str(folder)!r} is no JSON object")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(
            f"{CONFIG} in {str(folder)!r} has peft_type={kind!r}: only 'LORA' adapters are served"
        )
    rank = config.get("r")
    ranks = config.get("rank_pattern") or {}
    for value in (rank, *(ranks.values() if isinstance(ranks, dict) else [ranks])):
        if type(value) is not int or value < 1:
            raise AdapterError(
                f"{CONFIG} in {str(folder)!r} has a rank of {value!r}: a positive integer expected"
            )
    start = config.get("init_lora_weights")
    if start not in _HARMLESS_BEGINNINGS:
        raise AdapterError(
            f"{CONFIG} in {str(folder)!r} has init_lora_weights={start!r}, which changes the base "
            "model: convert the adapter with save_pretrained("
            "path_initial_model_for_weight_conversion=...)"
        )
    return config


def _lora_config(peft: Any, config: Mapping[str, Any], folder: Path) -> Any:
    """PEFT's config of an adapter, without anything that the engine would not do."""
    defaults = peft.LoraConfig().to_dict()
    for name, value in config.items():
        if name in _HEEDED or value == defaults.get(name) or (name not in defaults and not value):
            continue
        raise AdapterError(
            f"{CONFIG} in {str(folder)!r} has {name}={value!r:.100}: only plain LoRA is served, "
            "matrices A and B beside layers of the model"
        )
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    options = {name: value for name, value in config.items() if name in _HEEDED and name in fields}
    options |= {"init_lora_weights": False, "inference_mode": True, "lora_dropout": 0.0}
    try:
        return peft.LoraConfig(**options)
    except (ValueError, TypeError) as error:
        raise AdapterError(f"{CONFIG} in {str(folder)!r}: {error}") from error


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """The matrices by the names of the model's modules."""
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise AdapterError(
            f"{WEIGHTS} in {str(folder)!r} is no safetensors file: {error}"
        ) from error
    if not weights:
        raise AdapterError(f"{WEIGHTS} in {str(folder)!r} is empty")
    found = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()}
    for name, tensor in found.items():
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise AdapterError(
                f"{WEIGHTS} in {str(folder)!r} has {name} with values that are no finite numbers"
            )
    return found


def _compare(
    weights: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    lora: Any,
    model: str,
    folder: Path,
) -> None:
    """Raise `AdapterError` unless the file has the matrices that config and model ask for."""
    place = f"{WEIGHTS} in {str(folder)!r}"
    if missing := sorted(expected.keys() - weights.keys()):
        raise AdapterError(
            f"{place} lacks {len(missing)} of the {len(expected)} matrices that its config asks of "
            f"{model}, {missing[0]} for one"
        )
    if strange := sorted(weights.keys() - expected.keys()):
        raise AdapterError(
            f"{place} holds {strange[0]}, one of {len(strange)} tensors that are no matrices of "
            f"this adapter in {model}: its config does not target that module, or the adapter is "
            "another model's"
        )
    for name, tensor in weights.items():
        wanted = tuple(expected[name].shape)
        if tuple(tensor.shape) != wanted:
            raise AdapterError(
                f"{place} has {name} of shape {tuple(tensor.shape)}: {wanted} is expected of "
                f"r={lora.r} in {model}; the rank in {CONFIG} is wrong, or the adapter is another "
                "model's"
            )


def _described(model: Any) -> str:
    config = model.config.get_text_config()
    hidden = getattr(config, "hidden_size", None)
    return f"{type(model).__name__} with hidden_size={hidden}"
