"""The wants that a row answers: what callers may write, and what travels."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmpool.errors import JobFormatError, PromptError
from lmpool.wants import (
    Choice,
    Digester,
    Draw,
    Generate,
    OfRow,
    Score,
    Stream,
    Tokens,
    Top,
    Want,
    want_from_wire,
)
from lmpool.wants.top import likeliest
from tests.support.parts import info_of
from tests.support.strategies import token_bytes
from tests.unit.test_any_arguments import ANYTHING, STRANGE

VOCAB = 300
INFO = info_of(vocab_size=VOCAB)
DIGESTER = Digester(INFO.fingerprint)
WORDS = -(-VOCAB // 32)


def digest(want: Top | Tokens | Draw) -> bytes:
    return DIGESTER.digest(want.checked(INFO), b"0000")


def mask(ids: Any, size: int = VOCAB, junk: bool = False) -> np.ndarray[Any, np.dtype[np.int32]]:
    """A packed mask; with `junk` what lies behind the vocabulary is set."""
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    bits[size:] = junk
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


# --- what callers may write --------------------------------------------------------------------


@pytest.mark.parametrize("k", [5, np.int64(5), np.uint8(5), torch.tensor(5), np.array(5)])
def test_a_number_of_any_library_is_k(k: Any) -> None:
    checked = Top(k).checked(INFO)
    assert type(checked.k) is int
    assert digest(Top(k)) == digest(Top(5))


@pytest.mark.parametrize("k", [0, -1, VOCAB + 1, 2**70, 2.0, "3", None, True, np.bool_(True), [3]])
def test_what_is_no_k_is_named(k: Any) -> None:
    with pytest.raises(PromptError, match=r"^k=") as refused:
        Top(k).checked(INFO)
    assert repr(k)[:50] in str(refused.value)
    assert str(VOCAB) in str(refused.value)


def test_every_k_of_the_vocabulary_is_one() -> None:
    assert [Top(k).checked(INFO) for k in (1, VOCAB)] == [Top(1), Top(VOCAB)]


GIVEN: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    iter,
    np.array,
    lambda ids: np.array(ids, np.uint16),
    lambda ids: np.array(ids, np.int32),
    lambda ids: np.array(ids, ">i8"),
    lambda ids: [np.int64(i) for i in ids],
    torch.tensor,
    lambda ids: torch.tensor(ids, dtype=torch.int32),
    lambda ids: (i for i in ids),
]


@pytest.mark.parametrize("make", GIVEN, ids=range(len(GIVEN)))
def test_token_ids_come_in_any_form_and_keep_their_order(make: Callable[[list[int]], Any]) -> None:
    ids = [7, 3, 7, 0, 299]
    assert Tokens(make(ids)).checked(INFO) == Tokens(token_bytes(*ids))
    assert digest(Tokens(make(ids))) == digest(Tokens(ids))
    assert digest(Tokens(make(ids[::-1]))) != digest(Tokens(ids))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([], "token_ids: at least one token id is needed"),
        ([1, VOCAB], "token_ids: token id 300 at position 1 is outside"),
        ([1, 2, -1], "token_ids: token id -1 at position 2 is outside"),
        (np.array([2**40]), "token_ids: token id 1099511627776"),
        ([1, 2.0], r"token_ids: token id 2\.0 at position 1 is a float"),
        ([True], "token_ids: token id True at position 0 is a bool"),
        ("text", "token_ids of type str"),
        (np.zeros((1, 2), int), r"token_ids of shape \(1, 2\)"),
        (np.zeros(2), "token_ids of dtype float64"),
        (b"123", "token_ids are not 1 to"),
        (b"", "token_ids are not 1 to"),
        (token_bytes(VOCAB), "token_ids: token id 300"),
        ({1: 2}, "token_ids of type dict"),
        ({1, 2}, "token_ids of type frozenset, which has no order: write a list of token ids"),
        (None, "token_ids of type NoneType"),
        (range(2**40), "token_ids of more than 262144 ids"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_are_no_token_ids_is_told(given: Any, reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        Tokens(given).checked(INFO)


def _raising() -> Iterator[int]:
    yield 1
    raise OSError("midway")


@pytest.mark.parametrize("name", ["token_ids", "allowed", "excluded"])
def test_an_iterator_that_raises_is_told(name: str) -> None:
    make: Callable[..., Any] = Tokens if name == "token_ids" else Draw
    with pytest.raises(PromptError, match=f"{name} of type generator.*OSError: midway"):
        make(**{name: _raising()}).checked(INFO)


def _forms(ids: list[int]) -> list[Any]:
    """The same ids in whatever a caller may have, and may change, or read only once."""
    read_once = [iter(ids), (i for i in ids), map(int, ids)]
    return [*read_once, [*ids], array("i", ids), np.array(ids), torch.tensor(ids)]


@pytest.mark.parametrize(
    "make",
    [
        lambda ids: Tokens(ids),
        lambda ids: Draw(seed=1, allowed=ids),
        lambda ids: Draw(seed=1, excluded=ids),
        lambda ids: Score(token_ids=ids),
        lambda ids: Score(token_ids=[ids, [1, 2, 3]]),
        lambda ids: Generate(seed=1, eos_token_ids=ids),
        lambda ids: Generate(seed=1, stop=[ids]),
        lambda ids: Generate(seed=1, stop=iter([ids])),
        lambda ids: Stream(seed=1, stop=[[5], ids]),
    ],
)
def test_a_want_stays_as_it_was_made_however_often_it_is_read(make: Callable[[Any], Want]) -> None:
    right = make((3, 7, 9)).checked(INFO)
    for ids in _forms([3, 7, 9]):
        want = make(ids)
        if not isinstance(ids, Iterator):
            ids[0] = 200
        for _ in range(2):
            assert want.checked(INFO) == right
    assert want.checked(info_of(vocab_size=VOCAB + 1)) is not None


# --- which tokens may be drawn -----------------------------------------------------------------

SET = [*range(10, 15), 299, 0, 31, 32]


@pytest.mark.parametrize("ids", [SET, [*range(0, 300, 2)], [*range(3, 300)]], ids=len)
def test_one_set_of_tokens_has_one_digest_however_it_is_said(ids: list[int]) -> None:
    others = sorted(set(range(VOCAB)) - set(ids))
    backwards = ids[::-1]
    said: list[tuple[Any, Any]] = [
        (ids, None),
        (backwards, None),
        ([*ids, *ids[:3]], None),
        (set(ids), None),
        (frozenset(ids), set()),
        (np.array(backwards), None),
        (torch.tensor(ids), []),
        (iter(ids), ()),
        (mask(ids), None),
        (mask(ids, junk=True), None),
        (torch.from_numpy(mask(ids)), None),
        (mask(ids).astype(">i4"), None),
        (mask(ids)[None], None),
        (torch.from_numpy(mask(ids))[None], None),
        (None, others),
        (None, mask(others)),
        (range(VOCAB), others),
        ([*ids, *others[:2]], others[:2][::-1]),
        (mask(range(VOCAB)), mask(others, junk=True)),
        (Choice("only", token_bytes(*backwards)), None),
        (Choice("but", token_bytes(*others)), None),
        (Choice("mask", mask(ids, junk=True).tobytes()), None),
    ]
    wants = [Draw(3, 1, 1.0, True, allowed, excluded).checked(INFO) for allowed, excluded in said]
    assert len(set(wants)) == 1
    assert len({digest(want) for want in wants}) == 1
    (choice,) = {want.allowed for want in wants}
    assert isinstance(choice, Choice)
    assert np.flatnonzero(choice.members(VOCAB)).tolist() == sorted(ids)
    assert len(choice.data) == min(4 * len(ids), 4 * len(others), 4 * WORDS)


@pytest.mark.parametrize(
    ("allowed", "excluded"),
    [(None, None), (None, []), (range(VOCAB), None), (mask(range(VOCAB)), mask([]))],
)
def test_every_token_is_said_by_nothing(allowed: Any, excluded: Any) -> None:
    assert Draw(1, 1, allowed=allowed, excluded=excluded).checked(INFO) == Draw(1, 1)


@given(
    ids=st.sets(st.integers(0, VOCAB - 1), min_size=1),
    other=st.sets(st.integers(0, VOCAB - 1), min_size=1),
)
def test_sets_have_the_same_digest_only_if_they_are_the_same(
    ids: set[int], other: set[int]
) -> None:
    first, second = (digest(Draw(1, 1, allowed=some)) for some in (ids, other))
    assert (first == second) == (ids == other)


BAD_DRAWS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n=0: write an integer from 1 to 4096"),
    ({"n": 4097}, "n=4097"),
    ({"n": 1.0}, r"n=1\.0"),
    ({"n": True}, "n=True"),
    ({"seed": 1.5}, r"seed=1\.5"),
    ({"seed": "x"}, "seed='x'"),
    ({"temperature": math.nan}, "temperature=nan"),
    ({"temperature": math.inf}, "temperature=inf"),
    ({"temperature": -0.5}, r"temperature=-0\.5"),
    ({"temperature": "hot"}, "temperature='hot'"),
    ({"temperature": True}, "temperature=True"),
    ({"replacement": 1}, "replacement=1"),
    ({"replacement": None}, "replacement=None"),
    ({"allowed": []}, "allowed: at least one token is needed"),
    ({"allowed": mask([])}, "allowed: at least one token is needed"),
    ({"allowed": [VOCAB]}, "allowed: token id 300"),
    ({"allowed": [-1]}, "allowed: token id -1"),
    ({"allowed": "text"}, "allowed of type str"),
    ({"allowed": np.ones(VOCAB, bool)}, "allowed of dtype bool"),
    ({"allowed": mask([1], 320)[:9]}, r"allowed of shape \(9,\), int32: a packed mask.*\(10,\)"),
    ({"allowed": mask([1], 352)}, r"allowed of shape \(11,\)"),
    ({"allowed": mask([1])[None, None]}, r"allowed of shape \(1, 1, 10\)"),
    ({"allowed": np.stack([mask([1])] * 2)}, r"allowed of shape \(2, 10\)"),
    ({"allowed": np.arange(10, dtype=np.int32)}, r"may be token ids or.*shape \(1, 10\)"),
    ({"allowed": np.array([7, 7, 0, 3, 9, 0, 250, 11, 11, 0], np.int32)}, "may be token ids or"),
    ({"excluded": torch.arange(290, 300, dtype=torch.int32)}, "excluded.*may be token ids"),
    ({"allowed": range(10**12)}, "allowed of more than 300 ids"),
    ({"excluded": [VOCAB]}, "excluded: token id 300"),
    ({"excluded": range(VOCAB)}, "excluded: every token that is allowed is excluded"),
    ({"allowed": [1, 2], "excluded": [2, 1]}, "excluded: every token that is allowed"),
    ({"n": 3, "replacement": False, "allowed": [1, 2]}, "n=3 without replacement: 2 tokens"),
    ({"n": VOCAB + 1, "replacement": False}, "n=301 without replacement: 300 tokens"),
    ({"allowed": Choice("only", token_bytes(VOCAB))}, "allowed: token id 300"),
    ({"allowed": Choice("mask", token_bytes(1))}, "allowed: a mask of 4 bytes: 40 expected"),
    ({"allowed": Choice("mask", bytes(40))}, "allowed: no token may be drawn"),
    ({"allowed": Choice("only", b"")}, "allowed: a set of tokens is not"),
    ({"allowed": Choice("some", b"0000")}, "allowed: unknown form 'some'"),  # type: ignore[arg-type]
    ({"allowed": Choice("only", "ids")}, "allowed: a set of tokens is not"),  # type: ignore[arg-type]
    ({"allowed": Choice("only", b"\1\0\0\0"), "excluded": [3]}, "allowed: a Choice says"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_DRAWS, ids=[reason for _, reason in BAD_DRAWS])
def test_what_is_no_draw_is_told(bad: dict[str, Any], reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        Draw(**bad).checked(INFO)


@pytest.mark.parametrize(("ids", "size"), [([0, 5], 64), ([5, 0], 33), ([0], 32)])
def test_what_may_be_ids_of_a_small_vocabulary_is_told(ids: list[int], size: int) -> None:
    info, words = replace(INFO, vocab_size=size), np.array(ids, np.int32)
    with pytest.raises(PromptError, match="may be token ids or a packed mask"):
        Draw(allowed=words).checked(info)
    assert Draw(allowed=words.astype(np.int64)).checked(info) == Draw(allowed=ids).checked(info)


def test_equal_draws_have_one_digest() -> None:
    plain = Draw(4, 5, 0.0)
    said = [
        Draw(np.int32(4), np.uint64(5), -0.0),  # type: ignore[arg-type]
        Draw(torch.tensor(4), 5 + 2**63, np.float32(0)),  # type: ignore[arg-type]
        Draw(4, 5, 0),
    ]
    assert {digest(want) for want in said} == {digest(plain)}
    assert all(math.copysign(1.0, want.checked(INFO).temperature) == 1.0 for want in said)


def test_a_batch_draws_by_the_seeds_that_follow_and_without_a_seed_anew() -> None:
    assert [want.seed for want in Draw(1, 2**63 - 2).each(3)] == [2**63 - 2, 2**63 - 1, 0]
    fresh = [want.seed for want in Draw(1).each(20)]
    assert len(set(fresh)) == 20
    assert not Draw(1, 1).repeats
    assert not Draw.cached
    assert Top.cached
    assert list(Top(3).each(2)) == [Top(3)] * 2


@settings(max_examples=150)
@given(
    kind=st.sampled_from([Top, Tokens, Draw]),
    values=st.lists(ANYTHING | st.sampled_from([make() for make in STRANGE[:1]]), max_size=6),
)
def test_anything_is_checked_or_refused(kind: type[OfRow[Any]], values: list[Any]) -> None:
    if kind is not Draw:
        values = values[:1] or [None]
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    try:
        want = kind(**dict(zip(names, values, strict=False))).checked(INFO)
    except PromptError as error:
        refusal = str(error)
        assert 0 < len(refusal) < 500
    else:
        assert want.misfit(VOCAB) is None
        assert want.checked(INFO) == want


@pytest.mark.parametrize("make", STRANGE, ids=range(len(STRANGE)))
@pytest.mark.parametrize("name", [field.name for field in fields(Draw)])
def test_strange_values_are_refused_in_each_place(name: str, make: Callable[[], Any]) -> None:
    try:
        Draw(**{name: make()}).checked(INFO)
    except PromptError as error:
        assert str(error)  # noqa: PT017


# --- what travels ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (["top"], "top wants 1 fields"),
        (["top", 1, 1], "top wants 1 fields"),
        (["top", 0], "k=0"),
        (["top", True], "k=True"),
        (["top", 1.0], r"k=1\.0"),
        (["top", 2**25], "k=33554432"),
        (["top", None], "k=None"),
        (["tokens"], "tokens wants 1 fields"),
        (["tokens", b""], "token_ids are not 1 to 262144 uint32"),
        (["tokens", b"123"], "token_ids"),
        (["tokens", [1]], "token_ids"),
        (["tokens", "1234"], "token_ids"),
        (["tokens", bytes(4 * 2**18 + 4)], "token_ids"),
        (["draw", 1, 1, 1.0, True, None], "draw wants 6 fields"),
        (["draw", 0, 1, 1.0, True, None, None], "n=0"),
        (["draw", 4097, 1, 1.0, True, None, None], "n=4097"),
        (["draw", 1, None, 1.0, True, None, None], "seed=None"),
        (["draw", 1, True, 1.0, True, None, None], "seed=True"),
        (["draw", 1, 1.0, 1.0, True, None, None], r"seed=1\.0"),
        (["draw", 1, 1, -1.0, True, None, None], "temperature=-1.0"),
        (["draw", 1, 1, math.nan, True, None, None], "temperature=nan"),
        (["draw", 1, 1, math.inf, True, None, None], "temperature=inf"),
        (["draw", 1, 1, True, True, None, None], "temperature=True"),
        (["draw", 1, 1, 1.0, 1, None, None], "replacement=1"),
        (["draw", 1, 1, 1.0, True, "only", None], "a set of tokens"),
        (["draw", 1, 1, 1.0, True, None, b"0000"], "unknown form None"),
        (["draw", 1, 1, 1.0, True, "some", b"0000"], "unknown form 'some'"),
        (["draw", 1, 1, 1.0, True, [], b"0000"], "unknown form"),
        (["draw", 1, 1, 1.0, True, "but", b""], "a set of tokens"),
        (["draw", 1, 1, 1.0, True, "mask", b"00000"], "a set of tokens"),
        (["draw", 1, 1, 1.0, True, "mask", bytes((4 << 20) + 4)], "a set of tokens"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_what_is_no_want_is_refused_with_its_reason(found: Any, reason: str) -> None:
    with pytest.raises(JobFormatError, match=reason) as refused:
        want_from_wire(found)
    assert len(str(refused.value)) < 300


def test_what_a_digester_keeps_is_bounded_in_bytes() -> None:
    used = Digester(INFO.fingerprint)
    for number in range(50):
        want = Tokens(token_bytes(number) * 5000)
        first = used.digest(want, b"0000")
        assert used.digest(Tokens(want.token_ids), b"0000") == first
    assert not used._started


@pytest.mark.parametrize("size", [1, 2, 64, 300, 5_000, 128_256])
@pytest.mark.parametrize("distinct", [1, 3, 1_000, 10**9])
def test_the_likeliest_are_those_that_sorting_brings(size: int, distinct: int) -> None:
    """Ties by id, wherever they lie; also where few tokens, or none, can come."""
    random = np.random.default_rng([size, distinct])
    for possible in (size, min(size, 5), 0):
        row = np.full(size, -np.inf, np.float32)
        where = random.permutation(size)[:possible]
        row[where] = -random.integers(1, distinct + 1, possible)
        row[size // 2 :] = row[: size - size // 2]
        order = np.argsort(-row, kind="stable")
        for k in sorted({1, min(2, size), min(20, size), -(-size // 300), size}):
            assert likeliest(row, k).tolist() == order[:k].tolist()
            assert likeliest(row, k).dtype == np.int32


def test_more_draws_without_replacement_than_tokens_are_refused_as_they_travel() -> None:
    assert Draw(9, seed=1, replacement=False).misfit(8) is not None
    assert Draw(8, seed=1, replacement=False).misfit(8) is None
    assert Draw(9, seed=1).misfit(8) is None
