"""What workers tell the clients of their machine: notices arrive whole, and nobody ever waits."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lmpool import near_notices
from lmpool.near_notices import (
    NOTICE_MOST,
    PIPE_BYTES,
    RING_BYTES,
    NearNotice,
    NoticeReader,
    NoticeWriter,
)
from lmpool.wants import DIGEST_BYTES, Digest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's")

HEAD_BYTES = 6 + RING_BYTES
FULL = 100
"""More of the longest notices than any pipe here holds."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A pipe that nobody has opened."""
    path = f"{tmp_path}/notices"
    os.mkfifo(path, 0o600)
    return path


@pytest.fixture
def reader(path: str) -> Iterator[NoticeReader]:
    reader = reader_of(path)
    yield reader
    reader.close()
    assert reader.read() is None
    assert held(path) == 0


@pytest.fixture
def writer(path: str, reader: NoticeReader) -> Iterator[NoticeWriter]:
    writer = NoticeWriter(path)
    yield writer
    writer._end()


def reader_of(path: str) -> NoticeReader:
    pipe = os.open(path, os.O_RDWR)
    try:
        return NoticeReader(pipe)
    finally:
        os.close(pipe)


def held(path: str) -> int:
    """How many descriptors of this process are ends of a pipe."""
    which, count = os.stat(path), 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.path.samestat(os.fstat(int(name)), which)
        except OSError:  # of the listing itself
            continue
    return count


def notice_of(writer: int, number: int, length: int) -> NearNotice:
    """One that says all of itself."""
    digests = [
        Digest(b"%03d%07d%06d" % (writer, number, each)[-DIGEST_BYTES:]) for each in range(length)
    ]
    return NearNotice(f"{writer:08x}{number:08x}", digests)


def longest(number: int) -> NearNotice:
    return notice_of(0, number, NOTICE_MOST)


def bytes_of(notice: NearNotice) -> bytes:
    count = len(notice.digests).to_bytes(2, "little")
    return b"rows" + count + notice.ring.encode() + b"".join(notice.digests)


def write(path: str, data: bytes) -> None:
    """Write to a pipe what no worker would."""
    pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        assert os.write(pipe, data) == len(data)
    finally:
        os.close(pipe)


def read_some(reader: NoticeReader) -> list[NearNotice]:
    notices = reader.read()
    assert notices is not None
    return notices


def read(reader: NoticeReader) -> list[NearNotice]:
    """All that was told."""
    notices = read_some(reader)
    while near_notices._unread(reader._pipe):
        notices += read_some(reader)
    return notices


def read_many(reader: NoticeReader, count: int) -> list[NearNotice]:
    """So many, which have been told."""
    notices: list[NearNotice] = []
    while len(notices) < count:
        notices += read_some(reader)
    return notices


# --- what is read ------------------------------------------------------------------------------


def test_what_is_told_is_read(reader: NoticeReader, writer: NoticeWriter) -> None:
    for number, length in enumerate((1, 2, 17, NOTICE_MOST - 1, NOTICE_MOST)):
        notice = notice_of(1, number, length)
        writer.tell(notice)
        assert read(reader) == [notice]


def test_all_that_was_told_is_read_in_its_order(
    path: str, reader: NoticeReader, writer: NoticeWriter
) -> None:
    other = NoticeWriter(path)
    notices = [notice_of(number % 2, number, 1 + number % 5) for number in range(20)]
    for number, notice in enumerate(notices):
        (other if number % 2 else writer).tell(notice)
    assert read(reader) == notices
    other._end()


def test_a_notice_of_nothing_is_not_told(reader: NoticeReader, writer: NoticeWriter) -> None:
    writer.tell(NearNotice("0" * RING_BYTES, []))
    writer.tell(longest(1))
    assert read(reader) == [longest(1)]


@pytest.mark.parametrize("length", [NOTICE_MOST + 1, 2 * NOTICE_MOST, 5 * NOTICE_MOST + 7])
def test_a_notice_longer_than_one_piece_is_told_in_several(
    reader: NoticeReader, writer: NoticeWriter, length: int
) -> None:
    whole = notice_of(1, 2, length)
    writer.tell(whole)
    pieces = read_many(reader, -(-length // NOTICE_MOST))
    assert {piece.ring for piece in pieces} == {whole.ring}
    assert [len(piece.digests) for piece in pieces[:-1]] == [NOTICE_MOST] * (len(pieces) - 1)
    assert [digest for piece in pieces for digest in piece.digests] == whole.digests


def test_a_piece_is_no_longer_than_what_arrives_whole(
    writer: NoticeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, lengths = os.write, list[int]()

    def counted(file: int, data: bytes) -> int:
        lengths.append(len(data))
        return usual(file, data)

    monkeypatch.setattr(os, "write", counted)
    writer.tell(notice_of(1, 2, 3 * NOTICE_MOST + 1))
    most = HEAD_BYTES + NOTICE_MOST * DIGEST_BYTES
    assert lengths == [most, most, most, HEAD_BYTES + DIGEST_BYTES]
    assert PIPE_BYTES - DIGEST_BYTES < most <= PIPE_BYTES


@pytest.mark.parametrize("size", [1, 2, 5, HEAD_BYTES, HEAD_BYTES + 1, 64, 1000, 4097])
def test_notices_that_are_read_in_parts_are_read_whole(
    reader: NoticeReader, writer: NoticeWriter, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(near_notices, "READ_BYTES", size)
    rng = random.Random(size)
    for turn in range(10):
        notices = [notice_of(turn, number, rng.randrange(1, 60)) for number in range(10)]
        for notice in notices:
            writer.tell(notice)
        assert read_many(reader, len(notices)) == notices


# --- many at once ------------------------------------------------------------------------------


def test_notices_of_many_threads_all_arrive_whole(path: str, reader: NoticeReader) -> None:
    threads, each = 8, 200
    free = [threading.Semaphore(1) for _ in range(threads)]  # all of them fit into the pipe

    def tell(number: int) -> None:
        writer = NoticeWriter(path)
        for turn in range(each):
            free[number].acquire()
            writer.tell(notice_of(number, turn, 1 + 37 * turn % NOTICE_MOST))

    running = [threading.Thread(target=tell, args=(n,), daemon=True) for n in range(threads)]
    for thread in running:
        thread.start()
    turns = [0] * threads
    while sum(turns) < threads * each:
        for notice in read_some(reader):
            number = int(notice.ring[:8], 16)
            assert notice == notice_of(number, turns[number], 1 + 37 * turns[number] % NOTICE_MOST)
            turns[number] += 1
            free[number].release()
    for thread in running:
        thread.join()
    assert turns == [each] * threads


WRITER = """
import sys
from lmpool.near_notices import NOTICE_MOST, NoticeWriter
from tests.unit.test_near_notices import notice_of

number, writer, waits = int(sys.argv[2]), NoticeWriter(sys.argv[1]), sys.argv[3] == "waits"
turn = 0
while not waits or sys.stdin.readline():
    writer.tell(notice_of(number, turn, 1 + 37 * turn % NOTICE_MOST))
    turn += 1
"""


class Told:
    """Processes that tell, each as soon as it is asked to, or all the time."""

    def __init__(self, path: str, count: int, how: str) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        for number in range(count):
            command = [sys.executable, "-c", WRITER, path, str(number), how]
            self.processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, text=True, bufsize=1)
            )

    def ask(self, number: int) -> None:
        process = self.processes[number]
        assert process.stdin is not None
        process.stdin.write("\n")

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()


def test_notices_of_many_processes_all_arrive_whole(path: str, reader: NoticeReader) -> None:
    count, each = 4, 300
    told = Told(path, count, "waits")
    try:
        turns = [0] * count
        for number in range(count):
            told.ask(number)
        while sum(turns) < count * each:
            for notice in read_some(reader):
                number, turn = int(notice.ring[:8], 16), int(notice.ring[8:], 16)
                assert turn == turns[number]
                assert notice == notice_of(number, turn, 1 + 37 * turn % NOTICE_MOST)
                turns[number] += 1
                if turns[number] < each:
                    told.ask(number)
        assert turns == [each] * count
    finally:
        told.end()


def test_what_arrives_of_more_than_is_read_is_whole(path: str, reader: NoticeReader) -> None:
    """Two processes tell all the time: some is dropped, and nothing is torn."""
    told = Told(path, 2, "never waits")
    try:
        last, seen = [-1, -1], [0, 0]
        while min(seen) < 500:
            for notice in read_some(reader):
                number, turn = int(notice.ring[:8], 16), int(notice.ring[8:], 16)
                assert turn > last[number]
                assert notice == notice_of(number, turn, 1 + 37 * turn % NOTICE_MOST)
                last[number] = turn
                seen[number] += 1
    finally:
        told.end()


# --- how far behind a client is ----------------------------------------------------------------


def test_a_worker_sees_how_many_rows_its_client_has_not_come_to(
    path: str, reader: NoticeReader, writer: NoticeWriter
) -> None:
    assert writer.unread() == 0
    other = NoticeWriter(path)
    for number in range(100):
        (other if number % 2 else writer).tell(notice_of(1, number, 4))
    left = 100 * (HEAD_BYTES + 4 * DIGEST_BYTES)
    for _ in range(10):
        assert writer.unread() == other.unread() == left // DIGEST_BYTES
        read_some(reader)
        left -= near_notices.READ_BYTES
    read(reader)
    assert writer.unread() == 0
    other._end()


def test_a_client_takes_few_notices_at_once(reader: NoticeReader, writer: NoticeWriter) -> None:
    """What it has taken nobody can see."""
    notices = [notice_of(1, number, 4) for number in range(100)]
    for notice in notices:
        writer.tell(notice)
    read_of: list[NearNotice] = []
    while len(read_of) < 100:
        before = len(read_of)
        read_of += read_some(reader)
        assert len(read_of) - before <= 4
    assert read_of == notices


# --- a pipe that is full -----------------------------------------------------------------------


def test_a_full_pipe_drops_what_is_told_and_nobody_waits(
    reader: NoticeReader, writer: NoticeWriter
) -> None:
    for number in range(FULL):
        writer.tell(longest(number))
    writer.tell(notice_of(0, FULL, 3 * NOTICE_MOST))
    writer.tell(longest(FULL + 1))
    first = read(reader)
    assert 0 < len(first) < FULL
    assert first == [longest(number) for number in range(len(first))]
    writer.tell(longest(FULL + 2))  # there is room again
    assert read(reader) == [longest(FULL + 2)]


def test_a_client_that_is_slow_gets_what_the_pipe_holds(
    reader: NoticeReader, writer: NoticeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_notices, "READ_BYTES", 10_000)
    last = -1
    for turn in range(0, 20 * FULL, FULL):
        for number in range(turn, turn + FULL):
            writer.tell(longest(number))
        for notice in read_some(reader):
            number = int(notice.ring, 16)
            assert number > last
            assert notice == longest(number)
            last = number
    assert last > FULL  # it goes on


# --- garbage -----------------------------------------------------------------------------------

GARBAGE: dict[str, bytes] = {
    "zeros": bytes(1000),
    "ones": b"\xff" * 1000,
    "another mark": b"ROWS" + bytes_of(longest(1))[4:],
    "too many digests": b"rows" + (NOTICE_MOST + 1).to_bytes(2, "little") + b"0" * 4090,
    "the most of digests": b"rows\xff\xff" + b"0" * 100,
    "a half of the head": b"rows\1",
    "a byte": b"r",
    "the mark": b"rows",
    "a head and nothing behind": bytes_of(longest(1))[:HEAD_BYTES],
    "a notice but for a byte": bytes_of(longest(1))[:-1],
    "a notice without its first byte": bytes_of(longest(1))[1:],
    "a ring that is no text": b"rows\1\0" + b"\xff" * RING_BYTES + b"0" * DIGEST_BYTES,
    "a notice and a byte": bytes_of(longest(1)) + b"x",
}


def read_again(reader: NoticeReader, writer: NoticeWriter, most: int = 4) -> int:
    """How many notices were lost of those that are told, one after the other, until one is read
    that is whole; then all are."""
    for number in range(most):
        writer.tell(longest(number))
        if longest(number) in read(reader):
            break
    else:
        raise AssertionError(f"none of {most} notices was read")
    for later in range(100, 110):
        writer.tell(notice_of(1, later, later))
        assert read(reader) == [notice_of(1, later, later)]
    return number


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_after_garbage_notices_are_read_again(
    path: str, reader: NoticeReader, writer: NoticeWriter, garbage: bytes
) -> None:
    write(path, garbage)
    read(reader)
    read_again(reader, writer)


@pytest.mark.parametrize("garbage", ["zeros", "another mark", "too many digests"])
def test_what_is_no_notice_costs_none_that_is_read_before_or_after(
    path: str, reader: NoticeReader, writer: NoticeWriter, garbage: str
) -> None:
    writer.tell(longest(1))
    write(path, GARBAGE[garbage])
    assert read(reader) == [longest(1)]
    assert read_again(reader, writer) == 0


@pytest.mark.parametrize("seed", range(20))
def test_random_garbage_ends_no_reader(
    path: str, reader: NoticeReader, writer: NoticeWriter, seed: int
) -> None:
    rng = random.Random(seed)
    good = bytes_of(notice_of(7, seed, 40))
    for _ in range(30):
        kind = rng.randrange(4)
        garbage = rng.randbytes(rng.randrange(1, 3000))
        if kind == 1:
            garbage = b"rows" + garbage
        elif kind == 2:
            begin, end = sorted(rng.choices(range(len(good)), k=2))
            garbage = good[begin : end + 1]
        elif kind == 3:
            garbage = good + garbage + good
        write(path, garbage)
        read(reader)
        read_again(reader, writer)


# --- the end of a reader -----------------------------------------------------------------------


class Reading(threading.Thread):
    """A thread that reads until there is no more, and what it has read."""

    def __init__(self, reader: NoticeReader, heard: Callable[[NearNotice], None]) -> None:
        super().__init__(daemon=True)
        self._reader, self._heard = reader, heard
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while (notices := self._reader.read()) is not None:
                for notice in notices:
                    self._heard(notice)
        except BaseException as error:  # its test says so
            self.error = error

    def ends(self) -> bool:
        self.join(60)
        assert self.error is None
        return not self.is_alive()


def test_another_thread_ends_a_reader(path: str, writer: NoticeWriter) -> None:
    for _ in range(50):
        reader, heard = reader_of(path), threading.Event()
        reading = Reading(reader, lambda _, heard=heard: heard.set())  # type: ignore[misc]
        reading.start()
        writer.tell(longest(1))
        assert heard.wait(60)
        reader.close()
        assert reading.ends()
        assert reader.read() is None
        reader.close()


def test_a_reader_ends_itself(path: str, reader: NoticeReader, writer: NoticeWriter) -> None:
    heard: list[NearNotice] = []

    def hear(notice: NearNotice) -> None:
        heard.append(notice)
        reader.close()
        reader.close()

    reading = Reading(reader, hear)
    writer.tell(longest(1))
    reading.start()
    assert reading.ends()
    assert heard == [longest(1)]
    assert held(path) == 1  # the writer's
    with pytest.raises(BrokenPipeError):
        writer.tell(longest(2))


def test_a_reader_that_was_closed_reads_no_more(
    path: str, reader: NoticeReader, writer: NoticeWriter
) -> None:
    writer.tell(longest(1))
    for _ in range(3):
        reader.close()
    writer.tell(longest(2))
    for _ in range(3):
        assert reader.read() is None
        reader.close()
    assert held(path) == 1  # the writer's


def test_a_reader_ends_whose_pipe_is_full(
    path: str, reader: NoticeReader, writer: NoticeWriter
) -> None:
    for number in range(FULL):
        writer.tell(longest(number))
    with pytest.raises(BlockingIOError):
        write(path, b"x" * PIPE_BYTES)
    for fill in (1000, 100, 10, 1):  # to the last byte
        with suppress(BlockingIOError):
            while True:
                write(path, b"x" * fill)
    reader.close()
    reader.close()
    assert reader.read() is None
    assert held(path) == 1  # the writer's


def test_a_thread_ends_whose_pipe_is_full_while_it_is_at_work(
    path: str, reader: NoticeReader, writer: NoticeWriter
) -> None:
    heard, goes_on = threading.Event(), threading.Event()

    def hear(_: NearNotice) -> None:
        heard.set()
        assert goes_on.wait(60)

    reading = Reading(reader, hear)
    reading.start()
    writer.tell(longest(1))
    assert heard.wait(60)
    for number in range(FULL):
        writer.tell(longest(number))
    reader.close()
    goes_on.set()
    assert reading.ends()


def test_several_threads_close_a_reader_at_once(path: str) -> None:
    for _ in range(50):
        reader, begin = reader_of(path), threading.Barrier(4)
        reading = Reading(reader, lambda _: None)

        def close(reader: NoticeReader = reader, begin: threading.Barrier = begin) -> None:
            begin.wait()
            reader.close()

        closing = [threading.Thread(target=close) for _ in range(3)]
        for thread in closing:
            thread.start()
        reader._ending.acquire()  # none of them gets ahead of who reads
        try:
            reading.start()
            begin.wait()
        finally:
            reader._ending.release()
        for thread in closing:
            thread.join(60)
            assert not thread.is_alive()
        assert reading.ends()
        assert held(path) == 0


def test_a_reader_is_closed_between_its_look_and_its_read(
    reader: NoticeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual_read, usual_write = os.read, os.write
    about_to, goes_on = threading.Event(), threading.Event()

    def read_late(file: int, size: int) -> bytes:
        about_to.set()
        assert goes_on.wait(60)
        return usual_read(file, size)

    def write_late(file: int, data: bytes) -> int:
        goes_on.set()
        reading.join(0.2)  # by then it has failed, or waits for this
        return usual_write(file, data)

    reading = Reading(reader, lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", read_late)
        patch.setattr(os, "write", write_late)
        reading.start()
        assert about_to.wait(60)
        reader.close()
        assert reading.ends()


def test_a_signals_handler_ends_who_reads(
    reader: NoticeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, reads, ended = os.read, threading.Event(), threading.Event()

    def read_now(file: int, size: int) -> bytes:
        reads.set()
        return usual(file, size)

    def interrupt() -> None:
        assert reads.wait(60)
        while not ended.wait(0.01):  # one that comes just before the call would not end it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: reader.close())
    thread = threading.Thread(target=interrupt)
    try:
        monkeypatch.setattr(os, "read", read_now)
        thread.start()
        assert reader.read() is None
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_reader_that_is_closed_as_it_lets_go_lets_go_once(
    path: str, reader: NoticeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, closed = os.close, list[int]()

    def close(file: int) -> None:
        closed.append(file)
        reader.close()  # as a finalizer may
        usual(file)

    number = reader._pipe
    reader.close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        assert reader.read() is None
    assert closed == [number]
    assert held(path) == 0


def test_a_descriptor_that_is_anothers_by_now_is_not_closed(
    path: str, reader: NoticeReader
) -> None:
    mine, others = reader._pipe, os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(others, mine)  # as after all were closed
        reader.after_fork()
        assert os.path.samestat(os.fstat(mine), os.fstat(others))
    finally:
        os.close(others)
        os.close(mine)
    assert held(path) == 0


FORKS = """
import os, sys, time
from lmpool.near_notices import NearNotice, NoticeReader
from tests.unit.test_near_notices import held

path = sys.argv[1]
pipe = os.open(path, os.O_RDWR)
reader = NoticeReader(pipe)
os.close(pipe)
child = os.fork()
if child == 0:
    reader.after_fork()
    assert held(path) == 0
    reader.close()  # which is of no pipe any more
    reader.close()
    assert reader.read() is None
    reader.after_fork()
    os.write(1, b"forked\\n")
    sys.stdin.read()  # it lives until the test ends
    os._exit(0)
for _ in range(3):
    for ring, digests in reader.read():
        os.write(1, b"%s %d\\n" % (ring.encode(), len(digests)))
os._exit(0)
"""


def test_in_a_forked_child_a_reader_is_let_go_of(path: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKS, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "forked\n"
            writer = NoticeWriter(path)
            for number in range(3):  # of which the child's end has taken nothing, nor added
                writer.tell(notice_of(1, number, 5))
                assert parent.stdout.readline() == f"{notice_of(1, number, 5).ring} 5\n"
            parent.wait(60)
            with pytest.raises(BrokenPipeError):  # though the child lives
                writer.tell(longest(1))
            with pytest.raises(OSError, match="No such device"):
                NoticeWriter(path)
        finally:
            parent.kill()


# --- the end of a writer -----------------------------------------------------------------------


def test_who_tells_where_nobody_reads_any_more_is_told_so(path: str) -> None:
    reader = reader_of(path)
    writer = NoticeWriter(path)
    writer.tell(longest(1))
    reader.close()
    assert reader.read() is None
    for length in (1, NOTICE_MOST, 3 * NOTICE_MOST):
        with pytest.raises(BrokenPipeError):
            writer.tell(notice_of(1, 1, length))
    writer.tell(NearNotice("0" * RING_BYTES, []))


def test_a_pipe_that_nobody_reads_is_refused(path: str) -> None:
    with pytest.raises(OSError, match="No such device") as refused:
        NoticeWriter(path)
    assert refused.value.errno == errno.ENXIO
    assert held(path) == 0


def test_a_writer_that_is_forgotten_lets_go_of_its_pipe(path: str, reader: NoticeReader) -> None:
    writer = NoticeWriter(path)
    assert held(path) == 2
    del writer
    assert held(path) == 1


def test_what_is_no_pipe_is_refused(tmp_path: Path) -> None:
    file, folder, link, missing = (tmp_path / name for name in ("file", "folder", "link", "none"))
    file.write_bytes(b"before")
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        os.mkfifo(tmp_path / "pipe", 0o600)
        reader = reader_of(f"{tmp_path}/pipe")
        link.symlink_to(tmp_path / "pipe")
        listener.bind(f"{tmp_path}/socket")
        listener.listen()
        for each in (file, folder, link, missing, tmp_path / "socket", Path(os.devnull)):
            with pytest.raises(OSError, match=str(each)):
                NoticeWriter(str(each))
        reader.close()
        assert reader.read() is None
    gc.collect()
    assert held(str(file)) == 0
    assert file.read_bytes() == b"before"


def test_a_pipe_of_another_user_is_refused(
    path: str, reader: NoticeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(PermissionError, match=f"{path} is no pipe of this user's"):
            NoticeWriter(path)
    gc.collect()
    assert held(path) == 1  # the reader's


def test_ends_are_left_to_no_program_that_is_started(
    reader: NoticeReader, writer: NoticeWriter
) -> None:
    for number in (reader._pipe, writer._pipe):
        assert not os.get_inheritable(number)


def test_a_pipe_that_nobody_has_any_more_is_closed() -> None:
    ends = os.pipe()
    try:
        reader = NoticeReader(ends[0])
        number = reader.fileno()
        assert os.fstat(number)
        del reader
        gc.collect()
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(number)
    finally:
        for end in ends:
            os.close(end)
