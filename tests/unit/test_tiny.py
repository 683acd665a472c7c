"""The tiny model in the repository: its size, its tokenizer, and that it has learnt English."""

import json
from pathlib import Path
from typing import Any

import pytest

from lmpool.backends import tiny

SENTENCE = (
    "If the object has no such attribute, an exception is raised. "
    "Otherwise the method returns a new list that contains the names of the files."
)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    text = (Path(tiny.path()) / "config.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tiny.path())


@pytest.fixture(scope="module")
def model() -> Any:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(tiny.path(), dtype="float32").eval()


def row(model: Any, ids: list[int]) -> Any:
    import torch

    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)


def test_fits_in_four_megabytes() -> None:
    assert sum(file.stat().st_size for file in Path(tiny.path()).iterdir()) <= 4_000_000


def test_is_a_llama_that_every_engine_takes(config: dict[str, Any]) -> None:
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] in (32, 64)
    assert config["num_attention_heads"] * config["head_dim"] == config["hidden_size"]
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["max_position_embeddings"] == 512
    assert config["dtype"] == "float32"


def test_vocabulary(tokenizer: Any, config: dict[str, Any]) -> None:
    assert len(tokenizer) == config["vocab_size"] == 2000
    special = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert special == (0, 1, 2)
    assert special == tuple(config[f"{name}_token_id"] for name in ("pad", "bos", "eos"))


def test_encode_puts_bos_first(tokenizer: Any) -> None:
    assert tokenizer.encode("x")[0] == 1
    assert tokenizer.encode("x", add_special_tokens=False) == tokenizer.encode("x")[1:]


@pytest.mark.parametrize(
    "text",
    [
        "The function returns a new list.",
        "  two spaces,\ttab\n\nand lines \n",
        "naïve Größe, Ελληνικά, 日本語, עברית",
        "👩‍🔬 and 🏳️‍🌈",
        "\x00\x7f\u2028",
    ],
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(0 <= token < 2000 for token in ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_weights_are_float32_and_exact_in_bfloat16(model: Any) -> None:
    import torch

    for name, weight in model.named_parameters():
        assert weight.dtype == torch.float32, name
        assert torch.equal(weight, weight.bfloat16().float()), name


def test_reads_english(model: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode(SENTENCE)
    rows = row(model, ids)
    loss = -rows[range(len(ids) - 1), ids[1:]].mean().item()
    assert loss < 4.0  # nats a token: 3.1 was measured, uniform is 7.6


@pytest.mark.parametrize(
    ("prompt", "plausible"),
    [
        ("The function returns", " a"),
        ("Return a new", " string"),
        ("This is the same", " as"),
        ("If the file does not", " exist"),
        ("It can be used", " to"),
    ],
)
def test_likeliest_next_tokens(model: Any, tokenizer: Any, prompt: str, plausible: str) -> None:
    top = row(model, tokenizer.encode(prompt))[-1].topk(5).indices
    assert plausible in [tokenizer.decode([token]) for token in top.tolist()]


def test_ends_a_document(model: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("Return True if the file exists.")
    assert row(model, ids)[-1, 2].exp().item() > 0.05
