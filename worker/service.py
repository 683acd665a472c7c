"""A worker: its engine, its threads, its life from joining a pool to leaving it."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

import redis.exceptions

from lmpool.address import Address
from lmpool.backends import load_engine
from lmpool.backends.engine import Engine
from lmpool.clock import ServerClock
from lmpool.commands import Server
from lmpool.diagnosis import Facts, check_eviction, check_persistence
from lmpool.errors import LmpoolError, SettingsError
from lmpool.keys import GROUP, PoolKeys, ShardKeys
from lmpool.liveness import LIFE_MS, any_alive
from lmpool.model_info import ModelInfo
from lmpool.scripts import script
from lmpool.server import ANSWER_TIMEOUT, explained, greet
from lmpool.servers import Servers
from lmpool.settings import WorkerOptions, mask_url, place_of
from lmpool.wants import Digester
from lmpool.worker.adapters import Adapters
from lmpool.worker.batching import Batcher, Delivery
from lmpool.worker.dead_letters import DeadLetters
from lmpool.worker.engine_thread import EngineLoop, spawn
from lmpool.worker.heartbeat import ANSWER_WITHIN, Heartbeat
from lmpool.worker.holding import release, uncount
from lmpool.worker.homes import Homes
from lmpool.worker.intake import IDLE_BLOCK_MS, Intake, create_groups
from lmpool.worker.membership import (
    batch_budget,
    join,
    model_info,
    publish_vocabulary,
    usual_shards,
)
from lmpool.worker.patience import patiently
from lmpool.worker.pieces import Tellings
from lmpool.worker.progress import StartProgress
from lmpool.worker.publishing import Publisher
from lmpool.worker.recovery import Recovery
from lmpool.worker.result_store import ResultStore
from lmpool.worker.status import WorkerStatus
from lmpool.worker.traces import BatchTraces
from lmpool.worker.watchdog import Watchdog

logger = logging.getLogger(__name__)

T = TypeVar("T")

HUNG_WAIT: Final = 2.0
"""Seconds for which a worker that failed waits for its threads."""


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
        self._heartbeat_ended = threading.Event()
        self._joining = threading.Lock()
        self.shards: tuple[ShardKeys, ...] = ()
        self.homes = Homes((), self.consumer)
        self._batcher: Batcher | None = None
        self._publisher: Publisher | None = None

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
        self.start_progress.enter("load")
        with self.start_progress.listening():
            engine = self.engine = load_engine(
                options.engine, options.model, **_engine_options(options)
            )
        self.start_progress.enter("join")
        self._patiently(lambda: warn_about(control.anywhere, url))
        with self._joining:
            if self.status.stopping.is_set():
                raise LmpoolError("told to stop while the engine was loading")
            return self._join(engine, control, clock, version)

    def _join(
        self, engine: Engine, control: Servers, clock: ServerClock, version: str
    ) -> EngineLoop:
        options = self.options
        info = model_info(engine.info, options)
        if options.shards is None:
            mine = info.fingerprint
            usual = self._patiently(lambda: usual_shards(control, self.keys, mine))
            info = replace(info, shards=usual)
        budget = batch_budget(options, info)
        self.status.description["engine"] = info.engine
        self.status.description["execution"] = engine.info.execution
        self.shards = info.shard_keys(self.keys)
        beating = self._open(answers_within=ANSWER_WITHIN)
        self.homes = Homes(self.shards, self.consumer)
        heartbeat = Heartbeat(
            beating, self.shards, self.consumer, self.status, self.keys, info, self.homes
        )
        self._patiently(lambda: self._enter_pool(control, info, engine, heartbeat))
        self._batcher = Batcher(options.batch_size, options.timeout, budget)
        self._publisher = self._publishing(info)
        self.adapters = Adapters(engine, control, self.shards, options.adapter_dirs)
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
        digester = Digester(info.fingerprint)
        restore = self._restorer(control, heartbeat, info)
        intake = self._intake(self._batcher, digester, engine, restore)
        recovery = self._recovery(self._batcher, digester)
        for name, target in (
            ("heartbeat", lambda: self._beat(heartbeat)),
            ("publisher", self._publisher.run),
            ("intake", intake.run),
            ("recovery", recovery.run),
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

    def waiting(self) -> int:
        """Jobs that this worker has, and its engine has not."""
        return 0 if self._batcher is None else len(self._batcher)

    def _patiently(self, step: Callable[[], T]) -> T:
        """What `step` returns; see `patiently`. The server's refusals are errors of ours."""
        with explained(self.options.url):
            return patiently(step, self.status.stopping.wait)

    def _enter_pool(
        self, control: Servers, info: ModelInfo, engine: Engine, heartbeat: Heartbeat
    ) -> None:
        """Become one of the pool's workers; all that is left is to read jobs."""
        join(control, self.keys, info, self.options.replace, LIFE_MS)
        heartbeat.beat(control)  # before the consumer is there: nobody must take it for dead
        try:
            create_groups(control, self.shards, self.consumer)
            publish_vocabulary(control, self.keys, info, engine)
        except BaseException:
            self._end_membership(control)
            raise

    def _publishing(self, info: ModelInfo) -> Publisher:
        servers = self._open()
        store = ResultStore(
            servers, self.shards, self.options.result_bytes, self.status.stopping.is_set
        )
        return Publisher(servers, info.vocab_size, info.result_ttl_ms, store, self.status)

    def _intake(
        self,
        batcher: Batcher,
        digester: Digester,
        engine: Engine,
        restore: Callable[[Servers], None],
    ) -> Intake:
        servers = self._open(blocks_for=IDLE_BLOCK_MS / 1000, bounded=True)
        return self._new_intake(
            servers,
            self.shards,
            self.consumer,
            batcher,
            self.status,
            digester,
            DeadLetters(servers, self.consumer, self.status.note_failure),
            engine.continuous,
            restore,
            self.homes,
        )

    def _recovery(self, batcher: Batcher, digester: Digester) -> Recovery:
        servers = self._open()
        return Recovery(
            servers,
            self.shards,
            self.consumer,
            batcher,
            self.status,
            digester,
            DeadLetters(servers, self.consumer, self.status.note_failure),
            self.options.max_deliveries,
            self.homes,
        )

    def _restorer(
        self, control: Servers, heartbeat: Heartbeat, info: ModelInfo
    ) -> Callable[[Servers], None]:
        """What is to be done for a server that has lost everything: clients that come now need
        heartbeat, vocabulary and adapters, too."""
        engine, loop, adapters = self.engine, self.loop, self.adapters
        assert engine is not None
        assert loop is not None
        assert adapters is not None

        def restore(servers: Servers) -> None:
            heartbeat.beat(servers)
            # On the engine's thread, and so with its connections.
            loop.call(lambda: publish_vocabulary(control, self.keys, info, engine))
            loop.call(adapters.restore)

        return restore

    def _beat(self, heartbeat: Heartbeat) -> None:
        heartbeat.run(self._heartbeat_ended, self._register_again)

    def _go_to(self, primary: Address) -> None:
        """Every thread's connections, to the primary that one of them found."""
        logger.warning("the Sentinels name another primary: all connections are made anew")
        for servers in self._opened:
            servers.go_to(primary)

    def _register_again(self, damaged: list[str]) -> None:
        """Adapters, where their registry was damaged."""
        adapters = self.adapters
        if adapters is None or self.loop is None:
            return
        if any(shard.adapters in damaged for shard in self.shards):
            self.loop.call(adapters.restore)

    def stop(self) -> None:
        """Claim nothing more, finish what runs, give the rest back, leave. Blocks; idempotent."""
        self.status.stopping.set()
        with self._joining:  # either it has joined, or it never will
            serves = self.loop is not None
        if self._batcher is not None:
            self._batcher.wake()
        # An engine that is broken or hangs will not finish.
        limit = HUNG_WAIT if self.status.failure is not None else self.options.drain_timeout
        # An engine that is being loaded has nothing to finish: the process ends without it.
        for name in ("intake", "recovery", "watchdog", "engine") if serves else ():
            thread = self._threads.pop(name, None)
            if thread is not None:
                thread.join(limit)
                if thread.is_alive():
                    logger.error("the %s is still busy after %g s: leaving without it", name, limit)
        if self._publisher is not None:
            self._publisher.finish()
            thread = self._threads.pop("publisher", None)
            if thread is not None:
                thread.join(limit)
            self._leave()
            self._publisher = None
        self._end_heartbeat()
        self._close_servers()

    def _end_heartbeat(self) -> None:
        self._heartbeat_ended.set()
        heartbeat = self._threads.pop("heartbeat", None)
        if heartbeat is not None:
            heartbeat.join(5)

    def _leave(self) -> None:
        left = self._batcher.close() if self._batcher is not None else []
        known = {delivery.place: delivery.job for delivery in left}
        # What the engine could not finish is not given back as if it were new: others try it alone,
        # and what was tried alone before keeps its deliveries, without this one that ran nothing.
        suspects = untried = [delivery for delivery in left if delivery.settled is not None]
        if self.loop is not None:
            suspects = untried + self.loop.running()
        keep = {delivery.place for delivery in suspects}
        servers = self._open()
        try:
            self._heartbeat_ended.set()
            for delivery in untried:
                uncount_it = partial(self._uncount, servers, delivery)
                servers.apart([delivery.stream.shard], uncount_it)
            released = release(servers, self.shards, self.consumer, known, keep)
            self._end_heartbeat()  # a beat on its way would bring the worker back
            self._end_membership(servers)
            logger.info(
                "%s left the pool; %d jobs given back, %d left for others to try alone",
                self.consumer,
                released,
                len(keep),
            )
        except (redis.exceptions.RedisError, OSError) as error:
            logger.warning("left without a word to the server: %s", error)

    def _end_membership(self, servers: Servers) -> None:
        """End the heartbeat, and with the last worker what the pool is known to serve."""
        for shard in self.shards:
            servers.apart([shard], partial(self._leave_shard, shard))
        first = self.shards[0]
        if servers.apart([first], partial(any_alive, shard=first)) is False:
            servers.for_key(self.keys.serving).delete(self.keys.serving)

    def _uncount(self, servers: Servers, delivery: Delivery, server: Server) -> None:
        uncount(servers, delivery, self.consumer)

    def _leave_shard(self, shard: ShardKeys, server: Server) -> None:
        keys = [shard.alive(self.consumer), shard.workers, *shard.groups]
        script("leave")(server, keys, [GROUP, self.consumer])

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

    def _close_servers(self) -> None:
        for servers in self._opened:
            servers.close()
        self._opened.clear()

    def _close_engine(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            try:
                engine.close()
            except Exception:
                logger.warning("the engine could not be closed", exc_info=True)


def warn_about(server: Server, url: str) -> None:
    """Say what of the server's settings may hurt, where it shows them, as `lmpool doctor` does."""
    try:
        info = {**server.info("memory"), **server.info("persistence")}
        facts = Facts(url, info, server.config_get("save"), (), 0.0)
    except redis.exceptions.ResponseError as error:
        logger.debug("the server does not show its settings: %s", error)
        return
    for finding in (*check_eviction(facts), *check_persistence(facts)):
        level = logging.WARNING if finding.level == "wrong" else logging.INFO
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        logger.log(level, "the server: %s%s", finding.what, remedy)


def consumer_name(options: WorkerOptions) -> str:
    """A name no other worker has: it says where to look, and a restart gets another."""
    return f"{place_name(options)}-{os.getpid()}-{secrets.token_hex(2)}"


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
