"""LoRA adapters as PEFT saves them: read once, checked, and the same for every engine.

What an adapter changes follows from the names and shapes of its matrices. No pattern of its
configuration is ever compiled: one that backtracks would hold the interpreter for minutes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lmpool.errors import AdapterError
from lmpool.tensor_files import StoredTensor, stored_tensors

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"

_PREFIX: Final = "base_model.model."
"""What PEFT writes before the names of a model's own modules."""
_AGAIN: Final = "save the adapter again with PEFT's save_pretrained()"
_ENDINGS: Final = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_A.default.weight": "A",
    ".lora_B.default.weight": "B",
    ".lora_embedding_A": "embedding A",
    ".lora_embedding_B": "embedding B",
}

_HEEDED: Final = frozenset(
    {
        "alpha_pattern", "exclude_modules", "fan_in_fan_out", "init_lora_weights",
        "layers_pattern", "layers_to_transform", "lora_alpha", "peft_type", "r", "rank_pattern",
        "target_modules", "use_rslora",
        # These change nothing once an adapter is trained.
        "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode",
        "loftq_config", "lora_dropout", "peft_version", "revision", "task_type",
    }
)  # fmt: skip
_DEFAULTS: Final[Mapping[str, object]] = {
    "bias": "none",
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
    "runtime_config": {"ephemeral_gpu_offload": False},
}
"""What PEFT writes of options that are not in use; of all others it is nothing, or empty."""
_HARMLESS_BEGINNINGS: Final = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initial weights that leave the base model as it is; others would change it for everybody."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What an adapter adds to one module: its input times A times B times `scale`.

    `a` is [rank, inputs, ...] and `b` [outputs, rank, ...]; of an `embedding` the inputs are
    tokens.
    """

    a: StoredTensor
    b: StoredTensor
    alpha: float
    embedding: bool

    @property
    def rank(self) -> int:
        """The numbers between A and B."""
        return self.a.shape[0]

    @property
    def scale(self) -> float:
        """The factor of their product."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class Lora:
    """One adapter: a pair of matrices for each module, by the module's name in transformers.

    `saved` are tensors of the base model that lie beside them, by the parameter's name.
    """

    folder: Path
    config: Mapping[str, Any]
    pairs: Mapping[str, Pair]
    saved: Mapping[str, StoredTensor]

    def check_saved(self, same: Callable[[str, StoredTensor], bool]) -> None:
        """Refuse tensors of the base model that are not `same` as the one that is served.

        PEFT saves embeddings beside matrices for them or for the head, mostly untrained.
        """
        for name, tensor in self.saved.items():
            if not same(name, tensor):
                raise AdapterError(
                    f"{_place(self.folder)} holds {name}, which is no LoRA matrix, and not as in "
                    "the model that is served: if it was not trained, save the adapter with "
                    "save_pretrained(save_embedding_layers=False)"
                )

    def asks_for(self, module: str) -> bool:
        """Whether the configuration lists `module`; of patterns in it nothing is known."""
        config = self.config
        targets, excluded = config.get("target_modules"), config.get("exclude_modules")
        if not isinstance(targets, list) or isinstance(excluded, str):
            return module in self.pairs
        if not _listed(module, targets) or _listed(module, excluded or ()):
            return False
        layers = config.get("layers_to_transform")
        if module in targets or layers is None or layers == []:  # a whole name, in any layer
            return True
        if config.get("layers_pattern"):
            return module in self.pairs
        return _layer(module) in (layers if isinstance(layers, list) else [layers])

    def explicit(self) -> dict[str, Any]:
        """The ranks and alphas for PEFT or what reads as it does: one pattern for each value.

        These patterns are alternatives of whole names, which cost no more than they are long.
        """
        ranks = [pair.rank for pair in self.pairs.values()]
        alphas = [pair.alpha for pair in self.pairs.values()]
        rank, alpha = max(set(ranks), key=ranks.count), max(set(alphas), key=alphas.count)
        return {
            "r": rank,
            "lora_alpha": alpha,
            "rank_pattern": _alternatives(zip(self.pairs, ranks, strict=True), rank),
            "alpha_pattern": _alternatives(zip(self.pairs, alphas, strict=True), alpha),
        }


def read_lora(folder: Path) -> Lora:
    """The adapter in `folder`. Raises `AdapterError` for one that is not whole, or no plain LoRA.

    Nothing of a file but its header is kept in memory.
    """
    config = _config(folder)
    tensors = stored_tensors(folder / WEIGHTS, AdapterError)
    halves: dict[str, dict[str, StoredTensor]] = {}
    saved: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        own = name.removeprefix(_PREFIX)
        ending = next((e for e in _ENDINGS if own.endswith(e)), None)
        if ending is not None:
            halves.setdefault(own.removesuffix(ending), {})[_ENDINGS[ending]] = tensor
        elif ".lora_" in own:
            raise AdapterError(
                f"{_place(folder)} holds {own}: only plain LoRA is served, matrices A and B beside "
                "layers of the model"
            )
        else:
            saved[own.replace(".base_layer.", ".")] = tensor
    if not halves:
        raise AdapterError(f"{_place(folder)} is empty: it has no LoRA matrices; {_AGAIN}")
    pairs = {module: _pair(folder, config, module, halves[module]) for module in sorted(halves)}
    found = Lora(folder, config, pairs, saved)
    for module in pairs:
        if not found.asks_for(module):
            raise AdapterError(
                f"{_place(folder)} holds matrices of {module!r}, and the lists in {CONFIG} do not "
                f"name that module: {_AGAIN}"
            )
    return found


def _pair(
    folder: Path, config: Mapping[str, Any], module: str, halves: Mapping[str, StoredTensor]
) -> Pair:
    kinds = ("embedding A", "embedding B") if "embedding" in str([*halves]) else ("A", "B")
    for kind in kinds:
        if kind not in halves or len(halves) > 2:
            other = " and ".join(f"lora {found}" for found in halves)
            raise AdapterError(
                f"{_place(folder)} has {other} of {module!r} without lora {kind}, so half of a "
                f"pair: {_AGAIN}"
            )
    a, b = (halves[kind] for kind in kinds)
    for tensor in (a, b):
        if not tensor.is_finite():
            raise AdapterError(
                f"{_place(folder)} has {tensor.name} with values that are no finite numbers: "
                "take an earlier checkpoint of the adapter"
            )
    if len(a.shape) < 2 or len(b.shape) < 2 or 0 in a.shape or a.shape[0] != b.shape[1]:
        raise AdapterError(
            f"{_place(folder)} has A of shape {a.shape} and B of shape {b.shape} for {module!r}, "
            f"which are no pair [rank, inputs] and [outputs, rank]: {_AGAIN}"
        )
    rank = a.shape[0]
    declared = _declared(config, "rank_pattern", module, config.get("r", 8))
    if declared is not None and rank != declared:
        raise AdapterError(
            f"{_place(folder)} has {a.name} of shape {a.shape}: a rank of {declared} is expected "
            f"of r={config.get('r', 8)} and rank_pattern in {CONFIG}; correct it, or {_AGAIN}"
        )
    alpha = _declared(config, "alpha_pattern", module, config.get("lora_alpha", 8))
    if alpha is None:
        raise AdapterError(
            f"{CONFIG} in {str(folder)!r} has alpha_pattern={config['alpha_pattern']!r:.200}, "
            f"which may tell the alpha of {module!r} by a regular expression, and none is run: "
            "write the names of modules there"
        )
    rslora = bool(config.get("use_rslora"))
    return Pair(a, b, alpha * math.sqrt(rank) if rslora else alpha, kinds[0] != "A")


def _declared(config: Mapping[str, Any], field: str, module: str, default: Any) -> Any:
    """What the configuration says of a module; None where a regular expression might say it.

    As PEFT does: the first name that fits counts, and a name fits where the module's ends with it.
    """
    for key, value in (config.get(field) or {}).items():
        whole = key.startswith("^")
        name = key.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if not all(part.isidentifier() or part.isdecimal() for part in name.split(".")):
            return None
        before, end = module[: -len(name)], module[-len(name) :]
        # A dot is any character in PEFT's reading.
        fits = len(end) == len(name) and all(n in (".", e) for n, e in zip(name, end, strict=True))
        if fits and (not before or (before.endswith(".") and not whole)):
            return value
    return default


def _config(folder: Path) -> dict[str, Any]:
    """The adapter's configuration, of which only plain LoRA is taken."""
    place = f"{CONFIG} in {str(folder)!r}"
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{place} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{place} is no JSON object")
    if config.get("peft_type") != "LORA":
        raise AdapterError(
            f"{place} has peft_type={config.get('peft_type')!r}: only 'LORA' adapters are served"
        )
    _check_numbers(place, config)
    start = config.get("init_lora_weights")
    if start not in _HARMLESS_BEGINNINGS:
        raise AdapterError(
            f"{place} has init_lora_weights={start!r}, which changes the base model: convert the "
            "adapter with save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    for name, value in config.items():
        if value and name not in _HEEDED and _DEFAULTS.get(name) != value:
            raise AdapterError(
                f"{place} has {name}={value!r:.100}: only plain LoRA is served, matrices A and B "
                "beside layers of the model"
            )
    _check_lists(place, config)
    return config


def _check_numbers(place: str, config: Mapping[str, Any]) -> None:
    for field in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(field) or {}, dict):
            raise AdapterError(f"{place} has {field}={config[field]!r:.100}: an object expected")
    for value in (config.get("r", 8), *(config.get("rank_pattern") or {}).values()):
        if type(value) is not int or value < 1:
            raise AdapterError(f"{place} has a rank of {value!r:.100}: a positive integer expected")
    for value in (config.get("lora_alpha", 8), *(config.get("alpha_pattern") or {}).values()):
        if type(value) not in (int, float) or not abs(value) < 1e30:
            raise AdapterError(f"{place} has a lora_alpha of {value!r:.100}: a number expected")


def _check_lists(place: str, config: Mapping[str, Any]) -> None:
    for field in ("target_modules", "exclude_modules"):
        value = config.get(field)
        names = isinstance(value, list) and all(isinstance(name, str) for name in value)
        if not (value is None or isinstance(value, str) or names):
            raise AdapterError(f"{place} has {field}={value!r:.100}: a list of names expected")


def _listed(module: str, names: Collection[str]) -> bool:
    parts = module.split(".")
    return any(".".join(parts[start:]) in names for start in range(len(parts)))


def _layer(module: str) -> int | None:
    """The number of the layer that a module is in, as PEFT finds it: the first one in its name."""
    parts = module.split(".")
    return next((int(part) for part in parts[2:-1] if part.isdecimal()), None)


def _alternatives(values: Iterable[tuple[str, float]], usual: float) -> dict[str, float]:
    modules: dict[float, list[str]] = {}
    for module, value in values:
        if value != usual:
            modules.setdefault(value, []).append(module.replace(".", "\\."))
    return {f"^(?:{'|'.join(names)})": value for value, names in modules.items()}


def _place(folder: Path) -> str:
    return f"{WEIGHTS} in {str(folder)!r}"


def mistaken(modules: Collection[str], names: Iterable[str]) -> list[str]:
    """Those of `names` that PEFT would take for one of `modules`, since they end like it."""
    chosen = frozenset(modules)
    return [name for name in names if name not in chosen and _listed(name, chosen)]
