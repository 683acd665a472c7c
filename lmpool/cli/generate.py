"""``lmpool generate``: a prompt goes on, as it is drawn."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from lmpool.checks import counted
from lmpool.cli.options import Adapter, AsJson, Lora, Pool, Url
from lmpool.cli.terminal import errors, json_text, lines, printable, speaks_unicode

if TYPE_CHECKING:
    from lmpool.producer import Piece


def generate(
    text: Annotated[str, typer.Argument(help="The prompt.")],
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", metavar="N", help="Tokens at most.", min=0)
    ] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(help="Only the likeliest tokens, of this mass together.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only the K likeliest tokens; 0 is all.")] = 0,
    min_p: Annotated[
        float, typer.Option(help="Only tokens this likely, as a part of the likeliest.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same text.")] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text. More than one may be given."),
    ] = None,
    adapter: Adapter = None,
    lora: Lora = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long all of it may take.", min=0.001)
    ] = 600.0,
    as_json: AsJson = False,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Continue a prompt, and show the text as it is drawn."""
    from lmpool.errors import PromptError
    from lmpool.producer import connect
    from lmpool.prompt_text import encoder, read_vocabulary
    from lmpool.wants import Stream

    if "" in (stop or ()):
        raise PromptError("--stop '': every text has it; write a text that is to end the rest")
    Stream(max_tokens, None, temperature, seed, top_p, top_k, min_p).check_numbers()
    began = time.monotonic()
    with connect(url, pool, framework="numpy") as lm:
        vocabulary = read_vocabulary(lm)
        ids = encoder(lm, vocabulary)(text)
        pieces = lm.sync.stream(
            ids, max_tokens, temperature, top_p, top_k, min_p, seed, lora_name=adapter or lora,
            timeout=timeout,
        )  # fmt: skip
        told = Told(vocabulary.tokens, stop or ())
        for part in told.parts(pieces):
            if not as_json:
                show(part)
    if as_json:
        print(json_text(told.as_json()))
        return
    show("\n")
    if errors().is_terminal:
        rate = len(told.token_ids) / max(1e-9, time.monotonic() - began)
        count = f"{counted(len(told.token_ids), 'token')}, {rate:,.0f} a second"
        errors().print(f"[dim]{count}; ended by {told.finish_reason}[/]")


def show(text: str) -> None:
    """Print a part of a text at once, for whichever terminal or file it goes to."""
    shown = printable(text)
    if not speaks_unicode(lines()):
        shown = shown.encode("ascii", "backslashreplace").decode()
    sys.stdout.write(shown)
    sys.stdout.flush()


class Told:
    """The text of a continuation as far as it was told, which ends before any of `stops`."""

    def __init__(self, tokens: Sequence[bytes], stops: Sequence[str]) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._tokens = tokens
        self._stops = stops
        # A token may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def parts(self, pieces: Iterator[Piece]) -> Iterator[str]:
        """The text in parts, each as soon as it cannot be the beginning of a stop text."""
        held = ""
        for piece in pieces:
            ids = piece.token_ids.tolist()
            self.token_ids += ids
            said = ids[: len(ids) - min(len(ids), piece.ending)]
            held += self._decode(said, piece.finish_reason is not None)
            # That which ends first, however the text was cut into pieces.
            stops = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
            if stops:
                self.finish_reason = "stop"
                _, at = min(stops)
                yield self._say(held[:at])
                return
            keep = 0 if piece.finish_reason else self._begun(held)
            part, held = held[: len(held) - keep], held[len(held) - keep :]
            self.finish_reason = piece.finish_reason
            if part:
                yield self._say(part)

    def as_json(self) -> dict[str, object]:
        """All of it, for programs."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
        }

    def _say(self, part: str) -> str:
        self.text += part
        return part

    def _decode(self, ids: Sequence[int], final: bool) -> str:
        data = b"".join(self._tokens[i] for i in ids if i < len(self._tokens))
        return self._decoder.decode(data, final)

    def _begun(self, text: str) -> int:
        """How many characters at the end of a text may be the beginning of a stop text."""
        return max(
            (
                length
                for stop in self._stops
                for length in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:length])
            ),
            default=0,
        )
