"""Folders that hold no adapter of the model, and engines that have none."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Final

from lmpool.backends.contract.breaches import expect
from lmpool.backends.contract.model import Model
from lmpool.backends.contract.operations import AdapterFiles, Asked, Settle, Submit
from lmpool.backends.contract.reference import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from lmpool.backends.contract.script import versioned
from lmpool.backends.contract.truth import Truth
from lmpool.backends.engine import Engine
from lmpool.errors import AdapterError

_WRONG: Final = ("no folder", "no json", "cut short", "another model's")


def check_folders(engine: Engine, model: Model, truth: Truth, folder: Path) -> None:
    """Raise `BrokenPromise` where one is taken, or does harm."""
    name = versioned("wrong", 1)
    if "adapters" in truth.suite.lacks:
        folder.mkdir(parents=True, exist_ok=True)
        _expect_refusal(engine, name, folder, "an engine without adapters says so")
    elif "adapter files" not in truth.suite.lacks:
        for wrong in _WRONG:
            right = Path(truth.adapter(AdapterFiles(name, 7)).folder)
            place = folder / wrong.replace(" ", "-")
            if wrong != "no folder":
                shutil.copytree(right, place, dirs_exist_ok=True)
                _spoil(place, wrong)
            _expect_refusal(engine, name, place, f"a folder is refused: {wrong}")
    # The first one is not loaded, and no harm was done to the other.
    model.apply(Submit((Asked(1, (1, 2), name), Asked(2, (1, 2)))))
    model.apply(Settle())


def _spoil(place: Path, wrong: str) -> None:
    weights = place / ADAPTER_WEIGHTS
    if wrong == "no json":
        (place / ADAPTER_CONFIG).write_text("{")
    elif wrong == "cut short":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        files = importlib.import_module("safetensors.numpy")
        tensors = {name: t[:, :-1].copy() for name, t in files.load_file(weights).items()}
        files.save_file(tensors, weights)


def _expect_refusal(engine: Engine, name: str, place: Path, promise: str) -> None:
    try:
        engine.add_adapter(name, str(place))
    except AdapterError:
        return
    except Exception as error:
        expect(False, promise, f"{type(error).__name__} instead of AdapterError: {error}")
    expect(False, promise, f"add_adapter({name!r}, {str(place)!r}) says nothing")
