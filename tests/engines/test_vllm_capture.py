"""The capture processor on the real classes of both of vLLM's model runners."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.vllm_engine import need_vllm

need_vllm()

import torch  # noqa: E402
from vllm import SamplingParams  # noqa: E402
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

from lmpool.backends.vllm.capture import (  # noqa: E402
    CAPTURE,
    WATCH,
    CapturedRows,
    CaptureProcessor,
    HostCopy,
    RowBlock,
    RowStore,
    WatchedLogits,
)
from lmpool.backends.vllm.options import capture_processors  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

VOCAB = 50


def config(dtype: torch.dtype = torch.float32) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(dtype=dtype))


def params(name: int | str | None) -> SamplingParams:
    return SamplingParams(max_tokens=1, extra_args=None if name is None else {CAPTURE: name})


def v1(dtype: torch.dtype = torch.float32) -> CaptureProcessor:
    return CaptureProcessor(config(dtype), torch.device("cpu"), False)


def logits_of(names: list[int | str]) -> torch.Tensor:
    """Rows that differ from each other, one for each request of a batch."""
    rows = [torch.randn(VOCAB, generator=torch.Generator().manual_seed(int(n))) for n in names]
    return torch.stack(rows)


def row_of(name: int | str) -> np.ndarray:
    return torch.log_softmax(logits_of([name]), -1)[0].numpy()


def assert_captured(capture: CaptureProcessor, names: list[int]) -> None:
    assert len(capture.rows) == len(names)
    found = {
        n: row
        for ids, rows, _ in capture.rows.take(names)
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


class TestV2:
    SLOTS = 8

    def processor(self) -> tuple[CaptureProcessor, np.ndarray]:
        prefill = np.full(self.SLOTS, 4, np.int32)
        tensor: Any = SimpleNamespace(np=prefill)
        states = LogitsProcRequestState(
            device=torch.device("cpu"),
            max_num_reqs=self.SLOTS,
            vocab_size=VOCAB,
            all_token_ids=tensor,
            prompt_len=tensor,
            prefill_len=tensor,
            total_len=tensor,
        )
        return CaptureProcessor(config(), states), prefill

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

    def test_is_as_good_before_and_after_the_sampler_wrote_into_the_logits(self):
        logits = logits_of([1, 2])
        block = RowBlock(logits, bfloat16=False, stream=None)
        logits.fill_(0)
        np.testing.assert_allclose(block.read()[0][1], row_of(2), atol=1e-6)


class TestRowStore:
    def test_rows_nobody_takes_are_bounded(self):
        store = RowStore(most=4)
        for start in range(0, 20, 2):
            store.put([start, start + 1], RowBlock(logits_of([1, 2]), bfloat16=False, stream=None))
        assert len(store) == 4
        assert [ids for ids, _, _ in store.take(range(20))] == [[16, 17], [18, 19]]
        assert len(store) == 0

    def test_rows_are_taken_once_and_in_any_order(self):
        store = RowStore()
        store.put(["a", "b", "c"], RowBlock(logits_of([1, 2, 3]), bfloat16=False, stream=None))
        store.forget(["b", "unknown"])
        ((ids, rows, _),) = store.take(["c", "a", "b"])
        assert ids == ["c", "a"]
        np.testing.assert_allclose(rows, [row_of(3), row_of(1)], atol=1e-6)
        assert store.take(["a"]) == []


class TestWatchedLogits:
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_one_bad_step_is_enough(self, bad):
        capture = v1()
        watched = [SamplingParams(max_tokens=9, extra_args={WATCH: name}) for name in (7, 8)]
        added = [(i, given, None, []) for i, given in enumerate([*watched, params(9)])]
        capture.update_state(BatchUpdate(3, removed=(), added=added, moved=()))
        for step in range(200):  # nobody asks meanwhile
            logits = logits_of([7, 8, 9])
            if step == 3:
                logits[1, 5] = bad
            logits[0, :10] = -np.inf  # which a model may give
            capture.apply(logits)
        assert_captured(capture, [9])
        assert capture.watched.take([7, 9]) == []
        assert capture.watched.take([7, 8, 9]) == [8]
        assert capture.watched.take([7, 8, 9]) == []

    def test_those_that_nobody_takes_are_bounded(self):
        watched = WatchedLogits(most=4)
        for name in range(200):
            watched.put([name], HostCopy([torch.full((1,), torch.nan)], None))
        assert watched.take(range(200)) == [196, 197, 198, 199]


@pytest.mark.parametrize(("tensor", "last"), [(0, True), (1, True), (0, False)])
def test_one_rank_publishes(tensor, last, monkeypatch):
    from vllm.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: tensor)
    group = SimpleNamespace(is_last_rank=last)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: group)
    assert v1().publishes == (tensor == 0 and last)


@pytest.mark.parametrize("key", [CAPTURE, WATCH])
@pytest.mark.parametrize("name", [True, 1.5, [1], {"a": 1}])
def test_ids_that_are_none_are_refused(key, name):
    with pytest.raises(ValueError, match="a str or an int expected"):
        CaptureProcessor.validate_params(SamplingParams(extra_args={key: name}))


def test_several_continuations_of_a_captured_prompt_are_refused():
    with pytest.raises(ValueError, match="n=1"):
        CaptureProcessor.validate_params(SamplingParams(n=2, extra_args={CAPTURE: 1}))
    CaptureProcessor.validate_params(SamplingParams(n=2))
    CaptureProcessor.validate_params(params("x"))
