"""The engine's thread: what is run, with whom, and what becomes of what the engine gives."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import redis

from lmpool.backends.engine import Engine, Outcome, Part, Request
from lmpool.clock import ServerClock
from lmpool.errors import AdapterError, EngineBroken, PromptFailed
from lmpool.keys import ShardKeys
from lmpool.servers import Servers
from lmpool.wants import Row
from lmpool.worker import engine_thread as engine_thread_module
from lmpool.worker.batching import Batcher, Delivery
from lmpool.worker.engine_thread import EngineLoop, spawn
from lmpool.worker.pieces import Telling, Tellings
from lmpool.worker.publishing import Done, Finished, Told
from lmpool.worker.status import WorkerStatus
from lmpool.worker.traces import BatchTraces
from tests.support.fake import FakeServer
from tests.support.parts import Guarded, SplitServers, info_of
from tests.support.protocol import Caller, Consumer, new_job, put_result, shard_of_pool
from tests.support.waiting import until


class ToyEngine(Engine):
    """Answers a request at the step that the test lets it."""

    def __init__(self, continuous: bool = False) -> None:
        self.continuous = continuous  # type: ignore[misc]
        self.running: list[Request] = []
        self.submitted: list[list[bytes]] = []
        self.company: list[int] = []
        """How many were in flight at each submission."""
        self.cancelled: list[bytes] = []
        self.gate = threading.Semaphore(0)
        self.outcomes: Callable[[list[Request]], list[Outcome]] = lambda requests: [
            Outcome(request.id, np.zeros(4, np.float32)) for request in requests
        ]

    def submit(self, requests: Sequence[Request]) -> None:
        self.submitted.append([request.id for request in requests])
        self.company.append(len(self.running))
        self.running += requests

    def step(self) -> Sequence[Outcome]:
        assert self.gate.acquire(timeout=60), "the test lets nobody compute"
        running, self.running = self.running, []
        return self.outcomes(running)

    def in_flight(self) -> int:
        return len(self.running)

    def cancel(self, ids: Collection[bytes]) -> None:
        self.cancelled += ids
        self.running = [request for request in self.running if request.id not in ids]


class ToyAdapters:
    """Adapters of which so many fit, and some are refused."""

    def __init__(self) -> None:
        self.room = 10
        self.refused: dict[str, Exception] = {}
        self.ensured: list[str] = []

    def has_room(self, reference: str, in_use: Collection[str]) -> bool:
        return reference in in_use or len(in_use) < self.room

    def ensure(self, reference: str, in_use: Collection[str] = ()) -> None:
        self.ensured.append(reference)
        if reference in self.refused:
            raise self.refused[reference]


class Loop:
    """An engine's thread at work."""

    def __init__(self, servers: Servers, shards: Sequence[ShardKeys], **options: Any) -> None:
        self.engine = ToyEngine(**options)
        self.batcher = Batcher(8, 0.0, 1000)
        self.adapters = ToyAdapters()
        self.status = WorkerStatus({}, lambda: None)
        self.published: list[Finished] = []
        self.told: list[tuple[Telling, Part]] = []
        self.shards = shards
        self.loop = EngineLoop(
            self.engine, self.batcher, self, self.adapters, servers, ServerClock(), self.status,  # type: ignore[arg-type]
            Tellings(servers, info_of()), BatchTraces("pool", "model", "toy"),
        )  # fmt: skip
        self.thread: Guarded | None = None

    def put(self, finished: Sequence[Finished], at_leisure: bool = False) -> bool:
        """As the publisher."""
        self.published += finished
        return False

    def tell(self, parts: Sequence[tuple[Telling, Part]]) -> None:
        """As the publisher, too."""
        self.told += parts

    def start(self) -> None:
        self.thread = Guarded(self.loop.run)

    def stop(self) -> None:
        self.status.stopping.set()
        self.batcher.wake()
        self.engine.gate.release(100)
        if self.thread is not None:
            self.thread.end()

    def delivery(self, *tokens: int, **options: Any) -> Delivery:
        """A job that just came."""
        alone = threading.Event() if options.pop("alone", False) else None
        shard, entry = options.pop("shard", self.shards[0]), options.pop("entry", b"1-0")
        came = time.monotonic() - options.pop("age", 0.0)
        job = new_job(*tokens, **options)
        object.__setattr__(job, "sent", ServerClock().now_ms())
        return Delivery(job, entry, shard.stream(), came, alone)

    def wait_for(self, count: int) -> None:
        """Wait until so many have been published."""
        until(lambda: len(self.published) >= count, what=f"{count} to be published")

    def of(self, item: Finished) -> tuple[Delivery, str]:
        """What was published of which delivery."""
        if isinstance(item, Done):
            return item.delivery, item.status
        delivery, outcome = parts_of(item)
        return delivery, "row" if outcome.error is None else str(outcome.error)


def parts_of(item: Finished) -> tuple[Delivery, Outcome]:
    """Of what an engine computed."""
    assert not isinstance(item, Done)
    return (item.delivery, item.outcome) if isinstance(item, Told) else item


@pytest.fixture
def server(fake_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


@pytest.fixture
def shards(pool_name: str) -> list[ShardKeys]:
    return [shard_of_pool(pool_name, shard=number) for number in range(3)]


@pytest.fixture(autouse=True)
def _only_old_jobs_are_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    # However slow the machine is.
    monkeypatch.setattr(engine_thread_module, "LONG_WAIT", 30.0)
    monkeypatch.setattr(engine_thread_module, "LONG_BACKLOG_MS", 60_000)


@pytest.fixture
def new(server: redis.Redis, shards: list[ShardKeys]) -> Iterator[Callable[..., Loop]]:
    loops: list[Loop] = []

    def new(servers: Servers | None = None, **options: Any) -> Loop:
        found = servers or Servers(lambda: server)  # type: ignore[arg-type,return-value]
        loops.append(Loop(found, shards, **options))
        return loops[-1]

    yield new
    for loop in loops:
        loop.stop()


@pytest.fixture
def loop(new: Callable[..., Loop]) -> Loop:
    return new()


def test_a_batch_is_run_and_each_job_gets_its_own_outcome(loop: Loop) -> None:
    jobs = [loop.delivery(i) for i in range(5)]
    loop.engine.outcomes = lambda requests: [
        Outcome(r.id, np.full(4, r.tokens[0], np.float32)) for r in reversed(requests)
    ]
    loop.engine.gate.release()
    loop.batcher.add(jobs)
    loop.start()
    loop.wait_for(5)
    assert loop.engine.submitted == [[delivery.job.digest for delivery in jobs]]
    for item in loop.published:
        delivery, outcome = parts_of(item)
        assert delivery in jobs
        assert outcome.row is not None
        assert outcome.row[0] == delivery.job.token_ids()[0]
    until(lambda: not loop.batcher.busy)
    assert loop.status.rows_per_second() == 0.5
    assert loop.status.step_since is None


def test_a_request_is_the_jobs_prompt_want_and_adapter(loop: Loop) -> None:
    seen: list[Request] = []

    def outcomes(requests: list[Request]) -> list[Outcome]:
        seen.extend(requests)
        return [Outcome(request.id, np.zeros(4, np.float32)) for request in requests]

    loop.engine.outcomes = outcomes
    loop.engine.gate.release()
    loop.batcher.add([loop.delivery(4, 5, encoding="f16", adapter="x@1")])
    loop.start()
    loop.wait_for(1)
    (request,) = seen
    assert request.tokens.tolist() == [4, 5]
    assert (request.want, request.adapter) == (Row("f16"), "x@1")
    assert loop.adapters.ensured == ["x@1"]


def test_several_deliveries_of_one_job_are_run_once_and_all_announced(loop: Loop) -> None:
    first = loop.delivery(1, entry=b"1-0")
    again = loop.delivery(1, entry=b"2-0")
    third = loop.delivery(1, entry=b"1-0", shard=loop.shards[1])
    loop.engine.gate.release()
    loop.batcher.add([first, again, third, loop.delivery(2)])
    loop.start()
    loop.wait_for(4)
    assert len(loop.engine.submitted[0]) == 2
    found = dict(map(loop.of, loop.published))
    # Each with the outcome: where it cannot be stored, all of them end in the error.
    assert (found[first], found[again], found[third]) == ("row", "row", "row")
    assert loop.status.metrics.cache_hits == {"flight": 2}


def test_an_error_is_told_of_every_delivery(loop: Loop) -> None:
    both = [loop.delivery(1, entry=b"1-0"), loop.delivery(1, entry=b"2-0")]
    loop.engine.outcomes = lambda requests: [
        Outcome(request.id, error=PromptFailed("odd")) for request in requests
    ]
    loop.engine.gate.release()
    loop.batcher.add(both)
    loop.start()
    loop.wait_for(2)
    assert dict(map(loop.of, loop.published)) == dict.fromkeys(both, "odd")


def test_what_the_engine_forgets_fails_and_what_nobody_asked_is_dropped(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [loop.delivery(i) for i in range(3)]
    loop.engine.outcomes = lambda requests: [
        Outcome(b"nobody's", np.zeros(4, np.float32)),
        Outcome(requests[0].id, np.zeros(4, np.float32)),
        Outcome(requests[0].id, np.ones(4, np.float32)),
    ]
    loop.engine.gate.release()
    with caplog.at_level(logging.ERROR):
        loop.batcher.add(jobs)
        loop.start()
        loop.wait_for(3)
    found = dict(map(loop.of, loop.published))
    assert found[jobs[0]] == "row"
    assert found[jobs[1]] == found[jobs[2]] == "the engine gave no outcome for this prompt"
    assert len(loop.published) == 3
    assert caplog.text.count("unknown request") == 2
    assert "no outcome for 2 requests" in caplog.text


# --- in company and alone ------------------------------------------------------------------------


def test_a_job_that_is_run_alone_has_no_company(new: Callable[..., Loop]) -> None:
    loop = new(continuous=True)
    steps = 0

    def outcomes(requests: list[Request]) -> list[Outcome]:
        nonlocal steps
        steps += 1
        if steps == 1:
            loop.engine.running = requests  # it takes another step
            loop.batcher.add([loop.delivery(2), loop.delivery(3)])
            return []
        return [Outcome(request.id, np.zeros(4, np.float32)) for request in requests]

    loop.engine.outcomes = outcomes
    loop.batcher.add_alone(loop.delivery(1, alone=True))
    loop.engine.gate.release(10)
    loop.start()
    loop.wait_for(3)
    assert [len(batch) for batch in loop.engine.submitted] == [1, 2]
    assert loop.engine.company == [0, 0]


def test_a_continuous_engine_is_fed_while_it_runs_and_one_to_be_alone_waits(
    new: Callable[..., Loop],
) -> None:
    loop = new(continuous=True)
    steps = 0

    def outcomes(requests: list[Request]) -> list[Outcome]:
        nonlocal steps
        steps += 1
        if steps == 1:
            loop.engine.running = requests  # they take another step
            loop.batcher.add([loop.delivery(2)])
            return []
        if steps == 2:
            loop.engine.running = requests
            loop.batcher.add_alone(loop.delivery(3, alone=True))
            loop.batcher.add([loop.delivery(4)])
            return []
        return [Outcome(request.id, np.zeros(4, np.float32)) for request in requests]

    loop.engine.outcomes = outcomes
    loop.batcher.add([loop.delivery(1)])
    loop.engine.gate.release(10)
    loop.start()
    loop.wait_for(4)
    digests = [[new_job(number).digest for number in batch] for batch in ([1], [2], [3], [4])]
    assert loop.engine.submitted == digests
    assert loop.engine.company == [0, 1, 0, 0]


# --- what nobody waits for -----------------------------------------------------------------------


def wait_in_stream(server: Any, shard: ShardKeys, *tokens: int, caller: str = "c") -> bytes:
    """The entry of a job that a caller waits for, and that this worker holds."""
    Caller(server, shard, caller).enqueue(new_job(*tokens))
    return Consumer(server, shard, "me").read()[-1]


def test_jobs_that_have_waited_are_run_only_if_somebody_still_wants_them(
    loop: Loop, server: redis.Redis, shards: list[ShardKeys]
) -> None:
    kept, withdrawn, there = [], [], []
    for shard in shards:
        for number, group in enumerate((kept, withdrawn, there)):
            entry = wait_in_stream(server, shard, shard.number, number)
            group.append(loop.delivery(shard.number, number, entry=entry, shard=shard, age=60.0))
    for delivery in withdrawn:
        Caller(server, delivery.stream.shard, "c").withdraw(delivery.job)
    for delivery in there:
        put_result(server, delivery.stream.shard, delivery.job)
    loop.status.held.update(delivery.place for delivery in (*kept, *withdrawn, *there))
    loop.engine.gate.release()
    loop.batcher.add([*kept, *withdrawn, *there])
    loop.start()
    loop.wait_for(6)
    assert loop.engine.submitted == [[delivery.job.digest for delivery in kept]]
    found = dict(map(loop.of, loop.published))
    assert found == {**dict.fromkeys(kept, "row"), **dict.fromkeys(there, "ok")}
    assert loop.status.metrics.cache_hits == {"result": len(there)}
    # What was dropped is let go here, the rest by whoever publishes it.
    assert loop.status.held == {delivery.place for delivery in (*kept, *there)}
    for delivery in withdrawn:
        assert delivery.entry not in Consumer(server, delivery.stream.shard, "me").held()


def test_jobs_that_have_just_come_are_run_without_asking(loop: Loop) -> None:
    job = loop.delivery(1)  # nobody waits for it: to ask would show that
    loop.engine.gate.release()
    loop.batcher.add([job])
    loop.start()
    loop.wait_for(1)
    assert loop.of(loop.published[0]) == (job, "row")


@pytest.mark.parametrize("why", ["sent long ago", "its deadline"])
def test_old_jobs_are_asked_about_even_if_they_have_just_come(
    why: str, loop: Loop, server: redis.Redis, shards: list[ShardKeys]
) -> None:
    deadline = ServerClock().now_ms() - 10 if why == "its deadline" else None
    job = new_job(1, deadline=deadline)
    caller = Caller(server, shards[1])
    caller.enqueue(job)
    (entry,) = Consumer(server, shards[1], "me").read()
    if why == "sent long ago":
        caller.vanish()
    delivery = loop.delivery(1, entry=entry, shard=shards[1], deadline=deadline)
    if why == "sent long ago":
        object.__setattr__(delivery.job, "sent", ServerClock().now_ms() - 90_000)
    loop.engine.gate.release()
    loop.batcher.add([delivery, loop.delivery(2)])
    loop.start()
    loop.wait_for(1)
    until(lambda: not loop.batcher.busy)
    assert loop.engine.submitted == [[new_job(2).digest]]
    if why == "its deadline":
        assert [notice.status for notice in caller.notices()] == ["expired"]
        assert server.hget(shards[1].counters, "expired") == b"1"


def test_a_batch_of_which_nothing_is_left_is_done(
    loop: Loop, server: redis.Redis, shards: list[ShardKeys]
) -> None:
    entry = wait_in_stream(server, shards[0], 1)
    Caller(server, shards[0], "c").withdraw(new_job(1))
    delivery = loop.delivery(1, entry=entry, age=60.0)
    loop.status.held.add(delivery.place)
    loop.batcher.add([delivery])
    loop.start()
    until(lambda: not loop.status.held)
    until(lambda: not loop.batcher.busy)
    assert loop.engine.submitted == []


def test_shards_on_several_servers_are_asked_where_they_lie(
    new: Callable[..., Loop], shards: list[ShardKeys]
) -> None:
    with FakeServer() as first, FakeServer() as second:
        clients = [first.client(), second.client()]
        loop = new(SplitServers(clients))
        jobs = []
        for shard in shards:
            entry = wait_in_stream(clients[shard.number % 2], shard, shard.number)
            jobs.append(loop.delivery(shard.number, entry=entry, shard=shard, age=60.0))
        loop.engine.gate.release()
        loop.batcher.add(jobs)
        loop.start()
        loop.wait_for(3)
        assert loop.engine.submitted == [[delivery.job.digest for delivery in jobs]]


def test_where_nobody_can_be_asked_everything_is_run(loop: Loop, monkeypatch: Any) -> None:
    def lose(shard: ShardKeys) -> Any:
        raise redis.exceptions.ConnectionError("gone")

    monkeypatch.setattr(loop.loop._servers, "for_shard", lose)
    loop.engine.gate.release()
    loop.batcher.add([loop.delivery(1, age=60.0)])
    loop.start()
    loop.wait_for(1)
    assert loop.of(loop.published[0])[1] == "row"


def test_running_requests_that_nobody_waits_for_are_ended_unless_another_delivery_is_wanted(
    new: Callable[..., Loop],
    server: redis.Redis,
    shards: list[ShardKeys],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_thread_module, "REVIEW_SECONDS", 0.0)
    loop = new(continuous=True)
    entry = wait_in_stream(server, shards[0], 1)
    other = wait_in_stream(server, shards[1], 2)
    gone = loop.delivery(1, entry=entry, age=60.0)
    kept = loop.delivery(2, entry=other, shard=shards[1], age=60.0)
    steps = 0

    def outcomes(requests: list[Request]) -> list[Outcome]:
        nonlocal steps
        steps += 1
        if steps < 3:
            loop.engine.running = requests
            if steps == 1:
                Caller(server, shards[0], "c").withdraw(gone.job)
            return []
        return [Outcome(request.id, np.zeros(4, np.float32)) for request in requests]

    loop.engine.outcomes = outcomes
    loop.status.held.update((gone.place, kept.place))
    loop.batcher.add([gone, kept])
    loop.engine.gate.release(10)
    loop.start()
    loop.wait_for(1)
    assert loop.engine.cancelled == [gone.job.digest]
    assert list(map(loop.of, loop.published)) == [(kept, "row")]
    assert gone.place not in loop.status.held


# --- adapters ------------------------------------------------------------------------------------


def test_a_job_whose_adapter_cannot_be_used_is_refused_alone_and_asked_once_a_batch(
    loop: Loop,
) -> None:
    loop.adapters.refused = {
        "gone@1": AdapterError("adapter 'gone' was removed"),
        "odd@2": ValueError(),
        "far@4": AdapterError("not inside mod\udce8les"),
    }
    gone = [loop.delivery(i, adapter="gone@1") for i in range(3)]
    odd, good = loop.delivery(4, adapter="odd@2"), loop.delivery(5, adapter="x@3")
    other, base = loop.delivery(7, adapter="x@3"), loop.delivery(6)
    far = loop.delivery(8, adapter="far@4")
    loop.engine.gate.release()
    loop.batcher.add([*gone, odd, good, other, base, far])
    loop.start()
    loop.wait_for(8)
    refused = {c: i for i in loop.published if isinstance(i, Done) for c in [i.delivery]}
    assert set(refused) == {*gone, odd, far}
    assert all(item.status == "unknown_adapter" for item in refused.values())
    assert refused[gone[0]].error == "adapter 'gone' was removed"
    assert refused[odd].error == "ValueError"
    assert refused[far].error == "not inside mod\\udce8les"  # which can be sent
    assert sorted(loop.adapters.ensured) == ["far@4", "gone@1", "odd@2", "x@3"]
    assert loop.engine.submitted == [[c.job.digest for c in (good, other, base)]]


def test_behind_a_job_whose_adapter_has_no_room_those_of_adapters_wait(
    new: Callable[..., Loop],
) -> None:
    loop = new(continuous=True)
    loop.adapters.room = 1
    first, second, third = (loop.delivery(i, adapter=f"a@{i % 2}") for i in (0, 1, 2))
    base = loop.delivery(9)
    loop.batcher.add([first, second, third, base])
    loop.engine.gate.release(10)
    loop.start()
    loop.wait_for(4)
    # The third has the first one's adapter, but the second's turn comes before it.
    digests = [
        [delivery.job.digest for delivery in batch] for batch in ([first, base], [second], [third])
    ]
    assert loop.engine.submitted == digests
    assert set(map(loop.of, loop.published)) == {(c, "row") for c in (first, second, third, base)}


def test_a_job_that_is_run_alone_has_no_company_once_its_adapter_could_be_asked_for(
    loop: Loop,
) -> None:
    company = [loop.delivery(2), loop.delivery(3)]

    def ensure(reference: str, in_use: Collection[str] = ()) -> None:
        loop.adapters.ensured.append(reference)
        if len(loop.adapters.ensured) == 1:
            loop.batcher.add(company)
            raise redis.exceptions.ConnectionError("the server is away")

    loop.adapters.ensure = ensure  # type: ignore[method-assign]
    alone = loop.delivery(1, adapter="x@1", alone=True)
    loop.batcher.add_alone(alone)
    loop.engine.gate.release(10)
    loop.start()
    loop.wait_for(3)
    digests = [[delivery.job.digest for delivery in batch] for batch in (company, [alone])]
    assert loop.engine.submitted == digests


def test_an_adapter_that_breaks_the_engine_breaks_it(loop: Loop) -> None:
    loop.adapters.refused = {"x@1": EngineBroken("out of memory")}
    loop.batcher.add([loop.delivery(1, adapter="x@1")])
    loop.start()
    assert loop.thread is not None
    with pytest.raises(EngineBroken):
        loop.thread.end()
    loop.thread = None


# --- calls and endings ---------------------------------------------------------------------------


def test_calls_are_run_between_batches_on_the_same_thread(loop: Loop) -> None:
    loop.start()
    threads = [loop.loop.call(threading.get_ident).result(60) for _ in range(2)]
    assert loop.thread is not None
    assert threads == [loop.thread.ident] * 2
    loop.batcher.add([loop.delivery(1)])
    until(lambda: loop.engine.submitted)
    call = loop.loop.call(lambda: len(loop.published))
    assert not call.done()
    loop.engine.gate.release()
    assert call.result(60) == 1


def test_a_call_that_fails_fails_alone_unless_the_engine_is_broken(loop: Loop) -> None:
    def fail(error: Exception) -> None:
        raise error

    loop.start()
    assert isinstance(loop.loop.call(lambda: fail(KeyError("x"))).exception(10), KeyError)
    assert loop.loop.call(lambda: 7).result(60) == 7
    broken = loop.loop.call(lambda: fail(EngineBroken("gone")))
    assert isinstance(broken.exception(10), EngineBroken)
    assert loop.thread is not None
    with pytest.raises(EngineBroken):
        loop.thread.end()
    loop.thread = None


@pytest.mark.parametrize("sent", [2**62, -(2**62), 0])
def test_when_a_job_was_sent_is_believed_within_bounds(loop: Loop, sent: int) -> None:
    """Clocks differ, and anybody may write a job: a sum that falls is a restart to Prometheus."""
    loop.status.metrics.on = True
    delivery = loop.delivery(1)
    loop.loop._note([replace(delivery, job=replace(delivery.job, sent=sent))])
    assert sum(loop.status.metrics.queue_wait.counts) == 1
    assert 0 <= loop.status.metrics.queue_wait.total <= 7 * 86_400


def test_what_the_engine_has_is_seen_while_it_runs(loop: Loop) -> None:
    loop.status.metrics.on = True
    loop.batcher.add([loop.delivery(1), loop.delivery(2)])
    loop.start()
    until(lambda: loop.status.metrics.running == 2, what="both to be seen")
    loop.engine.gate.release()
    loop.wait_for(2)
    until(lambda: loop.status.metrics.running == 0, what="none to be seen")


def test_an_engine_that_breaks_ends_the_thread_and_leaves_what_it_had(loop: Loop) -> None:
    def outcomes(requests: list[Request]) -> list[Outcome]:
        raise EngineBroken("CUDA error")

    loop.engine.outcomes = outcomes
    jobs = [loop.delivery(i) for i in range(3)]
    loop.batcher.add(jobs)
    loop.engine.gate.release()
    loop.start()
    assert loop.thread is not None
    with pytest.raises(EngineBroken):
        loop.thread.end()
    loop.thread = None
    assert loop.loop.running() == jobs
    assert loop.published == []
    assert loop.status.step_since is None


def test_it_stops_when_what_runs_is_done_and_takes_nothing_more(loop: Loop) -> None:
    running, waiting = loop.delivery(1), loop.delivery(2)
    loop.batcher.add([running])
    loop.start()
    until(lambda: loop.engine.submitted)
    loop.batcher.add([waiting])
    loop.status.stopping.set()
    loop.batcher.wake()
    loop.engine.gate.release()
    assert loop.thread is not None
    loop.thread.end()
    assert list(map(loop.of, loop.published)) == [(running, "row")]
    assert loop.batcher.close() == [waiting]
    assert loop.loop.call(lambda: 1).cancelled()  # nobody is there any more


def test_a_continuous_engine_takes_its_steps_to_the_end_when_it_stops_and_is_fed_no_more(
    new: Callable[..., Loop],
) -> None:
    loop = new(continuous=True)
    running, waiting = loop.delivery(1), loop.delivery(2)
    steps = 0

    def outcomes(requests: list[Request]) -> list[Outcome]:
        nonlocal steps
        steps += 1
        if steps < 3:
            loop.engine.running = requests
            loop.status.stopping.set()
            if steps == 1:
                loop.batcher.add([waiting])
            return []
        return [Outcome(request.id, np.zeros(4, np.float32)) for request in requests]

    loop.engine.outcomes = outcomes
    loop.batcher.add([running])
    loop.engine.gate.release(10)
    loop.start()
    assert loop.thread is not None
    loop.thread.end()
    assert list(map(loop.of, loop.published)) == [(running, "row")]
    assert loop.batcher.close() == [waiting]


def test_calls_that_are_left_when_it_ends_are_cancelled(loop: Loop) -> None:
    loop.batcher.add([loop.delivery(1)])
    loop.engine.outcomes = lambda requests: (_ for _ in ()).throw(EngineBroken("gone"))  # type: ignore[assignment]
    loop.start()
    until(lambda: loop.engine.submitted)
    call = loop.loop.call(lambda: 1)
    loop.engine.gate.release()
    until(call.done)
    assert call.cancelled()
    loop.thread = None


def test_a_thread_that_fails_ends_the_worker() -> None:
    ended = threading.Event()
    status = WorkerStatus({}, ended.set)
    error = RuntimeError("why")

    def fail() -> None:
        raise error

    thread = spawn("test", fail, status)
    assert ended.wait(60)
    thread.join(60)
    assert thread.name == "lmpool-test"
    assert status.failure is error
