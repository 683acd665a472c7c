"""What a client waits for: what was added last is found, and nothing that never was."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmpool.wait_list import (
    FRONT,
    MAGIC,
    SIZE,
    SLOTS,
    WaitList,
    WaitListError,
    WaitListReader,
    halves_of,
)
from lmpool.wants import DIGEST_BYTES, Digest
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "list"


@pytest.fixture
def waits(path: Path) -> WaitList:
    with path.open("w+b") as file:
        return WaitList(file.fileno())


@pytest.fixture
def reader(path: Path, waits: WaitList) -> WaitListReader:
    return reader_of(path)


def reader_of(path: Path) -> WaitListReader:
    with path.open("rb") as file:
        return WaitListReader(file.fileno())


def list_of_its_own() -> tuple[WaitList, WaitListReader]:
    with tempfile.TemporaryFile() as file:
        return WaitList(file.fileno()), WaitListReader(file.fileno())


def digest_of(slot: int, number: int) -> Digest:
    """One of a slot; the same for two numbers of one remainder of 2^64."""
    return Digest(slot.to_bytes(8, "little") + (number % (1 << 64)).to_bytes(8, "little"))


def digests_of(seed: int, count: int) -> list[Digest]:
    rng = random.Random(seed)
    return [Digest(rng.randbytes(DIGEST_BYTES)) for _ in range(count)]


def found(reader: WaitListReader, digests: Sequence[Digest]) -> list[bool]:
    waits = reader.has(halves_of(digests))
    assert waits.dtype == np.bool_
    assert waits.shape == (len(digests),)
    return [bool(each) for each in waits]


def slot_of(digest: Digest) -> int:
    return int.from_bytes(digest[:8], "little") % SLOTS


# --- what is found -----------------------------------------------------------------------------


def test_what_was_added_is_found_and_nothing_else(waits: WaitList, reader: WaitListReader) -> None:
    digests = digests_of(1, 300)
    assert len({slot_of(digest) for digest in digests}) < len(digests)  # some fall together
    assert not any(found(reader, digests))
    added = digests[:200]
    waits.add(added)
    last = {slot_of(digest): digest for digest in added}
    assert found(reader, digests) == [last.get(slot_of(digest)) == digest for digest in digests]
    assert found(reader, digests[::-1]) == found(reader, digests)[::-1]
    assert sum(found(reader, digests)) == len(last) > 190


def test_what_was_added_before_is_found_yet(waits: WaitList, reader: WaitListReader) -> None:
    first, second = [digest_of(n, n + 1) for n in range(50)], [digest_of(n, 1) for n in (60, 70)]
    waits.add(first)
    waits.add(second)
    waits.add(first)  # once more changes nothing
    assert all(found(reader, [*first, *second]))


def test_who_looks_for_nothing_finds_nothing(waits: WaitList, reader: WaitListReader) -> None:
    waits.add([])
    assert found(reader, []) == []
    waits.add(digests_of(1, 3))
    waits.add([])
    assert found(reader, []) == []
    assert all(found(reader, digests_of(1, 3)))


def test_the_last_of_one_slot_is_found_alone(waits: WaitList, reader: WaitListReader) -> None:
    one, other, next_to_it = digest_of(7, 1), digest_of(7 + SLOTS, 2), digest_of(8, 1)
    waits.add([one])
    assert found(reader, [one, other, next_to_it]) == [True, False, False]
    waits.add([other])
    assert found(reader, [one, other, next_to_it]) == [False, True, False]
    waits.add([other, next_to_it, one])  # of one call, too
    assert found(reader, [one, other, next_to_it]) == [True, False, True]


def test_the_first_slot_and_the_last_are_of_use(waits: WaitList, reader: WaitListReader) -> None:
    ends = [digest_of(0, 1), digest_of(SLOTS - 1, (1 << 64) - 1), digest_of((1 << 64) - SLOTS, 3)]
    waits.add(ends)
    assert found(reader, ends) == [False, True, True]  # the first and the third fall together


def test_all_slots_are_of_use_at_one_time(waits: WaitList, reader: WaitListReader) -> None:
    digests = [digest_of(slot, slot + 1) for slot in range(SLOTS)]
    waits.add(digests)
    assert all(found(reader, digests))
    assert not any(found(reader, [digest_of(slot, slot + 2) for slot in range(SLOTS)]))


ADDED = st.lists(
    st.lists(
        st.builds(
            lambda slot, turn, number: digest_of(slot + SLOTS * turn, number),
            st.sampled_from([0, 1, 2, 3, SLOTS - 1]),
            st.sampled_from([0, 1, (1 << 50) - 1]),
            st.integers(1, 6) | st.integers(1, (1 << 64) - 1),
        ),
        max_size=12,
    ),
    max_size=12,
)


@given(calls=ADDED, never=ADDED)
@settings(max_examples=100, deadline=None)
def test_what_was_added_last_in_a_slot_is_what_is_found(
    calls: list[list[Digest]], never: list[list[Digest]]
) -> None:
    waits, reader = list_of_its_own()
    last: dict[int, bytes] = {}
    looked_for = [digest for call in [*calls, *never] for digest in call]
    for call in calls:
        waits.add(call)
        last.update({slot_of(digest): digest[8:] for digest in call})
        # Nobody tells apart two of one slot and the same second half.
        right = [last.get(slot_of(digest)) == digest[8:] for digest in looked_for]
        assert found(reader, looked_for) == right


@pytest.mark.parametrize("seed", range(20))
def test_random_digests_are_found_as_a_model_finds_them(seed: int) -> None:
    rng, (waits, reader) = random.Random(seed), list_of_its_own()
    known, never = digests_of(seed, 4000), digests_of(seed + 1000, 4000)
    last: dict[int, Digest] = {}
    for _ in range(30):
        call = rng.choices(known, k=rng.randrange(1500))
        waits.add(call)
        last.update({slot_of(digest): digest for digest in call})
        some = rng.sample(known, 500)
        assert found(reader, some) == [last.get(slot_of(digest)) == digest for digest in some]
        assert not any(found(reader, never))


def test_halves_are_those_of_each_digest() -> None:
    digests = digests_of(1, 5)
    halves = halves_of(digests)
    assert halves.shape == (5, 2)
    assert [[*row] for row in halves.tolist()] == [
        [int.from_bytes(d[:8], "little"), int.from_bytes(d[8:], "little")] for d in digests
    ]
    assert halves_of([]).shape == (0, 2)


# --- threads and processes ---------------------------------------------------------------------


def test_several_threads_add_at_once(waits: WaitList, reader: WaitListReader) -> None:
    each, threads = SLOTS // 8, 8
    mine = [[digest_of(n * threads + t, n + 1) for n in range(each)] for t in range(threads)]
    shared = [digest_of(slot, SLOTS) for slot in (3, 77)]
    others = [digest_of(slot, SLOTS + 1 + t) for t in range(threads) for slot in (3, 77)]
    begin, wrong = threading.Barrier(threads), list[object]()

    def add(number: int) -> None:
        begin.wait()
        for at in range(0, each, 16):
            some = mine[number][at : at + 16]
            waits.add(some)
            if not all(found(reader, [d for d in some if slot_of(d) not in (3, 77)])):
                wrong.append(some)  # nobody else's falls there
            waits.add([*others[2 * number : 2 * number + 2], *shared])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        running = [threading.Thread(target=add, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
    all_of_them = [digest for some in mine for digest in some if slot_of(digest) not in (3, 77)]
    assert len(all_of_them) == SLOTS - 2
    assert all(found(reader, all_of_them))
    for slot, digest in zip((3, 77), shared, strict=True):  # one of what was written there
        written = [
            digest,
            *(d for d in [*others, *(d for some in mine for d in some)] if slot_of(d) == slot),
        ]
        assert sum(found(reader, written)) == 1


ANOTHER = """
import sys
from lmpool.wait_list import WaitList, WaitListReader, halves_of

with open(sys.argv[1], "r+b") as file:
    reader = WaitListReader(file.fileno())
print("ready", flush=True)
for line in sys.stdin:
    digests = [bytes.fromhex(each) for each in line.split()]
    print(*[int(each) for each in reader.has(halves_of(digests))], flush=True)
"""


def test_another_process_sees_at_once_what_is_added(path: Path, waits: WaitList) -> None:
    digests = [digest_of(n, n + 1) for n in range(20)]
    with subprocess.Popen(
        [sys.executable, "-c", ANOTHER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for count in range(len(digests) + 1):
                waits.add(digests[:count][-1:])
                print(*[digest.hex() for digest in digests], file=process.stdin, flush=True)
                seen = [int(each) for each in process.stdout.readline().split()]
                assert seen == [1] * count + [0] * (len(digests) - count)
        finally:
            process.kill()


WRITER = """
import sys
from lmpool.wait_list import WaitList

with open(sys.argv[1], "w+b") as file:
    waits = WaitList(file.fileno())
print("ready", flush=True)
number = 0
while True:
    number += 1
    half = (number % 251 + 1).to_bytes(1, "little") * 8
    waits.add([slot.to_bytes(8, "little") + half for slot in range(64)])
"""


def test_no_half_is_torn_that_another_process_writes_over(path: Path) -> None:
    whole = {int.from_bytes(bytes([n]) * 8, "little") for n in range(1, 253)} | {0}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE
    ) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            reader, seen = reader_of(path), set[int]()

            def has_seen_most() -> bool:
                assert writer.poll() is None
                for _ in range(1000):
                    seen.update(reader._slots[:64].tolist())
                return len(seen) > 200

            until(has_seen_most, every=0)
            assert seen <= whole
        finally:
            writer.kill()


def test_who_has_found_a_list_keeps_it(path: Path, waits: WaitList, reader: WaitListReader) -> None:
    digests = digests_of(1, 2)
    path.unlink()
    waits.add(digests[:1])
    assert found(reader, digests) == [True, False]


def test_several_read_what_one_writes(path: Path, waits: WaitList, reader: WaitListReader) -> None:
    digests = digests_of(1, 10)
    waits.add(digests)
    for each in (reader, reader_of(path)):
        assert all(found(each, digests))


# --- files -------------------------------------------------------------------------------------

REFUSED = {
    "empty": (b"", 0),
    "a part of the magic": (MAGIC[:-1], len(MAGIC) - 1),
    "the magic alone": (MAGIC, len(MAGIC)),
    "a front alone": (MAGIC, FRONT),
    "cut": (MAGIC, SIZE - 1),
    "longer": (MAGIC, SIZE + 1),
    "much longer": (MAGIC, 2 * SIZE),
    "zeros": (b"", SIZE),
    "garbage": (random.Random(1).randbytes(SIZE), SIZE),
    "another magic": (b"x" + MAGIC[1:], SIZE),
    "another release": (MAGIC.replace(b"1", b"2"), SIZE),
}


@pytest.mark.parametrize(("begins", "length"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_is_no_list_is_refused(path: Path, begins: bytes, length: int) -> None:
    path.write_bytes(begins)
    os.truncate(path, length)
    with path.open("rb") as file, pytest.raises(WaitListError, match=f"^{length} bytes that begin"):
        WaitListReader(file.fileno())


def test_a_list_of_garbage_is_read(path: Path) -> None:
    path.write_bytes((MAGIC + random.Random(1).randbytes(SIZE))[:SIZE])
    assert not any(found(reader_of(path), digests_of(2, 10_000)))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    ends = os.pipe()
    try:
        for each in (folder, ends[0]):
            with pytest.raises((OSError, WaitListError)):
                WaitListReader(each)
    finally:
        for each in (folder, *ends):
            os.close(each)


def test_a_worker_cannot_write_to_a_list(reader: WaitListReader) -> None:
    with pytest.raises(ValueError, match="read-only"):
        reader._slots[0] = 1


def test_a_list_is_of_its_size_and_all_room_is_taken_at_once(path: Path, waits: WaitList) -> None:
    assert path.stat().st_size == SIZE == FRONT + 8 * SLOTS
    assert path.stat().st_blocks * 512 >= SIZE
    assert path.read_bytes() == MAGIC + bytes(SIZE - len(MAGIC))
    waits.add([digest_of(5, 1)])
    assert path.read_bytes()[: FRONT + 40] == MAGIC + bytes(FRONT + 40 - len(MAGIC))
    assert path.read_bytes()[FRONT + 40 :] == b"\1" + bytes(SIZE - FRONT - 41)


def test_where_there_is_no_room_there_is_no_list(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with path.open("w+b") as file, pytest.raises(OSError, match="no space left"):
        WaitList(file.fileno())
