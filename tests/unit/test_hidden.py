"""Hidden states and heads: how they travel, how a head is fitted, and how it is applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lmpool.backends import Outcome
from lmpool.backends.head_fit import NoHead, fitted
from lmpool.errors import AnswerFormatError, PromptError, PromptFailed, WireError
from lmpool.head_form import HeadForm, Numbers
from lmpool.model_info import ModelInfo
from lmpool.producer.frameworks import framework
from lmpool.producer.heads import Head, HeadNumbers
from lmpool.wants import HeadPart, Hidden
from tests.support.parts import info_of

F32 = npt.NDArray[np.float32]
SIZE = 8
FORM = HeadForm(SIZE, "bf16", scale=0.5, cap=30.0, bias=True)
INFO = info_of(head=FORM)
HIDDEN = Hidden().checked(INFO)


def stored(state: Any) -> bytes:
    return HIDDEN.encode(Outcome(b"", answer=state), 16)


# --- on the wire -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "size"),
    [
        (torch.randn(SIZE).bfloat16().float().numpy(), 2 * SIZE),
        (np.random.default_rng(1).random(SIZE).astype(np.float16).astype(np.float32), 2 * SIZE),
        (np.random.default_rng(1).random(SIZE, np.float32), 4 * SIZE),
        (np.full(SIZE, 1e30, np.float32), 4 * SIZE),
    ],
)
def test_a_state_takes_two_bytes_a_number_where_that_loses_nothing(state: F32, size: int) -> None:
    data = stored(state)
    assert size < len(data) <= size + 6
    found = HIDDEN.decode(data, INFO)
    np.testing.assert_array_equal(found, state)
    assert found.dtype == np.float32
    assert not found.flags.writeable


@given(arrays.arrays(np.float32, SIZE, elements=st.floats(width=32, allow_nan=False)))
def test_what_was_stored_of_a_state_is_read(state: F32) -> None:
    if not np.isfinite(state).all():
        with pytest.raises(PromptFailed, match="overflows"):
            stored(state)
        return
    np.testing.assert_array_equal(HIDDEN.decode(stored(state), INFO), state)


@pytest.mark.parametrize(
    "answer", [None, np.zeros((2, SIZE), np.float32), np.zeros(SIZE), np.full(SIZE, np.nan, "f4")]
)
def test_what_is_no_state_fails(answer: Any) -> None:
    with pytest.raises(PromptFailed):
        stored(answer)


@given(st.binary(max_size=80) | st.binary(max_size=40).map(lambda data: msgpack.packb([16, data])))
def test_random_bytes_are_no_state(data: bytes) -> None:
    try:
        found = HIDDEN.decode(data, INFO)
    except AnswerFormatError:
        return
    assert found.shape == (SIZE,)
    assert np.isfinite(found).all()


def test_parts_of_a_head_are_all_of_it() -> None:
    form = HeadForm(3 << 20, "f32")  # a row of more than a part
    assert (form.part_rows, form.parts(5), form.part_bytes(4, 5)) == (1, 5, 12 << 20)
    form = HeadForm(1024, "bf16", bias=True)
    assert form.part_rows == 2048
    assert form.parts(5000) == 4
    assert [form.part_bytes(n, 5000) for n in range(4)] == [4 << 20, 4 << 20, 904 * 2048, 20_000]
    assert form.rows_of(2, 5000) == slice(4096, 5000)


def test_a_part_has_the_size_that_its_model_says() -> None:
    part = HeadPart(0).checked(INFO)
    data = np.arange(16 * SIZE * 2, dtype=np.uint8)
    packed = part.encode(Outcome(b"", answer=part.of_part(data)), 16)
    np.testing.assert_array_equal(part.decode(packed, INFO).data, data)
    hashed = HeadPart(0, True).checked(INFO)
    assert len(hashed.encode(Outcome(b"", answer=hashed.of_part(data)), 16)) < 24
    with pytest.raises(AnswerFormatError, match="part of a head"):
        HeadPart(1).checked(INFO).decode(packed, INFO)
    with pytest.raises(PromptFailed, match="no part"):
        part.encode(Outcome(b"", answer=np.zeros(3, np.float32)), 16)


def test_a_model_info_says_what_the_head_is_or_why_there_is_none() -> None:
    assert ModelInfo.unpack(INFO.pack()) == INFO
    without = info_of(no_head="it is a test")
    assert ModelInfo.unpack(without.pack()) == without
    with pytest.raises(PromptError, match="toy is served without hidden states: it is a test"):
        Hidden().checked(without)


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_size": 0},
        {"hidden_size": 2**40},
        {"hidden_size": "8"},
        {"numbers": "f64"},
        {"numbers": ["f32"]},
        {"scale": 0.0},
        {"scale": float("nan")},
        {"cap": -1.0},
        {"cap": "x"},
        {"bias": 1},
    ],
)
def test_a_head_that_cannot_be_is_no_model_info(changed: dict[str, Any]) -> None:
    found = msgpack.unpackb(INFO.pack())
    found["head"].update(changed)
    with pytest.raises(WireError, match="head="):
        ModelInfo.unpack(msgpack.packb(found))
    found["head"] = 3
    with pytest.raises(WireError, match="head=3"):
        ModelInfo.unpack(msgpack.packb(found))


# --- what lies behind the matrix ---------------------------------------------------------------

WEIGHT = np.random.default_rng(3).standard_normal((50, SIZE)).astype(np.float32)
REAL = np.random.default_rng(4).standard_normal((2, SIZE)).astype(np.float32)


def products(states: F32) -> F32:
    return states @ WEIGHT.T


def fit(after: Callable[[F32], F32], *known: float, numbers: Numbers = "f32") -> HeadForm:
    return fitted(
        REAL,
        after(products(REAL)),
        products,
        lambda states: (after(products(states)), states),
        known,
        numbers,
        bias=False,
    )


@pytest.mark.parametrize("scale", [1.0, 0.0625, 1 / 13, 2.7])
@pytest.mark.parametrize("cap", [None, 0.5, 30.0, 50.0])
def test_scale_and_cap_are_found_whatever_their_names(scale: float, cap: float | None) -> None:
    def after(raw: F32) -> F32:
        scaled = raw * np.float32(scale)
        return scaled if cap is None else np.float32(cap) * np.tanh(scaled / np.float32(cap))

    found = fit(after, 13, 0.0625, 2.7, 30, 50.0, 0.5, 4096, 1e-5)
    assert (found.scale, found.cap) == (scale, cap)
    assert found.hidden_size == SIZE


def test_a_cap_before_the_scale_is_another_cap() -> None:
    found = fit(lambda raw: 0.25 * 30 * np.tanh(raw / 30), 30, 0.25)
    assert found.scale == 0.25
    assert found.cap == pytest.approx(7.5, rel=1e-3)


def test_numbers_that_no_configuration_has_are_measured() -> None:
    assert fit(lambda raw: raw * np.float32(0.37)).scale == pytest.approx(0.37, rel=1e-6)


@pytest.mark.parametrize(
    "after",
    [
        lambda raw: raw + 1,
        lambda raw: np.roll(raw, 1, axis=1),
        lambda raw: raw.clip(-20, 20),
        lambda raw: np.where(raw > 40, 40 + raw / 9, raw),
        lambda raw: raw[:, :-1],
        lambda raw: raw * np.nan,
        lambda raw: raw * np.linspace(1, 1.01, raw.shape[1], dtype=np.float32),
    ],
)
def test_whatever_else_a_model_does_is_refused(after: Callable[[F32], F32]) -> None:
    with pytest.raises(NoHead):
        fit(after, 20, 40)


def test_real_states_have_the_models_own_logits() -> None:
    wrong = products(REAL) * np.float32(1.01)
    with pytest.raises(NoHead, match="differ"):
        fitted(REAL, wrong, products, lambda s: (products(s), s), (), "f32", bias=False)


# --- applied -----------------------------------------------------------------------------------


def numbers_of(numbers: Numbers) -> HeadNumbers:
    weight = torch.from_numpy(WEIGHT)
    if numbers == "bf16":
        data = weight.bfloat16().view(torch.int16).numpy()
    else:
        data = WEIGHT.astype("<f2" if numbers == "f16" else "<f4")
    form = HeadForm(SIZE, numbers, 0.5, 30.0, True)
    bias = np.linspace(-1, 1, 50, dtype=np.float32)
    return HeadNumbers(form, 50, np.ascontiguousarray(data).reshape(-1).view(np.uint8), bias)


@pytest.mark.parametrize("numbers", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_rows_of_states_by_numpy_and_by_torch(numbers: Numbers, device: str | None) -> None:
    made = numbers_of(numbers)
    raw = made.weight()
    weight = (raw.astype(np.uint32) << 16).view(np.float32) if numbers == "bf16" else raw
    logits = 0.5 * (REAL.astype(np.float64) @ weight.astype(np.float64).T + made.bias)
    logits = 30 * np.tanh(logits / 30)
    right = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for name in ("numpy", "torch"):
        head: Head[Any] = Head(made, framework(name), device)
        each = [torch.tensor(h) for h in REAL]
        for states in (REAL, torch.from_numpy(REAL), list(REAL), each):
            rows = head.logprobs(states)
            assert isinstance(rows, np.ndarray if name == "numpy" else torch.Tensor)
            np.testing.assert_allclose(np.asarray(rows), right, atol=1e-5)
        np.testing.assert_allclose(np.asarray(head.logprobs(REAL[0])), right[0], atol=1e-5)
        narrow = torch.from_numpy(REAL).bfloat16()
        np.testing.assert_allclose(np.asarray(head.logprobs(narrow)), right, atol=0.1)
        assert "bf16" in repr(head) or numbers != "bf16"
