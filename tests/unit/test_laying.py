"""What a worker lays for the clients of its machine, and whom it tells."""

from __future__ import annotations

import errno
import logging
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from lmpool import neighbours
from lmpool.near_notices import NOTICE_MOST, NearNotice, NoticeReader
from lmpool.neighbours import Neighbourhood
from lmpool.row_ring import FRONT, IS_ORDERED, SPARE, RowRing, RowRingReader
from lmpool.rows import LARGE, PackedRow, pack_logprobs
from lmpool.wait_list import WaitList
from lmpool.wants import Digest
from lmpool.worker import laying as laying_module
from lmpool.worker.laying import TOLD_BYTES, Laying
from lmpool.worker.near_clients import NearClients
from tests.support import logged

pytestmark = pytest.mark.skipif(not IS_ORDERED, reason="no rows are laid on this machine")

SIZE = 1 << 20
OWNER = "worker-1"
DIGESTS = [Digest(bytes([n]) * 16) for n in range(1, 9)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Neighbourhood:
    monkeypatch.setattr(neighbours, "MEMORY", str(tmp_path))
    return Neighbourhood("p")


def large_row(seed: int = 0, size: int = LARGE // 4) -> PackedRow:
    return pack_logprobs(np.random.default_rng(seed).normal(size=size).astype(np.float32))


def rings(here: Neighbourhood) -> list[RowRingReader]:
    return [ring_of(path) for path in here.look("rows").values()]


def ring_of(path: str) -> RowRingReader:
    with open(path, "rb") as file:
        return RowRingReader(file.fileno())


def read(ring: RowRingReader, digest: Digest, row: PackedRow) -> bytes | None:
    found = ring.copy(digest, row.nbytes)
    assert found is None or isinstance(found, memoryview)
    return None if found is None else bytes(found)


class Client:
    """One that is near, and waits for these; it is told of them as they are laid."""

    def __init__(self, here: Neighbourhood, name: str, digests: Sequence[Digest] = DIGESTS) -> None:
        self._pipe = here.enter("notices", name, self._take, is_pipe=True)
        self._list = here.enter("client", name, self._fill)
        self.wait_for(digests)

    def _take(self, pipe: int) -> None:
        self._reader = NoticeReader(pipe)
        self._end = os.dup(pipe)

    def _fill(self, file: int) -> None:
        self._waits = WaitList(file)

    def wait_for(self, digests: Sequence[Digest]) -> None:
        self._waits.add(digests)

    def heard(self) -> list[NearNotice]:
        """What it was told since it was last asked."""
        heard: list[NearNotice] = []
        while select.select([self._end], [], [], 0)[0]:
            notices = self._reader.read()
            assert notices is not None
            heard += notices
        return heard

    def leave(self) -> None:
        self._list.leave()
        self._pipe.leave()
        self._reader.close()
        assert self._reader.read() is None
        os.close(self._end)


def files(*clients: str) -> set[str]:
    """Those of these clients."""
    return {f"{kind}-{name}" for kind in ("client", "notices") for name in clients}


def lay(laying: Laying, client: Client, number: int) -> str:
    """Lay one row that a client waits for, and say where."""
    laying.lay([DIGESTS[number]], [large_row(number)])
    ((ring, digests),) = client.heard()
    assert digests == [DIGESTS[number]]
    return ring


def digests_of(count: int) -> list[Digest]:
    return [Digest(n.to_bytes(8, "little") * 2) for n in range(1, count + 1)]


def test_nothing_is_laid_while_nobody_is_near(here: Neighbourhood) -> None:
    laying = Laying(here, SIZE, OWNER)
    laying.lay(DIGESTS[:1], [large_row()])
    other = here.enter("rows", "x")  # another worker is nobody who reads
    laying.lay(DIGESTS[:1], [large_row()])
    assert os.listdir(here.folder) == ["rows-x"]
    other.leave()
    laying.close()
    assert not os.path.exists(here.folder)


def test_nothing_is_laid_that_nobody_near_waits_for(here: Neighbourhood) -> None:
    client, laying = Client(here, "c", DIGESTS[:1]), Laying(here, SIZE, OWNER)
    for _ in range(3):
        laying.lay(DIGESTS[1:3], [large_row(1), large_row(2)])
    assert {*os.listdir(here.folder)} == files("c")  # nor is there a ring
    laying.lay(DIGESTS[:3], [large_row(0), large_row(1), large_row(2)])
    (ring,) = rings(here)
    (name,) = here.look("rows")
    assert client.heard() == [NearNotice(name, DIGESTS[:1])]
    laid = [read(ring, DIGESTS[n], large_row(n)) is not None for n in range(3)]
    assert laid == [True, False, False]
    laying.close()
    client.leave()


def test_large_rows_are_laid_for_who_waits_for_them(here: Neighbourhood) -> None:
    client, laying = Client(here, "c-1"), Laying(here, SIZE, OWNER)
    rows = [large_row(0), large_row(1, LARGE // 2)]
    values: list[bytes | PackedRow | None] = [rows[0], b"small", None, rows[1], rows[0].joined()]
    laying.lay(DIGESTS[:5], values)
    (name,) = here.look("rows")
    assert client.heard() == [NearNotice(name, [DIGESTS[0], DIGESTS[3]])]
    (ring,) = rings(here)
    assert ring.owner == OWNER
    for digest, row in ((DIGESTS[0], rows[0]), (DIGESTS[3], rows[1])):
        assert read(ring, digest, row) == row.joined()
    assert ring.copy(DIGESTS[1], len(b"small")) is None
    assert read(ring, DIGESTS[2], rows[0]) is read(ring, DIGESTS[4], rows[0]) is None
    laying.close()
    client.leave()


def test_there_is_one_ring_and_not_before_it_is_needed(here: Neighbourhood) -> None:
    client, laying = Client(here, "c"), Laying(here, SIZE, OWNER)
    laying.lay(DIGESTS[:3], [b"small", b"", None])
    laying.lay([], [])
    assert not rings(here)
    for number in range(5):
        assert [lay(laying, client, number)] == [*here.look("rows")]
    (ring,) = rings(here)
    for number in range(5):
        assert read(ring, DIGESTS[number], large_row(number)) == large_row(number).joined()
    assert os.stat(next(iter(here.look("rows").values()))).st_size == FRONT + SIZE
    laying.close()
    client.leave()


def test_workers_have_a_ring_each(here: Neighbourhood) -> None:
    client = Client(here, "c")
    several = [Laying(here, SIZE, f"worker-{number}") for number in range(3)]
    found = [lay(laying, client, number) for number, laying in enumerate(several)]
    assert {*found} == {*here.look("rows")}
    for number, name in enumerate(found):
        ring = ring_of(here.path("rows", name))
        assert ring.owner == f"worker-{number}"
        there = [read(ring, DIGESTS[n], large_row(n)) is not None for n in range(3)]
        assert there == [n == number for n in range(3)]
    for laying in several:
        laying.close()
    client.leave()


def test_rows_that_were_refused_are_not_told_of(here: Neighbourhood) -> None:
    client, laying = Client(here, "c"), Laying(here, SIZE, OWNER)
    too_large = large_row(1, SIZE // SPARE // 4)
    laying.lay(DIGESTS[:2], [too_large, large_row()])
    ((_, digests),) = client.heard()
    assert digests == DIGESTS[1:2]
    laying.lay(DIGESTS[:1], [too_large])
    assert client.heard() == []
    laying.close()
    client.leave()


def test_each_is_told_of_what_it_waits_for(here: Neighbourhood) -> None:
    waits = {"a": DIGESTS[:3], "b": DIGESTS[2:5], "c": DIGESTS[6:], "d": []}
    clients = {name: Client(here, name, digests) for name, digests in waits.items()}
    laying = Laying(here, SIZE, OWNER)
    for count in (6, 6):  # once more, too
        laying.lay(DIGESTS[:count], [large_row(number) for number in range(count)])
        (name,) = here.look("rows")
        heard = {each: client.heard() for each, client in clients.items()}
        assert heard == {
            "a": [NearNotice(name, DIGESTS[:3])],
            "b": [NearNotice(name, DIGESTS[2:5])],
            "c": [],
            "d": [],
        }
    (ring,) = rings(here)
    laid = [read(ring, DIGESTS[n], large_row(n)) is not None for n in range(8)]
    assert laid == [True] * 5 + [False] * 3
    laying.close()
    for client in clients.values():
        client.leave()


def test_who_comes_later_is_told_and_who_went_is_not(here: Neighbourhood) -> None:
    laying, first = Laying(here, SIZE, OWNER), Client(here, "c1")
    ring = lay(laying, first, 0)
    second = Client(here, "c2")
    first.leave()
    assert lay(laying, second, 1) == ring
    second.leave()
    laying.lay(DIGESTS[2:3], [large_row(2)])
    assert len(rings(here)) == 1  # for the next one
    assert read(rings(here)[0], DIGESTS[2], large_row(2)) is None
    third = Client(here, "c3", DIGESTS[3:4])
    assert lay(laying, third, 3) == ring
    laying.close()
    third.leave()


def test_who_reads_no_more_costs_others_nothing(here: Neighbourhood) -> None:
    clients, laying = [Client(here, name) for name in "abc"], Laying(here, SIZE, OWNER)
    for _ in range(30):  # which fills the pipes of the first two
        digests = DIGESTS * (NOTICE_MOST // 8)
        laying.lay(digests, [large_row(0, 4096)] * len(digests))
        told = [digest for notice in clients[2].heard() for digest in notice.digests]
        assert told == digests
    laying.close()
    for client in clients:
        client.leave()


def test_clients_are_told_of_some_while_more_is_laid(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they are told of lies there by then, and they need not wait for the rest."""
    size, digests = 16 * TOLD_BYTES, digests_of(70)
    rows = [large_row(number, TOLD_BYTES // 80) for number in range(70)]
    client, laying = Client(here, "c", digests[:68]), Laying(here, size, OWNER)
    laid, told = list[Digest](), list[list[Digest]]()
    usual_lay, usual_tell = RowRing.lay, NearClients.tell

    def counted(ring: RowRing, digest: Digest, row: PackedRow) -> bool:
        laid.append(digest)
        return usual_lay(ring, digest, row)

    def tell(clients: NearClients, name: str, ring: str, some: list[Digest]) -> None:
        assert laid == [digest for each in [*told, some] for digest in each]
        told.append([*some])
        usual_tell(clients, name, ring, some)

    monkeypatch.setattr(RowRing, "lay", counted)
    monkeypatch.setattr(NearClients, "tell", tell)
    laying.lay(digests, rows)
    each = -(-TOLD_BYTES // rows[0].nbytes)
    assert told == [digests[n : min(n + each, 68)] for n in range(0, 68, each)]
    assert len(told) > 3
    assert [digests for _, digests in client.heard()] == told
    laying.close()
    client.leave()


def test_those_may_be_ahead_whom_somebody_waits_for_and_keeps_up_with(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that a client has not come to is written over; others are not held back by it."""
    row = large_row()
    digests = digests_of(200)
    laying = Laying(here, SIZE, OWNER)
    assert laying.may_be_ahead(digests, row.nbytes) == [False] * 200
    slow, quick = Client(here, "s", digests[:100]), Client(here, "q", digests[50:150])
    one = [True] * 150 + [False] * 50
    assert laying.may_be_ahead(digests, row.nbytes) == one
    assert {*os.listdir(here.folder)} == files("s", "q")  # no ring is made for that
    most = SIZE // 2 // row.nbytes
    for turn in range(5):
        told = 0
        while laying.may_be_ahead(digests, row.nbytes) == one:
            laying.lay(digests[50 + told : 51 + told], [row])
            told += 1
            assert told <= most
            assert quick.heard()
        assert told > most // 3  # a head counts, too
        assert laying.may_be_ahead(digests, row.nbytes) == [
            n in range(100, 150) for n in range(200)
        ]
        (ring,) = rings(here)
        heard = [digest for notice in slow.heard() for digest in notice.digests]
        assert heard == digests[50 : 50 + told]
        assert all(read(ring, digest, row) is not None for digest in heard)
        assert laying.may_be_ahead(digests, row.nbytes) == one, turn
    laying.close()
    assert laying.may_be_ahead(digests, row.nbytes) == [False] * 200
    for client in (slow, quick):
        client.leave()


def test_two_threads_do_not_lay_at_once(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, laying = Client(here, "c"), Laying(here, SIZE, OWNER)
    usual, inside, together = RowRing.lay, list[int](), list[int]()

    def watched(ring: RowRing, digest: Digest, row: PackedRow) -> bool:
        inside.append(1)
        time.sleep(0.002)
        together.append(len(inside))
        inside.pop()
        return usual(ring, digest, row)

    monkeypatch.setattr(RowRing, "lay", watched)
    both = threading.Barrier(2)

    def lay() -> None:
        both.wait(60)
        for number in range(8):
            laying.lay(DIGESTS[number : number + 1], [large_row(number)])

    other = threading.Thread(target=lay)
    other.start()
    lay()
    other.join(60)
    assert together == [1] * 16
    laying.close()
    client.leave()


@pytest.mark.parametrize(("size", "is_ordered"), [(0, True), (SIZE, False)])
def test_none_are_laid_where_that_is_not_wanted_or_not_safe(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch, size: int, is_ordered: bool
) -> None:
    monkeypatch.setattr(laying_module, "IS_ORDERED", is_ordered)
    client, laying = Client(here, "c"), Laying(here, size, OWNER)
    laying.lay(DIGESTS[:1], [large_row()])
    assert {*os.listdir(here.folder)} == files("c")
    assert client.heard() == []
    laying.close()
    client.leave()


def test_an_owner_that_is_no_text_is_told_of_once(
    here: Neighbourhood, caplog: pytest.LogCaptureFixture
) -> None:
    client, laying = Client(here, "c"), Laying(here, SIZE, "\ud800")
    with caplog.at_level(logging.WARNING, "lmpool"):
        for _ in range(3):
            laying.lay(DIGESTS[:1], [large_row()])
    assert len(logged.records(caplog)) == 1
    assert {*os.listdir(here.folder)} == files("c")
    laying.close()
    client.leave()


@pytest.mark.parametrize("fails", ["posix_fallocate", "rename", "open"])
def test_where_there_is_no_room_it_is_said_once(
    here: Neighbourhood,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: str,
) -> None:
    usual, left = getattr(os, fails), []

    def full(*arguments: object) -> object:
        if fails == "open" and not str(arguments[0]).startswith(f"{here.folder}/."):
            return usual(*arguments)
        left.append(arguments)
        raise OSError(errno.ENOSPC, "it is full")

    client, laying = Client(here, "c"), Laying(here, SIZE, OWNER)
    with caplog.at_level(logging.INFO, "lmpool"), monkeypatch.context() as patch:
        patch.setattr(os, fails, full)
        laying.lay(DIGESTS[:2], [large_row(), large_row()])
    assert len(left) == 1
    (record,) = logged.records(caplog)
    assert record.levelno == logging.WARNING
    assert "it is full. Mend that, or set LMPOOL_NEAR_BYTES=0" in record.message
    caplog.clear()
    for _ in range(3):  # though there is room by now
        laying.lay(DIGESTS[:1], [large_row()])
    assert logged.messages(caplog) == []
    assert {*os.listdir(here.folder)} == files("c")
    laying.close()
    client.leave()


def test_a_ring_that_was_closed_is_found_no_more(here: Neighbourhood) -> None:
    client, laying = Client(here, "c"), Laying(here, SIZE, OWNER)
    laying.lay(DIGESTS[:1], [large_row()])
    (ring,) = rings(here)
    laying.close()
    assert {*os.listdir(here.folder)} == files("c")
    assert read(ring, DIGESTS[0], large_row()) == large_row().joined()  # who has it keeps it
    laying.lay(DIGESTS[1:2], [large_row()])
    assert {*os.listdir(here.folder)} == files("c")
    laying.close()
    client.leave()
    assert not os.path.exists(here.folder)


# --- a ring of the size that there is room for -------------------------------------------------


def set_free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """What shared memory has left."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=size, f_frsize=1))


MIB = 1 << 20


@pytest.mark.parametrize(
    ("asked", "free", "size"),
    [
        (4 * MIB, 100 * MIB, 4 * MIB),
        (4 * MIB, 8 * MIB, 4 * MIB),
        (4 * MIB, 6 * MIB, 3 * MIB),  # half of it
        (4 * MIB, 2 * MIB, MIB),
        (MIB // 2, MIB, MIB // 2),  # no more was asked for
    ],
)
def test_where_there_is_little_room_a_ring_is_smaller(
    here: Neighbourhood,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: int,
    free: int,
    size: int,
) -> None:
    set_free(monkeypatch, free)
    client, laying = Client(here, "c"), Laying(here, asked, OWNER)
    with caplog.at_level(logging.WARNING, "lmpool"):
        laying.lay(DIGESTS[:1], [large_row()])
    (path,) = here.look("rows").values()
    assert os.stat(path).st_size == FRONT + size
    assert read(ring_of(path), DIGESTS[0], large_row()) == large_row().joined()
    assert logged.messages(caplog) == []
    set_free(monkeypatch, 0)  # it has what it has
    laying.lay(DIGESTS[1:2], [large_row()])
    laying.close()
    client.leave()


@pytest.mark.parametrize(("asked", "free"), [(4 * MIB, 2 * MIB - 2), (MIB // 2, MIB - 2), (1, 0)])
def test_where_there_is_less_there_is_no_ring(
    here: Neighbourhood,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: int,
    free: int,
) -> None:
    client, laying = Client(here, "c"), Laying(here, asked, OWNER)
    with caplog.at_level(logging.WARNING, "lmpool"):
        for left in (free, 100 * MIB):  # it is not tried again
            set_free(monkeypatch, left)
            laying.lay(DIGESTS[:1], [large_row()])
    (record,) = logged.records(caplog)
    assert f" has room for {free // 2:,} bytes. Mend that" in record.message
    assert {*os.listdir(here.folder)} == files("c")
    laying.close()
    client.leave()


# --- a ring that was taken away ----------------------------------------------------------------


def test_a_ring_that_was_taken_away_is_made_anew_for_who_comes(here: Neighbourhood) -> None:
    clients, laying = [Client(here, "c1")], Laying(here, SIZE, OWNER)
    first = lay(laying, clients[-1], 0)
    (old,) = rings(here)
    os.unlink(here.path("rows", first))
    assert lay(laying, clients[-1], 1) == first  # who has found it has it yet
    assert read(old, DIGESTS[1], large_row(1)) == large_row(1).joined()
    assert here.look("rows") == {}
    clients.append(Client(here, "c2"))
    second = lay(laying, clients[-1], 2)
    assert second != first
    assert [*here.look("rows")] == [second]
    (new,) = rings(here)
    assert read(new, DIGESTS[2], large_row(2)) == large_row(2).joined()
    assert read(new, DIGESTS[1], large_row(1)) is read(old, DIGESTS[2], large_row(2)) is None
    clients.append(Client(here, "c3"))
    assert lay(laying, clients[-1], 3) == second  # which is there
    laying.close()
    assert here.look("rows") == {}
    for client in clients:
        client.leave()


def test_a_folder_that_was_taken_away_is_made_anew(here: Neighbourhood) -> None:
    clients, laying = [Client(here, "c1")], Laying(here, SIZE, OWNER)
    first = lay(laying, clients[-1], 0)
    shutil.rmtree(here.folder)
    laying.lay(DIGESTS[:1], [large_row()])
    clients.append(Client(here, "c2"))
    second = lay(laying, clients[-1], 1)
    assert second != first
    assert [*here.look("rows")] == [second]
    laying.close()
    for client in clients:
        client.leave()
    assert not os.path.exists(here.folder)


def test_a_ring_that_cannot_be_made_anew_is_warned_of_once(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clients, laying = [Client(here, "c1")], Laying(here, SIZE, OWNER)
    os.unlink(here.path("rows", lay(laying, clients[-1], 0)))
    set_free(monkeypatch, 0)
    clients.append(Client(here, "c2"))
    with caplog.at_level(logging.WARNING, "lmpool"):
        for _ in range(3):
            laying.lay(DIGESTS[:1], [large_row()])
    assert len(logged.records(caplog)) == 1
    assert here.look("rows") == {}
    laying.close()
    for client in clients:
        client.leave()


# --- forks -------------------------------------------------------------------------------------

FORKS = """
import os, sys, time
import numpy as np
from lmpool import neighbours
from lmpool.rows import LARGE, pack_logprobs
from lmpool.wants import Digest
from lmpool.worker.laying import Laying

neighbours.MEMORY = sys.argv[1]
here = neighbours.Neighbourhood("p")
laying = Laying(here, 1 << 20, "w")
row = pack_logprobs(np.zeros(LARGE // 4, np.float32))
laying.lay([Digest(bytes([1]) * 16)], [row])
assert here.look("rows")
if os.fork() == 0:
    os.write(1, b"%d\\n" % os.getpid())
    os.close(1)
    time.sleep(600)
    os._exit(1)
sys.stdin.read()
"""


def test_a_ring_goes_with_its_worker_whatever_was_forked(
    here: Neighbourhood, tmp_path: Path
) -> None:
    client = Client(here, "c")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        try:
            assert parent.stdout is not None
            child = psutil.Process(int(parent.stdout.readline()))
            try:
                assert len(here.look("rows")) == 1
                parent.kill()
                parent.wait(60)
                assert child.is_running()
                assert here.look("rows") == {}
            finally:
                child.kill()
        finally:
            parent.kill()
    client.leave()
