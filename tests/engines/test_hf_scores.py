"""Scores of texts by the Hugging Face engine, against one plain forward pass of transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmpool.backends import Request
from lmpool.backends.contract import ask
from lmpool.wants import Generate, Score, TextScores
from tests.support.engines import drawn, requests_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from lmpool.backends.hf import HFEngine  # noqa: E402
from tests.support.hf_texts import TOLERANCE, right_logits, save_adapter  # noqa: E402
from tests.support.models import LONGEST, SERVED, UNFIT, VOCAB, save_model  # noqa: E402
from tests.support.scores import check_scores, log_softmax, random_score, score_all  # noqa: E402

DRAWN = Generate(5, (), 1.0, 3)
Ids = npt.NDArray[np.uint32]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def engine(llama: str) -> HFEngine:
    return HFEngine(llama, max_prompt_tokens=LONGEST)


def texts_of(rng: np.random.Generator, count: int, longest: int = LONGEST + 1) -> list[Ids]:
    """Texts of which many begin alike, are contained in others, or occur twice."""
    found: list[Ids] = []
    for _ in range(count):
        new = rng.integers(0, VOCAB, int(rng.integers(2, longest + 1))).astype(np.uint32)
        if found and rng.random() < 0.7:
            other = found[int(rng.integers(len(found)))]
            new = np.concatenate([other[: int(rng.integers(1, other.size + 1))], new])[:longest]
        found.append(new[: int(rng.integers(2, new.size + 1))] if rng.random() < 0.2 else new)
    return found


def save_family(family: str, folder: Path) -> str:
    """A small model of random weights; some have a scale or a cap behind the head."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": LONGEST,
        "initializer_range": 0.5,
    }
    extra = {"cohere": {"logit_scale": 0.3}, "granite": {"logits_scaling": 4.0}}
    extra["gemma2"] = {"final_logit_softcapping": 3.0}
    if family == "gpt2":
        sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.AutoConfig.for_model(family, **{**sizes, **extra.get(family, {})})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("forward_tokens", [24, 1024])
def test_scores_of_texts_with_much_in_common(llama: str, forward_tokens: int) -> None:
    engine = HFEngine(llama, max_prompt_tokens=LONGEST, forward_tokens=forward_tokens)
    assert engine._packed is not None
    engine._packed.head_rows = 7
    reference, rng = right_logits(llama), np.random.default_rng(1)
    for turn in range(12):
        if turn % 4 == 3:
            engine.clear_cache()
        texts = texts_of(rng, 12)
        score_all(engine, texts, [random_score(rng, t.size, VOCAB) for t in texts], reference)
        engine._packed.check()
        statistics = engine.statistics()
        assert statistics is not None
        assert statistics.pinned == 0


@pytest.mark.parametrize("name", SERVED + UNFIT)
def test_every_kind_of_model(name: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, name)
    engine = HFEngine(folder, max_prompt_tokens=min(LONGEST, 40))
    engine._head_rows = 5
    if engine._packed is not None:
        engine._packed.head_rows = 5
    reference, rng = right_logits(folder), np.random.default_rng(2)
    texts = texts_of(rng, 8, 41)
    wants = [random_score(rng, t.size, VOCAB) for t in texts]
    score_all(engine, texts, wants, reference)
    assert engine._open().head is not None


def test_the_longest_text_is_one_token_longer_than_the_longest_prompt(
    engine: HFEngine, llama: str
) -> None:
    rng = np.random.default_rng(3)
    text = rng.integers(0, VOCAB, LONGEST + 2).astype(np.uint32)
    score_all(engine, [text[:-1]], [Score()], right_logits(llama))
    (wrong,) = ask(engine, [Request(b"b", text, want=Score())])
    assert f"1 to {LONGEST + 1} expected" in str(wrong.error)


def test_rows_draws_and_scores_in_one_batch(engine: HFEngine, llama: str) -> None:
    rng, reference = np.random.default_rng(4), right_logits(llama)
    for _ in range(4):
        texts = texts_of(rng, 6)
        scored = [Request(b"s%d" % n, t, want=Score()) for n, t in enumerate(texts)]
        # Of the very positions that are scored, too.
        rows = [Request(b"r%d" % n, t[:-1]) for n, t in enumerate(texts)]
        outcomes = ask(engine, [*scored, *rows, Request(b"g", texts[0][:9], want=DRAWN)])
        assert len(drawn(outcomes[-1])) == 5
        for request, outcome, row in zip(scored, outcomes, outcomes[len(texts) :], strict=False):
            logits = reference(request.tokens)
            check_scores(outcome, request, logits)
            assert np.abs(row.logprobs() - log_softmax(logits)[-1]).max() < TOLERANCE


def test_each_distinct_position_is_computed_once(llama: str) -> None:
    engine = HFEngine(llama, max_prompt_tokens=LONGEST)
    computed: list[int] = []
    engine._open()._model.register_forward_pre_hook(
        lambda _module, _inputs, kwargs: computed.append(kwargs["input_ids"].numel()),
        with_kwargs=True,
    )
    rng = np.random.default_rng(5)
    context = rng.integers(0, VOCAB, 60).astype(np.uint32)
    choices = [np.concatenate([context, rng.integers(0, VOCAB, 6)]) for _ in range(8)]
    requests = requests_of(choices, want=Score(start=60))
    cold = ask(engine, requests)
    assert sum(computed) < 60 + 8 * 5 + 16
    computed.clear()
    # Kept: what is scored is computed again, and nothing else.
    warm = ask(engine, requests)
    assert sum(computed) <= 1 + 8 * 5 + 8
    for one, other in zip(cold, warm, strict=True):
        assert isinstance(one.answer, TextScores)
        assert isinstance(other.answer, TextScores)
        assert np.abs(one.answer.logprobs - other.answer.logprobs).max() < TOLERANCE


def test_kept_prefixes_serve_scores(llama: str) -> None:
    engine, reference = HFEngine(llama, max_prompt_tokens=LONGEST), right_logits(llama)
    rng = np.random.default_rng(6)
    text = rng.integers(0, VOCAB, 50).astype(np.uint32)
    engine.cache_prefix(text[:30])
    for start in (1, 29, 30, 31, 49):
        score_all(engine, [text], [Score(start=start)], reference)
        ask(engine, requests_of([text[:40]]))
    ask(engine, [Request(b"s", text, want=Score())])
    (row,) = ask(engine, requests_of([text[:40]]))
    assert np.abs(row.logprobs() - log_softmax(reference(text))[39]).max() < TOLERANCE


def test_long_texts_run_in_pieces_and_others_get_in_between(llama: str) -> None:
    engine, reference = HFEngine(llama, max_prompt_tokens=LONGEST), right_logits(llama)
    engine.score_tokens = 10
    rng = np.random.default_rng(7)
    texts = [rng.integers(0, VOCAB, n).astype(np.uint32) for n in (90, 4, 60)]
    long, short, gone = (Request(b"%d" % n, t, want=Score()) for n, t in enumerate(texts))
    engine.submit([long, gone])
    engine.step()
    engine.submit([short, *requests_of([[1, 2]], start=10)])
    first = {outcome.id: outcome for outcome in engine.step()}
    assert b"10" in first
    engine.cancel([gone.id])
    assert engine.in_flight() == 2 - (short.id in first)
    found = dict(first)
    while engine.in_flight():
        found.update((outcome.id, outcome) for outcome in engine.step())
    assert found.keys() == {long.id, short.id, b"10"}
    for request in (long, short):
        check_scores(found[request.id], request, reference(request.tokens))
    score_all(engine, texts_of(rng, 10), [Score(1, 2, [3])] * 10, reference)


def test_texts_longer_than_what_is_kept(llama: str) -> None:
    whole = HFEngine(llama)
    assert whole._packed is not None
    slot = whole._packed._arena.nbytes // whole._packed._arena.keys[0].shape[0]
    engine = HFEngine(llama, max_prompt_tokens=LONGEST, kv_cache_bytes=40 * slot)
    engine.score_tokens = 16
    rng = np.random.default_rng(8)
    score_all(engine, texts_of(rng, 12), [Score()] * 12, right_logits(llama))


def test_adapters(llama: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    engine = HFEngine(llama, max_prompt_tokens=LONGEST)
    assert engine._packed is not None
    engine._packed.head_rows = 7
    folders = {
        "plain": save_adapter(llama, tmp_path / "a"),
        "head": save_adapter(llama, tmp_path / "b", target_modules=["q_proj", "lm_head"]),
    }
    rng = np.random.default_rng(9)
    texts = texts_of(rng, 6)
    for name, folder in folders.items():
        engine.add_adapter(name, folder)
        wants = [random_score(rng, text.size, VOCAB) for text in texts]
        score_all(engine, texts, wants, right_logits(llama, folder), name)
        score_all(engine, texts, wants, right_logits(llama))
    engine.score_tokens = 10
    text = rng.integers(0, VOCAB, 90).astype(np.uint32)
    engine.submit([Request(b"x", text, "head", Score())])
    engine.step()
    engine.remove_adapter("head")
    (outcome,) = engine.step()
    assert "'head' was removed" in str(outcome.error)
    assert engine.in_flight() == 0


@pytest.mark.parametrize("kept", [None, 0])
def test_a_head_in_bfloat16(llama: str, kept: int | None) -> None:
    engine = HFEngine(llama, max_prompt_tokens=LONGEST, dtype="bfloat16", kv_cache_bytes=kept)
    rng = np.random.default_rng(10)
    text = rng.integers(0, VOCAB, 64).astype(np.uint32)
    (outcome,) = ask(engine, [Request(b"s", text, want=Score(top_logprobs=20))])
    scores = outcome.answer
    assert isinstance(scores, TextScores)
    rows = ask(engine, requests_of([text[:n] for n in range(1, text.size)]))
    reference = right_logits(llama, dtype="bfloat16")(text)
    assert np.abs(scores.logprobs - log_softmax(reference)[np.arange(63), text[1:]]).max() < 0.1
    # Normalized in float32, over logits of which many are equal.
    assert scores.top_logprobs is not None
    for at, row in enumerate(rows):
        assert abs(scores.logprobs[at] - row.logprobs()[text[at + 1]]) < 0.1
        top = scores.top_logprobs.logprobs[at]
        ids = scores.top_logprobs.token_ids[at]
        equal = top[1:] == top[:-1]
        assert (top[1:] <= top[:-1]).all()
        assert (ids[1:] > ids[:-1])[equal].all()


@pytest.mark.parametrize("kept", [None, 0])
def test_a_text_that_is_not_a_number_spoils_no_other(llama: str, kept: int | None) -> None:
    engine = HFEngine(llama, max_prompt_tokens=LONGEST, kv_cache_bytes=kept)
    spoiled = 13
    with torch.no_grad():
        engine._open()._model.get_input_embeddings().weight[spoiled] = float("nan")
    rng = np.random.default_rng(11)
    texts = [t[t != spoiled] for t in texts_of(rng, 8)]
    texts = [t for t in texts if t.size > 1]
    bad = np.append(texts[0][:5], [spoiled, 4]).astype(np.uint32)
    late = np.append(texts[0][:5], [spoiled]).astype(np.uint32)  # a target alone
    requests = requests_of([*texts, late, bad], want=Score())
    outcomes = ask(engine, requests)
    assert "logsumexp nan" in str(outcomes[-1].error)
    reference = right_logits(llama)
    for request, outcome in zip(requests[:-1], outcomes, strict=False):
        check_scores(outcome, request, reference(request.tokens))


@pytest.mark.parametrize("family", ["cohere", "gemma2", "granite", "opt", "gpt2", "gpt_neox"])
def test_heads_with_more_after_them(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their blocks are computed by the model's own code, and not by the head alone."""
    caplog.set_level("INFO")
    folder = save_family(family, tmp_path)
    engine = HFEngine(folder, max_prompt_tokens=40)
    engine._head_rows = 5
    if engine._packed is not None:
        engine._packed.head_rows = 5
    texts = texts_of(np.random.default_rng(12), 4, 41)
    score_all(engine, texts, [Score(1, 3, [1, 2])] * 4, right_logits(folder))
    head = engine._open().head
    assert head is not None
    assert head._repeats
    assert "without its trunk" not in caplog.text


def test_a_model_that_bears_no_stand_in_is_right_all_the_same(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = HFEngine(llama, max_prompt_tokens=LONGEST)
    head = engine._open().head
    assert head is not None
    assert engine._packed is not None
    engine._packed.head_rows = 7

    def wrong(states: Any) -> Any:
        return type(head)._after_trunk(head, states) + 1e-3 * torch.arange(VOCAB)

    monkeypatch.setattr(head, "_after_trunk", wrong)
    texts = texts_of(np.random.default_rng(13), 6)
    score_all(engine, texts, [Score()] * 6, right_logits(llama))
    assert head._repeats is False
    score_all(engine, texts, [Score(start=1)] * 6, right_logits(llama))


class Largest(TorchDispatchMode):
    """Notes how many rows of the vocabulary any tensor has that is made."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.rows = 0
        self._weight = head.weight.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for made in found if isinstance(found, (tuple, list)) else (found,):
            if not isinstance(made, torch.Tensor) or not made.dim() or made.shape[-1] != VOCAB:
                continue
            if made.untyped_storage().data_ptr() != self._weight:
                self.rows = max(self.rows, made.numel() // VOCAB)
        return found


@pytest.mark.parametrize("kept", [None, 0])
def test_the_logits_of_a_long_text_are_never_there_at_once(llama: str, kept: int | None) -> None:
    engine = HFEngine(llama, max_prompt_tokens=LONGEST, kv_cache_bytes=kept)
    engine._head_rows = 8
    if engine._packed is not None:
        engine._packed.head_rows = 8
    text = np.random.default_rng(14).integers(0, VOCAB, 90).astype(np.uint32)
    twins = [np.append(text[:-1], n).astype(np.uint32) for n in range(12)]
    with Largest(engine._open()._model.get_output_embeddings()) as largest:
        outcomes = ask(engine, requests_of([text, text[:50], *twins], want=Score(top_logprobs=3)))
    assert all(outcome.error is None for outcome in outcomes)
    assert 0 < largest.rows <= 8


def test_logits_that_tie_are_reduced_as_rows_are() -> None:
    from lmpool.backends.reduction import score_logits

    rng = np.random.default_rng(15)
    logits = np.round(rng.normal(size=(40, VOCAB)) * 2).astype(np.float32)
    rows, targets = rng.integers(0, 40, 90), rng.integers(0, VOCAB, 90)
    for top in (1, 5, 60, VOCAB):
        right = Score(top_logprobs=top).of_rows(logits[rows], targets).top_logprobs
        ranks = Score().of_rows(logits[rows], targets).ranks
        found = score_logits(
            torch.from_numpy(logits),
            torch.from_numpy(targets),
            rows=torch.from_numpy(rows),
            top=top,
        )
        assert right is not None
        assert found.top_ids is not None
        assert (found.top_ids.numpy() == right.token_ids).all()
        assert (found.ranks.numpy() == ranks).all()


def test_a_text_of_which_nothing_is_kept_is_one_piece(llama: str) -> None:
    engine = HFEngine(llama, max_prompt_tokens=LONGEST, kv_cache_bytes=0)
    engine.score_tokens = 10
    text = np.random.default_rng(16).integers(0, VOCAB, 90).astype(np.uint32)
    engine.submit(requests_of([text, text[:60]], want=Score()))
    assert [outcome.id for outcome in engine.step()] == [b"0"]
    assert [outcome.id for outcome in engine.step()] == [b"1"]


def test_the_mass_of_the_others_is_summed_however_little_it_is() -> None:
    from lmpool.backends.reduction import score_logits

    logits = torch.zeros(3, 50)
    logits[0, 7], logits[1, 7], logits[2, :] = 12.0, 3.0, -torch.inf
    logits[2, 7] = 0.0
    targets = torch.tensor([3, 3, 7])
    for temperature in (1.0, 0.1, 0.05, 0.01):
        found = score_logits(logits, targets, top=1, temperature=temperature)
        expected = [math.log(49) - 12.0 / temperature, math.log(49) - 3.0 / temperature, -math.inf]
        if temperature == 1.0:  # the likeliest is not nearly all
            expected[1] = math.log(49 / (49 + math.exp(3.0)))
        assert found.rest is not None
        assert found.rest.tolist() == pytest.approx(expected, rel=1e-4)
