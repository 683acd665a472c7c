"""Workers with the vLLM engine behind a pool: rows, dedup, aborts, adapters, deaths."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import psutil
import pytest

from lmpool.backends.contract import Reference
from lmpool.errors import PoolTimeout, PromptError
from lmpool.keys import PoolKeys
from lmpool.model_info import ModelInfo
from lmpool.producer.statistics import PoolStatistics
from lmpool.wants import Digester, Generate
from lmpool.wire import Job
from tests.support.clients import connected
from tests.support.engines import check_engines
from tests.support.pools import Asking, assert_at_rest, until_at_rest
from tests.support.protocol import Caller, new_job
from tests.support.server import RealServer
from tests.support.vllm_engine import (
    ENVIRONMENT,
    QUICK,
    TOLERANCE,
    need_vllm,
    prompts,
    write_adapter,
)
from tests.support.waiting import until
from tests.support.workers import WorkerProcess, worker_process

need_vllm()

pytestmark = [
    pytest.mark.engine,
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore"),
]

POOL = "vllm"
SETTINGS = {
    "engine": "vllm",
    "model": "tiny",
    "log_level": "debug",
    "result_ttl": 60,
}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.of("tiny")


def start(stack: ExitStack, url: str, pool: str, **options: object) -> WorkerProcess:
    settings = dict(SETTINGS)
    if "adapter_dirs" in options:
        settings["adapter_dirs"] = options.pop("adapter_dirs")
    return stack.enter_context(
        worker_process(
            url,
            pool,
            alive=False,
            environment=ENVIRONMENT,
            engine_opts={**QUICK, **options},
            **settings,
        )
    )


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[WorkerProcess]]]:
    """Two workers, of which the second has vLLM's engine in a process of its own."""
    with RealServer() as server, ExitStack() as stack:
        folders = tmp_path_factory.mktemp("adapters")
        write_adapter(folders / "style", seed=1)
        lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
        started = [
            start(stack, server.url, POOL, adapter_dirs=[str(folders)], **lora),
            start(stack, server.url, POOL, adapter_dirs=[str(folders)], own_process=True, **lora),
        ]
        for worker in started:
            worker.wait_until_alive(240)
        yield server.url, started


@pytest.fixture(scope="module")
def folder(workers, tmp_path_factory) -> str:
    return str(next(tmp_path_factory.getbasetemp().glob("adapters*/style")))


class TestPool:
    def test_serves_right_rows_from_both_workers(self, workers, reference):
        url, started = workers
        asked = 0
        with connected(url, POOL) as lm:

            def both_worked() -> PoolStatistics | None:
                nonlocal asked
                given = prompts(200, 60, seed=1000 + asked, shared=3)
                asked += len({p.tobytes() for p in given})
                rows = lm.batch_next_token_logprobs_sync([p.tolist() for p in given], timeout=120)
                assert np.abs(rows - reference.rows(given)).max() <= TOLERANCE
                found = lm.pool_statistics_sync()
                rates = [worker["rows_per_second"] for worker in found["workers"]]
                return found if len(rates) == 2 and min(rates) > 0 else None

            found = until(both_worked, 60, every=0.2)
            assert found["computed"] == asked
            assert lm.info.engine == "vllm"
        for worker in started:
            assert worker.process.poll() is None

    def test_computes_equal_prompts_of_several_callers_once(self, workers):
        url, _ = workers
        given = [p.tolist() for p in prompts(100, 30, seed=22)]
        with connected(url, POOL, cache_bytes=0) as one, connected(url, POOL, cache_bytes=0) as two:
            before = one.pool_statistics_sync()["computed"]
            asking = [Asking(lm, given * 2) for lm in (one, two)]
            rows = [asker.rows() for asker in asking]
            distinct = len({tuple(p) for p in given})
            until(lambda: one.pool_statistics_sync()["computed"] - before == distinct)
        assert np.array_equal(rows[0], rows[1])
        assert np.array_equal(rows[0][:100], rows[0][100:])

    def test_samples_and_errors_reach_their_callers(self, workers):
        url, _ = workers
        with connected(url, POOL) as lm:
            ids = lm.sample_sync([1, 5, 9], 12, [], temperature=0.8, seed=3, timeout=60)
            again = lm.sample_sync([1, 5, 9], 12, [], temperature=0.8, seed=3, timeout=60)
            assert len(ids) == 12
            assert ids == again
            with pytest.raises(PromptError, match="512"):
                lm.next_token_logprobs_sync([3] * 512)
            with pytest.raises(PromptError, match="2000"):
                lm.next_token_logprobs_sync([2000])

    def test_what_callers_cancel_or_let_expire_is_ended_in_vllm(self, workers, redis_free):
        url, started = workers
        ended = sum(w.log.count("that nobody waits for") for w in started)

        async def leave(lm) -> None:
            waits = [
                asyncio.ensure_future(lm.sample([7, i], 500, [], seed=i, timeout=60))
                for i in range(20)
            ]
            await asyncio.sleep(0.4)
            for wait in waits[:10]:
                wait.cancel()
            await asyncio.gather(*waits[:10], return_exceptions=True)
            found = await asyncio.gather(*waits[10:])
            assert all(len(ids) == 500 for ids in found)
            with pytest.raises(PoolTimeout):
                await lm.sample([8, 8], 500, [], seed=1, timeout=0.3)

        with connected(url, POOL) as lm:
            asyncio.run(leave(lm))
            assert len(lm.next_token_logprobs_sync([8, 9], timeout=60)) == 2000
        until(lambda: sum(w.log.count("that nobody waits for") for w in started) > ended)
        until_at_rest(redis_free(url), POOL)

    def test_a_job_that_expires_while_vllm_runs_it_is_ended_there(self, workers, redis_free):
        url, started = workers
        ended = sum(w.log.count("that nobody waits for") for w in started)
        server = redis_free(url)
        packed = server.get(PoolKeys(POOL).info)
        fingerprint = ModelInfo.unpack(packed).fingerprint
        caller = Caller(server, PoolKeys(POOL).shard(fingerprint[:8], 0))
        want = Generate(500, (), 1.0, 0)
        seconds, microseconds = server.time()
        now = seconds * 1000 + microseconds // 1000

        def job(number: int, deadline: int | None) -> Job:
            plain = new_job(9, 9, number, deadline=deadline)
            digest = Digester(fingerprint).digest(want, plain.tokens)
            return replace(plain, digest=digest, want=want, sent=now)

        # In this company it takes several seconds.
        company = [job(10 + number, None) for number in range(60)]
        late = job(5, now + 1000)
        try:
            caller.enqueue(late, *company)
            notices = until(caller.notices)
            told = [(notice.digest, notice.status) for notice in notices]
            assert told == [(late.digest, "expired")]
            until(lambda: sum(w.log.count("that nobody waits for") for w in started) > ended)
        finally:
            caller.withdraw(*company)
            caller.vanish()
        until_at_rest(server, POOL)
        assert not server.exists(caller.shard.result(late.digest))

    def test_adapters(self, workers, folder, reference):
        url, _ = workers
        given = prompts(30, 40, seed=23)
        with connected(url, POOL) as lm:
            lm.add_new_lora(folder, "style")
            ids = [p.tolist() for p in given]
            for _ in range(2):  # base and adapter in the stream together
                asking = Asking(lm, ids)
                rows = lm.batch_next_token_logprobs_sync(ids, lora_name="style", timeout=60)
                assert np.abs(rows - reference.rows(given, folder)).max() <= TOLERANCE
                assert np.abs(asking.rows() - reference.rows(given)).max() <= TOLERANCE
                lm.clear_cache()

    def test_jobs_of_a_dead_engine_are_run_elsewhere(self, workers, reference):
        url, started = workers
        given = prompts(3000, 60, seed=24)
        second = started[1]
        with connected(url, POOL) as lm:
            asking = Asking(lm, [p.tolist() for p in given])
            until(lambda: lm.pool_statistics_sync()["computed"] > 500, 60)
            for child in psutil.Process(second.pid).children(recursive=True):
                if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline()):
                    child.send_signal(signal.SIGKILL)
            assert np.abs(asking.rows() - reference.rows(given)).max() <= TOLERANCE
        assert second.wait(60) != 0
        assert "was killed by signal 9" in second.log

    def test_sigterm_under_load_loses_nothing(self, workers, reference, redis_free):
        url, _ = workers
        given = prompts(1500, 60, seed=25)
        with ExitStack() as stack:
            third = start(stack, url, POOL, enable_lora=True, max_loras=1, max_lora_rank=8)
            third.wait_until_alive(240)
            with connected(url, POOL) as lm:
                before = lm.pool_statistics_sync()["computed"]
                asking = Asking(lm, [p.tolist() for p in given])
                until(lambda: lm.pool_statistics_sync()["computed"] - before > 300, 60)
                third.terminate()
                assert np.abs(asking.rows() - reference.rows(given)).max() <= TOLERANCE
            assert third.wait(60) == 0
        assert_at_rest(redis_free(url), POOL)


@pytest.fixture
def redis_free():
    import redis

    with ExitStack() as stack:
        yield lambda url: stack.enter_context(redis.Redis.from_url(url, protocol=2))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"enforce_eager": True}, id="eager"),
        pytest.param({}, id="compiled", marks=pytest.mark.chaos),  # half a minute of compiling
    ],
)
def test_doctor_compares_it_with_transformers(options: dict[str, bool]) -> None:
    check_engines("vllm", "its own", **options)
