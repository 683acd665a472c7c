"""LoRA adapters on the Hugging Face engine, against PEFT's own model and one prompt at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import lmpool
from lmpool.backends import Request, tiny
from lmpool.backends.contract import ask
from lmpool.errors import AdapterError, PoolError
from lmpool.wants import Generate, Generation
from tests.support.clients import connected
from tests.support.workers import worker_process

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from safetensors.torch import load_file, save_file  # noqa: E402

from lmpool.backends.hf import HFEngine  # noqa: E402
from tests.support.engines import drawn  # noqa: E402
from tests.support.hf_texts import TOLERANCE, reference_rows, save_adapter  # noqa: E402
from tests.support.models import VOCAB, save_model  # noqa: E402

TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn"],  # one transposed matrix for all projections
    "mamba": ["in_proj"],
}
Rows = npt.NDArray[np.float32]
STARTING = 90.0
"""Seconds that a worker may take to import torch and load a model on a busy machine."""


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


def reference(model: str, adapter: str | None, prompts: Sequence[Sequence[int]]) -> Rows:
    """PEFT's own model, one forward pass a prompt."""
    return reference_rows(model, prompts, adapter)


def rows_of(
    engine: HFEngine, prompts: Sequence[Sequence[int]], adapters: Sequence[str | None]
) -> Rows:
    """The row of each prompt with each adapter, asked for in one batch."""
    requests = [
        Request(f"{i} {adapter}".encode(), np.array(prompt, np.uint32), adapter)
        for i, prompt in enumerate(prompts)
        for adapter in adapters
    ]
    rows = np.stack([outcome.logprobs() for outcome in ask(engine, requests)])
    return rows.reshape(len(prompts), len(adapters), -1)


def some_prompts(vocab: int, count: int = 20, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    head = rng.integers(0, vocab, 20).tolist()
    return [
        head[: rng.integers(1, 20)] + rng.integers(0, vocab, rng.integers(0, 9)).tolist()
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_each_adapter_has_its_own_rows_and_states(name: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", name)
    targets = TARGETS[name]
    options = {"fan_in_fan_out": True} if name == "gpt2" else {}
    one = save_adapter(model, tmp_path / "one", target_modules=targets, **options)
    two = save_adapter(
        model, tmp_path / "two", seed=2, r=2, use_rslora=True, target_modules=targets, **options
    )
    engine = HFEngine(model, max_prompt_tokens=96)
    adapters = {None: None, "one@a.b": one, "two@": two}
    prompts = some_prompts(VOCAB)
    expected = np.stack([reference(model, path, prompts) for path in adapters.values()], axis=1)
    assert np.abs(expected[:, 0] - expected[:, 1]).max() > 0.01
    assert np.abs(rows_of(engine, prompts, [None])[:, 0] - expected[:, 0]).max() < TOLERANCE
    for reference_name, path in adapters.items():
        if reference_name is not None and path is not None:
            engine.add_adapter(reference_name, path)
    for _ in range(2):  # computed, then found
        rows = rows_of(engine, prompts, list(adapters))
        assert np.abs(rows - expected).max() < TOLERANCE
    engine.remove_adapter("one@a.b")
    engine.remove_adapter("one@a.b")
    (refused,) = ask(engine, [Request(b"1", np.array([1], np.uint32), "one@a.b")])
    assert "no adapter named 'one@a.b'" in str(refused.error)
    rows = rows_of(engine, prompts, [None, "two@"])
    assert np.abs(rows - expected[:, [0, 2]]).max() < TOLERANCE
    engine.add_adapter("one@a.b", two)
    rows = rows_of(engine, prompts, ["one@a.b"])
    assert np.abs(rows[:, 0] - expected[:, 2]).max() < TOLERANCE
    if engine._packed is not None:
        engine._packed.check()


def test_adapters_of_the_head_and_of_single_layers(llama: str, tmp_path: Path) -> None:
    head = save_adapter(llama, tmp_path / "head", target_modules=["lm_head", "embed_tokens"])
    single = save_adapter(
        llama,
        tmp_path / "single",
        target_modules=["q_proj", "gate_proj"],
        layers_to_transform=[1],
        rank_pattern={"gate_proj": 7},
        alpha_pattern={"q_proj": 3},
    )
    engine = HFEngine(llama)
    engine.add_adapter("head", head)
    engine.add_adapter("single", single)
    prompts = some_prompts(VOCAB)
    rows = rows_of(engine, prompts, ["head", None, "single"])
    for column, path in enumerate([head, None, single]):
        assert np.abs(rows[:, column] - reference(llama, path, prompts)).max() < TOLERANCE


def test_adapters_switching_under_eviction(llama: str, tmp_path: Path) -> None:
    paths = [save_adapter(llama, tmp_path / str(i), seed=i) for i in range(3)]
    engine = HFEngine(llama, kv_cache_bytes=80 * 256, forward_tokens=16)
    names: list[str | None] = [None]
    for i, path in enumerate(paths):
        engine.add_adapter(f"adapter{i}", path)
        names.append(f"adapter{i}")
    prompts = some_prompts(VOCAB, 40)
    expected = np.stack([reference(llama, path, prompts) for path in (None, *paths)], axis=1)
    rng = np.random.default_rng(0)
    assert engine._packed is not None
    for _ in range(100):
        chosen = rng.integers(0, len(prompts), rng.integers(1, 6)).tolist()
        mine = rng.permutation(4)[: rng.integers(1, 5)].tolist()
        rows = rows_of(engine, [prompts[i] for i in chosen], [names[i] for i in mine])
        assert np.abs(rows - expected[chosen][:, mine]).max() < TOLERANCE
        engine._packed.check()
    statistics = engine.statistics()
    assert statistics is not None
    assert statistics.evicted > 0
    assert statistics.found > 0
    engine.cache_prefix(np.array(prompts[0], np.uint32))
    for name in names[1:]:
        assert name is not None
        engine.remove_adapter(name)
    engine._packed.check()
    assert np.abs(rows_of(engine, prompts, [None]) - expected[:, :1]).max() < TOLERANCE


def test_continuations_with_adapters(llama: str, tmp_path: Path) -> None:
    path = save_adapter(llama, tmp_path / "one")
    engine = HFEngine(llama)
    engine.add_adapter("one", path)
    greedy = Generate(6, (), 0.0, 0)
    prompt = np.array([3, 1, 4], np.uint32)
    outcomes = ask(
        engine,
        [
            Request(b"base", prompt, want=greedy),
            Request(b"one", prompt, "one", want=greedy),
        ],
    )
    for outcome, adapter in zip(outcomes, (None, path), strict=True):
        tokens = [3, 1, 4]
        for _ in range(6):
            tokens.append(int(reference(llama, adapter, [tokens])[0].argmax()))
        assert drawn(outcome) == tokens[3:]


def changed(folder: str, **config: Any) -> None:
    path = Path(folder) / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def reweighted(folder: str, change: Any) -> None:
    path = Path(folder) / "adapter_model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def drop_one(weights: dict[str, Any]) -> None:
    del weights[sorted(weights)[0]]


def norm_too(weights: dict[str, Any]) -> None:
    name = "base_model.model.model.layers.0.input_layernorm"
    weights[f"{name}.lora_A.weight"] = torch.ones(4, 32)
    weights[f"{name}.lora_B.weight"] = torch.ones(32, 4)


def add_one(weights: dict[str, Any]) -> None:
    weights["base_model.model.lm_head.weight"] = torch.zeros(VOCAB, 32)


def spoil_one(weights: dict[str, Any]) -> None:
    weights[sorted(weights)[0]][0, 0] = float("nan")


BAD: dict[str, tuple[Any, str]] = {
    "rank": (lambda f: changed(f, r=8), r"of shape \(4, 32\): a rank of 8 is expected of r=8"),
    "no rank": (lambda f: changed(f, r=None), "a rank of None: a positive integer"),
    "rank 0": (lambda f: changed(f, r=0), "a rank of 0: a positive integer"),
    "rank pattern": (lambda f: changed(f, rank_pattern={"q_proj": "x"}), "a rank of 'x'"),
    "target": (
        lambda f: changed(f, target_modules=["nothing"]),
        "q_proj.* do not name that module",
    ),
    "layer norm": (
        lambda f: (reweighted(f, norm_too), changed(f, target_modules="all-linear")),
        "RMSNorm.* is not supported",
    ),
    "fewer": (lambda f: changed(f, target_modules=["q_proj"]), "v_proj.* do not name that module"),
    "more": (
        lambda f: changed(f, target_modules=["q_proj", "k_proj", "v_proj"]),
        "lacks the matrices of 2 of the 6 modules",
    ),
    "type": (lambda f: changed(f, peft_type="IA3"), "peft_type='IA3': only 'LORA'"),
    "no type": (lambda f: changed(f, peft_type=None), "peft_type=None"),
    "dora": (lambda f: changed(f, use_dora=True), "use_dora=True: only plain LoRA"),
    "bias": (lambda f: changed(f, bias="all"), "bias='all': only plain LoRA"),
    "saved": (lambda f: changed(f, modules_to_save=["lm_head"]), "modules_to_save="),
    "pissa": (lambda f: changed(f, init_lora_weights="pissa"), "which changes the base model"),
    "future": (lambda f: changed(f, warp_factor=9), "warp_factor=9: only plain LoRA"),
    "alpha": (
        lambda f: changed(f, lora_alpha="much"),
        "lora_alpha|cannot|unsupported|does not fit",
    ),
    "no json": (lambda f: (Path(f) / "adapter_config.json").write_text("{"), "cannot be read"),
    "a list": (lambda f: (Path(f) / "adapter_config.json").write_text("[]"), "no JSON object"),
    "pickle": (
        lambda f: torch.save({"a": 1}, Path(f) / "adapter_model.safetensors"),
        "is no safetensors file",
    ),
    "cut": (
        lambda f: (Path(f) / "adapter_model.safetensors").write_bytes(b"\x10" * 30),
        "is no safetensors file",
    ),
    "empty": (lambda f: save_file({}, Path(f) / "adapter_model.safetensors"), "is empty"),
    "missing": (lambda f: reweighted(f, drop_one), "lora B of .*q_proj.* without lora A"),
    "strange": (lambda f: reweighted(f, add_one), "holds lm_head.weight"),
    "nan": (lambda f: reweighted(f, spoil_one), "no finite numbers"),
}


@pytest.fixture(scope="module")
def engine_with_one(llama: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[HFEngine, Rows]:
    folder = tmp_path_factory.mktemp("good")
    engine = HFEngine(llama)
    engine.add_adapter("good", save_adapter(llama, folder))
    return engine, rows_of(engine, some_prompts(VOCAB), [None, "good"])


@pytest.mark.parametrize("kind", sorted(BAD))
def test_a_bad_adapter_is_refused_and_changes_nothing(
    kind: str, llama: str, engine_with_one: tuple[HFEngine, Rows], tmp_path: Path
) -> None:
    engine, expected = engine_with_one
    path = save_adapter(llama, tmp_path / "bad", seed=3)
    spoil, message = BAD[kind]
    spoil(path)
    with pytest.raises(AdapterError, match=message) as error:
        engine.add_adapter("bad", path)
    assert path in str(error.value)
    assert engine.adapters.keys() == {"good"}
    rows = rows_of(engine, some_prompts(VOCAB), [None, "good"])
    assert np.abs(rows - expected).max() < TOLERANCE
    names = [name for name, _ in engine._open()._model.named_parameters()]
    assert len([name for name in names if "lora_" in name]) == 8


def test_another_models_adapter_is_refused(llama: str, tmp_path: Path) -> None:
    engine = HFEngine(llama)
    other = save_adapter(tiny.path(), tmp_path / "tiny")
    with pytest.raises(AdapterError, match="another model's"):
        engine.add_adapter("tiny", other)
    gpt2 = save_model(tmp_path / "gpt2", "gpt2")
    path = save_adapter(gpt2, tmp_path / "two", target_modules=["c_attn"], fan_in_fan_out=True)
    with pytest.raises(AdapterError, match=r"c_attn.* not found"):
        engine.add_adapter("gpt2", path)
    prompts = some_prompts(VOCAB)
    rows = rows_of(engine, prompts, [None])
    assert np.abs(rows[:, 0] - reference(llama, None, prompts)).max() < TOLERANCE


BACKTRACKING = r"^(([a-z_.0-9])+)+!"
"""A pattern that `re` would try for ages on the name of a module."""


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": BACKTRACKING},
        {"exclude_modules": BACKTRACKING},
        {"rank_pattern": {BACKTRACKING: 2}},
        {"layers_to_transform": [0, 1], "layers_pattern": BACKTRACKING},
    ],
    ids=lambda config: next(iter(config)),
)
def test_no_pattern_of_an_adapter_is_run(
    llama: str, tmp_path: Path, config: dict[str, Any]
) -> None:
    path = save_adapter(llama, tmp_path / "plain")
    prompts = some_prompts(VOCAB, 4)
    expected = reference(llama, path, prompts)
    changed(path, **config)
    engine = HFEngine(llama)
    engine.add_adapter("a", path)
    assert np.abs(rows_of(engine, prompts, ["a"])[:, 0] - expected).max() < TOLERANCE


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_saved_beside_an_adapter_of_the_head(tied: bool, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama", tie_word_embeddings=tied)
    path = save_adapter(
        model,
        tmp_path / "a",
        target_modules=["lm_head", "q_proj"],
        save_embedding_layers=True,
    )
    assert f"base_model.model.{HEAD}" in load_file(f"{path}/adapter_model.safetensors")
    changed(path, modules_to_save=[], target_parameters=[], eva_config={})
    engine = HFEngine(model)
    engine.add_adapter("a", path)
    prompts = some_prompts(VOCAB, 4)
    assert (
        np.abs(rows_of(engine, prompts, ["a"])[:, 0] - reference(model, path, prompts)).max()
        < TOLERANCE
    )
    reweighted(path, train_head)
    with pytest.raises(AdapterError, match=r"holds lm_head\.weight.*if it was not"):
        engine.add_adapter("b", path)


HEAD = "lm_head.base_layer.weight"


def train_head(weights: dict[str, Any]) -> None:
    weights[f"base_model.model.{HEAD}"] += 0.01


def test_matrices_stay_float32_on_a_bfloat16_model(llama: str, tmp_path: Path) -> None:
    path = save_adapter(llama, tmp_path / "a", r=8, target_modules=["q_proj", "v_proj", "up_proj"])
    prompts = some_prompts(VOCAB, 8)
    expected = reference_rows(llama, prompts, path, "bfloat16")
    engine = HFEngine(llama, dtype="bfloat16", kv_cache_bytes=0)
    engine.add_adapter("a", path)
    matrices = [p for n, p in engine._open()._model.named_parameters() if "lora_" in n]
    assert {p.dtype for p in matrices} == {torch.float32}
    # One prompt a forward pass, as the reference: the same numbers in the same order.
    found = np.stack([rows_of(engine, [prompt], ["a"])[0, 0] for prompt in prompts])
    assert np.abs(found - expected).mean() < 1e-4


def keep_prefixes(lm: lmpool.PooledLM, count: int) -> None:
    for number in range(count):
        lm.cache_kv(np.random.default_rng(number).integers(0, 2_000, 500).tolist())


@pytest.mark.one_server
@pytest.mark.slow
@pytest.mark.server
def test_a_pool_of_two_workers(server_url: str, pool_name: str, tmp_path: Path) -> None:
    """Adapters loaded on every worker, replaced, refused, removed, and known to who joins later;
    continuations in company equal to those alone; prefixes kept.
    """
    allowed = tmp_path / "allowed"
    one = save_adapter(tiny.path(), allowed / "one", seed=1)
    two = save_adapter(tiny.path(), allowed / "two", seed=2)
    outside = save_adapter(tiny.path(), tmp_path / "outside", seed=3)
    worse = save_adapter(tiny.path(), allowed / "worse", seed=4)
    changed(worse, r=16)
    pickled = save_adapter(tiny.path(), allowed / "pickled", seed=5)
    (Path(pickled) / "adapter_model.safetensors").rename(Path(pickled) / "adapter_model.bin")
    prompts = some_prompts(1_000, 12)
    base, with_one, with_two = (reference(tiny.path(), a, prompts) for a in (None, one, two))
    options: dict[str, Any] = {
        "engine": "hf",
        "model": "tiny",
        "engine_opts": {"threads": 1, "kv_cache_bytes": 4 << 20},
        "adapter_dirs": [str(allowed)],
        "batch_size": 8,
    }

    def close(rows: Any, expected: Rows) -> bool:
        return bool(np.abs(rows - expected).max() < TOLERANCE)

    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker_process(server_url, pool_name, alive=False, **options))
            for _ in range(2)
        ]
        for worker in workers:
            worker.wait_until_alive(STARTING)
        lm = stack.enter_context(connected(server_url, pool_name))
        lm.add_new_lora(one, "one")
        lm.add_new_lora(two, "two")
        for name, expected in ((None, base), ("one", with_one), ("two", with_two)):
            assert close(lm.batch_next_token_logprobs_sync(prompts, lora_name=name), expected)
        for path, message in (
            (outside, "is not inside one of LMPOOL_ADAPTER_DIRS"),
            (f"{allowed}/../outside", "is not inside one of LMPOOL_ADAPTER_DIRS"),
            (str(allowed / "nowhere"), "does not exist on this worker"),
            (worse, "a rank of 16 is expected of r=16"),
            (pickled, "has no adapter_model.safetensors"),
        ):
            with pytest.raises(AdapterError, match="failed on 2 of 2 workers") as error:
                lm.add_new_lora(path, "bad")
            assert str(error.value).count(message) == 2
        # Other files under a name are another adapter: no row of the old one comes back.
        save_adapter(tiny.path(), allowed / "one", seed=6)
        lm.add_new_lora(one, "one")
        replaced = reference(tiny.path(), one, prompts)
        assert np.abs(replaced - with_one).max() > 0.01
        assert close(lm.batch_next_token_logprobs_sync(prompts, lora_name="one"), replaced)
        sampled = lm.batch_sample_sync(prompts, 6, [2], temperature=0.9, seed=5)
        alone = HFEngine("tiny", threads=1)
        for prompt, tokens in zip(prompts[:4], sampled, strict=False):
            want = Generate(6, (2,), 0.9, 5)
            request = Request(b"alone", np.array(prompt, np.uint32), want=want)
            (outcome,) = ask(alone, [request])
            assert isinstance(outcome.answer, Generation)
            assert outcome.answer.text_ids.tolist() == list(tokens)
        # Prefixes are kept on every worker, within bounds that the caller hears of.
        lm.cache_kv(prompts[0])
        with pytest.raises(PoolError, match="more than there is room for") as full:
            keep_prefixes(lm, 4)  # of 500 positions, where there are slots for 1,364
        assert str(full.value).count("clear the cache of other prefixes") == 2
        with worker_process(server_url, pool_name, alive=False, **options) as later:
            later.wait_until_alive(STARTING)
            for worker in workers:
                worker.terminate()
                worker.wait()
            fresh = some_prompts(1_000, 6, seed=9)
            rows = lm.batch_next_token_logprobs_sync(fresh, lora_name="two")
            assert close(rows, reference(tiny.path(), two, fresh))
            greedy = lm.sample_sync(fresh[0], 3, [], temperature=0, lora_name="one")
            tokens = list(fresh[0])
            for _ in range(3):
                tokens.append(int(reference(tiny.path(), one, [tokens])[0].argmax()))
            assert list(greedy) == tokens[len(fresh[0]) :]
            lm.remove_lora("two")
            with pytest.raises(ValueError, match=r"unknown LoRA adapter 'two'.* known: one"):
                lm.next_token_logprobs_sync(fresh[0], lora_name="two")
            assert close(lm.batch_next_token_logprobs_sync(prompts), base)
            lm.clear_kv_cache()
            assert "Traceback" not in later.log
        for worker in workers:
            assert "Traceback" not in worker.log
