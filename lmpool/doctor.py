"""``lmpool doctor``: reads a server and a pool, and says what is wrong and what to do about it."""

from __future__ import annotations

import time
from typing import Any

import redis
from rich.console import Console
from rich.markup import escape

from lmpool.commands import Server
from lmpool.diagnosis import Facts, Finding, examine
from lmpool.errors import LmpoolError
from lmpool.keys import GROUP, PoolKeys
from lmpool.liveness import consumers
from lmpool.model_info import ModelInfo
from lmpool.pool_commands import measure_latency
from lmpool.server import explained, open_server
from lmpool.settings import ClientOptions, mask_url


def read_facts(url: str, pool: str) -> Facts:
    """Ask the server. Raises `ServerError` where it does not answer."""
    server = open_server(url, name="lmpool-doctor")
    try:
        with explained(url):
            server.ping()
            facts = _read_server(server, url)
            _read_pool(server, pool, facts)
            return facts
    finally:
        server.close()
        server.connection_pool.disconnect()


def _read_server(server: Server, url: str) -> Facts:
    info: dict[str, Any] = {}
    for section in ("server", "memory", "persistence", "replication", "clients"):
        try:
            info.update(server.info(section))
        except redis.exceptions.NoPermissionError:
            break
    try:
        config: dict[str, str] | None = server.config_get("*")
    except redis.exceptions.ResponseError:  # forbidden, or renamed by who runs it
        config = None
    refused = []
    try:
        server.eval("return 1", 0)
    except redis.exceptions.ResponseError as error:
        refused.append(str(error))
    offset = 0.0
    try:
        before = time.time()
        seconds, microseconds = server.time()
        offset = seconds + microseconds / 1e6 - (before + time.time()) / 2
    except redis.exceptions.ResponseError as error:
        refused.append(str(error))
    return Facts(url, info, config, measure_latency(server), offset, refused)


def _read_pool(server: Server, pool: str, facts: Facts) -> None:
    keys = PoolKeys(pool)
    facts.pool = pool
    packed = server.get(keys.info)
    if packed is None:
        return
    try:
        facts.model = ModelInfo.unpack(packed)
    except LmpoolError as error:
        facts.model_error = f"pool {pool!r}: {error}"
        return
    workers: dict[str, bool] = {}
    pending: dict[str, int] = {}
    for shard in facts.model.shard_keys(keys):
        with server.pipeline(transaction=False) as pipeline:
            pipeline.xlen(shard.dead)
            for stream in shard.streams:
                pipeline.xlen(stream.key)
            dead, *lengths = pipeline.execute(raise_on_error=False)
        facts.backlog += sum(jobs for jobs in lengths if isinstance(jobs, int))
        facts.dead += dead if isinstance(dead, int) else 0
        for name in consumers(server, shard):
            workers[name] = workers.get(name, False) or bool(server.exists(shard.alive(name)))
        for consumer in server.xinfo_consumers(shard.stream().key, GROUP) if workers else ():
            name = consumer["name"].decode()
            pending[name] = pending.get(name, 0) + int(consumer["pending"])
    facts.workers, facts.pending = workers, pending


def run_doctor(*, url: str | None, pool: str | None) -> int:
    """Print what was found; 1 if something is wrong, else 0."""
    options = ClientOptions(url=url, pool=pool)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(mask_url(options.url))}[/], pool {options.pool}")
    try:
        findings = examine(read_facts(options.url, options.pool))
    except LmpoolError as error:
        findings = [Finding("wrong", str(error))]
    marks = {"ok": "[green]ok   [/]", "note": "[yellow]note [/]", "wrong": "[bold red]wrong[/]"}
    for finding in findings:
        console.print(f"{marks[finding.level]}  {escape(finding.what)}")
        if finding.remedy:
            console.print(f"       [dim]->[/] {escape(finding.remedy)}")
    wrong = sum(finding.level == "wrong" for finding in findings)
    notes = sum(finding.level == "note" for finding in findings)
    console.print()
    if wrong:
        console.print(f"[bold red]{wrong} wrong[/], {notes} to note")
        return 1
    console.print(f"nothing is wrong, {notes} to note")
    return 0
