from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmpool import token_ids
from lmpool.errors import NoWorkers, PromptError
from lmpool.producer.prompts import prompt_bytes, several

VOCAB_SIZE = 300
LONGEST = 8

EXPECTED = np.array([1, 0, 299], dtype="<u4").tobytes()
INTEGERS = [np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


def check(token_ids: Any) -> bytes:
    return prompt_bytes(token_ids, VOCAB_SIZE, LONGEST)


@pytest.mark.parametrize(
    "token_ids",
    [
        [1, 0, 299],
        (1, 0, 299),
        deque([1, 0, 299]),
        iter([1, 0, 299]),
        {1: "a", 0: "b", 299: "c"}.keys(),
        [np.int64(1), np.uint8(0), np.int16(299)],
        [1, 0, np.array(299)],
        *(np.array([1, 0, 299], dtype) for dtype in INTEGERS),
        *(list(np.array([1, 0, 299], dtype)) for dtype in INTEGERS),
        np.array([1, 5, 0, 5, 299])[::2],
        np.array([1, 0, 299], ">i4"),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_prompts_come_in_many_shapes(token_ids: Any) -> None:
    assert check(token_ids) == EXPECTED


@pytest.mark.parametrize("kind", [set, frozenset])
def test_what_has_no_order_is_no_prompt(kind: Any) -> None:
    with pytest.raises(PromptError, match=f"a prompt of type {kind.__name__}, which has no order"):
        check(kind([200, 3, 150]))


@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=LONGEST))
def test_ids_are_little_endian_uint32(ids: list[int]) -> None:
    packed = check(ids)
    assert np.frombuffer(packed, "<u4").tolist() == ids
    assert check(np.array(ids)) == packed


def test_a_big_endian_machine_swaps_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherSystem:
        byteorder = "big" if sys.byteorder == "little" else "little"

    monkeypatch.setattr(token_ids, "sys", OtherSystem)
    assert check([1]) == (b"\0\0\0\1" if sys.byteorder == "little" else b"\1\0\0\0")


def test_torch_tensors_are_prompts() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.int64, torch.int32, torch.int16):
        tensor = torch.tensor([1, 0, 299], dtype=dtype)
        assert check(tensor) == EXPECTED
        assert check(list(tensor)) == EXPECTED  # 0-d elements
        assert check([1, tensor[1], np.int32(299)]) == EXPECTED
    assert check(torch.tensor([1, 5, 0, 5, 299])[::2]) == EXPECTED
    for refused in (
        torch.tensor([1.0, 2.0]),
        torch.tensor([True]),
        torch.tensor([[1, 2]]),
        torch.tensor(1),
        torch.tensor([], dtype=torch.int64),
        [torch.tensor(1.0)],
        [torch.tensor(True)],
        [torch.tensor([1, 2])],
    ):
        with pytest.raises(PromptError):
            check(refused)


@pytest.mark.parametrize(
    "empty",
    [[], (), np.array([], np.int64), np.array([]), pytest.param(iter([]), id="iter([])")],
    ids=repr,
)
def test_an_empty_prompt_is_refused(empty: Any) -> None:
    with pytest.raises(PromptError, match=r"empty prompt.*BOS"):
        check(empty)


@pytest.mark.parametrize(
    ("token_ids", "bad", "place"),
    [
        ([300], 300, 0),
        ([1, 2, 300, 301], 300, 2),
        ([1, -1], -1, 1),
        ([5, 2**32], 2**32, 1),
        ([5, 2**64], 2**64, 1),
        ([-(2**70)], -(2**70), 0),
        (np.array([1, 300]), 300, 1),
        (np.array([1, -1]), -1, 1),
        (np.array([1, 2**63], np.uint64), 2**63, 1),
        ([np.int8(-1)], -1, 0),
    ],
    ids=repr,
)
def test_an_id_out_of_range_is_named_with_its_place(token_ids: Any, bad: int, place: int) -> None:
    with pytest.raises(PromptError, match=rf"token id {bad} at position {place} .*\[0, 300\)"):
        check(token_ids)


@pytest.mark.parametrize(
    ("token_ids", "what", "place"),
    [
        ([1, 2.0], "2.0", 1),
        ([1, None], "None", 1),
        ([1, "2"], "'2'", 1),
        ([1, 2, b"3"], "b'3'", 2),
        ([True], "True", 0),
        ([1, False], "False", 1),
        ([1, np.True_], "True", 1),
        ([np.float64(2)], "2.0", 0),
        ([1, np.array(True)], "True", 1),
        ([[1, 2]], r"\[1, 2\]", 0),
        ([1, np.array([2, 3])], "array", 1),
    ],
    ids=repr,
)
def test_what_is_no_integer_is_named_with_its_place(token_ids: Any, what: str, place: int) -> None:
    with pytest.raises(PromptError, match=rf"token id .*{what}.* at position {place} is a"):
        check(token_ids)


@pytest.mark.parametrize(
    ("token_ids", "reason"),
    [
        ("text", r"write lm\.tokenizer\.encode\(text\)"),
        (b"text", "token ids are needed"),
        (5, "a list of token ids is needed"),
        (None, "a list of token ids is needed"),
        (1.5, "a list of token ids is needed"),
        pytest.param(object(), "a list of token ids is needed", id="object()"),
        (np.array([[1, 2]]), r"shape \(1, 2\): .*batch_next_token_logprobs"),
        (np.array(1), r"shape \(\)"),
        (np.array([1.0]), "dtype float64: integers are needed"),
        (np.array([True]), "dtype bool"),
        (np.array(["1"]), "dtype <U1"),
        (np.array([1], object), "dtype object"),
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_refused(token_ids: Any, reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        check(token_ids)


class Broken:
    """Breaks where it is asked for a number, and where it is to be shown."""

    def __index__(self) -> int:
        raise KeyError("broken")

    def __repr__(self) -> str:
        raise OSError("broken")


def midway() -> Iterator[int]:
    yield 1
    raise ZeroDivisionError("midway")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.tensor([1, 0]).to_sparse(), r"a prompt of type Tensor: .*\(TypeError: "),
        (lambda: torch.empty(2, dtype=torch.int64, device="meta"), "a prompt of type Tensor"),
        (lambda: torch.tensor([1.0], dtype=torch.bfloat16), "a prompt of type Tensor"),
        (lambda: torch.tensor([True]), "dtype bool: integers are needed"),
        (lambda: [1, torch.tensor(True)], r"token id tensor\(True\) at position 1 is a Tensor"),
        (midway, r"a prompt of type generator: .*\(ZeroDivisionError: midway\)"),
        (lambda: [1, Broken()], "token id <Broken> at position 1 is a Broken, not an integer"),
        (lambda: [1, 10**5000], "token id <int> at position 1 is outside"),
        (lambda: {"input_ids": [1]}, "a prompt of type dict: a list of token ids is needed"),
        (itertools.count, "a prompt of 9 tokens: this pool takes at most 8"),
    ],
)
def test_what_breaks_when_it_is_read_is_refused(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        check(make())


@pytest.mark.parametrize(
    "batch", ["", b"", {}, 5, None, midway()], ids=lambda value: type(value).__name__
)
def test_what_is_no_batch_is_refused(batch: Any) -> None:
    with pytest.raises(PromptError, match=f"prompts of type {type(batch).__name__}: a list of"):
        list(several(batch))


def test_an_error_of_ours_that_an_iterable_raises_stays_what_it_is() -> None:
    def asks() -> Iterator[int]:
        yield 1
        raise NoWorkers("of a call in between")

    for read in (check, lambda prompts: list(several(prompts))):
        with pytest.raises(NoWorkers):
            read(asks())


def test_a_prompt_longer_than_the_model_takes_is_refused() -> None:
    assert len(check([1] * LONGEST)) == LONGEST * 4
    with pytest.raises(PromptError, match="a prompt of 9 tokens: this pool takes at most 8"):
        check([1] * (LONGEST + 1))


def test_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="empty"):
        check([])


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.builds(np.int64, st.integers(-5, 400))
    | st.builds(np.float32, st.floats(width=16)),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=5,
)


@given(token_ids=st.lists(ANYTHING, max_size=4) | ANYTHING)
def test_anything_is_packed_or_refused(token_ids: Any) -> None:
    try:
        packed = check(token_ids)
    except PromptError as refused:
        assert str(refused)  # noqa: PT017
        return
    assert [int(token) for token in token_ids] == np.frombuffer(packed, "<u4").tolist()


PLAIN = st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=LONGEST), min_size=1)
STRANGE = st.one_of(
    st.sampled_from(
        [True, False, None, -1, VOCAB_SIZE, 2**31, 2**32 + 1, -(2**31), 2**70, 1.0, 1j]
    ),
    st.sampled_from(
        [..., "a", b"abcd", b"abcdefgh", [], [1], (1,), {1: 2}, {1}, frozenset({1}), int]
    ),
    st.sampled_from([np.int64(1), np.uint8(1), np.array([1, 2], np.int32), IntEnum("Id", "A").A]),
)


@given(prompts=PLAIN, kind=st.sampled_from([list, tuple]))
def test_plain_prompts_are_packed_together(prompts: list[list[int]], kind: type) -> None:
    given = [kind(ids) for ids in prompts]
    expected = [check(ids) for ids in prompts]
    assert token_ids.packed_all(given, VOCAB_SIZE, LONGEST) == expected
    assert token_ids.packed_all(tuple(given), VOCAB_SIZE, LONGEST) == expected


@given(prompts=PLAIN, run=st.integers(1, 20))
def test_many_prompts_are_packed_in_runs(prompts: list[list[int]], run: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_ids, "_RUN", run)
        assert token_ids.packed_all(prompts, VOCAB_SIZE, LONGEST) == [*map(check, prompts)]
        assert token_ids.packed_all([*prompts, [True]], VOCAB_SIZE, LONGEST) is None


@given(ids=st.lists(STRANGE, min_size=1), place=st.integers(0, 2), start=st.integers(0, 2))
def test_ids_that_are_no_plain_ones_are_not_packed_together(
    ids: list[Any], place: int, start: int
) -> None:
    prompts: list[Any] = [[1, 2], [3, 4], [5, 6]]
    prompts[place][start:start] = ids
    assert token_ids.packed_all(prompts, VOCAB_SIZE, 100) is None


@given(strange=STRANGE, place=st.integers(0, 3))
def test_prompts_that_are_no_plain_ones_are_not_packed_together(strange: Any, place: int) -> None:
    prompts: list[Any] = [[1, 2], [3, 4], [5, 6]]
    prompts.insert(place, strange)
    together = token_ids.packed_all(prompts, VOCAB_SIZE, LONGEST)
    if type(strange) in (list, tuple) and strange:
        assert together == [check(ids) for ids in prompts]
    else:
        assert together is None


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []], [[1] * (LONGEST + 1)]])
def test_prompts_that_may_not_be_are_not_packed_together(prompts: Any) -> None:
    assert token_ids.packed_all(prompts, VOCAB_SIZE, LONGEST) is None
