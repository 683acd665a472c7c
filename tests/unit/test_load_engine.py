from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from lmpool.backends import Request, load_engine
from lmpool.backends.mock import MockEngine, mock_row
from lmpool.backends.progress import Listening
from lmpool.checks import why_failed
from lmpool.errors import SettingsError


def test_the_mock_engine_by_name() -> None:
    engine = load_engine("mock", "a-model", vocab_size=300)
    assert isinstance(engine, MockEngine)
    assert (engine.info.model, engine.info.vocab_size) == ("a-model", 300)
    engine.submit([Request(b"r", np.array([299], np.uint32))])
    (outcome,) = engine.step()
    assert np.array_equal(outcome.logprobs(), mock_row([299], 300))


@pytest.mark.parametrize("name", ["hf", "auto"])
def test_transformers_by_name_and_where_there_is_nothing_better(name: str) -> None:
    pytest.importorskip("transformers")
    engine = load_engine(name, "tiny", device="cpu")
    assert (engine.info.engine, engine.info.model) == ("hf", "tiny")
    engine.close()


def test_a_start_is_told_stage_by_stage() -> None:
    pytest.importorskip("transformers")
    heard: list[str] = []
    with Listening(heard.append):
        load_engine("hf", "tiny", device="cpu").close()
    assert heard == ["weights", "trial"]
    load_engine("hf", "tiny", device="cpu").close()
    assert heard == ["weights", "trial"], "nobody listens any more"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("mok", {}, r"one of auto, .*hf, .*mock.* expected; did you mean 'mock'\?"),
        ("", {}, "engine='': one of auto"),
        ("mock", {"dely": 1.0}, r"no option 'dely'; did you mean 'delay'\? It has revision, dtype"),
        ("mock", {"model_kwargs": {}}, r"no option 'model_kwargs'; it has"),
        ("mock", {"delay": "1"}, "delay='1'"),
        ("mock", {"vocab_size": "9"}, "vocab_size='9': int expected"),
        ("mock", {"vocab_size": True}, "vocab_size=True"),
        ("mock", {"log": 5}, r"log=5: .*PathLike.* expected"),
        ("hf", {"trust_remote_code": "yes"}, "trust_remote_code='yes': bool expected"),
        ("hf", {"trust_remote_code": 1}, "trust_remote_code=1"),
        ("hf", {"model_kwargs": "x"}, "model_kwargs='x'"),
        ("hf", {"model_kwargs": [1]}, r"model_kwargs=\[1\]"),
        ("hf", {"model_kwargs": {"no_such_option": 1}, "device": "cpu"}, "no_such_option"),
        ("hf", {"dtpye": "float32"}, "no option 'dtpye'; did you mean 'dtype'"),
    ],
)
def test_what_is_unknown_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_engine(name, "tiny", **options)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "mlx"])
def test_an_engine_that_is_not_installed_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.delitem(sys.modules, f"lmpool.backends.{engine}.engine", raising=False)
    monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(SettingsError, match=rf"needs {engine}.*pip install 'lmpool\[{engine}\]'"):
        load_engine(engine, "tiny")


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_package_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    pytest.importorskip("transformers")
    for module in ("lmpool.backends.hf.engine", "lmpool.backends.hf.model"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SettingsError, match=rf"needs {missing}.*pip install 'lmpool\[hf\]'"):
        load_engine("hf", "tiny")


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that brings engines by entry points."""
    metadata = tmp_path / "third_party-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[lmpool.engines]\n"
        "shouting = third_party_engine:Shouting\n"
        "no_engine = third_party_engine:no_engine\n"
        "raises = third_party_engine:Raises\n"
        "gone = third_party_engine:Gone\n"
    )
    (tmp_path / "third_party_engine.py").write_text(
        "from lmpool.backends.mock import MockEngine\n"
        "class Shouting(MockEngine):\n"
        "    def __init__(self, model, *, volume=1):\n"
        "        super().__init__(model.upper(), vocab_size=10 * volume)\n"
        "class Raises(MockEngine):\n"
        "    def __init__(self, model, *, how: 'Unknown' = 1):\n"
        "        raise KeyError('x')\n"
        "def no_engine(model, **options):\n"
        "    return options\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "third_party_engine", raising=False)
    return tmp_path


@pytest.mark.usefixtures("third_party")
def test_engines_that_other_packages_bring() -> None:
    engine = load_engine("shouting", "tiny", volume=3)
    assert (engine.info.model, engine.info.vocab_size) == ("TINY", 30)
    with pytest.raises(SettingsError, match="did you mean 'volume'"):
        load_engine("shouting", "tiny", volum=3)
    with pytest.raises(SettingsError, match="did you mean 'shouting'"):
        load_engine("shoutin", "tiny")
    with pytest.raises(SettingsError, match="made a dict"):
        load_engine("no_engine", "tiny", anything=1)
    with pytest.raises(SettingsError, match=r"model='tiny'.*\['how'\]: KeyError: 'x'"):
        load_engine("raises", "tiny", how=2)
    with pytest.raises(SettingsError, match="third_party_engine:Gone cannot be imported"):
        load_engine("gone", "tiny")


def test_importing_the_backends_imports_no_machine_learning_library() -> None:
    heavy = "torch", "transformers", "tokenizers", "huggingface_hub", "vllm", "mlx", "sglang"
    script = (
        "import sys, lmpool.backends, lmpool.backends.mock, lmpool.backends.model_files\n"
        f"print(sorted(set({heavy!r}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_library_that_fails_without_words_is_told_by_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(model: str) -> NoReturn:
        assert model == "another"
        raise RuntimeError

    monkeypatch.setattr("lmpool.backends.load._find", lambda name: fail)
    said = (
        r"RuntimeError without words, of 'raise RuntimeError' \(.*py, line \d+\): serve the model"
    )
    with pytest.raises(SettingsError, match=said):
        load_engine("failing", "another")


@pytest.mark.parametrize(
    ("error", "text", "said"),
    [
        (ValueError("no such layer"), None, "ValueError: no such layer"),
        (ValueError("no such layer"), "shorter", "ValueError: shorter"),
        (ValueError("  "), None, "ValueError"),  # which nobody raised
    ],
)
def test_what_a_library_says_of_its_failure(error: Exception, text: str | None, said: str) -> None:
    assert why_failed(error, text) == said


def test_an_engine_that_finds_no_memory_may_be_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is refused as a setting is never started again; memory may be free a moment later."""

    def full(model: str) -> NoReturn:
        raise MemoryError("CUDA out of memory")

    monkeypatch.setattr("lmpool.backends.load._find", lambda name: full)
    with pytest.raises(MemoryError, match="out of memory"):
        load_engine("full", "any")


def test_a_file_of_weights_that_was_cut_short_is_refused_with_the_remedy(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    numpy_files = pytest.importorskip("safetensors.numpy")
    whole = numpy_files.save({"weight": np.zeros(64, np.float32)})
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(safetensors.SafetensorError) as refused:
        safetensors.safe_open(tmp_path / "model.safetensors", "np")
    said = why_failed(refused.value)
    assert said.startswith("SafetensorError: Error while deserializing header: ")
    assert said.endswith("is damaged or was not downloaded whole; get it again")
