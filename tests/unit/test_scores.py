"""Scores of texts: what may be asked, how rows are reduced, and how the answer travels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmpool.backends.engine import Outcome, Request
from lmpool.errors import AnswerFormatError, JobFormatError, PromptError, PromptFailed
from lmpool.model_info import ModelInfo
from lmpool.producer.jobs import JobMaker
from lmpool.wants import Digester, PositionIds, Row, Score, TextScores, want_from_wire, want_to_wire
from lmpool.wants.digests import Digest
from tests.support.scores import check_scores, random_score

VOCAB = 300
INFO = ModelInfo(
    model="tiny",
    revision=None,
    fingerprint="0123456789abcdef" * 2,
    vocab_size=VOCAB,
    max_prompt_tokens=8,
    dtype="float32",
    engine="mock",
    encoding="f32",
)
MAKER = JobMaker(INFO)


def made(seed: int, vocab: int = 40) -> tuple[Request, np.ndarray[Any, np.dtype[np.float32]]]:
    """A text with any want of scores, and logits after each of its tokens but the last."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 20))
    want = random_score(rng, size, vocab).checked(replace(INFO, vocab_size=vocab))
    logits = (rng.normal(size=(size - 1, vocab)) * 5).astype(np.float32)
    if seed % 3 == 0:  # ties
        logits = np.round(logits)
    return Request(b"", rng.integers(0, vocab, size).astype(np.uint32), want=want), logits


# --- the reduction -----------------------------------------------------------------------------


@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_rows_are_reduced_as_in_float64(seed: int) -> None:
    request, logits = made(seed)
    want = request.want
    assert isinstance(want, Score)
    scores = want.of_rows(logits[want.start - 1 :], request.tokens[want.start :])
    check_scores(Outcome(b"", answer=scores), request, logits.astype(np.float64))
    # Log-probabilities are logits, too.
    rows = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    normalized = want.of_rows(
        rows[want.start - 1 :].astype(np.float32), request.tokens[want.start :]
    )
    check_scores(Outcome(b"", answer=normalized), request, logits.astype(np.float64))


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.integers(0, 100))
def test_pieces_are_parts_of_the_whole(seed: int, cut: int) -> None:
    request, logits = made(seed)
    want, text = request.want, request.tokens
    assert isinstance(want, Score)
    middle = want.start + cut % (text.size - want.start)
    whole = want.of_rows(logits[want.start - 1 :], text[want.start :])
    parts = []
    for start, stop in ((want.start, middle), (middle, text.size)):
        piece = want.piece(start, stop)
        if start < stop:
            assert piece.misfit_prompt(stop) is None
            parts.append(piece.of_rows(logits[start - 1 : stop - 1], text[start:stop]))
    joined = [np.concatenate(arrays) for arrays in zip(*(p.arrays() for p in parts), strict=True)]
    for one, other in zip(joined, whole.arrays(), strict=True):
        assert one.tobytes() == other.tobytes()


def test_ranks_count_all_that_are_at_least_as_likely() -> None:
    row = np.array([[1.0, 3.0, 3.0, 2.0, -np.inf]], np.float32)
    ranks = [int(Score().of_rows(row, np.array([token])).ranks[0]) for token in range(5)]
    assert ranks == [4, 2, 2, 3, 5]
    first = Score(top_logprobs=2).of_rows(row, np.array([1])).top_logprobs
    assert first is not None
    assert first.token_ids.tolist() == [[1, 2]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_no_numbers_fail(bad: float) -> None:
    row = np.zeros((1, 5), np.float32)
    row[0, 3] = bad
    with pytest.raises(PromptFailed, match="NaN"):
        Score(top_logprobs=2).of_rows(row, np.array([1]))


@pytest.mark.parametrize("temperature", [1e-300, 1e-20, 1e20, 1e300])
def test_temperatures_beyond_what_float32_has(temperature: float) -> None:
    row = np.array([[0.0, 1.0, -np.inf]], np.float32)
    want = Score(1, 3, None, temperature).checked(replace(INFO, vocab_size=3))
    scores = want.of_rows(row, np.array([1]))
    flat = temperature > 1
    assert scores.logprobs[0] == pytest.approx(-math.log(2) if flat else 0.0)
    assert scores.top_logprobs is not None
    assert scores.top_logprobs.logprobs[0, 2] == -np.inf


def test_the_mass_of_the_others_is_summed_however_little_it_is() -> None:
    row = np.zeros(50, np.float32)
    row[7] = 12.0
    for temperature in (1.0, 0.1, 0.05, 0.01):
        scores = Score(top_logprobs=1, temperature=temperature).of_rows(row[None], np.array([3]))
        assert scores.top_logprobs is not None
        rest = float(scores.top_logprobs.rest[0])  # type: ignore[index]
        assert rest == pytest.approx(math.log(49) - 12.0 / temperature, rel=1e-4)
    whole = Score(top_logprobs=50).of_rows(row[None], np.array([3]))
    assert whole.top_logprobs is not None
    assert whole.top_logprobs.rest[0] == -np.inf  # type: ignore[index]


def test_totals_and_greedy_texts() -> None:
    ranks = np.array([1, 1, 2], np.int32)
    scores = TextScores(np.array([-1.0, -0.25, -2.0], np.float32), ranks)
    assert scores.total == -3.25
    assert type(scores.total) is float
    assert scores.is_greedy is False
    assert TextScores(scores.logprobs[:2], ranks[:2]).is_greedy is True


# --- what may be asked -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("want", "said"),
    [
        (Score(start=0), "start=0: write an integer of 1 or more"),
        (Score(start=-3), "start=-3"),
        (Score(start=1.5), "start=1.5"),  # type: ignore[arg-type]
        (Score(start=True), "start=True"),
        (Score(top_logprobs=VOCAB + 1), f"top_logprobs=301: write an integer from 0 to {VOCAB}"),
        (Score(top_logprobs=-1), "top_logprobs=-1"),
        (Score(temperature=math.nan), "temperature=nan: write a number above 0"),
        (Score(temperature=math.inf), "temperature=inf"),
        (Score(temperature=0.0), "temperature=0.0"),
        (Score(temperature=-1.0), "temperature=-1.0"),
        (Score(token_ids=[]), "token_ids: at least one token id is needed"),
        (Score(token_ids=[[]]), r"token_ids\[0\]: at least one token id is needed"),
        (Score(token_ids=[VOCAB]), r"token_ids: token id 300 at position 0 is outside \[0, 300\)"),
        (Score(token_ids=[[1], [-1]]), r"token_ids\[1\]: token id -1 at position 0"),
        (Score(token_ids=[[1, 2], [1]]), r"token_ids\[1\] has 1 ids, token_ids\[0\] has 2: give"),
        (Score(token_ids=np.zeros((2, 2))), "dtype float64"),
        (Score(token_ids="ab"), "token_ids of type str"),  # type: ignore[arg-type]
        (Score(token_ids=np.zeros((1, 2, 2), int)), "shape"),
        (Score(token_ids=b"\0\0\0"), "token_ids are not 1 to"),
        (Score(token_ids=b"\0\1\0\0"), ""),
        (Score(token_ids=b"\0\0\1\0"), "token id 65536 in token_ids: below 300 expected"),
        (Score(token_ids=PositionIds(2, b"\0\0\0\0")), "2 ids a position, of 1"),
        (Score(token_ids=PositionIds(1, b"\0\0\1\0")), "token id 65536"),
    ],
    ids=repr,
)
def test_bad_wants_are_refused(want: Score, said: str) -> None:
    if not said:
        assert want.checked(INFO) == want
        return
    with pytest.raises(PromptError, match=said):
        MAKER.check(want)


@pytest.mark.parametrize(
    ("want", "text", "said"),
    [
        (Score(), [1], "a text of 1 token: nothing stands before the first"),
        (Score(start=3), [1, 2, 3], "start=3 is beyond a text of 3 tokens: write an"),
        (Score(start=2**80), [1, 2, 3], "start=16777215 or more is beyond a text of 3 tokens"),
        (Score(token_ids=[[1], [2]]), [1, 2], "token_ids for 2 positions: 1 expected"),
        (Score(token_ids=[[1]]), [1, 2, 3], "token_ids for 1 positions: 2 expected"),
        (Score(), list(range(10)), "at most 9"),
    ],
)  # fmt: skip
def test_texts_that_do_not_fit_are_refused(want: Score, text: list[int], said: str) -> None:
    checked = MAKER.check(want)
    assert isinstance(checked, Score)
    with pytest.raises(PromptError, match=said):
        MAKER.one(text, checked, None)
    if checked.start < 8:
        with pytest.raises(PromptError, match=f"prompt 1: .*{said}") as refused:
            MAKER.many([_fitting(checked), text], checked, None)
        assert refused.value.index == 1


def _fitting(want: Score) -> list[int]:
    if isinstance(want.token_ids, PositionIds):
        return [0] * (want.start + want.token_ids.positions)
    return [0] * min(9, want.start + 1)


def test_a_text_may_have_one_token_more_than_a_prompt() -> None:
    assert MAKER.one(range(9), MAKER.check(Score()), None).token_ids().size == 9
    with pytest.raises(PromptError, match="at most 8"):
        MAKER.one(range(9), MAKER.check(Row()), None)


def test_an_answer_is_bounded() -> None:
    long = replace(INFO, max_prompt_tokens=1 << 20, vocab_size=1 << 17)
    want = Score(top_logprobs=1 << 10).checked(long)
    assert want.misfit_prompt(1 << 12) is None
    assert "ask for fewer, or in parts" in str(want.misfit_prompt(1 << 14))


@pytest.mark.parametrize(
    "given",
    [
        [[1, 2], [3, 4]],
        ((1, 2), (3, 4)),
        [np.array([1, 2]), range(3, 5)],
        np.array([[1, 2], [3, 4]], np.int16),
    ],
    ids=repr,
)
def test_lists_for_each_position_in_any_form(given: Any) -> None:
    checked = Score(token_ids=given).checked(INFO)
    assert checked.token_ids == PositionIds(2, np.array([1, 2, 3, 4], "<u4").tobytes())
    assert checked.checked(INFO) == checked


def test_tensors_are_ids() -> None:
    torch = pytest.importorskip("torch")
    one = Score(token_ids=torch.tensor([3, 4])).checked(INFO)
    assert one == Score(token_ids=np.array([3, 4])).checked(INFO)
    each = Score(token_ids=torch.tensor([[3], [4]])).checked(INFO)
    assert each == Score(token_ids=[[3], [4]]).checked(INFO)
    assert one != each
    # torch takes a tensor of one number for that number.
    listed = [torch.tensor([3]), torch.tensor([4])]
    want = Score(token_ids=listed)
    listed[0][0] = 5
    assert want.checked(INFO) == each
    assert Score(token_ids=[torch.tensor(3), torch.tensor(4)]).checked(INFO) == one


# --- what travels ------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32))
def test_wants_travel_and_have_digests_of_their_own(seed: int) -> None:
    rng = np.random.default_rng(seed)
    wants = [random_score(rng, 9, VOCAB).checked(INFO) for _ in range(4)]
    digests: dict[Digest, Score] = {}
    for want in wants:
        found = want_from_wire(msgpack.unpackb(msgpack.packb(want_to_wire(want))))
        assert found == want
        assert hash(found) == hash(want)
        digest = Digester(INFO.fingerprint).digest(want, b"0000")
        assert digests.setdefault(digest, want) == want


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ([], "score wants 5 fields"),
        ([0, 0, 1.0, None, None], "start=0"),
        ([True, 0, 1.0, None, None], "start=True"),
        ([1, -1, 1.0, None, None], "top_logprobs=-1"),
        ([1, 0, 0.0, None, None], "temperature=0"),
        ([1, 0, math.nan, None, None], "temperature=nan"),
        ([1, 0, "1", None, None], "temperature='1'"),
        ([1, 0, 1.0, 1, None], "token_ids are not"),
        ([1, 0, 1.0, None, b""], "token_ids are not"),
        ([1, 0, 1.0, None, b"12345"], "token_ids are not"),
        ([1, 0, 1.0, 0, b"1234"], "ids a position=0"),
        ([1, 0, 1.0, 2, b"1234"], "2 ids a position, of 1"),
        ([1, 0, 1.0, 2, b"123412341234"], "3 ids are no whole number of 2 a position"),
        ([1, 0, 1.0, None, b"1234" * ((1 << 20) + 1)], "token_ids are not"),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_what_is_no_want_is_refused(fields: list[Any], said: str) -> None:
    with pytest.raises(JobFormatError, match=said):
        want_from_wire(["score", *fields])


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), vocab=st.sampled_from([2, 40, 256, 257, 70_000]))
def test_answers_are_stored_and_read(seed: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    info = replace(INFO, vocab_size=vocab)
    want = random_score(rng, 6, vocab)
    want = replace(want, top_logprobs=min(want.top_logprobs, 3, vocab)).checked(info)
    count = 6 - want.start
    logits = rng.normal(size=(count, vocab)).astype(np.float32)
    scores = want.of_rows(logits, rng.integers(0, vocab, count))
    data = want.encode(Outcome(b"", answer=scores), vocab)
    found = want.decode(data, info)
    for one, other in zip(found.arrays(), scores.arrays(), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()
        assert not one.flags.writeable
    assert found.nbytes == scores.nbytes
    form, numbers = msgpack.unpackb(data)
    for wrong in (numbers[:-1], numbers + b"\0", b"", numbers * 2 if want.token_ids else b"1"):
        if not isinstance(want.token_ids, PositionIds) and wrong == numbers * 2:
            continue  # the scores of a longer text
        with pytest.raises(AnswerFormatError):
            want.decode(msgpack.packb([form, wrong]), info)
    with pytest.raises(AnswerFormatError):
        want.decode(msgpack.packb([form + 1, numbers]), info)


def test_a_plain_score_takes_few_bytes() -> None:
    info = replace(INFO, vocab_size=128_256)
    scores = TextScores(np.zeros(1000, np.float32), np.full(1000, 128_256, np.int32))
    data = Score().encode(Outcome(b"", answer=scores), info.vocab_size)
    assert len(data) <= 7 * 1000 + 16
    assert Score().decode(data, info).ranks.tolist() == [128_256] * 1000


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(b"", row=np.zeros(VOCAB, np.float32)),
        Outcome(b"", answer=np.zeros(3, np.float32)),
        Outcome(b"", answer=TextScores(np.zeros(1, np.float32), np.ones(1, np.int32))),
    ],
    ids=["row", "tokens", "no tops"],
)
def test_other_answers_of_an_engine_fail(outcome: Outcome) -> None:
    with pytest.raises(PromptFailed, match="the engine gave"):
        Score(top_logprobs=2).encode(outcome, VOCAB)


def test_long_wants_are_not_kept_by_a_digester() -> None:
    digester = Digester(INFO.fingerprint)
    for n in range(3):
        digester.digest(Score(token_ids=bytes(40_000) + bytes([n, 0, 0, 0])), b"0000")
    assert not digester._started
