from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.backends import model_identity as model_identity_module
from lmpool.backends import tiny
from lmpool.backends.model_files import resolve_model, tokenizer_files
from lmpool.backends.model_identity import model_identity
from lmpool.errors import SettingsError


def safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    """A safetensors file of byte tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, data in tensors.items():
        offsets = [start, start + len(data)]
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": offsets}
        start += len(data)
    packed = json.dumps(header).encode()
    path.write_bytes(len(packed).to_bytes(8, "little") + packed + b"".join(tensors.values()))


def noise(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    (path / "generation_config.json").write_text('{"eos_token_id": 2}')
    (path / "tokenizer.json").write_text('{"model": {}}')
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (path / "README.md").write_text("A model.")
    shards = {"model-1.safetensors": ["a", "b"], "model-2.safetensors": ["c"]}
    for number, (shard, names) in enumerate(shards.items()):
        safetensors(path / shard, {n: noise(5000, seed=10 * number + ord(n)) for n in names})
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_the_identity_names_what_changes_the_numbers(folder: Path) -> None:
    identity = model_identity(folder)
    assert list(identity) == [
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    size, digest = identity["model-1.safetensors"].split(":")
    assert int(size) == (folder / "model-1.safetensors").stat().st_size
    assert len(digest) == 32


def test_equal_files_elsewhere_and_at_another_time_are_the_same_model(
    folder: Path, tmp_path: Path
) -> None:
    before = model_identity(folder)
    copy = tmp_path / "elsewhere" / "a copy"
    shutil.copytree(folder, copy)
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    (copy / "README.md").write_text("Another text.")
    (copy / "generation_config.json").unlink()
    (copy / "consolidated.safetensors").write_bytes(b"what another engine would load")
    (copy / "pytorch_model.bin").write_bytes(b"older weights")
    assert model_identity(copy) == before


@pytest.mark.parametrize("name", ["config.json", "model-2.safetensors", "tokenizer.json"])
def test_one_changed_byte_is_another_model(folder: Path, name: str) -> None:
    before = model_identity(folder)
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(bytes(data))
    after = model_identity(folder)
    assert [key for key in before if before[key] != after[key]] == [name]


def test_python_files_count_where_they_are_run(folder: Path) -> None:
    plain = model_identity(folder)
    (folder / "modeling.py").write_text("x = 1")
    assert model_identity(folder) == plain
    with_code = model_identity(folder, code=True)
    assert with_code.keys() - plain.keys() == {"modeling.py"}


@pytest.mark.parametrize("tensor", range(40))
def test_sampled_weights_show_a_change_in_any_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: int
) -> None:
    monkeypatch.setattr(model_identity_module, "FULL_HASH_BYTES", 1000)
    monkeypatch.setattr(model_identity_module, "SAMPLE_BYTES", 64)
    monkeypatch.setattr(model_identity_module, "TENSOR_SAMPLE_BYTES", 16)
    (tmp_path / "config.json").write_text("{}")
    tensors = {str(i): noise(3000, seed=i) for i in range(40)}
    safetensors(tmp_path / "model.safetensors", tensors)
    before = model_identity(tmp_path)
    tensors[str(tensor)] = noise(3000, seed=1000)
    safetensors(tmp_path / "model.safetensors", tensors)
    assert model_identity(tmp_path) != before


@pytest.mark.parametrize("data", [b"", b"short", b"\xff" * 3000, noise(5000, 0)])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_of_any_content_have_an_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes
) -> None:
    monkeypatch.setattr(model_identity_module, "FULL_HASH_BYTES", -1)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(data)
    assert model_identity(tmp_path)[name].startswith(f"{len(data)}:")


def test_missing_weights_are_named(folder: Path) -> None:
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(SettingsError, match=r"lacks model-2\.safetensors: copy or download"):
        model_identity(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(SettingsError, match="no index of weights"):
        model_identity(folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(SettingsError, match="has no weights"):
        model_identity(folder)


def test_a_tokenizer_without_tokenizer_json(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("")
    assert {"vocab.json", "merges.txt"} < model_identity(folder).keys()


def test_tiny_and_folders_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model("tiny") == Path(tiny.path())
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve_model("model").resolve() == folder


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        ("./nowhere", None, "model='./nowhere': there is no such folder"),
        ("/nowhere/at/all", None, "there is no such folder"),
        ("~/nowhere-at-all", None, "there is no such folder"),
        ("~nobody-of-here/model", None, "there is no such folder"),
        ("some/nested/folder", None, "there is no such folder"),
        ("tiny", "main", "revision='main'"),
        ("{folder}", "v2", "revision='v2'"),
        ("{folder}/config.json", None, "is a file: name the folder"),
        ("{folder}/..", None, "has no config.json"),
        ("not a name!", None, "neither a folder nor a Hugging Face id"),
    ],
)
def test_what_is_no_model_is_refused(
    folder: Path, name: str, revision: str | None, said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        resolve_model(name.format(folder=folder), revision)


@pytest.fixture
def offline_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no hub."""
    hub = pytest.importorskip("huggingface_hub")
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    return cache


def test_a_hub_snapshot_is_the_same_model_as_a_plain_folder(
    folder: Path, offline_cache: Path
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = offline_cache / "models--lab--model"
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        (repository / part).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = repository / "blobs" / str(number)
        shutil.copy(file, blob)
        (repository / "snapshots" / commit / file.name).symlink_to(blob)
    found = resolve_model("lab/model")
    assert found.name == commit
    assert found == resolve_model("lab/model", "main")
    assert model_identity(found) == model_identity(folder)


def test_a_model_that_is_nowhere_and_no_hub(offline_cache: Path) -> None:
    with pytest.raises(SettingsError, match=r"'lab/model' at revision='v2': .*cannot be reached"):
        resolve_model("lab/model", "v2")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("GatedRepoError", "is gated: ask for access"),
        ("RepositoryNotFoundError", "no such model on the Hugging Face hub"),
        ("RevisionNotFoundError", "has no revision 'v2'"),
        ("HfHubHTTPError", "cannot be downloaded: HfHubHTTPError"),
    ],
)
def test_what_the_hub_refuses_is_said(
    monkeypatch: pytest.MonkeyPatch, error: str, said: str
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    kind = getattr(hub.errors, error)

    def refuse(*_: object, **__: object) -> None:
        raise kind.__new__(kind)

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(SettingsError, match=said):
        resolve_model("lab/model", "v2")


def test_older_weights_are_downloaded_where_there_are_no_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked: list[list[str]] = []

    def resolve(path: Path) -> Path:
        def download(_: str, *, allow_patterns: list[str], **__: object) -> str:
            asked.append(allow_patterns)
            return str(path)

        monkeypatch.setattr(hub, "snapshot_download", download)
        return resolve_model("lab/model")

    assert resolve(folder) == folder
    assert ["*.bin" in patterns for patterns in asked] == [False]
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text("{}")
    assert resolve(old) == old
    assert ["*.bin" in patterns for patterns in asked] == [False, False, True]


def test_clients_are_given_the_tokenizer_and_no_more(folder: Path) -> None:
    files = tokenizer_files(folder)
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json", "config.json"}
    assert json.loads(files["config.json"]) == {"model_type": "llama"}
    (folder / "tokenizer.json").unlink()
    assert tokenizer_files(folder) == {}


def load_from(files: dict[str, bytes], path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    for name, data in files.items():
        (path / name).write_bytes(data)
    return transformers.AutoTokenizer.from_pretrained(path)


def save_gpt2(path: Path) -> None:
    """GPT-2's own layout: no tokenizer_config.json, so the class comes from config.json."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "th", "<|endoftext|>"])}
    (path / "vocab.json").write_text(json.dumps(vocab))
    (path / "merges.txt").write_text("#version: 0.2\nt h\n")
    (path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 3}')


def save_tiny(path: Path) -> None:
    shutil.copytree(tiny.path(), path, dirs_exist_ok=True)


@pytest.mark.parametrize("save", [save_gpt2, save_tiny])
def test_the_files_make_the_tokenizer(tmp_path: Path, save: Callable[[Path], None]) -> None:
    transformers = pytest.importorskip("transformers")
    (source := tmp_path / "source").mkdir()
    (target := tmp_path / "target").mkdir()
    save(source)
    expected = transformers.AutoTokenizer.from_pretrained(source)
    loaded = load_from(tokenizer_files(source), target)
    assert type(loaded) is type(expected)
    assert loaded.get_vocab() == expected.get_vocab()
    text = "the 'thing' <|endoftext|> Übung"
    assert loaded(text)["input_ids"] == expected(text)["input_ids"]
