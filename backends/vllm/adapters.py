"""LoRA adapters for vLLM, which finds out what does not fit when a prompt uses them."""

from __future__ import annotations

import json
from pathlib import Path

from lmpool.backends.lora import CONFIG, WEIGHTS, Lora, read_lora
from lmpool.errors import AdapterError
from lmpool.tensor_files import ModelTensors, write_tensors


def check_adapter(folder: Path, model: ModelTensors) -> Lora:
    """Read an adapter, and refuse one whose matrices have not the sizes of what they change.

    Weights that the model's files do not name as the adapter does (quantized ones) are left to
    vLLM. Raises `AdapterError`.
    """
    lora = read_lora(folder)
    lora.check_saved(model.same)
    for module, pair in lora.pairs.items():
        weight = model.by_name.get(f"{module}.weight")
        if weight is None or len(weight.shape) != 2 or pair.embedding:
            continue
        outputs, inputs = weight.shape
        if pair.a.shape != (pair.rank, inputs) or pair.b.shape != (outputs, pair.rank):
            raise AdapterError(
                f"adapter folder {str(folder)!r} has {pair.a.name!r} of shape {pair.a.shape} and "
                f"B of shape {pair.b.shape}, and the model's weight has {weight.shape}: it was "
                "trained for another model"
            )
    return lora


def write_plain(lora: Lora, folder: Path) -> None:
    """Write the adapter into `folder` as vLLM takes it.

    Without tensors of the base model, and with no pattern but of whole names. Where the file is as
    it should be, a link to it is enough.
    """
    folder.mkdir()
    plain = {
        tensor.name.replace(".default.", "."): tensor
        for pair in lora.pairs.values()
        for tensor in (pair.a, pair.b)
    }
    if lora.saved or any(name != tensor.name for name, tensor in plain.items()):
        write_tensors(folder / WEIGHTS, plain)
    else:
        (folder / WEIGHTS).symlink_to(lora.folder / WEIGHTS)
    config = {"peft_type": "LORA", "target_modules": list(lora.pairs), **lora.explicit()}
    (folder / CONFIG).write_text(json.dumps(config), "utf-8")
