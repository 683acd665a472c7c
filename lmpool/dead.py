"""``lmpool dead``: the jobs that were given up, and what to do about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from rich.console import Console
from rich.markup import escape

from lmpool.commands import Entry, Server
from lmpool.errors import JobFormatError, LmpoolError, PromptError, PromptFailed
from lmpool.keys import LaneKeys
from lmpool.producer import NumpyRows, PooledLM, connect
from lmpool.producer.asking import ask_of_job
from lmpool.server import explained, open_server
from lmpool.wire import Job, unpack_job

SHOWN_TOKENS: Final = 8


@dataclass(frozen=True)
class DeadJob:
    """One entry of a stream of the dead. `job` is None for what was no job."""

    lane: LaneKeys
    entry: str
    name: str
    reason: str
    deliveries: str
    worker: str
    data: bytes
    job: Job | None

    @property
    def when(self) -> str:
        """The time at which it was given up, UTC, to the second."""
        moment = datetime.fromtimestamp(int(self.entry.partition("-")[0]) / 1000, UTC)
        return moment.strftime("%Y-%m-%d %H:%M:%S")

    def prompt(self, most: int | None = None) -> str:
        """Its token ids, the first `most` of them."""
        if self.job is None:
            return f"no job: {len(self.data)} bytes"
        ids = self.job.token_ids()
        shown = ids if most is None else ids[:most]
        more = f" ... ({len(ids)})" if len(shown) < len(ids) else ""
        return " ".join(map(str, shown)) + more


class _Dead:
    """The pool's dead, on a connection that ends with the block."""

    def __init__(self, url: str | None, pool: str | None) -> None:
        self._lm = connect(url, pool, framework="numpy")

    def __enter__(self) -> _Dead:
        try:
            self._lm.info  # noqa: B018 - connects
        except BaseException:
            self._lm.close()
            raise
        self._server = open_server(self._lm.url, name="lmpool-dead")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._server.connection_pool.disconnect()
        self._lm.close()

    @property
    def client(self) -> PooledLM[NumpyRows]:
        return self._lm

    def all(self) -> list[DeadJob]:
        with explained(self._lm.url):
            lanes = self._lm.lanes
            return [
                _read(lane, entry, f"{number}/" if len(lanes) > 1 else "")
                for number, lane in enumerate(lanes)
                for entry in _entries(self._server, lane.dead)
            ]

    def chosen(self, ids: Sequence[str] | None, every: bool) -> list[DeadJob]:
        """The entries of those names; an error names one that there is not."""
        if bool(ids) == every:
            raise PromptError("name entries, as lmpool dead list shows them, or write --all")
        found = {dead.name: dead for dead in self.all()}
        if every:
            return list(found.values())
        for name in ids or ():
            if name not in found:
                raise PromptError(f"no entry {name!r} among the dead: see lmpool dead list")
        return [found[name] for name in ids or ()]

    def drop(self, dead: DeadJob) -> None:
        with explained(self._lm.url):
            self._server.xdel(dead.lane.dead, dead.entry)


def _entries(server: Server, stream: str) -> Iterator[Entry]:
    start = "-"
    while entries := server.xrange(stream, start, "+", 500):
        yield from entries
        start = f"({entries[-1][0].decode()}"


def _read(lane: LaneKeys, entry: Entry, prefix: str) -> DeadJob:
    fields = {name.decode(): value for name, value in entry[1].items()}
    data = fields.get("job", b"")
    try:
        job = unpack_job(data)
    except JobFormatError:
        job = None
    texts = {name: value.decode("utf-8", "replace") for name, value in fields.items()}
    name = entry[0].decode()
    return DeadJob(
        lane,
        name,
        prefix + name,
        texts.get("reason", ""),
        texts.get("deliveries", "0"),
        texts.get("worker", ""),
        data,
        job,
    )


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


def list_dead(*, url: str | None, pool: str | None) -> None:
    """Print the entries, one a line."""
    with _Dead(url, pool) as dead:
        found = dead.all()
    console = _console()
    for job in found:
        console.print(
            f"[bold]{job.name}[/]  {job.when} UTC  {job.deliveries} deliveries, last to "
            f"{escape(job.worker or '?')}  prompt {job.prompt(SHOWN_TOKENS)}"
        )
    if not found:
        console.print("no job was given up")


def show_dead(ids: Sequence[str], every: bool, *, url: str | None, pool: str | None) -> None:
    """Print everything about entries."""
    with _Dead(url, pool) as dead:
        found = dead.chosen(ids, every)
    console = _console()
    for job in found:
        console.print(f"[bold]{job.name}[/]  {job.when} UTC, {job.deliveries} deliveries")
        console.print(f"  reason   {escape(job.reason)}")
        console.print(f"  worker   {escape(job.worker)}")
        if job.job is not None:
            adapter = f", adapter {job.job.adapter}" if job.job.adapter else ""
            console.print(f"  wanted   {job.job.op}{escape(adapter)}")
        console.print(f"  prompt   {job.prompt()}")


def retry_dead(
    ids: Sequence[str], every: bool, timeout: float, *, url: str | None, pool: str | None
) -> int:
    """Ask for entries again, as a client does; 1 if any was not answered, else 0.

    What is answered is dropped, and what is given up again has a new entry.
    """
    console = _console()
    failed = 0
    with _Dead(url, pool) as dead:
        for job in dead.chosen(ids, every):
            try:
                if job.job is None:
                    raise PromptError("this entry is no job: drop it")
                dead.client.ask_again(ask_of_job(job.job), timeout=timeout)
            except PromptFailed as error:
                failed += 1
                console.print(f"[red]{job.name}[/]  {escape(str(error))}")
                if "given up" not in str(error):
                    continue  # it was not among those whose workers die
            except LmpoolError as error:
                failed += 1
                console.print(f"[red]{job.name}[/]  {escape(str(error))}")
                continue
            else:
                console.print(f"[green]{job.name}[/]  answered")
            dead.drop(job)
    return 1 if failed else 0


def drop_dead(ids: Sequence[str], every: bool, *, url: str | None, pool: str | None) -> None:
    """Forget entries."""
    with _Dead(url, pool) as dead:
        found = dead.chosen(ids, every)
        for job in found:
            dead.drop(job)
    _console().print(f"{len(found)} dropped")
