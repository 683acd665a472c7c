"""What commands print where there is little room."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console, Group
from typer.main import get_command
from typer.testing import CliRunner

from lmpool.benchmark import Measurement
from lmpool.cli import app, bench, doctor
from lmpool.cli.pool import counters_table, executions, workers_table
from lmpool.cli.surprise import ScoredText
from lmpool.cli.terminal import shortened
from lmpool.cli.worker import read_options
from lmpool.engine_check import Comparison
from lmpool.errors import SettingsError
from lmpool.producer.statistics import (
    LanesStatistics,
    LaneStatistics,
    PoolStatistics,
    WorkerStatistics,
)
from lmpool.wants import TextScores
from tests.support.screens import WIDTHS, screen, unbroken

NAME = "a-" + "n" * 59 + "-z"
MODEL = "an-organisation/" + "m" * 70 + "-it"
WORKER = WorkerStatistics(
    id="a-long-host-name-gpu0-123456-ab12",
    host="a-long-host-name",
    pid=123456,
    engine="vllm",
    gpu="0",
    rows_per_second=12345.6,
    lanes=24,
    own_jobs=900_000,
    stolen_jobs=100_000,
    stolen_per_second=12.3,
    prompt_tokens=4_000_000,
    computed_tokens=1_000_000,
    execution="each distinct position once",
    control="",
    failures=[],
)
STATISTICS = PoolStatistics(
    computed=12_345_678,
    batches=1_234_567,
    failed=12,
    expired=3,
    evicted=7_654_321,
    own_jobs=900_000,
    stolen_jobs=100_000,
    prompt_tokens=4_000_000,
    computed_tokens=1_000_000,
    answers={"row": 12_000_000, "top": 345_678},
    backlog=99_999,
    held_bytes=6 << 30,
    lanes=LanesStatistics(
        lanes=64,
        in_use=48,
        waiting_jobs=470,
        waiting_lanes=9,
        longest_jobs=460,
        longest=[
            LaneStatistics(
                shard=0,
                lane=17,
                priority="interactive",
                waiting=460,
                oldest_seconds=2.5,
                home=WORKER["id"],
            )
        ],
    ),
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


@pytest.mark.parametrize("width", WIDTHS)
def test_lanes_are_said_where_there_are_homes(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    other = WorkerStatistics({**WORKER, "id": "b", "own_jobs": 0, "stolen_jobs": 0})
    text = unbroken(screen(workers_table([WORKER, other], console), width))
    assert "10%" in text
    assert "(12.3/s)" in text
    assert "24" in text
    # One alone is the home of all there is.
    assert "stolen" not in unbroken(screen(workers_table([WORKER], console), width))


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


@pytest.mark.parametrize("width", WIDTHS)
def test_no_name_is_lost_at_any_width(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    measured = replace(MEASUREMENT, pool=NAME, model=MODEL, engine=NAME)
    others = [Comparison(NAME, 1e-5, True, True, True, 123456.0)] * 2
    shown = {
        "stats": Group(
            counters_table(f"pool {NAME}: {MODEL}", STATISTICS, 1234.5, console),
            workers_table([{**WORKER, "id": NAME, "host": MODEL, "gpu": "0"}], console),
            *executions([{**WORKER, "execution": MODEL}]),
        ),
        "bench": bench._shown(measured, console),
        "doctor --engines": doctor._compared(others, MODEL, console),
    }
    for command, found in shown.items():
        lines = screen(found, width)
        assert max(map(len, lines)) <= width, command
        assert "…" not in "".join(lines), command
        text = unbroken(lines)
        assert NAME in text, command
        assert MODEL in text, command
    assert "12,345rows/s" in unbroken(screen(shown["bench"], width))
    assert "123,456" in unbroken(screen(shown["doctor --engines"], width))


@pytest.mark.parametrize("width", [14, 15, 21, 62])
def test_what_is_shortened_keeps_its_ends(width: int) -> None:
    short = shortened(NAME, width)
    assert cell_len(short) == width
    begin, end = short.split("…")
    assert NAME.startswith(begin)
    assert NAME.endswith(end)
    assert abs(len(begin) - len(end)) <= 1
    assert cell_len(shortened("日本語" * 20, width)) <= width
    assert shortened("short", width) == "short"


def test_long_tokens_of_a_scored_text_keep_their_ends() -> None:
    tokens = [b"<s>", b"-----------------------end", b"ok"]
    scores = TextScores(
        logprobs=np.zeros(2, np.float32), ranks=np.ones(2, np.int32),
        top_logprobs=None, token_logprobs=None,
    )  # fmt: skip
    scored = ScoredText(tokens, [0, 1, 2], scores, 0)
    console = Console(file=io.TextIOWrapper(io.BytesIO(), "utf-8"), width=60)
    _, _, long, short = [line.plain.rstrip() for line in scored.lines(console)]
    assert long.endswith("-------…---end")
    assert short.endswith("  ok")


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
    assert "localhost:" not in shown, "which is no URL"
    for parameter in command.params:
        for name in parameter.opts:
            if name.startswith("-") and not parameter.hidden:
                assert f" {name} " in shown, name


SHOWS_NOTHING = {"worker", "gateway", "exporter", "page", "gateway-key", "demo"}
"""Commands that serve, write a line for a file, or show themselves off."""


def test_every_command_that_shows_something_shows_it_to_programs() -> None:
    """A new command takes --json, or says above that it shows nothing."""
    for path, command in commands(get_command(app)):
        if hasattr(command, "commands") or " ".join(path) in SHOWS_NOTHING:
            continue
        options = {name for parameter in command.params for name in parameter.opts}
        assert "--json" in options, " ".join(path)


def test_what_is_not_written_is_no_setting() -> None:
    given = {"pool": "p", "model": None, "replace": False, "batch_size": "8"}
    assert read_options(given) == {"pool": "p", "batch_size": "8"}


def test_lists_and_maps_are_json() -> None:
    given = {"engine_opts": '{"a": 1}', "adapter_dirs": '["/a"]'}
    assert read_options(given) == {"engine_opts": {"a": 1}, "adapter_dirs": ["/a"]}
    with pytest.raises(SettingsError, match=r"--adapter-dirs /a.*write JSON.*/srv/adapters"):
        read_options({"adapter_dirs": "/a"})
