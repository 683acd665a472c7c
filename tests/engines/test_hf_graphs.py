"""Small forward passes that are recorded and replayed, and rows that no GPU's kernel spoils.

What is recorded needs no GPU to be tested: what computes anew, of what it finds at the places that
were recorded, stands for a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lmpool.backends.device import avoid_cudnn_attention  # noqa: E402
from lmpool.backends.hf import HFEngine, graphs  # noqa: E402
from lmpool.backends.hf.graphs import RECORDED_AFTER, PassGraphs  # noqa: E402
from lmpool.backends.hf.packed_layout import ALIGNMENT, QUERY_BLOCK, Pass  # noqa: E402
from lmpool.errors import SettingsError  # noqa: E402
from lmpool.wants import Hidden, Score, Want  # noqa: E402
from tests.support.engines import ask, requests_of, rows_of  # noqa: E402
from tests.support.hf_texts import Texts, reference_rows, save_adapter  # noqa: E402
from tests.support.models import LONGEST, SERVED, VOCAB, WINDOWED, save_model  # noqa: E402

CPU = torch.device("cpu")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Again:
    """Records what is computed by computing it again, and counts how often."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            run()

        return replay


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


def recording(folder: str, record: Any, **options: Any) -> HFEngine:
    engine = HFEngine(folder, device="cpu", **options)
    assert engine._packed is not None
    engine._packed.graphs = PassGraphs(record, engine._open().difference, CPU)
    return engine


def batches(texts: Texts) -> Iterator[list[tuple[int, int]]]:
    """Any prompts, and some that grow by a token each time, as particles do."""
    for length in range(1, texts.sequences[0].size):
        yield [(number, length) for number in range(6)]
        yield texts.batch(10)


def graphs_of(engine: HFEngine) -> PassGraphs:
    assert engine._packed is not None
    assert engine._packed.graphs is not None
    return engine._packed.graphs


@pytest.mark.parametrize("name", [*SERVED, *WINDOWED])
def test_recorded_passes_give_the_rows_of_plain_ones(name: str, tmp_path: Path) -> None:
    record = Again()
    folder = save_model(tmp_path, name)
    # Small passes of few shapes: several of a batch are of the same.
    engine = recording(folder, record, forward_tokens=24)
    texts = Texts(folder, seed=1)
    for batch in batches(texts):
        texts.compare(engine, batch)
        assert engine._packed is not None
        engine._packed.check()
    assert record.replayed > 2 * record.recorded > 0
    assert len(graphs_of(engine)) == record.recorded


def test_rows_of_a_batch_are_not_those_of_the_pass_after(llama: str) -> None:
    """What a graph gives lies where the next one's comes, and rows are copied later."""
    record = Again()
    # The rows of a head in bfloat16 are its logits themselves.
    engine = recording(llama, record, forward_tokens=8, dtype="bfloat16")
    prompts = [[i, i + 1, i + 2, i + 3, i + 4, i + 5, i + 6, i + 7] for i in range(12)]
    for _ in range(3):
        engine.clear_cache()
        rows = rows_of(engine, prompts)
        assert np.abs(rows - reference_rows(llama, prompts, dtype="bfloat16")).max() < 0.3
    assert record.replayed >= 2 * len(prompts)


def test_prompts_that_want_the_same_position_get_it_each(llama: str) -> None:
    record = Again()
    engine = recording(llama, record)
    for turn in range(6):
        prompts = [[1, 2, 3, turn], [1, 2, 3], [1, 2, 3, turn, 5], [1, 2, 3]]
        rows = rows_of(engine, prompts)
        assert np.abs(rows - reference_rows(llama, prompts)).max() < 5e-5
    assert record.replayed > 0


def test_a_model_that_cannot_be_recorded_goes_on(
    llama: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def refuse(_: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    engine = recording(llama, refuse)
    texts = Texts(llama, seed=2)
    for batch in batches(texts):
        texts.compare(engine, batch)
    assert "operation not permitted" in graphs_of(engine).reason
    assert caplog.text.count("no forward pass is recorded") == 1


def test_a_graph_that_gives_other_logits_is_not_used(llama: str) -> None:
    def shift(run: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            run()
            logits = graphs_of(engine)._logits
            assert logits is not None
            logits += 1 + torch.arange(VOCAB) % 2

        return replay

    engine = recording(llama, shift)
    texts = Texts(llama, seed=3)
    for batch in batches(texts):
        texts.compare(engine, batch)
    assert "gave other logits" in graphs_of(engine).reason
    assert not len(graphs_of(engine))


def test_adapters_are_not_recorded_and_end_what_was(llama: str, tmp_path: Path) -> None:
    record = Again()
    engine = recording(llama, record)
    adapters = {
        "fr": save_adapter(llama, tmp_path / "fr"),
        "de": save_adapter(llama, tmp_path / "de", seed=2),
    }
    prompts = [[1, 2, 3], [4, 5]]

    def check(name: str | None) -> None:
        for _ in range(RECORDED_AFTER + 2):
            engine.clear_cache()
            rows = np.stack([o.logprobs() for o in ask(engine, requests_of(prompts, adapter=name))])
            right = reference_rows(llama, prompts, None if name is None else adapters[name])
            assert np.abs(rows - right).max() < 5e-5

    check(None)
    before = record.recorded, record.replayed
    assert min(before) > 0
    engine.add_adapter("fr", adapters["fr"])
    assert not len(graphs_of(engine))
    check("fr")
    assert (record.recorded, record.replayed) == before
    check(None)
    assert record.recorded > before[0]
    engine.add_adapter("de", adapters["de"])
    check("de")
    check("fr")
    engine.remove_adapter("fr")
    assert not len(graphs_of(engine))
    check(None)


@pytest.mark.parametrize("want", [Score(), Hidden()])
def test_texts_and_states_are_not_recorded(llama: str, want: Want) -> None:
    record = Again()
    engine = recording(llama, record)
    for turn in range(6):
        (outcome,) = ask(engine, requests_of([[1, 2, 3, 4 + turn]], want=want))
        assert outcome.error is None
    assert record.recorded == 0


def test_without_memory_it_is_tried_again_later(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "STALE_AFTER", 20)
    record, refusals = Again(), [torch.OutOfMemoryError("none left"), None]

    def refuse_once(run: Callable[[], None]) -> Callable[[], None]:
        if (error := refusals.pop(0) if refusals else None) is not None:
            raise error
        return record(run)

    engine = recording(llama, refuse_once)
    texts = Texts(llama, seed=2)
    for batch in batches(texts):
        texts.compare(engine, batch)
    assert record.replayed > 0
    assert not graphs_of(engine).reason


def test_rows_are_no_longer_than_may_be(llama: str) -> None:
    record = Again()
    engine = recording(llama, record)
    packed = engine._packed
    assert packed is not None
    packed.bounds = replace(packed.bounds, widest=42)
    seen: list[int] = []
    engine._open()._model.register_forward_pre_hook(
        lambda _module, _inputs, kwargs: seen.append(kwargs["input_ids"].shape[1]),
        with_kwargs=True,
    )
    for length in (42, 41, 40, 33):
        for turn in range(RECORDED_AFTER + 1):
            engine.clear_cache()
            rows_of(engine, [[turn, *range(length - 1)]])
    assert max(seen) == 42
    assert record.recorded == 1  # of 40 positions, where 33 are padded, too


# --- which shapes -------------------------------------------------------------------------------


def part_of(rows: int, width: int, columns: int, outputs: int = 1) -> Pass:
    queries = np.zeros((rows, width), np.int64)
    seen = np.zeros((rows, columns), np.int64)
    wanted = np.arange(outputs)
    return Pass(queries, seen, np.zeros(rows * width, np.int64), wanted, wanted, wanted)


def alone(record: Any = None) -> PassGraphs:
    return PassGraphs(record or Again(), lambda *_: None, CPU)


def test_shapes_are_no_smaller_and_few() -> None:
    shapes = set()
    for size in range(1, 1_025):
        shape = alone().fit(part_of(1, size, size), 1 << 62)
        assert shape is not None
        assert size <= shape.columns <= max(size * 1.25 + 8, 16)
        assert shape.columns % ALIGNMENT == 0
        assert size <= shape.width <= max(size * 1.25, 2 * size if size <= 16 else 0)
        assert shape.width == 1 or shape.width % QUERY_BLOCK != 1
        shapes.add(shape.width)
    assert len(shapes) < 32


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1_025, 1_100, 1),
        (64, 32, 64, 1),
        (8, 8, 8_192, 1),
        (1, 128, 128, 65),
        (512, 1, 8_193, 1),
    ],
)
def test_what_is_large_is_not_recorded(shape: tuple[int, int, int, int]) -> None:
    assert alone().fit(part_of(*shape), 1 << 62) is None


def test_larger_passes_are_recorded_where_the_device_waits_for_its_host() -> None:
    """A model's passes of more positions take the device longer, and their launches no longer."""
    record, tried = Again(), list[int]()

    def lags(run: Callable[[], None]) -> bool:
        run()
        tried.append(positions)
        return positions < 3_000

    found = PassGraphs(record, lambda *_: None, CPU, lags)
    for positions in (4_096, 2_048, 3_072):
        for _ in range(RECORDED_AFTER + 2):
            shape = found.fit(part_of(positions // 64, 64, 64), 1 << 62)
            if shape is not None:
                numbers = np.arange(positions // 64)
                given = found.logits({"numbers": numbers}, double, shape.rows * shape.width)
                assert given[:, 0].tolist() == [2.0 * n for n in numbers]
    assert tried == [4_096, 2_048, 3_072]  # at first sight, and not again
    assert record.recorded == len(found) == 1
    assert found.fit(part_of(64, 64, 64), 1 << 62) is None
    assert found.fit(part_of(48, 64, 64), 1 << 62) is None
    assert found.fit(part_of(32, 64, 64), 1 << 62) is not None
    given = found.logits({"numbers": np.arange(3)}, double, 1_500)
    assert given[:, 0].tolist() == [0.0, 2.0, 4.0]
    assert len(tried) == 3  # what is smaller is worth it, too


@pytest.mark.parametrize("how", ["memory", "refused", "other logits"])
def test_a_larger_pass_that_cannot_be_recorded_leaves_smaller_ones(how: str) -> None:
    record = Again()

    def refuse(run: Callable[[], None]) -> Callable[[], None]:
        if positions == 64 or how == "other logits":
            return record(run)
        raise torch.OutOfMemoryError("none left") if how == "memory" else RuntimeError("refused")

    def difference(*_: object) -> float | None:
        return 3.0 if positions == 2_048 and how == "other logits" else None

    found = PassGraphs(refuse, difference, CPU, lambda run: True)
    for positions in (64, 2_048, 64):
        for _ in range(RECORDED_AFTER + 2):
            numbers = np.arange(positions // 64)
            given = found.logits({"numbers": numbers}, double, positions)
            assert given[:, 0].tolist() == [2.0 * n for n in numbers]
    assert not found.reason
    assert len(found) == 1
    assert record.replayed >= RECORDED_AFTER
    assert found.fit(part_of(32, 64, 64), 1 << 62) is None
    assert found.fit(part_of(31, 64, 64), 1 << 62) is None  # it is padded to as many
    assert found.fit(part_of(28, 64, 64), 1 << 62) is not None


def double(tensors: Mapping[str, Any]) -> Any:
    return tensors["numbers"].float()[:, None] * 2


def give(found: PassGraphs, *numbers: int) -> list[float]:
    return [float(x) for x in found.logits({"numbers": np.array(numbers)}, double)[:, 0]]


def test_graphs_in_use_give_way_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    monkeypatch.setattr(graphs, "STALE_AFTER", 10)
    record = Again()
    found = alone(record)
    for size in (1, 2, 3):
        for _ in range(RECORDED_AFTER):
            assert give(found, *range(size)) == [2.0 * n for n in range(size)]
    assert record.recorded == 2  # the third finds no room
    for _ in range(20):
        assert give(found, 1, 2) == [2, 4]  # and that of one is not used any more
    assert give(found, 1, 2, 3) == [2, 4, 6]
    assert record.recorded == 3
    for _ in range(3):
        assert give(found, 5) == [10]
    assert record.recorded == 3


def test_an_option_that_is_no_truth_value_is_named(llama: str) -> None:
    from lmpool.backends import load_engine

    with pytest.raises(SettingsError, match="enforce_eager='no'"):
        load_engine("hf", llama, enforce_eager="no")
    HFEngine(llama, enforce_eager=True).close()


# --- a kernel's last query ----------------------------------------------------------------------


def masked_widths(engine: HFEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries the rows of each pass with a mask have, from now on."""
    found: list[int] = []
    assert engine._packed is not None
    inputs = engine._packed._inputs

    def look(at: Any) -> Any:
        given = inputs(at)
        if given["attention_mask"] is not None:
            found.append(given["input_ids"].shape[1])
        return given

    monkeypatch.setattr(engine._packed, "_inputs", look)
    return found


def test_no_row_leaves_a_single_query_to_its_last_block(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = HFEngine(llama, device="cpu")
    assert engine._packed is not None
    assert engine._packed.query_block is None
    widths = masked_widths(engine, monkeypatch)
    texts = Texts(llama, seed=400)
    prompts = [texts.sequences[0], *(np.append(texts.sequences[0][:n], 7) for n in (20, 40))]
    block = 8
    for query_block in (None, block):
        engine._packed.query_block = query_block
        for length in (9, 17, 65, 33):
            engine.clear_cache()
            some = [prompt[:length].tolist() for prompt in prompts]
            rows = rows_of(engine, some)
            assert np.abs(rows - reference_rows(llama, some)).max() < 5e-5
        for _ in range(40):
            texts.compare(engine, texts.batch(10))
        lone = [width for width in widths if width > 1 and width % block == 1]
        assert bool(lone) is (query_block is None)
        widths.clear()


def test_padded_passes_leave_none_either(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HFEngine(llama, device="cpu", kv_cache_bytes=0)
    forward = engine._open()
    assert forward.query_block is None
    forward.query_block = 8
    widths: list[int] = []
    forward._model.register_forward_pre_hook(
        lambda _module, _inputs, kwargs: widths.append(kwargs["input_ids"].shape[1]),
        with_kwargs=True,
    )
    for length in (1, 2, 8, 9, 17, 18, 65, LONGEST, 89):
        prompts = [[*range(length - 1), 7], [5] * length]
        rows = rows_of(engine, prompts)
        assert np.abs(rows - reference_rows(llama, prompts)).max() < 5e-5
    assert widths == [1, 2, 8, 10, 18, 18, 66, LONGEST, 90]
    # What the model cannot place is not added.
    assert forward.places == LONGEST
    forward.query_block = LONGEST - 1
    widths.clear()
    rows_of(engine, [[3] * LONGEST])
    assert widths == [LONGEST]


@on_a_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_knows_no_other_rows(llama: str, dtype: str) -> None:
    """With one head of keys, of which each batch below has a row whose last block is one query."""
    tolerance = 5e-5 if dtype == "float32" else 0.3
    prompts = [[*range(n), 7] for n in (64, 40, 20)] + [[*range(64), 9]]
    right = reference_rows(llama, prompts, dtype=dtype)
    for eager in (True, False):
        engine = HFEngine(llama, dtype=dtype, enforce_eager=eager)
        assert engine._packed is not None
        for width in (65, 33, 97, 1 << 30):
            with engine._packed.on_trial(width=width):
                rows = rows_of(engine, prompts)
            assert np.abs(rows - right).max() < tolerance
        engine.close()


def test_attention_that_plans_for_each_shape_is_switched_off_on_a_gpu(llama: str) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        HFEngine(llama, device="cpu").close()
        assert torch.backends.cuda.cudnn_sdp_enabled()
        avoid_cudnn_attention(torch.device("cuda:0"))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@on_a_gpu
def test_a_gpu_computes_without_it(llama: str) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    HFEngine(llama).close()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@on_a_gpu
def test_a_gpu_knows_no_other_rows_of_one_query_each(llama: str) -> None:
    engine = HFEngine(llama)
    assert engine._packed is not None
    prompts = [[*range(n), 7] for n in (1, 30, 3, 20, 5)]
    with engine._packed.on_trial(width=1):
        rows = rows_of(engine, prompts)
    assert np.abs(rows - reference_rows(llama, prompts)).max() < 5e-5
    engine.close()


@on_a_gpu
def test_a_gpu_records_anew_after_an_adapter(llama: str, tmp_path: Path) -> None:
    engine = HFEngine(llama)
    adapter = save_adapter(llama, tmp_path)
    prompts = [[1, 2, 3], [4, 5]]
    graphs_of(engine).clear()
    for turn in range(3):
        for _ in range(RECORDED_AFTER + 2):
            engine.clear_cache()
            rows = rows_of(engine, prompts)
            assert np.abs(rows - reference_rows(llama, prompts)).max() < 5e-5
        assert len(graphs_of(engine)) == 1
        assert not graphs_of(engine).reason
        engine.add_adapter(f"a{turn}", adapter)
        assert len(graphs_of(engine)) == 0
        rows = rows_of(engine, prompts, adapter=f"a{turn}")
        assert np.abs(rows - reference_rows(llama, prompts, adapter)).max() < 5e-5
    engine.close()


@on_a_gpu
@pytest.mark.parametrize("found_before", [True, False])
def test_a_gpu_goes_on_where_a_model_waits_for_it(
    llama: str, found_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not found_before:  # and breaks off the recording
        monkeypatch.setattr(graphs, "_no_waiting", nullcontext)
    engine = HFEngine(llama)
    assert len(graphs_of(engine)) > 0
    graphs_of(engine).clear()

    def wait(_module: object, _inputs: object, kwargs: dict[str, Any]) -> None:
        kwargs["input_ids"].sum().item()

    engine._open()._model.register_forward_pre_hook(wait, with_kwargs=True)
    prompts = [[1, 2, 3], [4, 5]]
    for _ in range(RECORDED_AFTER + 2):
        engine.clear_cache()
        rows = rows_of(engine, prompts)
        assert np.abs(rows - reference_rows(llama, prompts)).max() < 5e-5
    assert graphs_of(engine).reason
    torch.cuda.empty_cache()
    engine.close()


@on_a_gpu
@pytest.mark.parametrize("name", [*SERVED, *WINDOWED])
def test_a_gpu_replays_small_passes(name: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, name)
    engine = HFEngine(folder)
    texts = Texts(folder, seed=1)
    for batch in batches(texts):
        texts.compare(engine, batch)
    assert len(graphs_of(engine)) > 0
    assert not graphs_of(engine).reason
    engine.close()


@on_a_gpu
def test_a_gpu_replays_larger_passes_of_a_small_model(llama: str) -> None:
    engine = HFEngine(llama)
    rng = np.random.default_rng(3)
    for _ in range(RECORDED_AFTER + 2):
        engine.clear_cache()
        tokens = rng.integers(0, VOCAB, (64, 32))
        tokens[:, 0] = np.arange(64)  # no two share anything: a row each
        prompts = tokens.tolist()
        rows = rows_of(engine, prompts)
        assert np.abs(rows - reference_rows(llama, prompts)).max() < 5e-5
    assert any((64, 32) in [shape for _, shape in key] for key in graphs_of(engine)._graphs)
    engine.close()
