"""Jobs that were given up: what a pool keeps of them, asking for them again, forgetting them.

A job ends here after `max_deliveries`, or because it was none. Its callers got the error.

::

    from lmpool import dead_letters

    with lmpool.connect(pool="llama") as lm:
        for letter in dead_letters.read(lm):
            print(letter.name, letter.given_up, letter.reason)
            dead_letters.retry(lm, letter, timeout=60)

Every function blocks, and takes a connected `PooledLM`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from lmpool.commands import Entry, Server
from lmpool.errors import JobFormatError, PromptError, PromptFailed
from lmpool.producer import PooledLM
from lmpool.producer.asking import ask_of_job
from lmpool.server import explained, open_server
from lmpool.wire import Job, Row, unpack_job

__all__ = ["DeadLetter", "drop", "read", "retry"]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One job that was given up."""

    name: str
    """Its entry's id, after the number of its stream and a slash where the pool has several."""
    stream: str
    entry: str
    reason: str
    deliveries: int
    """How many workers it was given to; 0 for what was no job."""
    worker: str
    """The last of them."""
    data: bytes
    """The entry, as it was sent."""
    job: Job | None
    """What it says; None for what is no job."""

    @property
    def given_up(self) -> datetime:
        """When, by the server's clock, in UTC."""
        return datetime.fromtimestamp(int(self.entry.partition("-")[0]) / 1000, UTC)


def read(lm: PooledLM) -> list[DeadLetter]:
    """Every job that was given up and is kept, the oldest of each stream first."""
    streams = _streams(lm)
    with _connection(lm) as server:
        return [
            _letter(stream, entry, f"{number}/" if len(streams) > 1 else "")
            for number, stream in enumerate(streams)
            for entry in _entries(server, stream)
        ]


def retry(lm: PooledLM, letter: DeadLetter, *, timeout: float | None = None) -> Row:
    """Ask for it again: whoever asks the same meanwhile gets the row, too.

    Dropped once it is answered, and when it is given up again, which makes a new one. Raises
    `PromptError` for what is no job, else what asking raises: `PromptFailed`, `PoolTimeout`, ...
    """
    if letter.job is None:
        raise PromptError("this entry is no job: drop it")
    try:
        row = lm.ask_again(ask_of_job(letter.job), timeout=timeout)
    except PromptFailed as error:
        # Else it failed by itself, its worker lives, and nothing new is kept of it.
        if "given up" in str(error):
            drop(lm, [letter])
        raise
    drop(lm, [letter])
    return row


def drop(lm: PooledLM, letters: Iterable[DeadLetter]) -> int:
    """Forget them. Returns how many there were still."""
    with _connection(lm) as server:
        return sum(server.xdel(letter.stream, letter.entry) for letter in letters)


def _streams(lm: PooledLM) -> list[str]:
    return [lane.dead for lane in lm.lanes]


@contextmanager
def _connection(lm: PooledLM) -> Iterator[Server]:
    server = open_server(lm.url, name="lmpool-dead-letters")
    try:
        with explained(lm.url):
            yield server
    finally:
        server.close()
        server.connection_pool.disconnect()


def _entries(server: Server, stream: str) -> Iterator[Entry]:
    start = "-"
    while entries := server.xrange(stream, start, "+", 500):
        yield from entries
        start = f"({entries[-1][0].decode()}"


def _letter(stream: str, entry: Entry, prefix: str) -> DeadLetter:
    fields = {name.decode(): value for name, value in entry[1].items()}
    data = fields.get("job", b"")
    try:
        job = unpack_job(data)
    except JobFormatError:
        job = None
    texts = {name: value.decode("utf-8", "replace") for name, value in fields.items()}
    deliveries = texts.get("deliveries", "")
    name = entry[0].decode()
    return DeadLetter(
        name=prefix + name,
        stream=stream,
        entry=name,
        reason=texts.get("reason", ""),
        deliveries=int(deliveries) if deliveries.isdecimal() else 0,
        worker=texts.get("worker", ""),
        data=data,
        job=job,
    )
