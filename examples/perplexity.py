"""The perplexity of files, by windows that slide over texts longer than the model takes.

    python examples/perplexity.py README.md                        # a private pool, the tiny model
    python examples/perplexity.py *.txt --url redis://server:6379/0 --pool llama

Every window is one job: the tokens behind the last window's end are scored, given up to a window of
tokens before them. Each token is scored once, with at least `window - stride` tokens before it as
far as the text has them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import lmpool
from lmpool.wants import Score, TextScores


def windows(tokens: Sequence[int], window: int, stride: int) -> Iterator[tuple[Sequence[int], int]]:
    """Parts of a text, and from which of their tokens on each is to be scored."""
    end, scored = 0, 1
    while scored < len(tokens):
        end = min(len(tokens), max(end + stride, window))
        begin = max(0, end - window)
        yield tokens[begin:end], scored - begin
        scored = end


def perplexity(
    lm: lmpool.SyncPooledLM[object], tokens: Sequence[int], window: int, stride: int
) -> float:
    """The exponential of the mean negative log-probability of all tokens but the first."""
    if len(tokens) < 2:
        raise SystemExit("a text of at least two tokens is needed")
    total, count = 0.0, 0
    asks = ((part, Score(start=start)) for part, start in windows(tokens, window, stride))
    for _, scores in lm.ask_iter(asks, in_flight=64):
        assert isinstance(scores, TextScores)
        total += scores.total
        count += scores.logprobs.size
    return math.exp(-total / count)


def main() -> None:
    """Measure what the command line says."""
    parser = argparse.ArgumentParser(description="The perplexity of files.")
    parser.add_argument("files", nargs="*", type=Path, default=[Path(__file__)])
    parser.add_argument("--window", type=int, help="tokens; by default the most that a model takes")
    parser.add_argument("--stride", type=int, help="tokens; by default half a window")
    parser.add_argument("--url", help="of a pool's server; without one a private pool is started")
    parser.add_argument("--pool")
    given = parser.parse_args()
    lm = lmpool.connect(given.url, given.pool) if given.url else lmpool.embedded("tiny", "hf")
    with lm:
        longest = lm.info.max_prompt_tokens + 1
        window = longest if given.window is None else min(given.window, longest)
        stride = max(1, window // 2) if given.stride is None else min(given.stride, window - 1)
        for file in given.files:
            tokens = lm.encode(file.read_text("utf-8", "replace"))
            found = perplexity(lm.sync, tokens, window, stride)
            print(f"{found:10.2f}  {len(tokens):8,} tokens  {file.name}")


if __name__ == "__main__":
    main()
