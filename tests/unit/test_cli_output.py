"""What commands print where there is little room."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lmpool.cli import app
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
)
STATISTICS = PoolStatistics(
    computed=12_345_678, batches=1_234_567, failed=12, expired=3, backlog=99_999, workers=[WORKER]
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


def test_names_of_options_are_never_cut() -> None:
    shown = CliRunner().invoke(app, ["worker", "--help"], env={"COLUMNS": "60"}).stdout
    for name in ("--max-batch-tokens", "--max-prompt-tokens", "--client-backlog"):
        assert name in shown
    assert "auto, float32," in shown


def test_what_is_not_written_is_no_setting() -> None:
    given = {"pool": "p", "model": None, "replace": False, "batch_size": "8"}
    assert read_options(given) == {"pool": "p", "batch_size": "8"}


def test_lists_and_maps_are_json() -> None:
    given = {"engine_opts": '{"a": 1}', "adapter_dirs": '["/a"]'}
    assert read_options(given) == {"engine_opts": {"a": 1}, "adapter_dirs": ["/a"]}
    with pytest.raises(SettingsError, match=r"--adapter-dirs /a.*write JSON.*/srv/adapters"):
        read_options({"adapter_dirs": "/a"})
