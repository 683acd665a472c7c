"""The import paths of engines that others write."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import lmpool.backends
from lmpool.backends import mock
from lmpool.backends.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
ENGINES = {"hf": "HFEngine", "mlx": "MLXEngine", "sglang": "SGLangEngine", "vllm": "VLLMEngine"}


@pytest.mark.parametrize(
    "name", ["BatchEngine", "ContinuousEngine", "Engine", "EngineInfo", "Outcome", "Request"]
)
def test_the_interface_is_in_the_package(name: str) -> None:
    assert name in lmpool.backends.__all__
    assert isinstance(getattr(lmpool.backends, name), type)


def test_the_loader_and_the_mock_are_where_they_were() -> None:
    assert callable(lmpool.backends.load_engine)
    assert mock.mock_row([1, 2], 10).shape == (10,)
    assert issubclass(mock.MockEngine, Engine)


@pytest.mark.parametrize(("module", "name"), ENGINES.items())
def test_an_engines_package_has_its_class_once_it_is_asked_for(module: str, name: str) -> None:
    script = (
        f"import sys, lmpool.backends.{module} as package\n"
        f"assert package.__all__ == [{name!r}]\n"
        "print(sorted({'torch', 'transformers', 'mlx', 'sglang', 'vllm'} & set(sys.modules)))\n"
        "try:\n"
        "    package.NoEngine\n"
        "except AttributeError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "[]",
        f"module 'lmpool.backends.{module}' has no attribute 'NoEngine'",
    ]


def test_the_class_of_transformers_engine() -> None:
    pytest.importorskip("transformers")
    from lmpool.backends.hf import HFEngine

    assert issubclass(HFEngine, Engine)


def test_the_entry_point_of_vllm_names_the_capture_processor() -> None:
    found = [
        point.value
        for point in importlib.metadata.entry_points(group="vllm.logits_processors")
        if point.name == "lmpool"
    ]
    assert set(found) <= {
        "lmpool.backends.vllm.capture:CaptureProcessor",
        "lmpool.backends.vllm_capture:CaptureProcessor",
    }
    assert importlib.util.find_spec("lmpool.backends.vllm_capture") is not None
    assert importlib.util.find_spec("lmpool.backends.vllm.capture") is not None
