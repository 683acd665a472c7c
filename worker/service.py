"""A worker: its engine, its threads, its life from joining a pool to leaving it."""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

import redis.exceptions

from lmpool.address import Address
from lmpool.backends import load_engine
from lmpool.backends.engine import Engine
from lmpool.clock import ServerClock
from lmpool.commands import Server
from lmpool.diagnosis import (
    Facts,
    Finding,
    check_eviction,
    check_persistence,
    check_workers_rights,
)
from lmpool.errors import LmpoolError, ServerUnreachable, SettingsError
from lmpool.keys import PoolKeys, ShardKeys
from lmpool.liveness import LIFE_MS, any_alive
from lmpool.model_info import ModelInfo
from lmpool.neighbours import Neighbourhood
from lmpool.permissions import Command, control_commands, in_words, not_permitted, worker_commands
from lmpool.row_ring import SPARE
from lmpool.rows import ENTRY_BYTES, LARGE
from lmpool.server import ANSWER_TIMEOUT, explained, greet, is_wrong_type
from lmpool.server_url import mask_url, place_of
from lmpool.servers import Servers
from lmpool.settings import WorkerOptions
from lmpool.wants import Digester
from lmpool.worker.adapters import Adapters
from lmpool.worker.batching import Batcher
from lmpool.worker.carrying import enter, without
from lmpool.worker.dead_letters import DeadLetters
from lmpool.worker.engine_thread import EngineLoop, spawn
from lmpool.worker.heartbeat import ANSWER_WITHIN
from lmpool.worker.holding import release
from lmpool.worker.intake import IDLE_BLOCK_MS, Intake, create_groups
from lmpool.worker.laying import Laying
from lmpool.worker.membership import (
    batch_budget,
    join,
    model_info,
    publish_vocabulary,
    say_what_is_not_taken,
    usual_places,
)
from lmpool.worker.moving import Mover, left_on_the_way
from lmpool.worker.patience import patiently
from lmpool.worker.pieces import Tellings
from lmpool.worker.progress import StartProgress
from lmpool.worker.publishing import Publisher
from lmpool.worker.recovery import Recovery
from lmpool.worker.result_store import ResultStore
from lmpool.worker.seat import Seat
from lmpool.worker.status import WorkerStatus
from lmpool.worker.tally import Tally
from lmpool.worker.traces import BatchTraces
from lmpool.worker.watchdog import Watchdog, watched

logger = logging.getLogger(__name__)

T = TypeVar("T")

HUNG_WAIT: Final = 2.0
"""Seconds for which a worker that failed waits for its threads."""
READS_ON: Final = 0.1
"""Seconds after which a read that goes on, of a worker that leaves, has found no job."""
PUBLISH_PAUSE: Final = 10.0
"""Seconds after which a vocabulary that could not be put there again is tried once more: what packs
a large one keeps the engine waiting for a second."""
READS_FOR: Final = 3.0
"""Seconds for which a worker that moves waits for the last read where it was."""


class Service:
    """One worker of one pool.

    Threads with a connection of their own each: the intake reads jobs, the engine's thread
    computes, the publisher writes, the heartbeat beats, the recovery takes over the jobs of the
    dead; and the watchdog looks at the engine. `on_failure` is called once, from any of them, when
    the worker cannot go on.
    """

    _new_intake: ClassVar[type[Intake]] = Intake

    def __init__(self, options: WorkerOptions, on_failure: Callable[[], None]) -> None:
        self.options = options
        self.keys = PoolKeys(options.pool)
        self.consumer = consumer_name(options)
        self.status = WorkerStatus(
            {
                "id": self.consumer,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "engine": options.engine,
                "gpu": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
                "control": control_place(options),
            },
            on_failure,
        )
        self.start_progress = StartProgress()
        self.loop: EngineLoop | None = None
        self.adapters: Adapters | None = None
        self.engine: Engine | None = None
        self._threads: dict[str, threading.Thread] = {}
        self._opened: list[Servers] = []
        self._control: Servers
        self._joining = threading.Lock()
        self.seat: Seat | None = None
        """Where it beats and reads, once it serves."""
        self._tally = Tally((), self.status)
        self._mover = Mover(self, self._open)
        self._batcher: Batcher | None = None
        self._publisher: Publisher | None = None
        self._lasting: Sequence[str] = ()
        """What workers put there once, for clients that come: a full server may evict it."""
        self._publishes_from = 0.0
        """When it may be put there again, on the monotonic clock."""
        self._stays: set[tuple[str, bytes]] = set()
        """Entries that others are to try alone, and whose delivery to this worker was taken off."""

    def start(self) -> None:
        """Load the engine, join the pool, and serve. Blocks until it does.

        The engine is loaded, used and closed on one thread. Raises what loading or joining raised.
        """
        started = threading.Event()
        failure: list[BaseException] = []

        def engine_thread() -> None:
            try:
                self.start_progress.begin()
                loop = self._prepare()
            except BaseException as error:
                failure.append(error)
                self._close_engine()
                return
            finally:
                self.start_progress.end()
                started.set()
            try:
                loop.run()
            finally:
                self._close_engine()

        self._threads["engine"] = spawn("engine", engine_thread, self.status)
        started.wait()
        if failure:
            self._threads.pop("engine").join()
            self._close_servers()
            raise failure[0]

    def _prepare(self) -> EngineLoop:
        options, url = self.options, self.options.url
        clock = self.status.clock
        control = self._open()
        self.start_progress.enter("server")
        # Before minutes of loading, not after.
        version = self._patiently(lambda: greet(control.anywhere, url, clock))
        self._patiently(lambda: warn_about(control.anywhere, url))
        self._patiently(lambda: warn_of_rights(control.anywhere, self._commands()))
        self._patiently(lambda: _try_to_write(control, self.keys.info))
        self.start_progress.enter("load")
        with self.start_progress.listening():
            engine = self.engine = load_engine(
                options.engine, options.model, **_engine_options(options)
            )
        self.start_progress.enter("join")
        with self._joining:
            if self.status.stopping.is_set():
                raise LmpoolError("told to stop while the engine was loading")
            return self._join(engine, control, clock, version)

    def _join(
        self, engine: Engine, control: Servers, clock: ServerClock, version: str
    ) -> EngineLoop:
        options = self.options
        info = model_info(engine.info, options)
        info = self._patiently(lambda: usual_places(control, self.keys, info, options))
        budget = batch_budget(options, info)
        self.status.description["engine"] = info.engine
        self.status.description["execution"] = engine.info.execution
        beating = self._open(answers_within=ANSWER_WITHIN)
        seat = self._patiently(lambda: self._enter_pool(control, info, engine, beating))
        self.seat, info = seat, seat.info
        self._batcher = Batcher(
            options.batch_size,
            options.timeout,
            budget,
            shares_up_to=engine.shares_up_to,
        )
        self._publisher = self._publishing(seat)
        at_hand = watched(engine, self.status)
        self.adapters = Adapters(at_hand, control, seat.shards, options.adapter_dirs)
        self.adapters.learn()
        self.loop = EngineLoop(
            engine,
            self._batcher,
            self._publisher,
            self.adapters,
            control,
            clock,
            self.status,
            Tellings(control, info),
            BatchTraces(options.pool, info.model, info.engine),
        )
        self._control = control
        self._mover.look_after(left_on_the_way(info, self.keys))
        self._sit(seat, engine)
        for name, target in (
            ("publisher", self._publisher.run),
            ("watchdog", Watchdog(self.status, options.engine_timeout).run),
        ):
            self._threads[name] = spawn(name, target, self.status)
        logger.info(
            "%s serves %s as pool %s on %s (%s): %s engine, %s, %d tokens, prompts up to %d, "
            "batches up to %d prompts or %d tokens",
            *(self.consumer, info.model, options.pool, mask_url(options.url), version),
            *(info.engine, info.dtype, info.vocab_size, info.max_prompt_tokens),
            *(options.batch_size, budget),
        )
        return self.loop

    def home_lanes(self) -> int:
        """Of how many lanes it is the home."""
        return 0 if self.seat is None else self.seat.homes.lanes()

    def waiting(self) -> int:
        """Jobs that this worker has, and its engine has not."""
        return 0 if self._batcher is None else len(self._batcher)

    def _commands(self) -> list[Command]:
        """What it asks of the pool's server."""
        elsewhere = [] if self.options.control_url is None else control_commands(self.options.pool)
        return [each for each in worker_commands(self.options.pool) if each not in elsewhere]

    def _patiently(self, step: Callable[[], T]) -> T:
        """What `step` returns; see `patiently`. The server's refusals are errors of ours."""
        with explained(self.options.url):
            return patiently(step, self.status.stopping.wait)

    def _enter_pool(
        self, control: Servers, info: ModelInfo, engine: Engine, beating: Servers
    ) -> Seat:
        """Become one of the pool's workers; all that is left is to read jobs."""
        info = join(control, self.keys, info, self.options.replace, LIFE_MS)
        seat = self._new_seat(info, beating)
        say_what_is_not_taken(self.options, info)
        self.status.description["layout"] = info.layout
        try:
            enter(control, self.keys, info)  # whoever was told to move may have died before
            # Before anybody sees that it is there: it is read at once then.
            if publish_vocabulary(control, self.keys, info, engine):
                self._lasting = [self.keys.vocabulary(info.fingerprint8)]
            self._appear(control, seat)
        except BaseException:
            self._end_membership(control, seat)
            raise
        return seat

    def _new_seat(self, info: ModelInfo, beating: Servers) -> Seat:
        who = self.keys, self.consumer, self.status
        return Seat(info, *who, beating, self._mover.tell, self._tally)

    def _appear(self, servers: Servers, seat: Seat) -> None:
        """Be there for others, before anything is read."""
        seat.heartbeat.beat(servers)  # before the consumer is there: nobody must take it for dead
        create_groups(servers, seat.shards, self.consumer)

    def _sit(self, seat: Seat, engine: Engine) -> None:
        """Beat and read there from now on."""
        self._tally.move(seat.shards)
        intake, recovery = self._intake(seat, engine), self._recovery(seat)
        heartbeat = seat.heartbeat
        heartbeat.expects = self._lasting
        seat.spawn("heartbeat", lambda: heartbeat.run(seat.left, self._register_again))
        seat.spawn("intake", intake.run)
        seat.spawn("recovery", recovery.run)

    def move(self, servers: Servers, info: ModelInfo) -> bool:
        """Serve in the shards and lanes of `info`, where the pool is now: what the engine has is
        finished and published where it came from. On the mover's thread. Whether it did.

        Raises what joining raises, and then serves where it was.
        """
        with self._joining:
            before, batcher, publisher = self.seat, self._batcher, self._publisher
            adapters = self.adapters
            # Its own thread closes it once the worker is told to stop: maybe meanwhile.
            engine = self.engine
            if self.status.stopping.is_set() or None in (batcher, publisher, engine):
                return False
            assert before is not None
            assert batcher is not None
            assert publisher is not None
            assert engine is not None
            assert adapters is not None
            beating = self._open(answers_within=ANSWER_WITHIN)
            seat = self._new_seat(info, beating)
            try:
                appeared = self._patiently(lambda: self._appear_too(servers, before, seat))
            except BaseException:
                self.close_servers(beating)
                raise
            if not appeared:
                self.close_servers(beating)
                return False
            before.ended.set()
            batcher.wake()
            for name in ("intake", "recovery"):
                if not before.join(name, READS_FOR):
                    logger.warning("the %s of before has yet to end", name)
            before.left.set()
            self.seat = seat
            self.status.description["layout"] = info.layout
            publisher.move(seat.shards)
            adapters.move(seat.shards)
            self._sit(seat, engine)
        try:
            seat.heartbeat.beat(servers)  # whoever told the pool to move sees it
            enter(servers, self.keys, info, before.shards)  # what was registered meanwhile
            gone = without(before.shards, seat.shards)
            if gone:
                self._give_back(servers, gone, batcher)
            before.end_heartbeat()
            # Whoever waits there, of whatever release, sees that nobody serves it, and follows.
            before.leave(servers, gone)
        except (redis.exceptions.RedisError, OSError) as error:
            logger.warning("jobs of before stay there, and are asked again: %s", error)
        return True

    def _appear_too(self, servers: Servers, before: Seat, seat: Seat) -> bool:
        """Be there beside the seat of before: clients that come find the adapters. Not if the pool
        has moved on meanwhile."""
        if not enter(servers, self.keys, seat.info, before.shards):
            return False
        self._appear(servers, seat)
        return True

    def _give_back(self, servers: Servers, shards: Sequence[ShardKeys], batcher: Batcher) -> int:
        """Let others run what came from these shards and was not begun, and what was never read.
        Not what is to be run alone, which would be as good as new: it stays here. Returns how many
        jobs that were."""
        prefixes = {shard.prefix for shard in shards}
        left = batcher.take_out(
            lambda delivery: delivery.settled is None and delivery.stream.shard.prefix in prefixes
        )
        self.status.let_go(left)
        known = {delivery.place: delivery.job for delivery in left}
        held = frozenset(self.status.held)
        return release(servers, shards, self.consumer, known, held, self._stays)

    def wait_no_longer(self, shards: Sequence[ShardKeys]) -> None:
        """Let go of answers that could not be written in shards which the pool has left."""
        if self._publisher is not None:
            self._publisher.leave(shards)

    def _publishing(self, seat: Seat) -> Publisher:
        servers, info = self._open(), seat.info
        store = ResultStore(
            servers, seat.shards, self.options.result_bytes, self.status.stopping.is_set
        )
        laying = self._laying(info)
        return Publisher(servers, info.vocab_size, info.result_ttl_ms, store, self.status, laying)

    def _laying(self, info: ModelInfo) -> Laying | None:
        """What lays rows for clients of this machine, if they are large enough to gain by it."""
        near_bytes, row = self.options.near_bytes, ENTRY_BYTES["f32"] * info.vocab_size
        if not near_bytes or row < LARGE:
            return None
        if near_bytes < SPARE * row:
            logger.warning(
                "LMPOOL_NEAR_BYTES=%d: an eighth of it holds no row of this model; at least %d",
                *(near_bytes, SPARE * row),
            )
        neighbourhood = Neighbourhood.of_pool(self.options.pool, info.fingerprint8)
        return Laying(neighbourhood, near_bytes, self.consumer)

    def _intake(self, seat: Seat, engine: Engine) -> Intake:
        servers = self._open(blocks_for=IDLE_BLOCK_MS / 1000, bounded=True)
        seat.opened.append(servers)
        seat.reads = servers
        batcher = self._batcher
        assert batcher is not None
        return self._new_intake(
            servers,
            seat.shards,
            self.consumer,
            batcher,
            self.status,
            Digester(seat.info.fingerprint),
            DeadLetters(servers, self.consumer, self.status.note_failure),
            engine.continuous,
            self._restorer(seat, engine),
            seat.homes,
            seat.ended,
        )

    def _recovery(self, seat: Seat) -> Recovery:
        servers = self._open()
        seat.opened.append(servers)
        assert self._batcher is not None
        return Recovery(
            servers,
            seat.shards,
            self.consumer,
            self._batcher,
            self.status,
            Digester(seat.info.fingerprint),
            DeadLetters(servers, self.consumer, self.status.note_failure),
            self.options.max_deliveries,
            seat.homes,
            seat.ended,
        )

    def _restorer(self, seat: Seat, engine: Engine) -> Callable[[Servers], None]:
        """What is to be done for a server that has lost everything: clients that come now need
        heartbeat, vocabulary and adapters, too, and workers that come the name of the layout."""
        loop, adapters, control = self.loop, self.adapters, self._control
        at_hand = watched(engine, self.status)
        assert loop is not None
        assert adapters is not None

        def restore(servers: Servers) -> None:
            seat.heartbeat.beat(servers)
            # On the engine's thread, and so with its connections.
            loop.call(lambda: publish_vocabulary(control, self.keys, seat.info, at_hand))
            loop.call(lambda: self._mover.bring(control))
            loop.call(adapters.restore)

        return restore

    def _go_to(self, primary: Address) -> None:
        """Every thread's connections, to the primary that one of them found."""
        logger.warning("the Sentinels name another primary: all connections are made anew")
        for servers in self._opened:
            servers.go_to(primary)

    def _register_again(self, damaged: list[str]) -> None:
        """Adapters and the layout's name, where the registry or the bounds were damaged, or a shard
        was away as the pool came into it; and the vocabulary, where that is lost."""
        adapters, seat = self.adapters, self.seat
        if adapters is None or self.loop is None or seat is None:
            return
        if not set(self._lasting).isdisjoint(damaged):
            self._publish_again(self.loop, seat)
        registries = {shard.adapters for shard in seat.shards}.intersection(damaged)
        bounds = {shard.bounds for shard in seat.shards}.intersection(damaged)
        if registries:
            self.loop.call(lambda: self._mover.bring(self._control))
            self.loop.call(adapters.restore)
        elif bounds:  # told at each beat until then
            self._mover.bring_later()

    def _publish_again(self, loop: EngineLoop, seat: Seat) -> None:
        """Put the vocabulary there once more. Told at each beat until then."""
        engine = self.engine
        if engine is None or time.monotonic() < self._publishes_from:
            return
        self._publishes_from = math.inf  # one at a time
        at_hand = watched(engine, self.status)

        def publish() -> None:
            pause = PUBLISH_PAUSE
            try:
                if not publish_vocabulary(self._control, self.keys, seat.info, at_hand):
                    self._lasting = seat.heartbeat.expects = ()  # the engine has none
                pause = 0.0
            except (redis.exceptions.RedisError, OSError) as error:
                logger.warning("the vocabulary was lost, and is not there again: %s", error)
            finally:
                self._publishes_from = time.monotonic() + pause

        loop.call(publish)

    def stop(self) -> None:
        """Claim nothing more, finish what runs, give the rest back, leave. Blocks; idempotent."""
        self.status.stopping.set()
        with self._joining:  # either it has joined, or it never will
            serves = self.loop is not None
        seats = self._seats()
        for seat in seats:
            seat.ended.set()
        if self._batcher is not None:
            self._batcher.wake()
        # An engine that is broken or hangs will not finish.
        limit = HUNG_WAIT if self.status.failure is not None else self.options.drain_timeout
        self._mover.join(limit)
        seats = self._seats()  # one that was being left may be gone
        for seat in seats:
            if seat.reads is not None and not seat.join("intake", READS_ON):
                seat.reads.cut()  # it waits for jobs; what comes all the same is given back
        for name in ("intake", "recovery"):
            for seat in seats:
                if not seat.join(name, limit):
                    logger.error("the %s is still busy after %g s: leaving without it", name, limit)
        released = 0
        if self._batcher is not None and self._batcher.busy:
            released = self._give_back_rest(seats, self._batcher)
        # An engine that is being loaded has nothing to finish: the process ends without it.
        busy = False
        for name in ("watchdog", "engine") if serves else ():
            thread = self._threads.pop(name, None)
            if thread is not None:
                thread.join(limit)
                busy |= thread.is_alive()
                if thread.is_alive():
                    logger.error("the %s is still busy after %g s: leaving without it", name, limit)
        if self._publisher is not None:
            self._publisher.finish()
            thread = self._threads.pop("publisher", None)
            if thread is not None:
                thread.join(limit)
                busy |= thread.is_alive()
            self._leave(seats, released)
            self._publisher = None
        for seat in seats:
            seat.end_heartbeat()
            busy |= seat.is_busy
        self._close_servers(busy)

    def _seats(self) -> list[Seat]:
        """Where it serves, and before that where it still has jobs."""
        return [*self._mover.former, *(() if self.seat is None else (self.seat,))]

    def _give_back_rest(self, seats: Sequence[Seat], batcher: Batcher) -> int:
        """Let others run at once what waits here for a batch to end, however long that takes.
        Returns how many jobs that were."""
        shards = [shard for seat in seats for shard in seat.shards]
        try:
            return self._give_back(self._open(), shards, batcher)
        except (redis.exceptions.RedisError, OSError) as error:
            logger.warning("what waits here is given back once the batch has ended: %s", error)
            return 0

    def _leave(self, seats: Sequence[Seat], released: int) -> None:
        left = self._batcher.close() if self._batcher is not None else []
        known = {delivery.place: delivery.job for delivery in left}
        # What the engine could not finish is not given back as if it were new: others try it alone.
        keep: set[tuple[str, bytes]] = set()
        if self.loop is not None:
            keep |= {delivery.place for delivery in self.loop.running()}
        if isinstance(self.status.failure, ServerUnreachable):
            keep = set()  # which is no job's doing
        elif self.status.failure is not None:
            # It may have failed of any job that it had begun, also before the engine had it, or as
            # it was to be published.
            keep |= frozenset(self.status.held) - known.keys()
        servers = self._open()
        try:
            for seat in seats:
                seat.left.set()
            for seat in seats:
                released += release(servers, seat.shards, self.consumer, known, keep, self._stays)
                seat.end_heartbeat()  # a beat on its way would bring the worker back
                self._end_membership(servers, seat)
            logger.info(
                "%s left the pool; %d jobs given back, %d left for others to try alone",
                self.consumer,
                released,
                len(keep) + sum(delivery.settled is not None for delivery in left),
            )
        except (redis.exceptions.RedisError, OSError) as error:
            logger.warning("left without a word to the server: %s", error)

    def _end_membership(self, servers: Servers, seat: Seat) -> None:
        """End the heartbeat, and with the last worker what the pool is known to serve."""
        seat.leave(servers, seat.shards)
        first = seat.shards[0]
        if self.seat not in (None, seat):
            return  # it is known by another seat
        if servers.apart([first], partial(any_alive, shard=first)) is False:
            servers.for_key(self.keys.serving).delete(self.keys.serving)

    def _open(
        self,
        *,
        blocks_for: float = 0.0,
        bounded: bool = False,
        answers_within: float = ANSWER_TIMEOUT,
    ) -> Servers:
        servers = Servers.of_url(
            self.options.url,
            blocks_for=blocks_for,
            name="lmpool-worker",
            bounded=bounded,
            answers_within=answers_within,
        )
        servers.on_move(self._go_to)
        self._opened.append(servers)
        return servers

    def close_servers(self, *some: Servers) -> None:
        """Close these connections, whose thread has ended or is this one."""
        for servers in some:
            servers.close()
            if servers in self._opened:
                self._opened.remove(servers)

    def _close_servers(self, busy: bool = False) -> None:
        for servers in self._opened:
            if busy:  # the numbers of its sockets are a thread's, which may be about to write there
                servers.cut()
            else:
                servers.close()
        self._opened.clear()

    def _close_engine(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            try:
                engine.close()
            except Exception:
                logger.warning("the engine could not be closed", exc_info=True)


def _try_to_write(servers: Servers, key: str) -> None:
    """Nothing, as a write: a replica, or a server that is full or cannot save, refuses it as it
    does others. Raises redis-py's exceptions."""
    try:
        servers.for_key(key).setrange(key, 0, b"")
    except redis.exceptions.ResponseError as error:
        if not is_wrong_type(error):  # which is mended later
            raise


def warn_about(server: Server, url: str) -> None:
    """Say what of the server's settings may hurt, where it shows them, as `lmpool doctor` does."""
    try:
        info = {**server.info("memory"), **server.info("persistence")}
        facts = Facts(url, info, server.config_get("save"), (), 0.0)
    except redis.exceptions.ResponseError as error:
        logger.debug("the server does not show its settings: %s", error)
        return
    _log_all([*check_eviction(facts), *check_persistence(facts)])


def warn_of_rights(server: Server, commands: Sequence[Command], which: str = "the server") -> None:
    """Say what of these commands this user may not. Most of them no error tells of: what one may
    not do in a script, others may."""
    refused = not_permitted(server, commands)
    _log_all(check_workers_rights([*in_words(refused).values()]), which)


def _log_all(findings: Iterable[Finding], which: str = "the server") -> None:
    for finding in findings:
        level = logging.WARNING if finding.level == "wrong" else logging.INFO
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        logger.log(level, "%s: %s%s", which, finding.what, remedy)


def consumer_name(options: WorkerOptions) -> str:
    """A name no other worker has: it says where to look, and a restart gets another."""
    # In containers many may have one name and one process id.
    return f"{place_name(options)}-{os.getpid()}-{secrets.token_hex(4)}"


def control_place(options: WorkerOptions) -> str:
    """The server that its control jobs come from, as clients may see it; '' for the pool's own."""
    found = place_of(options.control)
    return "" if found == place_of(options.url) else found


def place_name(options: WorkerOptions) -> str:
    """Where a worker runs: the same for each that these settings and this environment start."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    place = f"-gpu{gpu.replace(',', '+')}" if gpu and len(gpu) < 16 else ""
    return f"{options.worker_name}{place}"


def _engine_options(options: WorkerOptions) -> dict[str, Any]:
    """What the engine is told: its own options, and those of the worker's that are set."""
    given = {
        "revision": options.revision,
        "dtype": None if options.dtype == "auto" else options.dtype,
        "max_prompt_tokens": options.max_prompt_tokens,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    double = sorted(chosen.keys() & options.engine_opts.keys())
    if double:
        name = double[0]
        raise SettingsError(
            f"{name} is set twice: write it as LMPOOL_{name.upper()} or in engine_opts, not in both"
        )
    return {**chosen, **options.engine_opts}
