"""What `lmpool top` shows, at any width, and what it makes of two looks."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from lmpool.cli.terminal import json_text
from lmpool.cli.top import _Page
from lmpool.cli.top_look import Look, rates
from lmpool.cli.top_screen import shown
from lmpool.errors import LmpoolError, ServerUnreachable
from lmpool.pool_view import ModelView, PoolView, QueueView
from lmpool.producer.statistics import (
    JobFailure,
    LanesStatistics,
    LaneStatistics,
    PoolStatistics,
    WorkerStatistics,
)
from tests.support.screens import WIDTHS, screen, unbroken

POOL = "a-pool-" + "p" * 56 + "z"
MODEL = "an-organisation/" + "m" * 70 + "-it"
ADAPTER = "adapter-" + "a" * 60 + "-1"


def worker(number: int, *failures: JobFailure) -> WorkerStatistics:
    return WorkerStatistics(
        id=f"{number}-{'w' * 50}-{number}-1234-ab",
        host=f"{number}-{'h' * 55}.example",
        pid=123_450 + number,
        engine="vllm",
        gpu=str(number),
        rows_per_second=1000.0 + number,
        lanes=16,
        own_jobs=90,
        stolen_jobs=10 * number,
        stolen_per_second=float(number),
        prompt_tokens=4_000,
        computed_tokens=1_000,
        execution="each distinct position once",
        control="",
        failures=list(failures),
    )


def view(**fields: Any) -> PoolView:
    statistics = PoolStatistics(
        computed=12_345_678, batches=123_456, failed=12, expired=3, evicted=7_654_321,
        own_jobs=900_000, stolen_jobs=100_000,
        prompt_tokens=4_000_000, computed_tokens=1_000_000,
        answers={"row": 12_000_000, "top": 345_678}, backlog=1234, held_bytes=6 << 30,
        lanes=LanesStatistics(
            lanes=64, in_use=48, waiting_jobs=470, waiting_lanes=9, longest_jobs=460,
            longest=[
                LaneStatistics(
                    shard=0, lane=17, priority="interactive", waiting=460, oldest_seconds=2.5,
                    home=worker(0)["id"],
                )
            ],
        ),
        oldest_seconds=567.8,
        workers=[worker(n, JobFailure(at=990.0 + n, reason=f"why {n}", jobs=1)) for n in range(3)],
    )  # fmt: skip
    queue = QueueView(jobs=1234, pending=64, oldest_seconds=2.5)
    found = PoolView(
        pool=POOL, url="redis://user:***@a-host.example:6379/0", server="Redis 7.0.15",
        read_at=1000.0, read_seconds=0.001,
        model=ModelView(
            model=MODEL, engine="vllm", dtype="bfloat16", encoding="bf16", vocab_size=128_256,
            max_prompt_tokens=8192, fingerprint="f" * 32, shards=1, lanes=4,
        ),
        statistics=statistics,
        queues={"interactive": queue, "batch": QueueView(jobs=0, pending=0, oldest_seconds=0.0)},
        dead_letters=2, adapters=[ADAPTER], memory_bytes=7 << 30, memory_max_bytes=16 << 30,
    )  # fmt: skip
    return replace(found, **fields)


def with_counts(**counts: Any) -> PoolView:
    found = view()
    return replace(found, statistics={**found.statistics, **counts})


def drawn(look: Look, width: int) -> list[str]:
    return screen(shown(look, Console(file=io.StringIO(), width=width)), width)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_name_is_lost_at_any_width(width: int) -> None:
    lines = drawn(Look(POOL, view()), width)
    assert max(map(len, lines)) <= width
    text = unbroken(lines)
    for name in (POOL, MODEL, ADAPTER, "why2", "why0", "12,345,678", "1,234(64withworkers"):
        assert name in text
    for each in view().workers:
        assert each["id"] in text
        assert each["host"] in text
        assert str(each["pid"]) in text


def test_what_an_operator_asks_is_there() -> None:
    lines = drawn(Look(POOL, view(), {"computed": 1500.0, "batches": 20.0, "evicted": 3.5}), 400)
    text = "\n".join(lines)
    assert "1,500/s, 12,345,678 computed: row 12,000,000, top 345,678" in text
    assert "123,456 (20/s), 75.0 answers each" in text
    assert "interactive 1,234 (64 with workers, oldest 2.5 s), batch 0" in text
    assert "6 GiB held, oldest 9 min 27 s, 7,654,321 evicted (3.5/s)" in text
    assert "12 failed, 3 expired, 2 dead letters: see lmpool dead list" in text
    assert "7 GiB of 16 GiB" in text
    failures = [line for line in lines if "why" in line]
    assert [line.split()[0] for line in failures] == ["8.0", "9.0", "10.0"]


def test_lanes_homes_steals_and_prefixes_are_there() -> None:
    lines = drawn(Look(POOL, view(), {"computed": 1.0, "batches": 1.0, "stolen_jobs": 12.25}), 400)
    text = "\n".join(" ".join(line.split()) for line in lines)
    assert "lanes 48 of 64 in use, 10 % of 1,000,000 jobs stolen (12.2/s)" in text
    assert f"longest lane 17: 460 wait, home {worker(0)['id']}" in text
    assert "and 8 more lanes: 470 wait in all" in text
    assert "prefixes at least 75 % of 4,000,000 prompt tokens kept, not computed" in text
    (second,) = [line for line in lines if line.startswith("│ 1-w")]
    assert [cell.strip() for cell in second.split("│")][-3:-1] == ["16", "10 % (1.0/s)"]
    # One lane a shard is everybody's, and so is the table without it.
    one = with_counts(lanes={**view().statistics["lanes"], "lanes": 1, "in_use": 1})
    text = "\n".join(drawn(Look(POOL, one), 400))
    assert "in use" not in text


def test_the_pace_is_the_workers_own_word_before_there_are_two_looks() -> None:
    assert "3,003/s" in "\n".join(drawn(Look(POOL, view()), 400))


def test_rates_are_what_was_counted_between_two_looks() -> None:
    now = with_counts(computed=12_345_778, evicted=7_654_321 + 4, answers={"row": 12_000_020})
    found = rates(view(), replace(now, read_at=1002.0))
    assert found is not None
    assert (found["computed"], found["evicted"], found["answers_row"]) == (50.0, 2.0, 10.0)


@pytest.mark.parametrize(
    "now",
    [
        replace(with_counts(computed=5), read_at=1002.0),  # a server that lost its keys
        view(),
        replace(view(), read_at=1002.0, model=None),
    ],
    ids=["fewer", "at the same moment", "no model"],
)
def test_counters_that_began_anew_have_no_rate(now: PoolView) -> None:
    assert rates(view(), now) is None


class Viewer:
    """A viewer whose looks are given."""

    pool = POOL

    def __init__(self, *looks: PoolView | LmpoolError) -> None:
        self._looks = [*looks]

    def read(self) -> PoolView:
        found = self._looks.pop(0)
        if isinstance(found, LmpoolError):
            raise found
        return found


def test_a_server_that_is_gone_leaves_the_last_figures_and_says_since_when() -> None:
    gone = ServerUnreachable("no answer from redis://h")
    viewer: Any = Viewer(view(), gone, gone, replace(view(), read_at=1010.0))
    first = Look(POOL).next(viewer)
    away = first.next(viewer)
    assert away.view is first.view
    still = away.next(viewer)
    assert still.gone_at == away.gone_at > 0
    text = "\n".join(drawn(still, 200))
    assert "no answer since " in text
    assert "no answer from redis://h" in text
    assert "12,345,678" in text
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    console.print(shown(still, console))
    (line,) = [s for s in console.file.getvalue().splitlines() if "12,345,678" in s]  # type: ignore[attr-defined]
    assert "\x1b[2m" in line or ";2m" in line
    back = still.next(viewer)
    assert back.error is None
    assert back.rates is None  # over the time in which nobody answered it would say little
    assert "no answer" not in "\n".join(drawn(back, 200))
    assert json.loads(json_text(still.as_dict()))["error"] == "no answer from redis://h"


def test_a_pool_that_nobody_serves_says_what_to_do() -> None:
    nobody = replace(view(), model=None, statistics={**view().statistics, "workers": []})
    text = unbroken(drawn(Look(POOL, nobody), 40))
    assert f"nobodyservesapool{POOL}" in text
    assert f"lmpoolworker--url'{nobody.url}'--pool{POOL}" in text


def test_a_pool_without_workers_says_what_waits() -> None:
    look = with_counts(workers=[])
    text = "\n".join(drawn(Look(POOL, look), 400))
    command = f"lmpool worker --url '{look.url}' --pool {look.pool}"
    assert f"no worker is alive, and 1,234 jobs wait: start one with {command}" in text


def test_names_of_others_are_shown_and_mean_nothing() -> None:
    odd = {
        **worker(1, JobFailure(at=999.0, reason="\x1b]0;x\x07[bold]", jobs=3)),
        "id": "\x1b[2Jw[red]",
    }
    text = "\n".join(drawn(Look(POOL, with_counts(workers=[odd])), 200))
    assert "\x1b" not in text
    assert "\\x1b[2Jw[red]" in text
    assert " (3 jobs), " in text
    assert "\\x07[bold]" in text


def page(look: Look, first: int, height: int) -> list[str]:
    return screen(_Page(look, first, 2.0), 60, height)


def test_a_low_terminal_says_how_much_there_is_below_and_scrolls() -> None:
    look = Look(POOL, view())
    whole = page(look, 0, 100)
    assert whole[-1] == "q ends, every 2 s"
    top = page(look, 0, 10)
    assert top[:9] == whole[:9]
    below = len(whole) - 1 - 9
    assert top[9] == f"q ends, every 2 s, j and k scroll: {below} more"
    assert page(look, 5, 10)[:9] == whole[5:14]
    console = Console(file=io.StringIO(), width=60, height=10)
    last = _Page(look, 0, 2.0).last_first(console)
    assert page(look, last, 10)[:9] == whole[-10:-1]
    assert page(look, 10_000, 10)[:9] == whole[-10:-1]


def test_json_has_no_infinity() -> None:
    assert (
        json_text({"a": [float("inf"), {"b": (float("nan"), 1.5)}]})
        == '{"a": [null, {"b": [null, 1.5]}]}'
    )
