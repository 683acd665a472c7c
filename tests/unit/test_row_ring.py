"""Rows in shared memory: what is read is what was laid, whoever writes meanwhile."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lmpool.row_ring import (
    FRONT,
    IS_ORDERED,
    MAGIC,
    SLOTS,
    SPARE,
    RingError,
    RowRing,
    RowRingReader,
    place_of,
)
from lmpool.rows import ROW_HEADER_BYTES, PackedRow, pack_values, unpack_row
from lmpool.wants import Digest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's")

SIZE = 1 << 16
ROOM = SIZE // SPARE
"""The room of the largest row."""
OWNER = "worker-1"
BEFORE = 40
"""Bytes of a row's digest, position and length."""
TYPES = {"f32": np.float32, "bf16": np.uint16, "f16": np.float16}


def digest_of(number: int, slot: int | None = None) -> Digest:
    """One of a slot, by default of its own."""
    at = number if slot is None else slot
    return Digest(at.to_bytes(4, "little") + number.to_bytes(12, "little"))


def row_of(length: int, seed: int = 0) -> PackedRow:
    """A row of so many bytes, those of its header among them."""
    whole = np.random.default_rng([seed, length]).bytes(length)
    return PackedRow(whole[:ROW_HEADER_BYTES], memoryview(whole)[ROW_HEADER_BYTES:])


def room_for(row: PackedRow) -> PackedRow:
    """Memory for a row of that header and length."""
    return PackedRow(row.header, memoryview(bytearray(len(row.numbers))))


def taken(row: PackedRow) -> int:
    """The bytes that it takes in a ring."""
    return -(-(BEFORE + row.nbytes) // 64) * 64


def joined(found: PackedRow | memoryview | None) -> bytes | None:
    if found is None:
        return None
    return found.joined() if isinstance(found, PackedRow) else bytes(found)


def read(
    reader: RowRingReader, digest: Digest, row: PackedRow, *, with_room: bool = False
) -> bytes | None:
    """What a reader finds of a row like that, which is one piece if there is no room for it."""
    found = reader.copy(digest, row.nbytes, room_for(row) if with_room else None)
    assert isinstance(found, (PackedRow if with_room else memoryview, type(None)))
    return joined(found)


def ring_of(size: int) -> tuple[RowRing, RowRingReader]:
    with tempfile.TemporaryFile() as file:
        return RowRing(file.fileno(), size, OWNER), RowRingReader(file.fileno())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ring"


@pytest.fixture
def ring(path: Path) -> RowRing:
    with path.open("w+b") as file:
        return RowRing(file.fileno(), SIZE, OWNER)


@pytest.fixture
def reader(path: Path, ring: RowRing) -> RowRingReader:
    with path.open("rb") as file:
        return RowRingReader(file.fileno())


def lay_around(ring: RowRing, count: int = SIZE // (ROOM // 2), first: int = 100) -> None:
    """Lay so many rows of half the largest size, by default a whole ring of them."""
    for number in range(first, first + count):
        row = row_of(ROOM // 2 - BEFORE, number)
        assert taken(row) == ROOM // 2
        assert ring.lay(digest_of(number), row)


# --- what is read ------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["f32", "bf16", "f16"])
def test_rows_are_read_bit_for_bit(encoding: Any, ring: RowRing, reader: RowRingReader) -> None:
    kept: list[tuple[PackedRow, PackedRow | memoryview]] = []
    for number, entries in enumerate((1, 2, 3, 100, 1001, (ROOM - 64) // 4)):
        width = np.dtype(TYPES[encoding]).itemsize
        values = np.frombuffer(np.random.default_rng(number).bytes(entries * width), np.uint8)
        row = pack_values(encoding, values.view(TYPES[encoding]), 0.5 * number)
        digest, room = digest_of(number), room_for(row)
        assert ring.lay(digest, row)
        alone, there = reader.copy(digest, row.nbytes), reader.copy(digest, row.nbytes, room)
        assert isinstance(alone, memoryview)
        assert isinstance(there, PackedRow)
        assert alone.readonly
        assert there.numbers.readonly
        assert np.shares_memory(np.asarray(there.numbers), np.asarray(room.numbers))
        kept += [(row, alone), (row, there)]
    lay_around(ring)  # they are copies
    for row, found in kept:
        assert joined(found) == row.joined()
        decoded, right = unpack_row(found), unpack_row(row)
        assert (decoded.encoding, decoded.scale) == (encoding, right.scale)
        assert decoded.data.tobytes() == right.data.tobytes()


def test_a_row_that_is_laid_again_is_the_new_one(ring: RowRing, reader: RowRingReader) -> None:
    for seed, length in enumerate((100, 100, 400, 50)):
        row = row_of(length, seed)
        assert ring.lay(digest_of(1), row)
        assert read(reader, digest_of(1), row) == row.joined()


def test_nothing_is_read_of_an_empty_ring(reader: RowRingReader) -> None:
    for number in (0, 1, SLOTS - 1):
        assert reader.copy(digest_of(number), 100) is None
    assert reader.copy(Digest(bytes(16)), 0) is None


def test_another_that_fell_into_the_slot_hides_a_row(ring: RowRing, reader: RowRingReader) -> None:
    first, second, row = digest_of(1, slot=7), digest_of(2, slot=7), row_of(100)
    assert place_of(first) == place_of(second) == place_of(digest_of(3, slot=7 + SLOTS)) == 7
    assert ring.lay(first, row)
    assert read(reader, second, row) is None
    assert ring.lay(second, row_of(100, 1))
    assert read(reader, first, row) is None
    assert read(reader, second, row) == row_of(100, 1).joined()
    assert ring.lay(first, row)
    assert read(reader, first, row) == row.joined()


def test_a_row_is_read_by_its_whole_length_alone(ring: RowRing, reader: RowRingReader) -> None:
    row, digest = row_of(200), digest_of(1)
    assert ring.lay(digest, row)
    for length in (0, ROW_HEADER_BYTES, 199, 201, ROOM, SIZE, SIZE + FRONT, 1 << 40):
        assert reader.copy(digest, length) is None
    assert read(reader, digest, row) == row.joined()


def test_a_room_of_another_header_or_size_is_left_alone(
    ring: RowRing, reader: RowRingReader
) -> None:
    row, digest = row_of(200), digest_of(1)
    assert ring.lay(digest, row)
    for header, length in (
        (row_of(200, 1).header, 176),
        (row.header[:-1], 176),
        (row.header, 175),
        (row.header, 177),
        (row.header, 0),
    ):
        room = PackedRow(header, memoryview(bytearray(length)))
        assert reader.copy(digest, 200, room) is None
        assert not any(room.numbers)
    assert read(reader, digest, row, with_room=True) == row.joined()


def test_several_read_what_one_writes(ring: RowRing, reader: RowRingReader, path: Path) -> None:
    with path.open("rb") as file:
        late = RowRingReader(file.fileno())
    row = row_of(300)
    assert ring.lay(digest_of(1), row)
    with path.open("rb") as file:
        later = RowRingReader(file.fileno())
    for each in (reader, late, later):
        assert read(each, digest_of(1), row) == row.joined()


# --- where rows lie ----------------------------------------------------------------------------


def test_too_large_a_row_is_refused_and_changes_nothing(
    ring: RowRing, reader: RowRingReader, path: Path
) -> None:
    largest = row_of(ROOM - BEFORE)
    assert ring.lay(digest_of(1), largest)
    before = path.read_bytes()
    for length in (ROOM - BEFORE + 1, ROOM, SIZE, SIZE + FRONT):
        assert not ring.lay(digest_of(1), row_of(length, 1))
    whole = largest.joined()
    for length in (0, ROW_HEADER_BYTES - 1, ROW_HEADER_BYTES + 1):  # no row that is stored
        assert not ring.lay(digest_of(1), PackedRow(whole[:length], memoryview(whole)[length:]))
    assert path.read_bytes() == before
    assert read(reader, digest_of(1), largest) == whole


def test_a_row_is_not_split_at_the_end(ring: RowRing, reader: RowRingReader, path: Path) -> None:
    filler, row = row_of(1024 - BEFORE), row_of(2048 - BEFORE, 1)
    begun = row_of(64 - BEFORE)  # the first place is one behind the start
    numbers = iter(range(1, 1000))

    def lay(each: PackedRow) -> int:
        """Where it lies."""
        digest = digest_of(next(numbers))
        assert ring.lay(digest, each)
        assert read(reader, digest, each) == each.joined()
        whole = path.read_bytes()[FRONT:]
        at = whole.index(digest)
        assert at % 64 == 0
        assert whole[at + BEFORE : at + BEFORE + each.nbytes] == each.joined()
        return at

    assert lay(filler) == 64
    assert lay(row_of(1024 - 64 - BEFORE)) == 1024 + 64
    for place in range(2048, SIZE - 2048, 1024):
        assert lay(filler) == place
    assert lay(row) == SIZE - 2048  # it fits to the byte
    assert lay(begun) == 0
    assert lay(row_of(1024 - 64 - BEFORE)) == 64
    for place in range(1024, SIZE - 1024, 1024):
        assert lay(filler) == place
    last = digest_of(next(numbers) - 1)
    assert lay(row) == 0  # it would not
    assert read(reader, last, filler) == filler.joined()


@pytest.mark.parametrize("size", [1, 63, 64, 511])
def test_a_ring_too_small_for_any_row_takes_none(size: int) -> None:
    ring, reader = ring_of(size)
    row = row_of(ROW_HEADER_BYTES)
    assert not ring.lay(digest_of(1), row)
    assert read(reader, digest_of(1), row) is None


class Rings(RuleBasedStateMachine):
    """Rows are what was laid last or are not there, and the newest are there."""

    @initialize(size=st.sampled_from([4096, 5000, 1 << 14]))
    def begin(self, size: int) -> None:
        self.size = size
        self.spare = size // SPARE
        self.ring, self.reader = ring_of(size)
        self.laid: list[tuple[Digest, PackedRow]] = []

    @rule(number=st.integers(0, 11), part=st.floats(0, 1.1))
    def lay(self, number: int, part: float) -> None:
        digest = digest_of(number, slot=number % 8)
        row = row_of(ROW_HEADER_BYTES + int(part * self.spare), len(self.laid))
        is_laid = self.ring.lay(digest, row)
        assert is_laid == (taken(row) <= self.spare)
        if is_laid:
            self.laid.append((digest, row))

    @precondition(lambda self: self.laid)
    @rule(back=st.integers(0, 40), with_room=st.booleans())
    def read_one_that_was_laid(self, back: int, with_room: bool) -> None:
        digest, row = self.laid[-1 - back % len(self.laid)]
        found = read(self.reader, digest, row, with_room=with_room)
        newest = max(n for n, (other, _) in enumerate(self.laid) if other == digest)
        last, later = self.laid[newest][1], self.laid[newest + 1 :]
        # What is laid at the end may leave free what is less than itself.
        behind = taken(last) + sum(taken(each) for _, each in later)
        skipped = max((taken(each) - 64 for _, each in later), default=0)
        is_hidden = any(place_of(other) == place_of(digest) for other, _ in later)
        held = self.size - self.spare
        if is_hidden or behind > held:
            assert found is None
        elif len(row.numbers) == len(last.numbers) and (row.header == last.header or not with_room):
            assert found in (None, last.joined())
            assert found is not None or behind + skipped > held
        else:
            assert found is None  # it has another size now, or the room another header

    @rule(number=st.integers(12, 20), length=st.integers(0, 600))
    def read_one_that_never_was(self, number: int, length: int) -> None:
        digest = digest_of(number, slot=number % 8)
        assert self.reader.copy(digest, length) is None


TestRings = Rings.TestCase
TestRings.settings = settings(stateful_step_count=60, max_examples=100)


# --- rows that are written over ----------------------------------------------------------------


@pytest.mark.parametrize("with_room", [False, True])
def test_a_row_is_there_until_the_ring_less_its_spare_part_is_written(
    ring: RowRing, reader: RowRingReader, path: Path, with_room: bool
) -> None:
    row = row_of(64 - BEFORE)
    assert ring.lay(digest_of(1), row)
    lay_around(ring, 13)
    assert ring.lay(digest_of(2), row_of(ROOM // 2 - 64 - BEFORE))
    assert read(reader, digest_of(1), row, with_room=with_room) == row.joined()
    assert ring.lay(digest_of(3), row_of(64 - BEFORE))
    assert row.joined() in path.read_bytes()  # the bytes are there yet, but are not relied on
    assert read(reader, digest_of(1), row, with_room=with_room) is None


class Overtaken:
    """Memory in a reader's or a caller's hands: `lay` is called at one of its uses."""

    def __init__(self, memory: memoryview, lay: Callable[[], None], use: int = 1) -> None:
        self._memory, self._lay, self._left = memory, lay, use

    def _used(self) -> None:
        self._left -= 1
        if not self._left:
            self._lay()

    def __len__(self) -> int:
        return len(self._memory)

    def __getitem__(self, place: slice) -> memoryview:
        self._used()
        return self._memory[place]

    def __setitem__(self, place: slice, value: memoryview) -> None:
        self._used()
        self._memory[place] = value

    def toreadonly(self) -> memoryview:
        return self._memory.toreadonly()


OVERTAKING = [(4, True), (13, True), (14, False), (16, False), (40, False)]
"""How many rows are laid while one is read, and whether it is there afterwards."""


@pytest.mark.parametrize(("count", "stays"), OVERTAKING)
@pytest.mark.parametrize("with_room", [False, True])
@pytest.mark.parametrize("use", [1, 2])
def test_a_row_written_over_while_it_is_read_is_none(
    ring: RowRing, reader: RowRingReader, count: int, stays: bool, with_room: bool, use: int
) -> None:
    row = row_of(ROOM // 4)
    assert ring.lay(digest_of(1), row)
    reader._memory = Overtaken(reader._memory, lambda: lay_around(ring, count), use)  # type: ignore[assignment]
    found = read(reader, digest_of(1), row, with_room=with_room)
    assert found == (row.joined() if stays else None)


@pytest.mark.parametrize(("count", "stays"), OVERTAKING)
def test_a_row_written_over_while_it_is_copied_to_a_room_is_none(
    ring: RowRing, reader: RowRingReader, count: int, stays: bool
) -> None:
    row = row_of(ROOM // 4)
    assert ring.lay(digest_of(1), row)
    numbers = Overtaken(room_for(row).numbers, lambda: lay_around(ring, count))
    room: Any = PackedRow(row.header, numbers)  # type: ignore[arg-type]
    found = reader.copy(digest_of(1), row.nbytes, room)
    assert joined(found) == (row.joined() if stays else None)


def test_how_far_it_is_written_is_said_before_anything_is(
    ring: RowRing, reader: RowRingReader
) -> None:
    """Who copies bytes that are being written must see afterwards that they may be others."""
    row, seen = row_of(ROOM // 4), []
    assert ring.lay(digest_of(1), row)
    at = int(ring._written[0])

    class Watching(Overtaken):
        def _used(self) -> None:
            seen.append((int(reader._written[0]) - at, int(reader._slots[2])))

    ring._memory = Watching(ring._memory, lambda: None)  # type: ignore[assignment]
    assert ring.lay(digest_of(2), row)
    assert seen
    assert set(seen) == {(taken(row), 0)}  # and where it lies not before it is there
    assert read(reader, digest_of(2), row) == row.joined()


WRITER = """
import sys
from lmpool.row_ring import RowRing
from lmpool.rows import PackedRow

with open(sys.argv[1], "w+b") as file:
    ring = RowRing(file.fileno(), int(sys.argv[2]), "w")
rows = []
for number in range(64):
    digest = number.to_bytes(4, "little") * 4
    rows.append((digest, PackedRow(digest + digest[:8], memoryview(digest * (1000 + 50 * number)))))
print("ready", flush=True)
while True:
    for digest, row in rows:
        ring.lay(digest, row)
"""


@pytest.mark.skipif(not IS_ORDERED, reason="rows are laid where writes are seen in their order")
def test_no_row_is_torn_that_another_process_writes_over(path: Path) -> None:
    size, rows, rounds = 1 << 20, 0, 0
    rng = random.Random(1)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(size)], stdout=subprocess.PIPE
    ) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            with path.open("rb") as file:
                reader = RowRingReader(file.fileno())
            while rows < 5000 or rounds < 500:
                assert writer.poll() is None
                number = rng.randrange(64)
                digest = Digest(number.to_bytes(4, "little") * 4)
                right = PackedRow(
                    digest + digest[:8], memoryview(bytes(digest * (1000 + 50 * number)))
                )
                found = read(reader, digest, right, with_room=rng.random() < 0.5)
                if found is not None:
                    assert found == right.joined()
                    rows += 1
                rounds = int(reader._written[0]) // size
        finally:
            writer.kill()


# --- files -------------------------------------------------------------------------------------


def head(magic: bytes = MAGIC, size: int = SIZE, slots: int = SLOTS) -> bytes:
    return magic + size.to_bytes(8, "little") + slots.to_bytes(8, "little")


WHOLE = FRONT + SIZE
REFUSED = {
    "empty": (b"", 0),
    "a part of a head": (head()[:31], 31),
    "a head alone": (head(), 32),
    "a front alone": (head(), FRONT),
    "cut": (head(), WHOLE - 1),
    "longer": (head(), WHOLE + 1),
    "zeros": (b"", WHOLE),
    "another magic": (head(MAGIC[:-1] + b"x"), WHOLE),
    "the release before": (head(MAGIC.replace(b"2", b"1")), WHOLE),
    "the next release": (head(MAGIC.replace(b"2", b"3")), WHOLE),
    "other slots": (head(slots=SLOTS * 2), WHOLE),
    "no bytes of rows": (head(size=0), FRONT),
    "less than no bytes": (head(size=(1 << 64) - 1), FRONT - 1),
}


@pytest.mark.parametrize(("begins", "length"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_is_no_ring_is_refused(path: Path, begins: bytes, length: int) -> None:
    path.write_bytes(begins)
    os.truncate(path, length)
    with path.open("rb") as file, pytest.raises(RingError, match=f"^{length} bytes that begin"):
        RowRingReader(file.fileno())


def test_a_file_of_the_same_head_and_length_is_read(path: Path) -> None:
    path.write_bytes(head())
    os.truncate(path, WHOLE)
    with path.open("rb") as file:
        assert RowRingReader(file.fileno()).copy(digest_of(1), 100) is None


def test_slots_that_lead_anywhere_lead_to_no_row(path: Path, ring: RowRing) -> None:
    """A ring is another process's: whatever it holds, nothing fails."""
    row = row_of(100)
    assert ring.lay(digest_of(1), row)
    with path.open("rb") as file:
        reader = RowRingReader(file.fileno())
    for at in (1, 64 + 1, SIZE - 1, SIZE, 64 + SIZE, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
        for written in (at, min(at + 100, (1 << 64) - 1)):
            ring._slots[1], ring._written[0] = at, written
            assert read(reader, digest_of(1), row) is None
    # A row that would end behind the ring, and one that is not written yet.
    last, length = FRONT + SIZE - 64, row.nbytes.to_bytes(8, "little")
    ring._slots[1], ring._written[0] = SIZE - 64, SIZE
    ring._memory[last : last + BEFORE - 8] = (
        digest_of(1) + (SIZE - 64).to_bytes(8, "little") + length
    )
    assert read(reader, digest_of(1), row) is None
    ring._slots[1], ring._written[0] = 64, 0
    assert read(reader, digest_of(1), row) is None
    ring._written[0] = 256
    assert read(reader, digest_of(1), row) == row.joined()


# --- whose it is -------------------------------------------------------------------------------

MOST = 896
"""Bytes of a name."""


def owner_of(path: Path) -> str:
    with path.open("rb") as file:
        return RowRingReader(file.fileno()).owner


@pytest.mark.parametrize(
    "owner",
    [
        "",
        "w",
        "host-1:4711:0a1b2c",
        "näher, 近く, 🦊",
        "a b\n\tc",
        "x" * MOST,
        "é" * (MOST // 2),
        "not UTF-8: \udcff\udc80",
        "a\0b",
        "\0a",
    ],
)
def test_a_ring_says_whose_it_is(path: Path, owner: str) -> None:
    with path.open("w+b") as file:
        ring = RowRing(file.fileno(), SIZE, owner)
    assert owner_of(path) == owner
    lay_around(ring)
    assert ring.lay(digest_of(0), row_of(64 - BEFORE))
    assert owner_of(path) == owner  # whatever was laid


def test_a_name_that_is_too_long_is_cut_and_nothing_else_is_written_over(path: Path) -> None:
    for owner in ("x" * (MOST + 1), "y" * 10_000, "z" * SIZE):
        with path.open("w+b") as file:
            ring = RowRing(file.fileno(), SIZE, owner)
        assert owner_of(path) == owner[:MOST]
        front = path.read_bytes()
        assert front[32:128] == bytes(96)
        assert front[1024:] == bytes(WHOLE - 1024)
        assert ring.lay(digest_of(1), row_of(100))
        assert owner_of(path) == owner[:MOST]


def test_a_name_cut_within_a_letter_is_read(path: Path) -> None:
    owner = "x" + "é" * MOST
    with path.open("w+b") as file:
        RowRing(file.fileno(), SIZE, owner)
    assert owner_of(path) == owner[: MOST // 2] + "\udcc3"


@pytest.mark.parametrize("seed", range(10))
def test_a_name_of_garbage_is_read(path: Path, ring: RowRing, seed: int) -> None:
    garbage = random.Random(seed).randbytes(MOST - 1) + b"\xff"
    ring._memory[128:1024] = garbage
    assert owner_of(path).encode("utf-8", "surrogateescape") == garbage
    row = row_of(100)
    assert ring.lay(digest_of(1), row)
    with path.open("rb") as file:
        assert read(RowRingReader(file.fileno()), digest_of(1), row) == row.joined()


def test_a_name_that_is_no_text_makes_no_ring(path: Path) -> None:
    with path.open("w+b") as file, pytest.raises(ValueError, match="surrogates not allowed"):
        RowRing(file.fileno(), SIZE, "\ud800")


def test_rings_are_each_their_workers(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        with path.open("w+b") as file:
            RowRing(file.fileno(), SIZE, path.name)
    assert [owner_of(path) for path in paths] == ["a", "b"]


# --- room --------------------------------------------------------------------------------------


def test_all_room_is_taken_at_once(path: Path, ring: RowRing) -> None:
    found = path.stat()
    assert found.st_size == WHOLE
    assert found.st_blocks * 512 >= WHOLE


def test_where_there_is_no_room_there_is_no_ring(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with path.open("w+b") as file, pytest.raises(OSError, match="no space left"):
        RowRing(file.fileno(), SIZE, OWNER)


def test_a_limit_on_files_is_told_of(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with path.open("w+b") as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FRONT, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                RowRing(file.fileno(), SIZE, OWNER)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
