"""What commands print where there is little room."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from lmpool.benchmark import Measurement
from lmpool.cli import app, bench
from lmpool.cli.pool import counters_table, executions, workers_table
from lmpool.cli.worker import read_options
from lmpool.errors import SettingsError
from lmpool.producer.statistics import PoolStatistics, WorkerStatistics

WORKER = WorkerStatistics(
    id="a-long-host-name-gpu0-123456-ab12",
    host="a-long-host-name",
    pid=123456,
    engine="vllm",
    gpu="0",
    rows_per_second=12345.6,
    execution="each distinct position once",
    failures=[],
)
STATISTICS = PoolStatistics(
    computed=12_345_678,
    batches=1_234_567,
    failed=12,
    expired=3,
    evicted=7_654_321,
    answers={"row": 12_000_000, "top": 345_678},
    backlog=99_999,
    held_bytes=6 << 30,
    oldest_seconds=567.8,
    workers=[WORKER],
)
MEASUREMENT = Measurement(
    pool="llama",
    model="m",
    engine="vllm",
    workers=4,
    prompt_tokens=32,
    single_ms_median=12.2,
    single_ms_p95=33.3,
    concurrency=256,
    rows=1000,
    rows_per_second=12345.0,
    megabytes_per_second=1234.5,
    row_ms_median=1.0,
    row_ms_p95=2.0,
    rows_per_batch=33.0,
    cached_rows_per_second=123456.0,
)


def printed(width: int) -> str:
    output = io.StringIO()
    console = Console(file=output, width=width, highlight=False)
    console.print(counters_table("pool p: m", STATISTICS, 1234.5, console))
    console.print(workers_table([WORKER], console))
    shown = output.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    return shown


@pytest.mark.parametrize("width", [60, 80, 120])
def test_statistics_are_never_cut(width: int) -> None:
    shown = printed(width)
    assert "…" not in shown
    for part in ("computed", "12,345,678", "a batch", "10.0", "backlog", "rows/s", "1,234"):
        assert part in shown
    for part in ("row 12,000,000", "top 345,678"):
        assert part in shown
    for part in ("held", "6 GiB", "oldest", "9 min 27 s", "evicted", "7,654,321"):
        assert part in shown
    for part in (WORKER["id"], WORKER["host"], "123456", "vllm", "12,346"):
        assert part in shown


def test_wide_terminals_have_tables() -> None:
    assert printed(120).count("┏") == 2
    assert "┏" not in printed(40)


def test_how_workers_compute_is_said_once_for_each_way() -> None:
    other = WorkerStatistics(
        {**WORKER, "id": "b", "execution": "one prompt at a time: [its reason]"}
    )
    silent = WorkerStatistics({**WORKER, "id": "c", "execution": None})
    assert executions([WORKER, WORKER]) == ["computed: each distinct position once"]
    assert executions([silent]) == []
    first, second = executions([WORKER, other, silent])
    assert first == f"computed: each distinct position once ({WORKER['id']})"
    assert second == r"computed: one prompt at a time: \[its reason] (b)"


def test_names_of_models_are_never_cut() -> None:
    model = "meta-llama/Llama-3.2-1B-Instruct-with-a-long-name"
    output = io.StringIO()
    console = Console(file=output, width=60, highlight=False)
    console.print(counters_table(f"pool llama: {model}", STATISTICS, None, console))
    console.print(bench._table(replace(MEASUREMENT, model=model)))
    assert output.getvalue().count(model) == 2


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


@pytest.mark.parametrize(
    ("path", "command"),
    [pytest.param(*found, id=" ".join(found[0])) for found in commands(get_command(app))],
)
def test_nothing_of_a_commands_help_is_cut(path: tuple[str, ...], command: Any) -> None:
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "60"}).stdout
    assert "…" not in shown
    for parameter in command.params:
        for name in parameter.opts:
            if name.startswith("-") and not parameter.hidden:
                assert f" {name} " in shown, name


def test_what_is_not_written_is_no_setting() -> None:
    given = {"pool": "p", "model": None, "replace": False, "batch_size": "8"}
    assert read_options(given) == {"pool": "p", "batch_size": "8"}


def test_lists_and_maps_are_json() -> None:
    given = {"engine_opts": '{"a": 1}', "adapter_dirs": '["/a"]'}
    assert read_options(given) == {"engine_opts": {"a": 1}, "adapter_dirs": ["/a"]}
    with pytest.raises(SettingsError, match=r"--adapter-dirs /a.*write JSON.*/srv/adapters"):
        read_options({"adapter_dirs": "/a"})
