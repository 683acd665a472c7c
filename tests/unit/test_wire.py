"""What travels: jobs, read strictly, and notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmpool import wire
from lmpool.errors import JobFormatError
from lmpool.wants import Digest, Generate, Row, Tokens, Want
from lmpool.wire import (
    _FORMS_MOST,
    MAX_JOB_BYTES,
    Job,
    JobPacker,
    JobReader,
    Notice,
    RefusedJob,
    pack_job,
    read_done,
    read_notices,
    unpack_job,
)
from tests.support.strategies import ADAPTERS, ANYTHING, JOBS, WANTS, token_bytes

DIGEST = Digest(b"d" * 16)

# --- jobs --------------------------------------------------------------------------------------


@given(job=JOBS)
def test_jobs_round_trip(job: Job) -> None:
    assert unpack_job(pack_job(job)) == job


def test_what_large_wants_begin_with_is_not_kept() -> None:
    def pack(want: Want) -> None:
        JobPacker(0).head(want, None)

    wire._commons.clear()
    pack(Tokens(tuple(range(4096))))
    assert wire._commons == {}
    for number in range(3 * wire._COMMON_MOST):
        pack(Tokens((number,)))
        assert 0 < len(wire._commons) <= wire._COMMON_MOST


def test_a_job_is_a_msgpack_map_of_the_design() -> None:
    job = Job(Row("f32"), DIGEST, token_bytes(1, 2), None, None, 5)
    assert msgpack.unpackb(pack_job(job)) == {
        "v": 2,
        "want": ["row", "f32"],
        "digest": b"d" * 16,
        "tokens": b"\1\0\0\0\2\0\0\0",
        "adapter": None,
        "deadline": None,
        "sent": 5,
    }
    want = Generate(3, (2, 7), 0.5, 11, 0.9, 40, 0.1, ((8,), (8, 9)), True, 5)
    found = msgpack.unpackb(pack_job(replace(job, want=want, adapter="a@1", deadline=9)))
    assert found["want"] == [
        *("generate", 3, [2, 7], 0.5, 11),
        *(0.9, 40, 0.1, [[8], [8, 9]], True, 5),
    ]
    assert (found["adapter"], found["deadline"]) == ("a@1", 9)
    assert job.token_ids().tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        job.token_ids()[0] = 3


@given(
    jobs=st.lists(JOBS, max_size=6),
    wants=st.lists(WANTS, min_size=1, max_size=2),
    adapters=st.lists(ADAPTERS, min_size=1, max_size=2),
    sent=st.integers(0, 2**63),
)
def test_many_jobs_that_are_packed_together_are_packed_as_each_alone(
    jobs: list[Job], wants: list[Any], adapters: list[str | None], sent: int
) -> None:
    packer = JobPacker(sent)
    # Few wants and adapters among many jobs: what they have in common is packed once.
    for number, job in enumerate(jobs):
        shared = replace(
            job,
            want=wants[number % len(wants)],
            adapter=adapters[number // 2 % len(adapters)],
            sent=sent,
        )
        for one in (shared, replace(job, sent=sent)):
            packed = packer.pack(one.want, one.adapter, one.digest, one.tokens, one.deadline)
            assert packed == pack_job(one)
            assert unpack_job(packed) == one


def outcome(read: Callable[[bytes], Job], data: bytes) -> Job | tuple[type, str]:
    try:
        return read(data)
    except JobFormatError as error:
        return type(error), str(error)


@given(
    jobs=st.lists(JOBS, min_size=1, max_size=4),
    wants=st.lists(WANTS, min_size=1, max_size=2),
    data=st.data(),
)
def test_jobs_that_are_read_one_after_another_are_read_as_each_alone(
    jobs: list[Job], wants: list[Any], data: st.DataObject
) -> None:
    """Whatever is between them: entries that were cut, lengthened, or have a byte changed."""
    reader = JobReader()
    entries: list[bytes] = []
    for _ in range(data.draw(st.integers(1, 12))):
        job = replace(
            data.draw(st.sampled_from(jobs)),
            want=data.draw(st.sampled_from(wants)),
            adapter=data.draw(st.sampled_from([None, "a@1"])),
            sent=data.draw(st.sampled_from([1, 2**40, 2**40 + 1])),
            deadline=data.draw(st.sampled_from([None, 0, 5, 2**40])),
            digest=data.draw(st.sampled_from([DIGEST, Digest(bytes(16))])),
        )
        packed = bytearray(pack_job(job))
        match data.draw(st.sampled_from(["as it is", "as it is", "cut", "longer", "changed"])):
            case "cut":
                del packed[data.draw(st.integers(0, len(packed) - 1)) :]
            case "longer":
                packed += data.draw(st.binary(min_size=1, max_size=8))
            case "changed":
                place = data.draw(st.integers(0, len(packed) - 1))
                packed[place] = data.draw(st.integers(0, 255))
        entries.append(bytes(packed))
    found: list[Job | tuple[type, str]] = []
    while len(found) < len(entries):
        found += reader.read_known(entries, len(found)) or [
            outcome(reader.read, entries[len(found)])
        ]
    assert found == [outcome(unpack_job, entry) for entry in entries]


def sent_now(tokens: bytes, **changed: Any) -> Job:
    return replace(Job(Row("bf16"), DIGEST, tokens, None, 2**40 + 9, 2**40), **changed)


def test_what_is_like_jobs_that_were_read_is_read_together() -> None:
    reader = JobReader()
    short, long = sent_now(b"abcd"), sent_now(b"abcd" * 80)
    assert [reader.read(pack_job(job)) for job in (short, long)] == [short, long]
    later = [
        replace(job, digest=Digest(bytes(16)), sent=job.sent + 9, deadline=job.deadline + 5)
        for job in (long, short, long)
        if job.deadline is not None
    ]
    assert reader.read_known([*map(pack_job, later)]) == later
    assert reader.read_known([*map(pack_job, later)], 2) == later[2:]


@pytest.mark.parametrize(
    "changed",
    [
        {"want": Row("f32")},
        {"adapter": "a@1"},
        {"deadline": None},
        {"tokens": b"abcdabcd"},
        {"sent": 7},
        {"trace": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"},
    ],
)
def test_what_is_like_no_job_that_was_read_ends_those_that_are_read_together(
    changed: dict[str, Any],
) -> None:
    reader = JobReader()
    one = sent_now(b"abcd")
    reader.read(pack_job(one))
    entries = [pack_job(one), pack_job(replace(one, **changed)), pack_job(one)]
    assert reader.read_known(entries) == [one]
    assert reader.read_known(entries, 1) == []


@pytest.mark.parametrize("deadline", [None, 2**40 + 9])
def test_what_differs_in_any_byte_is_read_as_it_is_or_not_at_all(deadline: int | None) -> None:
    reader = JobReader()
    one = sent_now(b"abcd", adapter="a@1", deadline=deadline)
    packed = pack_job(one)
    reader.read(packed)
    for place in range(len(packed)):
        for value in range(256):
            entry = packed[:place] + bytes([value]) + packed[place + 1 :]
            found = reader.read_known([entry])
            assert not found or found == [outcome(unpack_job, entry)], (place, value)
    assert reader.read_known([packed]) == [one]


def test_jobs_that_are_read_together_ask_the_same_of_one_adapter() -> None:
    reader = JobReader()
    jobs = [sent_now(b"abcd"), sent_now(b"abcd", adapter="a@1"), sent_now(b"abcd")]
    entries = [*map(pack_job, jobs)]
    assert [*map(reader.read, entries)] == jobs
    assert [reader.read_known(entries, start) for start in range(3)] == [[job] for job in jobs]


def test_what_a_reader_remembers_has_a_bound() -> None:
    """Whatever is asked, in entries of one size as well as of many."""
    reader = JobReader()
    for number in range(3 * _FORMS_MOST):
        for tokens in (b"abcd", b"abcd" * (number + 2)):
            job = sent_now(tokens, adapter=f"a@{number:05}")
            assert reader.read(pack_job(job)) == job
        assert len(reader._forms) <= _FORMS_MOST
        assert len(reader._asks) <= _FORMS_MOST


def test_a_job_longer_than_any_is_not_read_however_it_begins() -> None:
    reader = JobReader()
    job = sent_now(b"abcd")
    assert reader.read(pack_job(job)) == job
    long = pack_job(replace(job, tokens=b"abcd" * (MAX_JOB_BYTES // 4)))
    for _ in range(2):
        assert reader.read_known([long]) == []
        with pytest.raises(JobFormatError, match="at most"):
            reader.read(long)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 16_383, 16_384, 16_385, 100_000])
def test_prompts_of_every_length_have_their_header(length: int) -> None:
    # msgpack writes the length of 255, 256, 65,535 and 65,536 bytes and more in other ways.
    job = Job(Row("bf16"), DIGEST, b"abcd" * length, "x@1", 2**40, 7)
    packed = pack_job(job)
    assert unpack_job(packed) == job
    assert msgpack.packb(msgpack.unpackb(packed)["tokens"]) in packed  # as msgpack itself has it


def plain_job(**changed: Any) -> bytes:
    """A job's bytes with some fields replaced (`...` leaves one out)."""
    fields = {
        "v": 2,
        "want": ["row", "f32"],
        "digest": DIGEST,
        "tokens": token_bytes(1, 2),
        "adapter": None,
        "deadline": None,
        "sent": 5,
        **changed,
    }
    packed: bytes = msgpack.packb({n: v for n, v in fields.items() if v is not ...})
    return packed


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"v": 1}, "job version 1: this worker reads version 2"),
        ({"v": 3}, "job version 3: this worker reads version 2"),
        ({"v": ...}, "job version None"),
        ({"v": "2"}, "job version '2'"),
        ({"want": ...}, "no want: None"),
        ({"want": {}}, "no want"),
        ({"want": ["embed"]}, "unknown want 'embed'; there are row, top, tokens, score, draw"),
        ({"want": ["top", 0]}, "k=0: an integer from 1 to"),
        ({"want": ["tokens", b"123"]}, "token_ids are not 1 to"),
        ({"want": ["draw", 1, 1, -1.0, True, None, None]}, "temperature=-1.0"),
        ({"tokens": b""}, "tokens"),
        ({"tokens": b"\1\0\0"}, "tokens"),
        ({"tokens": [1, 2]}, "tokens"),
        ({"tokens": ...}, "tokens"),
        ({"adapter": ""}, "adapter"),
        ({"adapter": 3}, "adapter"),
        ({"adapter": "a" * 513}, "adapter"),
        ({"adapter": ...}, "adapter"),
        ({"deadline": 1.5}, "deadline"),
        ({"deadline": True}, "deadline"),
        ({"deadline": ...}, "deadline"),
        ({"sent": None}, "sent"),
        ({"sent": True}, "sent"),
        ({"sent": ...}, "sent"),
    ],
)
def test_a_job_with_a_digest_is_refused_with_its_reason(changed: Any, reason: str) -> None:
    with pytest.raises(RefusedJob, match=reason) as refused:
        unpack_job(plain_job(**changed))
    assert refused.value.digest == DIGEST


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb([]),
        msgpack.packb(None),
        msgpack.packb({}),
        plain_job(digest=...),
        plain_job(digest=b"d" * 15),
        plain_job(digest="d" * 16),
        plain_job() + b"\0",
        plain_job()[:-1],
        plain_job(adapter=msgpack.ExtType(5, b"x")),
        msgpack.packb({1: 2, "digest": DIGEST}),
        b"\x91" * 100_000,
        b"x" * ((8 << 20) + 1),
    ],
    ids=range(14),
)
def test_what_has_no_digest_is_no_job(data: bytes) -> None:
    with pytest.raises(JobFormatError) as refused:
        unpack_job(data)
    assert not isinstance(refused.value, RefusedJob)
    assert str(refused.value)


@given(data=st.binary(max_size=200))
def test_random_bytes_are_no_job_and_do_no_harm(data: bytes) -> None:
    with pytest.raises(JobFormatError):
        unpack_job(data)


@given(data=st.data(), job=JOBS)
def test_damaged_jobs_do_no_harm(data: st.DataObject, job: Job) -> None:
    packed = bytearray(pack_job(job))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        unpack_job(bytes(packed))
    except JobFormatError:
        pass


@given(
    changed=st.dictionaries(
        st.sampled_from(["v", "want", "tokens", "adapter", "deadline", "sent", "extra"]), ANYTHING
    )
)
def test_any_value_in_any_field_is_read_or_refused(changed: dict[str, Any]) -> None:
    try:
        job = unpack_job(plain_job(**changed))
    except JobFormatError:
        return
    assert len(job.tokens) % 4 == 0
    assert isinstance(job.adapter, (str, type(None)))
    assert isinstance(job.want, (Row, Generate))


@pytest.mark.parametrize("depth", [10, 400, 1000, 5000])
@pytest.mark.parametrize("field", ["v", "want", "deadline", "extra"])
def test_nesting_and_size_of_a_job_do_no_harm(field: str, depth: int) -> None:
    job = {"v": 2, "digest": b"0" * 16, "want": []}
    packed = msgpack.packb({**job, field: "XX"}).replace(b"\xa2XX", b"\x91" * depth + b"\x01")
    with pytest.raises(JobFormatError) as refused:
        unpack_job(packed)
    assert len(str(refused.value)) < 300
    with pytest.raises(JobFormatError) as refused:
        unpack_job(msgpack.packb({**job, field: "x" * 1_000_000}))
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("depth", [10, 400, 1000, 5000])
@pytest.mark.parametrize("want", [["row", "XX"], ["generate", "XX", [2], 1.0, 7], ["XX"]], ids=str)
def test_nesting_inside_a_want_does_no_harm(want: list[Any], depth: int) -> None:
    packed = plain_job(want=want).replace(b"\xa2XX", b"\x91" * depth + b"\x01")
    with pytest.raises(JobFormatError) as refused:
        unpack_job(packed)
    assert len(str(refused.value)) < 300


# --- notices -----------------------------------------------------------------------------------

FIRST, SECOND = b"a" * 32, b"b" * 32
A, B = Digest(b"\xaa" * 16), Digest(b"\xbb" * 16)


def test_notices() -> None:
    assert read_notices({b"ok": FIRST + SECOND}) == [Notice(A, "ok"), Notice(B, "ok")]
    assert read_done({b"ok": FIRST + SECOND}) == [A, B]
    assert read_done({b"digest": FIRST, b"status": b"failed"}) == []
    assert read_notices({b"digest": FIRST, b"status": b"failed", b"error": "zu groß".encode()}) == [
        Notice(A, "failed", "zu groß")
    ]
    assert read_notices({b"digest": FIRST, b"status": b"expired"}) == [Notice(A, "expired")]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"hello": b"1"},
        {b"bye": b"1"},
        {b"ok": b""},
        {b"ok": b"short"},
        {b"ok": b"x" * 32},
        {b"ok": b"a " * 16},
        {b"ok": b"ab " * 10 + b"ab"},
        {b"ok": b"\xff" * 32},
        {b"digest": FIRST},
        {b"digest": b"short", b"status": b"failed"},
        {b"digest": FIRST + SECOND, b"status": b"failed"},
        {b"digest": b"x" * 32, b"status": b"failed"},
        {b"status": b"failed"},
    ],
    ids=repr,
)
def test_what_is_no_notice_gives_none(fields: dict[bytes, bytes]) -> None:
    assert read_notices(fields) == []


def test_a_notice_that_was_cut_gives_what_is_whole() -> None:
    assert read_notices({b"ok": FIRST + b"b" * 31}) == [Notice(A, "ok")]
    assert read_notices({b"ok": FIRST + b"b" * 2}) == [Notice(A, "ok")]


@given(
    fields=st.dictionaries(
        st.sampled_from([b"ok", b"digest", b"status", b"error"]),
        st.binary() | st.text("0123456789abcdefABCDEF \n", max_size=70).map(str.encode),
    )
)
@example({b"ok": b"ab " * 32})
def test_random_notices_do_no_harm(fields: dict[bytes, bytes]) -> None:
    for notice in read_notices(fields):
        assert len(notice.digest) == 16
