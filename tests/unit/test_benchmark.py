"""The quick measurement of a pool, without a real server."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from lmpool import benchmark
from lmpool.cli import app
from lmpool.errors import SettingsError, UnknownPool
from tests.support.workers import in_process_worker


def test_a_pool_is_measured(fake_url: str, pool_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "CACHED_SECONDS", 0.05)
    with in_process_worker(fake_url, pool_name) as worker:
        found = benchmark.measure(fake_url, pool_name, seconds=0.2, concurrency=8, length=5)
        assert found.workers == 1
    assert (found.pool, found.engine) == (pool_name, "mock")
    assert (found.prompt_tokens, found.concurrency) == (5, 8)
    assert found.rows >= 8
    assert 0 < found.single_ms_median <= found.single_ms_p95
    assert 0 < found.row_ms_median <= found.row_ms_p95
    assert found.megabytes_per_second == pytest.approx(found.rows_per_second * 1024 / 1e6, abs=0.01)
    assert 1 <= found.rows_per_batch <= worker.service.options.batch_size
    assert found.cached_rows_per_second > 0


def test_what_a_client_has_before_it_is_counted_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late:
        computed = 0

        def pool_statistics_sync(self) -> dict[str, int]:
            self.computed += 1
            return {"computed": self.computed}

    lm: Any = Late()
    monkeypatch.setattr(benchmark, "COUNTED_WITHIN", 60.0)
    assert benchmark.when_counted(lm, 5)["computed"] == 5
    monkeypatch.setattr(benchmark, "COUNTED_WITHIN", 0.0)
    assert benchmark.when_counted(lm, 1000)["computed"] < 1000


def test_a_pool_that_is_busy_or_goes_away_is_one_error(
    fake_url: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMPOOL_WHEN_BUSY", "raise")
    busy = {"max_backlog": 1, "batch_size": 1, "engine_opts": {"delay": 0.05}}
    asked = ["bench", "--seconds", "0.5", "--url", fake_url, "--pool", pool_name]
    with in_process_worker(fake_url, pool_name, **busy):
        done = CliRunner().invoke(app, asked)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert re.fullmatch(r"error: pool .* has 1 jobs waiting, its bound: .*\n", done.stderr)


@pytest.mark.parametrize(
    "given", [{"seconds": 0}, {"seconds": "x"}, {"concurrency": 0}, {"length": True}]
)
def test_what_cannot_be_measured_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"{next(iter(given))}=.*: write"):
        benchmark.measure(**given)


def test_a_pool_that_is_none_is_not_measured(
    fake_url: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMPOOL_WORKERS_TIMEOUT", "0.2")
    with pytest.raises(UnknownPool):
        benchmark.measure(fake_url, pool_name, seconds=0.1)
