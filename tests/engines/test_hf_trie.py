"""What the Hugging Face engine keeps between batches, against one forward pass a prompt."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.backends import Request
from lmpool.backends.contract import ask
from lmpool.cache_memory import default_cache_bytes
from lmpool.errors import PromptFailed, SettingsError
from lmpool.wants import Generate

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from lmpool.backends.hf import HFEngine  # noqa: E402
from lmpool.backends.hf.forward import Forward  # noqa: E402
from tests.support.engines import drawn, requests_of, rows_of  # noqa: E402
from tests.support.hf_texts import TOLERANCE, Texts  # noqa: E402
from tests.support.models import (  # noqa: E402
    LONGEST,
    SERVED,
    UNFIT,
    VOCAB,
    WINDOW,
    WINDOWED,
    save_model,
)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


def slot_bytes(folder: str) -> int:
    engine = HFEngine(folder)
    assert engine._packed is not None
    arena = engine._packed._arena
    return arena.nbytes // arena.keys[0].shape[0]


def check(engine: HFEngine, bound: int | None = None) -> None:
    packed = engine._packed
    assert packed is not None
    packed.check()
    statistics = packed.statistics()
    assert statistics.held <= statistics.slots
    assert statistics.pinned == 0
    if bound is not None:
        assert engine.kv_cache_bytes() <= bound
        assert sum(t.nbytes for t in (*packed._arena.keys, *packed._arena.values)) <= bound


@pytest.mark.slow
@pytest.mark.parametrize(
    ("positions", "forward_tokens", "batches"),
    [(40, 7, 100), (90, 16, 150), (400, 1_024, 200), (20_000, 50, 200)],
)
def test_a_soak_of_small_batches(
    llama: str, positions: int, forward_tokens: int, batches: int
) -> None:
    bound = positions * slot_bytes(llama)
    engine = HFEngine(llama, kv_cache_bytes=bound, forward_tokens=forward_tokens)
    texts = Texts(llama, seed=positions)
    for number in range(batches):
        texts.compare(engine, texts.batch(10))
        check(engine, bound)
        if number % 75 == 74:
            engine.clear_cache()
    statistics = engine.statistics()
    assert statistics is not None
    assert statistics.found > 0
    assert (statistics.evicted > 0) == (positions < 1_000)
    assert (statistics.found > 3 * statistics.added) == (positions > 1_000)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_a_soak_of_other_models(name: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, name)
    engine = HFEngine(folder, kv_cache_bytes=150 * slot_bytes(folder), forward_tokens=24)
    texts = Texts(folder, seed=1)
    for _ in range(100):
        texts.compare(engine, texts.batch(10))
        check(engine)


@pytest.mark.parametrize("name", SERVED)
def test_models_that_are_served(name: str, tmp_path: Path) -> None:
    engine = HFEngine(save_model(tmp_path, name))
    texts = Texts(str(tmp_path), seed=2)
    for _ in range(10):
        texts.compare(engine, texts.batch(30))
        check(engine)
    statistics = engine.statistics()
    assert statistics is not None
    assert statistics.found > 0


@pytest.mark.parametrize("name", WINDOWED)
def test_layers_that_see_less_than_all(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path, name)
    engine = HFEngine(folder, forward_tokens=64)
    assert "keep nothing" not in caplog.text
    assert "keeps nothing" not in caplog.text

    def refuse(*_: object) -> None:
        raise AssertionError("a prompt was computed plainly")

    config = engine._open()._model.config.get_text_config()
    sizes = [getattr(config, key, None) for key in ("sliding_window", "attention_chunk_size")]
    assert WINDOW in sizes
    monkeypatch.setattr(Forward, "__call__", refuse)
    texts = Texts(folder, seed=3)
    for _ in range(20):
        texts.compare(engine, texts.batch(10))
        check(engine)
    statistics = engine.statistics()
    assert statistics is not None
    assert statistics.found > statistics.added


@pytest.mark.parametrize(
    ("name", "window"), [("windowed mistral", 2), ("gemma2", 5), ("llama4", 3)]
)
def test_a_window_of_few_tokens_is_one_like_others(
    name: str, window: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model(tmp_path, name)
    file = tmp_path / "config.json"
    text, count = re.subn(
        r'("(?:sliding_window|attention_chunk_size)": )\d+', rf"\g<1>{window}", file.read_text()
    )
    assert count
    file.write_text(text)
    engine = HFEngine(folder)
    texts = Texts(folder, seed=3)
    for _ in range(5):
        texts.compare(engine, texts.batch(10))
    assert "keeps nothing" not in caplog.text
    assert engine.statistics() is not None


@pytest.mark.parametrize("name", ["windowed mistral", "gemma3"])
def test_windows_that_cannot_be_told_a_model(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a model keeps prompts that no window cuts."""
    from lmpool.backends.hf import packed_fit

    monkeypatch.setattr(packed_fit, "_reach", lambda *_: packed_fit.Reach())
    folder = save_model(tmp_path, name)
    engine = HFEngine(folder)
    assert f"prompts of more than {WINDOW} tokens" in caplog.text
    texts = Texts(folder, seed=3)
    for _ in range(10):
        texts.compare(engine, texts.batch(10))
        check(engine)
    statistics = engine.statistics()
    assert statistics is not None
    assert statistics.found > 0


@pytest.mark.parametrize("name", ["dynamic_rope"])
def test_positions_that_depend_on_the_longest_prompt(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model(tmp_path, name)
    engine = HFEngine(folder, max_prompt_tokens=WINDOW)
    texts = Texts(folder, seed=3, length=WINDOW)
    for _ in range(10):
        texts.compare(engine, texts.batch(10))
        check(engine)
    statistics = engine.statistics()
    assert statistics is not None
    assert statistics.found > 0


@pytest.mark.parametrize("name", UNFIT)
def test_models_that_are_computed_plainly(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = save_model(tmp_path, name)
    engine = HFEngine(folder, max_prompt_tokens=LONGEST)
    assert "keeps nothing between batches" in caplog.text
    assert engine.statistics() is None
    engine.clear_cache()
    with pytest.raises(PromptFailed, match="keeps nothing"):
        engine.cache_prefix(np.arange(3, dtype=np.uint32))
    texts = Texts(folder, seed=4)
    texts.compare(engine, texts.batch(20))


def test_a_model_that_fails_the_trial_is_computed_plainly(
    llama: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lmpool.backends.hf import packed

    def blind(self: Any, at: Any) -> Any:
        return mask(self, at) * 0

    mask = packed.PackedForward._mask
    monkeypatch.setattr(packed.PackedForward, "_mask", blind)
    engine = HFEngine(llama)
    assert "a trial gave other rows than one prompt at a time" in caplog.text
    assert engine.statistics() is None
    texts = Texts(llama, seed=5)
    texts.compare(engine, texts.batch(20))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.3), ("float16", 0.05)])
def test_half_precision(llama: str, dtype: str, tolerance: float, attention: str) -> None:
    options = {"dtype": dtype, "model_kwargs": {"attn_implementation": attention}}
    engine = HFEngine(llama, **options)
    texts = Texts(llama, seed=6)
    prompts = [texts.sequences[i][:n] for i, n in texts.batch(30)]
    plain = rows_of(HFEngine(llama, kv_cache_bytes=0, **options), prompts)
    for _ in range(2):
        assert np.abs(rows_of(engine, prompts) - plain).max() < tolerance
        check(engine)


def test_eager_attention(llama: str) -> None:
    engine = HFEngine(llama, model_kwargs={"attn_implementation": "eager"})
    texts = Texts(llama, seed=7)
    for _ in range(10):
        texts.compare(engine, texts.batch(20))
        check(engine)


def test_what_is_known_is_not_computed_again(llama: str) -> None:
    engine = HFEngine(llama, enforce_eager=True)  # what is recorded is padded
    computed: list[int] = []
    model = engine._open()._model
    model.register_forward_pre_hook(
        lambda _module, _inputs, kwargs: computed.append(kwargs["input_ids"].numel()),
        with_kwargs=True,
    )
    prompt = np.random.default_rng(0).integers(0, VOCAB, 60)
    ask(engine, requests_of([prompt]))
    assert computed == [60]
    ask(engine, requests_of([prompt]))
    assert computed == [60, 1]
    ask(engine, requests_of([[*prompt, n] for n in range(20)] + [prompt[:30]]))
    assert sum(computed[2:]) < 30
    engine.clear_cache()
    ask(engine, requests_of([prompt, prompt]))
    assert computed[-1] == 60


def test_a_continuation_costs_a_position_a_token(llama: str) -> None:
    engine = HFEngine(llama)
    positions: list[int] = []
    engine._open()._model.register_forward_pre_hook(
        lambda _module, _inputs, kwargs: positions.append(kwargs["input_ids"].numel()),
        with_kwargs=True,
    )
    prompt = list(range(40))
    requests = [
        Request(bytes([seed]), np.array(prompt, np.uint32), want=Generate(16, (), 1.0, seed))
        for seed in range(8)
    ]
    kept = ask(engine, requests)
    assert sum(positions) <= 40 + 16 * 8 + 16
    plain = ask(HFEngine(llama, kv_cache_bytes=0), requests)
    for one, other in zip(kept, plain, strict=True):
        assert drawn(one) == drawn(other)
    check(engine)


def test_a_row_that_is_not_a_number_spoils_no_other(llama: str) -> None:
    engine = HFEngine(llama)
    texts = Texts(llama, seed=8)
    spoiled = 13
    assert all(spoiled not in s for s in texts.sequences)
    with torch.no_grad():
        engine._open()._model.get_input_embeddings().weight[spoiled] = float("nan")
    batch = texts.batch(12)
    prompts = [texts.sequences[i][:n] for i, n in batch]
    bad = [[*prompts[0], spoiled], [spoiled], [*prompts[1], spoiled, 4]]
    outcomes = ask(engine, requests_of([*prompts, *bad]))
    for (i, n), outcome in zip(batch, outcomes, strict=False):
        assert np.abs(outcome.logprobs() - texts.rows[i][n - 1].numpy()).max() < TOLERANCE
    assert all("logsumexp nan" in str(o.error) for o in outcomes[-3:])
    check(engine)
    texts.compare(engine, batch)
    outcomes = ask(engine, requests_of([bad[0], prompts[0]]))
    assert outcomes[0].error is not None
    texts.compare(engine, batch)
    with pytest.raises(PromptFailed, match="logsumexp nan"):
        engine.cache_prefix(np.array(bad[0], np.uint32))
    statistics = engine.statistics()
    assert statistics is not None
    assert statistics.pinned == 0


def test_a_failed_forward_pass_leaves_nothing_behind(llama: str) -> None:
    engine = HFEngine(llama, forward_tokens=10)
    texts = Texts(llama, seed=9)
    calls = 0

    def fail(_module: object, _inputs: object) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise RuntimeError("out of memory, say")

    hook = engine._open()._model.model.layers[1].register_forward_pre_hook(fail)
    for _ in range(20):
        batch = texts.batch(6)
        outcomes = ask(engine, requests_of([texts.sequences[i][:n] for i, n in batch]))
        for (i, n), outcome in zip(batch, outcomes, strict=True):
            if outcome.error is None:
                assert np.abs(outcome.logprobs() - texts.rows[i][n - 1].numpy()).max() < TOLERANCE
        check(engine)
    hook.remove()
    for _ in range(10):
        texts.compare(engine, texts.batch(6))


def test_kept_prefixes_stay(llama: str) -> None:
    engine = HFEngine(llama, kv_cache_bytes=100 * slot_bytes(llama))
    texts = Texts(llama, seed=10)
    prefix = texts.sequences[0][:30]
    engine.cache_prefix(prefix)
    engine.cache_prefix(prefix)
    for _ in range(30):
        texts.compare(engine, texts.batch(6))
    statistics = engine.statistics()
    assert statistics is not None
    assert statistics.pinned == 30
    assert statistics.evicted > 0
    before = statistics.found
    texts.compare(engine, [(0, 30)])
    after = engine.statistics()
    assert after is not None
    assert after.found - before == 30
    with pytest.raises(PromptFailed, match="a prefix of 40 tokens is more than there is room for"):
        engine.cache_prefix(np.arange(40, dtype=np.uint32))
    with pytest.raises(PromptFailed, match="token id 211"):
        engine.cache_prefix(np.array([VOCAB], np.uint32))
    engine.clear_cache()
    check(engine)
    engine.cache_prefix(np.arange(40, dtype=np.uint32))


def test_a_prompt_longer_than_the_bound_is_computed_plainly(llama: str) -> None:
    engine = HFEngine(llama, kv_cache_bytes=20 * slot_bytes(llama))
    texts = Texts(llama, seed=11)
    for _ in range(5):
        texts.compare(engine, [(0, 64), (1, 5), (2, 40), (0, 3)])
        check(engine, 20 * slot_bytes(llama))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (-1, "kv_cache_bytes=-1: a number of bytes expected"),
        ("1GB", "kv_cache_bytes='1GB': a number of bytes expected"),
        (1.5, "kv_cache_bytes=1.5"),
        (100, "kv_cache_bytes=100: a position of this model takes 256 bytes; write 4608 or more"),
    ],
)
def test_bad_bounds_are_refused(llama: str, value: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        HFEngine(llama, kv_cache_bytes=value)


def test_the_bound_is_said(llama: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    HFEngine(llama, kv_cache_bytes=256_000)
    assert "keeps the keys and values of 998 positions in 256,000 bytes" in caplog.text
    assert HFEngine(llama, kv_cache_bytes=0).statistics() is None
    assert 0 < default_cache_bytes() <= 4 << 30
