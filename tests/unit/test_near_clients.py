"""The clients of a worker's machine: who waits for what, and who is told."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lmpool import neighbours
from lmpool.near_notices import NOTICE_MOST, NearNotice, NoticeReader, NoticeWriter
from lmpool.neighbours import LOOK_EVERY, Neighbourhood
from lmpool.wait_list import MAGIC, SIZE, WaitList
from lmpool.wants import Digest
from lmpool.worker import near_clients as near_clients_module
from lmpool.worker.near_clients import NearClients
from tests.support.freezing import freeze

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's")

RING = "0123456789abcdef"
DIGESTS = [Digest(n.to_bytes(8, "little") * 2) for n in range(1, 21)]


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is /dev/shm elsewhere."""
    monkeypatch.setattr(neighbours, "MEMORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def here(memory: Path) -> Neighbourhood:
    return Neighbourhood("p")


class Client:
    """One that is there, until it leaves."""

    def __init__(self, here: Neighbourhood, name: str) -> None:
        self.name = name
        self._pipe = here.enter("notices", name, self._take, is_pipe=True)
        self._list = here.enter("client", name, self._fill)

    def _take(self, pipe: int) -> None:
        self.reader = NoticeReader(pipe)

    def _fill(self, file: int) -> None:
        self._waits = WaitList(file)

    def wait_for(self, *numbers: int) -> None:
        self._waits.add([DIGESTS[number] for number in numbers])

    def leave(self) -> None:
        self._list.leave()
        self._pipe.leave()
        self.reader.close()
        assert self.reader.read() is None


@contextmanager
def clients_of(here: Neighbourhood, *names: str) -> Iterator[list[Client]]:
    clients = [Client(here, name) for name in names]
    try:
        yield clients
    finally:
        for client in clients:
            client.leave()


def waiting(clients: NearClients) -> dict[str, list[int]]:
    """The numbers of the answers that each waits for."""
    found = clients.who_wait(DIGESTS)
    assert all(len(waits) == len(DIGESTS) for waits in found.values())
    return {name: [n for n, is_so in enumerate(waits) if is_so] for name, waits in found.items()}


def tell(clients: NearClients, name: str, *numbers: int) -> NearNotice:
    notice = NearNotice(RING, [DIGESTS[number] for number in numbers])
    clients.tell(name, notice.ring, notice.digests)
    return notice


def hears(client: Client, clients: NearClients, *numbers: int) -> bool:
    """Whether it is told, and of nothing else."""
    notice = tell(clients, client.name, *numbers)
    return client.reader.read() == [notice]


def open_files() -> int:
    """Of the memory: other threads of this process may close theirs meanwhile."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of the listing itself, or another thread's
            count += os.readlink(f"/proc/self/fd/{name}").startswith(neighbours.MEMORY)
    return count


# --- who waits ---------------------------------------------------------------------------------


def test_nobody_waits_where_nobody_is(here: Neighbourhood) -> None:
    clients = NearClients(here)
    assert waiting(clients) == {}
    clients.look()
    assert clients.look() is False
    assert waiting(clients) == {}
    tell(clients, "a", 1)
    other = here.enter("rows", "a")  # another worker is nobody who waits
    clients.look()
    assert waiting(clients) == {}
    other.leave()


def test_those_wait_who_said_so_and_for_what_they_said(here: Neighbourhood) -> None:
    clients = NearClients(here)
    with clients_of(here, "a", "b", "c") as (a, b, _):
        assert clients.look() is True
        assert waiting(clients) == {}
        a.wait_for(0, 3, 19)
        assert waiting(clients) == {"a": [0, 3, 19]}
        b.wait_for(3, 4)
        assert waiting(clients) == {"a": [0, 3, 19], "b": [3, 4]}
        a.wait_for(5)
        assert waiting(clients) == {"a": [0, 3, 5, 19], "b": [3, 4]}
        assert clients.look() is False
        assert [*clients.who_wait(DIGESTS[4:5])] == ["b"]
        assert clients.who_wait(DIGESTS[7:9]) == {}
        assert clients.who_wait([]) == {}


def test_who_comes_is_heard_of_by_the_next_look(here: Neighbourhood) -> None:
    clients = NearClients(here)
    with clients_of(here, "a") as (a,):
        a.wait_for(1)
        assert waiting(clients) == {}
        assert clients.look() is True
        assert waiting(clients) == {"a": [1]}
        with clients_of(here, "b") as (b,):
            b.wait_for(2)
            assert waiting(clients) == {"a": [1]}
            assert clients.look() is True
            assert waiting(clients) == {"a": [1], "b": [2]}
            assert clients.look() is False
        assert clients.look() is True
        assert waiting(clients) == {"a": [1]}
        assert clients.look() is False
    assert clients.look() is True
    assert waiting(clients) == {}
    assert not os.path.exists(here.folder)


def test_of_those_who_come_and_go_those_wait_who_are_there(here: Neighbourhood) -> None:
    rng, clients = random.Random(1), NearClients(here)
    there: dict[str, Client] = {}
    right: dict[str, set[int]] = {}
    files = open_files()
    for number in range(300):
        name = rng.choice([*there, "new", "new"]) if len(there) < 8 else rng.choice([*there])
        if name == "new":
            name = f"c-{number}"
            there[name], right[name] = Client(here, name), set()
        elif rng.random() < 0.3:
            there.pop(name).leave()
            del right[name]
        else:
            numbers = rng.sample(range(len(DIGESTS)), rng.randrange(1, 4))
            there[name].wait_for(*numbers)
            right[name].update(numbers)
        clients.look()
        assert waiting(clients) == {name: sorted(own) for name, own in right.items() if own}
        assert all(hears(c, clients, number % len(DIGESTS)) for c in there.values())
    while there:
        there.popitem()[1].leave()
    clients.look()
    assert open_files() == files


def test_pools_are_told_apart(here: Neighbourhood) -> None:
    clients, others = NearClients(here), NearClients(Neighbourhood("q"))
    with clients_of(here, "a") as (a,):
        a.wait_for(1)
        clients.look()
        others.look()
        assert waiting(clients) == {"a": [1]}
        assert waiting(others) == {}


# --- who is told -------------------------------------------------------------------------------


def test_one_is_told_and_no_other(here: Neighbourhood) -> None:
    clients = NearClients(here)
    with clients_of(here, "a", "b") as (a, b):
        clients.look()
        first, second = tell(clients, "b", 1, 2), tell(clients, "a", 3)
        assert a.reader.read() == [second]
        assert b.reader.read() == [first]


def test_who_is_not_there_is_not_told(here: Neighbourhood) -> None:
    clients = NearClients(here)
    with clients_of(here, "a") as (a,):
        tell(clients, "a", 1)  # of whom it has not heard yet
        clients.look()
        tell(clients, "b", 1)
        assert hears(a, clients, 2)
    tell(clients, "a", 3)
    clients.look()
    tell(clients, "a", 4)


def test_who_went_without_a_word_is_told_once_and_waits_no_more(here: Neighbourhood) -> None:
    clients = NearClients(here)
    with clients_of(here, "a", "b") as (a, b):
        for client in (a, b):
            client.wait_for(1)
        clients.look()
        a.reader.close()
        assert a.reader.read() is None
        a._pipe.leave()
        assert waiting(clients) == {"a": [1], "b": [1]}
        tell(clients, "a", 1)
        assert waiting(clients) == {"b": [1]}
        tell(clients, "a", 1)
        assert hears(b, clients, 1)
        assert clients.look() is False


def test_who_does_not_read_keeps_nobody_waiting(here: Neighbourhood) -> None:
    clients = NearClients(here)
    with clients_of(here, "a", "b") as (a, b):
        for client in (a, b):
            client.wait_for(1)
        clients.look()
        for number in range(100):
            clients.tell("a", f"{number:016x}", DIGESTS[:1] * NOTICE_MOST)
        assert waiting(clients) == {"a": [1], "b": [1]}
        assert hears(b, clients, 1)
        notices = 0
        while clients.unread("a"):
            notices += len(a.reader.read() or ())
        assert 0 < notices < 100
        assert hears(a, clients, 1)


def test_it_is_seen_how_far_behind_each_is(here: Neighbourhood) -> None:
    clients = NearClients(here)
    with clients_of(here, "a", "b") as (a, b):
        for client in (a, b):
            client.wait_for(1)
        clients.look()
        assert clients.unread("a") == clients.unread("b") == clients.unread("nobody") == 0
        tell(clients, "a", *[1] * 20)
        tell(clients, "b", *[1] * 50)
        assert 20 <= clients.unread("a") < 25 < 50 <= clients.unread("b") < 55
        while clients.unread("b"):
            b.reader.read()
        assert 20 <= clients.unread("a") < 25


def test_of_whom_it_cannot_be_seen_how_far_behind_he_is_nobody_is_told(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = NearClients(here)
    with clients_of(here, "a") as (a,):
        a.wait_for(1)
        clients.look()

        def refuse(pipe: NoticeWriter) -> int:
            raise PermissionError("not allowed")

        monkeypatch.setattr(NoticeWriter, "unread", refuse)
        assert clients.unread("a") == 0
        assert waiting(clients) == {}


# --- who is killed, or frozen ------------------------------------------------------------------

PROGRAM = """
import sys
from pathlib import Path
from lmpool import neighbours
from lmpool.neighbours import Neighbourhood
from tests.unit.test_near_clients import Client

neighbours.MEMORY = sys.argv[1]
client = Client(Neighbourhood("p"), "a")
client.wait_for(1, 2)
print("there", flush=True)
while True:
    for ring, digests in client.reader.read():
        print(ring, len(digests), flush=True)
"""


@contextmanager
def program(memory: Path) -> Iterator[subprocess.Popen[str]]:
    """A client ``a`` that says what it is told."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(memory)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert said(process) == "there"
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_another_process_is_told(here: Neighbourhood, memory: Path) -> None:
    clients = NearClients(here)
    with program(memory) as process:
        clients.look()
        assert waiting(clients) == {"a": [1, 2]}
        for count in range(1, 10):
            tell(clients, "a", *range(count))
            assert said(process) == f"{RING} {count}"


def test_who_is_killed_is_told_no_more_and_is_gone_after_a_while(
    here: Neighbourhood, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, now = NearClients(here), time.monotonic()
    with clients_of(here, "b") as (b,), program(memory) as process:
        b.wait_for(2)
        clients.look()
        assert waiting(clients) == {"a": [1, 2], "b": [2]}
        process.kill()
        process.wait(60)
        tell(clients, "a", 1)
        assert waiting(clients) == {"b": [2]}
        monkeypatch.setattr(time, "monotonic", lambda: now + 1000 * LOOK_EVERY)
        assert clients.look() is True
        assert waiting(clients) == {"b": [2]}
        assert "client-a" not in os.listdir(here.folder)
        with clients_of(here, "c"):  # who comes takes away the rest
            assert set(os.listdir(here.folder)) == {
                f"{kind}-{name}" for kind in ("client", "notices") for name in "bc"
            }


def test_who_is_killed_and_never_told_is_gone_after_a_while(
    here: Neighbourhood, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, now = NearClients(here), time.monotonic()
    files = open_files()
    with program(memory) as process:
        clients.look()
        process.kill()
        process.wait(60)
        assert waiting(clients) == {"a": [1, 2]}
        monkeypatch.setattr(time, "monotonic", lambda: now + 1000 * LOOK_EVERY)
        assert clients.look() is True
        assert waiting(clients) == {}
    assert open_files() == files


def test_who_is_frozen_keeps_nobody_waiting_and_is_told_when_he_goes_on(
    here: Neighbourhood, memory: Path
) -> None:
    clients = NearClients(here)
    with program(memory) as process:
        clients.look()
        freeze(process.pid)
        for count in range(100):
            clients.tell("a", f"{count:016x}", DIGESTS[:1] * NOTICE_MOST)
        clients.look()
        assert waiting(clients) == {"a": [1, 2]}
        process.send_signal(signal.SIGCONT)
        assert said(process) == f"{0:016x} {NOTICE_MOST}"
        assert said(process) == f"{1:016x} {NOTICE_MOST}"


# --- files that are no clients' ----------------------------------------------------------------


def filled_with(data: bytes) -> Callable[[int], Any]:
    return lambda file: os.write(file, data)


NO_LISTS = {
    "nothing": b"",
    "a byte": b"l",
    "the magic alone": MAGIC,
    "a list but for a byte": (MAGIC + bytes(SIZE))[: SIZE - 1],
    "a list and a byte": (MAGIC + bytes(SIZE))[: SIZE + 1],
    "zeros": bytes(SIZE),
    "garbage": random.Random(1).randbytes(SIZE),
}


@contextmanager
def beside_one_who_waits(here: Neighbourhood) -> Iterator[None]:
    """A client ``z``, of whom all is as ever once what is done here has been; ``a`` is nobody."""
    clients = NearClients(here)
    with clients_of(here, "z") as (client,):
        client.wait_for(1)
        yield
        files = open_files()
        assert clients.look() is True
        assert waiting(clients) == {"z": [1]}
        tell(clients, "a", 1)
        assert hears(client, clients, 1)
        assert clients.look() is False
        assert open_files() == files + 2  # its list's, and an end of its pipe


@pytest.mark.parametrize("data", NO_LISTS.values(), ids=NO_LISTS)
def test_who_has_no_list_is_no_client(here: Neighbourhood, data: bytes) -> None:
    with beside_one_who_waits(here):
        client = here.enter("client", "a", filled_with(data))
        pipes: list[NoticeReader] = []
        pipe = here.enter(
            "notices", "a", lambda file: pipes.append(NoticeReader(file)), is_pipe=True
        )
    assert {*here.look("notices")} == {"a"}
    client.leave()
    pipe.leave()
    pipes[0].close()
    assert pipes[0].read() is None


def test_a_pipe_is_no_list(here: Neighbourhood) -> None:
    with beside_one_who_waits(here):
        members = [here.enter(kind, "a", is_pipe=True) for kind in ("client", "notices")]
    for member in members:
        member.leave()


def test_a_client_without_its_pipe_is_none(here: Neighbourhood) -> None:
    with beside_one_who_waits(here):
        client = here.enter("client", "a", WaitList)
    client.leave()


def test_a_file_is_no_pipe(here: Neighbourhood) -> None:
    with beside_one_who_waits(here):
        members = [here.enter("client", "a", WaitList), here.enter("notices", "a")]
    assert Path(here.path("notices", "a")).read_bytes() == b""
    for member in members:
        member.leave()


def test_a_pipe_that_nobody_reads_is_no_clients(here: Neighbourhood) -> None:
    with beside_one_who_waits(here):
        os.mkfifo(here.path("notices", "a"), 0o600)
        client = here.enter("client", "b", WaitList)
        os.rename(here.path("client", "b"), here.path("client", "a"))
    os.unlink(here.path("client", "a"))
    client.leave()


def test_what_leads_elsewhere_is_no_pipe(here: Neighbourhood) -> None:
    with beside_one_who_waits(here):
        client = here.enter("client", "a", WaitList)
        os.symlink(here.path("notices", "z"), here.path("notices", "a"))
    os.unlink(here.path("notices", "a"))
    client.leave()


def test_a_client_of_another_user_is_none(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, user = NearClients(here), os.geteuid()
    with clients_of(here, "a") as (client,):
        client.wait_for(1)
        monkeypatch.setattr(neighbours, "_user", lambda: user)  # the folder is this user's
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: user + 1)
            patch.setattr("lmpool.worker.near_clients.NoticeWriter", list)  # whosever the pipe is
            assert clients.look() is True
            assert waiting(clients) == {}
        others = NearClients(here)
        others.look()
        assert waiting(others) == {"a": [1]}


def test_a_client_that_goes_as_it_is_found_is_none(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    for gone in ("client", "notices"):
        clients, usual = NearClients(here), here.path
        with clients_of(here, "a"):

            def path(kind: Any, name: str, gone: str = gone, usual: Any = usual) -> str:
                found: str = usual(kind, name)
                if kind == gone:
                    os.unlink(found)
                return found

            with monkeypatch.context() as patch:
                patch.setattr(here, "path", path)
                assert clients.look() is True
            assert waiting(clients) == {}
        assert clients.look() is True


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM])
def test_a_list_that_cannot_be_mapped_is_no_clients(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def fails(_: int) -> None:
        raise OSError(error, "it cannot be mapped")

    clients = NearClients(here)
    with clients_of(here, "a") as (client,):
        client.wait_for(1)
        with monkeypatch.context() as patch:
            patch.setattr("lmpool.worker.near_clients.WaitListReader", fails)
            assert clients.look() is True
        assert waiting(clients) == {}


# --- who comes again under its name ------------------------------------------------------------


def test_who_comes_again_after_it_was_missed_is_another(here: Neighbourhood) -> None:
    clients = NearClients(here)
    for number in range(3):
        with clients_of(here, "a") as (client,):
            client.wait_for(number)
            assert clients.look() is True
            assert waiting(clients) == {"a": [number]}
            assert hears(client, clients, number)
        assert clients.look() is True


def test_no_more_than_so_many_are_told_and_those_who_are_stay(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_clients_module, "CLIENTS_MOST", 2)
    clients = NearClients(here)
    with clients_of(here, "c", "d") as some:
        for client in some:
            client.wait_for(1)
        clients.look()
        assert set(waiting(clients)) == {"c", "d"}
        with clients_of(here, "a", "b") as others:
            for client in others:
                client.wait_for(1)
            clients.look()
            assert set(waiting(clients)) == {"c", "d"}


def test_pipes_of_those_who_are_gone_are_taken_away(here: Neighbourhood) -> None:
    clients = NearClients(here)
    with clients_of(here, "a"):
        os.mkfifo(here.path("notices", "gone"), 0o600)
        clients.look()
        assert set(os.listdir(here.folder)) == {"client-a", "notices-a"}
