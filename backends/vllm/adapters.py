"""Whether a LoRA adapter's files fit the model: vLLM finds out when a prompt uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from lmpool.errors import AdapterError

_PREFIX: Final = "base_model.model."
_WEIGHTS: Final = "adapter_model.safetensors"

Shapes = dict[str, tuple[int, ...]]


def weight_shapes(folder: Path) -> Shapes:
    """The shapes of a model's weights by name; of its safetensors files alone."""
    shapes: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        shapes.update(_shapes(file))
    return shapes


def check_adapter(folder: Path, model: Shapes) -> None:
    """Refuse an adapter whose matrices have not the sizes of the weights that they change.

    Weights that the model's files do not name as the adapter does (quantized ones) are left to
    vLLM. Raises `AdapterError`.
    """
    try:
        tensors = _shapes(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise AdapterError(f"adapter folder {str(folder)!r} cannot be read: {reason}") from error
    for name, shape in tensors.items():
        module, found, _ = name.removeprefix(_PREFIX).partition(".lora_")
        weight = model.get(f"{module}.weight", ())
        if not found or len(weight) != 2 or len(shape) != 2:
            continue
        # A is [rank, inputs] and B [outputs, rank]; of an embedding the other way round.
        size = shape[1] if ".lora_A" in name else shape[0]
        expected = weight[1] if ".lora_A" in name else weight[0]
        if "lora_embedding" not in name and size != expected:
            raise AdapterError(
                f"adapter folder {str(folder)!r} has {name!r} of shape {shape}, and the model's "
                f"weight has {weight}: it was trained for another model"
            )


def _shapes(file: Path) -> Shapes:
    with safe_open(file, framework="numpy") as opened:
        names = opened.keys()
        return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
