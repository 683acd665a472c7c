"""Answers as .npy, msgpack and JSON, without a gateway around them."""

from __future__ import annotations

import io
import json
from typing import Any

import msgpack
import numpy as np
import pytest

from lmpool.gateway.binary_forms import (
    ERRORS_HEADER,
    JSON,
    MSGPACK,
    NPY,
    Found,
    JsonForm,
    MsgpackForm,
    NpyForm,
    accepted,
    answer_bytes,
    fields_of,
)
from lmpool.gateway.errors import ApiError
from lmpool.wants import Draw, Draws, Hidden, Row, Score, TextScores, Tokens, Top, TopLogprobs

FAILED = ApiError(500, "no such\r\nluck: é\ud800")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, JSON),
        ("", JSON),
        ("*/*", JSON),
        ("application/x-npy", NPY),
        ("Application/X-NPY; q=0.5, application/json;q=0.2", NPY),
        ("application/json;q=0.2, application/x-msgpack", MSGPACK),
        ("text/html, application/xhtml+xml, */*;q=0.8", JSON),
        ("application/x-npy;q=0, */*;q=0.1", JSON),
        ("text/event-stream", JSON),
    ],
)
def test_what_is_accepted(header: str | None, expected: str) -> None:
    assert accepted(header) == expected


@pytest.mark.parametrize(
    "header", ["text/html", "application/x-npy;q=nan", "*/*;q=2", ";;,,;", "q"]
)
def test_what_is_not(header: str) -> None:
    with pytest.raises(ApiError, match="application/x-npy") as error:
        accepted(header)
    assert error.value.status == 400


def loaded(data: bytes) -> list[Any]:
    """Every array of a file, as numpy reads them."""
    file, found = io.BytesIO(data), []
    while file.tell() < len(data):
        found.append(np.load(file))
    return found


ROW = np.array([-1.5, -np.inf, -0.1], np.float32)
TOP = TopLogprobs(
    np.array([2, 0], np.int32), np.array([-0.1, -1.5], np.float32), np.float32(-np.inf)
)
SCORES = TextScores(np.array([-0.25, -3], np.float32), np.array([1, 9], np.int32))


def test_rows_are_a_plain_array_and_an_error_is_nan_in_it() -> None:
    want = Row()
    found: list[Found] = [fields_of(want, ROW), FAILED, fields_of(want, ROW)]
    data, headers = NpyForm([want] * 3).all(found)
    (array,) = loaded(data)
    assert array.dtype == np.float32
    assert np.array_equal(array, [ROW, [np.nan] * 3, ROW], equal_nan=True)
    told = headers[ERRORS_HEADER]
    assert told.isascii()
    assert told.isprintable()
    assert json.loads(told)["1"]["status"] == 500


def test_many_errors_fit_a_header() -> None:
    want = Row()
    found: list[Found] = [fields_of(want, ROW), *(ApiError(400, "x" * 300) for _ in range(99))]
    _, headers = NpyForm([want] * 100).all(found)
    assert len(headers[ERRORS_HEADER]) <= 4096
    assert 5 < len(json.loads(headers[ERRORS_HEADER])) < 99


def test_no_answer_at_all_is_the_first_error() -> None:
    with pytest.raises(ApiError, match="luck"):
        NpyForm([Row()]).all([FAILED])


def test_likeliest_and_draws_are_lines_of_fields() -> None:
    want = Top(2)
    (array,) = loaded(NpyForm([want, want]).all([fields_of(want, TOP), FAILED])[0])
    assert array["token_ids"].tolist() == [[2, 0], [-1, -1]]
    assert np.array_equal(array["logprobs"][0], TOP.logprobs)
    assert np.isnan(array["rest"][1])
    draw = Draw(2)
    drawn = Draws(TOP.token_ids, TOP.logprobs, TOP.logprobs, np.float32(-0.5))
    (array,) = loaded(NpyForm([draw]).all([fields_of(draw, drawn)])[0])
    assert array["log_mass"].tolist() == [-0.5]
    assert array["proposal_logprobs"].shape == (1, 2)


def test_scores_are_lines_of_positions() -> None:
    wants = [Score(3), Score(), Score(2)]
    found: list[Found] = [fields_of(wants[0], SCORES), FAILED, fields_of(wants[2], SCORES)]
    (array,) = loaded(NpyForm(wants).all(found)[0])
    assert array["index"].tolist() == [0, 0, 2, 2]
    assert array["position"].tolist() == [3, 4, 2, 3]
    assert array["ranks"].tolist() == [1, 9, 1, 9]


def test_what_is_no_one_array_is_refused() -> None:
    with pytest.raises(ApiError, match="one kind"):
        NpyForm([Row(), Top()]).check([Row(), Top()])
    wants = [Tokens([1]), Tokens([1, 2])]
    found: list[Found] = [{"logprobs": ROW[:1]}, {"logprobs": ROW[:2]}]
    with pytest.raises(ApiError, match="unequal lengths"):
        NpyForm(wants).all(found)


def test_a_stream_of_arrays() -> None:
    form = NpyForm([Row(), Score(2), Hidden()])
    parts = [form.one(1, {"logprobs": ROW, "ranks": np.arange(3, dtype=np.int32)})]
    parts += [form.one(0, {"logprobs": ROW}), form.one(2, FAILED), form.end(ApiError(503, "gone"))]
    scores, row, error, end = loaded(b"".join(parts))
    assert scores["position"].tolist() == [2, 3, 4]
    assert row["index"].tolist() == [0]
    assert np.array_equal(row["logprobs"][0], ROW)
    assert (error["index"][0], error["status"][0]) == (2, 500)
    assert error["error"][0].startswith("no such")
    assert (end["index"][0], end["error"][0]) == (-1, "gone")


def test_msgpack_is_a_list_or_maps_one_after_another() -> None:
    form = MsgpackForm()
    data, headers = form.all([fields_of(Top(2), TOP), ApiError(400, "no", param="want")])
    assert not headers
    top, error = msgpack.unpackb(data)
    assert np.array_equal(np.frombuffer(top["token_ids"], "<i4"), TOP.token_ids)
    assert np.array_equal(np.frombuffer(top["logprobs"], "<f4"), TOP.logprobs)
    assert top["rest"] == -np.inf
    assert error["error"] == {
        "message": "no",
        "type": "invalid_request_error",
        "param": "want",
        "code": None,
        "status": 400,
    }
    parts = [form.one(1, {"state": ROW}), form.one(0, {"state": ROW}), form.end(None)]
    unpacker = msgpack.Unpacker(io.BytesIO(b"".join(parts)))
    assert [each["index"] for each in unpacker] == [1, 0]


def test_json_has_numbers_for_what_is_impossible() -> None:
    form = JsonForm('it\'s "m"')
    data, _ = form.all([fields_of(Row(), ROW), fields_of(Top(2), TOP), FAILED])
    found = json.loads(data)
    assert found["model"] == 'it\'s "m"'
    assert found["data"][0]["logprobs"][1] == -9999.0
    assert np.array_equal(np.array(found["data"][0]["logprobs"], np.float32)[[0, 2]], ROW[[0, 2]])
    assert found["data"][1]["rest"] == -9999.0
    assert found["data"][2]["error"]["status"] == 500
    assert form.end(None) == b"data: [DONE]\n\n"


@pytest.mark.parametrize("order", ["<", ">"])
def test_numbers_travel_little_endian(order: str) -> None:
    odd = np.arange(6, dtype=f"{order}f4")[::2]
    (array,) = loaded(NpyForm([Row()]).all([{"logprobs": odd}])[0])
    assert array.tolist() == [[0, 2, 4]]
    (found,) = msgpack.unpackb(MsgpackForm().all([{"logprobs": odd}])[0])
    assert np.frombuffer(found["logprobs"], "<f4").tolist() == [0, 2, 4]


def test_how_many_bytes_an_answer_has() -> None:
    sizes = [
        answer_bytes(want, 5, 100, 16)
        for want in (
            Row(),
            Top(3),
            Tokens([1, 2]),
            Score(2, 4, [[1, 2]] * 3),
            Score(9),
            Draw(2),
            Hidden(),
        )
    ]
    assert sizes == [400, 28, 8, 3 * (12 + 32 + 8), 0, 28, 64]
