"""Texts scored inside vLLM, however it schedules them, and what happens where they cannot be."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest

from lmpool.backends import Request, tiny
from lmpool.backends.contract import Reference, ask
from lmpool.wants import Generate, Score, TextScores
from tests.support.engines import drawn, requests_of
from tests.support.hf_texts import logits_by, reference_model, save_adapter
from tests.support.scores import check_scores, random_score, score_all
from tests.support.vllm_engine import (
    VOCAB,
    Watched,
    answer,
    assert_nothing_left,
    assert_rows,
    drain,
    need_vllm,
    prompts,
    scheduler,
    spoiled_model,
    vllm_engine,
    write_adapter,
)

need_vllm()

import torch  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

from lmpool.backends.vllm import internals, scorer  # noqa: E402
from lmpool.backends.vllm.capture import CaptureProcessor  # noqa: E402
from lmpool.backends.vllm.hidden_states import watch  # noqa: E402
from lmpool.backends.vllm.scorer import SCORE, TARGETS, WANT, Scorer  # noqa: E402

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),
]

Ids = npt.NDArray[np.uint32]
F64 = npt.NDArray[np.float64]


class Texts:
    """Asks an engine for scores, and judges them by a plain forward pass of transformers."""

    def __init__(self) -> None:
        self._models = {None: Reference.of("tiny").model}

    def add(self, adapter: str, folder: str) -> None:
        """An adapter that will be asked for."""
        self._models[adapter] = reference_model(tiny.path(), folder)

    def logits(self, text: Ids, adapter: str | None = None) -> F64:
        """After each token but the last, [len - 1, vocab]."""
        return logits_by(self._models[adapter], text)

    def check(self, request: Request, outcome: Any, tolerance: float = 1e-4) -> None:
        logits = self.logits(request.tokens, request.adapter)
        check_scores(outcome, request, logits, tolerance)

    def ask(
        self,
        engine: Any,
        texts: Sequence[Ids],
        wants: Sequence[Score] | None = None,
        adapter: str | None = None,
        tolerance: float = 1e-4,
    ) -> None:
        """Have an engine score texts, by default each as some random want says."""
        score_all(engine, texts, wants, lambda t: self.logits(t, adapter), adapter, tolerance)


@pytest.fixture(scope="module")
def right() -> Texts:
    return Texts()


def texts_of(count: int, longest: int, seed: int = 0, shared: int = 0) -> list[Ids]:
    """Texts of two tokens or more."""
    return [np.append(p, p[-1]).astype(np.uint32) for p in prompts(count, longest, seed, shared)]


def scorer_of(engine: Any) -> Scorer:
    runner = engine._engine.model_executor.driver_worker.worker.model_runner
    found = internals.find_capture(runner).scorer  # type: ignore[union-attr]
    assert found is not None
    return found


class TestOneEngine:
    """What needs no engine of its own."""

    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[Any]:
        with vllm_engine(max_num_seqs=16, block_size=32) as made:
            yield made

    def test_a_text_is_one_request(self, engine, right):
        (text,) = texts_of(1, 1, shared=200)
        with Watched(engine) as seen:
            right.ask(engine, [text])
        assert sum(seen.tokens) == text.size - 1
        assert_nothing_left(engine)

    def test_contexts_in_common_are_computed_once(self, engine, right):
        context = prompts(1, 1, seed=1, shared=319)[0]  # 320 tokens, ten blocks
        choices = [np.append(context, c).astype(np.uint32) for c in prompts(8, 6, seed=2)]
        wants = [Score(start=context.size)] * len(choices)
        for _ in range(2):
            with Watched(engine) as seen:
                right.ask(engine, choices, wants)
            # Of what is cached, all but the block with the row before the first scored token.
            assert sum(seen.tokens) <= context.size + len(choices) * (32 + 6)
            engine.cache_prefix(context)
        with Watched(engine) as seen:
            right.ask(engine, choices, wants)
        assert sum(seen.tokens) <= len(choices) * (32 + 6)
        assert_nothing_left(engine)

    def test_what_is_cached_is_computed_again_where_it_is_scored(self, engine, right):
        (text,) = texts_of(1, 1, seed=3, shared=200)
        for start in (1, 32, 33, 34, 96, 97, 200, text.size - 1):
            right.ask(engine, [text], [Score(start, 3)])
            assert_rows(answer(engine, [text]), Reference.of("tiny").rows([text]))

    def test_what_was_scored_is_not_scored_again(self, engine, right):
        """All positions of texts that share a context, which nobody asked for before."""
        engine.clear_cache()
        context = prompts(1, 1, seed=40, shared=319)[0]
        texts = [np.append(context, c).astype(np.uint32) for c in prompts(8, 6, seed=41)]
        wants = [Score(1, 3)] * len(texts)
        most = context.size + len(texts) * (32 + 7)
        with Watched(engine) as seen:
            right.ask(engine, texts, wants)  # at once
        assert sum(seen.tokens) <= most
        with Watched(engine) as seen:
            right.ask(engine, [texts[0]], wants[:1])
            right.ask(engine, [np.append(texts[3], [1, 2]).astype(np.uint32)], wants[:1])
        assert sum(seen.tokens) <= 2 * (32 + 7)
        # Of other wants nothing is known.
        with Watched(engine) as seen:
            right.ask(engine, [texts[0]], [Score(1, 4)])
        assert sum(seen.tokens) == texts[0].size - 1
        engine.clear_cache()
        with Watched(engine) as seen:
            right.ask(engine, [texts[0]], wants[:1])
        assert sum(seen.tokens) == texts[0].size - 1
        assert_nothing_left(engine)

    def test_a_text_that_waits_for_a_cancelled_one_is_scored(self, engine, right):
        engine.clear_cache()
        texts = texts_of(5, 9, seed=42, shared=200)
        want = Score(1, 2)
        engine.submit(requests_of(texts, want=want))
        assert len(engine.running) == 1
        assert len(engine.waiting) == 4
        engine.cancel([b"0", b"2"])
        assert len(engine.running) == 1
        outcomes = drain(engine)
        assert outcomes.keys() == {b"1", b"3", b"4"}
        for name, outcome in outcomes.items():
            right.check(Request(name, texts[int(name)], want=want), outcome)
        assert not engine._texts._waiting
        assert_nothing_left(engine)

    def test_any_texts_of_few_beginnings(self, engine, right):
        """Whatever begins like whatever, in any order, with other requests among them."""
        rng = np.random.default_rng(43)
        beginnings = [rng.integers(0, VOCAB, int(n)).astype(np.uint32) for n in (40, 90, 160)]
        beginnings += [np.append(beginnings[1], beginnings[0]).astype(np.uint32)]
        wants = [Score(1, 2), Score(1, 2), Score(30, 2), Score(1), Score(1, 0, [3, 5])]
        for round_ in range(6):
            if round_ % 2:
                engine.clear_cache()
            texts, asked = [], []
            for _ in range(20):
                begins = beginnings[rng.integers(len(beginnings))]
                text = begins[: rng.integers(32, begins.size + 1)]
                rest = rng.integers(0, VOCAB, int(rng.integers(1, 30)))
                texts.append(np.append(text, rest).astype(np.uint32))
                asked.append(wants[rng.integers(len(wants))])
            right.ask(engine, texts, asked)
            assert_nothing_left(engine)

    def test_beside_rows_and_continuations(self, engine, right):
        texts = texts_of(30, 90, seed=4) + texts_of(10, 9, seed=5, shared=100)
        sampled = Generate(max_tokens=5, eos_token_ids=(), temperature=0.8, seed=1)
        rng = np.random.default_rng(6)
        scored = [
            Request(b"s%d" % n, text, want=random_score(rng, text.size, VOCAB).checked(engine.info))
            for n, text in enumerate(texts)
        ]
        engine.submit(requests_of(texts[:5], 1000, want=sampled))
        engine.submit(scored[:20])
        outcomes = {outcome.id: outcome for outcome in engine.step()}
        engine.submit(requests_of(texts))
        engine.submit(scored[20:])
        outcomes |= drain(engine)
        assert all(len(drawn(outcomes[b"%d" % i])) == 5 for i in range(1000, 1005))
        rows = [outcomes[b"%d" % i] for i in range(len(texts))]
        assert_rows(rows, Reference.of("tiny").rows(texts))
        for request in scored:
            right.check(request, outcomes[request.id])
        assert_nothing_left(engine)

    def test_of_the_longest_text_and_of_one_too_long(self, engine, right):
        text = prompts(1, 1, seed=7, shared=512)[0]
        assert text.size == 513
        right.ask(engine, [text[:-1], text[:511], text[:2]])
        (wrong,) = ask(engine, [Request(b"b", text, want=Score())])
        assert "a prompt of 513 tokens: 1 to 512 expected" in str(wrong.error)

    def test_cancelled_texts_leave_nothing(self, engine, right):
        texts = texts_of(40, 300, seed=8)
        engine.submit(requests_of(texts, want=Score(1, 2)))
        outcomes = {outcome.id: outcome for outcome in engine.step()}
        engine.cancel([b"%d" % i for i in range(0, 40, 2)])
        outcomes |= drain(engine)
        assert 20 <= len(outcomes) < 40
        for i in range(1, 40, 2):
            right.check(Request(b"%d" % i, texts[i], want=Score(1, 2)), outcomes[b"%d" % i])
        assert len(scorer_of(engine)) == 0
        assert_nothing_left(engine)

    def test_logits_come_a_block_at_a_time(self, engine, right, monkeypatch):
        scoring, model = scorer_of(engine), engine.underlying_model
        monkeypatch.setattr(scoring, "block_rows", 7)
        heads, compute = [], model.compute_logits

        def counted(hidden: torch.Tensor) -> torch.Tensor:
            heads.append(len(hidden))
            return compute(hidden)  # type: ignore[no-any-return]

        monkeypatch.setattr(model, "compute_logits", counted)
        texts = texts_of(14, 90, seed=9)
        right.ask(engine, texts)
        assert max(heads) <= 16  # rows that are sampled come together
        assert heads.count(7) >= 14

    def test_scores_nobody_takes_are_bounded(self, engine, monkeypatch):
        scoring = scorer_of(engine)
        monkeypatch.setattr(scoring, "most_bytes", 100)
        (outcome,) = answer(engine, texts_of(1, 1, seed=10, shared=40), want=Score())
        assert "computed no scores for some" in str(outcome.error)
        assert len(scoring) == 0


TIGHT = {
    "few at a time": {"max_num_seqs": 3},
    "prefills in chunks": {"max_num_batched_tokens": 48, "max_num_seqs": 20, "block_size": 32},
    "schedules ahead": {"async_scheduling": True, "max_num_seqs": 20},
    "does not schedule ahead": {"async_scheduling": False, "block_size": 32},
    "caches nothing": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("options", TIGHT.values(), ids=TIGHT.keys())
def test_scores_however_vllm_schedules(right, options):
    texts = texts_of(40, 200, seed=11) + texts_of(20, 9, seed=12, shared=150)
    with vllm_engine(**options) as engine:
        right.ask(engine, texts)
        right.ask(engine, texts)

        def spoil(_: Any, inputs: Any, states: Any) -> Any:
            return states.masked_fill((inputs[0] == 1)[:, None], float("nan"))

        # NaN in some texts is in no others that run beside them, nor in what those leave cached.
        hook = engine.underlying_model.model.embed_tokens.register_forward_hook(spoil)
        bad = [np.append(text, [1, 5, 6]).astype(np.uint32) for text in texts[::9]]
        try:
            engine.submit(requests_of(bad, 100, want=Score(1, 2)))
            engine.submit(requests_of(texts, want=Score(1, 2)))
            outcomes = drain(engine)
        finally:
            hook.remove()
        failed = [outcomes.pop(b"%d" % i).error for i in range(100, 100 + len(bad))]
        assert all("not finite" in str(error) for error in failed)
        for i, text in enumerate(texts):
            right.check(Request(b"%d" % i, text, want=Score(1, 2)), outcomes[b"%d" % i])
        assert_nothing_left(engine)


def test_scores_with_preemptions(right):
    with vllm_engine(
        block_size=32, kv_cache_memory_bytes=22 * 32 * 3072, max_prompt_tokens=255
    ) as engine:
        texts = texts_of(40, 120, seed=13)
        long = Generate(max_tokens=120, eos_token_ids=(), temperature=0.8, seed=3)
        rng = np.random.default_rng(14)
        scored = [
            Request(b"s%d" % n, text, want=random_score(rng, text.size, VOCAB).checked(engine.info))
            for n, text in enumerate(texts)
        ]
        with Watched(engine) as seen:
            engine.submit(requests_of(prompts(12, 60, seed=15), 1000, want=long))
            engine.submit(scored)
            outcomes = drain(engine)
        assert seen.preempted > 0
        for request in scored:
            right.check(request, outcomes[request.id])
        assert_nothing_left(engine)


def test_a_text_that_is_preempted_is_scored_all_the_same(right):
    (text,) = texts_of(1, 1, seed=16, shared=300)
    want = Score(40, 2)
    with vllm_engine(max_num_batched_tokens=64, max_num_seqs=4, block_size=32) as engine:
        engine.submit(requests_of([text], want=want))
        engine.step()
        engine.step()
        core = scheduler(engine)
        (running,) = core.running
        assert 0 < running.num_computed_tokens < text.size - 1
        core.running.remove(running)
        core._preempt_request(running, 0.0)
        outcomes = drain(engine)
        right.check(Request(b"0", text, want=want), outcomes[b"0"])
        assert_nothing_left(engine)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_and_those_of_the_head(right, tmp_path):
    folders = {
        "plain": write_adapter(tmp_path / "plain", 3),
        "head": save_adapter(
            tiny.path(), tmp_path / "head", target_modules=["q_proj", "lm_head"],
            save_embedding_layers=True,
        ),
    }  # fmt: skip
    texts = texts_of(8, 60, seed=17) + texts_of(4, 9, seed=18, shared=130)
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with vllm_engine(**options) as engine:
        for name, folder in folders.items():
            engine.add_adapter(name, folder)
            right.add(name, folder)
        for _ in range(2):
            for name in (*folders, None):
                # It moves rows by so much that temperatures show what float32 rounds.
                right.ask(engine, texts, adapter=name, tolerance=5e-4)
        requests = [
            Request(b"%d" % n, text, [None, "plain", "head"][n % 3], Score(1, 3))
            for n, text in enumerate(texts)
        ]
        for request, outcome in zip(requests, ask(engine, requests), strict=True):
            right.check(request, outcome, 5e-4)
        # Rows of the head's adapter join, and the text itself by the other.
        with Watched(engine) as seen:
            right.ask(engine, [texts[0]], [Score()], adapter="plain")
        assert sum(seen.tokens) == texts[0].size - 1
        with patch.object(engine._texts, "params", side_effect=AssertionError):
            right.ask(engine, [texts[0]], [Score()], adapter="head")
        engine.remove_adapter("head")
        assert not engine._texts.unfit
        assert_nothing_left(engine)


def test_scores_of_a_bfloat16_model(right):
    texts = texts_of(20, 60, seed=19)
    with vllm_engine(dtype="bfloat16", max_num_seqs=64) as engine:
        for text, outcome in zip(texts, answer(engine, texts, want=Score(1, VOCAB)), strict=True):
            scores = outcome.answer
            assert isinstance(scores, TextScores)
            assert scores.top_logprobs is not None
            logits = right.logits(text)
            rows = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
            exact = rows[np.arange(text.size - 1), text[1:].astype(np.int64)]
            assert np.abs(scores.logprobs - exact).max() < 0.3
            mass = np.exp(scores.top_logprobs.logprobs.astype(np.float64)).sum(1)
            assert np.abs(mass - 1).max() < 1e-5  # in float32, whatever the head computes in


def test_an_engine_in_another_process(right, tmp_path):
    context = prompts(1, 1, seed=20, shared=383)[0]
    choices = [np.append(context, c).astype(np.uint32) for c in prompts(6, 9, seed=21)]
    texts = texts_of(30, 90, seed=22) + choices
    with vllm_engine(own_process=True, model=spoiled_model(tmp_path / "spoiled", 1)) as engine:
        assert engine._texts.possible
        assert engine._texts._shares
        right.ask(engine, texts)
        right.ask(engine, choices, [Score(start=context.size, top_logprobs=3)] * 6)
        bad = np.append(texts[0], [1, 5]).astype(np.uint32)
        (spoiled,) = answer(engine, [bad], want=Score())
        assert "not finite" in str(spoiled.error)


def by_rows(engine: Any, right: Texts) -> None:
    """An engine that scores by rows scores right, too."""
    assert not engine._texts.possible
    right.ask(engine, texts_of(4, 20, seed=23))


def test_without_capture_scores_come_of_rows(right, caplog):
    with caplog.at_level(logging.WARNING, logger="lmpool"), vllm_engine(capture=False) as engine:
        assert "scored by a row for each token" in caplog.text
        by_rows(engine, right)


def test_a_runner_without_a_place_for_the_scorer_gives_rows(right, caplog, monkeypatch):
    monkeypatch.setattr(scorer, "watch", lambda *_: False)
    with caplog.at_level(logging.WARNING, logger="lmpool"), vllm_engine() as engine:
        assert "has no place for lmpool's scorer" in caplog.text
        by_rows(engine, right)


def test_where_not_all_hidden_states_are_computed_rows_are(right, caplog):
    with (
        caplog.at_level(logging.WARNING, logger="lmpool"),
        vllm_engine(kv_sharing_fast_prefill=True) as engine,
    ):
        assert "kv_sharing_fast_prefill skips states" in caplog.text
        by_rows(engine, right)


def test_a_scheduler_of_somebodys_own_shares_nothing(right):
    class Own(Scheduler):
        pass

    context = prompts(1, 1, seed=24, shared=200)[0]
    choices = [np.append(context, c).astype(np.uint32) for c in prompts(4, 9, seed=25)]
    with vllm_engine(scheduler_cls=Own, block_size=32, async_scheduling=False) as engine:
        assert not engine._texts._shares
        engine.cache_prefix(context)
        right.ask(engine, choices, [Score(start=context.size)] * 4)


class Head:
    """A linear head, and hidden states of texts in the order of some step."""

    def __init__(self) -> None:
        self.weight = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(0))

    def states(self, text: Ids) -> torch.Tensor:
        seed = int(text.astype(np.int64).sum())
        return torch.randn(len(text) - 1, 8, generator=torch.Generator().manual_seed(seed))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.T


class TestV2Runner:
    """The second model runner, of which its worker for prompts' log-probabilities stands here."""

    SECRET = "the owner's secret: "

    def runner(self, capture: CaptureProcessor, publishes: bool = True) -> Any:
        capture.attach(self.SECRET)
        capture.publishes = publishes
        model = torch.nn.Module()
        worker = SimpleNamespace(compute_prompt_logprobs=lambda *given: {"called": len(given)})
        runner = SimpleNamespace(
            prompt_logprobs_worker=worker,
            get_model=lambda: model,
            model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB),
            device=torch.device("cpu"),
        )
        capture.scorer = Scorer(runner, lambda: capture.asking_for(SCORE), keep=publishes)
        assert watch(runner, capture.scorer.see)
        return runner

    def capture(self) -> CaptureProcessor:
        config: Any = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
        return CaptureProcessor(config, SimpleNamespace())

    def params(self, name: int, text: Ids, want: Score) -> SamplingParams:
        targets = text[want.start :].tobytes()
        extra = {SCORE: f"{self.SECRET}{name}", WANT: want.fields(), TARGETS: targets}
        return SamplingParams(max_tokens=1, extra_args=extra)

    def step(self, runner: Any, head: Head, parts: Sequence[tuple[int, torch.Tensor, int]]) -> Any:
        """Of slots: their hidden states, and how many were computed before."""
        counts = [len(states) for _, states, _ in parts]
        batch = SimpleNamespace(
            idx_mapping_np=np.array([slot for slot, _, _ in parts]),
            query_start_loc_np=np.cumsum([0, *counts]),
            num_computed_prefill_tokens_np=np.array([before for *_, before in parts]),
            num_scheduled_tokens=np.array(counts),
        )
        hidden = torch.cat([states for _, states, _ in parts])
        compute = runner.prompt_logprobs_worker.compute_prompt_logprobs
        return compute(head, hidden, batch, "tokens", "computed", "lengths")

    def test_texts_in_chunks_are_found_by_slot(self):
        capture, head = self.capture(), Head()
        runner = self.runner(capture)
        texts, wants = texts_of(3, 30, seed=26, shared=20), [Score(), Score(9, 2), Score(20)]
        states = [head.states(text) for text in texts]
        assert capture.scorer is not None
        for slot, (text, want) in enumerate(zip(texts, wants, strict=True)):
            capture.add_request(slot + 4, self.params(slot, text, want))
        assert self.step(runner, head, [(5, states[1][:13], 0), (4, states[0], 0)]) == {"called": 6}
        # It was preempted, and begins anew; another's row stands between.
        other = torch.full((1, 8), torch.nan)
        self.step(runner, head, [(6, states[2][16:], 16), (9, other, 40), (5, states[1][:20], 0)])
        self.step(runner, head, [(5, states[1][20:], 20)])
        found = {name: data for name, data, _ in capture.scorer.take(["0", "1", "2", "3"])}
        for number, (text, want) in enumerate(zip(texts, wants, strict=True)):
            logits = (states[number].double() @ head.weight.double().T).numpy()[want.start - 1 :]
            data = found[f"{number}"]
            assert data is not None
            count = text.size - want.start
            scores = np.frombuffer(data, np.float32, count)
            rows = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
            right = rows[np.arange(count), text[want.start :].astype(np.int64)]
            assert np.abs(scores - right).max() < 1e-4
        assert len(capture.scorer) == 0

    def test_a_text_whose_beginning_came_from_a_cache_has_no_scores(self):
        capture, head = self.capture(), Head()
        runner = self.runner(capture)
        (text,) = texts_of(1, 1, seed=27, shared=20)
        capture.add_request(0, self.params(0, text, Score()))
        self.step(runner, head, [(0, head.states(text)[16:], 16)])
        assert capture.scorer is not None
        assert capture.scorer.take(["0"]) == [("0", None, 0.0)]

    def test_another_rank_computes_the_same_blocks_and_keeps_nothing(self):
        capture, head, blocks = self.capture(), Head(), []
        runner = self.runner(capture, publishes=False)
        (text,) = texts_of(1, 1, seed=28, shared=20)
        capture.add_request(0, self.params(0, text, Score()))
        assert capture.scorer is not None
        capture.scorer.block_rows = 8

        def none_here(hidden: torch.Tensor) -> None:
            blocks.append(len(hidden))

        self.step(runner, none_here, [(0, head.states(text), 0)])  # type: ignore[arg-type]
        assert blocks == [8, 8, 5]
        assert len(capture.scorer) == 0
