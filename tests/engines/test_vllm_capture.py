"""The capture processor on the real classes of both of vLLM's model runners."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.vllm_engine import need_vllm

need_vllm()

import torch  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.sampling_params import StructuredOutputsParams  # noqa: E402
from vllm.v1.sample.logits_processor import (  # noqa: E402
    BatchUpdate,
    LogitsProcessors,
    MoveDirectionality,
    _load_logitsprocs_plugins,
)
from vllm.v1.sample.logits_processor import LogitsProcessor as ProcessorV1  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor import (  # noqa: E402
    LogitsContext,
    LogitsProcRequestState,
)
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ProcessorV2  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_plugins  # noqa: E402
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch  # noqa: E402

from lmpool.backends import Outcome, Request  # noqa: E402
from lmpool.backends.vllm import internals  # noqa: E402
from lmpool.backends.vllm.capture import (  # noqa: E402
    ANSWER,
    CAPTURE,
    ONLY_ROW,
    WATCH,
    CapturedRows,
    CaptureProcessor,
)
from lmpool.backends.vllm.options import capture_processors  # noqa: E402
from lmpool.backends.vllm.row_store import (  # noqa: E402
    HostCopy,
    RowBlock,
    RowStore,
    WatchedLogits,
)
from lmpool.backends.vllm.states import HIDDEN  # noqa: E402
from lmpool.backends.words import outcome_of  # noqa: E402
from lmpool.wants import Row, Top, want_to_wire  # noqa: E402
from tests.support.small_answers import compare, random_wants  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

VOCAB = 50
SECRET = "the owner's secret: "


def config(dtype: torch.dtype = torch.float32) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(dtype=dtype))


def params(
    name: int | None, key: str = CAPTURE, want: Any = None, *, only_row: bool = False
) -> SamplingParams:
    asked: dict[str, Any] | None = None if name is None else {key: f"{SECRET}{name}"}
    if asked is not None and want is not None:
        asked[ANSWER] = want_to_wire(want)
    if asked is not None and only_row:
        asked[ONLY_ROW] = True
    return SamplingParams(max_tokens=1, extra_args=asked)


def v1(dtype: torch.dtype = torch.float32, *, owned: bool = True) -> CaptureProcessor:
    capture = CaptureProcessor(config(dtype), torch.device("cpu"), False)
    if owned:
        capture.attach(SECRET)
    return capture


def joining(*given: SamplingParams) -> BatchUpdate:
    added = [(i, one, None, []) for i, one in enumerate(given)]
    return BatchUpdate(len(given), removed=(), added=added, moved=())


def logits_of(names: Sequence[int | str]) -> torch.Tensor:
    """Rows that differ from each other, one for each request of a batch."""
    rows = [torch.randn(VOCAB, generator=torch.Generator().manual_seed(int(n))) for n in names]
    return torch.stack(rows)


def row_of(name: int | str) -> np.ndarray:
    return torch.log_softmax(logits_of([name]), -1)[0].numpy()


def assert_captured(capture: CaptureProcessor, names: list[int]) -> None:
    assert len(capture.rows) == len(names)
    found = {
        int(n): row
        for ids, rows, _ in capture.rows.take(list(map(str, names)))
        for n, row in zip(ids, rows, strict=True)
    }
    assert sorted(found) == sorted(names)
    for name, row in found.items():
        np.testing.assert_allclose(row, row_of(name), atol=1e-6)


def test_one_class_is_both_runners_processor_and_their_entry_point():
    assert issubclass(CaptureProcessor, ProcessorV1)
    assert issubclass(CaptureProcessor, ProcessorV2)
    assert _load_logitsprocs_plugins() == [CaptureProcessor]
    assert _load_v2_logitsprocs_plugins() == [CaptureProcessor]


def test_who_names_it_as_before_gets_the_same():
    from lmpool.backends import vllm_capture

    assert vllm_capture.CaptureProcessor is CaptureProcessor
    assert vllm_capture.CapturedRows is CapturedRows
    assert (vllm_capture.CAPTURE, vllm_capture.WATCH) == (CAPTURE, WATCH)
    point = EntryPoint(
        "lmpool", "lmpool.backends.vllm_capture:CaptureProcessor", "vllm.logits_processors"
    )
    assert point.load() is CaptureProcessor


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("lmpool.backends.vllm.capture:CaptureProcessor", []),
        ("lmpool.backends.vllm_capture:CaptureProcessor", []),
        ("others:Processor", ["lmpool.backends.vllm.capture:CaptureProcessor"]),
    ],
)
def test_vllm_is_told_of_it_where_no_entry_point_names_it(value, told, monkeypatch):
    group = "vllm.logits_processors"
    found = EntryPoints([EntryPoint("lmpool", value, group)])
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: found)
    assert capture_processors() == told


class TestV1:
    def test_swapped_moved_removed_and_added_rows_are_followed(self):
        capture = v1()
        added = [(i, params(10 + i), None, []) for i in range(4)]
        capture.update_state(BatchUpdate(4, removed=(), added=added, moved=()))
        swap, one_way = MoveDirectionality.SWAP, MoveDirectionality.UNIDIRECTIONAL
        capture.update_state(BatchUpdate(4, removed=(), added=(), moved=[(0, 3, swap)]))
        capture.apply(logits_of([13, 11, 12, 10]))
        assert_captured(capture, [10, 11, 12, 13])
        # The second leaves, the last takes its place; a stranger joins and swaps with the first.
        capture.update_state(BatchUpdate(3, removed=[1], added=(), moved=[(3, 1, one_way)]))
        capture.update_state(
            BatchUpdate(4, removed=(), added=[(3, params(None), None, [])], moved=[(0, 3, swap)])
        )
        capture.apply(logits_of([99, 10, 12, 13]))
        assert_captured(capture, [10, 12, 13])

    @pytest.mark.parametrize("seed", range(40))
    def test_rows_follow_the_runners_own_batch(self, seed):
        random = np.random.default_rng(seed)
        capture = v1()
        batch = InputBatch(
            max_num_reqs=12,
            max_model_len=16,
            max_num_batched_tokens=64,
            device=torch.device("cpu"),
            vocab_size=VOCAB,
            block_sizes=[16],
            max_num_blocks_per_req=[1],
            logitsprocs=LogitsProcessors([capture]),
        )
        number = 100
        for _ in range(30):
            for request in [r for r in batch.req_ids if r is not None]:
                if random.random() < 0.3:
                    batch.remove_request(request)
            while batch.num_reqs < 12 and random.random() < 0.6:
                number += 1
                captured = random.random() < 0.7
                batch.add_request(
                    CachedRequestState(
                        req_id=f"{number}" if captured else f"-{number}",
                        prompt_token_ids=[1, 2],
                        mm_features=[],
                        sampling_params=params(number if captured else None),
                        generator=None,
                        block_ids=([0],),
                        num_computed_tokens=0,
                        output_token_ids=[],
                    )
                )
            batch.condense()
            if batch.num_reqs > 1:
                for _ in range(random.integers(0, 4)):
                    first, second = random.choice(batch.num_reqs, 2, replace=False)
                    batch.swap_states(int(first), int(second))
            batch.refresh_metadata()
            if not batch.num_reqs:
                continue
            names = [abs(int(request)) for request in batch.req_ids]
            logits = logits_of(names)
            before = logits.clone()
            assert capture.apply(logits) is logits
            assert torch.equal(logits, before)
            assert_captured(capture, [int(r) for r in batch.req_ids if not r.startswith("-")])

    def test_unfinished_prefills_are_no_answers(self):
        capture = v1()
        added = [(i, params(i), None, []) for i in range(3)]
        capture.update_state(BatchUpdate(3, removed=(), added=added, moved=()))
        capture.unfinished = lambda: np.array([True, False, True])
        capture.apply(logits_of([0, 1, 2]))
        assert_captured(capture, [1])

    def test_without_the_runners_knowledge_the_last_row_counts(self):
        capture = v1()
        capture.update_state(BatchUpdate(1, removed=(), added=[(0, params(5), None, [])], moved=()))
        capture.apply(logits_of([77]))
        capture.apply(logits_of([78]))
        capture.apply(logits_of([5]))
        assert_captured(capture, [5])

    def test_rows_that_are_not_one_a_request_are_refused(self):
        capture = v1()
        capture.update_state(BatchUpdate(1, removed=(), added=[(0, params(5), None, [])], moved=()))
        capture.unfinished = lambda: np.array([False])
        capture.apply(logits_of([5, 6, 7]))
        assert len(capture.rows) == 0

    def test_another_tensor_rank_publishes_nothing(self):
        capture = v1()
        capture.publishes = False
        capture.update_state(BatchUpdate(1, removed=(), added=[(0, params(5), None, [])], moved=()))
        capture.apply(logits_of([5]))
        assert len(capture.rows) == 0


class TestUnreadTokens:
    """A token that nobody reads is not drawn, where that is so for a whole batch."""

    def passed_on(self, given: Sequence[SamplingParams], *, last: bool = True) -> bool:
        """Whether the sampler sees the logits of a batch; its rows are right in any case."""
        capture = v1()
        capture.is_last = last
        capture.update_state(joining(*given))
        logits = logits_of(range(len(given)))
        before = logits.clone()
        passed = capture.apply(logits)
        asked = [p.extra_args or {} for p in given]
        assert_captured(capture, [i for i, extra in enumerate(asked) if CAPTURE in extra])
        if passed is logits:
            assert torch.equal(logits, before)
        else:
            assert passed.shape == (len(given), 1)
        return passed is logits

    def test_nobody_but_the_sampler_may_read_what_passes(self, monkeypatch):
        def is_last(capture: CaptureProcessor, *others: Any) -> bool:
            loaded = SimpleNamespace(non_argmax_invariant=[capture, *others])
            runner = SimpleNamespace(input_batch=SimpleNamespace(logitsprocs=loaded))
            return internals._is_last(runner, capture)

        capture = v1()
        assert is_last(capture)
        assert is_last(capture, v1(owned=False))  # by the entry point and by name
        assert not is_last(capture, object())
        assert not is_last(capture, object(), v1(owned=False))
        monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
        assert not is_last(capture)  # the runner counts them in the logits afterwards

    def test_a_batch_of_rows_alone_passes_a_column(self):
        assert not self.passed_on([params(i, only_row=True) for i in range(5)])

    @pytest.mark.parametrize(
        "other",
        [params(None), params(3), params(3, WATCH), SamplingParams(extra_args={ONLY_ROW: True})],
        ids=["a stranger", "a token that counts", "a continuation", "a stranger who knows the key"],
    )
    def test_whoever_reads_his_token_has_it_drawn_for_all(self, other):
        assert self.passed_on([*(params(i, only_row=True) for i in range(3)), other])

    def test_another_processor_sees_the_logits(self):
        assert self.passed_on([params(i, only_row=True) for i in range(3)], last=False)

    @pytest.mark.parametrize("seed", range(50))
    def test_a_mixed_batch(self, seed):
        random = np.random.default_rng(seed)
        given, unread = [], True
        for i in range(random.integers(1, 12)):
            only_row = bool(random.random() < 0.9)
            name = i if random.random() < 0.95 else None
            given.append(params(name, random.choice([CAPTURE, HIDDEN]), only_row=only_row))
            unread = unread and only_row and name is not None
        assert self.passed_on(given) is not unread

    @pytest.mark.parametrize("bfloat16", [False, True])
    def test_rows_and_answers_of_one_batch(self, bfloat16):
        capture = v1(torch.bfloat16 if bfloat16 else torch.float32)
        capture.is_last = True
        top = Top(5)
        capture.update_state(
            joining(*(params(i, want=top if i % 2 else None, only_row=True) for i in range(6)))
        )
        logits = logits_of(range(6)).to(torch.bfloat16 if bfloat16 else torch.float32).float()
        expected = torch.log_softmax(logits, -1).numpy()
        assert capture.apply(logits).shape == (6, 1)
        logits.fill_(torch.nan)  # memory that is given to others
        for found, rows, scales in capture.rows.take(names(*range(6))):
            for name, values, scale in zip(found, rows, scales, strict=True):
                if int(name) % 2:
                    request = Request(b"", np.zeros(1, np.uint32), None, top)
                    compare(outcome_of(request, values, scale), expected[int(name)], top)
                else:
                    row = Outcome(b"", row=values, logsumexp=float(scale)).logprobs()
                    np.testing.assert_allclose(row, expected[int(name)], atol=1e-5)

    def test_float32_rows_are_made_where_the_logits_are(self):
        capture = v1()
        capture.is_last = True
        capture.update_state(joining(*(params(i, only_row=True) for i in range(4))))
        logits = logits_of(range(4))
        capture.apply(logits)
        ((_, rows, _),) = capture.rows.take(names(*range(4)))
        assert np.shares_memory(rows, logits.numpy())

    def test_bfloat16_logits_are_kept_and_not_copied(self):
        capture = v1(torch.bfloat16)
        capture.is_last = True
        capture.update_state(joining(params(0, only_row=True)))
        logits = logits_of([0])  # which bfloat16 cannot hold
        capture.apply(logits)
        expected = torch.log_softmax(logits, -1).numpy()
        ((_, rows, _),) = capture.rows.take(names(0))
        np.testing.assert_allclose(rows, expected, atol=1e-6)


class TestV2:
    SLOTS = 8

    def processor(self) -> tuple[CaptureProcessor, np.ndarray]:
        prefill = np.full(self.SLOTS, 4, np.int32)
        tensor: Any = SimpleNamespace(np=prefill)
        prompt: Any = SimpleNamespace(np=prefill.copy())
        states = LogitsProcRequestState(
            device=torch.device("cpu"),
            max_num_reqs=self.SLOTS,
            vocab_size=VOCAB,
            all_token_ids=tensor,
            prompt_len=prompt,
            prefill_len=tensor,
            total_len=tensor,
        )
        capture = CaptureProcessor(config(), states)
        capture.attach(SECRET)
        return capture, prefill

    def context(self, slots: list[int], lengths: list[int] | None = None) -> LogitsContext:
        mapping = torch.tensor(slots, dtype=torch.int32)
        return LogitsContext(
            expanded_idx_mapping=mapping,
            idx_mapping=mapping,
            idx_mapping_np=mapping.numpy(),
            expanded_local_pos=torch.zeros_like(mapping),
            input_ids=torch.zeros_like(mapping),
            pos=torch.zeros_like(mapping),
            seq_lens_upper_bound_np=np.array(lengths or [4] * len(slots), np.int32),
        )

    def test_rows_are_found_by_slot_in_whatever_order(self):
        capture, _ = self.processor()
        for slot in (0, 3, 5, 7):
            assert capture.add_request(slot, params(100 + slot)) is True
        assert capture.add_request(1, params(None)) is False
        capture.apply_staged_writes()
        slots = [5, 1, 0, 7, 3]
        capture.apply(logits_of([100 + slot for slot in slots]), self.context(slots))
        assert_captured(capture, [100, 103, 105, 107])

    def test_a_slot_taken_over_is_its_new_requests(self):
        capture, _ = self.processor()
        capture.add_request(2, params(20))
        capture.add_request(2, params(21))
        capture.add_request(4, params(40))
        assert capture.add_request(4, params(None)) is False
        capture.apply(logits_of([21, 40]), self.context([2, 4]))
        assert_captured(capture, [21])

    def test_unfinished_prefills_are_no_answers(self):
        capture, prefill = self.processor()
        for slot in range(3):
            capture.add_request(slot, params(slot))
        prefill[:3] = (10, 4, 6)
        capture.apply(logits_of([0, 1, 2]), self.context([0, 1, 2], lengths=[8, 4, 6]))
        assert_captured(capture, [1, 2])

    def test_rows_of_draft_tokens_are_refused(self):
        capture, _ = self.processor()
        capture.add_request(0, params(5))
        capture.apply(logits_of([5, 5, 5]), self.context([0]))
        assert len(capture.rows) == 0


class TestAnswers:
    """Rows that are reduced where they are, by both runners' ways to the processor."""

    def check(self, capture: CaptureProcessor, wants: Sequence[Any], logits: torch.Tensor) -> None:
        """Of each want, by its number, there is what follows from its row of the logits."""
        found = {
            name: (values, float(scale))
            for given, rows, scales in capture.rows.take(names(*range(len(wants))))
            for name, values, scale in zip(given, rows, scales, strict=True)
        }
        assert len(found) == len(wants)
        rows = torch.log_softmax(logits, -1).numpy()
        for number, want in enumerate(wants):
            values, scale = found[f"{number}"]
            if isinstance(want, Row):
                assert values.dtype != np.int32
                continue
            assert values.dtype == np.int32
            request = Request(b"", np.zeros(1, np.uint32), None, want)
            compare(outcome_of(request, values, scale), rows[number], want)
        assert (len(capture.rows), capture.rows.nbytes) == (0, 0)

    def wants(self, seed: int) -> list[Any]:
        random = np.random.default_rng(seed)
        return [*random_wants(random, VOCAB, 20), Row(), Row()]

    def of_number(self, number: int, want: Any) -> SamplingParams:
        return params(number, want=None if isinstance(want, Row) else want)

    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_by_position(self, seed, dtype):
        capture, wants = v1(dtype), self.wants(seed)
        capture.update_state(joining(*(self.of_number(n, w) for n, w in enumerate(wants))))
        logits = logits_of(range(len(wants))).to(dtype).float()
        before = logits.clone()
        assert capture.apply(logits) is logits
        assert torch.equal(logits, before)
        self.check(capture, wants, logits)

    @pytest.mark.parametrize("seed", range(6))
    def test_by_slot(self, seed):
        v2, wants = TestV2(), self.wants(seed)
        v2.SLOTS = 32
        capture, _ = v2.processor()
        slots = np.random.default_rng(seed).permutation(v2.SLOTS)[: len(wants)].tolist()
        for number, (slot, want) in enumerate(zip(slots, wants, strict=True)):
            assert capture.add_request(slot, self.of_number(number, want)) is True
        logits = logits_of(range(len(wants)))
        capture.apply(logits, v2.context(slots))
        self.check(capture, wants, logits)

    def steps(self, capture: CaptureProcessor, asked: Sequence[str]) -> dict[str, np.ndarray]:
        taken = capture.rows.take(asked)
        return {n: row for given, rows, _ in taken for n, row in zip(given, rows, strict=True)}

    def test_steps_by_position_are_numbered_by_what_was_drawn(self):
        capture, drawn = v1(), [[], [9, 9]]
        watched = [params(n, WATCH, Top(2)) for n in range(2)]
        added = [(n, watched[n], None, drawn[n]) for n in range(2)]
        capture.update_state(BatchUpdate(2, removed=(), added=added, moved=()))
        for step in range(3):
            capture.unfinished = lambda step=step: np.array([step == 1, False])
            capture.apply(logits_of([10 * step, 10 * step + 1]))
            for tokens in drawn[step == 1 :]:  # of a prefill that goes on nothing is drawn
                tokens.append(5)
        found = self.steps(capture, ["0/0", "0/1", "0/2", "1/0", "1/2", "1/3", "1/4"])
        assert sorted(found) == ["0/0", "0/1", "1/2", "1/3", "1/4"]
        of = {"0/0": 0, "0/1": 20, "1/2": 1, "1/3": 11, "1/4": 21}
        for name, row in of.items():
            assert found[name][:2].tolist() == np.argsort(-row_of(row))[:2].tolist()
        # One whose last token was not accepted draws it again.
        del drawn[0][1:]
        capture.apply(logits_of([30, 31]))
        capture.apply(logits_of([40, 41]))
        again = self.steps(capture, ["0/1"])
        assert again["0/1"][:2].tolist() == np.argsort(-row_of(40))[:2].tolist()

    def test_steps_by_slot_are_numbered_by_what_was_drawn(self):
        v2 = TestV2()
        capture, prefill = v2.processor()
        for slot in (0, 3):
            capture.add_request(slot, params(slot, WATCH, Top(2)))
        capture.apply(logits_of([0, 1]), v2.context([3, 0], lengths=[4, 3]))
        capture.apply(logits_of([2, 3]), v2.context([0, 3], lengths=[4, 5]))
        prefill[3] = 6  # begins again behind what it has drawn
        capture.apply(logits_of([4, 5]), v2.context([0, 3], lengths=[5, 4]))
        capture.apply(logits_of([6]), v2.context([3], lengths=[6]))
        found = self.steps(capture, [f"{slot}/{n}" for slot in (0, 3) for n in range(5)])
        of = {"3/0": 0, "0/0": 2, "3/1": 3, "0/1": 4, "3/2": 6}
        assert found.keys() == of.keys()
        for name, row in of.items():
            assert found[name][:2].tolist() == np.argsort(-row_of(row))[:2].tolist()

    def test_of_those_that_have_ended_nothing_is_kept_or_comes(self):
        capture = v1()
        drawn: list[list[int]] = [[], [], []]
        given = [params(1, WATCH, Top(2)), params(11, WATCH, Top(2)), params(1_1_1)]
        added = [(n, one, None, drawn[n]) for n, one in enumerate(given)]
        capture.update_state(BatchUpdate(3, removed=(), added=added, moved=()))
        for step in range(3):
            capture.apply(logits_of([1, 2, 3]))
            for tokens in drawn:
                tokens.append(step)
        assert len(capture.rows) == 3 + 3 + 1
        capture.end(["1"])
        assert sorted(capture.rows._of) == ["11/0", "11/1", "11/2", "111"]
        capture.apply(logits_of([1, 2, 3]))  # the runner works ahead
        assert sorted(capture.rows._of) == ["11/0", "11/1", "11/2", "11/3", "111"]
        capture.end(["11", "111"])
        assert (len(capture.rows), capture.rows.nbytes) == (0, 0)

    def test_another_tensor_rank_reduces_nothing(self):
        capture = v1()
        capture.publishes = False
        capture.update_state(joining(params(5, want=Top(2)), params(6, WATCH, Top(2))))
        capture.apply(logits_of([5, 6]))
        assert len(capture.rows) == 0

    def test_a_strangers_want_is_not_read(self):
        capture = v1()
        other = SamplingParams(extra_args={CAPTURE: "0", ANSWER: ["no want"]})
        capture.update_state(joining(other, params(1)))
        capture.apply(logits_of([0, 1]))
        assert_captured(capture, [1])


class TestRowBlock:
    def test_bfloat16_logits_travel_as_their_bits(self):
        logits = torch.randn(3, VOCAB).to(torch.bfloat16).float()
        rows, scale = RowBlock(logits, bfloat16=True, stream=None).read()
        assert rows.dtype == np.uint16
        wide = (rows.astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(wide, logits.numpy())
        exact = torch.log_softmax(logits.double(), -1).numpy()
        np.testing.assert_allclose(wide - scale[:, None], exact, atol=1e-5)

    def test_logits_that_a_cast_would_change_are_not_cast(self):
        logits = torch.randn(3, VOCAB).to(torch.bfloat16).float()
        logits[1, 7] += 1e-4
        block = RowBlock(logits, bfloat16=True, stream=None)
        expected = torch.log_softmax(logits, -1).numpy()
        logits.fill_(0)  # the sampler goes on with them
        rows, _ = block.read()
        assert rows.dtype == np.float32
        np.testing.assert_allclose(rows, expected, atol=1e-6)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    @pytest.mark.parametrize("bfloat16", [False, True])
    def test_rows_that_are_none_have_no_finite_scale(self, bad, bfloat16):
        logits = torch.randn(2, VOCAB).to(torch.bfloat16).float()
        logits[0, 3] = bad
        _, scale = RowBlock(logits, bfloat16=bfloat16, stream=None).read()
        assert not np.isfinite(scale[0])
        assert np.isfinite(scale[1])

    @pytest.mark.parametrize("bfloat16", [False, True])
    def test_tokens_may_be_impossible_but_not_all_of_them(self, bfloat16):
        logits = torch.randn(2, VOCAB).to(torch.bfloat16).float()
        logits[0, :] = -np.inf
        logits[1, : VOCAB // 2] = -np.inf
        _, scale = RowBlock(logits, bfloat16=bfloat16, stream=None).read()
        assert np.isfinite(scale).tolist() == [False, True]

    def test_is_as_good_before_and_after_the_sampler_wrote_into_the_logits(self):
        logits = logits_of([1, 2])
        block = RowBlock(logits, bfloat16=False, stream=None)
        logits.fill_(0)
        np.testing.assert_allclose(block.read()[0][1], row_of(2), atol=1e-6)


def names(*numbers: int) -> list[str]:
    return list(map(str, numbers))


class TestRowStore:
    ROW = 4 * VOCAB

    def block(self, *numbers: int, bfloat16: bool = False) -> RowBlock:
        return RowBlock(logits_of(numbers), bfloat16=bfloat16, stream=None)

    def test_rows_nobody_takes_are_bounded_by_their_bytes(self):
        store = RowStore(most_bytes=4 * self.ROW)
        for start in range(0, 20, 2):
            store.put(names(start, start + 1), self.block(1, 2))
            assert store.nbytes <= 4 * self.ROW
        assert len(store) == 4
        taken = store.take(names(*range(20)))
        assert [found for found, _, _ in taken] == [names(16, 17), names(18, 19)]
        assert (len(store), store.nbytes) == (0, 0)

    def test_a_row_that_is_left_counts_as_the_block_that_it_holds(self):
        store = RowStore(most_bytes=4 * self.ROW)
        store.put(names(0, 1, 2), self.block(0, 1, 2))
        store.forget(names(0, 1))
        assert (len(store), store.nbytes) == (1, 3 * self.ROW)
        store.put(names(3, 4), self.block(3, 4))
        assert store.take(names(2)) == []
        assert (len(store), store.nbytes) == (2, 2 * self.ROW)

    def test_a_block_larger_than_the_bound_is_not_kept(self):
        store = RowStore(most_bytes=2 * self.ROW)
        store.put(names(0, 1, 2), self.block(0, 1, 2))
        assert (len(store), store.nbytes) == (0, 0)

    def test_the_wide_copy_of_bfloat16_logits_counts(self):
        assert self.block(0, bfloat16=True).nbytes == 6 * VOCAB

    def test_the_last_row_of_a_name_counts(self):
        store = RowStore()
        store.put(names(7, 8, 7), self.block(1, 2, 3))
        ((found, rows, _),) = store.take(names(7))
        assert found == names(7)
        np.testing.assert_allclose(rows[0], row_of(3), atol=1e-6)

    def test_rows_are_taken_once_and_in_any_order(self):
        store = RowStore()
        store.put(["a", "b", "c"], self.block(1, 2, 3))
        store.forget(["b", "unknown"])
        ((found, rows, _),) = store.take(["c", "a", "b"])
        assert found == ["c", "a"]
        np.testing.assert_allclose(rows, [row_of(3), row_of(1)], atol=1e-6)
        assert store.take(["a"]) == []


class TestWatchedLogits:
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_one_bad_step_is_enough(self, bad):
        capture = v1()
        capture.update_state(joining(params(7, WATCH), params(8, WATCH), params(9)))
        for step in range(200):  # nobody asks meanwhile
            logits = logits_of([7, 8, 9])
            if step == 3:
                logits[1, 5] = bad
            logits[0, :10] = -np.inf  # which a model may give
            capture.apply(logits)
        assert_captured(capture, [9])
        assert capture.watched.take(names(7, 9)) == []
        assert capture.watched.take(names(7, 8, 9)) == names(8)
        assert capture.watched.take(names(7, 8, 9)) == []

    def test_those_that_nobody_takes_are_bounded(self):
        watched = WatchedLogits(most=4)
        for name in range(200):
            watched.put(names(name), HostCopy([torch.full((1,), torch.nan)], None))
        assert watched.take(names(*range(200))) == names(196, 197, 198, 199)


@pytest.mark.parametrize(("tensor", "last"), [(0, True), (1, True), (0, False)])
def test_one_rank_publishes(tensor, last, monkeypatch):
    from vllm.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: tensor)
    group = SimpleNamespace(is_last_rank=last)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: group)
    assert v1().publishes == (tensor == 0 and last)


class TestOwner:
    """Nothing is captured but for the one who attached, by the secret that he gave."""

    def strangers(self, key: str) -> list[SamplingParams]:
        """As an HTTP client's ``vllm_xargs`` may be."""
        ids = [0, "", "0", SECRET[:-1] + "0", "x" + SECRET, [SECRET], 1.5, "y" * 10_000]
        return [SamplingParams(max_tokens=1, extra_args={key: value}) for value in ids]

    @pytest.mark.parametrize("key", [CAPTURE, WATCH])
    @pytest.mark.parametrize("owned", [False, True])
    def test_no_stranger_has_a_row_kept(self, key, owned):
        capture = v1(owned=owned)
        given = self.strangers(key)
        capture.update_state(joining(*given, params(50)))
        capture.apply(logits_of([*range(len(given)), 50]).fill_(torch.nan))
        assert len(capture.rows) == (1 if owned else 0)
        assert not capture.watched.take(["", "0", "x", "y", *names(*range(50))])
        assert capture.rows.nbytes == (4 * VOCAB if owned else 0)

    def test_who_attaches_later_takes_over(self):
        capture = v1()
        capture.update_state(joining(params(1), params(2)))
        capture.apply(logits_of([1, 2]))
        capture.attach("another's secret: ")
        assert (len(capture.rows), capture.rows.nbytes) == (0, 0)
        other = SamplingParams(extra_args={CAPTURE: "another's secret: 3"})
        capture.update_state(BatchUpdate(3, removed=(), added=[(2, other, None, [])], moved=()))
        capture.apply(logits_of([1, 2, 3]))
        assert_captured(capture, [3])
        capture.detach()
        capture.update_state(joining(other))
        capture.apply(logits_of([3]))
        assert len(capture.rows) == 0

    @pytest.mark.parametrize("prefix", ["", "short", 5, None])
    def test_a_prefix_that_is_no_secret_is_refused(self, prefix):
        with pytest.raises(ValueError, match="16 characters"):
            v1().attach(prefix)

    def runner(self, count: int, **options: Any) -> Any:
        """A runner that has loaded the processor so many times: by the entry point and by name."""
        loaded = [v1(owned=False) for _ in range(count)]
        return SimpleNamespace(
            sampler=SimpleNamespace(logits_processors=loaded),
            kv_cache_config=SimpleNamespace(kv_cache_groups=[], num_blocks=0),
            kv_caches=[],
            device=torch.device("cpu"),
            execute_model=lambda scheduled: None,
            vllm_config=SimpleNamespace(
                speculative_config=None,
                scheduler_config=SimpleNamespace(max_num_seqs=8),
                model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB),
                **options,
            ),
        )

    def worker(self, runner: Any) -> CapturedRows:
        worker = CapturedRows()
        worker.model_runner = runner
        return worker

    def test_one_of_several_in_a_runner_keeps_rows(self):
        runner = self.runner(3)
        worker = self.worker(runner)
        assert worker.lmpool_attach(SECRET) == "V2"
        loaded = runner.sampler.logits_processors
        for capture in loaded:
            capture.update_state(joining(params(4), params(5)))
            capture.apply(logits_of([4, 5]))
        assert [len(capture.rows) for capture in loaded] == [2, 0, 0]
        ((found, rows, _),) = worker.lmpool_take_rows(names(4, 5))
        assert found == names(4, 5)
        np.testing.assert_allclose(rows[1], row_of(5), atol=1e-6)
        assert sum(capture.rows.nbytes for capture in loaded) == 0

    def test_attaching_again_prepares_the_runner_once(self):
        runner = self.runner(1)
        worker = self.worker(runner)
        worker.lmpool_attach(SECRET)
        prepared = runner.execute_model
        worker.lmpool_attach(SECRET, most_bytes=5)
        assert runner.execute_model is prepared
        assert runner.sampler.logits_processors[0].rows.most_bytes == 5

    def test_speculative_decoding_is_refused(self):
        runner = self.runner(1)
        runner.vllm_config.speculative_config = object()
        with pytest.raises(ValueError, match="start it without speculative_config"):
            self.worker(runner).lmpool_attach(SECRET)
        assert len(runner.sampler.logits_processors[0].rows) == 0

    def test_a_few_whole_steps_find_room(self, monkeypatch):
        monkeypatch.setattr("lmpool.backends.vllm.capture.MOST_BYTES", 1)
        runner = self.runner(1)
        self.worker(runner).lmpool_attach(SECRET)
        assert runner.sampler.logits_processors[0].rows.most_bytes == 4 * 8 * VOCAB * 6


@pytest.mark.parametrize("key", [CAPTURE, WATCH])
@pytest.mark.parametrize("name", [True, 1, 1.5, [1], {"a": 1}])
def test_ids_that_are_none_are_refused(key, name):
    with pytest.raises(ValueError, match="a str expected"):
        CaptureProcessor.validate_params(SamplingParams(extra_args={key: name}))


def test_several_continuations_of_a_captured_prompt_are_refused():
    with pytest.raises(ValueError, match="n=1"):
        CaptureProcessor.validate_params(SamplingParams(n=2, extra_args={CAPTURE: "1"}))
    CaptureProcessor.validate_params(SamplingParams(n=2))
    CaptureProcessor.validate_params(params(5))


@pytest.mark.parametrize(
    "option",
    [
        {"logit_bias": {7: 5.0}},
        {"allowed_token_ids": [7, 8]},
        {"bad_words": ["x"]},
        {"min_tokens": 1},
        {"structured_outputs": StructuredOutputsParams(regex="a")},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_would_change_a_row_before_it_is_captured_is_refused(option):
    (name,) = option
    with pytest.raises(ValueError, match=f"with {name}=.*write {name}="):
        CaptureProcessor.validate_params(
            SamplingParams(extra_args={CAPTURE: f"{SECRET}1"}, **option)
        )
    CaptureProcessor.validate_params(SamplingParams(**option))
    CaptureProcessor.validate_params(SamplingParams(extra_args={WATCH: f"{SECRET}1"}, **option))
