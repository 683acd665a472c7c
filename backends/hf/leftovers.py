"""Whether transformers took a model's files for what they are.

It passes over tensors that it has no place for. Most of them do not matter: parts for images or for
drafting tokens, buffers that older releases saved. Others tell what the numbers of a weight mean.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from lmpool.backends.model_identity import weight_files
from lmpool.errors import SettingsError
from lmpool.tensor_files import StoredTensor, stored_tensors

logger = logging.getLogger(__name__)

_BESIDE_A_WEIGHT: Final = re.compile(
    r"scale|zero|absmax|amax|quant|codebook|lora_|(^|_)(bias|g_idx|scb|perm|rotation)$"
)
"""What those tensors are called, in lower case, without which a weight beside them is another."""
_OF_STATES: Final = re.compile(r"^(([kqv]|kv|output)_(scale|zero_point)|_extra_state)$")
"""Those that tell how keys, values and outputs may be stored, and change no weight."""
_CODES: Final = re.compile(r"F[468]_|[IU][48]$")
"""The dtypes, as safetensors calls them, of numbers that need a scale to mean anything."""


def check_all_used(model: Any, folder: Path, unused: Collection[str]) -> None:
    """Raise `SettingsError` where a model without quantization was filled with quantized weights,
    or where some of the tensors in `folder` that it has no place for, `unused`, belong to a weight
    that it has."""
    # The files of some models leave out the prefix of the names.
    roots = {model, model.base_model}
    lost = sorted(
        name for name in unused if any(_belongs_to_a_weight(root, name) for root in roots)
    )
    if lost:
        raise SettingsError(
            f"the weights in {str(folder)!r} hold {len(lost)} tensors that belong to the model's "
            f"own and that transformers leaves out, {lost[0]} for one: they are quantized in a way "
            "that their config.json does not tell, or not those of the model in it"
        )
    for name, tensor in _stored(folder):
        if _CODES.match(tensor.dtype) and name not in unused and _is_float(model, name):
            raise SettingsError(
                f"the weights in {str(folder)!r} are quantized ({name} is of {tensor.dtype}) in a "
                "way that their config.json does not tell: serve weights that are not, or complete "
                "its quantization_config"
            )
    if unused:
        logger.warning(
            "%s has no place for %d tensors in %s, %s for one",
            type(model).__name__,
            len(unused),
            folder,
            min(unused),
        )


def _belongs_to_a_weight(module: Any, name: str) -> bool:
    """Whether a tensor that is not in a module is of one of the weights in it, by its name."""
    path = name.split(".")
    for depth, part in enumerate(path):
        own = [key for key, _ in module.named_parameters(recurse=False)]
        rest = ".".join(path[depth:])
        # Such as weight_scale, or weight.absmax; or, deeper, weight_quantizer.scale.
        if any(rest.startswith((f"{key}_", f"{key}.")) for key in own):
            return True
        children = dict(module.named_children())
        if part not in children:
            states = _OF_STATES.match(path[-1])
            return bool(own and not states and _BESIDE_A_WEIGHT.search(part.lower()))
        module = children[part]
    return False


def _stored(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    for file in weight_files(folder)[0]:
        if file.endswith(".safetensors"):
            yield from stored_tensors(folder / file, SettingsError).items()


def _is_float(model: Any, name: str) -> bool:
    """Whether the model has a weight by this name of a file, of floating-point numbers."""
    prefix = f"{model.base_model_prefix}."
    for known in (name, prefix + name, name.removeprefix(prefix)):
        owner, _, leaf = known.rpartition(".")
        try:
            found = getattr(model.get_submodule(owner), leaf, None)
        except AttributeError:
            continue
        if isinstance(found, torch.nn.Parameter):
            return found.is_floating_point()
    return False
