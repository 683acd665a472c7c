"""What a worker lays for the clients of its machine, and whom it tells."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import redis

from lmpool import neighbours
from lmpool.neighbours import Neighbourhood
from lmpool.row_ring import FRONT, IS_ORDERED, SPARE, RowRingReader
from lmpool.rows import LARGE, PackedRow, pack_logprobs
from lmpool.scripts import script
from lmpool.wants import Digest
from lmpool.wire import read_near
from lmpool.worker import laying as laying_module
from lmpool.worker.laying import Laying
from lmpool.worker.transaction import Call
from tests.support.protocol import Caller, entries_of, new_job, shard_of_pool

pytestmark = pytest.mark.skipif(not IS_ORDERED, reason="no rows are laid on this machine")

SIZE = 1 << 20
SHARD = shard_of_pool("p")
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


def told(call: Call | None) -> tuple[Sequence[object], Sequence[object]]:
    assert call is not None
    assert call.script is script("near")
    return call.keys, call.arguments


def test_nothing_is_laid_while_nobody_is_near(here: Neighbourhood) -> None:
    laying = Laying(here, SIZE)
    assert laying.lay(SHARD, DIGESTS[:1], [large_row()]) is None
    other = here.enter("rows", "x")  # another worker is nobody who reads
    assert laying.lay(SHARD, DIGESTS[:1], [large_row()]) is None
    assert os.listdir(here.folder) == ["rows-x"]
    other.leave()
    laying.close()
    assert not os.path.exists(here.folder)


def test_large_rows_are_laid_for_who_is_near(here: Neighbourhood) -> None:
    client, laying = here.enter("client", "c-1"), Laying(here, SIZE)
    rows = [large_row(0), large_row(1, LARGE // 2)]
    values: list[bytes | PackedRow] = [rows[0], b"small", rows[1], rows[0].joined()]
    keys, arguments = told(laying.lay(SHARD, DIGESTS[:4], values))
    assert keys == [SHARD.reply("c-1")]
    (name,) = here.look("rows")
    assert arguments == [SHARD.prefix, DIGESTS[0].hex() + DIGESTS[2].hex(), name, " c-1 "]
    (ring,) = rings(here)
    for digest, row in ((DIGESTS[0], rows[0]), (DIGESTS[2], rows[1])):
        assert read(ring, digest, row) == row.joined()
    assert ring.copy(DIGESTS[1], len(b"small")) is None
    assert read(ring, DIGESTS[3], rows[0]) is None
    laying.close()
    client.leave()


def test_there_is_one_ring_and_not_before_it_is_needed(here: Neighbourhood) -> None:
    client, laying = here.enter("client", "c"), Laying(here, SIZE)
    assert laying.lay(SHARD, DIGESTS[:2], [b"small", b""]) is None
    assert laying.lay(SHARD, [], []) is None
    assert not rings(here)
    for number in range(5):
        _, arguments = told(laying.lay(SHARD, [DIGESTS[number]], [large_row(number)]))
        assert arguments[1] == DIGESTS[number].hex()
        assert [arguments[2]] == [*here.look("rows")]
    (ring,) = rings(here)
    for number in range(5):
        assert read(ring, DIGESTS[number], large_row(number)) == large_row(number).joined()
    assert os.stat(next(iter(here.look("rows").values()))).st_size >= SIZE
    laying.close()
    client.leave()


def test_workers_have_a_ring_each(here: Neighbourhood) -> None:
    client = here.enter("client", "c")
    several = [Laying(here, SIZE) for _ in range(3)]
    names = [
        str(told(laying.lay(SHARD, [DIGESTS[number]], [large_row(number)]))[1][2])
        for number, laying in enumerate(several)
    ]
    assert {*names} == {*here.look("rows")}
    for number, name in enumerate(names):
        ring = ring_of(here.path("rows", name))
        found = [read(ring, DIGESTS[n], large_row(n)) is not None for n in range(3)]
        assert found == [n == number for n in range(3)]
    for laying in several:
        laying.close()
    client.leave()


def test_rows_that_were_refused_are_not_told_of(here: Neighbourhood) -> None:
    client, laying = here.enter("client", "c"), Laying(here, SIZE)
    too_large = large_row(1, SIZE // SPARE // 4)
    _, arguments = told(laying.lay(SHARD, DIGESTS[:2], [too_large, large_row()]))
    assert arguments[1] == DIGESTS[1].hex()
    assert laying.lay(SHARD, DIGESTS[:1], [too_large]) is None
    laying.close()
    client.leave()


def test_everybody_near_is_told_but_no_more_than_so_many(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laying_module, "TOLD_MOST", 3)
    clients, laying = [here.enter("client", f"c{n}") for n in range(3)], Laying(here, SIZE)
    for count in (3, 4):
        keys, arguments = told(laying.lay(SHARD, DIGESTS[:1], [large_row()]))
        named = str(arguments[3])
        assert named == f" {' '.join(named.split())} "
        assert len(set(named.split())) == 3
        assert set(named.split()) <= {f"c{n}" for n in range(count)}
        assert keys == [SHARD.reply(named.split()[0])]
        clients.append(here.enter("client", f"c{count}"))
    laying.close()
    for client in clients:
        client.leave()


def test_who_comes_later_is_told_and_who_went_is_not(here: Neighbourhood) -> None:
    laying, first = Laying(here, SIZE), here.enter("client", "c1")
    assert told(laying.lay(SHARD, DIGESTS[:1], [large_row()]))[1][3] == " c1 "
    second = here.enter("client", "c2")
    first.leave()
    assert told(laying.lay(SHARD, DIGESTS[:1], [large_row()]))[1][3] == " c2 "
    second.leave()
    assert laying.lay(SHARD, DIGESTS[:1], [large_row()]) is None
    assert len(rings(here)) == 1  # for the next one
    laying.close()


def test_the_call_tells_who_waits(here: Neighbourhood, fake_url: str, pool_name: str) -> None:
    shard, jobs = shard_of_pool(pool_name), [new_job(1), new_job(2)]
    members, laying = [here.enter("client", name) for name in "ab"], Laying(here, SIZE)
    with redis.Redis.from_url(fake_url) as server:
        callers = [Caller(server, shard, name) for name in "abc"]
        for caller in callers[1:]:
            caller.enqueue(*jobs)
        call = laying.lay(shard, [job.digest for job in jobs], [large_row(), large_row()])
        assert call is not None
        assert call.script(server, call.keys, call.arguments) == 1
        near = [
            [read_near(f) for _, f in entries_of(server, shard.reply(name)) if b"near" in f]
            for name in "abc"
        ]
        (ring,) = here.look("rows")
        assert near == [[], [(ring, [job.digest for job in jobs])], []]
    laying.close()
    for member in members:
        member.leave()


@pytest.mark.parametrize(("size", "is_ordered"), [(0, True), (SIZE, False)])
def test_none_are_laid_where_that_is_not_wanted_or_not_safe(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch, size: int, is_ordered: bool
) -> None:
    monkeypatch.setattr(laying_module, "IS_ORDERED", is_ordered)
    client, laying = here.enter("client", "c"), Laying(here, size)
    assert laying.lay(SHARD, DIGESTS[:1], [large_row()]) is None
    assert os.listdir(here.folder) == ["client-c"]
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

    client, laying = here.enter("client", "c"), Laying(here, SIZE)
    with caplog.at_level(logging.INFO, "lmpool"), monkeypatch.context() as patch:
        patch.setattr(os, fails, full)
        assert laying.lay(SHARD, DIGESTS[:2], [large_row(), large_row()]) is None
    assert len(left) == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "it is full. Mend that, or set LMPOOL_NEAR_BYTES=0" in record.message
    caplog.clear()
    for _ in range(3):  # though there is room by now
        assert laying.lay(SHARD, DIGESTS[:1], [large_row()]) is None
    assert not caplog.records
    assert os.listdir(here.folder) == ["client-c"]
    laying.close()
    client.leave()


def test_a_ring_that_was_closed_is_found_no_more(here: Neighbourhood) -> None:
    client, laying = here.enter("client", "c"), Laying(here, SIZE)
    assert laying.lay(SHARD, DIGESTS[:1], [large_row()])
    (ring,) = rings(here)
    laying.close()
    assert os.listdir(here.folder) == ["client-c"]
    assert read(ring, DIGESTS[0], large_row()) == large_row().joined()  # who has it keeps it
    assert laying.lay(SHARD, DIGESTS[1:2], [large_row()]) is None
    assert os.listdir(here.folder) == ["client-c"]
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
    client, laying = here.enter("client", "c"), Laying(here, asked)
    with caplog.at_level(logging.WARNING, "lmpool"):
        assert laying.lay(SHARD, DIGESTS[:1], [large_row()])
    (path,) = here.look("rows").values()
    assert os.stat(path).st_size == FRONT + size
    assert read(ring_of(path), DIGESTS[0], large_row()) == large_row().joined()
    assert not caplog.records
    set_free(monkeypatch, 0)  # it has what it has
    assert laying.lay(SHARD, DIGESTS[1:2], [large_row()])
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
    client, laying = here.enter("client", "c"), Laying(here, asked)
    with caplog.at_level(logging.WARNING, "lmpool"):
        for left in (free, 100 * MIB):  # it is not tried again
            set_free(monkeypatch, left)
            assert laying.lay(SHARD, DIGESTS[:1], [large_row()]) is None
    (record,) = caplog.records
    assert f" has room for {free // 2:,} bytes. Mend that" in record.message
    assert os.listdir(here.folder) == ["client-c"]
    laying.close()
    client.leave()


# --- a ring that was taken away ----------------------------------------------------------------


def lay(laying: Laying, number: int) -> str:
    """Lay one row, and say where."""
    _, arguments = told(laying.lay(SHARD, [DIGESTS[number]], [large_row(number)]))
    assert arguments[1] == DIGESTS[number].hex()
    return str(arguments[2])


def test_a_ring_that_was_taken_away_is_made_anew_for_who_comes(here: Neighbourhood) -> None:
    clients, laying = [here.enter("client", "c1")], Laying(here, SIZE)
    first = lay(laying, 0)
    (old,) = rings(here)
    os.unlink(here.path("rows", first))
    assert lay(laying, 1) == first  # who has found it has it yet
    assert read(old, DIGESTS[1], large_row(1)) == large_row(1).joined()
    assert here.look("rows") == {}
    clients.append(here.enter("client", "c2"))
    second = lay(laying, 2)
    assert second != first
    assert [*here.look("rows")] == [second]
    (new,) = rings(here)
    assert read(new, DIGESTS[2], large_row(2)) == large_row(2).joined()
    assert read(new, DIGESTS[1], large_row(1)) is read(old, DIGESTS[2], large_row(2)) is None
    clients.append(here.enter("client", "c3"))
    assert lay(laying, 3) == second  # which is there
    laying.close()
    assert here.look("rows") == {}
    for client in clients:
        client.leave()


def test_a_folder_that_was_taken_away_is_made_anew(here: Neighbourhood) -> None:
    clients, laying = [here.enter("client", "c1")], Laying(here, SIZE)
    first = lay(laying, 0)
    shutil.rmtree(here.folder)
    assert laying.lay(SHARD, DIGESTS[:1], [large_row()]) is None
    clients.append(here.enter("client", "c2"))
    second = lay(laying, 1)
    assert second != first
    assert [*here.look("rows")] == [second]
    laying.close()
    for client in clients:
        client.leave()
    assert not os.path.exists(here.folder)


def test_a_ring_that_cannot_be_made_anew_is_warned_of_once(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clients, laying = [here.enter("client", "c1")], Laying(here, SIZE)
    os.unlink(here.path("rows", lay(laying, 0)))
    set_free(monkeypatch, 0)
    clients.append(here.enter("client", "c2"))
    with caplog.at_level(logging.WARNING, "lmpool"):
        for _ in range(3):
            assert laying.lay(SHARD, DIGESTS[:1], [large_row()]) is None
    assert len(caplog.records) == 1
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
from tests.support.protocol import shard_of_pool

neighbours.MEMORY = sys.argv[1]
here = neighbours.Neighbourhood("p")
laying = Laying(here, 1 << 20)
row = pack_logprobs(np.zeros(LARGE // 4, np.float32))
assert laying.lay(shard_of_pool("p"), [Digest(bytes(16))], [row])
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
    client = here.enter("client", "c")
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


def test_it_rests_while_those_who_are_near_wait_for_nothing(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    client, laying = here.enter("client", "c"), Laying(here, SIZE)
    monkeypatch.setattr(laying_module.time, "monotonic", lambda: now)

    def lays() -> bool:
        return laying.lay(SHARD, DIGESTS[:1], [large_row()]) is not None

    for told in (0, None, 0, 0, 0, 0, 0, 1, *[0] * 7, 2, *[0] * 8):  # 1 and 2 begin anew
        assert lays()
        laying.hear(told)
    assert not lays()
    now += laying_module.REST / 2
    assert not lays()
    other = here.enter("client", "d")  # who may wait for something
    assert lays()
    for _ in range(8):
        laying.hear(0)
    assert not lays()
    now += laying_module.REST + 1
    assert lays()
    laying.close()
    for each in (client, other):
        each.leave()
