"""What else the vLLM engine does: live prompts, adapters, sampling, options, other processes."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pytest

from lmpool.backends import Request, load_engine, tiny
from lmpool.backends.contract import Reference
from lmpool.backends.contract import write_adapter as write_lora
from lmpool.backends.model_identity import model_identity
from lmpool.errors import AdapterError, EngineBroken, PromptFailed, SettingsError
from lmpool.wants import Generate
from tests.support import logged
from tests.support.engines import drawn, requests_of
from tests.support.hf_texts import (
    hide_modules,
    reference_rows,
    save_adapter,
    save_patterned_adapter,
)
from tests.support.vllm_engine import (
    QUICK,
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

from vllm import SamplingParams  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402

from lmpool.backends.vllm import engine as engine_module  # noqa: E402
from lmpool.backends.vllm import internals  # noqa: E402
from lmpool.backends.vllm.capture import CAPTURE, CapturedRows, CaptureProcessor  # noqa: E402
from lmpool.backends.vllm.options import CAPTURE_PROCESSOR, MOST_ADAPTERS  # noqa: E402
from lmpool.backends.vllm.own import WORKER_EXTENSION, OwnRows  # noqa: E402
from lmpool.tensor_files import ModelTensors  # noqa: E402

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.of("tiny")


def extended(prompt: np.ndarray, *tokens: int) -> np.ndarray:
    return np.append(prompt, np.array(tokens, np.uint32)).astype(np.uint32)


class TestLivePrompts:
    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[Any]:
        with vllm_engine(max_num_seqs=16) as made:
            yield made

    def test_particles_cost_a_token_a_step(self, engine, reference):
        random = np.random.default_rng(0)
        particles = [prompts(1, 1, seed=1, shared=200)[0]] * 8
        for step in range(12):
            distinct = list({p.tobytes(): p for p in particles}.values())
            with Watched(engine) as seen:
                outcomes = answer(engine, distinct)
            assert_rows(outcomes, reference.rows(distinct))
            if step > 1:  # before, the particles part from the prompt they have in common
                assert sum(seen.tokens) == len(distinct)
            particles = [extended(p, random.integers(3, VOCAB)) for p in particles]
        assert_nothing_left(engine)

    def test_prompts_that_fork_are_each_others_prefix_no_more(self, engine, reference):
        start = prompts(1, 1, seed=2, shared=140)[0]
        answer(engine, [start])
        forks = [extended(start, i) for i in range(10, 18)]
        deeper = [extended(fork, 5, 6, 7) for fork in forks]
        assert_rows(answer(engine, forks), reference.rows(forks))
        with Watched(engine) as seen:
            outcomes = answer(engine, deeper)
        assert_rows(outcomes, reference.rows(deeper))
        assert sum(seen.tokens) == 3 * 8
        # What was extended is gone, and is answered anew.
        assert_rows(answer(engine, forks), reference.rows(forks))
        assert_rows(answer(engine, [start]), reference.rows([start]))
        assert_nothing_left(engine)

    def test_are_bounded_and_the_oldest_goes_first(self, engine):
        given = prompts(30, 20, seed=3)
        answer(engine, given)
        assert len(engine._live) == 8  # half of max_num_seqs
        assert len(scheduler(engine).requests) == 8
        with Watched(engine) as seen:
            answer(engine, [extended(p, 9) for p in given[-8:]])
        assert sum(seen.tokens) == 8
        assert_nothing_left(engine)

    def test_leave_room_for_everything_else(self, engine, reference):
        answer(engine, prompts(16, 20, seed=4))
        given = prompts(40, 300, seed=5)
        assert_rows(answer(engine, given), reference.rows(given))
        assert_nothing_left(engine)

    def test_an_aborted_extension_is_forgotten(self, engine, reference):
        start = prompts(1, 1, seed=6, shared=40)[0]
        answer(engine, [start])
        engine.submit([Request(b"gone", extended(start, 4))])
        engine.cancel([b"gone"])
        assert engine.in_flight() == 0
        given = [extended(start, 4), start]
        assert_rows(answer(engine, given), reference.rows(given))
        assert_nothing_left(engine)

    def test_a_cleared_cache_is_used_by_nobody_who_comes_later(self, engine, reference):
        start = prompts(1, 1, seed=8, shared=300)[0]
        more = [extended(start, i) for i in (4, 5)]
        want = Generate(max_tokens=40, eos_token_ids=(), temperature=0.8, seed=1)
        (alone,) = answer(engine, [start], want=want)
        answer(engine, [start])
        engine.submit([Request(b"runs", start, want=want), Request(b"row", start)])
        outcomes = {outcome.id: outcome for outcome in engine.step()}
        engine.clear_cache()
        engine.submit(requests_of(more))
        engine.clear_cache()
        while b"runs" not in outcomes:
            assert not outcomes.keys() & {b"0", b"1"}  # they wait
            outcomes |= {outcome.id: outcome for outcome in engine.step()}
        assert drawn(outcomes[b"runs"]) == drawn(alone)
        with Watched(engine) as seen:
            outcomes |= drain(engine)
        assert sum(seen.tokens) > start.size
        assert_rows([outcomes[i] for i in (b"0", b"1")], reference.rows(more))
        assert_rows([outcomes[b"row"]], reference.rows([start]))
        assert_nothing_left(engine)

    def test_a_prefix_is_computed_ahead(self, engine, reference):
        prefix = prompts(1, 1, seed=7, shared=300)[0]
        engine.cache_prefix(prefix)
        with Watched(engine) as seen:
            outcomes = answer(engine, [extended(prefix, 8)])
        assert_rows(outcomes, reference.rows([extended(prefix, 8)]))
        assert sum(seen.tokens) == 1
        assert_nothing_left(engine)


def test_live_prompts_never_take_the_room_a_prompt_needs(reference):
    # Room for one prompt of the longest, and for eight blocks of live ones.
    with vllm_engine(
        block_size=32, kv_cache_memory_bytes=25 * 32 * 3072, max_prompt_tokens=511
    ) as engine:
        for seed in range(6):
            given = prompts(6, 100, seed=seed)
            assert_rows(answer(engine, given), reference.rows(given))
            more = [extended(p, 3) for p in given] + [np.full(511, seed + 3, np.uint32)]
            assert_rows(answer(engine, more), reference.rows(more))
        assert_nothing_left(engine)


def loaded(engine: Any) -> set[int]:
    """The adapters that vLLM has, by its numbers."""
    return set(engine._core.engine_core.list_loras())


class TestAdapters:
    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[Any]:
        # One slot: the CPU kernel would give base prompts whatever adapter is in it.
        with vllm_engine(enable_lora=True, max_loras=1, max_lora_rank=8) as made:
            yield made

    def test_rows_of_base_and_adapters_asked_together(self, engine, reference, tmp_path):
        folders = {name: write_adapter(tmp_path / name, i) for i, name in enumerate("ab")}
        for name, folder in folders.items():
            engine.add_adapter(name, folder)
        given = prompts(12, 60, seed=8)
        expected = {None: reference.rows(given)}
        expected |= {n: reference.rows(given, f) for n, f in folders.items()}
        assert np.abs(expected["a"] - expected["b"]).max() > 0.1
        assert np.abs(expected["a"] - expected[None]).max() > 0.1
        for _ in range(2):  # and again, from what is live and cached
            for i, prompt in enumerate(given):
                engine.submit([Request(f"{i} {a}".encode(), prompt, a) for a in (None, "a", "b")])
            outcomes = drain(engine)
            for adapter, rows in expected.items():
                assert_rows([outcomes[f"{i} {adapter}".encode()] for i in range(12)], rows)
        for name in folders:
            engine.remove_adapter(name)
        assert_nothing_left(engine)

    def test_replaced_files_are_another_adapter(self, engine, reference, tmp_path):
        given = prompts(5, 300, seed=9)
        for seed in (5, 6):
            folder = write_adapter(tmp_path / "one", seed)
            engine.add_adapter("one", folder)
            expected = reference.rows(given, folder)
            assert_rows(answer(engine, given, adapter="one"), expected)
        engine.remove_adapter("one")
        engine.remove_adapter("one")
        (outcome,) = answer(engine, given[:1], adapter="one")
        assert "no adapter named 'one'" in str(outcome.error)

    @pytest.mark.parametrize("first", [None, "leaving"])
    def test_removed_ones_answer_what_is_in_flight(self, engine, reference, tmp_path, first):
        folder = Path(write_adapter(tmp_path / "leaving", 5))
        before = loaded(engine)
        engine.add_adapter("leaving", str(folder))
        given = prompts(6, 60, seed=30)
        expected = {None: reference.rows(given), "leaving": reference.rows(given, folder)}
        # On a CPU the others wait for their turn.
        for adapter in (first, "leaving" if first is None else None):
            engine.submit(
                [Request(f"{i} {adapter}".encode(), p, adapter) for i, p in enumerate(given)]
            )
        engine.remove_adapter("leaving")
        shutil.rmtree(folder)
        outcomes = drain(engine)
        for adapter, rows in expected.items():
            assert_rows([outcomes[f"{i} {adapter}".encode()] for i in range(6)], rows)
        (refused,) = answer(engine, given[:1], adapter="leaving")
        assert "no adapter named 'leaving'" in str(refused.error)
        assert loaded(engine) == before
        assert_nothing_left(engine)

    def test_replaced_ones_leave_no_live_prompt_to_their_successors(
        self, engine, reference, tmp_path
    ):
        given = prompts(4, 60, seed=31)
        more = [extended(p, 7) for p in given]
        before = loaded(engine)
        old, new = (write_adapter(tmp_path / str(seed), seed) for seed in (5, 6))
        engine.add_adapter("style", old)
        engine.submit(requests_of(given, adapter="style"))
        engine.add_adapter("style", new)
        outcomes = drain(engine)
        assert_rows([outcomes[b"%d" % i] for i in range(4)], reference.rows(given, old))
        assert_rows(answer(engine, more, adapter="style"), reference.rows(more, new))
        engine.remove_adapter("style")
        assert loaded(engine) == before
        assert_nothing_left(engine)

    def test_cancelled_requests_hold_no_adapter(self, engine, tmp_path):
        before = loaded(engine)
        engine.add_adapter("style", write_adapter(tmp_path / "style", 14))
        engine.submit(requests_of(prompts(4, 60, seed=32), adapter="style"))
        engine.remove_adapter("style")
        engine.cancel([b"0", b"1", b"2", b"3"])
        assert engine.in_flight() == 0
        assert loaded(engine) == before
        assert_nothing_left(engine)

    def test_a_turn_that_nobody_runs_in_is_no_turn(self, engine, reference, tmp_path):
        folder = write_adapter(tmp_path / "style", 5)
        engine.add_adapter("style", folder)
        (prompt,) = given = prompts(1, 20, seed=33)
        engine.submit(
            [
                Request(b"nothing", prompt, want=Generate(0, (), 1.0, 0)),
                Request(b"row", prompt, "style"),
            ]
        )
        outcomes: dict[bytes, Any] = {}
        for _ in range(50):
            outcomes |= {outcome.id: outcome for outcome in engine.step()}
        assert engine.in_flight() == 0
        assert len(drawn(outcomes[b"nothing"])) == 0
        assert_rows([outcomes[b"row"]], reference.rows(given, folder))
        engine.remove_adapter("style")

    def test_more_than_vllm_has_slots_for_wait_their_turn(self, engine, reference, tmp_path):
        before = loaded(engine)
        (prompt,) = prompts(1, 40, seed=34)
        names = [f"style {i}" for i in range(MOST_ADAPTERS)]
        folders = [write_adapter(tmp_path / name, i) for i, name in enumerate(names)]
        for name, folder in zip(names, folders, strict=True):
            engine.add_adapter(name, folder)
        with pytest.raises(AdapterError, match="64 are loaded"):
            engine.add_adapter("one more", folders[0])
        engine.submit([Request(name.encode(), prompt, name) for name in names])
        # Their room is others' as soon as they have answered, and not before.
        for i in range(3):
            engine.remove_adapter(names[i])
            engine.add_adapter(f"new {i}", folders[i + 3])
        shutil.rmtree(tmp_path / names[0])
        engine.submit([Request(b"new %d" % i, prompt, f"new {i}") for i in range(3)])
        outcomes = drain(engine)
        rows = np.stack([outcomes[name.encode()].logprobs() for name in names])
        for i in (1, 40, 63):
            assert np.abs(rows[i] - reference.rows([prompt], folders[i])).max() < 5e-5
        assert np.abs(rows[:, None] - rows[None]).max(axis=2)[~np.eye(64, dtype=bool)].min() > 0.05
        assert_rows([outcomes[b"new %d" % i] for i in range(3)], rows[3:6])
        for name in [*names, "new 0", "new 1", "new 2"]:
            engine.remove_adapter(name)
        assert loaded(engine) == before
        assert_nothing_left(engine)

    def test_that_do_not_load_leave_their_predecessors(self, engine, reference, tmp_path):
        given = prompts(4, 30, seed=35)
        old = write_adapter(tmp_path / "old", 5)
        engine.add_adapter("style", old)
        with pytest.raises(AdapterError, match="rank"):
            engine.add_adapter("style", write_adapter(tmp_path / "large", 1, rank=64))
        rows = answer(engine, given, adapter="style")
        assert_rows(rows, reference.rows(given, old))
        engine.remove_adapter("style")

    def test_the_models_files_are_read_once(self, engine, tmp_path, monkeypatch):
        read: list[Path] = []

        def counted(folder: Path) -> Any:
            read.append(folder)
            return ModelTensors(folder)

        monkeypatch.setattr(engine_module, "ModelTensors", counted)
        monkeypatch.setattr(engine, "_tensors", None)
        for seed in (16, 17):
            engine.add_adapter("style", write_adapter(tmp_path / str(seed), seed))
        engine.remove_adapter("style")
        assert len(read) == 1

    def test_files_that_are_no_adapter_are_refused(self, engine, reference, tmp_path):
        large = write_adapter(tmp_path / "large", 1, rank=64)
        with pytest.raises(AdapterError, match="rank"):
            engine.add_adapter("large", large)
        (Path(write_adapter(tmp_path / "bad", 1)) / "adapter_model.safetensors").write_text("no")
        with pytest.raises(AdapterError, match="is no safetensors file"):
            engine.add_adapter("bad", str(tmp_path / "bad"))
        given = prompts(3, 20)
        assert_rows(answer(engine, given), reference.rows(given))

    def test_ranks_alphas_and_saved_tensors_as_peft_reads_them(self, engine, tmp_path):
        """And no pattern is run: this one would take ages."""
        folder = save_patterned_adapter(tiny.path(), tmp_path / "a")
        given = prompts(3, 20)
        expected = reference_rows(tiny.path(), [p.tolist() for p in given], folder)
        hide_modules(folder)
        engine.add_adapter("a", folder)
        assert_rows(answer(engine, given, adapter="a"), expected)
        engine.remove_adapter("a")

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_one_of_the_head_with_the_embedding_that_peft_saves(self, engine, tmp_path):
        given = prompts(3, 20)
        folder = save_adapter(
            tiny.path(), tmp_path / "a", target_modules=["lm_head"], save_embedding_layers=True
        )
        expected = reference_rows(tiny.path(), [p.tolist() for p in given], folder)
        engine.add_adapter("a", folder)
        assert_rows(answer(engine, given, adapter="a"), expected)
        engine.remove_adapter("a")


def test_base_rows_are_no_adapters_where_all_slots_hold_one(tmp_path):
    """An index of -1 says that a row is of no adapter; torch takes it for the last slot's."""
    with vllm_engine(enable_lora=True, max_loras=2, max_lora_rank=8) as engine:
        given = prompts(5, 20)
        base = reference_rows(tiny.path(), [p.tolist() for p in given])
        for seed, name in enumerate(("a", "b"), 1):
            targets = ("lm_head", "q_proj")
            engine.add_adapter(name, write_lora(tmp_path / name, seed=seed, targets=targets))
            by_adapter = np.stack([each.logprobs() for each in answer(engine, given, adapter=name)])
            assert np.abs(by_adapter - base).max() > 0.1
        assert_rows(answer(engine, given), base)


def identity(dtype: str) -> dict[str, object]:
    """What the tiny model's numbers come from."""
    return {"engine": "vllm", "dtype": dtype, "files": model_identity(tiny.path(), code=False)}


class TestOneEngine:
    """What needs no engine of its own."""

    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[Any]:
        with vllm_engine() as made:
            yield made

    def test_says_what_it_serves(self, engine):
        info = engine.info
        assert (info.engine, info.model, info.vocab_size) == ("vllm", "tiny", VOCAB)
        assert (info.max_prompt_tokens, info.dtype, info.encoding) == (511, "float32", "f32")
        assert info.identity == identity("float32")
        assert (info.bos_token_id, info.eos_token_ids, info.pad_token_id) == (1, (2,), 0)
        assert "tokenizer.json" in engine.tokenizer_files()
        assert len(engine.byte_vocabulary()) == VOCAB
        assert engine.underlying_model.config.vocab_size == VOCAB

    def test_sampling_is_vllms_and_reproducible(self, engine, reference):
        prompt = np.array([1, 5, 9], np.uint32)

        def sample(company: int = 0, **options: Any) -> list[int]:
            chosen = {"max_tokens": 12, "eos_token_ids": (), "temperature": 0.8, "seed": 7}
            want = Generate(**{**chosen, **options})
            engine.submit(requests_of(prompts(company, 40, seed=1), want=want))
            engine.submit([Request(b"s", prompt, want=want)])
            return drawn(drain(engine)[b"s"])

        first = sample()
        assert len(first) == 12
        assert sample() == sample(company=9) == first
        assert sample(seed=8) != first
        assert sample(seed=-7) != sample(seed=2**64 - 1)
        assert sample(eos_token_ids=(first[4],)) == first[: first.index(first[4]) + 1]
        assert sample(max_tokens=0) == []
        greedy = sample(temperature=0.0)
        for i, token in enumerate(greedy):
            row = reference.rows([extended(prompt, *greedy[:i])])[0]
            assert row[token] >= row.max() - 1e-4
        long = np.full(500, 9, np.uint32)
        (outcome,) = answer(engine, [long], want=Generate(10_000, (), 0.8, 1))
        assert len(drawn(outcome)) == 12  # as many as vLLM has positions for
        assert_nothing_left(engine)

    def test_a_stop_sequence_ends_a_request_that_vllm_would_go_on_with(self, engine, reference):
        prompt = np.array([1, 5, 9], np.uint32)
        free = Generate(30, (), 0.8, 7)
        (plain,) = answer(engine, [prompt], want=free)
        tokens = drawn(plain)
        stop = (tuple(tokens[3:6]), (tokens[9],))
        told = replace(free, stop=stop, logprobs=True, top_logprobs=3)
        company = [replace(free, seed=n, logprobs=bool(n % 2)) for n in range(6)]
        engine.submit([Request(b"%d" % n, prompt, want=w) for n, w in enumerate(company)])
        engine.submit([Request(b"told", prompt, want=told), Request(b"row", prompt)])
        outcomes = drain(engine)
        found = outcomes[b"told"].answer
        first = next(n for n in range(1, 31) if any(tokens[:n][-len(s) :] == [*s] for s in stop))
        assert found.token_ids.tolist() == tokens[:first]
        assert (found.finish_reason, found.ending) == ("stop", 3 if first == 6 else 1)
        rows = reference.rows([extended(prompt, *tokens[:n]) for n in range(first)])
        likely = -np.sort(-rows, axis=1)[:, :3]
        assert np.abs(found.logprobs - rows[np.arange(first), tokens[:first]]).max() < 1e-4
        assert np.abs(found.top_logprobs.logprobs - likely).max() < 1e-4
        left = np.log(1 - np.exp(likely.astype(np.float64)).sum(1))
        assert np.abs(found.top_logprobs.rest - left).max() < 1e-3
        for n in range(6):
            other = outcomes[b"%d" % n].answer
            assert (other.finish_reason, len(other.token_ids)) == ("length", 30)
            assert (other.logprobs is not None) == bool(n % 2)
        assert_nothing_left(engine)

    @pytest.mark.parametrize("temperature", [2.5, 1e39])
    def test_a_temperature_that_vllm_refuses_fails_alone(self, engine, reference, temperature):
        given = prompts(2, 20, seed=41)
        hot = Generate(3, (), temperature, 1)
        odd = Generate(3, (-1, VOCAB, 2**64), 2.0, 1)
        engine.submit([Request(b"hot", given[0], want=hot), *requests_of(given)])
        engine.submit([Request(b"odd", given[0], want=odd)])
        outcomes = drain(engine)
        assert "from 0 to 2" in str(outcomes[b"hot"].error)
        assert len(drawn(outcomes[b"odd"])) == 3
        assert_rows([outcomes[b"0"], outcomes[b"1"]], reference.rows(given))

    def test_logits_that_are_not_finite_fail_their_own_prompts(self, engine, reference):
        def spoil(_: Any, inputs: Any, states: Any) -> Any:
            return states.masked_fill((inputs[0] == 13)[:, None], float("nan"))

        given = [p[p != 13] for p in prompts(40, 200, seed=40, shared=1)]
        bad = [extended(p, 13, 5) for p in given[:20]]
        want = Generate(5, (), 1.0, 0)
        embed = engine.underlying_model.model.embed_tokens
        hook = embed.register_forward_hook(spoil)
        try:
            engine.submit(requests_of([*bad, *given]))
            engine.submit(
                [
                    Request(b"bad", bad[0], want=want),
                    Request(b"good", given[0], want=want),
                ]
            )
            outcomes = drain(engine)
            more = [extended(p, 7) for p in bad]  # from what is live
            again = answer(engine, [*more, *given])
        finally:
            hook.remove()
        failed = [outcomes[b"%d" % i] for i in range(20)] + [outcomes[b"bad"]] + again[:20]
        assert all(isinstance(o.error, PromptFailed) for o in failed)
        assert all("not finite" in str(o.error) for o in failed)
        assert_rows([outcomes[b"%d" % i] for i in range(20, 60)], reference.rows(given))
        assert_rows(again[20:], reference.rows(given))
        assert len(drawn(outcomes[b"good"])) == 5
        # What the bad prompts had of the KV cache is others' now.
        engine.clear_cache()
        given = prompts(300, 300, seed=42)
        assert_rows(answer(engine, given), reference.rows(given))
        assert_nothing_left(engine)

    def test_adapters_need_an_option(self, engine, tmp_path):
        with pytest.raises(AdapterError, match="enable_lora"):
            engine.add_adapter("a", str(tmp_path))


def test_rows_of_a_bfloat16_model_are_the_bits_of_its_logits(reference):
    given = prompts(30, 60, seed=10)
    with vllm_engine(dtype="bfloat16", max_num_seqs=64) as engine:
        assert engine.info.encoding == "bf16"
        assert engine.info.identity == identity("bfloat16")
        outcomes = answer(engine, given)
        assert all(o.row.dtype == np.uint16 for o in outcomes)
        rows = np.stack([o.logprobs() for o in outcomes])
        assert np.abs(np.logaddexp.reduce(rows.astype(np.float64), axis=1)).max() < 1e-4
        assert np.abs(rows - reference.rows(given)).max() < 0.3
        assert_nothing_left(engine)


def test_without_capture_rows_come_through_logprobs(reference, caplog, tmp_path):
    given = prompts(40, 60, seed=11)
    options = {"capture": False, "model": spoiled_model(tmp_path / "spoiled", token=1)}
    with caplog.at_level(logging.WARNING, logger="lmpool"), vllm_engine(**options) as engine:
        assert "logprobs=-1" in caplog.text
        assert_rows(answer(engine, given), reference.rows(given))
        engine.submit(requests_of(given))
        engine.cancel([b"%d" % i for i in range(0, 40, 2)])
        assert len(drain(engine)) == 20
        want = Generate(5, (1,), 1.0, 0)
        good, spoiled = answer(engine, [given[0], extended(given[0], 1)], want=want)
        assert good.error is None
        assert "not finite" in str(spoiled.error)
        assert_nothing_left(engine)


def test_a_runner_without_a_place_for_capture_is_used_through_logprobs(
    reference, caplog, monkeypatch
):
    monkeypatch.setattr(internals, "find_capture", lambda runner: None)
    given = prompts(10, 30, seed=12)
    with caplog.at_level(logging.WARNING, logger="lmpool"), vllm_engine() as engine:
        assert "has no place" in caplog.text
        assert_rows(answer(engine, given), reference.rows(given))


def test_engines_in_one_process_live_and_end_on_their_own(reference):
    given = prompts(20, 40, seed=15)
    with vllm_engine(max_num_seqs=8) as first, vllm_engine() as second:
        assert_rows(answer(second, given), reference.rows(given))
        first.close()
        more = [extended(p, 4) for p in given]
        assert_rows(answer(second, more), reference.rows(more))
        assert_nothing_left(second)


def test_an_engine_in_another_process(reference, tmp_path):
    given = prompts(300, 60, seed=13)
    particles = [extended(p, 4) for p in given[-20:]]
    want = Generate(max_tokens=5, eos_token_ids=(1,), temperature=0.8, seed=1)
    model = spoiled_model(tmp_path / "spoiled", token=1)
    adapter = write_adapter(tmp_path / "style", 5)
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    own = {"own_process": True, "spawned": True}
    with vllm_engine() as beside, vllm_engine(model=model, **own, **lora) as engine:
        assert_rows(answer(beside, given[:1]), reference.rows(given[:1]))
        assert_rows(answer(engine, given), reference.rows(given))
        assert_rows(answer(engine, particles), reference.rows(particles))
        engine.submit(requests_of(given, want=want))
        engine.cancel([b"%d" % i for i in range(0, 300, 2)])
        sampled = drain(engine)
        assert len(sampled) == 150
        assert {len(drawn(o)) for o in sampled.values()} <= {0, 1, 2, 3, 4, 5}
        # Where a prompt's row is NaN, it fails alone, and leaves none to those after it.
        bad = [extended(p, 1, 5) for p in given[:40]]
        engine.submit([*requests_of(bad), *requests_of(bad, 40, want=want)])
        failed = drain(engine).values()
        assert len(failed) == 80
        assert all("not finite" in str(outcome.error) for outcome in failed)
        engine.clear_cache()
        assert_rows(answer(engine, given), reference.rows(given))
        with pytest.raises(EngineBroken, match="another process"):
            engine.underlying_model  # noqa: B018

        engine.submit(requests_of(given))
        engine.step()
        cores = [p for p in psutil.Process().children() if "EngineCore" in " ".join(p.cmdline())]
        assert cores, [p.cmdline() for p in psutil.Process().children()]
        for core in cores:
            core.kill()
        killed = (
            rf"failed: its process {cores[0].pid} \(EngineCore.*was killed by signal 9 \(Killed"
        )
        with pytest.raises(EngineBroken, match=killed):
            drain(engine)
        for use in (
            lambda: engine.submit(requests_of(given[:1], 1000)),
            # Some may have been answered before the end.
            lambda: engine.cancel([b"%d" % i for i in range(300)]),
            lambda: engine.add_adapter("style", adapter),
        ):
            with pytest.raises(EngineBroken, match=killed):
                use()


class TestOwnVLLM:
    """An ``LLM`` of a user's own, in this process, with the entry point and named ones besides."""

    @pytest.fixture(scope="class")
    def llm(self) -> Iterator[Any]:
        with own_llm(
            worker_extension_cls=WORKER_EXTENSION,
            logits_processors=[CaptureProcessor, CAPTURE_PROCESSOR],
        ) as made:
            yield made

    def captures(self, llm: Any) -> list[CaptureProcessor]:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        loaded = runner.input_batch.logitsprocs.all
        return [each for each in loaded if isinstance(each, CaptureProcessor)]

    def generate(self, llm: Any, given: Sequence[np.ndarray], params: Sequence[Any]) -> list[Any]:
        asked = [{"prompt_token_ids": p.tolist()} for p in given]
        return llm.generate(asked, params, use_tqdm=False)

    def stranger(self, **options: Any) -> Any:
        """As an HTTP client's ``vllm_xargs`` are."""
        return SamplingParams(
            max_tokens=1, detokenize=False, **{"extra_args": {CAPTURE: "0"}, **options}
        )

    def test_captures_what_is_its_owners_and_nothing_else(self, llm, reference):
        given = prompts(20, 40, seed=14)
        plain = SamplingParams(max_tokens=1, detokenize=False)
        self.generate(llm, given[:2], [self.stranger(), plain])
        assert [len(each.rows) for each in self.captures(llm)] == [0, 0, 0]
        with OwnRows(llm) as own:
            params = [
                own.params(i, temperature=0.7) if i % 2 else self.stranger() for i in range(20)
            ]
            self.generate(llm, given, params)
            assert [len(each.rows) for each in self.captures(llm)] == [10, 0, 0]
            found = own.take(range(20))
            assert own.take(range(20)) == {}
        assert sorted(found) == list(range(1, 20, 2))
        rows = np.stack([found[i] for i in range(1, 20, 2)])
        assert np.abs(rows - reference.rows(given[1::2])).max() <= 5e-5
        self.generate(llm, given[:1], params[1:2])
        assert [each.rows.nbytes for each in self.captures(llm)] == [0, 0, 0]

    def test_a_token_is_drawn_as_without_capture(self, llm):
        given = prompts(8, 40, seed=18)
        plain = SamplingParams(max_tokens=4, temperature=0.0, detokenize=False)
        with OwnRows(llm) as own:
            asked = [own.params(i, max_tokens=4) for i in range(8)]
            captured, expected = (self.generate(llm, given, p) for p in (asked, [plain] * 8))
        tokens = [[out.outputs[0].token_ids for out in outs] for outs in (captured, expected)]
        assert tokens[0] == tokens[1]

    def test_refuses_what_would_change_a_row_and_goes_on(self, llm, reference):
        (given,) = prompts(1, 40, seed=16)
        with OwnRows(llm) as own:
            for option in ({"logit_bias": {7: 5.0}}, {"allowed_token_ids": [7, 9]}):
                with pytest.raises(VLLMValidationError, match=f"with {next(iter(option))}="):
                    self.generate(llm, [given], [own.params(1, **option)])
            self.generate(llm, [given], [own.params(2)])
            assert np.abs(own.take([1, 2])[2] - reference.rows([given])).max() <= 5e-5

    def test_two_owners_take_turns(self, llm):
        given = prompts(2, 40, seed=17)
        with OwnRows(llm) as first, OwnRows(llm) as second:
            self.generate(llm, given, [first.params(1), second.params(1)])
            assert list(second.take([1])) == [1]
            assert first.take([1]) == {}

    def test_says_what_it_computes_otherwise(self, llm, monkeypatch, caplog):
        with caplog.at_level(logging.WARNING, logger="lmpool"):
            OwnRows(llm).close()
            assert logged.messages(caplog) == []
            config = llm.llm_engine.vllm_config.model_config.hf_text_config
            monkeypatch.setattr(config, "sliding_window", 7, raising=False)
            OwnRows(llm).close()
        assert "sliding_window=7 would have to be None: start it with hf_overrides" in caplog.text

    def test_without_the_extension_says_what_to_write(self, llm, monkeypatch):
        monkeypatch.delattr(CapturedRows, "lmpool_attach")
        with pytest.raises(SettingsError, match="started with worker_extension_cls='lmpool"):
            OwnRows(llm)


def test_a_failure_without_words_is_told_by_its_line():
    def fail():
        raise AssertionError

    def wrap():
        try:
            fail()
        except AssertionError as error:
            raise RuntimeError("the engine core failed") from error

    with pytest.raises(RuntimeError) as wrapped:
        wrap()
    said = internals.root_cause(wrapped.value)
    assert said.startswith("AssertionError without words, of 'raise AssertionError' (")


def test_an_own_vllm_that_decodes_speculatively_is_refused():
    draft = {"model": tiny.path(), "num_speculative_tokens": 2}
    with (
        own_llm(worker_extension_cls=WORKER_EXTENSION, speculative_config=draft) as llm,
        pytest.raises(SettingsError, match=r"speculatively.*start it without speculative_config"),
    ):
        OwnRows(llm)


def test_an_engine_whose_model_brings_a_draft_model_does_not_start(monkeypatch):
    """As a model in the format of "speculators" does: no option tells."""
    make = internals.make_engine

    def with_draft(arguments: Any, **options: Any) -> Any:
        arguments.speculative_config = {"model": tiny.path(), "num_speculative_tokens": 2}
        return make(arguments, **options)

    monkeypatch.setattr(internals, "make_engine", with_draft)
    with pytest.raises(SettingsError, match="start it without speculative_config"):
        load_engine("vllm", "tiny", **QUICK)


@contextmanager
def own_llm(**options: Any) -> Iterator[Any]:
    from vllm import LLM

    chosen = {"dtype": "float32", "skip_tokenizer_init": True, **QUICK, **options}
    with patch.dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0"):
        llm = LLM(tiny.path(), **chosen)
    try:
        yield llm
    finally:
        internals.shut_down(llm.llm_engine)


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"max_model_len": 100}, "max_prompt_tokens"),
            ({"speculative_config": {}}, "no row can be captured"),
            ({"spec_method": "ngram"}, "no row can be captured"),
            ({"spec_tokens": 3}, "no row can be captured"),
            ({"spec_model": "tiny"}, "no row can be captured"),
            ({"logits_processors": ["x:Y"]}, "another would change them"),
            ({"data_parallel_size": 2}, "start that many workers"),
            ({"hf_config_path": "elsewhere"}, "copy of the model's folder with that config.json"),
            ({"max_num_seq": 3}, "did you mean 'max_num_seqs'"),
            ({"live_prompts": -1}, "live_prompts=-1"),
            ({"own_process": "no"}, "own_process='no'"),
            ({"max_cpu_loras": 4}, "until they are removed"),
            ({"enable_lora": "yes"}, "enable_lora='yes': bool expected"),
            ({"trust_remote_code": "yes"}, "trust_remote_code='yes': bool expected"),
            ({"gpu_memory_utilization": "all"}, "gpu_memory_utilization='all': float"),
            ({"max_prompt_tokens": 0}, "max_prompt_tokens=0"),
            ({"max_prompt_tokens": 4000}, "max_model_len"),
            ({"dtype": "int3"}, "dtype"),
            ({"kv_cache_memory_bytes": 3072 * 64}, "cache blocks"),
        ],
    )
    def test_that_cannot_be_used_are_refused_with_the_reason(self, options, words):
        with pytest.raises(SettingsError, match=words):
            load_engine("vllm", "tiny", **{**QUICK, **options})

    @pytest.mark.parametrize("found", ["0.31.4", "0.33.0", "1.0"])
    def test_a_version_that_is_not_known_is_refused(self, found, monkeypatch):
        monkeypatch.setattr(internals, "version", lambda name: found)
        with pytest.raises(SettingsError, match=rf"vLLM {found} is installed.*0\.32"):
            internals.check_version()
