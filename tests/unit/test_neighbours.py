"""Who is near: processes of one pool, machine and user, until they leave or die."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from lmpool import neighbours
from lmpool.neighbours import LOOK_EVERY, Kind, Membership, Neighbourhood, Neighbours
from tests.support.freezing import freeze
from tests.support.waiting import until

fcntl = pytest.importorskip("fcntl")


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is /dev/shm elsewhere."""
    monkeypatch.setattr(neighbours, "MEMORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def here(memory: Path) -> Neighbourhood:
    return Neighbourhood("p")


def names(here: Neighbourhood, kind: Kind = "client") -> set[str]:
    return set(here.look(kind))


def files(here: Neighbourhood) -> set[str]:
    return set(os.listdir(here.folder))


def mode_of(path: str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


@contextmanager
def program(memory: Path, body: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that has entered as ``a`` and then does this, and the first line that it says."""
    begin = (
        "import os, sys, time\n"
        "from lmpool import neighbours\n"
        "neighbours.MEMORY = sys.argv[1]\n"
        'membership = neighbours.Neighbourhood("p").enter("client", "a")\n'
    )
    with subprocess.Popen(
        [sys.executable, "-c", begin + body, str(memory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


STAYS = 'print("there", flush=True)\nsys.stdin.read()\n'


# --- coming and going --------------------------------------------------------------------------


def test_who_enters_is_there_until_he_leaves(here: Neighbourhood) -> None:
    assert here.look("client") == {}
    first, second = here.enter("client", "a-1"), here.enter("client", "b_2.c")
    folder = here.folder
    assert here.look("client") == {"a-1": f"{folder}/client-a-1", "b_2.c": f"{folder}/client-b_2.c"}
    assert all(os.path.isfile(path) for path in here.look("client").values())
    first.leave()
    first.leave()  # once more is no harm
    assert here.look("client") == {"b_2.c": f"{folder}/client-b_2.c"}
    second.leave()
    assert here.look("client") == {}


def test_kinds_are_told_apart(here: Neighbourhood) -> None:
    mine = [here.enter("client", "a"), here.enter("rows", "b"), here.enter("rows", "client-c")]
    assert here.look("client") == {"a": f"{here.folder}/client-a"}
    assert names(here, "rows") == {"b", "client-c"}
    mine.pop(0).leave()
    assert names(here) == set()
    assert names(here, "rows") == {"b", "client-c"}


def test_pools_models_and_places_are_told_apart(memory: Path) -> None:
    places = [
        Neighbourhood.of_pool("p", "01234567"),
        Neighbourhood.of_pool("p", "01234568"),
        Neighbourhood.of_pool("q", "01234567"),
    ]
    mine = places[0].enter("client", "a")
    assert [names(each) for each in places] == [{"a"}, set(), set()]
    assert names(Neighbourhood.of_pool("p", "01234567")) == {"a"}
    assert {Path(each.folder).parent for each in places} == {memory / f"lmpool-{os.geteuid()}"}
    mine.leave()


def test_who_is_forgotten_has_left(here: Neighbourhood) -> None:
    mine = here.enter("client", "a")
    assert names(here) == {"a"}
    del mine
    assert not os.path.exists(here.folder)


def test_a_file_is_there_once_it_is_whole(here: Neighbourhood) -> None:
    seen = []

    def fill(file: int) -> None:
        os.write(file, b"half")
        seen.append((names(here, "rows"), len(files(here))))
        os.write(file, b" and half")

    mine = here.enter("rows", "a", fill)
    assert seen == [(set(), 1)]  # though it lies in the folder
    assert Path(here.look("rows")["a"]).read_bytes() == b"half and half"
    assert files(here) == {"rows-a"}
    mine.leave()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), ValueError(), KeyboardInterrupt()]
)
def test_a_file_that_could_not_be_filled_is_no_more(
    here: Neighbourhood, error: BaseException
) -> None:
    other, held = here.enter("client", "a"), []

    def fill(file: int) -> None:
        held.append(file)
        os.write(file, b"half")
        raise error

    with pytest.raises(type(error)):
        here.enter("rows", "b", fill)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held[0])
    assert files(here) == {"client-a"}
    other.leave()
    assert not os.path.exists(here.folder)


def test_a_folder_goes_with_one_who_could_not_enter(here: Neighbourhood) -> None:
    def fill(file: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        here.enter("rows", "b", fill)
    assert not os.path.exists(here.folder)


# --- processes that end ------------------------------------------------------------------------


def test_who_is_killed_is_gone_and_his_file_is_taken_away(
    here: Neighbourhood, memory: Path
) -> None:
    mine = here.enter("client", "b")
    with program(memory, STAYS) as (process, said):
        assert said == "there"
        assert names(here) == {"a", "b"}
        process.kill()
        process.wait(60)
    assert files(here) == {"client-a", "client-b"}
    assert names(here) == {"b"}
    assert files(here) == {"client-b"}
    mine.leave()


def test_who_looks_for_others_leaves_the_dead_of_another_kind(
    here: Neighbourhood, memory: Path
) -> None:
    with program(memory, STAYS) as (process, _):
        process.kill()
        process.wait(60)
    assert names(here, "rows") == set()
    assert files(here) == {"client-a"}


def test_who_is_stopped_is_still_there(here: Neighbourhood, memory: Path) -> None:
    with program(memory, STAYS) as (process, _):
        freeze(process.pid)
        for _ in range(3):
            assert names(here) == {"a"}
        process.send_signal(signal.SIGCONT)
        process.communicate(timeout=60)
    assert not os.path.exists(here.folder)  # who ends has left


def test_a_child_that_ends_takes_nothing_of_its_parents(here: Neighbourhood, memory: Path) -> None:
    body = (
        "child = os.fork()\nif child == 0:\n    sys.exit(0)\nassert os.waitpid(child, 0)[1] == 0\n"
    )
    with program(memory, body + STAYS) as (process, said):
        assert said == "there"
        assert names(here) == {"a"}
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert not os.path.exists(here.folder)


@contextmanager
def parent(memory: Path, in_child: str, in_parent: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process with a child, which lives on."""
    body = f"""
child = os.fork()
if child == 0:
    {in_child or "pass"}
    os.write(1, b"%d\\n" % os.getpid())
    os.close(1)
    time.sleep(600)
    os._exit(1)
{in_parent}
sys.stdin.read()
"""
    with program(memory, body) as (process, said):
        child = psutil.Process(int(said))
        try:
            yield process
            assert child.is_running()
        finally:
            child.kill()


def test_a_child_that_left_holds_nothing_of_its_parents(here: Neighbourhood, memory: Path) -> None:
    with parent(memory, "membership.leave()") as process:
        assert names(here) == {"a"}
        process.kill()
        process.wait(60)
        assert names(here) == set()
        assert files(here) == set()


def test_a_child_keeps_nobody_there_who_left(here: Neighbourhood, memory: Path) -> None:
    with parent(memory, "", "membership.leave()") as process:
        until(lambda: not os.path.exists(here.folder))
        assert process.poll() is None
        assert names(here) == set()


# --- pipes -------------------------------------------------------------------------------------


class Pipe:
    """A pipe that one is told by: its end stays open when one has entered."""

    def __init__(self, here: Neighbourhood, name: str) -> None:
        self.seen = list[set[str]]()
        self._here = here
        self.membership = here.enter("notices", name, self._take, is_pipe=True)

    def _take(self, pipe: int) -> None:
        self.seen.append(names(self._here, "notices"))
        self.end = os.dup(pipe)

    def leave(self) -> None:
        self.membership.leave()
        os.close(self.end)


def tell(here: Neighbourhood, name: str, data: bytes) -> None:
    pipe = os.open(here.path("notices", name), os.O_WRONLY | os.O_NONBLOCK)
    try:
        assert os.write(pipe, data) == len(data)
    finally:
        os.close(pipe)


def test_a_pipe_is_there_until_its_reader_leaves(here: Neighbourhood) -> None:
    before = os.umask(0)
    try:
        mine = Pipe(here, "a")
    finally:
        os.umask(before)
    assert mine.seen == [set()]  # not before it is taken
    (path,) = here.look("notices").values()
    assert path == here.path("notices", "a") == f"{here.folder}/notices-a"
    assert stat.S_ISFIFO(os.lstat(path).st_mode)
    assert mode_of(path) == 0o600
    there = [mine.membership.is_there]
    for number in range(3):
        tell(here, "a", b"%d" % number)
        assert os.read(mine.end, 100) == b"%d" % number
    mine.leave()
    assert [*there, mine.membership.is_there] == [True, False]
    assert here.look("notices") == {}
    assert not os.path.exists(here.folder)


def test_a_pipe_is_held_by_a_lock(here: Neighbourhood) -> None:
    mine = Pipe(here, "a")
    path = here.path("notices", "a")
    other = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    for how in (fcntl.LOCK_SH, fcntl.LOCK_EX):
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, how | fcntl.LOCK_NB)
    for _ in range(3):
        Neighbourhood("q").enter("client", "b").leave()  # who comes looks at all there is
        assert names(here, "notices") == {"a"}
    tell(here, "a", b"told")
    assert os.read(mine.end, 100) == b"told"
    mine.leave()
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_a_pipe_and_a_file_of_one_client_are_two(here: Neighbourhood) -> None:
    pipe = Pipe(here, "a")
    file = here.enter("client", "a", lambda file: os.write(file, b"list"))
    assert here.look("client") == {"a": f"{here.folder}/client-a"}
    assert here.look("notices") == {"a": f"{here.folder}/notices-a"}
    assert Path(here.path("client", "a")).read_bytes() == b"list"
    tell(here, "a", b"told")
    assert os.read(pipe.end, 100) == b"told"
    file.leave()
    assert names(here) == set()
    assert names(here, "notices") == {"a"}
    assert pipe.membership.is_there
    pipe.leave()
    assert not os.path.exists(here.folder)


def test_a_pipe_that_nobody_took_is_no_more(here: Neighbourhood) -> None:
    other, held = here.enter("client", "a"), list[int]()

    def take(pipe: int) -> None:
        held.append(pipe)
        raise OSError(errno.EMFILE, "too many")

    with pytest.raises(OSError, match="too many"):
        here.enter("notices", "b", take, is_pipe=True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held[0])
    assert files(here) == {"client-a"}
    other.leave()
    assert not os.path.exists(here.folder)


def test_who_entered_by_a_pipe_that_nobody_reads_is_there(here: Neighbourhood) -> None:
    mine = here.enter("notices", "a", is_pipe=True)
    assert names(here, "notices") == {"a"}
    mine.leave()
    assert not os.path.exists(here.folder)


BOTH = """
ends = []
told = neighbours.Neighbourhood("p").enter(
    "notices", "a", lambda pipe: ends.append(os.dup(pipe)), is_pipe=True
)
"""


def test_the_pipe_of_one_who_is_killed_is_taken_away(here: Neighbourhood, memory: Path) -> None:
    with program(memory, BOTH + STAYS) as (process, said):
        assert said == "there"
        assert files(here) == {"client-a", "notices-a"}
        assert names(here) == names(here, "notices") == {"a"}
        tell(here, "a", b"told")
        process.kill()
        process.wait(60)
    assert names(here) == set()
    assert files(here) == {"notices-a"}
    Neighbourhood("q").enter("client", "b").leave()  # whoever comes, to whatever pool
    assert not os.path.exists(here.folder)


def test_a_pipe_of_the_dead_is_found_no_more_though_somebody_tells(
    here: Neighbourhood, memory: Path
) -> None:
    with program(memory, BOTH + STAYS) as (process, _):
        worker = os.open(here.path("notices", "a"), os.O_WRONLY | os.O_NONBLOCK)
        process.kill()
        process.wait(60)
    try:
        with pytest.raises(BrokenPipeError):
            os.write(worker, b"told")
        assert names(here, "notices") == set()
        assert files(here) == {"client-a"}
    finally:
        os.close(worker)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_pipe_goes_with_its_process_whatever_was_forked(
    here: Neighbourhood, memory: Path, keeps: bool
) -> None:
    in_child = "pass" if keeps else "os.close(ends[0])"
    body = BOTH + f"child = os.fork()\nif child == 0:\n    {in_child}\n"
    body += '    os.write(1, b"%d\\n" % os.getpid())\n    time.sleep(600)\n    os._exit(1)\n'
    with program(memory, body + "sys.stdin.read()\n") as (process, said):
        child = psutil.Process(int(said))
        try:
            worker = os.open(here.path("notices", "a"), os.O_WRONLY | os.O_NONBLOCK)
            assert names(here) == names(here, "notices") == {"a"}
            process.kill()
            process.wait(60)
            assert child.is_running()
            assert child.status() != psutil.STATUS_ZOMBIE
            if not keeps:
                with pytest.raises(BrokenPipeError):  # the child has no end of it
                    os.write(worker, b"told")
            os.close(worker)
            assert names(here) == names(here, "notices") == set()
        finally:
            child.kill()


def test_a_child_that_ends_takes_no_pipe_of_its_parents(here: Neighbourhood, memory: Path) -> None:
    body = (
        "child = os.fork()\nif child == 0:\n    sys.exit(0)\nassert not os.waitpid(child, 0)[1]\n"
    )
    with program(memory, BOTH + body + STAYS) as (process, said):
        assert said == "there"
        assert names(here) == names(here, "notices") == {"a"}
        tell(here, "a", b"told")
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert not os.path.exists(here.folder)


def test_drafts_of_pipes_are_taken_away_after_a_minute(here: Neighbourhood) -> None:
    mine, now = here.enter("client", "a"), time.time()
    for name, age in (("old", 70.0), ("fresh", 50.0)):
        os.mkfifo(f"{here.folder}/.{name}", 0o600)
        os.utime(f"{here.folder}/.{name}", (now - age, now - age))
    Neighbourhood("q").enter("client", "b").leave()  # it waits for nobody who writes
    assert files(here) == {"client-a", ".fresh"}
    os.unlink(f"{here.folder}/.fresh")
    mine.leave()


def test_a_pipe_that_cannot_be_opened_is_no_more(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, usual = here.enter("client", "a"), os.open

    def full(path: str, *arguments: int) -> int:
        if str(path).startswith(f"{here.folder}/."):
            raise OSError(errno.EMFILE, "too many")
        return usual(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        with pytest.raises(OSError, match="too many"):
            here.enter("notices", "a", is_pipe=True)
    assert files(here) == {"client-a"}
    other.leave()


def test_a_folder_goes_with_one_who_gets_no_pipe(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, *arguments: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkfifo", full)
        with pytest.raises(OSError, match="full"):
            here.enter("notices", "a", is_pipe=True)
    assert not os.path.exists(here.folder)


# --- drafts ------------------------------------------------------------------------------------


def test_drafts_of_the_dead_are_taken_away_after_a_minute(here: Neighbourhood) -> None:
    mine = here.enter("client", "a")
    now = time.time()
    held = os.open(f"{here.folder}/.held", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    for name, age in (("old", 70.0), ("fresh", 50.0), ("held", 70.0)):
        path = Path(here.folder, f".{name}")
        path.touch()
        os.utime(path, (now - age, now - age))
    other = Neighbourhood("q")
    other.enter("rows", "b").leave()  # whoever comes, to whatever pool
    assert files(here) == {"client-a", ".fresh", ".held"}
    os.close(held)
    other.enter("client", "b").leave()
    assert files(here) == {"client-a", ".fresh"}
    os.unlink(f"{here.folder}/.fresh")
    mine.leave()


def test_who_comes_takes_away_what_all_pools_dead_left(here: Neighbourhood, memory: Path) -> None:
    with program(memory, STAYS) as (process, _):
        os.rename(f"{here.folder}/client-a", f"{here.folder}/rows-a")
        Neighbourhood("q").enter("client", "b").leave()
        assert files(here) == {"rows-a"}
        process.kill()
        process.wait(60)
    Neighbourhood("q").enter("client", "b").leave()
    assert not os.path.exists(here.folder)


def test_who_looks_at_a_fresh_draft_takes_no_lock_of_it(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He may be frozen at any moment, and whose it is would wait, or not get in."""
    mine, locked = here.enter("client", "a"), []
    Path(here.folder, ".fresh").touch()
    monkeypatch.setattr(
        fcntl, "flock", lambda file, _: locked.append(os.readlink(f"/proc/self/fd/{file}"))
    )
    assert not neighbours._is_left(f"{here.folder}/.fresh")
    assert not locked
    os.utime(f"{here.folder}/.fresh", (1.0, 1.0))
    assert neighbours._is_left(f"{here.folder}/.fresh")
    assert locked == [f"{here.folder}/.fresh"]
    mine.leave()


# --- folders -----------------------------------------------------------------------------------


def test_nobody_else_sees_what_is_there(here: Neighbourhood) -> None:
    before = os.umask(0)
    try:
        mine = here.enter("client", "a")
    finally:
        os.umask(before)
    assert mode_of(here.folder) == mode_of(str(Path(here.folder).parent)) == 0o700
    assert mode_of(here.look("client")["a"]) == 0o600
    mine.leave()


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o770, 0o720, 0o702, 0o777, 0o1777])
def test_a_folder_open_to_others_is_refused(here: Neighbourhood, mode: int) -> None:
    mine = here.enter("client", "a")
    for folder in (here.folder, str(Path(here.folder).parent)):
        os.chmod(folder, mode)
        with pytest.raises(PermissionError, match=f"{folder} is another user's, or open to others"):
            here.enter("client", "b")
        assert names(here) == (set() if folder == here.folder else {"a"})
        os.chmod(folder, 0o700)
    assert files(here) == {"client-a"}
    assert names(here) == {"a"}
    mine.leave()


def test_a_folder_of_another_user_is_refused(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = here.enter("client", "a")
    monkeypatch.setattr(neighbours, "_user", lambda: os.geteuid() + 1)
    with pytest.raises(PermissionError, match="another user's"):
        here.enter("client", "b")
    assert names(here) == set()
    monkeypatch.undo()
    assert files(here) == {"client-a"}
    mine.leave()


@pytest.mark.parametrize("made", [os.symlink, lambda _, path: Path(path).touch()])
def test_what_is_no_folder_is_refused(
    here: Neighbourhood, memory: Path, made: Callable[[str, str], Any]
) -> None:
    elsewhere = memory / "elsewhere"
    elsewhere.mkdir(0o700)
    (elsewhere / "client-a").touch()
    Path(here.folder).parent.mkdir(0o700)
    made(str(elsewhere), here.folder)
    with pytest.raises(PermissionError):
        here.enter("client", "b")
    assert names(here) == set()
    assert os.listdir(elsewhere) == ["client-a"]


def test_what_leads_elsewhere_is_nobody(here: Neighbourhood, memory: Path) -> None:
    mine = here.enter("client", "a")
    with (memory / "file").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.symlink(memory / "file", f"{here.folder}/client-b")
        os.mkfifo(f"{here.folder}/client-c", 0o600)
        assert names(here) == {"a"}
    assert (memory / "file").exists()
    mine.leave()


def test_without_shared_memory_nobody_is_near(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "MEMORY", f"{memory}/nowhere")
    nowhere = Neighbourhood("p")
    with pytest.raises(FileNotFoundError, match=f"no {memory}/nowhere"):
        nowhere.enter("client", "a")
    assert names(nowhere) == set()
    assert Neighbours(nowhere, "client").look() == {}
    assert os.listdir(memory) == []


def test_without_locks_nobody_is_near(
    here: Neighbourhood, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "fcntl", None)
    with pytest.raises(FileNotFoundError):
        here.enter("client", "a")
    assert names(here) == set()
    assert os.listdir(memory) == []


# --- coming while the last one goes ------------------------------------------------------------


def test_the_folder_goes_with_the_last_one(here: Neighbourhood) -> None:
    mine = [here.enter("client", "a"), here.enter("rows", "b"), here.enter("client", "c")]
    while mine:
        assert len(files(here)) == len(mine)
        mine.pop().leave()
    assert not os.path.exists(here.folder)
    here.enter("client", "a").leave()  # and comes with the next one
    assert not os.path.exists(here.folder)


@contextmanager
def folder_goes(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch, name: str, times: int
) -> Iterator[list[str]]:
    """The folder is taken away so many times: when this function of the module is called."""
    of, _, attribute = name.rpartition(".")
    module = getattr(neighbours, of) if of else neighbours
    usual, gone = getattr(module, attribute), list[str]()

    def called(*arguments: Any) -> Any:
        if len(gone) < times and arguments in ((here.folder,), (8,)):
            os.rmdir(here.folder)
            gone.append(here.folder)
        return usual(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, attribute, called)
        yield gone


WHEN = [
    pytest.param("secrets.token_hex", id="before the draft"),
    pytest.param("_is_ours", id="before a look at it"),
]


@pytest.mark.parametrize("name", WHEN)
@pytest.mark.parametrize("times", [1, 2])
def test_who_comes_as_the_last_one_goes_gets_in(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch, name: str, times: int
) -> None:
    with folder_goes(here, monkeypatch, name, times) as gone:
        mine = here.enter("client", "a")
    assert len(gone) == times
    assert names(here) == {"a"}
    mine.leave()


def test_a_folder_that_always_goes_is_given_up(
    here: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        folder_goes(here, monkeypatch, "secrets.token_hex", 10_000) as gone,
        pytest.raises(FileNotFoundError),
    ):
        here.enter("client", "a")
    assert 2 < len(gone) < 10_000


def test_many_come_and_go_at_once(here: Neighbourhood) -> None:
    wrong: list[object] = []

    def come_and_go(number: int) -> None:
        for n in range(500):
            name = f"{number}-{n}"
            try:
                mine = here.enter("client", name)
            except OSError as error:
                wrong.append(error)
                continue
            if name not in here.look("client"):
                wrong.append(name)
            mine.leave()
            if name in here.look("client"):
                wrong.append(name)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=come_and_go, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
    assert not os.path.exists(here.folder)


# --- looking now and then ----------------------------------------------------------------------


class Clock:
    """The module's `time`, held by a test."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.folder_ns = 0
        """What the clock says that files have their times of."""
        self.stands_still_ns = 0
        """How long who has looked at that clock does nothing."""

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        self.folder_ns, now = self.folder_ns + self.stands_still_ns, self.folder_ns
        return now

    def time(self) -> float:
        return time.time()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(neighbours, "time", clock)
    return clock


class Counted(Neighbourhood):
    """It counts how often the folder is read."""

    looks = 0

    def look(self, kind: Kind) -> dict[str, str]:
        self.looks += 1
        return super().look(kind)


def changed_ns(here: Neighbourhood) -> int:
    return os.stat(here.folder).st_mtime_ns


def settle(here: Neighbourhood, clock: Clock) -> None:
    """As if the folder had last changed a second ago, and not when it was before."""
    at = changed_ns(here) - 10**12
    os.utime(here.folder, ns=(at, at))
    clock.folder_ns = at + 10**9


def test_the_same_is_found_as_long_as_nothing_changes(clock: Clock) -> None:
    here = Counted("p")
    mine, others = here.enter("client", "a"), here.enter("rows", "b")
    near = Neighbours(here, "client")
    settle(here, clock)
    found = near.look()
    assert found == {"a": f"{here.folder}/client-a"}
    for _ in range(10):
        assert near.look() is found
    assert here.looks == 1
    others.leave()  # the folder has changed, but not who is looked for
    settle(here, clock)
    for _ in range(10):
        assert near.look() is found
    assert here.looks == 2
    clock.now += LOOK_EVERY + 1
    for _ in range(10):
        assert near.look() is found
    assert here.looks == 3
    mine.leave()
    assert near.look() == {}
    assert found == {"a": f"{here.folder}/client-a"}  # who has it may be in the middle of it


@pytest.mark.parametrize("stands_still", [0, 10**9])
def test_who_comes_within_the_grain_of_the_clock_is_heard_of_at_once(
    clock: Clock, stands_still: int
) -> None:
    here = Counted("p")
    mine = [here.enter("client", "a")]
    near = Neighbours(here, "client")
    at = changed_ns(here)
    clock.folder_ns, clock.stands_still_ns = at + 10**6 - stands_still, stands_still
    found = near.look()
    assert set(found) == {"a"}
    clock.folder_ns, clock.stands_still_ns = at + 10**6, 0
    mine.append(here.enter("client", "b"))
    os.utime(here.folder, ns=(at, at))
    assert set(near.look()) == {"a", "b"}
    assert set(found) == {"a"}
    clock.folder_ns = at + 10**9  # from now on another time would be another
    found = near.look()
    assert here.looks == 3
    assert near.look() is found
    assert here.looks == 3
    for each in mine:
        each.leave()


def test_a_clock_that_was_set_back_hides_nobody_and_costs_no_looks(clock: Clock) -> None:
    here = Counted("p")
    mine = [here.enter("client", "a")]
    near = Neighbours(here, "client")
    at = changed_ns(here)
    clock.folder_ns = at - 3600 * 10**9
    assert set(near.look()) == {"a"}
    assert set(near.look()) == {"a"}
    assert here.looks == 1
    mine.append(here.enter("client", "b"))
    os.utime(here.folder, ns=(clock.folder_ns, clock.folder_ns))
    assert set(near.look()) == {"a", "b"}
    for each in mine:
        each.leave()


def test_who_comes_during_a_slow_look_is_heard_of_at_once(clock: Clock) -> None:
    mine = list[Membership]()

    class Slow(Neighbourhood):
        def look(self, kind: Kind) -> dict[str, str]:
            found = super().look(kind)
            if not mine[1:]:
                mine.append(self.enter("client", "b"))
                os.utime(self.folder, ns=(at, at))  # the clock has not ticked yet
                clock.folder_ns += 10**9  # and then the thread sleeps
            return found

    here = Slow("p")
    mine.append(here.enter("client", "a"))
    at = changed_ns(here)
    clock.folder_ns = at + 10**6
    near = Neighbours(here, "client")
    assert set(near.look()) == {"a"}
    assert set(near.look()) == {"a", "b"}


def test_the_dead_are_noticed_after_a_while(here: Neighbourhood, clock: Clock) -> None:
    mine = here.enter("client", "a")
    path = f"{here.folder}/client-b"
    held = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    near = Neighbours(here, "client")
    settle(here, clock)
    found = near.look()
    assert set(found) == {"a", "b"}
    os.close(held)  # which changes nothing in the folder
    clock.now += LOOK_EVERY * 0.9
    assert near.look() is found
    clock.now += LOOK_EVERY * 0.2
    assert set(near.look()) == {"a"}
    assert not os.path.exists(path)
    mine.leave()


def test_a_folder_that_comes_and_goes_is_heard_of(here: Neighbourhood, clock: Clock) -> None:
    near = Neighbours(here, "client")
    clock.folder_ns = time.time_ns()
    nobody = near.look()
    assert nobody == {}
    assert near.look() is nobody
    for _ in range(3):
        mine = here.enter("client", "a")
        settle(here, clock)
        assert set(near.look()) == {"a"}
        mine.leave()
        assert near.look() == {}


def test_several_threads_find_who_comes(here: Neighbourhood) -> None:
    near, wrong, ended = Neighbours(here, "client"), list[object](), threading.Event()

    def look() -> None:
        while not ended.is_set():
            found = near.look()
            if any(path != f"{here.folder}/client-{name}" for name, path in found.items()):
                wrong.append(found)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        here.enter("client", "first").leave()
        stays = here.enter("client", "stays")
        for number in range(50):
            mine = here.enter("client", str(number))
            right = {"stays", str(number)}
            until(lambda right=right: set(near.look()) == right, every=0)  # type: ignore[misc]
            mine.leave()
            until(lambda: set(near.look()) == {"stays"}, every=0)
        stays.leave()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert near.look() == {}
