"""The vLLM engine on the real vLLM: every row is its prompt's, however vLLM schedules."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers

from lmpool.backends import Request
from lmpool.backends.contract import Reference
from lmpool.backends.progress import Listening
from lmpool.errors import EngineBroken, PromptFailed, SettingsError
from lmpool.wants import Generate
from tests.support.engines import drawn, requests_of
from tests.support.models import (
    CONFIGURATIONS,
    LONGEST,
    ORIGINAL,
    VOCAB,
    WINDOW,
    configuration,
    save_model,
)
from tests.support.vllm_engine import (
    QUICK,
    Watched,
    answer,
    assert_nothing_left,
    assert_rows,
    drain,
    need_vllm,
    prompts,
    vllm_engine,
)

need_vllm()

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, many
]

TIGHT = {
    "few at once": {"max_num_seqs": 16},
    "in chunks": {"max_num_batched_tokens": 48, "max_num_seqs": 32},
    "asynchronously": {"async_scheduling": True},
    "without a cache": {"enable_prefix_caching": False, "live_prompts": 0},
}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.of("tiny")


@pytest.fixture(scope="class")  # two engines at a time do not get along in one process
def engine() -> Iterator[Any]:
    with vllm_engine(block_size=32) as made:
        yield made


def test_a_start_is_told_stage_by_stage():
    heard: list[str] = []
    with Listening(heard.append), vllm_engine():
        pass
    assert heard == ["weights", "memory", "capture", "trial"]


class TestRows:
    @pytest.mark.parametrize(
        ("count", "longest"), [(1, 40), (7, 400), (64, 200), (300, 60), (2000, 20)]
    )
    def test_of_prompts_of_mixed_lengths(self, engine, reference, count, longest):
        given = prompts(count, longest, seed=count)
        assert_rows(answer(engine, given), reference.rows(given))
        assert_nothing_left(engine)

    def test_with_a_shared_prefix_that_is_computed_once(self, engine, reference):
        given = prompts(40, 20, shared=300)
        answer(engine, given[:1])
        with Watched(engine) as seen:
            outcomes = answer(engine, given)
        assert_rows(outcomes, reference.rows(given))
        assert sum(seen.tokens) < 40 * (20 + 32)  # not 40 * 300
        assert_nothing_left(engine)

    def test_repeats(self, engine, reference):
        some = prompts(5, 50, seed=9)
        given = [some[i % 5] for i in range(60)]
        assert_rows(answer(engine, given), reference.rows(given))
        assert_rows(answer(engine, given), reference.rows(given))
        assert_nothing_left(engine)

    def test_beside_requests_that_sample(self, engine, reference):
        from vllm import SamplingParams

        from lmpool.backends.vllm import internals

        given = prompts(60, 80, seed=3)
        foreign = prompts(24, 60, seed=4)
        sampled = Generate(max_tokens=9, eos_token_ids=(), temperature=0.8, seed=1)
        greedy = Generate(max_tokens=9, eos_token_ids=(), temperature=0.0, seed=1)
        for i, prompt in enumerate(foreign):
            # As another user of the same vLLM: biased, penalized, several tokens, never captured.
            params = SamplingParams(
                max_tokens=12,
                temperature=0.8,
                seed=i,
                logit_bias={5: 50.0, 9: -50.0},
                repetition_penalty=1.3,
                detokenize=False,
            )
            engine._core.add_request(
                internals.make_request(
                    f"foreign-{i}", prompt.tolist(), params, arrival=0.0, lora=None, resumable=False
                )
            )
        engine.submit(requests_of(given[:20]))
        engine.submit(requests_of(foreign[:12], 100, want=sampled))
        outcomes = {o.id: o for o in engine.step()}
        engine.submit(requests_of(foreign[12:], 112, want=greedy))
        engine.submit(requests_of(given[20:], 20))
        outcomes.update(drain(engine))
        rows = [outcomes[b"%d" % i] for i in range(60)]
        assert_rows(rows, reference.rows(given))
        assert all(len(drawn(outcomes[b"%d" % i])) == 9 for i in range(100, 124))
        engine._core.abort_requests([f"foreign-{i}" for i in range(24)])
        assert_nothing_left(engine)

    def test_tokens_are_drawn_only_where_somebody_reads_one(
        self, engine, reference, monkeypatch: pytest.MonkeyPatch
    ):
        from vllm.v1.sample.sampler import Sampler

        if not hasattr(
            engine._engine.model_executor.driver_worker.worker.model_runner, "input_batch"
        ):
            pytest.skip("the second model runner draws a token of every request")
        seen: list[int] = []
        sample = Sampler.greedy_sample

        def greedy_sample(logits: Any) -> Any:
            seen.append(logits.shape[-1])
            return sample(logits)

        monkeypatch.setattr(Sampler, "greedy_sample", staticmethod(greedy_sample))
        given = prompts(20, 40, seed=21)
        assert_rows(answer(engine, given), reference.rows(given))
        assert set(seen) == {1}
        seen.clear()
        greedy = Generate(max_tokens=6, eos_token_ids=(), temperature=0.0, seed=1)
        engine.submit(requests_of(given[:2], want=greedy))
        alone = drain(engine)
        assert set(seen) == {2000}
        engine.submit([*requests_of(given[:2], want=greedy), *requests_of(given, 10)])
        both = drain(engine)
        assert_rows([both[b"%d" % i] for i in range(10, 30)], reference.rows(given))
        for name in (b"0", b"1"):
            assert drawn(both[name]) == drawn(alone[name])
        assert_nothing_left(engine)

    def test_with_aborts_in_between(self, engine, reference):
        given = prompts(300, 60, seed=5)
        outcomes = {}
        engine.submit(requests_of(given))
        gone = {b"%d" % i for i in range(0, 300, 3)}
        for third in range(3):
            outcomes.update({o.id: o for o in engine.step()})
            engine.cancel([name for name in gone if int(name) % 9 == 3 * third])
        outcomes.update(drain(engine))
        kept = [i for i in range(300) if b"%d" % i not in gone]
        assert {b"%d" % i for i in kept} <= outcomes.keys()
        assert len(outcomes) < 300
        assert_rows([outcomes[b"%d" % i] for i in kept], reference.rows([given[i] for i in kept]))
        assert_nothing_left(engine)

    def test_that_join_while_others_run(self, engine, reference):
        given = prompts(200, 60, seed=6)
        outcomes = {}
        joined = 0
        for i, request in enumerate(requests_of(given)):
            joined += engine.in_flight() > 0
            engine.submit([request])
            if i % 3:
                outcomes.update({o.id: o for o in engine.step()})
            if i == 5:
                long = Generate(max_tokens=150, eos_token_ids=(), temperature=1.0, seed=2)
                engine.submit([Request(b"long", given[0], want=long)])
        outcomes.update(drain(engine))
        assert joined > 150
        assert len(drawn(outcomes.pop(b"long"))) == 150
        assert_rows([outcomes[b"%d" % i] for i in range(200)], reference.rows(given))
        assert_nothing_left(engine)

    @pytest.mark.parametrize(
        ("tokens", "words"),
        [([5, 2000], "token id 2000: below 2000"), ([3] * 512, "a prompt of 512 tokens: 1 to 511")],
    )
    def test_beside_prompts_that_fail(self, engine, reference, tokens, words):
        good = prompts(8, 30, seed=13)
        engine.submit(requests_of(good[:4]))
        engine.submit([Request(b"bad", np.array(tokens, np.uint32))])
        engine.submit(requests_of(good[4:], 4))
        outcomes = drain(engine)
        error = outcomes.pop(b"bad").error
        assert isinstance(error, PromptFailed)
        assert words in str(error)
        assert_rows([outcomes[b"%d" % i] for i in range(8)], reference.rows(good))
        assert_nothing_left(engine)

    def test_of_the_longest_prompt(self, engine, reference):
        given = [np.full(511, 7, np.uint32), np.full(510, 8, np.uint32)]
        assert_rows(answer(engine, given), reference.rows(given))


@pytest.mark.parametrize(
    "options", [{"extra_args": {"lmpool_capture": "one"}}, {"logprobs": -1}, {}], ids=str
)
def test_parameters_of_prompts_are_as_vllm_makes_them(options):
    from lmpool.backends.vllm.continuations import prompt_params, token_params

    prompt_params(logprobs=3, extra_args={"lmpool_capture": "another"})
    expected = token_params(1, 0.0, **options)
    if expected.extra_args is not None:
        expected.extra_args = {**expected.extra_args, "lmpool_only_row": True}
    assert prompt_params(**options) == expected
    assert "lmpool_only_row" not in options.get("extra_args", {})


@pytest.mark.parametrize("options", TIGHT.values(), ids=TIGHT.keys())
def test_rows_however_vllm_schedules(reference, options):
    given = prompts(64, 200, seed=7) + prompts(30, 9, seed=8, shared=150)
    expected = reference.rows(given)
    sampled = Generate(max_tokens=5, eos_token_ids=(), temperature=0.8, seed=1)
    with vllm_engine(**options) as engine:
        engine.submit(requests_of(prompts(10, 50), 1000, want=sampled))
        engine.submit(requests_of(given[:60]))
        outcomes = {o.id: o for o in engine.step()}
        engine.clear_cache()
        engine.submit(requests_of(given[60:], 60))
        outcomes |= drain(engine)
        assert_rows([outcomes[b"%d" % i] for i in range(len(given))], expected)

        def spoil(_: Any, inputs: Any, states: Any) -> Any:
            return states.masked_fill((inputs[0] == 1)[:, None], float("nan"))

        # NaN in some prompts is in no others that run beside them, nor in what those leave cached.
        embed = engine.underlying_model.model.embed_tokens
        hook = embed.register_forward_hook(spoil)
        bad = [np.append(p, [1, 5]).astype(np.uint32) for p in given[::9]]
        try:
            for i, prompt in enumerate(given):
                engine.submit([Request(b"%d" % i, prompt)])
                engine.submit(requests_of(bad[i : i + 1], 100 + i))
            outcomes = drain(engine)
        finally:
            hook.remove()
        failed = [outcomes.pop(b"%d" % i).error for i in range(100, 100 + len(bad))]
        assert all("not finite" in str(error) for error in failed)
        assert_rows([outcomes[b"%d" % i] for i in range(len(given))], expected)
        assert_nothing_left(engine)


def test_rotary_positions_as_transformers_writes_them(tmp_path):
    # A model that vLLM takes from transformers, as Phi, is in this process vLLM's from then on.
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}
    folder = save_model(tmp_path, "phi3", hidden=128, rope_parameters=rope, sliding_window=None)
    random = np.random.default_rng(0)
    given = [random.integers(3, VOCAB, n).astype(np.uint32) for n in (1, 5, 40)]
    expected = Reference(folder).rows(given)
    with vllm_engine(model=folder) as engine:
        assert_rows(answer(engine, given), expected)


def _longrope(**own: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + i / 32 for i in range(32)],
        "long_factor": [4.0] * 32,
        **own,
    }


def _of_lengths(*lengths: int) -> list[Any]:
    random = np.random.default_rng(0)
    return [random.integers(3, VOCAB, n).astype(np.uint32) for n in lengths]


@pytest.mark.parametrize(
    ("name", "changes", "longest"),
    [
        # Windows are a token wider in vLLM, and what scales beyond all positions lets in prompts.
        (
            "cohere2",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}},
            LONGEST - 1,
        ),
        # A window that transformers passes over, and a scale that is told by `factor`.
        (
            "llama",
            {
                "sliding_window": WINDOW,
                "rope_parameters": _longrope(factor=2.0, original_max_position_embeddings=ORIGINAL),
            },
            ORIGINAL - 1,
        ),
        # Soft caps on attention, which transformers' sdpa passes over.
        ("gemma2", {"attn_logit_softcapping": 0.5}, LONGEST - 1),
        # A kernel of its CPUs, and a part of heads that transformers passes over.
        (
            "lfm2",
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                }
            },
            LONGEST - 1,
        ),
    ],
)
def test_models_that_vllm_reads_otherwise(tmp_path, name, changes, longest):
    folder = save_model(tmp_path, name, hidden=128, **changes)
    given = _of_lengths(1, 2, WINDOW, WINDOW + 1, WINDOW + 9, longest)
    longer = [np.append(given[-2], token).astype(np.uint32) for token in (5, 6)]
    reference = Reference(folder)
    with vllm_engine(model=folder) as engine:
        assert engine.info.max_prompt_tokens == longest
        assert_rows(answer(engine, given), reference.rows(given))
        assert_rows(answer(engine, longer), reference.rows(longer))
        assert_nothing_left(engine)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gpt2", {"scale_attn_weights": False}, "GPT2LMHeadModel .*scale_attn_weights=False"),
        ("olmoe", {"clip_qkv": 0.5}, r"OlmoeForCausalLM .*clip_qkv=0\.5"),
        ("mixtral", {"hidden_act": "gelu"}, "MixtralForCausalLM .*hidden_act='gelu'"),
        (
            "cohere",
            {"attention_bias": True, "tie_word_embeddings": False},
            "CohereForCausalLM .*attention_bias=True, tie_word_embeddings=False",
        ),
        ("longrope llama", {}, f"max_prompt_tokens=60: .* write {ORIGINAL - 1} or less"),
    ],
)
def test_models_that_vllm_computes_otherwise_are_refused(tmp_path, name, changes, words):
    folder = save_model(tmp_path, name, hidden=128, **changes)
    with pytest.raises(SettingsError, match=f"{words}.* another engine"):
        vllm_engine(model=folder, max_prompt_tokens=60).__enter__()


def test_what_vllm_does_not_heed_is_refused_and_nothing_else():
    from transformers.models.auto import modeling_auto
    from vllm import ModelRegistry

    from lmpool.backends.vllm.faithful import BY_TRANSFORMERS, ON_CPU, OTHERS, bind

    def told(
        name: str, *, on_cpu: bool = False, by_transformers: bool = False, **fields: object
    ) -> list[str]:
        config = SimpleNamespace(architectures=[name], **fields)
        model = SimpleNamespace(
            hf_config=config,
            hf_text_config=config,
            using_transformers_backend=lambda: by_transformers,
        )
        compilation = SimpleNamespace(custom_ops=["all", "+rotary_embedding"])
        whole = SimpleNamespace(model_config=model, compilation_config=compilation)
        bind(whole, on_cpu=on_cpu)
        return compilation.custom_ops

    assert told("LlamaForCausalLM") == ["all", "+rotary_embedding"]
    told("MambaForCausalLM")
    with pytest.raises(SettingsError, match=r"MambaForCausalLM runs on GPUs alone; .* another"):
        told("MambaForCausalLM", on_cpu=True)
    assert told("LlamaForCausalLM", on_cpu=True) == ["all", "-rotary_embedding"]
    for names, way in ((BY_TRANSFORMERS, "by_transformers"), (ON_CPU, "on_cpu")):
        for name, reason in names.items():
            told(name)
            with pytest.raises(SettingsError, match=f"{name} {reason}: .* another engine"):
                told(name, **{way: True})
    assert OTHERS.keys() <= set(ModelRegistry.get_supported_archs())
    kinds = {name: kind for kind, name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    for name, heeded in OTHERS.items():
        if isinstance(heeded, str):
            with pytest.raises(SettingsError, match=f"{name} {heeded}: .* another engine"):
                told(name)
            continue
        config = transformers.AutoConfig.for_model(kinds[name])
        told(name, **{field: getattr(config, field) for field in heeded})
        for field, value in heeded.items():
            for same in value if isinstance(value, tuple) else ():
                told(name, **{field: same})
            other = 0.5 if value is None else not value
            with pytest.raises(SettingsError, match=f"{name} .* {field}={other} of config"):
                told(name, **{field: other})


def test_a_model_whose_first_prompt_ends_vllm_is_named(monkeypatch: pytest.MonkeyPatch):
    from lmpool.backends.vllm import VLLMEngine

    def end(*_: Any) -> Any:
        raise EngineBroken("vLLM's engine failed: no such kernel")

    monkeypatch.setattr(VLLMEngine, "run_to_end", end)
    with pytest.raises(SettingsError, match=r"serve 'tiny': its first prompt: .* no such kernel"):
        vllm_engine().__enter__()


class TestConfigurations:
    """What vLLM is told of a configuration."""

    @pytest.fixture
    def told(self) -> Any:
        from lmpool.backends.vllm.faithful import as_transformers

        def told(name: str, **changes: Any) -> Any:
            return as_transformers(configuration(name, **changes))

        return told

    def test_have_the_windows_that_transformers_heeds(self, told):
        assert told("llama", sliding_window=WINDOW).sliding_window is None
        assert told("windowed mistral").sliding_window == WINDOW
        assert told("windowed qwen2").sliding_window == WINDOW
        assert told("gemma2").sliding_window == WINDOW
        assert told("cohere2").sliding_window == WINDOW - 1

    def test_have_the_part_of_heads_that_transformers_rotates(self, told):
        rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
        for name, part in (("llama", 1.0), ("qwen3", 1.0), ("phi", 0.5), ("phi3", 0.5)):
            found = told(name, hidden=128, rope_parameters=dict(rope)).rope_parameters
            assert found["partial_rotary_factor"] == part, name

    def test_place_tokens_as_transformers_does(self, told):
        dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}
        plain = {"rope_type": "default", "rope_theta": 500.0}
        assert told("llama", rope_parameters=dict(dynamic)).rope_parameters == plain
        alpha = {**dynamic, "alpha": 1000.0}
        assert told("llama", rope_parameters=dict(alpha)).rope_parameters == alpha
        kinds = {"full_attention": dynamic, "sliding_attention": plain}
        found = told("gemma3", rope_parameters=kinds).rope_parameters
        assert found == {"full_attention": plain, "sliding_attention": plain}

    def test_name_the_scale_of_longrope(self, told):
        def scale(**own: Any) -> Any:
            rope = _longrope(original_max_position_embeddings=ORIGINAL, **own)
            found = told("llama", hidden=128, rope_parameters=rope).rope_parameters
            assert found.get("short_mscale") == found.get("long_mscale")
            return found.get("short_mscale")

        assert scale(attention_factor=1.3, factor=2.0) == 1.3
        assert scale(factor=2.0) == pytest.approx((1 + math.log(2, ORIGINAL)) ** 0.5)
        assert scale(factor=1.0) == 1.0
        assert scale() is None  # vLLM has it of the model's positions, as transformers

    def test_are_changed_once(self):
        from lmpool.backends.vllm.faithful import as_transformers

        for name in CONFIGURATIONS:
            once = as_transformers(configuration(name, hidden=128))
            fields = copy.deepcopy(once.to_dict())
            assert as_transformers(once).to_dict() == fields, name
        own = as_transformers(configuration("cohere2"))
        own.sliding_window = WINDOW
        assert as_transformers(own).sliding_window == WINDOW - 1


class TestDeviations:
    """What is told of a vLLM that was not started by lmpool."""

    @pytest.fixture
    def told(self, tmp_path: Path) -> Any:
        from vllm import EngineArgs

        from lmpool.backends.vllm.faithful import deviations

        def told(name: str, changes: dict[str, Any], **options: Any) -> list[str]:
            folder = save_model(tmp_path, name, hidden=128, **changes)
            given = {"dtype": "float32", "skip_tokenizer_init": True, **QUICK, **options}
            config = EngineArgs(model=folder, **given).create_engine_config()
            return list(deviations(config, on_cpu=True))

        return told

    @pytest.mark.parametrize(
        ("name", "changes", "words"),
        [
            ("cohere2", {}, f"sliding_window={WINDOW} would have to be {WINDOW - 1}: "),
            ("llama", {"sliding_window": WINDOW}, f"sliding_window={WINDOW} .* None: "),
            (
                "llama",
                {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}},
                r"rope_parameters=.*'rope_type': 'dynamic'} .* {'rope_type': 'default'}: ",
            ),
        ],
    )
    def test_of_a_configuration(self, told, name, changes, words):
        from lmpool.backends.vllm.faithful import as_transformers

        (found,) = told(name, changes)
        assert re.match(f"{words}.* hf_overrides=as_transformers", found), found
        assert told(name, changes, hf_overrides=as_transformers) == []

    def test_of_what_vllm_does_whatever_it_is_told(self, told):
        (found,) = told("olmoe", {"clip_qkv": 0.5})
        assert re.search(r"OlmoeForCausalLM computes otherwise for clip_qkv=0\.5", found)

    def test_of_places_of_long_prompts(self, told):
        rope = {**_longrope(original_max_position_embeddings=ORIGINAL), "short_mscale": 1.0}
        rope = {"rope_parameters": {**rope, "long_mscale": 1.0}}
        (found,) = told("llama", rope)
        assert f"max_model_len={LONGEST}" in found
        assert f"start it with max_model_len={ORIGINAL}" in found
        assert told("llama", rope, max_model_len=ORIGINAL) == []

    def test_of_a_kernel(self, told):
        (found,) = told("lfm2", {})
        assert "start it with compilation_config={'custom_ops': ['-rotary_embedding']}" in found
        assert told("lfm2", {}, compilation_config={"custom_ops": ["-rotary_embedding"]}) == []

    def test_of_recurrent_states(self, told):
        (found,) = told("falcon_h1", {})
        assert found.endswith("start it with enable_prefix_caching=False")
        assert told("falcon_h1", {}, enable_prefix_caching=False) == []

    def test_there_are_none_of_most(self, told):
        for name in ("llama", "gpt2", "gemma2", "windowed qwen2", "phi3"):
            assert told(name, {}) == [], name


@pytest.mark.parametrize("name", ["apertus", "bloom"])
def test_activations_as_the_models_have_them(tmp_path, name):
    folder = save_model(tmp_path, name, hidden=128)
    given = _of_lengths(1, 5, 40)
    expected = Reference(folder).rows(given)
    with vllm_engine(model=folder, max_prompt_tokens=60) as engine:
        assert_rows(answer(engine, given), expected)


def test_recurrent_states_stay_their_prompts(tmp_path):
    folder = save_model(tmp_path, "falcon_h1", hidden=128, scale=1.0, max_position_embeddings=256)
    given = _of_lengths(130, 200, 40, 140)  # blocks have 128 tokens
    longer = [np.append(prompt, 5).astype(np.uint32) for prompt in given]
    reference = Reference(folder)
    with vllm_engine(model=folder) as engine:
        assert_rows(answer(engine, given), reference.rows(given))
        assert_rows(answer(engine, longer), reference.rows(longer))
        assert engine.shares_up_to == 0


def test_rows_with_preemptions(reference):
    # Twelve blocks of 32 tokens: three of these prompts at once, and what is sampled grows.
    with vllm_engine(
        block_size=32, kv_cache_memory_bytes=22 * 32 * 3072, max_prompt_tokens=255
    ) as engine:
        given = prompts(40, 120, seed=11)
        growing = prompts(12, 60, seed=12)
        long = Generate(max_tokens=120, eos_token_ids=(), temperature=0.8, seed=3)
        with Watched(engine) as seen:
            engine.submit(requests_of(growing, 1000, want=long))
            engine.submit(requests_of(given))
            outcomes = drain(engine)
        assert seen.preempted > 0
        assert_rows([outcomes[b"%d" % i] for i in range(40)], reference.rows(given))
        assert all(len(drawn(outcomes[b"%d" % i])) == 120 for i in range(1000, 1012))
        assert_nothing_left(engine)
