"""What `lmpool plan` reckons: by hand, by what was measured, and of what cannot be."""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lmpool.affinity import lanes_in_use
from lmpool.cli import app
from lmpool.errors import SettingsError
from lmpool.model_info import MAX_SHARDS
from lmpool.plan import Demand, Plan, PlannedModel, measured, plan, read_model
from lmpool.plan.arithmetic import maxmemory_for, room_for
from lmpool.plan.traffic import bulk
from lmpool.result_memory import footprint, room
from tests.support.performance import LARGE
from tests.support.screens import unbroken

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "benchmarks" / "results"
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "torch_dtype": "bfloat16", "vocab_size": 128_256, "tie_word_embeddings": False,
}  # fmt: skip
F32 = PlannedModel("m", 128_256, "float32")
GIB = 1 << 30


def config(folder: Path, **fields: Any) -> str:
    """The path of a config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({name: it for name, it in fields.items() if it is not None}))
    return str(file)


def of(*wants: str, model: PlannedModel = F32, **demand: Any) -> Plan:
    return plan(Demand(model, **{"prompt_rate": 1000.0, "wants": wants, **demand}))


# --- models --------------------------------------------------------------------------------------


def test_a_models_config_is_read(tmp_path: Path) -> None:
    found = read_model(config(tmp_path, **LLAMA))
    assert (found.vocab_size, found.dtype, found.encoding) == (128_256, "bfloat16", "bf16")
    assert found.state_bytes == 2 * 32 * 8 * 128 * 2 == 131_072
    # Meta-Llama-3-8B's own index says 16,060,522,496; the norms are left out here.
    assert found.weights_bytes == pytest.approx(16_060_522_496, rel=0.001)
    assert found.unknown == ()
    assert read_model(str(tmp_path)).vocab_size == 128_256


def test_the_model_that_lmpool_brings() -> None:
    tiny = read_model("tiny")
    assert (tiny.vocab_size, tiny.dtype, tiny.layers, tiny.kv_heads) == (2000, "float32", 3, 2)
    assert tiny.weights_from == "*.safetensors"


def test_older_names_and_texts_of_models_with_pictures(tmp_path: Path) -> None:
    gpt2 = {"vocab_size": 50_257, "n_layer": 12, "n_head": 12, "n_embd": 768, "dtype": "float32"}
    assert read_model(config(tmp_path, **gpt2)).state_bytes == 2 * 12 * 768 * 4
    nested = read_model(config(tmp_path, text_config=LLAMA, model_type="llava"))
    assert nested.state_bytes == 131_072


def test_what_is_true_of_every_config_is_not_unusual(tmp_path: Path) -> None:
    usual = {"full_attention_interval": 1, "num_kv_shared_layers": 0, "vision_config": None}
    assert read_model(config(tmp_path, **{**LLAMA, **usual})).unknown == ()


def test_weights_are_estimated_by_the_model_type(tmp_path: Path) -> None:
    """Of an MLP with a gate or without, and one table or two."""
    sizes = {**LLAMA, "tie_word_embeddings": None}
    table, mlp = 128_256 * 4096, 32 * 4096 * 14_336
    found = {
        of: read_model(config(tmp_path, **{**sizes, "model_type": of})).weights_bytes or 0
        for of in ("llama", "gemma", "phi", "starcoder2")
    }
    assert found["llama"] - found["gemma"] == 2 * table
    assert found["llama"] - found["phi"] == 2 * mlp
    assert found["phi"] - found["starcoder2"] == 2 * table
    said = read_model(config(tmp_path, **{**LLAMA, "model_type": "gemma"}))  # and it says not tied
    assert said.weights_bytes == found["llama"]


def test_weights_that_are_there_are_counted(tmp_path: Path) -> None:
    file = config(tmp_path, **LLAMA)
    (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    assert read_model(file).weights_bytes == 1000
    for total in (5_000_000, 5_000_000.0):  # as some tools write it
        index = {"metadata": {"total_size": total}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        assert read_model(file).weights_bytes == 5_000_000


def files(folder: Path, **sizes: int) -> None:
    for name, size in sizes.items():
        (folder / f"{name.replace('_of_', '-of-')}.safetensors").write_bytes(bytes(size))


def test_weights_are_counted_once(tmp_path: Path) -> None:
    """A folder may have them in two forms, and adapters beside them."""
    file = config(tmp_path, **LLAMA)
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    files(tmp_path, **{"model-1_of_2": 300, "model-2_of_2": 400})
    assert read_model(file).weights_bytes == 700
    files(tmp_path, consolidated=699, adapter_model=10)
    assert read_model(file).weights_bytes == 700
    for path in tmp_path.glob("model-*"):
        path.unlink()
    assert read_model(file).weights_bytes == 699
    files(tmp_path, another=5)  # either may be it
    assert read_model(file).weights_from == "estimated from config.json"
    (tmp_path / "another.safetensors").unlink()
    (tmp_path / "consolidated.safetensors").unlink()  # an adapter alone is no model
    assert read_model(file).weights_from == "estimated from config.json"
    files(tmp_path, consolidated=699)
    (tmp_path / "adapter_model.safetensors").unlink()
    assert read_model(file).weights_bytes == 699


@pytest.mark.parametrize(
    "metadata",
    [None, [], {}, {"total_size": "many"}, {"total_size": True}, {"total_size": -1.0}],
)
def test_an_index_without_a_size_names_the_files(metadata: Any, tmp_path: Path) -> None:
    file = config(tmp_path, **LLAMA)
    files(tmp_path, **{"part-1_of_2": 300, "part-2_of_2": 400}, other=5)
    of_parts = {"a": "part-1-of-2.safetensors", "b": "part-1-of-2.safetensors"}
    index = {"metadata": metadata, "weight_map": {**of_parts, "c": "part-2-of-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_model(file).weights_bytes == 700


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": "gone"}}', "Infinity", "[" * 9999],
)
def test_an_index_that_tells_nothing_is_none(content: str, tmp_path: Path) -> None:
    file = config(tmp_path, **LLAMA)
    files(tmp_path, model=300)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert read_model(file).weights_bytes == 300


def test_a_hub_model_is_read_from_the_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--someone--a-model"
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    config(model / "snapshots" / "abc", **LLAMA)
    assert read_model("someone/a-model").state_bytes == 131_072
    with pytest.raises(SettingsError, match="nothing is downloaded for a plan"):
        read_model("someone/another-model")


@pytest.mark.parametrize(
    ("fields", "said", "state"),
    [
        ({"kv_lora_rank": 512}, "latent attention", None),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention", None),
        ({"block_types": ["recurrent", "attention"]}, "block_types", None),
        ({"lru_width": 4096}, "lru_width", None),
        ({"hybrid_override_pattern": "M-M*-"}, "hybrid_override_pattern", None),
        ({"full_attention_interval": 4}, "full_attention_interval", None),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers", None),
        ({"num_hidden_layers": None}, "does not name layers", None),
        ({"torch_dtype": None}, "float32 is taken", 262_144),
        ({"num_experts": 64}, "mixture of experts", 131_072),
        ({"quantization_config": {"bits": 4}}, "quantized", 131_072),
        ({"model_type": "a_new_one"}, "model_type='a_new_one', whose layers", 131_072),
        ({"model_type": None}, "model_type=None, whose layers", 131_072),
        ({"vision_config": {"depth": 1}}, "several parts (vision_config)", 131_072),
    ],
)
def test_what_is_unknown_is_said(
    fields: dict[str, Any], said: str, state: int | None, tmp_path: Path
) -> None:
    found = read_model(config(tmp_path, **{**LLAMA, **fields}))
    assert any(said in text for text in found.unknown), found.unknown
    assert found.state_bytes == state
    planned = of("row", model=found, gpu_memory=80 * GIB)
    assert planned.unknown == found.unknown
    assert ("state" in planned) == (state is not None)
    assert "maxmemory" in planned


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no JSON"),
        ("[1]", "no JSON object"),
        ("{}", "vocab_size=None"),
        ('{"vocab_size": -5}', "vocab_size=-5"),
        ('{"vocab_size": "a"}', "vocab_size='a'"),
        ('{"vocab_size": 99999999999}', "vocab_size=99999999999"),
        ("[" * 100_000, "is no JSON"),
    ],
)
def test_what_is_no_config_is_refused(content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(SettingsError, match=re.escape(said)):
        read_model(str(file))


@pytest.mark.parametrize(
    "name", ["/no/such/config.json", "./none", "nobody/no-model", "a\0b", "x" * 5000]
)
def test_a_model_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="name a"):
        read_model(name)


# --- answers and memory --------------------------------------------------------------------------


def newest(name: str) -> dict[str, dict[str, float]]:
    """The medians of a saved benchmark, by heading and figure."""
    (found,) = json.loads((RESULTS / f"{name}.json").read_text())
    return {
        heading: {each["what"]: each["median"] for each in figures}
        for heading, figures in found["figures"].items()
    }


@pytest.mark.parametrize(
    ("want", "figure"),
    [("row", "rows"), ("top:20", "top 20"), ("tokens:8", "8 tokens"), ("draw:8", "draws of 8")],
)
def test_answers_are_as_large_as_they_were_measured(want: str, figure: str) -> None:
    assert of(want)["answer"].value == newest("answers")["Stored"][figure]


def test_what_things_cost_is_what_was_measured() -> None:
    jobs, rows = newest("jobs")["Processor time"], newest("rows")[LARGE]
    answers, stored = newest("answers")["Processor time"], newest("answers")["Stored"]["rows"]
    for who, moved, costs in (
        ("server", 2, (measured.SERVER_JOB, measured.SERVER_BYTE)),
        ("client", 1, (measured.CLIENT_JOB, measured.CLIENT_BYTE)),
    ):
        small = jobs[f"pool, batch calls, default settings: {who}"], answers[f"top 20: {who}"]
        job = statistics.mean(small)
        large = (
            (rows[f"pool, batch calls: {who}"] - job) / (moved * 4 * 65_536),
            (answers[f"rows: {who}"] - job) / (moved * stored),
        )
        for cost, us in zip(costs, (job, statistics.mean(large)), strict=True):
            assert 0.5 < cost * 1e6 / us < 2, (who, us)


@pytest.mark.parametrize(
    ("want", "vocab_size", "name", "heading", "figure"),
    [
        ("row", 256, "jobs", "Processor time", "pool, batch calls, default settings"),
        ("row", 65_536, "rows", LARGE, "pool, batch calls"),
        ("row", 128_256, "answers", "Processor time", "rows"),
        ("top:20", 128_256, "answers", "Processor time", "top 20"),
    ],
)
def test_the_servers_cores_are_those_of_the_benchmarks(
    want: str, vocab_size: int, name: str, heading: str, figure: str
) -> None:
    us = newest(name)[heading][f"{figure}: server"]
    found = of(want, model=PlannedModel("m", vocab_size, "float32"), prompt_tokens=32)
    assert 0.5 < found["server_cores"].value / (1000 * us / 1e6) < 2


def test_a_plan_by_hand() -> None:
    found = of("top:20=0.75", "row=0.25", distinct=0.5, ttl=100.0, gpus=4, prompt_tokens=100)
    row = 24 + 4 * 128_256
    assert found["answer"].value == 0.75 * 148 + 0.25 * row
    assert found["computed"].value == 500
    held = 500 * 100 * (0.75 * footprint(148) + 0.25 * footprint(row))
    assert found["results"].value == held
    most = found["maxmemory"].value
    assert held < most < 1.2 * held + GIB
    assert found["worker_prompts"].value == 125
    assert found["worker_tokens"].value == 12_500


@pytest.mark.parametrize(
    ("dtype", "encoding", "each"),
    [("bfloat16", None, 2), ("float32", None, 4), ("float32", "f16", 2), ("bfloat16", "f32", 4)],
)
def test_rows_are_of_the_encoding(dtype: str, encoding: Any, each: int) -> None:
    found = of("row", model=PlannedModel("m", 1000, dtype), encoding=encoding)
    assert found["answer"].value == 24 + each * 1000


def test_hidden_states_are_of_the_models_dtype() -> None:
    for dtype, each in (("bfloat16", 2), ("float16", 2), ("float32", 4)):
        stored = of("hidden", model=PlannedModel("m", 1000, dtype, hidden_size=512))["answer"].value
        assert 512 * each < stored < 512 * each + 10


@given(st.integers(0, 1 << 42), st.integers(0, 1 << 32))
def test_a_maxmemory_holds_what_it_is_for(results: int, other: int) -> None:
    most = maxmemory_for(results, other)
    memory = {"maxmemory": most, "used_memory": other + results}
    left = room(memory, results)  # as workers reckon
    assert left is not None
    assert left >= 0
    less = room({**memory, "maxmemory": most - 1}, results) if most > 1 else None
    assert less is None or less <= 0
    assert room_for(most, other) >= results


@given(st.integers(1, 1 << 42), st.integers(0, 1 << 32))
def test_a_memory_holds_no_more_than_fits(most: int, other: int) -> None:
    held = room_for(most, other)
    left = room({"maxmemory": most, "used_memory": other + held + 1}, held + 1)
    assert left is not None
    assert left < 0 or held == most
    assert 0 <= held <= most


def test_a_memory_gives_the_time_to_live_that_fits() -> None:
    needed = of("row", ttl=50.0)
    memory = int(needed["maxmemory"].value)
    assert of("row", ttl=50.0, memory=memory)["memory_ttl"].value == pytest.approx(50, rel=1e-3)
    small = of("row", ttl=50.0, memory=memory // 2)
    assert small["memory_ttl"].value < 26
    assert any("older results are evicted" in text for text in small.warnings)
    full = of("row", ttl=50.0, memory=1)
    (warned,) = [text for text in full.warnings if "server's memory" in text]
    assert "less than a second of results" in warned


def test_more_than_one_primary_is_warned_of() -> None:
    assert of("top:20").warnings == ()
    found = of("row", prompt_rate=20_000)
    assert found["primaries"].value > 1
    # As many as workers choose on such a cluster.
    assert found["shards"].value == min(MAX_SHARDS, 2 * max(3, found["primaries"].value))
    (warned, *_) = found.warnings
    assert f"a Redis Cluster of {max(3, found['primaries'].value):,.0f} primaries" in warned
    for remedy in ("top:20", "f16", "--ttl"):
        assert remedy in warned


def test_states_fit_beside_the_weights(tmp_path: Path) -> None:
    llama = read_model(config(tmp_path, **LLAMA))
    weights = llama.weights_bytes or 0
    by_hand = {
        "vllm": (0.9 * 80 * GIB - weights) // 131_072,
        "hf": 32 * GIB / 131_072,
        "mlx": 4 * GIB / 131_072,
    }
    of_all, of_free = ("vllm", "sglang"), ("hf", "auto", "mlx")
    for engine in (*of_all, *of_free):
        found = of("row", model=llama, gpu_memory=80 * GIB, engine=engine, gpus=2)
        kept = by_hand[{"sglang": "vllm", "auto": "hf"}.get(engine, engine)]
        assert found["gpu_states"].value == kept
        assert found["pool_states"].value == 2 * kept
        assert {"auto": "hf"}.get(engine, engine) in found["gpu_states"].what
        assert evaluated(found["gpu_states"].numbers) == pytest.approx(kept, abs=1)
        full = of("row", model=llama, gpu_memory=12 * GIB, engine=engine)
        assert full["gpu_states"].value == 0
        assert any("GPU with more memory" in text for text in full.warnings)


@pytest.mark.parametrize(
    ("engine", "options", "kept"),
    [
        ("vllm", {"gpu_memory_utilization": 0.5}, (0.5 * 80 * GIB - 1000) // 131_072),
        ("vllm", {"gpu_memory_utilization": 0}, 0),
        ("vllm", {"kv_cache_memory_bytes": GIB}, 8192),
        ("sglang", {"server_args": {"mem_fraction_static": 0.5}}, (40 * GIB - 1000) // 131_072),
        ("hf", {"kv_cache_bytes": GIB}, 8192),
        ("auto", {"kv_cache_bytes": 0}, 0),
        ("hf", {"kv_cache_bytes": 1 << 49}, 1 << 20),
        ("mlx", {"cache_bytes": GIB}, 8192),
        ("hf", {"gpu_memory_utilization": 0.5, "device": "cuda"}, 32 * GIB / 131_072),
    ],
)
def test_states_are_bound_as_the_engine_is_told(
    engine: str, options: dict[str, Any], kept: float, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    monkeypatch.setenv("LMPOOL_ENGINE", engine)
    monkeypatch.setenv("LMPOOL_ENGINE_OPTS", json.dumps(options))
    asked = ("--model", config(tmp_path, **LLAMA), "--prompt-rate", "1", "--gpu-memory", "80GiB")
    found = json.loads(command(*asked, "--json"))
    assert found["values"]["gpu_states"] == kept
    (line,) = [each for each in found["lines"] if each["name"] == "gpu_states"]
    assert ("by default" in line["what"]) is (engine == "hf" and "device" in options)
    assert evaluated(line["numbers"]) == pytest.approx(kept, abs=1)


@pytest.mark.parametrize("given", [1.5, -1, "much", True, math.nan])
def test_an_option_that_cannot_be_is_refused_by_its_name(given: object, tmp_path: Path) -> None:
    llama = read_model(config(tmp_path, **LLAMA))
    options = {"gpu_memory_utilization": given}
    with pytest.raises(SettingsError, match="gpu_memory_utilization="):
        of("row", model=llama, gpu_memory=80 * GIB, engine="vllm", engine_opts=options)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "bert", "architectures": ["BertModel"]},
        {"model_type": "new", "architectures": ["NewForMaskedLM"]},
        {"model_type": "t5", "is_encoder_decoder": True},
    ],
)
def test_of_an_encoder_no_keys_and_values_are_reckoned(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    found = read_model(config(tmp_path, **{**LLAMA, **fields}))
    assert found.state_bytes is None
    assert any("no engine of lmpool's serves" in text for text in found.unknown)


def test_an_encoder_that_is_a_decoder_is_reckoned_with(tmp_path: Path) -> None:
    """The hf engine serves it."""
    fields = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "is_decoder": True}
    found = read_model(config(tmp_path, **{**LLAMA, **fields}))
    assert found.state_bytes == read_model(config(tmp_path, **LLAMA)).state_bytes
    assert not any("encoder" in text for text in found.unknown)


def test_of_an_engine_that_keeps_states_in_its_own_way_it_is_not_known(tmp_path: Path) -> None:
    llama = read_model(config(tmp_path, **LLAMA))
    found = of("row", model=llama, gpu_memory=80 * GIB, engine="mine")
    assert "gpu_states" not in found
    (said,) = found.unknown
    assert "the engine 'mine' says itself" in said
    assert of("row", model=llama, engine="mine").unknown == ()


def test_the_engine_is_that_of_the_workers_unless_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--prompt-rate", "1", "--gpu-memory", "8GiB", "--json")
    assert json.loads(command(*asked))["engine"] == "auto"
    monkeypatch.setenv("LMPOOL_ENGINE", "vllm")
    assert json.loads(command(*asked))["engine"] == "vllm"
    assert json.loads(command(*asked, "--engine", "hf"))["engine"] == "hf"


def test_a_cache_that_holds_all_answers_all_that_is_asked_again() -> None:
    needed = of("row", "draw:8", distinct=0.25, ttl=10.0, clients=5)
    size = math.ceil(needed["cache_bytes"].value)
    kept = of("row", "draw:8", distinct=0.25, ttl=10.0, clients=5, cache_bytes=size)
    assert kept["cache_hits"].value == pytest.approx(0.5 * 75)  # draws are kept by nobody
    little = of("row", "draw:8", distinct=0.25, ttl=10.0, clients=5, cache_bytes=size // 4)
    assert little["cache_hits"].value == pytest.approx(0.5 * 75 / 4, rel=1e-3)
    assert "cache_bytes" not in of("row")


def test_a_bulk_string_is_as_long_as_it_is() -> None:
    for size in (0, 9, 10, 12_345):
        assert bulk(size) == len(b"$%d\r\n%b\r\n" % (size, bytes(size)))


# --- the arithmetic that is shown ----------------------------------------------------------------


def evaluated(numbers: str) -> float | None:
    """What a line's numbers come to; None where they are words."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", numbers).replace(" x ", " * ")
    text = re.sub(r" us\b", "e-6", re.sub(r" ns\b", "e-9", re.sub(r"/s\b| s\b", "", text)))
    if not re.fullmatch(r"[-+*/(). \de,min]+", text):
        return None
    return float(eval(text, {"__builtins__": {}, "min": min}))


def test_every_line_comes_to_its_value(tmp_path: Path) -> None:
    found = of(
        "top:20=0.75", "row=0.25", model=read_model(config(tmp_path, **LLAMA)), distinct=0.6,
        prompt_rate=2345.0, gpus=3, clients=7, memory=64 * GIB, gpu_memory=80 * GIB,
    )  # fmt: skip
    words = []
    for line in found.lines:
        value = evaluated(line.numbers)
        if value is None:
            words.append(line.name)
            continue
        rounded = {"primaries": math.ceil(value), "%": 100 * value}
        value = rounded.get(line.name, rounded.get(line.unit, value))
        assert value == pytest.approx(line.value, rel=0.01), line
    assert words == ["answer_0", "answer_1", "base", "weights"]
    assert len({line.name for line in found.lines}) == len(found.lines) > 25


# --- the command ---------------------------------------------------------------------------------


def command(*words: str, status: int = 0, width: int = 80) -> str:
    found = CliRunner().invoke(
        app, ["plan", "--model", "tiny", *words], env={"COLUMNS": str(width)}
    )
    assert found.exit_code == status, found.output
    return found.output


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_arithmetic_is_shown(width: int) -> None:
    text = unbroken(command("--prompt-rate", "100", "--want", "row", width=width).splitlines())
    for part in ("maxmemorytoset:", "=computedxtimetolivexfootprint=100/sx600sx", "Mbit/s"):
        assert part in text


def test_a_plan_for_programs() -> None:
    found = json.loads(command("--prompt-rate", "100", "--want", "top:20", "--json"))
    assert found["values"]["results"] == 100 * 600 * footprint(found["wants"][0]["bytes"])
    assert {"section", "name", "what", "formula", "numbers", "value", "unit"} == {
        *found["lines"][0]
    }
    assert (found["warnings"], found["unknown"], found["ttl"]) == ([], [], 600.0)


def test_settings_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMPOOL_RESULT_TTL", "50")
    monkeypatch.setenv("LMPOOL_ENCODING", "f16")
    found = json.loads(command("--prompt-rate", "100", "--json"))
    assert (found["ttl"], found["encoding"], found["wants"][0]["bytes"]) == (50.0, "f16", 4024)


def test_the_example_of_the_guide_is_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "planning.md").read_text("utf-8")
    given, asked, said = re.findall(r"```(?:json|bash|text)?\n(.*?)```", text, re.DOTALL)[:3]
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(given)
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, shlex.split(asked)[1:])
    assert shown.exit_code == 0, shown.output
    assert len(said.splitlines()) > 10
    missing = {*said.splitlines()} - {*shown.stdout.splitlines()}
    assert missing == set()


RATE = ("--prompt-rate", "100")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--prompt-rate is missing: write how many all clients ask together"),
        (("--prompts-per-second", "-1"), "prompt_rate=-1.0: write a number above 0"),
        (("--prompt-rate", "0"), "prompt_rate=0.0: write a number above 0"),
        (("--prompt-rate", "nan"), "prompt_rate=nan: write a number above 0"),
        (("--prompt-rate", "inf"), "prompt_rate=inf: write a number above 0"),
        ((*RATE, "--gpus", "-1"), "gpus=-1: write a whole number of 1 or more"),
        ((*RATE, "--clients", "0"), "clients=0: write a whole number"),
        ((*RATE, "--prompt-tokens", "0"), "prompt_tokens=0: write a whole number"),
        ((*RATE, "--prompt-tokens", "99999999"), "prompt_tokens=99999999: at most"),
        ((*RATE, "--ttl", "nan"), "ttl=nan: write a number above 0"),
        ((*RATE, "--distinct", "1.5"), "distinct=1.5: write a number above 0, up to 1"),
        ((*RATE, "--distinct", "nan"), "distinct=nan: write"),
        ((*RATE, "--memory", "-5"), "memory='-5': write a number of bytes above 0, as 16GiB"),
        ((*RATE, "--gpu-memory", "much"), "gpu_memory='much': write a number of bytes"),
        ((*RATE, "--row-encoding", "f8"), "row_encoding='f8': write one of f32, bf16, f16"),
        ((*RATE, "--row-encoding", "bf16"), "computes in float32, whose rows lose by it"),
        ((*RATE, "--want", "rows"), "want='rows': there is no such want; write one of row, top"),
        ((*RATE, "--want", "row:5"), "row takes no number"),
        ((*RATE, "--want", "top:x"), "top takes a whole number, as in top:20"),
        ((*RATE, "--want", "top:0"), "want='top:0': k=0: write an integer from 1 to 2000"),
        ((*RATE, "--want", "top:9999"), "k=9999: write an integer from 1 to 2000"),
        ((*RATE, "--want", "tokens:999999999"), "more than 262144 ids"),
        ((*RATE, "--want", "generate:999999999"), "at most generate:"),
        ((*RATE, "--want", "score", "--prompt-tokens", "1"), "a text of 1 token"),
        ((*RATE, "--want", "row=2"), "its share '2' is no number above 0, up to 1"),
        ((*RATE, "--want", "row=nan"), "its share 'nan'"),
        ((*RATE, "--want", "row=0.5", "--want", "top:5"), "some have a share and some have none"),
        ((*RATE, "--want", "row=0.5", "--want", "top:5=0.4"), "the shares are 0.9 together"),
        ((*RATE, "--model", "/no/such"), "cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_refused_with_a_remedy(words: tuple[str, ...], said: str) -> None:
    (line,) = command(*words, status=2).splitlines()
    assert line.startswith("error: ")
    assert said in line


# --- lanes ---------------------------------------------------------------------------------------


def test_lanes_are_those_that_workers_would_use() -> None:
    found = of("top:20", gpus=3)
    assert found["lanes_in_use"].value == lanes_in_use(3, 64) == 64
    assert found["home_lanes"].value == pytest.approx(64 / 3)
    assert "lanes_in_use" not in of("top:20")
    assert "lanes_in_use" not in of("top:20", gpus=3, lanes=1)


def test_lanes_that_are_too_few_are_warned_of_with_how_many_are_enough() -> None:
    (warning,) = [text for text in of("top:20", gpus=20).warnings if "LMPOOL_LANES" in text]
    assert "3.2 lanes" in warning
    due = int(warning.rpartition("=")[2])
    assert due == lanes_in_use(20, 1024) >= 16 * 20
    assert of("top:20", gpus=20, lanes=due).warnings == ()


def test_what_is_kept_adds_up_where_each_beginning_has_one_home(tmp_path: Path) -> None:
    llama = read_model(config(tmp_path, **LLAMA))
    found = of("row", model=llama, gpus=4, gpu_memory=80 * GIB)
    assert found["pool_states"].value == 4 * found["gpu_states"].value > 0
    assert "pool_states" not in of("row", model=llama, gpus=4, gpu_memory=80 * GIB, lanes=1)
