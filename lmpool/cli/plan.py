"""``lmpool plan``: what a pool needs, before one buys it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lmpool.checks import counted
from lmpool.cli.options import AsJson
from lmpool.cli.terminal import escape, json_text, lines
from lmpool.errors import SettingsError

if TYPE_CHECKING:
    from lmpool.plan.arithmetic import Line, Plan


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A folder, its config.json, or a hub id in the cache. "
            "[dim]\\[$LMPOOL_MODEL, or tiny][/]",
        ),
    ] = None,
    prompt_rate: Annotated[
        float | None,
        typer.Option(
            "--prompt-rate",
            metavar="N",
            help="Prompts a second, of all clients. [dim]\\[needed][/]",
        ),
    ] = None,
    prompts_per_second: Annotated[float | None, typer.Option(hidden=True)] = None,
    gpus: Annotated[int, typer.Option(metavar="N", help="One worker each.")] = 1,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", metavar="N", help="Tokens of a prompt.")
    ] = 256,
    want: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WANT",
            help="row, top:20, tokens:8, score, draw:8, generate:64 or hidden. More than one may "
            "be given, with shares: top:20=0.8. [dim]\\[row][/]",
        ),
    ] = None,
    ttl: Annotated[
        float | None,
        typer.Option(metavar="S", help="How long results stay. [dim]\\[as workers are set][/]"),
    ] = None,
    distinct: Annotated[
        float,
        typer.Option(
            metavar="PART", help="Of the prompts, those that nobody asked before: 0 to 1."
        ),
    ] = 1.0,
    clients: Annotated[int, typer.Option(metavar="N", help="Processes that ask.")] = 1,
    row_encoding: Annotated[
        str | None,
        typer.Option(
            "--row-encoding",
            metavar="NAME",
            help="f32, bf16 or f16. [dim]\\[the smallest lossless][/]",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The server's, as 16GiB: how long fits results then."),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option("--gpu-memory", metavar="SIZE", help="A GPU's, as 80GiB: what fits there."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="hf, vllm, sglang or mlx: each takes memory in its way. "
            "[dim]\\[as workers are set][/]",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Reckon what a pool needs: memory, network, processors, caches, with the arithmetic shown.

    Nothing is asked of any server, and nothing is downloaded.
    """
    from lmpool.plan import Demand, read_model
    from lmpool.plan import plan as reckon
    from lmpool.plan.report import as_dict
    from lmpool.settings import ClientOptions, WorkerOptions

    prompt_rate = prompts_per_second if prompt_rate is None else prompt_rate
    if prompt_rate is None:
        raise SettingsError(
            "--prompt-rate is missing: write how many all clients ask together, at the "
            "busiest; lmpool top shows it of a pool that is there"
        )
    client, worker = ClientOptions(), WorkerOptions()
    encoding: Any = row_encoding
    if encoding is None and client.encoding != "auto":
        encoding = client.encoding
    found = reckon(
        Demand(
            read_model(model or worker.model),
            prompt_rate,
            wants=tuple(want or ("row",)),
            gpus=gpus,
            prompt_tokens=prompt_tokens,
            ttl=worker.result_ttl if ttl is None else ttl,
            distinct=distinct,
            clients=clients,
            encoding=encoding,
            memory=_bytes("memory", memory),
            gpu_memory=_bytes("gpu_memory", gpu_memory),
            engine=engine or worker.engine,
            engine_opts=worker.engine_opts,
            cache_bytes=client.cache_bytes,
            max_backlog=worker.max_backlog,
            lanes=worker.lanes,
        )
    )
    if as_json:
        print(json_text(as_dict(found)))
    else:
        show(found, lines())


def show(found: Plan, console: Console) -> None:
    """Print a plan: each quantity with its formula, with numbers, and its value."""
    model, section = found.demand.model, ""
    console.print(
        f"[bold]{escape(model.name)}[/]: a vocabulary of {model.vocab_size:,}, {model.dtype}; "
        f"{counted(found.demand.gpus, 'GPU')}"
    )
    for line in found.lines:
        if line.section != section:
            section = line.section
            console.print(f"\n[bold]{section}[/]")
        console.print(
            f"  {escape(line.what)}: [bold]{value(line)}[/]\n"
            f"    [dim]= {escape(line.formula)} = {escape(line.numbers)}[/]"
        )
    if found.unknown or found.warnings:
        console.print()
    for text in found.unknown:
        console.print(f"[yellow]unknown[/]  {escape(text)}")
    for text in found.warnings:
        console.print(f"[bold red]warning[/]  {escape(text)}")


def value(line: Line) -> str:
    """A line's value in the unit that people read."""
    from lmpool.diagnosis import in_bytes

    amount = line.value
    match line.unit:
        case "bytes":
            return in_bytes(round(amount))
        case "bytes/s":
            return f"{in_bytes(round(amount))}/s, {8 * amount / 1e6:,.4g} Mbit/s"
        case "/s":
            return f"{amount:,.4g}/s" if amount < 1000 else f"{amount:,.0f}/s"
        case "s":
            return f"{amount:,.4g} s"
        case "cores":
            return f"{amount:.3g} cores"
        case "%":
            return f"{amount:.3g} %"
        case _:
            return f"{amount:,.0f}"


def _bytes(name: str, text: str | None) -> int | None:
    """Bytes, as ``16GiB``. Raises `SettingsError`."""
    if text is None:
        return None
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        found = int(TypeAdapter(ByteSize).validate_python(text))
    except (ValidationError, ValueError, OverflowError):
        found = 0
    if found <= 0:
        raise SettingsError(f"{name}={text!r}: write a number of bytes above 0, as 16GiB")
    return found
