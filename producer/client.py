"""The client's side of the protocol: claim, collect, look after, withdraw.

Two threads, each with a connection of its own: the sender, which makes every request, and the
collector, which blocks on the client's reply stream. Callers, in any thread or event loop, leave
their jobs in the flight table and are woken when the answers are there; who asks little while the
sender rests sends the claim on its connection, for it to read the answer, and asks for the result
behind the collector's blocking read. A call that is the only one does all of it by itself, in its
thread or event loop, on a third connection. The connections are synchronous because rows are large:
a blocking read costs half of what an event loop's does.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from lmpool.connections import BEHIND_MOST
from lmpool.errors import LmpoolError, PromptFailed, UnknownPool
from lmpool.interrupts import frees
from lmpool.keys import PoolKeys, Priority, ShardKeys
from lmpool.liveness import any_alive, as_served
from lmpool.model_info import ModelInfo
from lmpool.producer.alone import Alone
from lmpool.producer.cache import AnswerCache
from lmpool.producer.collector import Collector
from lmpool.producer.deadline import Deadline
from lmpool.producer.flights import Flight, Statistics
from lmpool.producer.near_answers import NearAnswers
from lmpool.producer.pending import PendingCall, wake
from lmpool.producer.replacement import lies_elsewhere, look_at, replaced
from lmpool.producer.sender import Sender
from lmpool.producer.session import Session, closed
from lmpool.producer.waits import Future
from lmpool.rows import EncodedRow
from lmpool.server import get_string, greet
from lmpool.server_url import mask_url, worker_command
from lmpool.servers import Servers
from lmpool.settings import ClientOptions
from lmpool.wants import Answer, Digest, OfRow
from lmpool.wire import Job

_CLIENTS: weakref.WeakSet[Client] = weakref.WeakSet()
T = TypeVar("T")

FAREWELL: Final = 3.0
"""Seconds for which a client that closes waits for the server, unless it is told otherwise."""
CUT_WAIT: Final = 0.2
"""Seconds in which a thread ends whose connection was cut."""


class Client:
    """One client of one pool, for all threads of a process."""

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self.no_answer = f"no answer from {mask_url(options.url)}"
        """What was missing when the server was waited for in vain."""
        self.cache = AnswerCache(options.cache_bytes)
        self._begin(Statistics())
        _CLIENTS.add(self)

    def _begin(self, statistics: Statistics) -> None:
        session = self._session = Session(self.options, self.cache, statistics)
        near = NearAnswers(session)
        session.near.hear, session.near.help = near.hear, near.help
        self._alone = Alone(session, near.knows)
        session.on_forget = self._alone.forget
        self._threads: list[threading.Thread] = []
        self._cut: Callable[[], None] = lambda: None
        self._claim_ahead: Callable[[], Sequence[Flight]] = lambda: ()
        self._may_go_ahead: Callable[[], Priority | None] = lambda: None
        self._get_behind: Callable[[Iterable[Flight]], None] = lambda flights: None
        self._loading: Future[ModelInfo] | None = None

    def after_fork(self) -> None:
        """In a forked child: threads, locks and connections of its own."""
        before = self._session
        self.cache.unlock()
        before.near.after_fork()
        self._alone.after_fork()
        self._begin(before.table.statistics)
        self._session.closed = before.closed
        if before.info is not None:
            self._session.join(before.info)
            self._session.confirmed = before.confirmed

    @property
    def keys(self) -> PoolKeys:
        """The pool's keys."""
        return self._session.keys

    @property
    def shards(self) -> tuple[ShardKeys, ...]:
        """The keys of the pool's shards, once the model info is known."""
        return self._session.shards

    @property
    def info(self) -> ModelInfo | None:
        """What the pool serves, once it is known."""
        return self._session.info

    @property
    def statistics(self) -> dict[str, int]:
        """This client's counters."""
        return self._session.read_statistics()

    @frees("_session.lock")
    def run(self, function: Callable[[Servers], T]) -> Future[T]:
        """Run `function` with the sender's connections, on the sender's thread."""
        future: Future[T] = Future()
        session = self._session
        self._start()
        with session.for_caller():
            if session.closed:
                raise closed()
            session.tasks.append((function, future))
            session.work.notify_all()
        return future

    def load_info(self) -> Future[ModelInfo]:
        """Read the pool's model info, which every call needs first: once for all who ask now."""
        loading = self._loading
        if loading is None or loading.done():
            loading = self._loading = self.run(self._load_shared)
        return loading

    def _load_shared(self, servers: Servers) -> ModelInfo:
        try:
            return self._load_info(servers)
        finally:
            # It holds on to who waits, and to their loops: also to one that was closed.
            self._loading = None

    def any_worker(self) -> Future[bool]:
        """Whether the pool is known and has a worker alive."""

        def look(servers: Servers) -> bool:
            try:
                self._load_info(servers)
            except UnknownPool:
                return False
            self._follow(servers)
            shard = self.shards_now(servers)[0]
            return any_alive(servers.for_shard(shard), shard)

        return self.run(look)

    def shards_now(self, servers: Servers) -> tuple[ShardKeys, ...]:
        """The keys of the pool's shards as they are now, also for one who asks for nothing. On the
        sender's thread."""
        session = self._session
        key = session.keys.info
        if session.info is not None:
            found: list[bytes | None] = []
            alone = ShardKeys(key)  # it lies by itself, as if it were a shard
            servers.apart([alone], lambda server: found.append(get_string(server, key)))
            if found and found[0] is not None and lies_elsewhere(session, found[0]):
                look_at(session, servers, found[0])
        return session.shards

    def follow(self) -> Future[None]:
        """Look whether the pool was replaced, and move to the new one if that is asked for."""
        return self.run(self._follow)

    def _follow(self, servers: Servers) -> None:
        if self._session.info is not None and self.options.when_replaced == "follow":
            key = self._session.keys.info
            current = get_string(servers.for_key(key), key)
            if current is not None:
                look_at(self._session, servers, current)

    @frees("_session.lock")
    def submit(self, calls: Sequence[PendingCall], *, reads: bool = False) -> bool:
        """Take calls in. What the local cache has is there at once.

        Where who asks `reads`, which is for one call of one job, it may be for `read_alone`: that
        is returned.
        """
        self._start()
        answered = []
        now = time.monotonic()
        session = self._session
        with session.for_caller():
            if session.closed:
                raise closed()
            table = session.table
            looks = session.is_confirmed(now) and len(self.cache) > 0
            is_alone = reads and not table.flights
            claimed = False
            for call in calls:
                if call.done:
                    continue  # it ended in the turn it was made
                if (
                    call.info is not session.info
                    and call.info is not None
                    and not (session.info is not None and call.info.gives_the_same_as(session.info))
                ):
                    call.error = replaced(self.options, call.info)  # since it was made
                    answered.append(call)
                    continue
                jobs = call.jobs
                table.statistics.requests += len(jobs)
                is_woken = False
                for place, job in enumerate(jobs if looks else ()):
                    answer = self._cached(job)
                    if answer is not None:
                        is_woken |= call.take(place, answer)
                        table.statistics.local_hits += 1
                if call.left:
                    table.add(call, now)
                if is_woken or not call.left:
                    answered.append(call)
            if not is_alone:
                self._alone.has_company()
            if table.has_unsent():
                try:
                    if is_alone:
                        claimed = self._alone.claim(calls[0], self._may_go_ahead())
                    if not claimed:
                        sent = self._claim_ahead()
                        if len(table.flights) <= BEHIND_MOST:
                            self._get_behind(sent)
                finally:  # also where Ctrl-C came between
                    if not claimed:
                        session.work.notify_all()
        if answered:
            wake(answered)
        return claimed

    def pool_for(self, deadline: Deadline) -> str:
        """The pool in words, for who waited in vain: with what was last found to be wrong with it
        meanwhile, if anything was."""
        found = [*self._session.troubles.values()]
        seen, why = max(found, default=(0.0, ""))
        return f"pool {self.options.pool!r}{why if seen >= deadline.began else ''}"

    def read_alone(self, call: PendingCall, seconds: float | None) -> None:
        """Read the answer to what was claimed for this thread to read; see `Alone.read`."""
        self._alone.read(call, seconds)

    def read_in(self, loop: asyncio.AbstractEventLoop, call: PendingCall) -> None:
        """The same for a call that is awaited in the event loop of this thread."""
        self._alone.read_in(loop, call)

    @frees("_session.lock")
    def lookup(self, job: Job) -> Answer | None:
        """The answer from the local cache, counted as a request, or None, counted as nothing."""
        session = self._session
        if session.closed:
            raise closed()
        if not session.is_confirmed(time.monotonic()):
            return None
        answer = self._cached(job)
        if answer is not None:
            with session.for_caller():
                session.table.statistics.requests += 1
                session.table.statistics.local_hits += 1
        return answer

    def _cached(self, job: Job) -> Answer | None:
        """The local cache's answer; what it is not to keep is given out once."""
        return (self.cache.get if job.want.cached else self.cache.take)(job.digest)

    def reduce_rows(self, jobs: Sequence[Job], row_digest: Callable[[Job], Digest]) -> None:
        """Answer by rows of the local cache what follows from them, into that cache."""
        for job in jobs:
            if not isinstance(job.want, OfRow) or self.cache.peek(job.digest) is not None:
                continue
            digest = row_digest(job)
            row = self.cache.peek(digest)
            # Of numbers that lost precision on their way something else would follow.
            if isinstance(row, EncodedRow) and row.encoding != "f16":
                self.cache.touch(digest)
                with suppress(PromptFailed):  # which a worker can say as well
                    self.cache.put(job.digest, job.want.reduce(row.logprobs()))

    @frees("_session.lock")
    def forget(self, call: PendingCall) -> bool:
        """`call` waits no longer: jobs that nobody else wants are withdrawn.

        Returns whether it did wait.
        """
        session = self._session
        with session.lock:
            waited = session.forget(call)
            if session.table.withdrawn:
                session.work.notify_all()
        return waited

    def let_go(self, call: PendingCall) -> None:
        """`forget`, at once unless somebody holds the lock, who may be this very thread: for what
        ends with a loop, or when the garbage collector finds it."""
        session = self._session
        if session.is_interrupted:
            self.abandon(call)
            return
        taken: list[bool] = []
        try:
            # In one step: Ctrl-C that came between the lock and `taken` would leave it held.
            taken.extend(map(session.lock.acquire, (False,)))
            if taken[0]:
                session.forget(call)
                if session.table.withdrawn:
                    session.work.notify_all()
            else:
                self.abandon(call)
        finally:
            if taken and taken[0]:  # no call before it is released: behind one Ctrl-C may come
                session.lock.release()

    @frees("_session.lock")
    def fail(self, calls: Iterable[PendingCall], error: LmpoolError) -> None:
        """Calls end with an error, as far as they have not ended, however much of them was taken
        in: what nobody else wants of it is withdrawn."""
        session, ended = self._session, []
        with session.lock:
            for call in calls:
                if session.forget(call):
                    call.error = error
                ended.append(call)
            session.work.notify_all()
        wake(ended)

    def abandon(self, call: PendingCall) -> None:
        """`forget` soon, without waiting for a lock: for what the garbage collector ends."""
        self._session.abandoned.append(call)

    @frees("_session.lock")
    def withdraw_all(self) -> None:
        """Nobody waits any longer for anything asked so far."""
        session = self._session
        with session.for_caller():
            ended = session.fail_all(LmpoolError("withdrawn by reset_async_queries()"))
            session.work.notify_all()
        wake(ended)

    @frees("_session.lock")
    def close(self, timeout: float | None = None) -> None:
        """Withdraw what is waited for, end both threads, leave nothing on the server.

        One that has not answered after `timeout` seconds is left as it is: leases end there.
        """
        if timeout is None:
            timeout = min(FAREWELL, self.options.request_timeout or FAREWELL)
        until = time.monotonic() + timeout
        session = self._session
        with session.lock:  # each step, though all were taken before: Ctrl-C may have ended that
            session.closed = True
            session.closing.set()
            session.joined.set()
            ended = session.fail_all(closed())
            session.work.notify_all()  # after Ctrl-C there may be threads that nobody knows of
            session.counted.set()
            threads = list(self._threads)
        session.near.leave()
        wake(ended)
        threads = [thread for thread in threads if thread is not threading.current_thread()]
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            self._cut()
            for thread in threads:
                thread.join(CUT_WAIT)

    def close_soon(self, timeout: float | None = None) -> None:
        """`close` for a finalizer, which may run in a thread that holds a lock."""
        if self._session.is_interrupted or self._session.near.is_heard_here:
            threading.Thread(target=self.close, name="lmpool-close", daemon=True).start()
        else:
            self.close(timeout)

    @frees("_session.lock")
    def _start(self) -> None:
        session = self._session
        if self._threads:
            return
        with session.for_caller():
            if self._threads or session.closed:
                return
            if session.info is not None:  # in a fork, which knows it from its parent
                session.near.enter(self.options.pool, session.info)
            collector = Collector(session)
            collecting = self._thread("collector", collector.run)

            def farewell() -> None:
                collecting.join(timeout=2)
                if collecting.is_alive():
                    collector.cut()

            sender = Sender(session, self._alone, farewell)
            sending = self._thread("sender", sender.run)

            def cut() -> None:
                sender.cut()
                collector.cut()

            self._cut, self._claim_ahead = cut, sender.claim_ahead
            self._may_go_ahead = sender.may_go_ahead
            self._get_behind = collector.get_behind
            collecting.start()
            sending.start()
            self._threads = [sending, collecting]

    def _thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        name = f"lmpool-{name}-{self._session.id[:6]}"
        return threading.Thread(target=target, name=name, daemon=True)

    def _load_info(self, servers: Servers) -> ModelInfo:
        session, options = self._session, self.options
        if session.info is not None:  # two asked
            return session.info
        greet(servers.anywhere, options.url, session.clock)
        began = time.monotonic()
        found = get_string(servers.for_key(session.keys.info), session.keys.info)
        if found is None:
            raise UnknownPool(
                f"no pool {options.pool!r} on {mask_url(options.url)}: start a worker with "
                f"{worker_command(options.url, options.pool)}, or check the name"
            )
        info = as_served(servers, session.keys, ModelInfo.unpack(found))
        session.near.enter(options.pool, info)
        session.join(info)
        session.confirmed = began
        return info


def _after_fork() -> None:
    for client in list(_CLIENTS):
        client.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
