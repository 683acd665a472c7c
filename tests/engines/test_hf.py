"""The Hugging Face engine against one forward pass a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.backends import Request, tiny
from lmpool.backends.contract import ask
from lmpool.backends.sampling import sample_token
from lmpool.errors import EngineBroken, PromptFailed, SettingsError
from lmpool.wants import Generate

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from lmpool.backends.hf import HFEngine  # noqa: E402
from lmpool.backends.hf.model import with_quantization  # noqa: E402
from tests.support.engines import drawn, requests_of, rows_of  # noqa: E402
from tests.support.hf_texts import TOLERANCE, reference_rows  # noqa: E402
from tests.support.models import LONGEST, VOCAB, save_model  # noqa: E402

MODELS = ("gemma2", "gpt2", "llama", "mamba", "windowed qwen2")


@pytest.fixture(scope="session", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp(request.param), request.param, hidden=64)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    special = {"bos_token_id": 1, "eos_token_id": [2, 7]}
    return save_model(tmp_path_factory.mktemp("llama"), "llama", hidden=64, **special)


def prompts_of_all_lengths(longest: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    lengths = [1, 1, 2, 3, 5, longest - 1, longest, *rng.integers(1, longest, 20)]
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
    prompts += [prompts[3], prompts[6], prompts[20], [0], [0, 0], [VOCAB - 1] * 40]
    rng.shuffle(prompts)
    return prompts


def test_rows_equal_one_forward_pass_a_prompt(folder: str) -> None:
    engine = HFEngine(folder, max_prompt_tokens=None if "mamba" not in folder else LONGEST)
    prompts = prompts_of_all_lengths(LONGEST)
    rows = rows_of(engine, prompts)
    expected = reference_rows(folder, prompts)
    assert rows.dtype == np.float32
    assert np.abs(rows - expected).max() < TOLERANCE
    assert np.abs(np.exp(rows.astype(np.float64)).sum(axis=1) - 1).max() < 1e-5
    assert engine.info.vocab_size == VOCAB
    assert engine.info.encoding == "f32"
    assert engine.info.dtype == "float32"


def test_the_tiny_model() -> None:
    engine = HFEngine("tiny")
    info = engine.info
    rng = np.random.default_rng(2)
    prompts = [
        rng.integers(0, info.vocab_size, n).tolist()
        for n in (1, 2, 40, info.max_prompt_tokens, 3, 40)
    ]
    rows = rows_of(engine, prompts)
    assert np.abs(rows - reference_rows(tiny.path(), prompts)).max() < TOLERANCE

    vocabulary = engine.byte_vocabulary()
    assert vocabulary is not None
    assert len(vocabulary) == info.vocab_size
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.path())
    assert info.eos_token_ids == (tokenizer.eos_token_id,)
    text = "Return the number of items"
    assert b"".join(vocabulary[token] for token in tokenizer.encode(text)[-4:]) in text.encode()


def test_clients_get_the_tokenizer_from_the_engine(tmp_path: Path) -> None:
    for name, data in HFEngine("tiny").tokenizer_files().items():
        (tmp_path / name).write_bytes(data)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = transformers.AutoTokenizer.from_pretrained(tiny.path())
    assert loaded.get_vocab() == expected.get_vocab()
    assert loaded.encode("the list's äöü") == expected.encode("the list's äöü")


def test_small_forward_passes_give_the_same_rows(llama: str) -> None:
    prompts = prompts_of_all_lengths(LONGEST, seed=1)
    rows = rows_of(HFEngine(llama, forward_tokens=100), prompts)
    assert np.abs(rows - reference_rows(llama, prompts)).max() < TOLERANCE


def test_the_head_sees_one_position_a_prompt(llama: str) -> None:
    engine = HFEngine(llama, enforce_eager=True)  # what is recorded is padded
    seen: list[tuple[int, ...]] = []
    head = engine._open()._model.get_output_embeddings()
    head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.shape))
    ask(engine, requests_of([[1] * 50, [2] * 45, [3] * 48]))
    assert seen == [(3, 1, VOCAB)]


def test_a_model_without_an_output_embedding(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.LlamaForCausalLM, "get_output_embeddings", lambda _: None)
    engine = HFEngine(llama)
    prompts = [[1], [2, 3, 4], [5] * 30]
    rows = rows_of(engine, prompts)
    assert engine._open().sharing.padded
    assert np.abs(rows - reference_rows(llama, prompts)).max() < TOLERANCE


def test_rows_of_a_bfloat16_head_are_the_bits_of_its_logits(llama: str) -> None:
    engine = HFEngine(llama, dtype="bfloat16", device="cpu")  # where the reference rounds, too
    assert engine.info.encoding == "bf16"
    assert engine.info.dtype == "bfloat16"
    prompts = [[5, 6, 7], [9] * 11, [3, 1, 4, 1, 5]]
    alone = [ask(engine, requests_of([p]))[0] for p in prompts]
    assert all(o.row is not None and o.row.dtype == np.uint16 for o in alone)
    rows = np.stack([outcome.logprobs() for outcome in alone])
    assert np.abs(rows - reference_rows(llama, prompts, dtype="bfloat16")).max() < 2e-5
    assert np.abs(np.exp(rows.astype(np.float64)).sum(axis=1) - 1).max() < 1e-5


def test_logits_that_bfloat16_would_round_are_sent_as_float32(llama: str) -> None:
    engine = HFEngine(llama, dtype="bfloat16")
    head = engine._open()._model.get_output_embeddings()
    head.register_forward_hook(lambda _module, _inputs, output: output.float() * 1.001)
    (outcome,) = ask(engine, requests_of([[5, 6, 7]]))
    assert outcome.row is not None
    assert outcome.row.dtype == np.float32
    assert abs(np.exp(outcome.row.astype(np.float64)).sum() - 1) < 1e-5


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([], "0 tokens"),
        ([1] * (LONGEST + 1), f"{LONGEST + 1} tokens"),
        ([4, VOCAB, 4], f"token id {VOCAB}"),
        ([2**32 - 1], "token id 4294967295"),
    ],
)
def test_a_bad_prompt_fails_alone(llama: str, bad: list[int], said: str) -> None:
    good = [[1, 2, 3], [4], [5, 6]]
    outcomes = ask(HFEngine(llama), requests_of([good[0], bad, good[1], good[2]]))
    assert isinstance(outcomes[1].error, PromptFailed)
    assert said in str(outcomes[1].error)
    rows = np.stack([outcomes[i].logprobs() for i in (0, 2, 3)])
    assert np.abs(rows - reference_rows(llama, good)).max() < TOLERANCE


def test_a_row_that_is_not_a_number_fails_alone(llama: str) -> None:
    engine = HFEngine(llama)
    embedding = engine._open()._model.get_input_embeddings()
    with torch.no_grad():
        embedding.weight[13] = float("nan")
    # Tied or not, the head is another tensor here: only prompts with the token 13 are touched.
    outcomes = ask(engine, requests_of([[1, 2], [1, 13], [3, 4, 5]]))
    assert "logsumexp nan" in str(outcomes[1].error)
    assert outcomes[0].error is None
    assert outcomes[2].error is None


def test_a_token_that_is_impossible_spoils_no_row(llama: str) -> None:
    engine = HFEngine(llama)

    def forbid(_module: object, _inputs: object, output: Any) -> Any:
        return output.index_fill(-1, torch.tensor([0, 5], device=output.device), -torch.inf)

    engine._open()._model.get_output_embeddings().register_forward_hook(forbid)
    for outcome in ask(engine, requests_of([[1, 2], [3]])):
        row = outcome.logprobs()
        assert row[0] == row[5] == -np.inf
        assert abs(np.exp(row.astype(np.float64)).sum() - 1) < 1e-5


def test_a_prompt_that_raises_is_found_and_fails_alone(llama: str) -> None:
    engine = HFEngine(llama)
    model = engine._open()._model

    def refuse(_module: object, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (kwargs["input_ids"] == 99).any():
            raise RuntimeError("out of memory, say")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    prompts = [[i, i + 1] for i in range(30)] + [[99, 1]]
    outcomes = ask(engine, requests_of(prompts))
    assert [o.error is None for o in outcomes] == [True] * 30 + [False]
    assert "out of memory, say" in str(outcomes[30].error)


def test_a_broken_device_breaks_the_engine(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HFEngine(llama)

    def fail(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("lmpool.backends.hf.engine.Batch.take", fail)
    engine.submit(requests_of([[1], [2]]))
    with pytest.raises(EngineBroken, match="device-side assert"):
        engine.step()


def test_a_continuation_is_what_its_rows_say_alone_and_in_company(llama: str) -> None:
    engine = HFEngine(llama)
    prompt = [3, 1, 4]
    want = Generate(max_tokens=12, eos_token_ids=(), temperature=0.9, seed=17)
    (alone,) = ask(engine, requests_of([prompt], want=want))
    expected = list(prompt)
    for step in range(12):
        row = reference_rows(llama, [expected])[0]
        expected.append(sample_token(row, 0.9, 17, step))
    assert drawn(alone) == expected[3:]

    ending = Generate(max_tokens=12, eos_token_ids=(expected[7],), temperature=0.9, seed=17)
    (ended,) = ask(engine, requests_of([prompt], want=ending))
    assert drawn(ended) == expected[3 : expected.index(expected[7], 3) + 1]

    company = [
        *requests_of([[9, 9], [8] * 30]),
        Request(b"it", np.array(prompt, np.uint32), want=want),
        Request(
            b"other",
            np.array(prompt, np.uint32),
            want=Generate(max_tokens=5, eos_token_ids=(), temperature=0.9, seed=18),
        ),
    ]
    outcomes = ask(engine, company)
    assert outcomes[0].row is not None
    assert drawn(outcomes[2]) == expected[3:]
    assert len(drawn(outcomes[3])) == 5


def test_special_tokens_and_bounds(llama: str) -> None:
    info = HFEngine(llama, max_prompt_tokens=50).info
    assert (info.bos_token_id, info.eos_token_ids) == (1, (2, 7))
    assert info.max_prompt_tokens == 50
    assert HFEngine(llama).info.max_prompt_tokens == LONGEST
    with pytest.raises(SettingsError, match=f"max_prompt_tokens=97: the model takes {LONGEST}"):
        HFEngine(llama, max_prompt_tokens=97)


def test_the_identity_tells_dtypes_and_arguments_apart(llama: str) -> None:
    plain = HFEngine(llama).info.identity
    assert HFEngine(llama, max_prompt_tokens=9).info.identity == plain
    assert HFEngine(llama, dtype="bfloat16").info.identity != plain
    eager = HFEngine(llama, model_kwargs={"attn_implementation": "eager"}).info.identity
    assert eager != plain
    assert llama not in json.dumps(plain)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"device": "cuda:77"}, "device='cuda:77': torch sees"),
        ({"device": "toaster"}, "device='toaster'"),
        ({"forward_tokens": 0}, "forward_tokens=0"),
        ({"threads": "2"}, "threads='2'"),
        ({"threads": 10**9}, "threads=1000000000: at most 1024"),
        ({"max_prompt_tokens": "9"}, "max_prompt_tokens='9'"),
        ({"model_kwargs": {"trust_remote_code": True}}, "trust_remote_code"),
        ({"model_kwargs": {"attn_implementation": "psychic"}}, "psychic"),
        ({"model_kwargs": {"attn_implementation": "flex_attention"}}, "='flex_attention': it is"),
        ({"model_kwargs": {"attn_implementation": "paged|eager"}}, r"='paged\|eager': it is"),
        ({"revision": "main"}, "revision='main'"),
    ],
)
def test_bad_options_are_refused(llama: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        HFEngine(llama, **options)


def test_options_of_bitsandbytes_become_a_quantization_config() -> None:
    kwargs = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "attn_implementation": "eager"}
    passed = with_quantization(kwargs)
    assert passed.keys() == {"quantization_config", "attn_implementation"}
    assert passed["quantization_config"].bnb_4bit_quant_type == "nf4"
    with pytest.raises(SettingsError, match="'load_in_8bit' beside 'quantization_config'"):
        with_quantization({"load_in_8bit": True, "quantization_config": {}})


def test_weights_of_another_model_are_refused(llama: str, tmp_path: Path) -> None:
    for file in Path(llama).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingsError, match="lack 9 of the model's tensors"):
        HFEngine(str(tmp_path))


def test_an_unknown_adapter_fails_its_prompt_alone(llama: str) -> None:
    engine = HFEngine(llama)
    (outcome,) = ask(engine, requests_of([[1]], adapter="french"))
    assert "no adapter named 'french'" in str(outcome.error)


def test_a_model_without_a_tokenizer_serves_rows(llama: str) -> None:
    engine = HFEngine(llama)
    assert engine.tokenizer_files() == {}
    assert engine.byte_vocabulary() is None


def test_a_closed_engine_is_broken(llama: str) -> None:
    engine = HFEngine(llama)
    engine.close()
    engine.close()
    engine.submit(requests_of([[1]]))
    with pytest.raises(EngineBroken, match="closed"):
        engine.step()
    for part in (lambda: engine.head_weights(slice(0, 1)), engine.head_bias):
        with pytest.raises(EngineBroken, match="closed"):
            part()


def test_a_model_that_transformers_has_no_language_model_for_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(SettingsError, match=r"\(vit\) cannot be loaded: ValueError: Unr") as raised:
        HFEngine(str(tmp_path))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600
