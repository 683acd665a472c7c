"""The parts of clients and workers one at a time, with what they are given held by the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from lmpool.affinity import Placement
from lmpool.keys import Priority, ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.producer.cache import AnswerCache
from lmpool.producer.flights import Statistics
from lmpool.producer.jobs import JobMaker
from lmpool.producer.pending import PendingCall
from lmpool.producer.session import Session
from lmpool.rows import EncodedRow, pack_logprobs
from lmpool.server import open_server
from lmpool.servers import Servers
from lmpool.settings import ClientOptions
from lmpool.wants import Row, Want
from lmpool.wire import Job
from tests.support.protocol import FINGERPRINT

VOCAB = 16


def info_of(shards: int = 3, **changed: Any) -> ModelInfo:
    """What a pool serves that no worker has to be there for."""
    fields: dict[str, Any] = {
        "model": "toy",
        "revision": None,
        "fingerprint": FINGERPRINT,
        "vocab_size": VOCAB,
        "max_prompt_tokens": 100,
        "dtype": "float32",
        "engine": "mock",
        "encoding": "f32",
        "eos_token_ids": (1,),
        "shards": shards,
    }
    return ModelInfo(**{**fields, **changed})


class Time:
    """A module's `time`, held by a test."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now


class Flag:
    """As an event whose waits take no time; they move `time` on."""

    def __init__(self, time: Time | None = None) -> None:
        self.waits: list[float] = []
        self._time = time
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, seconds: float = 0.0) -> bool:
        self.waits.append(seconds)
        if self._time is not None:
            self._time.now += seconds
        return self._set


def new_session(url: str, pool: str, info: ModelInfo | None = None, **options: Any) -> Session:
    """A client's session that has joined its pool, without its threads."""
    session = Session(
        ClientOptions(url=url, pool=pool, **options), AnswerCache(1 << 20), Statistics()
    )
    session.join(info_of() if info is None else info)
    return session


def jobs_of(
    prompts: Iterable[Sequence[int]],
    want: Want | None = None,
    adapter: str | None = None,
    info: ModelInfo | None = None,
) -> list[Job]:
    """The jobs of prompts."""
    return JobMaker(info or info_of()).many(list(prompts), want or Row("f32"), adapter)


def some_prompts(count: int, start: int = 0) -> list[list[int]]:
    """Different prompts, which lie in all of three shards."""
    return [[(start + i) // VOCAB, (start + i) % VOCAB, 3] for i in range(count)]


def ask(
    session: Session,
    jobs: Sequence[Job],
    deadline: float | None = None,
    priority: Priority = "interactive",
    now: float = 0.0,
) -> PendingCall:
    """A thread's call for these jobs, which nothing has sent yet."""
    call = PendingCall(jobs, deadline, priority=priority, info=session.info).for_thread()
    with session.work:
        session.table.statistics.requests += len(jobs)
        session.table.add(call, now)
    return call


def row_of(job: Job) -> bytes:
    """A row that is this job's alone, as a worker stores it."""
    seed = int.from_bytes(job.digest[:8], "big")
    values = np.random.default_rng(seed).normal(size=VOCAB)
    return pack_logprobs((values - np.log(np.exp(values).sum())).astype(np.float32)).joined()


def is_row_of(job: Job, answer: Any) -> bool:
    """Whether an answer is `row_of` of that job."""
    return isinstance(answer, EncodedRow) and (
        answer.logprobs().tobytes() == row_of(job)[-4 * VOCAB :]
    )


def shard_of_job(session: Session, job: Job) -> ShardKeys:
    """Where a job belongs."""
    return session.shards[Placement(len(session.shards)).of(job.tokens, job.adapter)[0]]


class SplitServers(Servers):
    """Shards that lie on several servers, by their numbers; the pool's keys on the first."""

    def __init__(self, opened: Sequence[Any]) -> None:
        super().__init__(lambda: opened[0])
        self._several = opened

    def for_shard(self, shard: ShardKeys) -> Any:
        return self._several[shard.number % len(self._several)]

    def _opened(self) -> Sequence[Any]:
        return self._several


@contextmanager
def split_over(urls: Sequence[str]) -> Iterator[None]:
    """Whatever connects meanwhile finds the shards on these servers, in turn."""

    def of_url(url: str, **options: Any) -> Servers:
        return SplitServers([open_server(u, **options) for u in urls])

    with patch.object(Servers, "of_url", of_url):
        yield


class Guarded(threading.Thread):
    """A thread that a test starts and that must end well."""

    def __init__(self, target: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call = target
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.failure = error

    def end(self, timeout: float = 60.0) -> None:
        """Wait for it."""
        self.join(timeout)
        assert not self.is_alive(), "the thread still runs"
        if self.failure is not None:
            raise self.failure
