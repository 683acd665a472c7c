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
from typing import Final

from lmpool.commands import Entry, Server
from lmpool.errors import JobFormatError, PromptError, PromptFailed
from lmpool.keys import ShardKeys
from lmpool.producer import PooledLM
from lmpool.server import understood
from lmpool.servers import Servers
from lmpool.wants import Answer
from lmpool.wire import Job, unpack_job

_LATEST_MS: Final = int(datetime(9999, 1, 1, tzinfo=UTC).timestamp() * 1000)

__all__ = ["DeadLetter", "drop", "read", "retry"]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One job that was given up."""

    name: str
    """Its entry's id, after the number of its shard and a slash where the pool has several."""
    shard: int
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
    came_from: str = ""
    """Of one that came from another shard, where it was given up: stream and entry."""
    stream: str = ""
    """The key of the stream where it was found."""

    @property
    def given_up(self) -> datetime:
        """When, by the server's clock, in UTC."""
        ms = _whole(_origin(self).rpartition("/")[2].partition("-")[0])
        return datetime.fromtimestamp(min(ms, _LATEST_MS) / 1000, UTC)  # may be written by hand


def read(lm: PooledLM, *, latest: int | None = None) -> list[DeadLetter]:
    """Every job that was given up and is kept, or the `latest` so many of each shard.

    The oldest of each shard come first.
    """
    shards = lm.shards
    with _servers(lm) as servers:
        return [
            _letter(shard, entry, f"{shard.number}/" if len(shards) > 1 else "")
            for shard in shards
            for entry in _entries(servers.for_shard(shard), shard.dead, latest)
        ]


def retry(lm: PooledLM, letter: DeadLetter, *, timeout: float | None = None) -> Answer:
    """Ask for it again: whoever asks the same meanwhile gets the answer, too.

    Dropped once it is answered, and when it is given up again, which makes a new one. Raises
    `PromptError` for what is no job, else what asking raises: `PromptFailed`, `PoolTimeout`, ...
    """
    if letter.job is None:
        raise PromptError("this entry is no job: drop it")
    try:
        answer = lm.ask_again(letter.job, timeout=timeout)
    except PromptFailed as error:
        # Else it failed by itself, its worker lives, and nothing new is kept of it.
        if "given up" in str(error):
            drop(lm, [letter])
        raise
    drop(lm, [letter])
    return answer


def drop(lm: PooledLM, letters: Iterable[DeadLetter]) -> int:
    """Forget them, also where they came along with a pool that has moved. Returns how many there
    were still."""
    shards = {shard.dead: shard for shard in lm.shards}
    with _servers(lm) as servers:

        def is_dropped(letter: DeadLetter) -> bool:
            shard = shards.get(letter.stream)
            if shard is None:
                return False
            return bool(servers.for_shard(shard).xdel(letter.stream, letter.entry))

        given = list(letters)
        others = [letter for letter in given if not is_dropped(letter)]
        count = len(given) - len(others)
        moved = {_origin(letter) for letter in others}
        for letter in read(lm) if moved else ():  # under another name
            count += _origin(letter) in moved and is_dropped(letter)
    return count


def _origin(letter: DeadLetter) -> str:
    """Where it was given up, which tells it from all others wherever it lies."""
    return letter.came_from or f"{letter.stream}/{letter.entry}"


@contextmanager
def _servers(lm: PooledLM) -> Iterator[Servers]:
    servers = Servers.of_url(lm.url, name="lmpool-dead-letters")
    try:
        with understood(lm.url):
            yield servers
    finally:
        servers.close()


def _entries(server: Server, stream: str, latest: int | None) -> Iterator[Entry]:
    if latest is not None:
        yield from reversed(server.xrevrange(stream, "+", "-", latest))
        return
    start = "-"
    while entries := server.xrange(stream, start, "+", 500):
        yield from entries
        start = f"({entries[-1][0].decode()}"


def _letter(shard: ShardKeys, entry: Entry, prefix: str) -> DeadLetter:
    fields = {name.decode("utf-8", "replace"): value for name, value in entry[1].items()}
    data = fields.get("job", b"")
    try:
        job = unpack_job(data)
    except JobFormatError:
        job = None
    texts = {name: value.decode("utf-8", "replace") for name, value in fields.items()}
    name = entry[0].decode()
    return DeadLetter(
        name=prefix + name,
        shard=shard.number,
        entry=name,
        reason=texts.get("reason", ""),
        deliveries=_whole(texts.get("deliveries", "")),
        worker=texts.get("worker", ""),
        data=data,
        job=job,
        came_from=texts.get("came_from", ""),
        stream=shard.dead,
    )


def _whole(text: str) -> int:
    """A number as the server's entries have it; 0 for what is none."""
    return int(text) if text.isdecimal() and len(text) < 19 else 0
