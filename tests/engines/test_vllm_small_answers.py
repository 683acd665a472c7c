"""What the vLLM engine reduces inside its model runner, beside what NumPy makes of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmpool.backends import Outcome, Request
from lmpool.backends.contract import Reference, ask
from lmpool.wants import Draw, Generate, Hidden, OfRow, Row, Score, Stream, Tokens, Top
from tests.support.engines import requests_of
from tests.support.hf_texts import logits_by
from tests.support.scores import log_softmax
from tests.support.small_answers import compare, random_wants
from tests.support.vllm_engine import (
    VOCAB,
    Watched,
    assert_nothing_left,
    need_vllm,
    prompts,
    reducing_engine,
    scheduler,
    spoiled_model,
    vllm_engine,
    write_adapter,
)

need_vllm()

from lmpool.backends.vllm import internals, row_store  # noqa: E402
from lmpool.backends.vllm.rows import reducible  # noqa: E402

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),
]

SMALL: Sequence[OfRow[Any]] = [
    Top(3), Tokens(b"\1\0\0\0\7\0\0\0"), Draw(2, 1), Draw(2, 1, 1.0, False), Draw(1, 1, 0.0),
]  # fmt: skip


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.of("tiny")


@contextmanager
def kept(engine: Any) -> Iterator[list[tuple[str, int]]]:
    """What the sampler leaves while this runs: the dtype of what it copies, and bytes of each."""
    found: list[tuple[str, int]] = []
    read = row_store.HostCopy.read

    def reading(copy: Any) -> Any:
        arrays = read(copy)
        found.extend((array.dtype.str, array[0].nbytes) for array in arrays[:1])
        return arrays

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_store.HostCopy, "read", reading)
        yield found


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"own_process": True}, {"capture": False}], ids=str
)
def test_wants_of_all_kinds_in_one_batch(options: dict[str, Any], tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    # Rows of bfloat16 are not the same in other company.
    within = 0.2 if "dtype" in options else 2e-4
    with reducing_engine(max_num_seqs=64, **lora, **options) as engine:
        engine.add_adapter("fr", write_adapter(tmp_path / "adapter", 1))
        for _ in range(3):
            given = prompts(4, 60, seed=int(random.integers(99)))
            drawn: list[Any] = random_wants(random, VOCAB, 40)
            if "dtype" in options:  # what is drawn may differ where rows do
                drawn = [want for want in drawn if not isinstance(want, Draw | Top)]
            wants = [*drawn, Row(), Row(), Row(), Score(), Score(2), Generate(4, (), 1.0, 1)]
            asked = [
                Request(b"%d" % n, given[n % 4], (None, "fr")[n // 4 % 2], want)
                for n, want in enumerate(wants)
                if not isinstance(want, Score) or given[n % 4].size > 2
            ]
            rows = [Request(r.id, r.tokens, r.adapter, Row()) for r in asked]
            for request, one, row in zip(asked, ask(engine, asked), ask(engine, rows), strict=True):
                if isinstance(request.want, OfRow):
                    compare(one, row.logprobs(), request.want, within)
                elif isinstance(request.want, Row):
                    assert np.allclose(one.logprobs(), row.logprobs(), atol=within)
                else:
                    assert one.error is None
        if "own_process" not in options:
            assert_nothing_left(engine)


def test_rows_stay_where_they_are() -> None:
    (prompt,) = prompts(1, 20)
    with reducing_engine() as engine, kept(engine) as copied:
        asked = [Request(b"%d" % n, prompt, None, want) for n, want in enumerate(SMALL)]
        ask(engine, asked)
        assert {kind for kind, _ in copied} == {"<i4"}
        assert max(size for _, size in copied) == 4 * (3 * 2 + 2)
        copied.clear()
        ask(engine, [*asked, Request(b"row", prompt)])
        assert sorted(copied)[:1] == [("<f4", 4 * VOCAB)]
        assert [kind for kind, _ in copied].count("<f4") == 1
        copied.clear()
        # Less than half a row is less than the row of a model in bfloat16.
        most = VOCAB // 4
        ask(engine, [Request(b"%d" % k, prompt, None, Top(k)) for k in (most - 1, most)])
        assert sorted(copied) == [("<f4", 4 * VOCAB), ("<i4", 4 * (2 * most - 1))]
        copied.clear()
        want = Generate(5, (), 0.8, 1, logprobs=True, top_logprobs=3)
        ask(engine, [Request(b"drawn", prompt, None, want)])
        assert [(kind, size) for kind, size in copied if kind == "<i4"] == [("<i4", 4 * 7)] * 5
        # The others are the largest logits of watched requests.
        assert {size for kind, size in copied if kind == "<f4"} == {4}
        assert_nothing_left(engine)


def test_on_a_cpu_rows_are_reduced_beside_the_engine() -> None:
    (prompt,) = prompts(1, 20)
    with vllm_engine() as engine, kept(engine) as copied:
        ask(engine, [Request(b"%d" % n, prompt, None, want) for n, want in enumerate(SMALL)])
        assert {kind for kind, _ in copied} == {"<f4"}


def test_small_answers_keep_prompts_live_as_rows_do() -> None:
    (prompt,) = prompts(1, 1, shared=200)
    with reducing_engine() as engine:
        for step in range(6):
            with Watched(engine) as seen:
                (outcome,) = ask(engine, [Request(b"0", prompt, None, Top(3))])
            (row,) = ask(engine, [Request(b"0", prompt)])
            compare(outcome, row.logprobs(), Top(3), 1e-4)
            assert sum(seen.tokens) == (1 if step else prompt.size)
            prompt = np.append(prompt, np.uint32(7 + step))
        assert_nothing_left(engine)


def test_logits_that_make_no_row_fail_alone(tmp_path: Path) -> None:
    with reducing_engine(model=spoiled_model(tmp_path / "spoiled", 7)) as engine:
        for want in (*SMALL, Generate(3, (), 1.0, 1, top_logprobs=2)):
            for _ in range(2):
                given = [[5, 9], [7], [5, 7], [3]]
                outcomes = ask(engine, requests_of(given, want=want))
                assert [o.error is None for o in outcomes] == [True, False, False, True]
                assert all("not finite" in str(o.error) for o in outcomes if o.error is not None)
        assert_nothing_left(engine)


def test_too_few_that_may_be_drawn_fail_alone() -> None:
    with reducing_engine() as engine:
        rare, common = (
            Draw(2, 1, 1.0, False, ids).checked(_info(engine)) for ids in ([5, 6], None)
        )
        (prompt,) = prompts(1, 20)
        model = engine.underlying_model
        compute = model.compute_logits

        def masked(*given: Any, **named: Any) -> Any:
            logits = compute(*given, **named)
            logits[:, 5] = -np.inf
            return logits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "compute_logits", masked)
            asked = [Request(b"%d" % n, prompt, None, w) for n, w in enumerate((rare, common))]
            few, some = ask(engine, asked)
        assert str(few.error) == "1 of the tokens that may be drawn have a probability"
        assert 5 not in some.answer.token_ids
        assert_nothing_left(engine)


def _info(engine: Any) -> Any:
    return engine.info  # has all that a check looks at


class TestSteps:
    """The likeliest tokens at each step of a continuation."""

    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[Any]:
        with vllm_engine(max_num_seqs=24) as made:  # whatever the device
            yield made

    def check(
        self, reference: Reference, request: Request, outcome: Outcome, within: float = 1e-4
    ) -> None:
        assert outcome.error is None, outcome.error
        want, found = request.want, outcome.answer
        assert isinstance(want, Generate)
        drawn = found.token_ids.tolist()
        text = np.append(request.tokens, np.array(drawn, np.uint32))  # one pass has all the rows
        logits = logits_by(reference.model, text)[request.tokens.size - 1 :]
        rows = log_softmax(logits).astype(np.float32)
        if want.logprobs:
            right = rows[np.arange(len(drawn)), drawn]
            np.testing.assert_allclose(found.logprobs, right, atol=within)
        if not want.top_logprobs:
            assert found.top_logprobs is None
            return
        top = found.top_logprobs
        assert top.token_ids.shape == (len(drawn), want.top_logprobs)
        for ids, logprobs, rest, row in zip(
            top.token_ids, top.logprobs, top.rest, rows, strict=True
        ):
            right = Top(want.top_logprobs).of_row(row)
            np.testing.assert_allclose(logprobs, right.logprobs, atol=within)
            np.testing.assert_allclose(row[ids], logprobs, atol=within)
            assert rest == pytest.approx(right.rest, abs=10 * within)

    def wants(self, random: npt.Any, count: int) -> list[Generate]:
        return [
            Generate(
                int(random.integers(1, 20)),
                (),
                float(random.choice([0.0, 0.7, 1.5])),
                int(random.integers(99)),
                logprobs=bool(random.random() < 0.5),
                top_logprobs=int(random.choice([0, 1, 3, 20, VOCAB // 2])),
            )
            for _ in range(count)
        ]

    def test_are_their_own_in_any_company(self, engine, reference):
        random = np.random.default_rng(1)
        given = prompts(30, 40, seed=5)
        others: list[Any] = [Row(), Top(2), Hidden(), Score(), *random_wants(random, VOCAB, 9)]
        for _ in range(2):
            asked = [
                Request(b"%d" % n, prompt, None, want)
                for n, (prompt, want) in enumerate(zip(given, self.wants(random, 30), strict=True))
            ]
            more = [Request(b"m%d" % n, given[n], None, w) for n, w in enumerate(others)]
            outcomes = {outcome.id: outcome for outcome in ask(engine, [*more, *asked])}
            for request in asked:
                self.check(reference, request, outcomes[request.id])
            assert all(outcomes[request.id].error is None for request in more)
        assert_nothing_left(engine)

    def test_of_those_that_are_cancelled_or_stopped_nothing_is_left(self, engine, reference):
        given = prompts(12, 30, seed=6)
        want = Generate(40, (), 0.9, 3, top_logprobs=4)
        asked = requests_of(given, want=want)
        engine.submit(asked)
        for _ in range(5):
            engine.step()
        engine.cancel([request.id for request in asked[::2]])
        outcomes = {}
        while engine.in_flight():
            outcomes |= {outcome.id: outcome for outcome in engine.step()}
        assert outcomes.keys() == {request.id for request in asked[1::2]}
        for request in asked[1::2]:
            self.check(reference, request, outcomes[request.id])
        # One that ends where vLLM would go on.
        tokens = outcomes[asked[1].id].answer.token_ids.tolist()
        stop = (tuple(tokens[4:6]),)
        told = Request(b"told", given[1], None, Generate(40, (), 0.9, 3, stop=stop, top_logprobs=4))
        (outcome,) = ask(engine, [told])
        assert outcome.answer.finish_reason == "stop"
        self.check(reference, told, outcome)
        assert_nothing_left(engine)

    def test_come_with_the_parts_of_a_stream(self, engine, reference):
        (prompt,) = prompts(1, 20, seed=7)
        want = Stream(12, (), 0.9, 3, logprobs=True, top_logprobs=2)
        engine.submit([Request(b"0", prompt, None, want)])
        parts: list[Any] = []
        outcome = None
        while engine.in_flight():
            for outcome in engine.step():
                assert outcome.error is None
            parts.extend(engine.parts())
        assert outcome is not None
        self.check(reference, Request(b"0", prompt, None, want), outcome)
        told = [part.drawn.top_logprobs.token_ids for part in parts]
        assert len(told) > 1
        whole = outcome.answer.top_logprobs.token_ids
        assert np.array_equal(np.concatenate(told), whole[: sum(map(len, told))])

    def test_of_one_that_was_preempted(self, reference):
        # Room for a few of the longest alone: the others begin again, behind what they have drawn.
        with vllm_engine(
            block_size=32, kv_cache_memory_bytes=25 * 32 * 3072, max_num_seqs=8, live_prompts=0
        ) as engine:
            given = prompts(8, 8, seed=8, shared=40)
            want = Generate(120, (), 0.9, 3, logprobs=True, top_logprobs=3)
            asked = requests_of(given, want=want)
            with Watched(engine) as seen:
                outcomes = ask(engine, asked)
            assert seen.preempted
            for request, outcome in zip(asked, outcomes, strict=True):
                self.check(reference, request, outcome, 5e-4)
            assert_nothing_left(engine)

    def test_that_were_dropped_fail_their_own_request(self, engine):
        (prompt,) = prompts(1, 20, seed=9)
        runner = engine._engine.model_executor.driver_worker.worker.model_runner
        capture = internals.find_capture(runner)
        assert capture is not None
        put = capture.rows.put
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                capture.rows,
                "put",
                lambda names, block: put([n for n in names if not n.endswith("/4")], block),
            )
            want = Generate(9, (), 0.9, 3, top_logprobs=4)
            lost, row = ask(
                engine, [Request(b"0", prompt, None, want), Request(b"1", prompt, None, Row())]
            )
        assert "what its steps left was dropped" in str(lost.error)
        assert row.error is None
        assert not scheduler(engine).running
        assert_nothing_left(engine)


def test_steps_of_an_engine_in_another_process(reference: Reference) -> None:
    random = np.random.default_rng(2)
    steps = TestSteps()
    with reducing_engine(own_process=True, max_num_seqs=16) as engine:
        asked = [
            Request(b"%d" % n, prompt, None, want)
            for n, (prompt, want) in enumerate(
                zip(prompts(20, 40, seed=11), steps.wants(random, 20), strict=True)
            )
        ]
        for request, outcome in zip(asked, ask(engine, asked), strict=True):
            steps.check(reference, request, outcome)


@pytest.mark.parametrize("want", [Row(), Score(), Hidden(), Generate()], ids=lambda it: it.kind)
def test_what_is_no_small_answer_is_not_reduced(want: Any) -> None:
    assert not reducible(want, 1000)
