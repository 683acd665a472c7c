"""lm-evaluation-harness through a gateway while the gateway, the server and all workers go and come
back: its own retries are enough, and its numbers are those of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import lmpool
from lmpool.keys import ShardKeys
from tests.engines.conftest import serves
from tests.support.gateways import GatewayProcess
from tests.support.lm_eval_tasks import assert_same, evaluated, write_tasks
from tests.support.pools import pool_shards, until_at_rest
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import WorkerProcess, worker_process

pytest.importorskip("lm_eval")
transformers = pytest.importorskip("transformers")

from lm_eval.models.openai_completions import LocalCompletionsAPI  # noqa: E402

from lmpool.backends import tiny  # noqa: E402

pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore"),  # of the harness and its data sets
]

CONTEXT = 512
MORE = 4
"""Jobs that are done between two faults."""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder, transformers.AutoTokenizer.from_pretrained(tiny.path()), CONTEXT - 2)
    return folder


def local(gateway: GatewayProcess, pool: str) -> Any:
    """The harness's `local-completions`, which tries for longer than a gateway takes to start."""
    return LocalCompletionsAPI(
        base_url=f"{gateway.base_url}/v1/completions",
        model=pool,
        tokenizer=tiny.path(),
        tokenizer_backend="huggingface",
        add_bos_token=True,
        max_length=CONTEXT,
        num_concurrent=4,
        max_retries=12,
    )


class Pool:
    """Two workers of the tiny model, which a run asks while they are broken."""

    def __init__(self, server: RealServer, name: str, stack: ExitStack) -> None:
        self.name = name
        self.client = stack.enter_context(server.client())
        self.workers: list[WorkerProcess] = []
        self._url = server.url
        self._stack = stack
        self.start_workers()

    def start_workers(self) -> None:
        """As an operator does, both at once."""
        given: dict[str, Any] = {"engine": "hf", "environment": {"OMP_NUM_THREADS": "1"}}
        self.workers = [
            self._stack.enter_context(worker_process(self._url, self.name, alive=False, **given))
            for _ in range(2)
        ]
        for worker in self.workers:
            worker.wait_until_alive()

    @contextmanager
    def held_up(self, run: Future[Any]) -> Iterator[None]:
        """The run has got further, and in the block its jobs are under way, none of them done."""
        enough = self._done() + MORE
        self._until(lambda: self._done() >= enough, run, "more jobs to be done")
        for worker in self.workers:
            worker.pause()
        self._until(self._waiting, run, "jobs to wait")
        yield
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.resume()

    def _until(self, condition: Callable[[], bool], run: Future[Any], what: str) -> None:
        def met() -> bool:
            assert not run.done(), f"the run ended before {what}: {run.exception()!r}"
            return condition()

        until(met, 90, what=what)

    def _done(self) -> int:
        counted = [self.client.hget(each.counters, "computed") for each in self._shards()]
        return sum(int(each or 0) for each in counted)  # type: ignore[arg-type]

    def _waiting(self) -> bool:
        """In whatever lane: what a worker holds stands in its stream, too."""
        shards = self._shards()
        return any(self.client.xlen(stream.key) for each in shards for stream in each.streams)

    def _shards(self) -> tuple[ShardKeys, ...]:
        return pool_shards(self.client, self.name)


def test_a_run_outlives_the_gateway_the_server_and_the_workers(
    tiny_gateway: GatewayProcess,
    tiny_pool: lmpool.EmbeddedLM,
    tasks: Path,
    pool_name: str,
    server_binary: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    undisturbed = evaluated(local(tiny_gateway, tiny_pool.pool), tasks)
    assert not failures(caplog)
    with (
        RealServer(binary=server_binary, tcp=True, appendonly="yes") as server,
        ExitStack() as stack,
    ):
        pool = Pool(server, pool_name, stack)
        gateway = stack.enter_context(GatewayProcess(server.url, pool_name))
        until(lambda: serves(gateway), 60, what="the gateway to serve its pool")
        threads = stack.enter_context(ThreadPoolExecutor(1))
        run = threads.submit(lambda: evaluated(local(gateway, pool_name), tasks))
        with pool.held_up(run):
            gateway.kill()
        gateway.start_again()
        with pool.held_up(run):
            server.kill()
            server.start()
        with pool.held_up(run):
            for worker in pool.workers:
                worker.kill()
            pool.start_workers()
        disturbed = run.result(120)
        assert failures(caplog), "the gateway's death was not noticed"
        assert_same(disturbed, undisturbed)
        until_at_rest(pool.client, pool_name, 60)


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the harness says of requests that it tries again."""
    return [text for text in caplog.messages if "retrying" in text]
