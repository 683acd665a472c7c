"""Rows that a client reads where workers of its machine have laid them."""

from __future__ import annotations

import errno
import os
import queue
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from lmpool import neighbours
from lmpool.near_notices import NOTICE_MOST, NearNotice, NoticeReader, NoticeWriter
from lmpool.neighbours import Membership, Neighbourhood
from lmpool.producer import near_place as near_place_module
from lmpool.producer.near_rows import NearRows
from lmpool.row_ring import FRONT, IS_ORDERED, MAGIC, RowRing, place_of
from lmpool.rows import LARGE, PackedRow, pack_logprobs
from lmpool.wait_list import WaitListReader, halves_of
from lmpool.wants import Digest, Generate, Row, Top, Want
from lmpool.wire import Job
from tests.support.parts import info_of
from tests.support.protocol import FINGERPRINT
from tests.support.waiting import until
from tests.support.workers import leaked_threads, lmpool_threads

pytestmark = pytest.mark.skipif(not IS_ORDERED, reason="no rows are laid on this machine")

SIZE = 1 << 20
LEAST = LARGE // 4
"""Entries of the smallest vocabulary whose rows are large in any encoding."""
OTHER = FINGERPRINT[::-1]
DIGESTS = [Digest(bytes([n]) * 16) for n in range(1, 9)]


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(neighbours, "MEMORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def here(memory: Path) -> Neighbourhood:
    return Neighbourhood.of_pool("p", FINGERPRINT[:8])


@pytest.fixture
def near(here: Neighbourhood) -> Iterator[NearRows]:
    """The rows of a client that has entered."""
    near = NearRows("me")
    near.enter("p", large_info())
    yield near
    near.leave()


@pytest.fixture
def heard(near: NearRows) -> queue.Queue[NearNotice]:
    """What that client's thread was told."""
    heard: queue.Queue[NearNotice] = queue.Queue()
    near.hear = heard.put
    return heard


def large_info(fingerprint: str = FINGERPRINT, vocab_size: int = LEAST) -> Any:
    return info_of(vocab_size=vocab_size, fingerprint=fingerprint)


def row_of(seed: int) -> PackedRow:
    return pack_logprobs(np.random.default_rng(seed).normal(size=LEAST).astype(np.float32))


class Worker:
    """One that lays rows, in a ring that is named after its number."""

    def __init__(self, here: Neighbourhood, number: int) -> None:
        self.name = f"{number:016x}"
        self.membership: Membership = here.enter("rows", self.name, self._fill)

    def _fill(self, file: int) -> None:
        self.ring = RowRing(file, SIZE, self.name)

    def lay(self, *numbers: int) -> None:
        for number in numbers:
            assert self.ring.lay(DIGESTS[number], row_of(number))

    def leave(self) -> None:
        self.membership.leave()


def names(here: Neighbourhood) -> set[str]:
    """The clients that are there: each says what it waits for and has a pipe, both of one name."""
    told = set(here.look("notices"))
    assert told == set(here.look("client"))
    return {name.rpartition(".")[0] for name in told}


def found(near: NearRows, worker: Worker) -> list[int] | None:
    """The numbers of the rows that lie in a worker's ring, each of them right; None where that is
    not found."""
    ring = near.ring(worker.name)
    if ring is None:
        return None
    there = []
    for number, digest in enumerate(DIGESTS):
        row = ring.copy(digest, row_of(number).nbytes)
        if row is not None:
            assert isinstance(row, memoryview)
            assert bytes(row) == row_of(number).joined()
            there.append(number)
    return there


# --- being there -------------------------------------------------------------------------------


def test_a_client_is_there_where_any_rows_are_large(here: Neighbourhood) -> None:
    for vocab_size, is_there in ((1, False), (LEAST - 1, False), (LEAST, True), (1 << 17, True)):
        near = NearRows("me")
        near.enter("p", large_info(vocab_size=vocab_size))
        assert names(here) == ({"me"} if is_there else set())
        near.leave()
        assert here.look("client") == {}


def test_nothing_is_read_before_a_client_is_there(here: Neighbourhood) -> None:
    worker, near = Worker(here, 1), NearRows("me")
    worker.lay(1)
    assert near.ring(worker.name) is None
    near.enter("p", large_info(vocab_size=LEAST - 1))
    assert near.ring(worker.name) is None
    near.leave()
    worker.leave()


def test_nobody_is_there_where_writes_come_in_any_order(
    here: Neighbourhood, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_place_module, "IS_ORDERED", False)
    near = NearRows("me")
    near.enter("p", large_info())
    assert os.listdir(memory) == []
    worker = Worker(here, 1)
    assert near.ring(worker.name) is None
    near.leave()
    worker.leave()


def test_a_client_that_cannot_be_there_reads_nothing(
    here: Neighbourhood, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, near = Worker(here, 1), NearRows("me")
    with monkeypatch.context() as patch:
        patch.setattr(neighbours, "MEMORY", f"{memory}/nowhere")
        near.enter("p", large_info())
    assert here.look("client") == {}
    assert near.ring(worker.name) is None
    near.leave()
    worker.leave()


def test_who_enters_again_stays(near: NearRows, here: Neighbourhood) -> None:
    def file() -> int:
        (path,) = here.look("client").values()
        return os.stat(path).st_ino

    before, worker = file(), Worker(here, 1)
    worker.lay(1)
    assert found(near, worker) == [1]
    ring, near.are_usual = near.ring(worker.name), True
    near.enter("p", large_info())
    assert file() == before
    assert near.ring(worker.name) is ring
    assert near.are_usual
    worker.leave()


def test_another_model_has_other_neighbours(near: NearRows, here: Neighbourhood) -> None:
    there = Neighbourhood.of_pool("p", OTHER[:8])
    mine, theirs, twin = Worker(here, 1), Worker(there, 2), Worker(there, 1)
    mine.lay(1, 2)
    theirs.lay(2, 3)
    twin.lay(4)
    assert (found(near, mine), found(near, theirs)) == ([1, 2], None)
    near.are_usual = True
    near.enter("p", large_info(OTHER))
    assert here.look("client") == {}
    assert names(there) == {"me"}
    assert not near.are_usual
    assert (found(near, twin), found(near, theirs)) == ([4], [2, 3])
    near.enter("p", large_info())  # and back
    assert names(here) == {"me"}
    assert there.look("client") == {}
    assert (found(near, mine), found(near, theirs)) == ([1, 2], None)
    near.are_usual = True
    near.enter("p", large_info(OTHER, vocab_size=LEAST - 1))
    assert here.look("client") == there.look("client") == {}
    assert not near.are_usual
    assert found(near, mine) is found(near, theirs) is None
    for worker in (mine, theirs, twin):
        worker.leave()


def test_who_left_reads_nothing_and_never_comes_back(near: NearRows, here: Neighbourhood) -> None:
    worker = Worker(here, 1)
    worker.lay(1)
    assert found(near, worker) == [1]
    near.are_usual = True
    for fingerprint in (FINGERPRINT, OTHER):
        near.leave()
        near.enter("p", large_info(fingerprint))
        assert here.look("client") == {}
        assert Neighbourhood.of_pool("p", OTHER[:8]).look("client") == {}
        assert near.ring(worker.name) is None
        assert not near.are_usual
    worker.leave()


def test_who_left_before_it_entered_does_not_enter(here: Neighbourhood) -> None:
    near = NearRows("me")
    near.leave()
    near.enter("p", large_info())
    assert here.look("client") == {}


# --- what is read ------------------------------------------------------------------------------


def test_the_ring_that_is_named_is_read(near: NearRows, here: Neighbourhood) -> None:
    first, second = Worker(here, 1), Worker(here, 2)
    first.lay(1, 2)
    second.lay(3, 2)
    assert found(near, first) == [1, 2]
    assert found(near, second) == [2, 3]
    first.lay(4)
    assert place_of(DIGESTS[5]) != place_of(DIGESTS[4])
    second.lay(5)
    assert found(near, first) == [1, 2, 4]
    assert found(near, second) == [2, 3, 5]
    assert near.ring(f"{3:016x}") is None
    third = Worker(here, 3)  # though it was looked for before
    assert found(near, third) == []
    for worker in (first, second, third):
        worker.leave()


def test_it_is_for_others_to_say_whether_rows_usually_come_from_there(
    near: NearRows, here: Neighbourhood
) -> None:
    worker = Worker(here, 1)
    worker.lay(1)
    assert not near.are_usual
    assert found(near, worker) == [1]
    assert not near.are_usual
    worker.leave()


def test_a_ring_that_is_gone_is_let_go_once_another_comes(
    near: NearRows, here: Neighbourhood, memory: Path
) -> None:
    def mapped() -> int:
        return sum(str(memory) in each.path for each in psutil.Process().memory_maps(grouped=False))

    first, second, third = (Worker(here, number) for number in range(1, 4))
    first.lay(1)
    second.lay(2)
    alone = mapped()  # by the workers
    assert (found(near, first), found(near, second)) == ([1], [2])
    assert mapped() == alone + 2
    first.leave()
    assert found(near, second) == [2]
    assert near.ring(f"{4:016x}") is None  # nor is another there
    assert found(near, first) == [1]  # what it laid last may be waited for yet
    assert found(near, third) == []
    assert near.ring(first.name) is None
    assert mapped() == alone + 2
    assert found(near, second) == [2]
    for worker in (second, third):
        worker.leave()


def test_a_ring_is_opened_once(
    near: NearRows, here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, usual = list[str](), near_place_module._open

    def opens(path: str) -> Any:
        opened.append(os.path.basename(path))
        return usual(path)

    monkeypatch.setattr(near_place_module, "_open", opens)
    workers = [Worker(here, number) for number in (1, 2, 3)]
    other = here.enter("client", "other")
    for number in range(9):
        assert found(near, workers[number // 4]) == []
        assert found(near, workers[0]) == []
    assert opened == [f"rows-{worker.name}" for worker in workers]
    other.leave()
    for worker in workers:
        worker.leave()


@pytest.mark.parametrize(
    "name",
    [
        *("", "w", ".", "/", "1" * 15, "1" * 17, "1" * 16 + "\n", "A" * 16, "g" * 16),
        *("\0" * 16, "1" * 15 + "\0", "\u0661" * 16, "\ufffd" * 16, "*" * 16, "../" + "1" * 13),
        *("1" * 16 + "/../rows-" + "1" * 16, "x" * 100_000),
    ],
    ids=lambda name: ascii(name[:20]),
)
def test_any_text_may_be_a_name_but_is_not_looked_for(
    near: NearRows, here: Neighbourhood, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    opened = list[str]()
    monkeypatch.setattr(near_place_module, "_open", opened.append)
    assert near.ring(name) is None
    assert opened == []
    monkeypatch.undo()


def test_a_ring_of_another_name_than_workers_give_is_not_read(
    near: NearRows, here: Neighbourhood
) -> None:
    worker = here.enter("rows", "w", lambda file: RowRing(file, SIZE, "w"))
    assert near.ring("w") is None
    worker.leave()


@pytest.mark.parametrize(
    "garbage",
    [b"", b"x" * 100, MAGIC + bytes(100), MAGIC + b"\xff" * (FRONT + 1000)],
    ids=["empty", "short", "cut", "long"],
)
def test_a_file_that_is_no_ring_is_passed_over(
    near: NearRows, here: Neighbourhood, garbage: bytes
) -> None:
    wrong = here.enter("rows", "a" * 16, lambda file: os.write(file, garbage))
    assert near.ring("a" * 16) is None
    worker = Worker(here, 1)
    worker.lay(1)
    assert found(near, worker) == [1]
    assert near.ring("a" * 16) is None
    wrong.leave()
    worker.leave()


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_file_is_passed_over(near: NearRows, here: Neighbourhood, kind: str) -> None:
    worker, path = Worker(here, 1), here.path("rows", "a" * 16)
    if kind == "link":
        os.symlink(here.path("rows", worker.name), path)
    elif kind == "folder":
        os.mkdir(path)
    else:
        os.mkfifo(path)  # nobody writes to it: it is not waited for
    assert near.ring("a" * 16) is None
    assert found(near, worker) == []
    worker.leave()


def test_a_ring_that_went_before_it_was_opened_is_passed_over(
    near: NearRows, here: Neighbourhood
) -> None:
    workers = [Worker(here, 1), Worker(here, 2)]
    for worker in workers:
        worker.lay(1)
    workers[0].leave()
    assert near.ring(workers[0].name) is None
    assert found(near, workers[1]) == [1]
    workers[1].leave()


def test_no_file_stays_open_after_leaving(memory: Path, here: Neighbourhood) -> None:
    def opened() -> list[str]:
        return [file.path for file in psutil.Process().open_files() if str(memory) in file.path]

    workers = [Worker(here, 1), Worker(here, 2)]
    before, near = sorted(opened()), NearRows("me")
    near.enter("p", large_info())
    assert all(near.ring(worker.name) for worker in workers)
    assert len(opened()) > len(before)
    near.leave()
    assert sorted(opened()) == before
    for worker in workers:
        worker.leave()


# --- what is waited for ------------------------------------------------------------------------


def expects(near: NearRows, *numbers: int, want: Want | None = None) -> None:
    jobs = [Job(want or Row("f32"), DIGESTS[number], b"\0" * 4, None) for number in numbers]
    near.expect([SimpleNamespace(job=job) for job in jobs])  # type: ignore[misc]


def awaited(here: Neighbourhood) -> list[int]:
    """The numbers of the answers that the client which is there waits for, to a worker."""
    (path,) = here.look("client").values()
    with open(path, "rb") as file:
        return [*np.flatnonzero(WaitListReader(file.fileno()).has(halves_of(DIGESTS))).tolist()]


def test_workers_see_what_is_waited_for(near: NearRows, here: Neighbourhood) -> None:
    assert awaited(here) == []
    expects(near, 1, 3)
    assert awaited(here) == [1, 3]
    expects(near)
    expects(near, 3, 3, 6)
    assert awaited(here) == [1, 3, 6]


@pytest.mark.parametrize(
    ("want", "vocab_size", "is_large"),
    [
        (Row("f32"), LEAST, True),
        (Row("bf16"), LEAST, False),
        (Row("bf16"), 2 * LEAST - 1, False),
        (Row("bf16"), 2 * LEAST, True),
        (Row("f16"), 2 * LEAST, True),
        (Top(5), 1 << 17, False),
        (Generate(3, (), 1.0, 7), 1 << 17, False),
        (Generate(1 << 14, (), 1.0, 7), 1 << 17, False),
    ],
    ids=str,
)
def test_large_rows_alone_are_worth_it(
    here: Neighbourhood, want: Want, vocab_size: int, is_large: bool
) -> None:
    near = NearRows("me")
    near.enter("p", large_info(vocab_size=vocab_size))
    expects(near, 2, want=want)
    assert awaited(here) == ([2] if is_large else [])
    near.leave()


def test_what_is_large_is_told_among_others(near: NearRows, here: Neighbourhood) -> None:
    row, top = Row("f32"), Top(5)
    wants: list[Want] = [row, top, top, row, Row("f16"), row]
    near.expect(
        SimpleNamespace(job=Job(want, DIGESTS[number], b"", None))  # type: ignore[misc]
        for number, want in enumerate(wants)
    )
    assert awaited(here) == [0, 3, 5]


def test_nothing_is_expected_where_nobody_is_told(here: Neighbourhood) -> None:
    near = NearRows("me")
    expects(near, 1)
    near.enter("p", large_info(OTHER, vocab_size=LEAST - 1))
    expects(near, 1)
    near.enter("p", large_info())
    assert awaited(here) == []
    near.leave()
    expects(near, 1)


def test_another_models_list_begins_empty(near: NearRows, here: Neighbourhood) -> None:
    there = Neighbourhood.of_pool("p", OTHER[:8])
    expects(near, 1)
    (path,) = here.look("client").values()
    with open(path, "rb") as file:
        left = WaitListReader(file.fileno())
    near.enter("p", large_info(OTHER))
    assert awaited(there) == []
    expects(near, 2)
    assert awaited(there) == [2]
    assert np.flatnonzero(left.has(halves_of(DIGESTS))).tolist() == [1]


# --- what is told ------------------------------------------------------------------------------


def pipe_of(here: Neighbourhood) -> str:
    (path,) = here.look("notices").values()
    return path


def test_workers_tell_by_a_pipe_where_rows_lie(
    here: Neighbourhood, heard: queue.Queue[NearNotice]
) -> None:
    first, second = (NoticeWriter(pipe_of(here)) for _ in range(2))
    first.tell(NearNotice("1" * 16, DIGESTS[:3]))
    second.tell(NearNotice("2" * 16, DIGESTS[3:]))
    assert heard.get(timeout=60) == ("1" * 16, DIGESTS[:3])
    assert heard.get(timeout=60) == ("2" * 16, DIGESTS[3:])
    many = [Digest(number.to_bytes(16, "big")) for number in range(3 * NOTICE_MOST)]
    first.tell(NearNotice("1" * 16, many))
    told = list[Digest]()
    while len(told) < len(many):
        told += heard.get(timeout=60).digests
    assert told == many


def test_its_files_are_this_users_alone(near: NearRows, here: Neighbourhood) -> None:
    for path in (*here.look("client").values(), *here.look("notices").values()):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


@pytest.mark.parametrize(
    "garbage",
    [
        *(b"x", b"x" * 10_000, b"rows", b"\0" * 22, b"rows\xff\xff" + b"1" * 16 + bytes(100)),
        b"rows\x05\0" + b"1" * 16 + bytes(30),
    ],
    ids=["one", "many", "mark", "zeros", "too many", "cut"],
)
def test_who_writes_anything_else_is_passed_over(
    here: Neighbourhood, heard: queue.Queue[NearNotice], garbage: bytes
) -> None:
    """And rows of which nobody hears by that come from the server."""
    writer = NoticeWriter(pipe_of(here))
    with open(pipe_of(here), "wb") as file:
        file.write(garbage)
    notice = NearNotice("1" * 16, DIGESTS[:3])

    def is_heard() -> bool:  # what came together with garbage, or was taken for its end, was not
        writer.tell(notice)
        return any(heard.get() == notice for _ in range(heard.qsize()))

    until(is_heard)


def test_a_row_that_cannot_be_read_keeps_no_other_back(
    near: NearRows, here: Neighbourhood, caplog: pytest.LogCaptureFixture
) -> None:
    heard: queue.Queue[NearNotice] = queue.Queue()

    def fails_first(notice: NearNotice) -> None:
        heard.put(notice)
        if heard.qsize() == 1:
            raise MemoryError("no room for it")

    near.hear = fails_first
    writer = NoticeWriter(pipe_of(here))
    for number in range(3):
        writer.tell(NearNotice(f"{number:016x}", DIGESTS[:1]))
    until(lambda: heard.qsize() == 3)
    assert caplog.text.count("rows in shared memory could not be read") == 1


def test_who_was_told_helps_until_it_is_told_more(
    near: NearRows, here: Neighbourhood, heard: queue.Queue[NearNotice]
) -> None:
    notice = NearNotice("1" * 16, DIGESTS[:1])
    writer = NoticeWriter(pipe_of(here))
    helped: queue.Queue[list[bool]] = queue.Queue()

    def helping(goes_on: Callable[[], bool]) -> None:
        before = goes_on()
        if helped.empty():
            writer.tell(notice)
        helped.put([before, goes_on()])
        raise MemoryError("no room for it")

    near.help = helping
    writer.tell(notice)
    assert [heard.get(timeout=60) for _ in range(2)] == [notice] * 2
    until(lambda: helped.qsize() == 2)
    assert [helped.get() for _ in range(2)] == [[True, False], [True, True]]


def test_nobody_helps_who_is_closed(
    near: NearRows, here: Neighbourhood, heard: queue.Queue[NearNotice]
) -> None:
    found: queue.Queue[bool] = queue.Queue()
    closed = threading.Event()

    def helping(goes_on: Callable[[], bool]) -> None:
        found.put(goes_on())
        assert closed.wait(60)
        found.put(goes_on())

    near.help = helping
    NoticeWriter(pipe_of(here)).tell(NearNotice("1" * 16, DIGESTS[:1]))
    assert found.get(timeout=60)
    near.leave()
    closed.set()
    assert not found.get(timeout=60)


def test_what_was_copied_is_settled_once(near: NearRows) -> None:
    with near.reading:
        assert near.settle() == 0
        near.read_bytes += 5
        near.read_bytes += 7
        assert near.settle() == 12
        assert near.settle() == 0


# --- how the thread ends -----------------------------------------------------------------------


@pytest.fixture
def before() -> set[threading.Thread]:
    return lmpool_threads()


def mine(before: set[threading.Thread]) -> list[threading.Thread]:
    return [*(lmpool_threads() - before)]


def pipes(memory: Path) -> set[str]:
    """Of this process, by number; what earlier tests left is no part of it."""
    found = set[str]()
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # that of the list itself
        if path.startswith(str(memory)):
            found.add(f"{number} {path}")
    return found


def test_the_thread_ends_with_who_leaves(
    before: set[threading.Thread], here: Neighbourhood, memory: Path
) -> None:
    opened, near = pipes(memory), NearRows("me")
    assert mine(before) == []
    near.enter("p", large_info())
    assert [thread.name for thread in mine(before)] == ["lmpool-near-me"]
    assert all(thread.daemon for thread in mine(before))
    assert len(pipes(memory)) > len(opened)
    near.leave()
    assert leaked_threads(before) == []
    assert pipes(memory) == opened
    assert not os.path.exists(here.folder)


def test_nobody_is_heard_where_no_rows_are_large(before: set[threading.Thread]) -> None:
    near = NearRows("me")
    near.enter("p", large_info(vocab_size=LEAST - 1))
    assert mine(before) == []
    near.leave()


def test_there_is_one_thread_whatever_comes_and_goes(
    before: set[threading.Thread], here: Neighbourhood
) -> None:
    near = NearRows("me")
    for fingerprint in (FINGERPRINT, FINGERPRINT, OTHER, FINGERPRINT):
        near.enter("p", large_info(fingerprint))
        until(lambda: len(mine(before)) == 1)
    (known,) = mine(before)
    os.unlink(pipe_of(here))
    near.enter("p", large_info())
    until(lambda: len(mine(before)) == 1)
    assert mine(before) != [known]
    near.enter("p", large_info(OTHER, vocab_size=LEAST - 1))
    assert leaked_threads(before) == []
    near.leave()


def test_a_client_whose_pipe_alone_was_taken_away_comes_back(
    near: NearRows, here: Neighbourhood, heard: queue.Queue[NearNotice]
) -> None:
    os.unlink(pipe_of(here))
    near.enter("p", large_info())
    assert names(here) == {"me"}
    notice = NearNotice("1" * 16, DIGESTS)
    NoticeWriter(pipe_of(here)).tell(notice)
    assert heard.get(timeout=60) == notice


def test_who_comes_back_is_found_as_somebody_new(near: NearRows, here: Neighbourhood) -> None:
    """Workers keep what they have of one that they know by name."""
    known = {*here.look("client")}
    os.unlink(*here.look("client").values())
    near.enter("p", large_info())
    assert not known & {*here.look("client")}


def test_who_leaves_does_not_wait_for_a_thread_that_hears_nothing(
    before: set[threading.Thread], here: Neighbourhood
) -> None:
    """It may be in the midst of rows: then it ends behind them, however full its pipe is."""
    near, heard, goes_on = NearRows("me"), list[NearNotice](), threading.Event()

    def slowly(notice: NearNotice) -> None:
        heard.append(notice)
        assert goes_on.wait(60)

    near.hear = slowly
    near.enter("p", large_info())
    fill = os.open(pipe_of(here), os.O_WRONLY | os.O_NONBLOCK)
    try:
        NoticeWriter(pipe_of(here)).tell(NearNotice("1" * 16, DIGESTS))
        until(lambda: heard)
        with suppress(BlockingIOError):
            while os.write(fill, b"x" * 4096):
                pass
        NoticeWriter(pipe_of(here)).tell(NearNotice("1" * 16, DIGESTS))  # nor does this wait
        near.leave()
        assert not os.path.exists(here.folder)
        assert len(mine(before)) == 1
    finally:
        os.close(fill)
        goes_on.set()
    assert leaked_threads(before) == []
    assert len(heard) == 1


def test_the_thread_itself_may_close_the_client(
    before: set[threading.Thread], here: Neighbourhood
) -> None:
    """A finalizer runs in any."""
    near = NearRows("me")
    near.hear = lambda notice: near.leave()
    near.enter("p", large_info())
    writer = NoticeWriter(pipe_of(here))
    writer.tell(NearNotice("1" * 16, DIGESTS))
    assert leaked_threads(before) == []
    assert not os.path.exists(here.folder)
    with pytest.raises(BrokenPipeError):
        writer.tell(NearNotice("1" * 16, DIGESTS))


def _no_list(patch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    patch.setattr(os, "posix_fallocate", full)


def _no_pipe(patch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("no pipes here")

    patch.setattr(os, "mkfifo", refused)


def _no_end_of_a_pipe(patch: pytest.MonkeyPatch) -> None:
    def too_many(_: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    patch.setattr(os, "dup", too_many)


def _no_thread(patch: pytest.MonkeyPatch) -> None:
    def ending(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", ending)


@pytest.mark.parametrize("missing", [_no_list, _no_pipe, _no_end_of_a_pipe, _no_thread])
def test_who_cannot_enter_whole_is_not_there_at_all(
    before: set[threading.Thread],
    here: Neighbourhood,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    missing: Callable[[pytest.MonkeyPatch], None],
) -> None:
    opened, near = pipes(memory), NearRows("me")
    with monkeypatch.context() as patch:
        missing(patch)
        near.enter("p", large_info())
        expects(near, 1)
    assert not os.path.exists(here.folder) or os.listdir(here.folder) == []
    assert pipes(memory) == opened
    assert mine(before) == []
    near.enter("p", large_info())  # it is tried again
    assert names(here) == {"me"}
    near.leave()


# --- what comes in between ---------------------------------------------------------------------


def test_a_client_whose_file_was_taken_away_comes_back(near: NearRows, here: Neighbourhood) -> None:
    (path,) = here.look("client").values()
    near.enter("p", large_info())
    os.unlink(path)
    assert here.look("client") == {}
    near.enter("p", large_info())
    assert names(here) == {"me"}


def test_who_could_not_enter_tries_again(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = NearRows("me")
    with monkeypatch.context() as patch:
        patch.setattr(neighbours, "MEMORY", "/nowhere")
        near.enter("p", large_info())
    near.enter("p", large_info())
    assert names(here) == {"me"}
    near.leave()


@pytest.mark.parametrize("place", [(Neighbourhood, "enter"), (threading.Thread, "start")])
@pytest.mark.parametrize("turn", [1, 2])
def test_who_is_closed_in_the_middle_of_entering_is_not_there(
    here: Neighbourhood,
    memory: Path,
    before: set[threading.Thread],
    monkeypatch: pytest.MonkeyPatch,
    place: tuple[Any, str],
    turn: int,
) -> None:
    """By a finalizer, or a signal's handler, in the same thread."""
    near, opened, turns = NearRows("me"), pipes(memory), iter(range(1, 9))
    step = getattr(*place)

    def interrupted(*given: Any, **options: Any) -> Any:
        found = step(*given, **options)
        if next(turns) == turn:
            near.leave()
        return found

    monkeypatch.setattr(*place, interrupted)
    near.enter("p", large_info())
    near.enter("p", large_info(OTHER))
    monkeypatch.undo()
    near.leave()
    assert not os.path.exists(here.folder)
    assert leaked_threads(before) == []
    assert pipes(memory) == opened


def test_memory_of_another_user_is_not_read(
    near: NearRows, here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(here, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        assert near.ring("0" * 16) is None
    assert near.ring("0" * 16) is not None
    worker.leave()


# --- forks -------------------------------------------------------------------------------------

FORKS = """
import os, sys, time
from lmpool import neighbours
from lmpool.producer.near_rows import NearRows
from tests.support.parts import info_of

neighbours.MEMORY = sys.argv[1]
near = NearRows("parent")
near.enter("p", info_of(vocab_size=int(sys.argv[2])))
child = os.fork()
if child == 0:
    near.after_fork()
    mine = NearRows("child")
    mine.enter("p", info_of(vocab_size=int(sys.argv[2])))
    os.write(1, b"%d\\n" % os.getpid())
    os.close(1)
    time.sleep(600)
    os._exit(1)
sys.stdin.read()
"""


def test_a_forked_child_is_there_under_its_own_name_alone(
    here: Neighbourhood, memory: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKS, str(memory), str(LEAST)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        try:
            assert parent.stdout is not None
            child = psutil.Process(int(parent.stdout.readline()))
            try:
                assert names(here) == {"parent", "child"}
                theirs = {name.partition(".")[0]: p for name, p in here.look("notices").items()}
                NoticeWriter(theirs["child"])
                parent.kill()
                parent.wait(60)
                with pytest.raises(OSError, match="No such device"):
                    NoticeWriter(theirs["parent"])  # nobody has an end of it
                NoticeWriter(theirs["child"])
                assert names(here) == {"child"}  # which holds nothing of its parent's
            finally:
                child.kill()
        finally:
            parent.kill()


def test_who_is_interrupted_while_it_leaves_leaves_then(
    before: set[threading.Thread], here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in ((Membership, "leave"), (NoticeReader, "close")):
        near = NearRows("me")
        near.enter("p", large_info())
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                near.leave()
        near.leave()
        assert not os.path.exists(here.folder)
        until(lambda: not mine(before))


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_forked_child_has_no_list_of_its_parents(near: NearRows) -> None:
    place = near._place
    assert place is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoticeReader, "after_fork", lambda _: None)  # its thread goes on here
        near.after_fork()
    assert near._place is None
    assert place.ring("0" * 16) is None
    place.leave()


def test_who_is_closed_in_the_midst_of_leaving_leaves(
    before: set[threading.Thread], here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a finalizer, or a signal's handler, in the same thread."""
    near, close = NearRows("me"), NoticeReader.close
    near.enter("p", large_info())

    def closes(pipe: NoticeReader) -> None:
        monkeypatch.undo()
        near.leave()
        close(pipe)

    monkeypatch.setattr(neighbours, "MEMORY", neighbours.MEMORY)
    monkeypatch.setattr(NoticeReader, "close", closes)
    near.leave()
    assert not os.path.exists(here.folder)
    until(lambda: not mine(before))
