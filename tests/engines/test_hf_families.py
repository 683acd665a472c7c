"""Families of models: each runs in the fastest way that gives its rows, or is refused."""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmpool.backends.contract import ask
from lmpool.errors import SettingsError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from lmpool.backends.hf import HFEngine  # noqa: E402
from lmpool.backends.hf.head import cache_name  # noqa: E402
from lmpool.backends.hf.numbers import Number  # noqa: E402
from tests.support.engines import requests_of, rows_of  # noqa: E402
from tests.support.hf_texts import reference_rows  # noqa: E402
from tests.support.models import (  # noqa: E402
    FLOOR,
    LONGEST,
    ORIGINAL,
    SELECTED,
    VOCAB,
    WINDOW,
    save_model,
)

TOLERANCE = 1e-4
"""Nats."""
TOGETHER = "each distinct position once"


def saved(folder: Path, name: str, **options: Any) -> str:
    return save_model(folder, name, least_dims=2, **options)


def nasty(longest: int, around: Sequence[int] = ()) -> list[list[int]]:
    """Prompts with a beginning in common, nested, with equal ends, and of lengths `around`."""
    rng = np.random.default_rng(0)

    def random(length: int) -> list[int]:
        return [int(token) for token in rng.integers(0, VOCAB, length)]

    head, tail = random(min(40, longest // 2)), random(min(10, longest // 4))
    prompts = [head + random(len(tail)) for _ in range(12)]
    prompts += [head + tail, random(3) + tail, tail, head, head[:5], random(1), random(longest)]
    for length in around:
        text = random(longest)
        prompts += [text[: length + more] for more in (-7, -1, 0, 1, 9)]
    return prompts


def error_of(engine: HFEngine, folder: str, prompts: list[list[int]]) -> npt.NDArray[np.float32]:
    """By how much each row is off, in one batch, and in a second that finds the first's states."""
    longer = [[*prompt, 7] for prompt in prompts if len(prompt) < engine.info.max_prompt_tokens]
    off = []
    for batch in (prompts, longer):
        outcomes = ask(engine, requests_of(batch))
        failed = [outcome.error for outcome in outcomes if outcome.error is not None]
        assert not failed, failed[0]
        rows = np.stack([outcome.logprobs() for outcome in outcomes])
        off.append(np.abs(rows - reference_rows(folder, batch)).max(axis=1))
    return np.concatenate(off)


def check(folder: str, prompts: list[list[int]], **options: Any) -> HFEngine:
    engine = HFEngine(folder, **options)
    off = error_of(engine, folder, prompts)
    assert off.max() < TOLERANCE, f"{(off >= TOLERANCE).sum()} of {off.size} rows, {off.max()}"
    return engine


@pytest.mark.parametrize("name", ["gpt_neo", "global gpt_neo", "wide gpt_neo"])
def test_a_mask_of_its_own_by_the_places_of_keys(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path, name, hidden=64, max_position_embeddings=2048)
    head, *ends = np.random.default_rng(0).integers(0, VOCAB, (33, 40)).tolist()
    check(folder, [head + end[:10] for end in ends])
    engine = check(folder, nasty(200))
    assert engine.statistics() is None
    assert "a trial" in caplog.text


@pytest.mark.parametrize("name", ["longrope llama", "longrope phi3", "longrope phimoe"])
def test_no_prompt_stands_beside_one_that_moves_its_positions(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, name, scale=5.0)
    engine = check(folder, nasty(LONGEST, [ORIGINAL]))
    assert engine._open().sharing.limit == ORIGINAL
    check(folder, nasty(LONGEST, [ORIGINAL]), kv_cache_bytes=0)


def test_rows_that_depend_on_what_was_computed_before_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond a bound of the model's own, that is, which is usually kept."""
    folder = saved(tmp_path, "dynamic_rope")
    check(folder, nasty(WINDOW))
    monkeypatch.setattr("lmpool.backends.hf.engine.prompt_bounds", lambda *_: [])
    with pytest.raises(SettingsError, match=r"once it has computed a longer one.*=11,"):
        HFEngine(folder, max_prompt_tokens=LONGEST)
    check(folder, nasty(WINDOW), max_prompt_tokens=WINDOW)


def test_positions_counted_from_the_length_of_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path, "scaled llama4")
    engine = check(folder, nasty(LONGEST, [FLOOR]), forward_tokens=64)
    assert engine.statistics() is not None
    assert f"prompts of more than {FLOOR - 1} tokens" in caplog.text


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_models_own_name_for_its_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases of transformers, and code that comes with a model, call it one or the other."""
    model_class = transformers.LlamaForCausalLM
    plain = model_class.forward
    own = cache_name(model_class)
    given: set[str] = set()

    def forward(self: Any, **inputs: Any) -> Any:
        given.update(inputs.keys() & {"cache", "past_key_values"})
        if name in inputs:
            inputs[own] = inputs.pop(name)
        output = plain(self, **inputs)
        return types.SimpleNamespace(**{"logits": output.logits, name: getattr(output, own)})

    takes = ("self", "input_ids", "attention_mask", "position_ids", name, "use_cache")
    parameters = [
        inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in takes
    ]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    monkeypatch.setattr(model_class, "forward", forward)
    folder = saved(tmp_path, "llama")
    engine = HFEngine(folder)
    assert engine.info.execution == TOGETHER
    prompts = nasty(20)
    found = rows_of(engine, prompts)
    assert given == {name}
    monkeypatch.undo()
    assert np.abs(found - reference_rows(folder, prompts)).max() < TOLERANCE


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_a_model_that_selects_positions_is_not_padded(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path, name)
    engine = check(folder, nasty(60, [SELECTED, 30]))
    assert engine.statistics() is None
    assert "selects among the positions" in caplog.text


def test_a_forward_pass_that_does_not_repeat_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="other rows for the same prompt each time"):
        HFEngine(saved(tmp_path, "reformer"))


def test_a_model_with_an_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"has an encoder.*serve a decoder-only model"):
        HFEngine(saved(tmp_path, "t5"), max_prompt_tokens=64)


def test_a_decoder_of_such_a_family_is_served(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert", is_decoder=True)
    check(folder, nasty(LONGEST))


def test_a_model_that_bears_no_company_computes_one_prompt_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path, "llama")
    plain = transformers.LlamaForCausalLM.forward

    def forward(self: Any, input_ids: Any, **inputs: Any) -> Any:
        found = plain(self, input_ids, **inputs)
        found.logits = found.logits * len(input_ids)
        return found

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    engine = check(folder, nasty(60))
    assert not engine._open().sharing.alike
    assert "runs without padding, one prompt at a time" in caplog.text
    assert (engine.info.execution or "").startswith("one prompt at a time: ")


def test_the_log_says_how_a_model_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = HFEngine(saved(tmp_path, "llama"))
    assert engine.info.execution == "each distinct position once"
    assert "LlamaForCausalLM was measured in plain and padded forward passes" in caplog.text
    assert "computes each distinct position once, packed with others" in caplog.text


@pytest.mark.parametrize("name", ["bert", "gpt_neo", "llama"])
def test_half_precision_hides_nothing(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, name)
    if name == "bert":
        with pytest.raises(SettingsError, match="is not causal"):
            HFEngine(folder, dtype="bfloat16")
        return
    packed = HFEngine(folder, dtype="bfloat16").statistics() is not None
    assert packed == (name == "llama")


def test_a_length_by_any_name_that_no_trial_reaches(tmp_path: Path) -> None:
    """Doge selects what it attends to among more than `keep_window_size` positions."""
    from tests.families.check import check
    from tests.families.small import SCALES

    found = check("doge", tmp_path, seed=0, scales=SCALES[1:2])
    assert found.verdict == "right", found
    window = SCALES[1].window
    assert found.ways[0].startswith(
        f"{TOGETHER} up to {window - 1} tokens, then prompts of one length together: it selects"
    )


def test_a_model_is_as_before_its_numbers_were_lowered(tmp_path: Path) -> None:
    engine = HFEngine(saved(tmp_path, "dynamic_rope", max_position_embeddings=WINDOW * 2))
    model = engine._open()._model
    config = model.config
    buffer = model.model.rotary_emb.inv_freq.clone()
    places = (config.__dict__, model.model.rotary_emb.__dict__)
    number = Number("max_position_embeddings", WINDOW * 2, places, model)
    config.kinds, config.ids, config.seen = ["full", "full"], [1], {1}
    with number.lowered():
        config.kinds, config.ids = ("full",), None
        config.seen.add(2)
        assert config.max_position_embeddings < WINDOW
        model(torch.arange(WINDOW)[None])
        model.model.rotary_emb.register_buffer("inv_freq", buffer * 2, persistent=False)
        model.more = 1
        config.rope_parameters["factor"] = 1.0
    assert config.max_position_embeddings == WINDOW * 2
    assert torch.equal(model.model.rotary_emb.inv_freq, buffer)
    assert not hasattr(model, "more")
    assert config.rope_parameters["factor"] == 8.0
    assert (config.kinds, config.ids, config.seen) == (["full", "full"], [1], {1})


def test_positions_that_do_not_begin_with_the_tables_first_bound_prompts(tmp_path: Path) -> None:
    """RoBERTa's begin behind that of its padding token."""
    from tests.families.small import SCALES, small_configuration
    from tests.families.weights import save_small

    config = small_configuration("roberta", SCALES[0], is_decoder=True)
    save_small(config, tmp_path / "model", SCALES[0], 0)
    engine = HFEngine(str(tmp_path / "model"))
    assert engine.info.max_prompt_tokens == SCALES[0].longest - config.pad_token_id - 1


def test_a_row_of_a_routers_other_choice_is_told_from_a_wrong_one() -> None:
    from tests.families import routers
    from tests.families.small import SCALES, small_configuration

    torch.manual_seed(0)
    config = small_configuration("mixtral", SCALES[0])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
            if name.endswith("gate.weight"):
                parameter[1:3] = parameter[0] * (1 + 1e-7)  # three of four experts are tied
    prompt = list(range(12))
    ids = torch.tensor([prompt])

    def row(choices: routers._Choices) -> Any:
        with torch.inference_mode(), choices:
            return torch.log_softmax(model(ids, use_cache=False).logits[0, -1], -1)

    seen = routers._Choices()
    plain = row(seen)
    assert seen.near
    flipped = [row(routers._Choices(place)) for _, place in seen.near]
    other = next(found for found in flipped if float((found - plain).abs().max()) > 1e-3)
    margin = routers.margin_of_flip(model, prompt, other, 1e-4)
    assert margin is not None
    assert 0 <= margin < routers.NEAR
    assert routers.margin_of_flip(model, prompt, plain + 0.1, 1e-4) is None


PADDED = "prompts of like length, padded: "
ALIKE = "prompts of one length together: it selects"
REFUSED = {
    "bart": "has an encoder",
    "bert": "is not causal",
    "reformer": "other rows for the same prompt each time",
    "xlnet": "is not causal",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(
            (name, TOGETHER)
            for name in (
                "codegen", "cohere2", "deepseek_v3", "falcon", "gemma2", "gemma3_text", "gpt2",
                "gpt_bigcode", "gpt_oss", "granite", "llama4_text", "mixtral", "opt",
                "qwen2: windows", "llama: yarn", "stablelm: parallel",
            )
        ),
        ("llama: longrope", f"{TOGETHER} up to 20 tokens, then "),
        *(
            (name, PADDED)
            for name in (
                "bloom", "falcon: alibi", "gpt_neo", "jamba", "mamba", "qwen3_next",
                "roberta: decoder",
            )
        ),
        ("deepseek_v32", ALIKE),
        ("doge", ALIKE),
        # It leaves out as many of the last positions as there are padding tokens in the text.
        ("xlm: one way", "prompts of one length together: a padded batch gives other rows"),
        *((name, "") for name in REFUSED),
    ],
)  # fmt: skip
def test_families(name: str, way: str, tmp_path: Path) -> None:
    """A part of `make families`, at the smallest scale."""
    from tests.families.check import check
    from tests.families.small import SCALES

    found = check(name, tmp_path, seed=0, scales=SCALES[:1])
    assert found.verdict == ("refused" if name in REFUSED else "right"), found
    assert REFUSED.get(name, "") in found.said
    assert all(said.startswith(way) for said in found.ways), found.ways


def test_the_page_lists_the_families_of_this_transformers() -> None:
    """Or says of which version it is."""
    from tests.families.small import FAMILIES
    from tests.families.table import DOCUMENT, listed

    version, families = listed(DOCUMENT.read_text())
    assert version
    if version == transformers.__version__:
        assert families == list(FAMILIES)
    assert len(families) >= 170
