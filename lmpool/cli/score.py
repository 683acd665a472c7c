"""``lmpool score``: how much each token of a text surprises the model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lmpool.checks import counted
from lmpool.cli.options import Adapter, AsJson, Lora, Pool, Url
from lmpool.cli.terminal import escape, json_text, lines
from lmpool.errors import PromptError

Top = Annotated[
    int,
    typer.Option("--top", "-k", metavar="N", min=0, help="A line a token, with the N likeliest."),
]
Window = Annotated[
    int | None,
    typer.Option(metavar="TOKENS", help="Taken in at once. [dim]\\[as much as fits][/]", min=2),
]
Stride = Annotated[
    int | None,
    typer.Option(metavar="TOKENS", help="From window to window. [dim]\\[half a window][/]", min=1),
]


def score(
    file: Annotated[str, typer.Argument(help="A text in UTF-8; - is the standard input.")],
    top: Top = 0,
    window: Window = None,
    stride: Stride = None,
    adapter: Adapter = None,
    lora: Lora = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a window may take.", min=0.001)
    ] = 60.0,
    as_json: AsJson = False,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Show a text coloured by how much each token surprises the model.

    Where there are no colours, a line a token. Texts longer than the model takes are scored by
    windows that overlap.
    """
    from lmpool.cli.surprise import ScoredText
    from lmpool.long_texts import score_long_text
    from lmpool.producer import connect
    from lmpool.prompt_text import encoder, read_vocabulary

    given = read_text(file)
    with connect(url, pool, framework="numpy") as lm:
        vocabulary = read_vocabulary(lm)
        ids = encoder(lm, vocabulary)(given)
        scores = score_long_text(
            lm.sync,
            ids,
            window=window,
            stride=stride,
            top_logprobs=min(top, lm.info.vocab_size),
            lora_name=adapter or lora,
            timeout=timeout,
        )
        # What a tokenizer puts before every text is none of it.
        found = ScoredText(vocabulary.tokens, ids, scores, int(ids[0] == lm.info.bos_token_id))
        model = lm.info.model
    if as_json:
        print(json_text(found.as_json()))
        return
    console = lines()
    console.print(f"[dim]{escape(model)}, {escape(file)}, {counted(len(ids), 'token')}[/]")
    if top or console.color_system is None or console.no_color:
        for line in found.lines(console):
            console.print(line)
    else:
        found.print_coloured(console)
    console.print(found.summary())


def read_text(file: str) -> str:
    """A file's text, or that of the standard input. Raises `PromptError` where it is none."""
    name = "the standard input" if file == "-" else file
    try:
        found = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise PromptError(f"{name} cannot be read: {error.strerror}") from None
    try:
        text = found.decode("utf-8").removeprefix("\ufeff")  # as some editors begin a file
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{name} is no text in UTF-8: byte {found[error.start]:#04x} at {error.start:,}"
        ) from None
    if not text:
        raise PromptError(f"{name} is empty: there is nothing to score")
    if "\0" in text:
        raise PromptError(f"{name} is no text: a zero byte at {found.index(0):,}")
    return text
