"""Heads that share keys and values, and read them from one place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lmpool.backends.hf import HFEngine, attention  # noqa: E402
from tests.support.hf_texts import Texts  # noqa: E402
from tests.support.models import save_model  # noqa: E402

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def states(rng: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Keys, values or queries as models hand them over: [batch, heads, positions, dim], strided."""
    batch, heads, positions, dim = shape
    made = torch.from_numpy(rng.standard_normal((batch, positions, heads, dim), np.float32))
    return made.to(dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("seed", range(20))
def test_it_attends_as_transformers_does(seed: int, dtype: Any) -> None:
    rng = np.random.default_rng(seed)
    batch, shared, groups, dim = (int(rng.integers(1, most + 1)) for most in (3, 4, 8, 40))
    queries, columns = int(rng.integers(1, 40)), int(rng.integers(1, 90))
    query = states(rng, (batch, shared * groups, queries, dim), dtype)
    key = states(rng, (batch, shared, columns, dim), dtype)
    value = states(rng, (batch, shared, columns, dim), dtype)
    hidden = torch.from_numpy(rng.random((batch, 1, queries, columns)) < 0.5)
    hidden[..., 0] = False
    mask = ~hidden if seed % 2 else hidden.to(dtype) * torch.finfo(dtype).min
    module: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    options: dict[str, Any] = {"scaling": float(rng.random()) + 0.1, "sliding_window": None}
    found, weights = attention.attend(module, query, key, value, mask, 0.0, **options)
    right, _ = attention.sdpa.sdpa_attention_forward(module, query, key, value, mask, **options)
    assert weights is None
    assert found.shape == right.shape
    assert found.is_contiguous()
    assert float((found - right).abs().max()) <= TOLERANCES[dtype]


def test_what_needs_more_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def theirs(*_: Any, **options: Any) -> tuple[Any, None]:
        asked.append(options)
        return torch.zeros(()), None

    monkeypatch.setattr(attention.sdpa, "sdpa_attention_forward", theirs)
    rng = np.random.default_rng(0)
    query = states(rng, (1, 4, 3, 8), torch.float32)
    shared = states(rng, (1, 2, 3, 8), torch.float32)
    own = states(rng, (1, 4, 3, 8), torch.float32)
    mask = torch.zeros(1, 1, 3, 3)
    module: Any = SimpleNamespace(num_key_value_groups=2)

    def ours(key: Any, mask: Any, **options: Any) -> bool:
        asked.clear()
        attention.attend(module, query, key, key, mask, **options)
        return not asked

    assert ours(shared, mask)
    assert ours(shared, mask, softcap=None, output_attentions=False)
    assert not ours(shared, None)  # where they need no copy either
    assert not ours(own, mask)
    bias = torch.zeros(1, 4, 3, 3)
    for name, value in {"softcap": 30.0, "output_attentions": True, "position_bias": bias}.items():
        assert not ours(shared, mask, **{name: value})
        assert asked[0][name] is value


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_no_keys_are_copied_for_the_heads_that_share_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path, name)
    texts = Texts(folder, seed=1)
    engine = HFEngine(folder, device="cpu")
    assert engine._packed is not None

    def copies(*_: Any) -> Any:
        raise AssertionError("keys are copied")

    monkeypatch.setattr(attention.sdpa, "repeat_kv", copies)
    for _ in range(20):
        texts.compare(engine, texts.batch(10))


def test_a_torch_without_such_a_kernel_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(
        attention.transformers.AttentionInterface, "register", lambda *what: registered.append(what)
    )
    attention.share_keys(torch.device("cpu"))
    assert registered == [("sdpa", attention.attend)]
    registered.clear()
    attention.share_keys(torch.device("cuda:0"))

    def other(*_: Any, **__: Any) -> int:
        return 0  # what is computed step by step, keys copied

    def older(*_: Any) -> int:
        raise AssertionError("it has no such option")

    for choose in (other, older, None):
        monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
        attention.share_keys(torch.device("cpu"))
    assert not registered
