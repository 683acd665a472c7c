"""The command line, as those who type it see it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from typer.testing import CliRunner, Result

from lmpool import __version__
from lmpool.backends.mock import mock_row
from lmpool.cli import app
from lmpool.cli.demo.load import CHECKED, ROUNDS, make_work
from lmpool.exit_status import EXIT_REFUSED
from tests.support.ports import free_port
from tests.support.processes import short_folder, users_of, wait_until_gone
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import clean_environment, in_process_worker

LMPOOL = [sys.executable, "-m", "lmpool"]


def lmpool(*arguments: str) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def served(server_url: str, pool_name: str) -> Iterator[list[str]]:
    """The options that name a pool with one worker of the mock engine."""
    with in_process_worker(server_url, pool_name):
        yield ["--url", server_url, "--pool", pool_name]


# --- all commands --------------------------------------------------------------------------------


def test_help_is_quick_because_it_imports_little() -> None:
    code = (
        "import sys, lmpool.cli; heavy = {'torch', 'transformers', 'numpy', 'redis', 'arq'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_lists_the_commands() -> None:
    shown = lmpool("--help")
    assert shown.exit_code == 0
    for command in (
        "demo",
        "worker",
        "gateway",
        "gateway-key",
        "logprobs",
        "score",
        "ping",
        "stats",
        "shards",
        "doctor",
        "bench",
    ):
        assert re.search(rf"\b{command}\b", shown.stdout)


def test_each_setting_of_a_worker_is_an_option() -> None:
    shown = subprocess.run(
        [*LMPOOL, "worker", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**clean_environment(), "COLUMNS": "200"},
    ).stdout
    for option in ("--gpus", "--workers", "--url", "--batch-size", "--engine-opts", "--replace"):
        assert option in shown
    assert "--events" not in shown


def test_the_version() -> None:
    assert lmpool("--version").stdout.strip() == f"lmpool {__version__}"


def test_a_command_that_is_none_is_refused() -> None:
    refused = lmpool("sevre")
    assert refused.exit_code == 2
    assert "No such command" in refused.output


@pytest.mark.parametrize("arguments", [["config"], ["config", "--json"], ["--version"], ["--help"]])
def test_output_that_finds_no_room_is_said_in_a_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:  # a device of Linux, which is always full
        done = subprocess.run(
            [*LMPOOL, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=150,
            env=clean_environment(), check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "error: what it says cannot be written: No space left on device\n"


ARQ = [sys.executable, "-P", "-m", "arq", "lmpool.worker.WorkerSettings"]


@pytest.mark.parametrize(
    ("stderr", "command", "status"),
    [
        ("full", [*LMPOOL, "worker", "--pool", "a b"], EXIT_REFUSED),
        ("left", [*LMPOOL, "worker", "--pool", "a b"], EXIT_REFUSED),
        ("full", ARQ, EXIT_REFUSED),
        ("left", [*ARQ, "--check"], EXIT_REFUSED),
        ("full", [*LMPOOL, "stats", "--pool", "a b"], 2),
        ("full", [*LMPOOL, "sevre"], 2),
        ("full", [*LMPOOL, "gateway-key"], 2),  # a key that nobody has seen
    ],
)
def test_a_stderr_that_takes_nothing_changes_no_status(
    stderr: str, command: list[str], status: int
) -> None:
    reader, left = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=full if stderr == "full" else left,
            timeout=150, env=clean_environment() | {"LMPOOL_POOL": "a b"}, check=False,
        )  # fmt: skip
    os.close(left)
    assert done.returncode == status


@pytest.mark.parametrize("command", ["gateway", "exporter"])
def test_a_command_that_serves_does_so_without_a_stderr(
    command: str, server_url: str, pool_name: str
) -> None:
    port = free_port()
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [*LMPOOL, command, "--url", server_url, "--pool", pool_name, "--port", str(port)],
            stdout=subprocess.DEVNULL, stderr=full, env=clean_environment(),
        )  # fmt: skip
    try:
        until(
            lambda: process.poll() is not None or _answers(f"http://127.0.0.1:{port}/health"),
            60,
            what=f"the {command} to serve",
        )
        assert process.poll() is None
    finally:
        process.terminate()
        assert process.wait(60) == 0


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code > 0
    except httpx.TransportError:
        return False


def test_a_reader_that_goes_away_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*LMPOOL, "config", "--json"], stdout=writer, stderr=subprocess.PIPE, text=True,
        timeout=150, env=clean_environment(), check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("closed", "command", "status"),
    [
        (">&-", [*LMPOOL, "config"], 0),
        (">&-", [*LMPOOL, "--version"], 0),
        (">&- 2>&-", [*LMPOOL, "sevre"], 2),
        ("2>&-", [*LMPOOL, "dead", "show"], 2),
        ("2>&-", [*LMPOOL, "ping"], 2),
        ("2>&-", [*LMPOOL, "worker", "--batch-size", "0"], EXIT_REFUSED),
        ("2>&-", ["env", "LMPOOL_BATCH_SIZE=0", *ARQ], EXIT_REFUSED),
        ("2>&-", [*ARQ, "--check"], 70),
        ("<&-", [*LMPOOL, "score", "-"], 2),
    ],
)
def test_a_standard_stream_may_be_closed(closed: str, command: list[str], status: int) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{shlex.join(command)} {closed}"], capture_output=True, text=True,
        timeout=150, env=clean_environment() | {"LMPOOL_URL": "redis://127.0.0.1:1"}, check=False,
    )  # fmt: skip
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert done.stdout == ""  # errors are not for who reads what was asked for
    if closed == "<&-":
        assert done.stderr == "error: the standard input is empty: there is nothing to score\n"


def in_a_deleted_folder(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command there, where transformers looks for its working directory as it is imported."""
    (folder / "transformers.py").write_text("import os; os.getcwd()")
    (folder / "gone").mkdir()
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    deleted = f"cd {folder / 'gone'} && rmdir {folder / 'gone'} && exec {shlex.join(command)}"
    return subprocess.run(
        ["sh", "-c", deleted], capture_output=True, text=True, timeout=150, check=False,
        env={**clean_environment(), "PYTHONPATH": os.pathsep.join(path)},
    )  # fmt: skip


DELETED = re.compile(r"error: the working directory was deleted: change to a .*, and try again\n")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("worker --engine mock --url redis://127.0.0.1:1", 78),
        ("gateway --pool x --port 0", 78),
        ("page --port 0 --url redis://127.0.0.1:1", 78),
        ("--config lmpool.toml config", 2),
    ],
)
def test_a_working_directory_that_was_deleted_is_told_of(
    arguments: str, status: int, tmp_path: Path
) -> None:
    done = in_a_deleted_folder(tmp_path, *LMPOOL, *arguments.split())
    assert (done.returncode, done.stdout) == (status, "")
    assert DELETED.fullmatch(done.stderr)


def test_a_pool_of_ones_own_is_not_begun_in_a_deleted_folder(tmp_path: Path) -> None:
    done = in_a_deleted_folder(tmp_path, *LMPOOL, "demo", "--workers", "1")
    assert done.returncode == 2
    assert DELETED.search(done.stderr)
    assert "Traceback" not in done.stderr


def test_a_tokenizer_is_not_loaded_in_a_deleted_folder(tmp_path: Path) -> None:
    load = (
        "from lmpool.producer.tokens import load_tokenizer; from lmpool.vocabulary import *; "
        "load_tokenizer(Vocabulary([], {'tokenizer.json': b''}), None)"
    )
    done = in_a_deleted_folder(tmp_path, sys.executable, "-c", load)
    assert "SettingsError: the working directory was deleted" in done.stderr


def test_lm_eval_is_not_begun_in_a_deleted_folder(tmp_path: Path) -> None:
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__init__.py").write_text("import os; os.getcwd()")
    run = (sys.executable, "-m", "lmpool.integrations.lm_eval")
    done = in_a_deleted_folder(tmp_path, *run)
    assert done.returncode == 1
    assert "SettingsError: the working directory was deleted" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ("--version", 0, ""),
        ("worker --help", 0, ""),
        ("config", 0, ""),
        ("gateway-key x", 0, ""),
        ("ping --url redis://127.0.0.1:1", 2, "no answer from"),
        ("stats --url redis://127.0.0.1:1", 2, "no answer from"),
        ("dead list --url redis://127.0.0.1:1", 2, "no answer from"),
        ("score nothing", 2, "nothing cannot be read"),
    ],
)
def test_who_needs_no_working_directory_does_without(
    arguments: str, status: int, said: str, tmp_path: Path
) -> None:
    done = in_a_deleted_folder(tmp_path, *LMPOOL, *arguments.split())
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "deleted" not in done.stderr


@pytest.mark.parametrize("name", ["~nobody-of-here/nope.toml", "~/nope.toml"])
def test_a_file_in_nobodys_home_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    refused = lmpool("--config", name, "config")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"--config {name} cannot be read: No such file" in re.sub(r"\s+", " ", refused.stderr)
    monkeypatch.setenv("LMPOOL_CONFIG", name)
    refused = lmpool("config")
    assert refused.exit_code == 2
    assert f"LMPOOL_CONFIG={name} cannot be read: No such file" in refused.stderr
    refused = lmpool("plan", "--model", name, "--prompt-rate", "1")
    assert refused.exit_code == 2


@pytest.mark.parametrize(("command", "status"), [("config", 2), ("gateway", 78), ("page", 78)])
def test_a_file_of_settings_is_blamed_on_the_option_that_names_it(
    tmp_path: Path, command: str, status: int
) -> None:
    refused = lmpool("--config", str(tmp_path / "nope.toml"), command)
    assert refused.exit_code == status
    said = re.sub(r"\s+", " ", refused.stderr)
    assert re.match(r"error: --config /\S+nope.toml cannot be read: No such file or dir", said)


def test_the_settings_of_a_worker_are_refused_in_their_own_words() -> None:
    refused = CliRunner(env={"LMPOOL_BATCH_SIZE": "x"}).invoke(app, ["config"])
    assert refused.stderr.startswith("error: the settings of a worker: LMPOOL_BATCH_SIZE='x': ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ping", "--url", "redis://u:geheim@127.0.0.1:1"], "no answer from redis://u:***@127"),
        (["stats", "--url", "http://u:geheim@h"], "unknown scheme 'http'"),
        (["logprobs", "x", "--pool", "a b"], "no pool name"),
        (["bench", "--url", "redis://:geheim@127.0.0.1:1"], "no answer from redis://:***@"),
        (["demo", "--engine", "mokc", "--workers", "1"], "did you mean 'mock'?"),
    ],
)
def test_errors_are_one_line_without_passwords(arguments: list[str], said: str) -> None:
    done = subprocess.run(
        [*LMPOOL, *arguments], capture_output=True, text=True, env=clean_environment(), timeout=150
    )
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert "geheim" not in done.stdout + done.stderr


# --- commands that ask a pool --------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--adapter", "--lora"])
@pytest.mark.parametrize("command", ["logprobs", "generate"])
def test_an_adapter_has_both_names(served: list[str], command: str, option: str) -> None:
    refused = lmpool(command, "abc", option, "nobody", *served)
    assert refused.exit_code == 2
    assert "nobody" in refused.output


def test_logprobs_shows_the_likeliest_tokens(served: list[str]) -> None:
    shown = lmpool("logprobs", "abc", "-k", "3", *served)
    assert shown.exit_code == 0, shown.output
    title, *lines = shown.stdout.splitlines()
    assert "3 tokens" in title
    row = np.exp(mock_row([*b"abc"], 256))
    best = np.sort(row)[::-1][:3]
    assert [line.split("%")[0].split()[-1] for line in lines] == [f"{100 * p:.1f}" for p in best]
    assert lines[0].count("█") == 40


def test_logprobs_for_programs(served: list[str]) -> None:
    shown = lmpool("logprobs", "abc", "-k", "300", "--json", *served)
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    row = mock_row([*b"abc"], 256)
    assert [each["id"] for each in found["tokens"]] == np.argsort(-row, kind="stable").tolist()
    assert found["tokens"][0]["logprob"] == pytest.approx(float(row.max()), abs=1e-6)
    assert found["rest"] is None  # of no other token
    by_id = {each["id"]: each["token"] for each in found["tokens"]}
    assert (by_id[97], by_id[200]) == ("a", "\ufffd")


def test_ping_tells_who_answers(served: list[str]) -> None:
    shown = lmpool("ping", *served)
    assert shown.exit_code == 0, shown.output
    assert "1 alive" in shown.stdout
    assert "256 tokens" in shown.stdout
    assert re.search(r"\d\.\d\d ms", shown.stdout)


def test_ping_fails_without_a_worker(server_url: str, pool_name: str) -> None:
    with in_process_worker(server_url, pool_name):
        pass
    shown = lmpool("ping", "--url", server_url, "--pool", pool_name)
    assert shown.exit_code == 1
    assert "0 alive" in shown.stdout


def test_ping_fails_without_a_pool(server_url: str, pool_name: str) -> None:
    shown = lmpool("ping", "--url", server_url, "--pool", pool_name)
    assert shown.exit_code == 2
    assert f"no pool '{pool_name}'" in shown.output


def test_stats_are_a_table_or_json(served: list[str]) -> None:
    lmpool("logprobs", "abc", *served)
    shown = lmpool("stats", "--json", *served)
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert (found["computed"], found["batches"], found["backlog"]) == (1, 1, 0)
    assert found["workers"][0]["pid"] == os.getpid()
    table = lmpool("stats", *served).stdout
    assert str(os.getpid()) in table
    assert "backlog" in table
    assert "computed: hashes of prompts" in table


def test_stats_can_be_watched(served: list[str]) -> None:
    with subprocess.Popen(
        [*LMPOOL, "stats", "--json", "--watch", "--every", "0.1", *served],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    ) as watching:
        assert watching.stdout is not None
        found = [json.loads(watching.stdout.readline()) for _ in range(3)]
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=150)
    assert [looked["computed"] for looked in found] == [0, 0, 0]
    assert watching.returncode == 130
    assert errors == ""


def test_bench_measures(served: list[str]) -> None:
    shown = lmpool(
        "bench", "--seconds", "0.3", "--concurrency", "16", "--length", "5", "--json", *served
    )
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["workers"] == 1
    assert found["rows"] >= 16
    assert found["rows_per_second"] > 0
    assert 0 < found["single_ms_median"] <= found["single_ms_p95"]
    assert 1 <= found["rows_per_batch"] <= 64
    assert found["cached_rows_per_second"] > 0
    assert "rows/s" in lmpool("bench", "--seconds", "0.1", *served).stdout


# --- the doctor ----------------------------------------------------------------------------------


@pytest.fixture
def _at_any_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor finds nothing in how long a server takes to answer."""
    monkeypatch.setattr("lmpool.diagnosis.SLOW", 60.0)


@pytest.mark.usefixtures("_at_any_pace")
def test_the_doctor_finds_a_healthy_pool_healthy(pool_name: str, server_binary: str) -> None:
    with RealServer(maxmemory="100mb") as server, in_process_worker(server.url, pool_name):
        shown = lmpool("doctor", "--url", server.url, "--pool", pool_name)
    assert shown.exit_code == 0, shown.output
    assert "nothing is wrong, 0 to note" in shown.stdout
    assert "1 worker alive" in shown.stdout


@pytest.mark.usefixtures("_at_any_pace")
def test_the_doctor_finds_what_is_wrong(pool_name: str, server_binary: str) -> None:
    options = {"maxmemory": "100mb", "maxmemory_policy": "allkeys-lru", "save": "3600 1"}
    with RealServer(**options) as server:
        with in_process_worker(server.url, pool_name):
            pass
        shown = lmpool("doctor", "--url", server.url, "--pool", pool_name)
    assert shown.exit_code == 1
    assert "allkeys-lru may drop job streams" in shown.stdout
    assert "CONFIG SET maxmemory-policy noeviction" in shown.stdout
    assert "none of its workers is alive" in shown.stdout
    assert "snapshots are on" in shown.stdout
    assert "2 wrong, 1 to note" in shown.stdout


def test_the_doctor_counts_the_cores_of_a_server_beside_it(
    pool_name: str, server_binary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with (
        RealServer(maxmemory="100mb", io_threads="2") as server,
        in_process_worker(server.url, pool_name),
    ):
        shown = lmpool("doctor", "--url", server.url, "--pool", pool_name)
    assert shown.exit_code == 1
    assert "spin on all of the 2 cores here" in shown.stdout.replace("\n", " ")


def test_the_doctor_examines_a_server_that_tells_little(pool_name: str, server_binary: str) -> None:
    with RealServer() as server, in_process_worker(server.url, pool_name):
        with server.client() as client:
            client.execute_command(
                "ACL SETUSER narrow on >secret ~* +@read +@write +@connection +@transaction "
                "-info -config -eval -evalsha"
            )
        url = server.url.replace("unix://", "unix://narrow:secret@")
        shown = lmpool("doctor", "--url", url, "--pool", pool_name)
    assert shown.exit_code == 1
    assert "no permissions to run the 'evalsha' command" in shown.stdout
    assert "no permissions to run the 'time' command" in shown.stdout
    assert "1 worker alive" in shown.stdout
    assert "secret" not in shown.stdout


def test_the_doctor_says_when_nobody_answers() -> None:
    shown = lmpool("doctor", "--url", "redis://:geheim@127.0.0.1:1")
    assert shown.exit_code == 1
    assert "no answer from" in shown.stdout
    assert "geheim" not in shown.output


# --- the demo ------------------------------------------------------------------------------------


@pytest.fixture
def demo_folder(tmp_path: Path, server_binary: str) -> Iterator[Path]:
    """Where a demo puts its pool. At the end nothing is there, and nobody."""
    with short_folder() as short:
        yield short
        until(lambda: not users_of(short), what="the demo's processes to end", every=0.05)
        # torch leaves a folder of its own.
        until(lambda: not list(short.glob("lmpool*")), what=f"{short} to be empty")


def demo(folder: Path, *options: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*LMPOOL, "demo", *options],
        env={**clean_environment(), "TMPDIR": str(folder), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def check_demo(output: str, errors: str, prompts: int) -> None:
    assert errors == ""
    assert "\x1b" not in output  # piped
    numbers = {
        words: int(number.replace(",", ""))
        for number, words in re.findall(r"^ +([\d,]+)  (\w+(?: \w+)*)", output, re.MULTILINE)
    }
    rows = next(numbers[words] for words in numbers if words.startswith("rows in"))
    assert rows == prompts
    assert numbers["computed"] < rows
    assert numbers["from local caches"] > 0
    # Each row is computed for one client, and reaches the others in flight or from the cache.
    elsewhere = numbers["shared in flight"] + numbers["from the result cache"]
    assert elsewhere > 0
    assert numbers["computed"] + elsewhere + numbers["from local caches"] == rows
    assert "are the same bytes in all 3 processes" in output
    assert output.count("%  ") == 20
    assert "lmpool worker --gpus" in output


def test_the_demo_with_the_mock_engine(demo_folder: Path) -> None:
    with demo(demo_folder, "--engine", "mock", "--workers", "1", "--prompts", "480") as running:
        output, errors = running.communicate(timeout=150)
    assert running.returncode == 0, errors
    check_demo(output, errors, 480)
    assert "mock engine" in output


@pytest.mark.slow
def test_the_demo(demo_folder: Path) -> None:
    with demo(demo_folder, PYTHONIOENCODING="ascii") as running:
        output, errors = running.communicate(timeout=140)
    assert running.returncode == 0, errors
    check_demo(output, errors, 4000)
    assert output.isascii()
    assert output.count("hf engine") == 2


def clients_of(pid: int) -> list[int]:
    """The demo's client processes, when both are there."""
    children = psutil.Process(pid).children()
    found = [child.pid for child in children if "lmpool.cli.demo.client" in child.cmdline()]
    return found if len(found) == 2 else []


@pytest.mark.parametrize("ending", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_demo_that_is_ended_leaves_nothing(demo_folder: Path, ending: str) -> None:
    with demo(demo_folder, "--engine", "mock", "--prompts", "200000") as running:
        assert running.stdout is not None
        shown = ""
        while "Load:" not in shown:
            line = running.stdout.readline()
            assert line, running.communicate()[1]
            shown += line
        pids = [int(pid) for pid in re.findall(r"pid (\d+)", shown)]
        assert len(pids) == 3
        pids += until(lambda: clients_of(running.pid), what="the clients", every=0.05)
        if ending == "SIGINT":
            os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        else:
            running.send_signal(signal.Signals[ending])
        _, errors = running.communicate(timeout=150)
        assert running.returncode == {"SIGINT": 130, "SIGTERM": 143, "SIGKILL": -9}[ending]
        assert "Traceback" not in errors
        wait_until_gone(pids)


def test_the_load_of_the_demo_is_shared_and_repeats() -> None:
    works = make_work(6000, 2000, 512)
    first, second = (work["rounds"] for work in works)
    assert len(first) == len(second) == ROUNDS
    assert sum(map(len, first)) == sum(map(len, second)) == 3000
    for mine, theirs in zip(first, second, strict=True):
        together = {*map(tuple, mine)} & {*map(tuple, theirs)}
        assert len(together) >= 0.4 * len(mine)
    assert works[0]["check"] == works[1]["check"]
    assert len(works[0]["check"]) == CHECKED
    assert len({tuple(prompt) for prompts in first for prompt in prompts}) < 2900
    assert make_work(6000, 2000, 512) == works


@pytest.mark.parametrize(("prompts", "longest"), [(2, 1), (30, 3), (100, 512)])
def test_small_loads_are_loads(prompts: int, longest: int) -> None:
    for work in make_work(prompts, 16, longest):
        assert all(work["rounds"])
        sizes = [len(prompt) for asked in work["rounds"] for prompt in asked]
        assert 1 <= min(sizes) <= max(sizes) <= longest
