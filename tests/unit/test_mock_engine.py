from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.backends import Outcome, Request
from lmpool.backends.mock import MockEngine, mock_row
from lmpool.backends.sampling import sample_token
from lmpool.backends.vocabulary import byte_vocabulary
from lmpool.errors import EngineBroken, PromptFailed, SettingsError
from lmpool.producer.tokens import load_tokenizer, string_tokens
from lmpool.vocabulary import Vocabulary
from lmpool.wants import Generate, Generation, Top, TopLogprobs
from tests.support.engines import drawn
from tests.support.parts import info_of


def request_of(tokens: Sequence[int], id: bytes = b"r", **options: Any) -> Request:
    return Request(id, np.array(tokens, dtype=np.uint32), **options)


def numbered(prompts: Sequence[Sequence[int]]) -> list[Request]:
    return [request_of(p, str(i).encode()) for i, p in enumerate(prompts)]


def run(engine: MockEngine, requests: Sequence[Request]) -> list[Outcome]:
    """The outcomes in the order of the requests, each of which must get exactly one."""
    engine.submit(requests)
    outcomes: dict[bytes, Outcome] = {}
    while engine.in_flight():
        for outcome in engine.step():
            assert outcome.id not in outcomes
            outcomes[outcome.id] = outcome
    return [outcomes[r.id] for r in requests]


PROMPTS = st.lists(st.integers(0, 255), min_size=1, max_size=40)


@given(prompts=st.lists(PROMPTS, min_size=1, max_size=8))
def test_every_prompt_gets_its_own_row(prompts: list[list[int]]) -> None:
    for prompt, outcome in zip(prompts, run(MockEngine(), numbered(prompts)), strict=True):
        assert np.array_equal(outcome.logprobs(), mock_row(prompt, 256))


@pytest.mark.parametrize("vocab_size", [2, 256, 1000, 65_536, 3_000_000])
def test_rows_are_normalized_and_read_only(vocab_size: int) -> None:
    row = mock_row([1, 0, 1], vocab_size)
    assert row.shape == (vocab_size,)
    assert row.dtype == np.float32
    assert abs(np.exp(row.astype(np.float64)).sum() - 1) < 1e-6
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 0.0


def test_rows_are_the_same_in_every_release_and_on_every_machine() -> None:
    row = mock_row([3, 1, 4, 1, 5], 256)
    assert row[:4].tolist() == pytest.approx(
        [-5.980454, -8.039178, -11.288774, -9.236344], abs=1e-6
    )
    assert np.argmax(row) == 245


def test_rows_differ_by_prompt_order_length_and_adapter() -> None:
    prompts = [[1, 2], [2, 1], [1, 2, 0], [0, 1, 2], [1], [2]]
    rows = [mock_row(p, 256).tobytes() for p in prompts]
    rows += [mock_row([1, 2], 256, adapter).tobytes() for adapter in ("a", "b", "a\0b")]
    assert len(set(rows)) == len(rows)


def test_numpy_prompts_of_any_integer_type_have_the_same_row() -> None:
    expected = mock_row([1, 2, 3], 256)
    for dtype in (np.int64, np.uint32, np.int32):
        assert np.array_equal(mock_row(np.array([1, 2, 3], dtype), 256), expected)


@pytest.mark.parametrize("bad", [[], [1] * 9, [256], [3, 2**32 - 1]])
def test_a_prompt_that_cannot_be_run_fails_alone(bad: list[int]) -> None:
    good = [[1], [2, 3], [5] * 8]
    outcomes = run(MockEngine(max_prompt_tokens=8), numbered([*good, bad]))
    assert isinstance(outcomes[3].error, PromptFailed)
    for prompt, outcome in zip(good, outcomes[:3], strict=True):
        assert np.array_equal(outcome.logprobs(), mock_row(prompt, 256))


@given(prompts=st.lists(PROMPTS, min_size=1, max_size=20), fail_token=st.integers(0, 255))
def test_prompts_with_the_failing_token_fail_and_no_others(
    prompts: list[list[int]], fail_token: int
) -> None:
    outcomes = run(MockEngine(fail_token=fail_token), numbered(prompts))
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        if fail_token in prompt:
            assert isinstance(outcome.error, PromptFailed)
            assert f"the token {fail_token}" in str(outcome.error)
        else:
            assert np.array_equal(outcome.logprobs(), mock_row(prompt, 256))


def test_the_breaking_token_breaks_the_engine() -> None:
    engine = MockEngine(break_token=9)
    engine.submit(numbered([[1], [2, 9]]))
    with pytest.raises(EngineBroken, match="the token 9"):
        engine.step()


def test_adapters_change_rows_and_unknown_ones_fail() -> None:
    engine = MockEngine()
    engine.add_adapter("french", "/anywhere")
    requests = [
        request_of([1, 2], b"base"),
        request_of([1, 2], b"french", adapter="french"),
        request_of([1, 2], b"german", adapter="german"),
    ]
    base, french, german = run(engine, requests)
    assert np.array_equal(base.logprobs(), mock_row([1, 2], 256))
    assert np.array_equal(french.logprobs(), mock_row([1, 2], 256, "french"))
    assert "no adapter named 'german'" in str(german.error)
    engine.remove_adapter("french")
    engine.remove_adapter("french")
    assert run(engine, requests[1:2])[0].error is not None


def follow(prompt: Sequence[int], want: Generate, longest: int = 4096) -> list[int]:
    """The continuation, one row at a time."""
    tokens = list(prompt)
    for step in range(want.max_tokens):
        if len(tokens) > longest:
            break
        row = mock_row(tokens, 256)
        token = sample_token(row, want.temperature, want.seed, step)
        tokens.append(token)
        if token in want.eos_token_ids:
            break
    return tokens[len(prompt) :]


@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=6),
    max_tokens=st.integers(0, 20),
    eos=st.sets(st.integers(0, 255), max_size=40),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    seed=st.integers(0, 2**63),
)
def test_continuations_in_company_are_what_their_rows_say_alone(
    prompts: list[list[int]], max_tokens: int, eos: set[int], temperature: float, seed: int
) -> None:
    want = Generate(max_tokens, tuple(eos), temperature, seed)
    requests = [request_of(p, b"s%d" % i, want=want) for i, p in enumerate(prompts)]
    outcomes = run(MockEngine(), [*numbered(prompts), *requests])
    for prompt, row, continued in zip(prompts, outcomes, outcomes[len(prompts) :], strict=False):
        assert np.array_equal(row.logprobs(), mock_row(prompt, 256))
        assert drawn(continued) == follow(prompt, want)


def test_a_continuation_ends_at_the_longest_prompt() -> None:
    want = Generate(100, (), 0.0, 0)
    (outcome,) = run(MockEngine(max_prompt_tokens=8), [request_of([1] * 5, want=want)])
    assert drawn(outcome) == follow([1] * 5, want, longest=8)
    assert len(drawn(outcome)) == 4


def test_rows_do_not_wait_for_continuations() -> None:
    engine = MockEngine()
    long = request_of([1], b"long", want=Generate(1000, (), 1.0, 0))
    engine.submit([long, request_of([2], b"row")])
    assert [o.id for o in engine.step()] == [b"row"]
    engine.submit([request_of([3], b"later")])
    assert [o.id for o in engine.step()] == [b"later"]
    assert engine.in_flight() == 1
    engine.cancel([b"long", b"unknown"])
    assert engine.in_flight() == 0
    assert engine.step() == []


def test_a_continuation_whose_adapter_was_removed_fails_alone() -> None:
    engine = MockEngine()
    engine.add_adapter("french", "/anywhere")
    want = Generate(max_tokens=5, eos_token_ids=(), temperature=1.0, seed=1)
    engine.submit(
        [
            Request(b"french", np.array([1], np.uint32), "french", want),
            Request(b"plain", np.array([1], np.uint32), None, want),
        ]
    )
    engine.step()
    engine.remove_adapter("french")
    outcomes: dict[bytes, Outcome] = {}
    while engine.in_flight():
        outcomes |= {outcome.id: outcome for outcome in engine.step()}
    assert "the adapter 'french' was removed" in str(outcomes[b"french"].error)
    assert isinstance(outcomes[b"plain"].answer, Generation)


@pytest.mark.parametrize("going", ["replaced", "removed"])
def test_requests_in_flight_never_go_on_by_an_adapter_that_came_later(going: str) -> None:
    engine = MockEngine()
    engine.add_adapter("french", "/anywhere")
    want = Generate(max_tokens=5, eos_token_ids=(), temperature=1.0, seed=1)
    tokens = np.array([1], np.uint32)
    plain = Request(b"plain", tokens, None, want)
    engine.submit([Request(b"drawn", tokens, "french", want), plain])
    engine.step()
    engine.submit([Request(b"row", tokens, "french"), Request(b"cancelled", tokens, "french")])
    if going == "replaced":
        engine.finish_adapter("french")
    else:
        engine.remove_adapter("french")
    engine.add_adapter("french", "/elsewhere")
    assert engine.in_flight() == 4
    engine.cancel([b"cancelled"])
    assert engine.in_flight() == 3
    engine.submit([Request(b"later", tokens, "french")])
    outcomes: dict[bytes, Outcome] = {}
    while engine.in_flight():
        outcomes |= {outcome.id: outcome for outcome in engine.step()}
    assert outcomes.keys() == {b"drawn", b"row", b"plain", b"later"}
    assert isinstance(outcomes[b"plain"].answer, Generation)
    assert outcomes[b"later"].row is not None
    for before in (b"drawn", b"row"):
        assert (outcomes[before].error is None) == (going == "replaced")


def test_cancelled_requests_are_not_run(tmp_path: Path) -> None:
    engine = MockEngine(log=tmp_path / "log")
    engine.submit(numbered([[1], [2], [3]]))
    engine.cancel([b"0", b"2"])
    assert [o.id for o in engine.step()] == [b"1"]
    assert [batch["size"] for batch in batches(tmp_path / "log")] == [1]


@pytest.mark.parametrize("token", [3, 4])
def test_a_continuation_that_fails_does_not_take_others_along(token: int) -> None:
    prompts = [[i] for i in range(20)]
    want = Generate(20, (), 1.0, 5)
    requests = [request_of(p, str(p[0]).encode(), want=want) for p in prompts]
    outcomes = run(MockEngine(fail_token=token), requests)
    failed = 0
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        expected = follow(prompt, want)
        if token in [*prompt, *expected[:-1]]:
            failed += 1
            assert isinstance(outcome.error, PromptFailed)
        else:
            assert drawn(outcome) == expected
    assert 0 < failed < len(prompts)


def test_a_bad_temperature_fails_alone() -> None:
    want = Generate(3, (), float("nan"), 0)
    bad, good = run(MockEngine(), [request_of([1], b"bad", want=want), *numbered([[2]])])
    assert "temperature=nan" in str(bad.error)
    assert good.error is None


def batches(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_the_log_has_a_line_a_batch_and_the_delay_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "batches.jsonl"
    engine = MockEngine(delay=0.01, delay_per_token=0.001, log=log)
    run(engine, numbered([[1, 2], [3, 4, 5]]))
    run(engine, numbered([[6]]))
    first, second = batches(log)
    assert (first["size"], first["tokens"]) == (2, 5)
    assert (second["size"], second["tokens"]) == (1, 1)
    assert first["end"] - first["start"] >= 0.015
    assert second["start"] >= first["end"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"vocab_size": 1}, "vocab_size=1: an integer from 2"),
        ({"vocab_size": "256"}, "vocab_size='256'"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens=0"),
        ({"delay": -0.1}, "delay=-0.1: seconds from 0"),
        ({"delay": float("nan")}, "delay=nan"),
        ({"delay_per_token": True}, "delay_per_token=True"),
        ({"fail_token": 256}, "fail_token=256: an integer from 0 to 255"),
        ({"break_token": -1}, "break_token=-1"),
        ({"log": "/nowhere/at/all"}, "create the folder '/nowhere/at'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        MockEngine(**options)


def test_what_it_says_of_itself() -> None:
    info = MockEngine("anything", vocab_size=300, dtype="bfloat16").info
    assert (info.engine, info.model, info.vocab_size) == ("mock", "anything", 300)
    assert (info.bos_token_id, info.eos_token_ids) == (0, (299,))
    assert (info.dtype, info.encoding) == ("float32", "f32")
    assert info.identity == MockEngine("another", vocab_size=300).info.identity
    assert info.identity != MockEngine("anything").info.identity


def test_the_byte_vocabulary_has_each_byte_once() -> None:
    vocabulary = MockEngine(vocab_size=300).byte_vocabulary()
    assert vocabulary[:256] == [bytes([i]) for i in range(256)]
    assert len(set(vocabulary)) == 300


@pytest.mark.parametrize("vocab_size", [2, 256, 300])
def test_its_tokenizer_spells_every_token(vocab_size: int) -> None:
    pytest.importorskip("transformers")
    engine = MockEngine(vocab_size=vocab_size)
    published = Vocabulary(engine.byte_vocabulary(), engine.tokenizer_files())
    tokenizer = load_tokenizer(Vocabulary.unpack(published.pack()), info_of())
    strings = string_tokens(published.tokens, tokenizer)
    assert len(strings) == vocab_size
    if vocab_size > 256:
        text = "Über 1 Tag\n"
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
        assert (strings[65], strings[299]) == ("A", "<299>")
        assert byte_vocabulary(tokenizer) == engine.byte_vocabulary()


@pytest.mark.parametrize("vocab_size", [2, 3, 64, 2_000, 128_256])
def test_the_likeliest_tokens_are_known_without_looking_at_the_row(vocab_size: int) -> None:
    engine = MockEngine(vocab_size=vocab_size)
    engine.add_adapter("x@1", "/nowhere")
    asked = {
        f"{prompt} {k}".encode(): (prompt, k)
        for prompt in ([1], [0, 1, 1], [1, 0], [1, 1, 1], [0])
        for k in sorted({1, 2, vocab_size // 2 + 1, vocab_size - 1 or 1, vocab_size})
    }
    engine.submit(
        [Request(i, np.array(p, np.uint32), "x@1", Top(k)) for i, (p, k) in asked.items()]
    )
    outcomes = engine.step()
    assert sorted(outcome.id for outcome in outcomes) == sorted(asked)
    for outcome in outcomes:
        prompt, k = asked[outcome.id]
        expected = Top(k).of_row(mock_row(prompt, vocab_size, "x@1"))
        found = outcome.answer
        assert isinstance(found, TopLogprobs)
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        np.testing.assert_array_equal(found.logprobs, expected.logprobs)
        np.testing.assert_allclose(found.rest, expected.rest, atol=2e-6)


# --- what it pretends to keep ---------------------------------------------------------------------


def computed(engine: MockEngine, *prompts: Sequence[int]) -> int:
    before = engine.measures().computed_tokens or 0
    run(engine, numbered(prompts))
    return (engine.measures().computed_tokens or 0) - before


def test_blocks_that_prompts_begin_with_are_computed_once() -> None:
    engine, beginning = MockEngine(keeps=1000), list(range(40))
    assert computed(engine, [*beginning, 1]) == 41
    # Two blocks of 16 are whole.
    assert computed(engine, [*beginning, 2], [*beginning, 3]) == 2 * (41 - 32)
    assert computed(engine, beginning[1:]) == 39
    assert computed(engine, [*beginning, 1]) == 41 - 32
    # One token at least is computed of what is kept whole.
    assert [computed(engine, beginning[:32]) for _ in range(2)] == [1, 1]
    engine.clear_cache()
    assert computed(engine, beginning) == 40
    assert computed(MockEngine(), beginning, beginning) == 80


def test_an_adapters_states_are_its_own() -> None:
    engine = MockEngine(keeps=1000)
    engine.add_adapter("a", "")
    prompt = list(range(32))
    assert computed(engine, prompt) == 32
    run(engine, [request_of(prompt, adapter="a")])
    assert engine.measures().computed_tokens == 64


def test_the_latest_used_stay_where_there_is_no_room() -> None:
    engine = MockEngine(keeps=64)
    prompts = [[n] * 32 for n in range(3)]
    assert computed(engine, *prompts[:2]) == 64
    assert computed(engine, prompts[0]) == 1
    assert computed(engine, prompts[2]) == 32  # in the place of the second
    found = engine.measures()
    assert (found.kept_states, found.room, found.evicted_states) == (64, 64, 32)
    assert computed(engine, prompts[0]) == 1
    assert computed(engine, prompts[1]) == 32


def test_computing_less_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    engine = MockEngine(keeps=1000, delay_per_token=0.5)
    for _ in range(2):
        run(engine, [request_of(range(40))])
    assert slept == [20.0, 4.0]
