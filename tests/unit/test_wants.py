"""The wants: checks, wire forms, digests, and how answers are stored and read."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.backends.engine import Outcome
from lmpool.errors import (
    AnswerFormatError,
    JobFormatError,
    PromptError,
    PromptFailed,
    RowFormatError,
)
from lmpool.head_form import HeadForm
from lmpool.model_info import ModelInfo
from lmpool.rows import EncodedRow, pack_logprobs
from lmpool.wants import (
    Choice,
    Digester,
    Draw,
    Generate,
    Generation,
    Row,
    Tokens,
    Top,
    TopLogprobs,
    Want,
    decode_all,
    want_from_wire,
    want_to_wire,
)
from lmpool.wants.answers import FINISH_REASONS
from tests.support.strategies import (
    ADAPTERS,
    ANYTHING,
    PROMPTS,
    UINT32,
    VOCABULARY,
    WANTS,
    token_bytes,
)

FINGERPRINT = "0123456789abcdef" * 2
VOCAB = 300
INFO = ModelInfo(
    model="tiny",
    revision=None,
    fingerprint=FINGERPRINT,
    vocab_size=VOCAB,
    max_prompt_tokens=8,
    dtype="bfloat16",
    engine="mock",
    encoding="bf16",
    eos_token_ids=(2, 5),
    head=HeadForm(1 << 20, "f32"),  # a part for each token
)


FORMS: tuple[Literal["only", "but", "mask"], ...] = ("only", "but", "mask")


def generate(**changed: Any) -> Generate:
    return replace(Generate(3, (0,), 1.0, 1), **changed)


GENERATE_FIELDS: dict[str, Any] = {
    "max_tokens": 3,
    "eos": [0],
    "temperature": 1.0,
    "seed": 1,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "stop": [],
    "logprobs": False,
    "top_logprobs": 0,
}
BAD_FIELDS: dict[str, list[Any]] = {
    "max_tokens": [True, 3.0, None, -1, 2**31],
    "eos": [[1.0], [True], [[0]], [0] * 257, None, {}],
    "temperature": ["hot", True, None, -1.0, math.nan, math.inf],
    "seed": [1.0, True, None],
    "top_p": ["most", True, None, 0.0, -0.5, 1.5, math.nan],
    "top_k": [1.0, True, None, -1, 2**31],
    "min_p": ["some", None, -0.5, 1.5, math.nan],
    "stop": [None, {}, [1], [[]], [[1.0]], [[0] * 257], [[0]] * 65, [[0], []]],
    "logprobs": [None, 1, "yes"],
    "top_logprobs": [None, True, -1, 2**31],
}
"""What the fields of a `Generate` cannot be."""


def wire(**changed: Any) -> list[Any]:
    """A `Generate` as it travels."""
    return ["generate", *(GENERATE_FIELDS | changed).values()]


# --- checks ------------------------------------------------------------------------------------


def test_what_is_left_open_is_the_models_own() -> None:
    assert Row().checked(INFO) == Row("bf16")
    assert Row("f32").checked(INFO) == Row("f32")
    assert Generate(4).checked(INFO) == Generate(4, (2, 5), 1.0, None)
    assert Generate(4, ()).checked(INFO) == Generate(4, (), 1.0, None)
    # One more than there is room for: then the model's length ends it.
    assert Generate(2**31 - 1, ()).checked(INFO) == Generate(9, ())
    assert Generate(4, (), top_k=VOCAB + 1).checked(INFO).top_k == VOCAB
    assert Generate(4, (), stop=[[2, 1], (0,), [2, 1]]).checked(INFO).stop == ((0,), (2, 1))


@given(want=WANTS)
def test_a_checked_want_stays_as_it_is_and_travels(want: Want) -> None:
    info = replace(INFO, vocab_size=VOCABULARY)
    checked = want.checked(info)
    assert checked.checked(info) == checked
    assert want_from_wire(want_to_wire(checked)) == checked


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"max_tokens": -1}, "max_tokens=-1: write an integer, 0 or more"),
        ({"max_tokens": True}, "max_tokens=True: write an integer"),
        ({"temperature": math.nan}, r"temperature=nan: write a number of 0 \(greedy\)"),
        ({"seed": 1.5}, r"seed=1\.5: write an integer, or None"),
        ({"top_p": 0}, "top_p=0: write a number above 0, up to 1"),
        ({"top_p": 1.01}, r"top_p=1\.01: write a number above 0"),
        ({"top_p": math.nan}, "top_p=nan: write a number above 0"),
        ({"top_p": None}, "top_p=None: write a number above 0"),
        ({"top_k": -1}, "top_k=-1: write an integer, .*; 0 leaves nothing out"),
        ({"top_k": 2.0}, r"top_k=2\.0: write an integer"),
        ({"min_p": -0.1}, r"min_p=-0\.1: write a number from 0"),
        ({"min_p": 1.1}, r"min_p=1\.1: write a number from 0"),
        ({"min_p": math.nan}, "min_p=nan: write a number from 0"),
        ({"stop": [[1], []]}, r"stop\[1\] of 0 token ids: write 1 to 256"),
        ({"stop": [[1] * 257]}, r"stop\[0\] of 257 token ids"),
        ({"stop": [[1]] * 65}, "stop has more than 64 sequences"),
        ({"stop": [[1, VOCAB]]}, r"stop\[0\]: token id 300 at position 1 is outside"),
        ({"stop": [[1, 2.0]]}, r"stop\[0\]: token id 2\.0 at position 1 is a float"),
        ({"stop": [13]}, r"stop\[0\]=13: write a sequence of token ids; stop=\[\[13\]\]"),
        ({"stop": "\n"}, r"stop='.*': write token ids, such as \[lm\.encode\(text\)\]"),
        ({"stop": ["end"]}, r"stop\[0\] of type str: token ids are needed"),
        ({"stop": None}, "stop=None: write a list of token sequences"),
        ({"logprobs": 3}, "logprobs=3: write True or False"),
        ({"top_logprobs": VOCAB + 1}, "top_logprobs=301: write an integer from 0 to 300"),
        ({"top_logprobs": -1}, "top_logprobs=-1: write an integer"),
        ({"top_logprobs": True}, "top_logprobs=True: write an integer"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_continuation_that_cannot_be_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(PromptError, match=said):
        generate(**changed).checked(INFO)


def test_an_answer_that_would_be_too_large_is_refused() -> None:
    wide = replace(INFO, vocab_size=128_256, max_prompt_tokens=131_072)
    assert generate(max_tokens=2**31 - 1, top_logprobs=20).checked(wide).max_tokens == 131_073
    with pytest.raises(PromptError, match="at most 4194304 in one answer; ask for fewer, or set"):
        generate(max_tokens=2**31 - 1, top_logprobs=50).checked(wide)
    assert generate(max_tokens=1000, top_logprobs=50).checked(wide).top_logprobs == 50


def test_stop_sequences_of_any_kind_are_the_same() -> None:
    kinds: list[Any] = [
        [[5, 1], [3]],
        ((3,), (5, 1)),
        [np.array([3]), [5, 1], range(3, 4)],
        ({5: 0, 1: 0}.keys(), iter([3])),
        (ids for ids in ([3], [5, 1])),
    ]
    for kind in kinds:
        assert generate(stop=kind).checked(INFO).stop == ((3,), (5, 1))


def test_a_tensor_of_one_id_is_a_stop_sequence() -> None:
    torch = pytest.importorskip("torch")
    assert Generate(4, (), stop=[torch.tensor([3])]).checked(INFO).stop == ((3,),)
    with pytest.raises(PromptError, match="write a sequence of token ids"):
        Generate(4, (), stop=[torch.tensor(3)]).checked(INFO)


def test_a_seed_counts_up_and_none_is_another_for_each() -> None:
    assert list(generate(seed=3).each(2)) == [generate(seed=3), generate(seed=4)]
    assert list(generate(seed=2**63 - 1).each(2)) == [generate(seed=2**63 - 1), generate(seed=0)]
    drawn = generate(seed=None).each(20)
    assert len({want.seed for want in drawn}) == 20
    assert all(0 <= want.seed < 2**63 for want in drawn if want.seed is not None)
    assert {replace(want, seed=None) for want in drawn} == {generate(seed=None)}
    assert list(Row("f32").each(3)) == [Row("f32")] * 3


# --- wire form ---------------------------------------------------------------------------------


@given(want=WANTS)
def test_wants_round_trip(want: Want) -> None:
    packed = msgpack.packb(want_to_wire(want))
    found = want_from_wire(msgpack.unpackb(packed))
    assert found == want
    assert type(found) is type(want)
    assert hash(found) == hash(want)
    assert msgpack.packb(want_to_wire(found)) == packed


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, "no want: None"),
        ({}, "no want"),
        ("row", "no want"),
        ([], "no want"),
        ([None], "no want"),
        ([b"row", "f32"], "no want"),
        ([["row"], "f32"], "no want"),
        (["embed"], "unknown want 'embed'; there are row, top, tokens, score, draw, generate"),
        (["Row", "f32"], "unknown want 'Row'"),
        (["row"], "row wants 1 fields"),
        (["row", "f32", 1], "row wants 1 fields"),
        (["row", None], "unknown encoding None"),
        (["row", 3], "unknown encoding 3"),
        (["row", ["f32"]], "unknown encoding"),
        (["row", "f64"], "unknown encoding 'f64'"),
        (["row", "u32"], "unknown encoding 'u32'"),
        (["generate"], "generate wants 10 fields"),
        (["generate", 3, [0], 1.0, 1], "generate wants 10 fields"),
        *(
            (wire(**{name: value}), f"{name}|{'eos' if 'eos' in name else name}")
            for name, values in BAD_FIELDS.items()
            for value in values
        ),
        (wire(max_tokens=2**31 - 1, top_logprobs=3), "top_logprobs=3 of up to 2147483647"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_no_want_is_refused_with_its_reason(found: Any, reason: str) -> None:
    with pytest.raises(JobFormatError, match=reason):
        want_from_wire(found)


KINDS = st.sampled_from([*(want.kind for want in get_args(Want)), "x"])


@given(kind=KINDS, fields=st.lists(ANYTHING, max_size=7))
def test_any_fields_are_read_or_refused(kind: str, fields: list[Any]) -> None:
    try:
        want = want_from_wire([kind, *fields])
    except JobFormatError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert len(Digester(FINGERPRINT).digest(want, b"0000")) == 16  # it can be hashed
    assert len(refusal) < 300


# --- digests -----------------------------------------------------------------------------------


def test_everything_that_changes_the_result_changes_the_digest() -> None:
    wants: list[Want] = [
        *(Row(encoding) for encoding in ("f32", "bf16", "f16")),
        Top(1),
        Top(2),
        Tokens(token_bytes(1)),
        Tokens(token_bytes(1, 2)),
        Tokens(token_bytes(2, 1)),
        Tokens(token_bytes(1, 1)),
        Draw(1, 1),
        Draw(2, 1),
        Draw(1, 2),
        Draw(1, 1, 0.5),
        Draw(2, 1, 1.0, False),
        *(Draw(1, 1, 1.0, True, Choice(form, token_bytes(1))) for form in FORMS),
        Draw(1, 1, 1.0, True, Choice("only", token_bytes(1, 2))),
        generate(),
        generate(seed=2),
        generate(max_tokens=4),
        generate(eos_token_ids=(1,)),
        generate(eos_token_ids=(0, 1)),
        generate(eos_token_ids=()),
        generate(temperature=0.5),
        generate(top_p=0.5),
        generate(top_k=5),
        generate(min_p=0.5),
        generate(stop=((1,),)),
        generate(stop=((1,), (2,))),
        generate(stop=((1, 2),)),
        generate(logprobs=True),
        generate(top_logprobs=1),
    ]
    digests = []
    for fingerprint in (FINGERPRINT, FINGERPRINT[::-1]):
        digester = Digester(fingerprint)
        for tokens in (token_bytes(1), token_bytes(2), token_bytes(1, 2), token_bytes(2, 1)):
            for adapter in (None, "a@1", "a@2"):
                digests += [digester.digest(want, tokens, adapter) for want in wants]
    assert len(set(digests)) == len(digests) == 2 * 4 * 3 * len(wants)
    assert {len(digest) for digest in digests} == {16}


ASKED = st.tuples(WANTS, PROMPTS, st.none() | st.sampled_from(["a@1", "b@1", "a@2", "@", "a@"]))


@given(first=ASKED, second=ASKED)
def test_what_is_asked_has_the_same_digest_only_if_it_is_the_same(
    first: tuple[Want, bytes, str | None], second: tuple[Want, bytes, str | None]
) -> None:
    def identity(asked: tuple[Want, bytes, str | None]) -> tuple[Any, ...]:
        want, tokens, adapter = asked
        return want, tokens, adapter if adapter is None else adapter.rpartition("@")[2]

    digester = Digester(FINGERPRINT)
    digests = [digester.digest(*asked) for asked in (first, second)]
    assert (digests[0] == digests[1]) == (identity(first) == identity(second))
    # As another process has it, which has seen nothing before.
    assert digests == [Digester(FINGERPRINT).digest(*asked) for asked in (first, second)]


@given(want=WANTS, prompts=st.lists(PROMPTS, max_size=5), adapter=ADAPTERS)
def test_digests_of_many_are_those_of_each(
    want: Want, prompts: list[bytes], adapter: str | None
) -> None:
    digester = Digester(FINGERPRINT)
    expected = [Digester(FINGERPRINT).digest(want, tokens, adapter) for tokens in prompts]
    assert digester.digests(want, prompts, adapter) == expected
    assert digester.digests(want, iter(prompts), adapter) == expected
    assert [digester.digest(want, tokens, adapter) for tokens in prompts] == expected


@given(
    first=st.lists(UINT32, min_size=1, max_size=6), second=st.lists(UINT32, min_size=1, max_size=6)
)
def test_prompts_have_the_same_digest_only_if_they_are_the_same(
    first: list[int], second: list[int]
) -> None:
    digester = Digester(FINGERPRINT)
    digests = digester.digests(Row("f32"), [token_bytes(*first), token_bytes(*second)])
    assert (digests[0] == digests[1]) == (first == second)


def test_bytes_do_not_move_between_one_token_and_the_next() -> None:
    # The same digits, grouped in other ways.
    prompts = [[1, 11], [11, 1], [111], [1, 1, 1], [0, 1], [1, 0], [1], [256], [1, 256], [257]]
    digests = Digester(FINGERPRINT).digests(Row("f32"), [token_bytes(*ids) for ids in prompts])
    assert len(set(digests)) == len(prompts)


def test_tokens_cannot_be_taken_for_what_precedes_them() -> None:
    digester = Digester(FINGERPRINT)
    head = msgpack.packb([FINGERPRINT, None, "row", "f32"])
    padded = head + b"\0" * (-len(head) % 4)
    tokens = token_bytes(1)
    assert digester.digest(Row("f32"), padded + tokens) != digester.digest(Row("f32"), tokens)


def test_two_names_of_one_adapter_share_results() -> None:
    digester, tokens = Digester(FINGERPRINT), token_bytes(1)
    first = digester.digest(Row("f32"), tokens, "a@77")
    assert digester.digest(Row("f32"), tokens, "b@77") == first
    assert digester.digest(Row("f32"), tokens, "a@b@77") == first
    # An adapter without a fingerprint is not the base model.
    assert digester.digest(Row("f32"), tokens, "a@") != digester.digest(Row("f32"), tokens)


def test_digests_are_the_same_in_every_release() -> None:
    # A change here makes every cached result unreachable: raise the protocol instead.
    digester = Digester(FINGERPRINT)
    row = digester.digest(Row("f32"), token_bytes(1, 5, 9))
    assert row.hex() == "057c9b5c0cd60bf8098e2e6c4e21b4b2"
    generated = digester.digest(generate(), token_bytes(7), "x@1f")
    assert generated.hex() == "3fdba124aada6f10bddced62ca1bb891"


@given(tokens=st.binary(min_size=4, max_size=40), adapters=st.lists(st.text(max_size=3)))
def test_what_a_digester_keeps_changes_no_digest(tokens: bytes, adapters: list[str]) -> None:
    used = Digester(FINGERPRINT)
    for adapter in adapters:
        used.digest(Row("bf16"), b"other", adapter)
    for other in (None, "a@1"):
        fresh = Digester(FINGERPRINT).digest(Row("bf16"), tokens, other)
        assert used.digest(Row("bf16"), tokens, other) == fresh


def test_a_digester_keeps_a_bounded_number_of_beginnings() -> None:
    used = Digester(FINGERPRINT)
    expected = [Digester(FINGERPRINT).digest(generate(seed=i), b"0000") for i in range(3)]
    for i in range(5000):
        used.digest(generate(seed=i), b"0000")
    assert len(used._started) <= 1024
    assert [used.digest(generate(seed=i), b"0000") for i in range(3)] == expected


@pytest.mark.parametrize("first", [0.0, -0.0])
def test_the_two_zeros_are_one_temperature(first: float) -> None:
    # Equal wants, hence one entry wherever wants are kept; their bits must be equal as well.
    digester = Digester(FINGERPRINT)
    wants = [generate(temperature=zero).checked(INFO) for zero in (first, 0.0, -0.0)]
    for want in wants:
        assert math.copysign(1.0, want.temperature) == 1.0
        assert digester.digest(want, b"0000") == Digester(FINGERPRINT).digest(want, b"0000")
    assert len({digester.digest(want, b"0000") for want in wants}) == 1
    (found,) = {want_from_wire(wire(temperature=zero, min_p=zero)) for zero in (first, 0.0, -0.0)}
    assert isinstance(found, Generate)
    assert math.copysign(1.0, found.temperature) == 1.0


# --- what is stored ----------------------------------------------------------------------------


@given(
    values=st.lists(st.floats(-60, 0, width=32), min_size=1, max_size=50),
    wanted=st.sampled_from(["f32", "f16", "bf16"]),
)
def test_a_row_that_was_stored_is_read(values: list[float], wanted: Any) -> None:
    row = np.array(values, np.float32)
    want = Row(wanted)
    data = want.encode(Outcome(b"", row), row.size)
    found = want.decode(data, replace(INFO, vocab_size=row.size))
    assert isinstance(found, EncodedRow)
    # What was computed in float32 is never stored as bfloat16: rather more than less.
    assert found.encoding == ("f16" if wanted == "f16" else "f32")
    if wanted != "f16":
        assert found.logprobs().tobytes() == row.tobytes()
    with pytest.raises(RowFormatError):
        want.decode(data, replace(INFO, vocab_size=row.size + 1))


@given(bits=st.lists(st.integers(0, 0x7F00), min_size=1, max_size=50))
def test_logits_that_were_stored_are_read_as_log_probabilities(bits: list[int]) -> None:
    logits = np.array(bits, np.uint16)
    outcome = Outcome(b"", logits, 2.5)
    info = replace(INFO, vocab_size=logits.size)
    short, exact = (
        Row(e).decode(Row(e).encode(outcome, logits.size), info) for e in ("bf16", "f32")
    )
    assert (short.encoding, exact.encoding) == ("bf16", "f32")
    assert short.logprobs().tobytes() == exact.logprobs().tobytes()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (None, "gave no row"),
        (np.zeros(VOCAB - 1, np.float32), r"shape \(299,\), float32: \(300,\) was expected"),
        (np.zeros((1, VOCAB), np.float32), r"shape \(1, 300\)"),
        (np.zeros(VOCAB, np.float64), "float64"),
        (np.zeros(VOCAB, np.int16), "int16"),
        ([0.0] * VOCAB, "shape None, list"),
        ("a row", "str"),
        (np.full(VOCAB, np.nan, np.float32), "NaN for this prompt; another dtype"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("encoding", ["f32", "bf16", "f16"])
def test_what_is_no_row_of_the_model_fails(row: Any, reason: str, encoding: Any) -> None:
    with pytest.raises(PromptFailed, match=reason):
        Row(encoding).encode(Outcome(b"", row), VOCAB)


def test_logits_that_are_no_numbers_fail() -> None:
    for encoding in ("f32", "bf16", "f16"):
        with pytest.raises(PromptFailed, match="NaN"):
            Row(encoding).encode(Outcome(b"", np.zeros(VOCAB, np.uint16), math.nan), VOCAB)


def continuation(want: Generate, ids: list[int], **changed: Any) -> Generation:
    """One with any numbers, as an engine gives it."""
    n, k = len(ids), want.top_logprobs
    random = np.random.default_rng(n)
    top = None
    if k:
        likely = random.integers(0, VOCAB, (n, k)).astype(np.int32)
        numbers = -random.random((n, k), np.float32)
        top = TopLogprobs(likely, numbers, np.full(n, -np.inf, np.float32))
    logprobs = -random.random(n, np.float32) if want.logprobs else None
    answer = Generation(np.array(ids, np.int32), 0, "length", logprobs, top)
    return replace(answer, **changed)


IDS = st.lists(st.integers(0, VOCAB - 1), max_size=50)
PACKED_IDS = np.array([7, 0, 299, 7], "<u4").tobytes()
DAMAGE = ("cut", "longer", "form", "NaN", "ids", "none")


@given(ids=IDS, logprobs=st.booleans(), k=st.integers(0, 3), data=st.data())
def test_a_continuation_that_was_stored_is_read(
    ids: list[int], logprobs: bool, k: int, data: st.DataObject
) -> None:
    want = generate(max_tokens=50, logprobs=logprobs, top_logprobs=k)
    reason = data.draw(st.sampled_from(FINISH_REASONS))
    ending = data.draw(st.integers(0, len(ids)))
    answer = continuation(want, ids, finish_reason=reason, ending=ending)
    stored = want.encode(Outcome(b"", answer=answer), VOCAB)
    found = want.decode(stored, INFO)
    assert (found.finish_reason, found.ending) == (reason, ending)
    assert found.text_ids.tolist() == ids[: len(ids) - ending]
    for one, other in zip(answer.arrays(), found.arrays(), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
    assert found.nbytes == answer.nbytes == sum(array.nbytes for array in answer.arrays())
    room = replace(INFO, max_prompt_tokens=100)
    assert len(stored) <= want.checked(room).stored_bytes(room) + 16
    for cut in (stored[:-1], stored + b"\0"):
        with pytest.raises(AnswerFormatError):
            want.decode(cut, INFO)


@given(
    want=st.one_of(
        st.builds(Top, st.integers(1, 8)),
        st.just(Tokens(PACKED_IDS)),
        st.just(Draw(3, seed=1).checked(INFO)),
    ),
    count=st.integers(0, 6),
    damage=st.none() | st.tuples(st.integers(0, 5), st.sampled_from(DAMAGE)),
    seed=st.integers(0, 1000),
)
def test_answers_to_one_want_are_read_together_as_they_are_read_alone(
    want: Any, count: int, damage: tuple[int, str] | None, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows = random.normal(size=(count, VOCAB)).astype(np.float32)
    rows -= np.log(np.exp(rows).sum(1, keepdims=True))
    stored = [want.encode(Outcome(b"", answer=want.of_row(row)), VOCAB) for row in rows]
    if damage is not None and damage[0] < count:
        place, kind = damage
        data = stored[place]
        others: dict[str, bytes] = {
            "cut": data[:-1], "longer": data + b"\0", "form": bytes([data[0], 99]) + data[2:],
            "NaN": data[:4] + b"\xff" * 4 + data[8:], "ids": data[:-4] + b"\xff" * 4, "none": b"",
        }  # fmt: skip
        stored[place] = others[kind]
    expected = []
    for data in stored:
        try:
            expected.append(want.decode(data, INFO))
        except AnswerFormatError as error:
            expected.append(error)
    for found, alone in zip(decode_all(want, stored, INFO), expected, strict=True):
        assert type(found) is type(alone)
        if isinstance(alone, AnswerFormatError):
            assert str(found) == str(alone)
            continue
        one, other = (
            [each] if isinstance(each, np.ndarray) else each.arrays() for each in (found, alone)
        )
        for mine, right in zip(one, other, strict=True):
            assert (mine.dtype, mine.shape) == (right.dtype, right.shape)
            assert mine.tobytes() == right.tobytes()
            assert not mine.flags.writeable
            assert mine.base is None or memoryview(mine.base).nbytes <= 4 * mine.nbytes + 64
        assert getattr(found, "rest", 0.0) == getattr(alone, "rest", 0.0)


def test_a_continuation_of_another_layout_is_stored_in_one() -> None:
    tokens, want = np.arange(20, dtype=np.int64)[::2], generate(max_tokens=20)
    answer = Generation(tokens, 0, "length")  # type: ignore[arg-type]
    data = want.encode(Outcome(b"", answer=answer), VOCAB)
    assert want.decode(data, INFO).token_ids.tolist() == list(range(0, 20, 2))


def test_other_log_probabilities_than_were_asked_for_are_no_answer() -> None:
    plain, told = generate(), generate(logprobs=True, top_logprobs=2)
    for want, other in ((plain, told), (told, plain), (generate(logprobs=True), plain)):
        with pytest.raises(PromptFailed, match="other log-probabilities than were asked for"):
            want.encode(Outcome(b"", answer=continuation(other, [1, 2])), VOCAB)


def test_an_answer_to_another_want_is_none() -> None:
    row = Outcome(b"", np.zeros(VOCAB, np.float32))
    tokens = Outcome(b"", answer=Generation(np.zeros(3, np.int32), 0, "length"))
    with pytest.raises(PromptFailed, match="no tokens"):
        generate().encode(row, VOCAB)
    with pytest.raises(PromptFailed, match="no row"):
        Row("f32").encode(tokens, VOCAB)
    with pytest.raises(AnswerFormatError):
        generate().decode(Row("f32").encode(row, VOCAB), INFO)
    with pytest.raises(RowFormatError):
        Row("f32").decode(generate().encode(tokens, VOCAB), INFO)


STORED = b"\0\0\1\0" + b"\7\0" * 2
"""The numbers of a continuation: ended by an EOS token, the last of two."""


def test_a_stored_continuation_stays_readable() -> None:
    found = generate().decode(msgpack.packb([1, STORED]), INFO)
    assert (found.token_ids.tolist(), found.ending, found.finish_reason) == ([7, 7], 1, "eos")
    assert generate().encode(Outcome(b"", answer=found), VOCAB) == msgpack.packb([1, STORED])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb(None),
        msgpack.packb([]),
        msgpack.packb([1]),
        msgpack.packb([2, STORED]),
        msgpack.packb([1, STORED[:-1]]),
        msgpack.packb([1, "text"]),
        msgpack.packb([1, [1]]),
        msgpack.packb([1, STORED, 1]),
        msgpack.packb([1, msgpack.ExtType(1, STORED)]),
        msgpack.packb([1, STORED])[:-1],
        msgpack.packb([1, STORED]) + b"\0",
        msgpack.packb([1, b""]),
        msgpack.packb([1, b"\4" + STORED[1:]]),  # ended by no reason there is
        msgpack.packb([1, STORED[:2] + b"\3\0" + STORED[4:]]),  # by more than it has
        msgpack.packb([1, STORED + b"\0\0" * 2]),  # longer than what was asked for
        msgpack.packb([1, STORED[:4] + b"\xff\xff" * 2]),  # a token that there is not
        b"\x91" * 10_000,
        pack_logprobs(np.zeros(3, np.float32)).joined(),
    ],
    ids=range(20),
)
def test_what_is_no_continuation_is_refused(data: bytes) -> None:
    with pytest.raises(AnswerFormatError) as refused:
        generate().decode(data, INFO)
    assert 0 < len(str(refused.value)) < 300


@given(data=st.binary(max_size=100))
def test_random_bytes_are_no_answer_and_do_no_harm(data: bytes) -> None:
    for want in (Row("bf16"), generate()):
        with pytest.raises(AnswerFormatError):
            want.decode(data, INFO)
