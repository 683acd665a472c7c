"""Rows that a client reads where workers of its machine have laid them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from lmpool import neighbours
from lmpool.neighbours import Membership, Neighbourhood
from lmpool.producer import near_rows as near_rows_module
from lmpool.producer.near_rows import NearRows
from lmpool.row_ring import FRONT, IS_ORDERED, MAGIC, RowRing, place_of
from lmpool.rows import LARGE, PackedRow, pack_logprobs
from lmpool.wants import Digest
from tests.support.parts import info_of
from tests.support.protocol import FINGERPRINT

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
def near(here: Neighbourhood) -> Any:
    """The rows of a client that has entered."""
    near = NearRows("me")
    near.enter("p", large_info())
    yield near
    near.leave()


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
        self.ring = RowRing(file, SIZE)

    def lay(self, *numbers: int) -> None:
        for number in numbers:
            assert self.ring.lay(DIGESTS[number], row_of(number))

    def leave(self) -> None:
        self.membership.leave()


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
        assert set(here.look("client")) == ({"me"} if is_there else set())
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
    monkeypatch.setattr(near_rows_module, "IS_ORDERED", False)
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
        return os.stat(here.look("client")["me"]).st_ino

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
    assert set(there.look("client")) == {"me"}
    assert not near.are_usual
    assert (found(near, twin), found(near, theirs)) == ([4], [2, 3])
    near.enter("p", large_info())  # and back
    assert set(here.look("client")) == {"me"}
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
    opened, usual = list[str](), near_rows_module._open

    def opens(path: str) -> Any:
        opened.append(os.path.basename(path))
        return usual(path)

    monkeypatch.setattr(near_rows_module, "_open", opens)
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
    monkeypatch.setattr(near_rows_module, "_open", opened.append)
    assert near.ring(name) is None
    assert opened == []
    monkeypatch.undo()


def test_a_ring_of_another_name_than_workers_give_is_not_read(
    near: NearRows, here: Neighbourhood
) -> None:
    worker = here.enter("rows", "w", lambda file: RowRing(file, SIZE))
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


# --- what comes in between ---------------------------------------------------------------------


def test_a_client_whose_file_was_taken_away_comes_back(near: NearRows, here: Neighbourhood) -> None:
    (path,) = here.look("client").values()
    near.enter("p", large_info())
    os.unlink(path)
    assert here.look("client") == {}
    near.enter("p", large_info())
    assert set(here.look("client")) == {"me"}


def test_who_could_not_enter_tries_again(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = NearRows("me")
    with monkeypatch.context() as patch:
        patch.setattr(neighbours, "MEMORY", "/nowhere")
        near.enter("p", large_info())
    near.enter("p", large_info())
    assert set(here.look("client")) == {"me"}
    near.leave()


def test_who_is_closed_in_the_middle_of_entering_is_not_there(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a finalizer, or a signal's handler, in the same thread."""
    near, enter = NearRows("me"), Neighbourhood.enter

    def interrupted(neighbourhood: Neighbourhood, *given: Any) -> Any:
        found = enter(neighbourhood, *given)
        near.leave()
        return found

    monkeypatch.setattr(Neighbourhood, "enter", interrupted)
    near.enter("p", large_info())
    assert here.look("client") == {}


def test_memory_of_another_user_is_not_read(
    near: NearRows, here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(here, 0)
    with monkeypatch.context() as patch:
        patch.setattr(near_rows_module.os, "geteuid", lambda: 12345)
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
                assert set(here.look("client")) == {"parent", "child"}
                parent.kill()
                parent.wait(60)
                assert set(here.look("client")) == {"child"}  # which holds nothing of its parent's
            finally:
                child.kill()
        finally:
            parent.kill()
