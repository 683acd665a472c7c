"""A scored text as it is shown: coloured by surprise, a line a token, or as JSON."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from lmpool.checks import counted
from lmpool.cli.bars import ascii_text, token_text
from lmpool.cli.terminal import printable, shortened, speaks_unicode
from lmpool.wants import TextScores

LEVELS: Final = (
    (1.0, ""),
    (3.0, "black on #fff1b8"),
    (6.0, "black on #ffd36b"),
    (10.0, "black on #ff9f5a"),
    (math.inf, "#ffffff on #b71c1c"),
)
"""Up to how many bits of surprise each style goes."""
UNSCORED: Final = "dim italic"
_TOKEN_COLUMN: Final = 14
_NATS: Final = math.log(2)


def legend(console: Console) -> Text:
    """What the colours mean."""
    dash = "–" if speaks_unicode(console) else "-"
    shown, low = Text("bits of surprise: "), 0.0
    for high, style in LEVELS:
        name = f" {low:g}{dash}{high:g} " if math.isfinite(high) else f" over {low:g} "
        shown.append(name, style).append(" ")
        low = high
    return shown


@dataclass(frozen=True)
class ScoredText:
    """A text's tokens with their scores: those of all but the first.

    `tokens` are the bytes of each token id, and `hidden` how many at the beginning are no text.
    """

    tokens: Sequence[bytes]
    ids: Sequence[int]
    scores: TextScores
    hidden: int

    def print_coloured(self, console: Console) -> None:
        """Print what the colours mean, and the text."""
        console.print(legend(console))
        shown = self.coloured(console)
        console.print(shown, end="" if shown.plain.endswith("\n") else "\n")

    def coloured(self, console: Console) -> Text:
        """The text itself; a line's end that surprises is marked."""
        unicode, shown = speaks_unicode(console), Text()
        for piece, bits in self._characters():
            style = UNSCORED if bits is None else _style(bits)
            text = printable(piece)
            if style and bits is not None:
                text = text.replace("\n", "⏎\n" if unicode else "\\n\n")
            if not unicode:
                text = text.encode("ascii", "backslashreplace").decode()
            shown.append(text, style)
        return shown

    def lines(self, console: Console) -> Iterator[Text]:
        """A line a token: its surprise, rank, and the likeliest there, with their probabilities."""
        top = self.scores.top_logprobs
        yield Text(
            f"{'bits':>6} {'rank':>6}  {'token':{_TOKEN_COLUMN}}"
            + ("" if top is None else "  likeliest, %"),
            "bold",
        )
        for place in range(self.hidden, len(self.ids)):
            label = self._in_column(self.ids[place], console)
            if place == 0:
                yield Text(f"{'-':>6} {'-':>6}  ").append(label, UNSCORED)
                continue
            bits, rank = self._bits(place), int(self.scores.ranks[place - 1])
            line = Text(f"{bits:6.1f} {rank:6,}  ").append(label, _style(bits))
            if top is not None:
                each = zip(
                    top.token_ids[place - 1].tolist(), top.logprobs[place - 1].tolist(), strict=True
                )
                _fill(
                    line,
                    [f"{self._label(i, console)} {100 * math.exp(p):.1f}" for i, p in each],
                    console.width,
                )
            yield line

    def summary(self) -> str:
        """All of it in some numbers."""
        count, total = self.scores.logprobs.size, self.scores.total
        return (
            f"{counted(count, 'token')} scored: perplexity {_exp(-total / count):,.2f}, "
            f"{-total / _NATS / count:.2f} bits a token, {-total / _NATS / self._bytes():.2f} a "
            f"byte; log-probability {total:,.2f}"
        )

    def as_json(self) -> dict[str, Any]:
        """For programs, which `json_text` writes: what is impossible is infinite."""
        count, total = self.scores.logprobs.size, self.scores.total
        return {
            "tokens": [self._token_json(place) for place in range(len(self.ids))],
            "scored": count,
            "logprob": total,
            "perplexity": _exp(-total / count),
            "bits_per_byte": -total / _NATS / self._bytes(),
        }

    def _token_json(self, place: int) -> dict[str, Any]:
        found: dict[str, Any] = {**self._named(self.ids[place]), "logprob": None, "rank": None}
        if place == 0:
            return found
        found["logprob"] = float(self.scores.logprobs[place - 1])
        found["rank"] = int(self.scores.ranks[place - 1])
        top = self.scores.top_logprobs
        if top is not None:
            ids, logprobs = top.token_ids[place - 1].tolist(), top.logprobs[place - 1].tolist()
            found["top"] = [
                {**self._named(i), "logprob": p} for i, p in zip(ids, logprobs, strict=True)
            ]
        return found

    def _characters(self) -> Iterator[tuple[str, float | None]]:
        """Whole characters, and the bits of the tokens that they consist of; None unscored."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text, bits, scored = "", 0.0, True
        for place in range(self.hidden, len(self.ids)):
            text += decoder.decode(self._bytes_of(self.ids[place]))
            scored = scored and place > 0
            bits += self._bits(place) if place else 0.0
            if not decoder.getstate()[0]:
                yield text, bits if scored else None
                text, bits, scored = "", 0.0, True
        text += decoder.decode(b"", final=True)
        if text:
            yield text, bits if scored else None

    def _bits(self, place: int) -> float:
        return -float(self.scores.logprobs[place - 1]) / _NATS

    def _bytes(self) -> int:
        """Of all that is scored; special tokens are as long as their names."""
        return max(1, sum(len(self._bytes_of(token)) for token in self.ids[1:]))

    def _bytes_of(self, token: int) -> bytes:
        return self.tokens[token] if token < len(self.tokens) else f"<{token}>".encode()

    def _named(self, token: int) -> dict[str, Any]:
        return {"id": token, "token": self._bytes_of(token).decode("utf-8", "replace")}

    def _in_column(self, token: int, console: Console) -> str:
        label = self._label(token, console)
        if speaks_unicode(console):
            label = shortened(label, _TOKEN_COLUMN)
        return set_cell_size(label, _TOKEN_COLUMN)

    def _label(self, token: int, console: Console) -> str:
        label = token_text(self._bytes_of(token))
        return label if speaks_unicode(console) else ascii_text(label)


def _style(bits: float) -> str:
    return next((style for high, style in LEVELS if bits < high), LEVELS[-1][1])


def _fill(line: Text, words: Sequence[str], width: int) -> None:
    """Append words, in further lines below their column where there is no room."""
    column = line.cell_len
    used = column
    for word in words:
        if used > column and used + 2 + cell_len(word) > width:
            line.append("\n" + " " * column)
            used = column
        line.append(f"  {word}")
        used += 2 + cell_len(word)


def _exp(exponent: float) -> float:
    return math.exp(exponent) if exponent < 700 else math.inf
