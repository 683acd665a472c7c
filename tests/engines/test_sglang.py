"""The SGLang engine on SGLang itself."""

from __future__ import annotations

import gc
import importlib.metadata
import itertools
import json
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
zmq = pytest.importorskip("zmq")
pytest.importorskip("sglang")

from lmpool.backends import tiny  # noqa: E402
from lmpool.backends.contract import Reference, ask, request_for, write_adapter  # noqa: E402
from lmpool.backends.progress import Listening  # noqa: E402
from lmpool.backends.sampling import sample_token  # noqa: E402
from lmpool.backends.sglang import SGLangEngine  # noqa: E402
from lmpool.backends.sglang.cpu import prepare  # noqa: E402
from lmpool.backends.sglang.faithful import check_latent  # noqa: E402
from lmpool.errors import AdapterError, EngineBroken, PromptFailed, SettingsError  # noqa: E402
from lmpool.wants import Generate  # noqa: E402
from tests.families.small import FAMILIES, SCALES, small_configuration  # noqa: E402
from tests.support.engines import drawn, rows_of  # noqa: E402
from tests.support.hf_texts import (  # noqa: E402
    hide_modules,
    reference_rows,
    save_adapter,
    save_patterned_adapter,
)
from tests.support.models import (  # noqa: E402
    LONGEST,
    ORIGINAL,
    VOCAB,
    WINDOW,
    save_model,
)
from tests.support.sglang_engine import SMALL, WARNINGS, OneAtATime  # noqa: E402

pytestmark = [pytest.mark.engine, *WARNINGS]

OVERRIDES = {"json_model_override_args": '{"max_position_embeddings": 50}'}


@pytest.fixture(scope="module", autouse=True)
def reference_first() -> None:
    """SGLang changes how models are loaded."""
    Reference.of("tiny").rows([[0]])


@pytest.fixture(scope="module")
def engines(reference_first: None) -> Iterator[OneAtATime]:
    made = OneAtATime()
    yield made
    made.close()


@pytest.fixture
def tiny_engine(engines: OneAtATime) -> Iterator[Callable[..., SGLangEngine]]:
    """Makes an engine of the tiny model for one test, which may do with it what it wants."""
    yield engines.make
    engines.close()


@pytest.fixture
def shared_engine(engines: OneAtATime) -> Callable[..., SGLangEngine]:
    """An engine of the tiny model that others have used, and others will."""
    return engines.shared


@pytest.fixture
def no_engine(engines: OneAtATime) -> None:
    """The process has none."""
    engines.close()


NAN = 13
"""The token whose embedding is NaN once `overflow` was called."""


def test_a_start_is_told_stage_by_stage(tiny_engine: Callable[..., SGLangEngine]) -> None:
    heard: list[str] = []
    with Listening(heard.append):
        tiny_engine(max_prompt_tokens=LONGEST - 3)  # options of nobody else: it is made anew
    assert heard == ["weights", "trial"]


@pytest.mark.parametrize("kind", ["gemma3", "phi3", "windowed mistral"])
def test_no_prompt_is_longer_than_a_window_that_is_not_heeded(
    kind: str, tmp_path: Path, no_engine: None, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model(tmp_path, kind, hidden=128)
    with caplog.at_level("WARNING"):
        engine = SGLangEngine(folder)
    longest = engine.info.max_prompt_tokens
    engine.close()
    heeded = kind == "gemma3"
    assert (longest > WINDOW) if heeded else (longest == WINDOW)
    assert ("does not heed" in caplog.text) != heeded
    if not heeded:
        # It leaves the process's place free, too.
        with pytest.raises(SettingsError, match=r"max_prompt_tokens=13: .*window of 12 tokens"):
            SGLangEngine(folder, max_prompt_tokens=WINDOW + 1)
        engine = SGLangEngine(folder, max_prompt_tokens=WINDOW)
        assert engine.info.max_prompt_tokens == WINDOW
        engine.close()


@pytest.mark.parametrize("kind", ["cohere2", "gemma2"])
def test_windows_and_activations_as_the_model_has_them(
    kind: str, tmp_path: Path, no_engine: None
) -> None:
    """SGLang has Cohere 2's layers see a token more than their window, and does not know what
    transformers 5 calls Gemma 2's activation."""
    folder = save_model(tmp_path, kind, hidden=128)
    random = np.random.default_rng(0)
    lengths = (1, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 60)
    prompts = [random.integers(0, VOCAB, length).tolist() for length in lengths]
    with closing(SGLangEngine(folder)) as engine:
        assert engine.info.max_prompt_tokens > WINDOW
        error = np.abs(rows_of(engine, prompts) - Reference(folder).rows(prompts)).max()
    assert error < 1e-3


def overflow(engine: SGLangEngine) -> None:
    engine._open()._runner.model.model.embed_tokens.register_forward_hook(
        lambda _, inputs, states: states.masked_fill((inputs[0] == NAN)[:, None], float("nan"))
    )


def test_continuations_that_are_put_off(tiny_engine: Callable[..., SGLangEngine]) -> None:
    """More continuations than there is room for: some give way, and draw the same in the end."""
    engine = tiny_engine(**SMALL)
    prompts = [[n, n + 1, n + 2] for n in range(1, 13)]
    requests = [
        request_for(prompt, want=Generate(150, (), 1.0, seed))
        for seed, prompt in enumerate(prompts)
    ]
    together = [drawn(outcome) for outcome in ask(engine, requests)]
    for request, tokens in zip(requests[::5], together[::5], strict=True):
        (alone,) = ask(engine, [request])
        assert drawn(alone) == tokens
        assert len(tokens) == 150


def test_the_models_own_end_does_not_end_a_continuation(
    shared_engine: Callable[..., SGLangEngine],
) -> None:
    engine = shared_engine()
    (end,) = engine.info.eos_token_ids
    rows = Reference.of("tiny").rows([[7, 8, 9]])
    seed = next(s for s in range(100_000) if sample_token(rows[0], 5.0, s, 0) == end)
    (outcome,) = ask(engine, [request_for([7, 8, 9], want=Generate(4, (), 5.0, seed))])
    assert drawn(outcome)[0] == end
    assert len(drawn(outcome)) == 4
    (ended,) = ask(engine, [request_for([7, 8, 9], want=Generate(4, (end,), 5.0, seed))])
    assert drawn(ended) == [end]


def test_requests_are_taken_in_while_others_run(shared_engine: Callable[..., SGLangEngine]) -> None:
    engine = shared_engine()
    long = request_for([1, 2], want=Generate(40, (), 1.0, 3))
    engine.submit([long])
    seen: list[bytes] = [outcome.id for outcome in engine.step()]
    row = request_for([3, 4])
    engine.submit([row])
    while engine.in_flight():
        seen += [outcome.id for outcome in engine.step()]
    assert seen == [row.id, long.id]


def test_prefixes_are_kept_and_dropped(shared_engine: Callable[..., SGLangEngine]) -> None:
    engine = shared_engine()
    scheduler = engine._open()._scheduler
    engine.cache_prefix(np.arange(100, dtype=np.uint32))
    assert scheduler.tree_cache.evictable_size() >= 100
    engine.clear_cache()
    assert scheduler.tree_cache.evictable_size() == 0


def test_rows_of_a_bfloat16_model(tiny_engine: Callable[..., SGLangEngine]) -> None:
    engine = tiny_engine(dtype="bfloat16")
    assert (engine.info.dtype, engine.info.encoding) == ("bfloat16", "bf16")
    overflow(engine)
    outcome, failed = ask(engine, [request_for([5, 6, 7]), request_for([5, 6, NAN])])
    assert "logsumexp nan" in str(failed.error)
    assert outcome.row is not None
    assert outcome.row.dtype == np.uint16
    assert np.abs(outcome.logprobs() - Reference.of("tiny").rows([[5, 6, 7]])[0]).max() < 0.3


def test_closing_frees_the_model(tiny_engine: Callable[..., SGLangEngine]) -> None:
    engine = tiny_engine()
    model = weakref.ref(engine._open()._runner.model)
    assert model() is not None
    engine.close()
    gc.collect()
    assert model() is None


def test_one_engine_in_a_process(shared_engine: Callable[..., SGLangEngine]) -> None:
    shared_engine()
    with pytest.raises(SettingsError, match="this process has an SGLang engine"):
        SGLangEngine("tiny")


def test_an_engine_without_adapters_names_the_option(
    shared_engine: Callable[..., SGLangEngine],
) -> None:
    with pytest.raises(AdapterError, match=r"engine_opts=\{'max_loras': 4\}"):
        shared_engine().add_adapter("a", "/anywhere")


@pytest.mark.parametrize(
    ("how", "change", "said"),
    [
        ({"rank": 9}, {}, r"rank 9: write engine_opts=\{'max_lora_rank': 9\}"),
        ({}, {"use_dora": True}, "use_dora=True: only plain LoRA"),
        ({}, {"rank_pattern": {"q_proj": 2}}, "a rank of 2 is expected"),
        ({}, {"alpha_pattern": {"q_.*": 2}}, "alpha_pattern=.*q_proj"),
        ({}, {"r": None}, "a rank of None"),
    ],
)
def test_adapters_that_are_refused(
    shared_engine: Callable[..., SGLangEngine],
    tmp_path: Path,
    how: dict[str, Any],
    change: dict[str, Any],
    said: str,
) -> None:
    folder = Path(write_adapter(tmp_path / "a", seed=1, **how))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(AdapterError, match=said):
        shared_engine(max_loras=2, max_lora_rank=8).add_adapter("a", str(folder))


@pytest.mark.parametrize(
    "targets", ["k", "v", "kv", "up", "q", "qk", "gate"], ids=lambda targets: targets
)
def test_adapters_of_some_of_the_layers_that_sglang_computes_as_one(
    shared_engine: Callable[..., SGLangEngine], tmp_path: Path, targets: str
) -> None:
    names = [f"{t}_proj" for t in ([targets] if targets in {"up", "gate"} else targets)]
    folder = write_adapter(tmp_path / "a", seed=1, targets=names)
    other = write_adapter(tmp_path / "b", seed=2, targets=["q_proj", "k_proj", "v_proj", "up_proj"])
    engine = shared_engine(max_loras=2, max_lora_rank=8)
    for name, path in (("b", other), ("a", folder)):
        engine.add_adapter(name, path)
        found = rows_of(engine, PROMPTS, adapter=name)
        assert np.abs(found - Reference.of("tiny").rows(PROMPTS, path)).max() < 1e-4
    assert np.abs(found - rows_of(engine, PROMPTS)).max() > 0.01
    for name in "ab":
        engine.remove_adapter(name)


PROMPTS = [[1, 5, 9], [7] * 30, [1, 5, 9, 4]]


def test_ranks_alphas_and_saved_tensors_as_peft_reads_them(
    shared_engine: Callable[..., SGLangEngine], tmp_path: Path
) -> None:
    """And no pattern is run: this one would take ages."""
    folder = save_patterned_adapter(tiny.path(), tmp_path / "a")
    expected = reference_rows(tiny.path(), PROMPTS, folder)
    hide_modules(folder)
    engine = shared_engine(max_loras=2, max_lora_rank=8)
    engine.add_adapter("b", write_adapter(tmp_path / "b", seed=2, targets=["q_proj", "up_proj"]))
    rows_of(engine, PROMPTS, adapter="b")
    engine.add_adapter("a", folder)
    assert np.abs(rows_of(engine, PROMPTS, adapter="a") - expected).max() < 1e-4
    for name in "ab":
        engine.remove_adapter(name)


def test_layers_that_it_does_not_change_are_named(
    tiny_engine: Callable[..., SGLangEngine], tmp_path: Path
) -> None:
    engine = tiny_engine(max_loras=1, max_lora_rank=8, lora_targets=["q_proj"])
    said = "changes gate_proj, up_proj: name all of them in engine_opts=.*lora_targets"
    with pytest.raises(AdapterError, match=said):
        engine.add_adapter("a", write_adapter(tmp_path / "a", seed=1, targets=["up_proj"]))
    assert ask(engine, [request_for([1])])[0].error is None


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_of_the_head_with_the_embedding_that_peft_saves(
    tiny_engine: Callable[..., SGLangEngine], tmp_path: Path
) -> None:
    """The tiny model's head is its embedding, which the adapter leaves alone."""
    folder = save_adapter(
        tiny.path(),
        tmp_path / "a",
        target_modules=["lm_head", "k_proj"],
        save_embedding_layers=True,
    )
    expected = reference_rows(tiny.path(), PROMPTS, folder)
    engine = tiny_engine(max_loras=1, max_lora_rank=8, lora_targets=["q_proj", "lm_head"])
    engine.add_adapter("a", folder)
    assert np.abs(rows_of(engine, PROMPTS, adapter="a") - expected).max() < 1e-4
    assert np.abs(rows_of(engine, PROMPTS) - Reference.of("tiny").rows(PROMPTS)).max() < 1e-4


@pytest.mark.parametrize("kept", ["lora_A", "lora_B", "nothing"])
def test_halves_of_adapters_are_refused(
    shared_engine: Callable[..., SGLangEngine], tmp_path: Path, kept: str
) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_adapter(tmp_path / "a", seed=1)
    weights = Path(folder, "adapter_model.safetensors")
    save_file({n: t for n, t in load_file(weights).items() if kept in n}, weights)
    engine = shared_engine(max_loras=2, max_lora_rank=8)
    said = "is empty" if kept == "nothing" else "q_proj' without lora .*save_pretrained"
    with pytest.raises(AdapterError, match=said):
        engine.add_adapter("a", folder)
    assert ask(engine, [request_for([1])])[0].error is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"max_loras": -1}, "max_loras=-1"),
        ({"max_lora_rank": "8"}, "max_lora_rank='8'"),
        ({"max_prompt_tokens": 513}, "max_prompt_tokens=513: the model takes 512"),
        ({"server_args": {"tp_size": 2}}, "server_args has 'tp_size'"),
        ({"server_args": {"chunked_prefil_size": 2}}, "'chunked_prefil_size', which SGLang"),
        ({"server_args": {"attention_backend": "psychic"}}, "SGLang cannot serve.*psychic"),
        ({"revision": "main"}, "revision='main'"),
        ({"server_args": "x"}, "server_args='x': Mapping"),
        ({"server_args": 5}, "server_args=5"),
        ({"server_args": [1]}, r"server_args=\[1\]"),
        ({"lora_targets": 5}, "lora_targets=5: Sequence"),
        ({"lora_targets": "q_proj"}, "lora_targets='q_proj'"),
        ({"server_args": {"trust_remote_code": "yes"}}, "trust_remote_code='yes': bool"),
        ({"server_args": {"mem_fraction_static": 7}}, "mem_fraction_static=7: between 0 and 1"),
        ({"server_args": {"max_running_requests": 0}}, "max_running_requests=0: a positive"),
    ],
)
@pytest.mark.usefixtures("no_engine")
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        SGLangEngine("tiny", **options)


@pytest.mark.usefixtures("no_engine")
def test_a_failure_without_words_is_told_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise AssertionError

    prepare()
    monkeypatch.setattr("sglang.srt.managers.scheduler.Scheduler", fail)
    said = r"SGLang cannot serve .* without words, of 'raise AssertionError' .*another engine"
    with pytest.raises(SettingsError, match=said):
        SGLangEngine("tiny")


@pytest.mark.usefixtures("no_engine")
def test_after_a_refusal_the_process_has_room_for_an_engine(
    tiny_engine: Callable[..., SGLangEngine],
) -> None:
    with pytest.raises(SettingsError):
        SGLangEngine("tiny", server_args={"attention_backend": "psychic"})
    assert ask(tiny_engine(), [request_for([1])])[0].error is None


def held() -> list[str]:
    """What of SGLang's models is in memory, although somebody may still look at an error."""
    gc.collect()
    kinds = [type(one) for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    names = [k.__name__ for k in kinds if k.__module__.startswith("sglang.srt.models.")]
    return sorted(names)


@pytest.mark.parametrize("weights", ["whole", "none"])
def test_after_a_mixture_of_experts_the_process_has_room_for_an_engine(
    weights: str, tmp_path: Path, no_engine: None, tiny_engine: Callable[..., SGLangEngine]
) -> None:
    """Whether it was served and closed, or refused when half of it was there."""
    folder, before = save_family("qwen3_moe", tmp_path), held()
    if weights == "whole":
        SGLangEngine(folder).close()
    else:
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(SettingsError, match="Cannot find any model weights") as refused:
            SGLangEngine(folder)
        assert refused.value.__cause__ is not None
        assert held() == before
    found = rows_of(tiny_engine(), PROMPTS)
    assert np.abs(found - Reference.of("tiny").rows(PROMPTS)).max() < 1e-4


def test_another_release_of_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.6.0")
    with pytest.raises(SettingsError, match=r"made for sglang 0\.5\.23, and 0\.6\.0 is installed"):
        SGLangEngine("tiny")


@pytest.mark.usefixtures("no_engine")
def test_a_qwen2_model(tmp_path: Path) -> None:
    special = {"bos_token_id": 1, "eos_token_id": [2, 7]}
    save_model(tmp_path, "qwen2", hidden=64, scale=1.0, **special)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCAB, n).tolist() for n in (1, 5, 40, LONGEST - 7, 5)]
    expected = Reference(str(tmp_path)).rows(prompts)
    engine = SGLangEngine(str(tmp_path), max_prompt_tokens=LONGEST - 7)
    try:
        assert np.abs(rows_of(engine, prompts) - expected).max() < 1e-4
        assert engine.info.eos_token_ids == (2, 7)
        assert engine.byte_vocabulary() is None
    finally:
        engine.close()


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("kind", ["gpt_neox", "phi", "phi3"])
def test_rotary_positions_as_transformers_writes_them(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}
    folder = save_model(tmp_path, kind, hidden=128, rope_parameters=rope, sliding_window=None)
    random = np.random.default_rng(0)
    prompts = [random.integers(5, VOCAB, n).tolist() for n in (1, 5, 40)]
    expected = Reference(folder).rows(prompts)
    # What a user changes comes on top.
    with closing(SGLangEngine(folder, server_args=OVERRIDES)) as engine:
        assert np.abs(rows_of(engine, prompts) - expected).max() < 1e-4
        assert engine.info.max_prompt_tokens < 50


_LONGROPE = {"short_factor": [1.5] * 32, "long_factor": [4.0] * 32}
_ORIGINAL = {"original_max_position_embeddings": ORIGINAL}


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    "own",
    [
        {"rope_type": "dynamic"},
        {"rope_type": "linear"},
        {"rope_type": "yarn", "attention_factor": 1.3, **_ORIGINAL},
        {"rope_type": "longrope", **_LONGROPE, **_ORIGINAL},
        {"rope_type": "longrope", "attention_factor": 1.3, **_LONGROPE, **_ORIGINAL},
    ],
    ids=["dynamic", "linear", "yarn", "longrope", "scaled longrope"],
)
def test_positions_that_are_scaled(own: dict[str, Any], tmp_path: Path) -> None:
    rope = {"rope_theta": 500.0, "factor": 4.0, **own}
    folder = save_model(tmp_path, "llama", hidden=128, rope_parameters=rope)
    # SGLang places all tokens of a batch as those of long texts where one of them is.
    lengths = (1, 5, ORIGINAL - 1) if "short_factor" in own else (1, 5, 40, 80)
    prompts = [np.random.default_rng(n).integers(5, VOCAB, n).tolist() for n in lengths]
    expected = Reference(folder).rows(prompts)
    with closing(SGLangEngine(folder)) as engine:
        assert np.abs(rows_of(engine, prompts) - expected).max() < 1e-4
        assert (engine.info.max_prompt_tokens < ORIGINAL) == ("short_factor" in own)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_positions_that_a_user_scales(name: str, tmp_path: Path) -> None:
    """What is laid over config.json is the model's, to which SGLang's is compared."""
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, **_ORIGINAL}
    own = {"rope_type": "default", "rope_theta": 500.0}
    plain = save_model(tmp_path / "plain", "llama", hidden=128, rope_parameters=own)
    scaled = save_model(tmp_path / "scaled", "llama", hidden=128, rope_parameters=rope)
    prompts = [np.random.default_rng(n).integers(5, VOCAB, n).tolist() for n in (1, 5, 80)]
    expected = Reference(scaled).rows(prompts)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    given = {"json_model_override_args": json.dumps({name: scaling})}
    with closing(SGLangEngine(plain, server_args=given)) as engine:
        assert np.abs(rows_of(engine, prompts) - expected).max() < 1e-4


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("model_type", "changes"), [("fuyu", {"tie_word_embeddings": True}), ("olmo3", {})]
)
def test_heads_and_positions_that_sglang_looks_for_elsewhere(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """A head that is tied by the whole of a model, and positions by the names of transformers 5."""
    compare(save_family(model_type, tmp_path, **changes))


def save_family(model_type: str, folder: Path, **changes: Any) -> str:
    """A small model of any family that transformers knows, whose rows are far from flat."""
    torch.manual_seed(0)
    config = small_configuration(model_type, SCALES[1], **changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    return str(folder)


def compare(folder: str) -> None:
    prompts = [np.random.default_rng(n).integers(5, VOCAB, n).tolist() for n in (1, 5, 60)]
    expected = Reference(folder).rows(prompts)
    with closing(SGLangEngine(folder)) as engine:
        assert np.abs(rows_of(engine, prompts) - expected).max() < 1e-4


@pytest.mark.usefixtures("no_engine")
def test_layers_that_attend_to_the_latent_states_of_the_cache(tmp_path: Path) -> None:
    compare(save_family("minicpm3", tmp_path))


LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "longcat_flash")


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("model_type", LATENT)
def test_layers_that_attend_to_latent_states_otherwise(model_type: str, tmp_path: Path) -> None:
    """They are refused by config.json, before there are weights to load; and not on a GPU."""
    config = small_configuration(model_type, SCALES[1])
    config.architectures = [FAMILIES[model_type]]
    config.save_pretrained(tmp_path)
    said = f"SGLang's {FAMILIES[model_type]} attends to latent states .kv_lora_rank=16"
    on_cpu = f"{said}.* on a CPU: .*; serve it on a GPU, or with engine='hf' or"
    with pytest.raises(SettingsError, match=on_cpu):
        SGLangEngine(str(tmp_path))
    settings = importlib.import_module("sglang.srt.server_args").ServerArgs
    names = ("attention_backend", "prefill_attention_backend")
    for name, attention in itertools.product(names, ("torch_native", "flex_attention")):
        given = settings(model_path=str(tmp_path), device="cuda", **{name: attention})
        on_gpu = f"{said}.* {name}='{attention}': .*; leave {name} out of server_args, or serve it"
        with pytest.raises(SettingsError, match=on_gpu):
            check_latent(given)
    for attention in (None, "fa3", "flashinfer", "triton", "dsa"):
        check_latent(settings(model_path=str(tmp_path), device="cuda", attention_backend=attention))


_PART = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("llama", {"mlp_bias": True}, "LlamaForCausalLM computes otherwise for mlp_bias=True"),
        ("llama", {"rope_parameters": _PART}, "places tokens otherwise .*_factor': 0.5"),
        ("phi", {"num_key_value_heads": 1}, "otherwise for num_key_value_heads=1"),
        ("phi", {}, r"Phi.* leaves out the bias of the model's head \(lm_head\.bias\)"),
        ("gpt2", {"activation_function": "relu"}, "otherwise for activation_function='relu'"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "windows that layer_types="),
    ],
)
def test_what_sglang_computes_otherwise_is_refused(
    kind: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_model(tmp_path, kind, hidden=128, **changes)
    if not changes:
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)
        tensors["lm_head.bias"] = torch.arange(VOCAB) / VOCAB
        save_file(tensors, file, metadata={"format": "pt"})
    before = held()
    with pytest.raises(SettingsError, match=said) as refused:
        SGLangEngine(folder).close()
    assert refused.value.__traceback__ is not None
    assert held() == before


@pytest.mark.usefixtures("no_engine")
def test_what_the_trial_refuses_leaves_the_process_room_for_an_engine(
    tmp_path: Path, tiny_engine: Callable[..., SGLangEngine]
) -> None:
    rope = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    folder = save_model(tmp_path, "starcoder2", hidden=128, rope_parameters=rope)
    with pytest.raises(SettingsError, match=r"Starcoder2.* does not scale .*\(linear\)"):
        SGLangEngine(folder)
    assert ask(tiny_engine(), [request_for([1])])[0].error is None


@pytest.mark.usefixtures("no_engine")
def test_overrides_that_are_none_are_refused() -> None:
    with pytest.raises(SettingsError, match="SGLang cannot serve"):
        SGLangEngine("tiny", server_args={"json_model_override_args": "{"})


@pytest.fixture(params=[{}, SMALL], ids=["whole", "in pieces"])
def overflows(
    request: pytest.FixtureRequest, tiny_engine: Callable[..., SGLangEngine]
) -> Iterator[SGLangEngine]:
    """An engine that computes NaN from the token `NAN`, and keeps none of it."""
    engine = tiny_engine(**request.param)
    overflow(engine)
    yield engine
    pool = engine._open()._scheduler.token_to_kv_pool_allocator.get_kvcache()
    assert all(bool(layer.isfinite().all()) for layer in (*pool.k_buffer, *pool.v_buffer))


def test_a_row_that_is_not_a_number_fails_alone(overflows: SGLangEngine) -> None:
    """Neither its batch nor those after it, which begin as it does, have its keys and values."""
    long = list(range(20, 70))
    good = [[1, 2, 3], [1, 2, 3, 4], [*long, 5], [9]]
    for bad in ([1, 2, 3, NAN], [*long, NAN, *long], [*long, NAN], [NAN]):
        failed, *rows = ask(overflows, [request_for(prompt) for prompt in (bad, *good)])
        assert "logsumexp nan" in str(failed.error)
        rows += ask(overflows, [request_for(prompt) for prompt in good])
        found = np.stack([row.logprobs() for row in rows])
        assert np.abs(found - Reference.of("tiny").rows(good * 2)).max() < 1e-4


def test_a_continuation_that_is_not_a_number_fails_alone(overflows: SGLangEngine) -> None:
    want = Generate(5, (), 0.0, 0)
    good = request_for([1, 2, 3], want=want)
    failed, beside = ask(overflows, [request_for([1, 2, 3, NAN], want=want), good])
    assert "has no token to draw" in str(failed.error)
    (after,) = ask(overflows, [good])
    assert drawn(after) == drawn(beside)
    assert int(drawn(beside)[0]) == int(Reference.of("tiny").rows([[1, 2, 3]])[0].argmax())


def test_a_token_that_overflows_when_it_was_drawn(
    tiny_engine: Callable[..., SGLangEngine],
) -> None:
    engine = tiny_engine()
    request = request_for([1, 2, 3], want=Generate(5, (), 0.0, 0))
    (right,) = ask(engine, [request])
    second = int(drawn(right)[1])
    embedding = engine._open()._runner.model.model.embed_tokens
    engine.clear_cache()
    hook = embedding.register_forward_hook(
        lambda _, inputs, states: states.masked_fill((inputs[0] == second)[:, None], float("nan"))
    )
    assert "has no token to draw" in str(ask(engine, [request])[0].error)
    hook.remove()
    (again,) = ask(engine, [request])
    assert drawn(again) == drawn(right)


@pytest.mark.parametrize("call", ["step", "cache_prefix", "clear_cache", "remove_adapter"])
def test_a_batch_that_raises_breaks_the_engine(
    tiny_engine: Callable[..., SGLangEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    engine = tiny_engine(max_loras=1)
    engine.add_adapter("a", write_adapter(tmp_path / "a", seed=1))
    cancelled = request_for([1, 2], adapter="a", want=Generate(9, (), 0.0, 0))
    engine.submit([cancelled])
    engine.step()  # what was cancelled runs for one more step
    engine.cancel([cancelled.id])

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(engine._open()._scheduler, "run_batch", fail)
    if call == "step":
        engine.submit([request_for([1])])
    arguments = {"cache_prefix": [np.array([1], np.uint32)], "remove_adapter": ["a"]}
    with pytest.raises(EngineBroken, match="SGLang failed: RuntimeError: CUDA error"):
        getattr(engine, call)(*arguments.get(call, []))


def test_a_scheduler_that_runs_nothing_breaks_the_engine(
    tiny_engine: Callable[..., SGLangEngine],
) -> None:
    engine = tiny_engine()
    engine.submit([request_for([1])])
    engine._open()._scheduler.waiting_queue.clear()
    for _ in range(1_000):
        assert engine.step() == []
    with pytest.raises(EngineBroken, match="runs none of the prompts"):
        engine.step()


def test_what_sglang_aborts_fails(shared_engine: Callable[..., SGLangEngine]) -> None:
    """As it does for want of memory or time, whether a request waits or runs."""
    engine = shared_engine()
    scheduler = engine._open()
    for steps in (0, 1):
        requests = [request_for([n], want=Generate(3, (), 0.0, 0)) for n in (1, 2)]
        engine.submit(requests)
        for _ in range(steps):
            assert engine.step() == []
        scheduler.abort(engine._names[requests[0].id])
        outcomes = {}
        while engine.in_flight():
            outcomes |= {outcome.id: outcome for outcome in engine.step()}
        aborted, other = (outcomes[request.id] for request in requests)
        assert isinstance(aborted.error, PromptFailed)
        assert len(drawn(other)) == 3


def test_an_adapter_goes_while_others_are_asked_for(
    tiny_engine: Callable[..., SGLangEngine], tmp_path: Path
) -> None:
    engine = tiny_engine(max_loras=2)
    for seed, name in enumerate(("mine", "other")):
        engine.add_adapter(name, write_adapter(tmp_path / name, seed=seed))
    loaded = engine._open()._runner.lora_manager.loras
    mine = request_for([1, 2], adapter="mine", want=Generate(3, (), 0.0, 0))
    other = request_for([1, 2], adapter="other", want=Generate(30, (), 0.0, 0))
    engine.submit([mine, other])
    engine.remove_adapter("mine")
    outcomes = list(engine.step())
    assert len(loaded) == 2
    while not outcomes:
        outcomes += engine.step()
    outcomes += engine.step()
    assert [outcome.id for outcome in outcomes] == [mine.id]
    assert len(loaded) == 1
    engine.cancel([other.id])


def test_an_engine_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_engine: Callable[..., SGLangEngine]
) -> None:
    """Neither files, nor sockets, which Python's collector might wait for, nor a hook."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    hook = sys.excepthook
    opened = {file.path for file in psutil.Process().open_files()}
    engine = tiny_engine()
    assert ask(engine, [request_for([1])])[0].error is None
    assert not [one for one in gc.get_objects() if issubclass(type(one), zmq.Socket)]
    left = {file.path for file in psutil.Process().open_files()} - opened
    assert not [path for path in left if "sglang" in path]
    assert list(tmp_path.iterdir()) == []
    assert sys.excepthook is hook
