"""The MLX engine on mlx itself."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from lmpool.backends import tiny
from lmpool.errors import AdapterError, EngineBroken, PromptFailed, SettingsError
from lmpool.wants import Generate

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from lmpool.backends.contract import Reference, ask, request_for, write_adapter  # noqa: E402
from lmpool.backends.mlx import MLXEngine  # noqa: E402
from lmpool.backends.mlx.arguments import (  # noqa: E402
    mlx_base,
    mlx_utils,
    noted,
    read_meanwhile,
    told,
    unheeded,
)
from lmpool.backends.model_config import ModelConfig  # noqa: E402
from lmpool.backends.progress import Listening  # noqa: E402
from tests.families.small import Limits, small_configuration  # noqa: E402
from tests.support.engines import rows_of  # noqa: E402
from tests.support.hf_texts import (  # noqa: E402
    hide_modules,
    reference_rows,
    save_patterned_adapter,
)
from tests.support.models import (  # noqa: E402
    LONGEST,
    ORIGINAL,
    VOCAB,
    WINDOW,
    WINDOWED,
    configuration,
    save_model,
    without_prefix,
)

pytestmark = [pytest.mark.engine]


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"bos_token_id": 1, "eos_token_id": [2, 7]},
    "gpt2": {"n_ctx": LONGEST},
    "qwen2": {"rope_parameters": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 2.0}},
    "gemma3": {},
    "mamba": {},
}
# Keys and values alone do not tell where a prefix ends: sliding windows, a recurrent state.
PLAIN = {"gemma3", "mamba"}


@pytest.fixture(scope="session", params=sorted(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), "llama")


def save(folder: Path, name: str) -> str:
    saved = save_model(folder, name, hidden=64, scale=2.0, **MODELS[name])
    # As it is on the hub.
    return without_prefix(saved, "transformer.") if name == "gpt2" else saved


def some_prompts(seed: int, count: int = 24, longest: int = LONGEST) -> list[list[int]]:
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, VOCAB, n).tolist() for n in random.integers(1, longest, count)]
    return [*prompts, prompts[0], [*prompts[1], 5], prompts[2][:1], [3] * longest]


def test_models_that_batch_and_models_that_do_not(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = any(name in folder for name in PLAIN)
    with caplog.at_level(logging.WARNING):
        engine = MLXEngine(folder, max_prompt_tokens=LONGEST)
    assert engine.keeps_prefixes == (not plain)
    assert ("slower" in caplog.text) == plain
    reference = Reference(folder)
    for seed in (0, 1):
        prompts = some_prompts(seed, count=10)
        assert np.abs(rows_of(engine, prompts) - reference.rows(prompts)).max() < 1e-4
    assert np.abs(rows_of(engine, prompts) - reference.rows(prompts)).max() < 1e-4
    assert engine.info.vocab_size == VOCAB
    engine.cache_prefix(np.array([1, 2, 3], np.uint32))


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("phi", {"rope_theta": 500.0, "partial_rotary_factor": 0.75}),
        ("gpt_neox", {"rope_theta": 500.0, "partial_rotary_factor": 0.75}),
        (
            "gemma3",
            {
                "full_attention": {"rope_theta": 300.0, "rope_type": "linear", "factor": 4.0},
                "sliding_attention": {"rope_theta": 70.0, "rope_type": "default"},
            },
        ),
    ],
)
def test_rotary_positions_as_transformers_writes_them(
    kind: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    parameters = rope if kind == "gemma3" else {"rope_type": "default", **rope}
    # Four times the hidden size is what mlx-lm takes for granted of GPT-NeoX.
    folder = save_model(
        tmp_path, kind, hidden=64, intermediate_size=256, rope_parameters=parameters
    )
    prompts = some_prompts(0, count=10)
    error = np.abs(rows_of(MLXEngine(folder), prompts) - Reference(folder).rows(prompts)).max()
    assert error < 1e-2  # mlx-lm approximates GPT-NeoX's GELU


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 24,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "rope", "said"),
    [
        ("glm", {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}, None),
        ("gemma", _YARN, r"does not scale .*\(yarn\)"),
        ("helium", _LINEAR, None),
        ("mixtral", _LINEAR, None),
        ("llama", _LINEAR, None),
        ("llama", {**_YARN, "attention_factor": 1.5}, None),
        ("llama", {**_YARN, "truncate": False}, None),
        ("llama", {**_YARN, "beta_fast": 3.0, "mscale": 2.0}, None),
        ("qwen2", {**_LINEAR, "rope_type": "dynamic"}, None),
    ],
)
def test_tokens_are_placed_as_the_model_has_it_or_it_is_refused(
    kind: str, rope: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, kind, hidden=64, rope_parameters=rope)
    if said is not None:
        with pytest.raises(
            SettingsError, match=rf"mlx_lm\.models\.{kind} .*{said}.*another engine"
        ):
            MLXEngine(folder)
        return
    prompts = some_prompts(0, count=10)
    error = np.abs(rows_of(MLXEngine(folder), prompts) - Reference(folder).rows(prompts)).max()
    assert error < 1e-3


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("longrope llama", {}),
        ("longrope phi3", {}),
        ("longrope phimoe", {"attention_bias": True, "lm_head_bias": True}),
    ],
)
def test_short_prompts_of_a_model_that_places_long_ones_otherwise(
    kind: str, changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """mlx-lm places all tokens as those of long prompts."""
    folder = save_model(tmp_path, kind, hidden=64, **changes)
    with caplog.at_level(logging.WARNING):
        engine = MLXEngine(folder)
    assert engine.info.max_prompt_tokens == ORIGINAL
    assert "longrope" in caplog.text
    prompts = [*some_prompts(0, count=6, longest=ORIGINAL), [*range(5, 5 + ORIGINAL)]]
    assert np.abs(rows_of(engine, prompts) - Reference(folder).rows(prompts)).max() < 1e-3
    with pytest.raises(SettingsError, match=rf"max_prompt_tokens=41: .*{ORIGINAL} as the model"):
        MLXEngine(folder, max_prompt_tokens=ORIGINAL + 1)


def save_family(folder: Path, kind: str, **changes: Any) -> str:
    """A small model of a family, as transformers saves it."""
    torch.manual_seed(0)
    config = small_configuration(kind, Limits(LONGEST, LONGEST, LONGEST, LONGEST), **changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    model.save_pretrained(folder)
    return str(folder)


_TWO_KINDS = ["sliding_attention", "full_attention"]
_MULTIPLIERS = {"key_multiplier": 0.3, "attention_in_multiplier": 1.7}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("apertus", {}),
        ("dbrx", {"rope_parameters": {"rope_type": "default", "rope_theta": 70.0}}),
        ("deepseek_v2", {}),
        ("deepseek_v2", {"rope_parameters": _LINEAR}),
        ("exaone4", {"sliding_window": 12, "layer_types": _TWO_KINDS}),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
        ("falcon_h1", _MULTIPLIERS),
        ("glm4_moe_lite", {"rms_norm_eps": 0.05}),
        ("gpt2", {}),
        ("gpt_oss", {}),
        ("gpt_oss", {"rope_parameters": {**_YARN, "truncate": False}}),
        ("granitemoehybrid", {"layer_types": ["linear_attention", "full_attention"]}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("mamba", {"layer_norm_epsilon": 0.05}),
        ("mamba2", {"layer_norm_epsilon": 0.05}),
        ("minicpm3", {"tie_word_embeddings": True}),
        ("minicpm3", {"tie_word_embeddings": False, "rope_parameters": _LINEAR}),
        (
            "olmo3",
            {
                "layer_types": _TWO_KINDS,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 700.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                },
            },
        ),
    ],
)
def test_families_as_transformers_5_saves_them(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Their fields and weights have other names there, or mlx-lm has a value of its own."""
    folder = save_family(tmp_path, kind, **changes)
    prompts = some_prompts(0, count=6, longest=40)
    rows = rows_of(MLXEngine(folder, max_prompt_tokens=LONGEST), prompts)
    assert np.abs(rows - Reference(folder).rows(prompts)).max() < 1e-3


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "relu"}}}, "heed ffn_act_fn={.*'relu'}"),
        ("gpt_oss", {"swiglu_limit": 2.0}, "heed swiglu_limit=2.0"),
        ("nemotron_h", {"mamba_hidden_act": "relu"}, "heed mamba_hidden_act='relu'"),
        ("qwen2_moe", {"norm_topk_prob": True}, "heed norm_topk_prob=True"),
        ("exaone_moe", {}, "'exaone_moe', .* asks for 'is_moe_layer', which config.json lacks: wr"),
        ("phimoe", {}, "'phimoe', .* weights are not named as"),
    ],
)
def test_families_that_mlx_cannot_compute_are_refused_with_a_remedy(
    kind: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = save_family(tmp_path, kind, **changes)
    with pytest.raises(SettingsError, match=f"{said}.*another engine") as refused:
        MLXEngine(folder, max_prompt_tokens=LONGEST)
    assert "\n" not in str(refused.value)


def test_what_is_read_of_one_model_is_not_mixed_with_what_is_read_of_another() -> None:
    """Engines load in threads of their own, beside others that compute."""

    class Arguments(mlx_base.BaseModelArgs):
        one, two, three = 1, 2, 3

    arguments = Arguments()

    def load() -> set[str]:
        with read_meanwhile() as read:
            assert arguments.three == 3
            return set(read)

    with ThreadPoolExecutor(1) as pool:
        with read_meanwhile() as read:
            assert pool.submit(lambda: arguments.two).result() == 2
            assert arguments.one == 1
            other = pool.submit(load)
            with pytest.raises(TimeoutError):
                other.result(timeout=0.2)
            assert read == {"one"}
        assert other.result() == {"three"}
    assert "__getattribute__" not in vars(mlx_base.BaseModelArgs)


@pytest.mark.parametrize("kind", [*sorted({*WINDOWED} - {"llama4"}), "phi3", "starcoder2"])
def test_no_prompt_is_longer_than_a_window_that_is_not_heeded(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model(tmp_path, kind, hidden=64)
    with caplog.at_level(logging.WARNING):
        engine = MLXEngine(folder)
    heeded = kind == "gemma3"
    longest = engine.info.max_prompt_tokens
    assert longest == (LONGEST if heeded else WINDOW)
    assert ("does not heed" in caplog.text) != heeded
    prompts = [*some_prompts(0, count=6, longest=longest), list(range(5, 5 + longest))]
    assert np.abs(rows_of(engine, prompts) - Reference(folder).rows(prompts)).max() < 1e-2
    if not heeded:
        with pytest.raises(SettingsError, match=r"max_prompt_tokens=13: .*window of 12 tokens"):
            MLXEngine(folder, max_prompt_tokens=WINDOW + 1)
    assert MLXEngine(folder, max_prompt_tokens=WINDOW).info.max_prompt_tokens == WINDOW


_FULL, _SLIDING = ["full_attention"], ["sliding_attention"]


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("llama", {"hidden_act": "swish"}, None),
        ("nemotron", {"hidden_act": "silu"}, "hidden_act='silu'"),  # has a name for it alone
        ("gemma3", {"layer_types": [*_FULL, *_SLIDING] * 3 + _FULL}, "layer_types="),
        ("gemma3", {"layer_types": [*_SLIDING, *_FULL] * 3 + _SLIDING}, None),
        ("gemma3", {"final_logit_softcapping": 2.0}, "final_logit_softcapping=2.0"),
        ("deepseek_v32", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        ("deepseek_v32", {"index_topk": LONGEST}, None),
    ],
)
def test_what_mlx_does_not_read_of_config_json_is_refused(
    kind: str, changes: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, kind, hidden=64, **changes)
    if said is not None:
        with pytest.raises(SettingsError, match=rf"{kind}\w* does not heed {said}.*another engine"):
            MLXEngine(folder)
        return
    prompts = some_prompts(0, count=10)
    error = np.abs(rows_of(MLXEngine(folder), prompts) - Reference(folder).rows(prompts)).max()
    assert error < 1e-3


def test_a_model_that_transformers_5_saved_without_what_mlx_asks_for(tmp_path: Path) -> None:
    """Qwen3's number of experts has another name there, and the width of its heads none."""
    folder = save_model(tmp_path, "qwen3_moe", hidden=64)
    written = json.loads((tmp_path / "config.json").read_text())
    assert not {"num_experts", "head_dim"} & written.keys()
    prompts = some_prompts(0, count=10)
    error = np.abs(rows_of(MLXEngine(folder), prompts) - Reference(folder).rows(prompts)).max()
    assert error < 1e-3


def test_a_model_as_it_was_saved_before_transformers_5(tmp_path: Path) -> None:
    """mlx-lm takes its scaled positions to be described by other names than the unscaled have."""
    folder = save_family(tmp_path, "qwen2_moe")
    prompts = some_prompts(0, count=6)
    expected = Reference(folder).rows(prompts)
    file = tmp_path / "config.json"
    written = json.loads(file.read_text())
    theta = written.pop("rope_parameters")["rope_theta"]
    file.write_text(json.dumps({**written, "rope_theta": theta}))
    assert np.abs(rows_of(MLXEngine(folder), prompts) - expected).max() < 1e-3


def test_a_text_that_config_json_describes_beside_its_pictures(tmp_path: Path) -> None:
    """As Qwen2.5-VL's does on the hub, of which transformers makes a configuration in another."""
    folder = save_model(tmp_path, "qwen2", hidden=64)
    prompts = some_prompts(0, count=10)
    expected = Reference(folder).rows(prompts)
    file = tmp_path / "config.json"
    changes = {"model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 32}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    assert np.abs(rows_of(MLXEngine(folder), prompts) - expected).max() < 1e-3
    # What is read of pictures says nothing of what is read of the text.
    assert noted(ModelConfig(tmp_path), {}, set()) == {}


def test_a_model_for_which_mlx_lm_ends_the_process_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "llama", hidden=64)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "olmo"}))
    with pytest.raises(SettingsError, match="cannot be loaded: mlx-lm would end the process"):
        MLXEngine(folder)


def test_what_a_model_says_of_itself_stays_as_it_is(tmp_path: Path) -> None:
    """transformers writes into what it makes a configuration of."""
    rope = {"rope_type": "linear", "factor": 2.0}
    written = {**configuration("llama").to_dict(), "rope_theta": 500.0, "rope_parameters": rope}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(written))
    config = ModelConfig(tmp_path)
    told(config)
    unheeded("llama", config, set())
    assert config.config == json.loads(file.read_text())


def test_a_conversion_that_has_multiplied_the_weights_is_served(tmp_path: Path) -> None:
    """mlx-lm's own Falcon-H1 has no more to multiply, and so it reads no multiplier."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    state = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
    own = {"embedding_multiplier": 5.0, "tie_word_embeddings": False}
    config = transformers.FalconH1Config(
        **sizes, **heads, **state, **own, max_position_embeddings=LONGEST
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    prompts = some_prompts(0, count=6)
    expected = Reference(str(tmp_path)).rows(prompts)
    model, _ = mlx_utils.load_model(tmp_path, model_config=told(ModelConfig(tmp_path)))
    mlx_utils.save_model(tmp_path, model)
    assert np.abs(rows_of(MLXEngine(str(tmp_path)), prompts) - expected).max() < 1e-3


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_what_a_router_chooses_by_is_not_left_out(bias: float, tmp_path: Path) -> None:
    folder = save_model(tmp_path, "ernie4_5_moe", hidden=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
            if "e_score_correction_bias" in name:
                tensor.copy_(torch.tensor([bias, 0, 0, 0]))
    model.save_pretrained(folder)
    if bias:
        with pytest.raises(SettingsError, match=r"ernie4_5_moe leaves out '.*correction_bias'"):
            MLXEngine(folder)
        return
    prompts = some_prompts(0, count=10)
    error = np.abs(rows_of(MLXEngine(folder), prompts) - Reference(folder).rows(prompts)).max()
    assert error < 1e-3


def count_positions(engine: MLXEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The new positions of each forward pass from now on, without padding."""
    counted: list[int] = []
    compute = engine._forward.__call__

    def forward(prompts: Any, prefixes: Any, store: Any) -> Any:
        counted.append(sum(prompt.size for prompt in prompts))
        return compute(prompts, prefixes, store)

    monkeypatch.setattr(engine, "_forward", forward)
    return counted


def test_what_is_shared_is_computed_once(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MLXEngine(llama)
    counted = count_positions(engine, monkeypatch)
    prefix = list(range(60))
    rows_of(engine, [[*prefix, 100 + n] for n in range(32)])
    assert sum(counted) == 60 + 32
    counted.clear()
    rows_of(engine, [[*prefix, 100 + n, n] for n in range(32)])
    assert sum(counted) == 32
    counted.clear()
    rows_of(engine, [[*prefix, 100]] * 5)
    assert sum(counted) == 1
    counted.clear()
    engine.clear_cache()
    engine.cache_prefix(np.array(prefix, np.uint32))
    assert sum(counted) == 60
    rows_of(engine, [[*prefix, 7]])
    assert sum(counted) == 61


def test_kept_prefixes_stay_within_their_bytes(llama: str) -> None:
    """In room for less than a batch, the rows are right all the same."""
    reference = Reference(llama)
    for cache_bytes in (0, 2_000, 40_000):
        engine = MLXEngine(llama, cache_bytes=cache_bytes)
        store = engine._store
        assert store is not None
        for seed in (3, 4, 3):
            prompts = some_prompts(seed)
            assert np.abs(rows_of(engine, prompts) - reference.rows(prompts)).max() < 1e-4
            kept = sum(array.nbytes for pair in store._arrays for array in pair)
            assert kept <= cache_bytes
            assert len(engine._kept) * store.position_bytes <= cache_bytes


@pytest.mark.parametrize("cache_bytes", [1 << 20, 0])
def test_long_prompts_in_pieces(llama: str, cache_bytes: int) -> None:
    engine = MLXEngine(llama, forward_tokens=20, cache_bytes=cache_bytes)
    prompts = some_prompts(5)
    assert np.abs(rows_of(engine, prompts) - Reference(llama).rows(prompts)).max() < 1e-4


@pytest.mark.parametrize("options", [{}, {"forward_tokens": 20}])
def test_a_row_that_is_not_a_number_fails_alone(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its batch nor those after it, which begin as it does, have its keys and values."""
    from mlx import core as mx

    engine = MLXEngine("tiny", **options)
    embedding = engine._open().model.model.embed_tokens
    kind, nan = type(embedding), 0  # the token of least resistance for padding

    def embed(own: Any, ids: Any) -> Any:
        return mx.where((ids == nan)[..., None], float("nan"), kind.__call__(own, ids))

    monkeypatch.setattr(embedding, "__class__", type("Overflows", (kind,), {"__call__": embed}))
    long = list(range(20, 70))
    good = [[1, 2, 3], [1, 2, 3, 4], [*long, 5], [9]]
    right = Reference.of("tiny").rows(good)
    for bad in ([1, 2, 3, nan], [*long, nan, *long], [*long, nan], [nan]):
        failed, *found = ask(engine, [request_for(prompt) for prompt in (bad, *good)])
        assert "logsumexp nan" in str(failed.error)
        assert np.abs(np.stack([row.logprobs() for row in found]) - right).max() < 1e-4
        assert np.abs(rows_of(engine, good) - right).max() < 1e-4
        want = Generate(5, (), 0.0, 0)
        (failed,) = ask(engine, [request_for(bad, want=want)])
        assert "logsumexp nan" in str(failed.error)
        with pytest.raises(PromptFailed, match="logsumexp nan"):
            engine.cache_prefix(np.array(bad, np.uint32))
    assert engine._store is not None
    kept = [array for pair in engine._store._arrays for array in pair]
    assert all(bool(mx.isfinite(array).all()) for array in kept)


def test_a_start_is_told_stage_by_stage(llama: str) -> None:
    heard: list[str] = []
    with Listening(heard.append):
        MLXEngine(llama).close()
    assert heard == ["weights", "trial"]


def test_another_thread_is_refused(llama: str) -> None:
    engine = MLXEngine(llama)
    engine.submit([request_for([1, 2])])
    with ThreadPoolExecutor(1) as pool, pytest.raises(EngineBroken, match="thread that made it"):
        pool.submit(engine.step).result()


def test_rows_of_a_bfloat16_head_are_the_bits_of_its_logits(llama: str) -> None:
    engine = MLXEngine(llama, dtype="bfloat16")
    assert (engine.info.encoding, engine.info.dtype) == ("bf16", "bfloat16")
    (outcome,) = ask(engine, [request_for([5, 6, 7])])
    assert outcome.row is not None
    assert outcome.row.dtype == np.uint16
    assert abs(np.exp(outcome.logprobs().astype(np.float64)).sum() - 1) < 1e-4
    right = Reference(llama).rows([[5, 6, 7]])[0]
    assert np.abs(outcome.logprobs() - right).max() < 0.2


def test_a_quantized_model_and_its_adapters(tmp_path: Path) -> None:
    """A folder as mlx_lm.convert writes it."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model, config = load_model(Path(tiny.path()))
    model, config = quantize_model(model, config, group_size=32, bits=8)
    quantized = tmp_path / "model"
    quantized.mkdir()
    save_model(quantized, model)
    save_config(config, quantized / "config.json")
    engine = MLXEngine(str(quantized))
    assert engine.keeps_prefixes
    prompts = [[1, 5, 9], [7] * 30, [1, 5, 9, 4]]
    reference = Reference.of("tiny")
    assert np.abs(rows_of(engine, prompts) - reference.rows(prompts)).max() < 0.5
    adapter = write_adapter(tmp_path / "a", seed=1, targets=["q_proj", "down_proj"])
    engine.add_adapter("a", adapter)
    by_adapter = rows_of(engine, prompts, adapter="a")
    assert np.abs(by_adapter - reference.rows(prompts, adapter)).max() < 0.5
    assert np.abs(by_adapter - rows_of(engine, prompts)).max() > 0.5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "use_dora=True: only plain LoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*only plain LoRA"),
        ({"alpha_pattern": {"q_.*": 3}}, "alpha_pattern=.*q_proj"),
        ({"r": None}, "a rank of None"),
        ({"r": 5}, "a rank of 5 is expected of r=5"),
    ],
)
def test_adapters_that_mlx_does_not_have_are_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    folder = Path(write_adapter(tmp_path / "a", seed=1))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(AdapterError, match=said):
        MLXEngine("tiny").add_adapter("a", str(folder))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (["lm_head.lora_A.weight", "lm_head.lora_B.weight"], "changes 'lm_head'"),
        ([f"model.layers.9.q_proj.lora_{half}.weight" for half in "AB"], r"layers\.9"),
        ([f"model.embed_tokens.lora_embedding_{half}" for half in "AB"], "changes the embedding"),
        (["model.layers.0.mlp.up_proj.lora_A.weight"], "up_proj' without lora B"),
        (None, "is empty"),
    ],
)
def test_layers_that_an_adapter_cannot_change(
    tmp_path: Path, tensors: list[str] | None, said: str
) -> None:
    from safetensors.numpy import load_file, save_file

    folder = Path(write_adapter(tmp_path / "a", seed=1))
    weights = folder / "adapter_model.safetensors"
    more = {f"base_model.model.{name}": np.zeros((4, 4), np.float32) for name in tensors or ()}
    save_file({} if tensors is None else {**load_file(weights), **more}, weights)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"] = "all-linear"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=said):
        MLXEngine("tiny").add_adapter("a", str(folder))


def test_ranks_alphas_and_saved_tensors_as_peft_reads_them(tmp_path: Path) -> None:
    """And no pattern is run: this one would take ages."""
    folder = save_patterned_adapter(tiny.path(), tmp_path / "a")
    prompts = [[1, 5, 9], [7] * 30, [1, 5, 9, 4]]
    expected = reference_rows(tiny.path(), prompts, folder)
    hide_modules(folder)
    engine = MLXEngine("tiny", dtype="float32")
    engine.add_adapter("a", folder)
    assert np.abs(rows_of(engine, prompts, adapter="a") - expected).max() < 1e-4


def test_an_adapter_of_gpt2_whose_layers_mlx_calls_otherwise(tmp_path: Path) -> None:
    """PEFT's transformer.h.0.attn.c_attn is model.h.0.attn.c_attn in mlx-lm."""
    from safetensors.numpy import save_file

    engine = MLXEngine(save(tmp_path / "model", "gpt2"))
    random = np.random.default_rng(0)
    a = random.normal(size=(2, 64)).astype(np.float32)
    b = random.normal(size=(192, 2)).astype(np.float32)
    folder = tmp_path / "adapter"
    folder.mkdir()
    name = "base_model.model.transformer.h.1.attn.c_attn"
    save_file(
        {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 3})
    )
    engine.add_adapter("a", str(folder))
    prompts = some_prompts(6, count=5)
    by_adapter = rows_of(engine, prompts, adapter="a")

    reference = Reference(str(tmp_path / "model"))
    assert np.abs(rows_of(engine, prompts) - reference.rows(prompts)).max() < 1e-4
    layer = reference.model.transformer.h[1].attn.c_attn
    with torch.no_grad():  # its weight is [inputs, outputs]
        layer.weight += torch.from_numpy((1.5 * b @ a).T)
    reference._known.clear()
    assert np.abs(by_adapter - reference.rows(prompts)).max() < 1e-4
    assert np.abs(by_adapter - rows_of(engine, prompts)).max() > 0.1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"forward_tokens": 0}, "forward_tokens=0"),
        ({"cache_bytes": -1}, "cache_bytes=-1"),
        ({"max_prompt_tokens": 97}, f"max_prompt_tokens=97: the model takes {LONGEST}"),
        ({"max_prompt_tokens": "9"}, "max_prompt_tokens='9'"),
        ({"revision": "main"}, "revision='main'"),
    ],
)
def test_bad_options_are_refused(llama: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        MLXEngine(llama, **options)


def test_special_tokens_vocabulary_and_identity(llama: str, tmp_path: Path) -> None:
    info = MLXEngine(llama, max_prompt_tokens=50).info
    assert (info.bos_token_id, info.eos_token_ids, info.max_prompt_tokens) == (1, (2, 7), 50)
    assert info.identity != MLXEngine(llama, dtype="bfloat16").info.identity
    assert MLXEngine(llama).byte_vocabulary() is None
    vocabulary = MLXEngine("tiny").byte_vocabulary()
    assert vocabulary is not None
    assert len(vocabulary) == 2000
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SettingsError):
        MLXEngine(str(tmp_path))


def test_falcon_h1_of_a_conversion_that_forgot_multipliers_is_refused() -> None:
    from lmpool.backends.mlx.families import mx, taken

    turned = {"model.layers.0.mamba.conv1d.weight": mx.zeros((8, 4, 1))}
    assert taken("falcon_h1", turned, {"key_multiplier": 1.0}) == turned
    with pytest.raises(SettingsError, match=r"key_multiplier=0\.3 .*as it is on the hub"):
        taken("falcon_h1", turned, _MULTIPLIERS)


def test_a_failure_without_words_is_told_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise AssertionError

    monkeypatch.setattr("mlx_lm.utils.load_model", fail)
    said = r"cannot be loaded: .* without words, of 'raise AssertionError' .*another engine"
    with pytest.raises(SettingsError, match=said):
        MLXEngine("tiny")
