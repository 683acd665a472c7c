"""Large rows that calls ask alone, blocking or awaited, whose callers read them where a worker of
their machine lays them: as right as all others, whatever comes in between."""

from __future__ import annotations

import errno
import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

import lmpool
from lmpool import near_notices as near_notices_module
from lmpool.backends.mock import mock_row
from lmpool.errors import ClientClosed, LmpoolError, PoolTimeout, PromptFailed
from lmpool.exchange import Exchange
from lmpool.near_notices import NearNotice, NoticeWriter
from lmpool.neighbours import Neighbourhood
from lmpool.producer import alone as alone_module
from lmpool.producer import line as line_module
from lmpool.producer import near_place as near_place_module
from lmpool.producer import sender as sender_module
from lmpool.producer.line import LEFT_MOST, PATIENCE_MOST, Line
from lmpool.producer.session import Session
from lmpool.row_ring import IS_ORDERED
from lmpool.wants import Digest
from tests.support.calling import call
from tests.support.clients import connected
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import WorkerProcess, worker_process

pytestmark = [
    pytest.mark.server,
    pytest.mark.usefixtures("way", "confirmed"),
    pytest.mark.one_server,
    pytest.mark.skipif(
        not (IS_ORDERED and os.path.isdir("/dev/shm")), reason="no memory that is shared in order"
    ),
]

SIZE = 8192
"""Rows of 32 KiB."""
FAILS = SIZE - 1
ENGINE = {"vocab_size": SIZE, "fail_token": FAILS}
SECONDS = 30
SOON = SECONDS / 2
"""Seconds in which the client's threads do not look after it where they wait `SECONDS`."""
NEW = random.Random(11)
Client = lmpool.PooledLM[Any]


@pytest.fixture(scope="module")
def server(server_binary: str) -> Iterator[RealServer]:
    with RealServer() as server:
        yield server


@pytest.fixture(scope="module")
def quick(server: RealServer) -> Iterator[str]:
    name = f"near{os.getpid()}"  # pools of one name are neighbours, whatever their server
    with worker_process(server.url, name, engine_opts=ENGINE):
        yield name


def prompt() -> list[int]:
    return [NEW.randrange(SIZE - 1) for _ in range(9)]


def ask(lm: Client, asked: list[int] | None = None, timeout: float = SECONDS) -> None:
    asked = prompt() if asked is None else asked
    row = call(lm, "next_token_logprobs", asked, timeout=timeout)
    np.testing.assert_array_equal(row, mock_row(asked, SIZE))


def ask_top(lm: Client) -> None:
    asked = prompt()
    (top,) = call(lm, "batch_top_logprobs", [asked], 3, timeout=SECONDS)
    assert list(top.token_ids) == list(np.argsort(mock_row(asked, SIZE))[:-4:-1])


def line_of(lm: Client) -> Line:
    line = lm._client._alone._line
    assert line is not None
    return line


def comes_near(lm: Client) -> bool:
    line = lm._client._alone._line
    return line is not None and line.place is not None


def until_near(lm: Client) -> None:
    """Until who asks next reads by itself, near."""
    lm._client._alone._needed = 1
    until(lambda: ask(lm) or comes_near(lm), SECONDS, what="rows to be read near by who asks")


@contextmanager
def near(server: RealServer, pool: str, **options: Any) -> Iterator[Client]:
    options = {"cache_bytes": 0, **options}
    with connected(server.url, pool, **options) as lm:
        until_near(lm)
        yield lm


def folder_of(lm: Client) -> Neighbourhood:
    assert lm._client.info is not None
    return Neighbourhood.of_pool(lm.pool, lm._client.info.fingerprint8)


@pytest.fixture
def never_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, nobody looks after a prompt that its caller reads."""
    monkeypatch.setattr(Session, "check_every", SECONDS)


@pytest.fixture
def patient(never_looks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does its caller ask the server beside the row."""
    monkeypatch.setattr(line_module, "PATIENCE", SECONDS)
    monkeypatch.setattr(line_module, "PATIENCE_MOST", SECONDS)


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What lines have said to the server beside claims, by the command's name."""
    said: Counter[str] = Counter()
    usual = Exchange.send

    def send(exchange: Exchange, packed: bytes) -> bool:
        names = ("XTRIM", "XREAD", "GET")
        said.update(name for name in names if b"\r\n%b\r\n" % name.encode() in packed)
        return usual(exchange, packed)

    monkeypatch.setattr(Exchange, "send", send)
    return said


def test_neither_threads_nor_the_server_have_anything_to_do(
    server: RealServer,
    quick: str,
    monkeypatch: pytest.MonkeyPatch,
    patient: None,
    asked_for: Counter[str],
) -> None:
    with near(server, quick) as lm:
        line = line_of(lm)  # of the first row the server is asked, too: the next clear that up

        def is_clear() -> bool:
            ask(lm)
            return line._patience > 0 and not line._passed_over and line._left < LEFT_MOST

        until(is_clear, SECONDS)
        claims: list[object] = []
        monkeypatch.setattr(
            sender_module, "claim_arguments", lambda *a, **k: claims.append(a) or None
        )
        heard: list[object] = []
        session = lm._client._session
        monkeypatch.setattr(session.near, "hear", heard.append)
        asked_for.clear()
        before, left = lm.statistics(), line._left
        count = 2 * LEFT_MOST + 5
        for _ in range(count):
            ask(lm)
        found = {n: v - before[n] for n, v in lm.statistics().items() if v != before[n]}
        assert found == {"requests": count, "queued": count}
        assert not claims
        assert not heard
        assert line_of(lm) is line
        assert asked_for == {"XTRIM": (left + count - 1) // LEFT_MOST}
        with server.client() as connection:
            assert connection.xlen(line.shard.reply(line.name)) <= LEFT_MOST + 1


def test_answers_of_all_sizes_in_turn(server: RealServer, quick: str, patient: None) -> None:
    """The notice of a row may come late, behind what empties the stream for the next answer."""
    with near(server, quick) as lm:
        line = line_of(lm)
        for _ in range(100):
            ask(lm)
            ask_top(lm)
        assert line_of(lm) is line


def test_known_rows_come_from_the_server(server: RealServer, quick: str, patient: None) -> None:
    known = [prompt() for _ in range(5)]
    with connected(server.url, quick) as other:
        for asked in known:
            ask(other, asked)
    with near(server, quick) as lm:
        line, before = line_of(lm), lm.statistics()["cache_hits"]
        for asked in known:
            ask(lm, asked)
            ask(lm)
        assert lm.statistics()["cache_hits"] == before + len(known)
        assert comes_near(lm)
        assert line_of(lm) is line


def test_small_answers_first(server: RealServer, quick: str) -> None:
    """The name that these were asked under has no place for rows: the next one has."""
    with connected(server.url, quick, cache_bytes=0) as lm:
        lm._client._alone._needed = 1
        until(lambda: ask_top(lm) or lm._client._alone.is_ready, SECONDS)
        assert line_of(lm).place is None
        until(lambda: ask(lm) or comes_near(lm), SECONDS, what="rows to be read near")
        ask_top(lm)


@pytest.mark.usefixtures("never_looks")
def test_a_prompt_that_fails_says_so_soon(server: RealServer, quick: str) -> None:
    with near(server, quick) as lm:
        for _ in range(3):
            ask(lm)
            began = time.monotonic()
            with pytest.raises(PromptFailed):
                call(lm, "next_token_logprobs", [FAILS, *prompt()], timeout=SECONDS)
            assert time.monotonic() - began < SOON
        assert comes_near(lm)


def test_a_prompt_that_failed_is_asked_anew(server: RealServer) -> None:
    """What its stream says of the first time is not taken for what becomes of the second."""
    with (
        worker_process(server.url, "again", engine_opts=ENGINE) as worker,
        near(server, "again") as lm,
    ):
        ask(lm)
        asked = [FAILS, *prompt()]
        for _ in range(2):
            with pytest.raises(PromptFailed):
                call(lm, "next_token_logprobs", asked, timeout=SECONDS)
        worker.pause()
        with pytest.raises(PoolTimeout):
            call(lm, "next_token_logprobs", asked, timeout=0.5)
        worker.resume()


def test_the_server_is_asked_soon_whatever_the_last_row_took(server: RealServer) -> None:
    """Of a prompt that fails it alone tells."""
    engine = {**ENGINE, "delay": 0.2}
    with worker_process(server.url, "long", engine_opts=engine), near(server, "long") as lm:
        until(lambda: ask(lm) or line_of(lm)._patience == PATIENCE_MOST, SECONDS)
        for _ in range(3):
            with pytest.raises(PromptFailed):
                call(lm, "next_token_logprobs", [FAILS, *prompt()], timeout=SECONDS)
            ask(lm)


def test_who_reads_opens_nothing(
    server: RealServer, quick: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a signal's handler raises would be taken for what the system says, or leave it open."""
    opened, usual = list[threading.Thread](), near_place_module._open

    def opens(path: str) -> Any:
        opened.append(threading.current_thread())
        return usual(path)

    monkeypatch.setattr(near_place_module, "_open", opens)
    with near(server, quick) as lm:
        place = line_of(lm).place
        assert place is not None
        place._rings = {}  # as if another worker had come
        ask(lm)
        until_near(lm)
        ask(lm)
    assert opened
    assert threading.current_thread() not in opened


def test_where_there_is_no_room_small_answers_are_read_as_ever(
    server: RealServer, quick: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(alone_module, "NearPlace", refuse)
    with connected(server.url, quick, cache_bytes=0) as lm:
        alone = lm._client._alone
        alone._needed = 1
        until(lambda: ask(lm) or ask_top(lm) or (alone.is_ready and alone._places_at > 0), SECONDS)
        line = line_of(lm)
        for _ in range(5):
            ask(lm)
            ask_top(lm)
        assert line_of(lm) is line


def test_who_joins_another_clients_prompt_reads_the_row_near(
    server: RealServer, patient: None
) -> None:
    engine = {**ENGINE, "delay": 0.3}
    with (
        worker_process(server.url, "slow", engine_opts=engine),
        near(server, "slow") as lm,
        connected(server.url, "slow", cache_bytes=0) as other,
    ):
        ask(other)
        asked, line = prompt(), line_of(lm)
        queued = other.statistics()["queued"]
        thread = threading.Thread(target=ask, args=(other, asked))
        thread.start()
        until(lambda: other.statistics()["queued"] == queued + 1)
        joined = lm.statistics()["joined"]
        ask(lm, asked)
        thread.join(SECONDS)
        assert lm.statistics()["joined"] == joined + 1
        assert line_of(lm) is line


@pytest.mark.usefixtures("never_looks")
def test_a_place_that_was_taken_away(server: RealServer, quick: str) -> None:
    """Workers do not find it: the row comes from the server, and the next name has another."""
    with near(server, quick) as lm:
        line = line_of(lm)
        for name, path in folder_of(lm).look("client").items():
            if name.startswith(f"{line.name}."):
                os.unlink(path)
        for _ in range(3):
            began = time.monotonic()
            ask(lm)
            assert time.monotonic() - began < SOON
        until_near(lm)
        assert line_of(lm) is not line


@pytest.mark.usefixtures("never_looks")
def test_another_worker_that_lays_nothing(server: RealServer) -> None:
    with (
        worker_process(server.url, "moves", engine_opts=ENGINE) as first,
        near(server, "moves") as lm,
    ):
        with worker_process(server.url, "moves", engine_opts=ENGINE, near_bytes=0):
            first.terminate()
            first.wait()
            for _ in range(20):
                began = time.monotonic()
                ask(lm)
                assert time.monotonic() - began < SOON
            assert not lm._client._session.near.are_usual
            until(lambda: not folder_of(lm).look("rows"))
        with worker_process(server.url, "moves", engine_opts=ENGINE):
            until_near(lm)


def test_a_worker_that_is_killed_and_one_that_comes(server: RealServer) -> None:
    with (
        worker_process(server.url, "killed", engine_opts=ENGINE) as first,
        near(server, "killed") as lm,
    ):
        first.pause()
        asked, found = prompt(), list[Any]()
        asking = threading.Thread(
            target=lambda: found.append(call(lm, "next_token_logprobs", asked, timeout=2 * SECONDS))
        )
        queued = lm.statistics()["queued"]
        asking.start()
        until(lambda: lm.statistics()["queued"] > queued)
        first.kill()
        with worker_process(server.url, "killed", engine_opts=ENGINE):
            asking.join(2 * SECONDS)
            np.testing.assert_array_equal(found[0], mock_row(asked, SIZE))
            until_near(lm)
            ask(lm)


def test_a_pipe_that_others_write_to(server: RealServer, quick: str) -> None:
    with near(server, quick) as lm:
        here, chance = folder_of(lm), random.Random(5)
        (ring,) = here.look("rows")

        def disturb(what: int) -> None:
            line = lm._client._alone._line
            names = [n for n in here.look("notices") if line and n.startswith(f"{line.name}.")]
            for name in names:
                path = here.path("notices", name)
                digests = [*lm._client._session.table.flights] or [Digest(bytes(16))]
                with suppress(OSError):
                    if what == 0:
                        with open(path, "wb") as pipe:
                            pipe.write(chance.randbytes(300))
                    elif what == 1:
                        NoticeWriter(path).tell(NearNotice("0" * 16, digests))
                    elif what == 2:
                        NoticeWriter(path).tell(NearNotice(ring, digests))
                    else:
                        NoticeWriter(path).tell(NearNotice(ring, [Digest(bytes(16))] * 40))

        stopped = threading.Event()

        def go_on() -> None:
            while not stopped.wait(0.001):
                disturb(chance.randrange(4))

        writer = threading.Thread(target=go_on)
        writer.start()
        try:
            for _ in range(200):
                ask(lm)
        finally:
            stopped.set()
            writer.join()
        until_near(lm)
        ask(lm)


def pipes_of(name: str) -> list[str]:
    """This process's open files of a name's pipe."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if f"notices-{name}." in path]


@pytest.mark.parametrize("at", ["the wait", "the pipe"])
def test_a_client_that_closes_while_it_is_read(
    server: RealServer, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Also as a row is told of: whose pipe that is closes it, and nobody else."""
    pool = f"closes{os.getpid()}"
    reached, goes_on = threading.Event(), threading.Event()
    waits, reads, reader = Line._near, os.read, list[threading.Thread]()

    def waits_there(line: Line, *given: Any) -> Any:
        reached.set()
        return waits(line, *given)

    def reads_late(file: int, count: int) -> bytes:
        if threading.current_thread() in reader:
            reached.set()
            assert goes_on.wait(SECONDS)
        return reads(file, count)

    delay = 1.0 if at == "the wait" else 0.0
    with (
        worker_process(server.url, pool, engine_opts={**ENGINE, "delay": delay}),
        near(server, pool) as lm,
    ):
        name, there = line_of(lm).name, folder_of(lm)
        assert pipes_of(name)
        if at == "the wait":
            monkeypatch.setattr(Line, "_near", waits_there)
        else:
            monkeypatch.setattr(near_notices_module.os, "read", reads_late)
        raised: list[BaseException] = []

        def read() -> None:
            try:
                while not reached.is_set():  # where the client looks at its pool first it is not
                    ask(lm)
            except BaseException as error:
                raised.append(error)

        reader.append(threading.Thread(target=read))
        reader[0].start()
        assert reached.wait(SECONDS)
        lm.close()
        goes_on.set()
        reader[0].join(SECONDS)
        assert [type(error) for error in raised] == [ClientClosed]
        with server.client() as connection:
            assert not connection.keys(f"*:reply:{name}")
        for kind in ("client", "notices"):
            assert not any(entry.startswith(f"{name}.") for entry in there.look(kind))
        assert not pipes_of(name)


@pytest.mark.parametrize("prompts", [1, 2], ids=["asked alone", "asked otherwise"])
def test_nothing_is_left_open_of_a_server_that_was_lost(server_binary: str, prompts: int) -> None:
    with (
        RealServer() as server,
        worker_process(server.url, "lost", engine_opts=ENGINE) as worker,
        near(server, "lost", reconnect_timeout=1.0) as lm,
    ):
        until_near(lm)
        name = line_of(lm).name
        assert pipes_of(name)
        worker.kill()
        server.stop()
        asked = [prompt() for _ in range(prompts)]
        with pytest.raises(LmpoolError):
            call(lm, "batch_next_token_logprobs", asked, timeout=SECONDS)
        until(lambda: not pipes_of(name), SECONDS, what="its pipe is closed")


FORK = """
import os, sys, time, lmpool
from lmpool.backends.mock import mock_row
from lmpool.neighbours import Neighbourhood

def until_near(lm, first):
    lm._client._alone._needed = 1
    for n in range(1000):
        lm.next_token_logprobs_sync([first, n])
        line = lm._client._alone._line
        if line is not None and line.place is not None:
            return line.name
        time.sleep(0.001)
    raise SystemExit("rows are not read near")

def files(name):
    found = [*there.look("client"), *there.look("notices")]
    return [each for each in found if each.startswith(name + ".")]

lm = lmpool.connect(sys.argv[1], sys.argv[2], framework="numpy", cache_bytes=0)
name = until_near(lm, 1)
there = Neighbourhood.of_pool(lm.pool, lm.info.fingerprint8)
assert len(files(name)) == 2
opened = len(os.listdir("/proc/self/fd"))
child = os.fork()
if not child:
    assert len(os.listdir("/proc/self/fd")) < opened, "what was its parent's is open"
    assert lm._client._alone._line is None
    own = until_near(lm, 2)
    assert own != name and len(files(own)) == 2
    lm.close()
    sys.exit(1 if files(own) else 0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert len(files(name)) == 2, "the child took its parent's place along"
line = lm._client._alone._line
for n in range(3):
    assert (lm.next_token_logprobs_sync([3, n]) == mock_row([3, n], lm.info.vocab_size)).all()
assert lm._client._alone._line is line
lm.close()
assert not files(name)
"""


def test_a_forked_child_has_a_name_of_its_own(server: RealServer, quick: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK, server.url, quick]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_client_that_nobody_has_any_more_leaves_nothing(server: RealServer, quick: str) -> None:
    lm = lmpool.connect(server.url, quick, framework="numpy", cache_bytes=0)
    until_near(lm)
    ask(lm)
    name, there = line_of(lm).name, folder_of(lm)
    before = len(os.listdir("/proc/self/fd"))
    del lm
    gc.collect()
    until(lambda: not any(n.startswith(f"{name}.") for n in there.look("client")), SECONDS)
    until(lambda: not any(n.startswith(f"{name}.") for n in there.look("notices")), SECONDS)
    until(lambda: len(os.listdir("/proc/self/fd")) < before, SECONDS)


def one_that_waits(lm: Client, worker: WorkerProcess) -> tuple[list[int], threading.Thread]:
    """A prompt that a thread reads near, queued at a paused worker. Where that stopped with the
    notice of the row before still to be said, the client's threads read it, and another is asked.
    """
    alone, session = lm._client._alone, lm._client._session

    def reader(line: Line) -> str:
        """Who reads what was asked, once that is known."""
        with session.lock:
            if line.claim:
                return "its caller"
            return "the threads" if session.table.flights and alone._call is None else ""

    for _ in range(20):
        until_near(lm)
        known = partial(reader, line_of(lm))
        thread = threading.Thread(target=ask, args=(lm, asked := prompt()))
        worker.pause()
        thread.start()
        if until(known, SECONDS) == "its caller":
            return asked, thread
        worker.resume()
        thread.join(SECONDS)
        assert not thread.is_alive()
    pytest.fail("the client's threads read all of them")


def test_a_worker_of_another_server_is_not_read(
    server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its pool has the name and the model of this one, and another client's row is that
    which is waited for."""
    name = f"both{os.getpid()}"
    with (
        RealServer() as others,
        worker_process(server.url, name, engine_opts=ENGINE) as worker,
        worker_process(others.url, name, engine_opts=ENGINE),
        connected(others.url, name, cache_bytes=0) as their_lm,
    ):
        until(lambda: ask(their_lm) or their_lm._client._session.near.are_usual, SECONDS)
        with near(server, name) as lm:
            monkeypatch.setattr(Session, "check_every", SECONDS)
            asked, thread = one_that_waits(lm, worker)
            owners, line = list[str](), line_of(lm)
            knows = line._knows

            def asks(worker: str) -> bool:
                owners.append(worker)
                return knows(worker)

            line._knows = asks
            ask(their_lm, asked)
            until(lambda: owners, SECONDS)
            worker.resume()
            thread.join(SECONDS)
            assert not thread.is_alive()
            assert not knows(owners[0])
            assert lm._client._alone._line is not line


@pytest.mark.usefixtures("never_looks")
def test_time_that_is_over_is_said(server: RealServer) -> None:
    engine = {**ENGINE, "delay": 0.5}
    with worker_process(server.url, "late", engine_opts=engine), near(server, "late") as lm:
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(PoolTimeout):
                call(lm, "next_token_logprobs", prompt(), timeout=0.1)
            assert time.monotonic() - began < SOON
        ask(lm)


CALLS: dict[str, Callable[[Client], object]] = {
    "row": ask,
    "top": ask_top,
    "rows": lambda lm: [ask(lm) for _ in range(10)],
    "many": lambda lm: call(lm, "batch_next_token_logprobs", [prompt() for _ in range(3)]),
    "in vain": lambda lm: call(lm, "next_token_logprobs", prompt(), timeout=1e-4),
    "fails": lambda lm: call(lm, "next_token_logprobs", [FAILS], timeout=SECONDS),
    "known": lambda lm: ask(lm, [1, 2, 3]),
}


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_asked_in_any_order(server: RealServer, quick: str, seed: int) -> None:
    """By one client, some of it together with others of its own."""
    chance = random.Random(seed)
    with near(server, quick) as lm:

        def one(kind: str) -> None:
            with suppress(PoolTimeout, PromptFailed):
                CALLS[kind](lm)

        for _ in range(150):
            kinds = chance.choices([*CALLS], k=2)
            together = None
            if chance.random() < 0.2:
                together = threading.Thread(target=one, args=(kinds[1],))
                together.start()
            lm._client._alone._needed = 1
            one(kinds[0])
            if together is not None:
                together.join(2 * SECONDS)
                assert not together.is_alive()
        until_near(lm)
        assert not lm._client._session.table.flights
