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
from collections.abc import Sequence
from pathlib import Path

import lmpool
from lmpool.long_texts import score_long_text


def perplexity(
    lm: lmpool.SyncPooledLM[object], tokens: Sequence[int], window: int | None, stride: int | None
) -> float:
    """The exponential of the mean negative log-probability of all tokens but the first."""
    scores = score_long_text(lm, tokens, window=window, stride=stride)
    return math.exp(-scores.total / scores.logprobs.size)


def main() -> None:
    """Measure what the command line says."""
    parser = argparse.ArgumentParser(description="The perplexity of files.")
    parser.add_argument("files", nargs="*", type=Path, default=[Path(__file__)])
    parser.add_argument("--window", type=int, help="tokens; by default the most that a model takes")
    parser.add_argument("--stride", type=int, help="tokens; by default half a window")
    parser.add_argument("--url", help="of a pool's server; without one a private pool is started")
    parser.add_argument("--pool")
    given = parser.parse_args()
    for file in given.files:
        if not file.is_file():
            parser.error(f"{file} cannot be read: write the path of a text file")
    lm = lmpool.connect(given.url, given.pool) if given.url else lmpool.embedded("tiny", "hf")
    with lm:
        for file in given.files:
            tokens = lm.encode(file.read_text("utf-8-sig", "replace"))
            found = perplexity(lm.sync, tokens, given.window, given.stride)
            print(f"{found:10.2f}  {len(tokens):8,} tokens  {file.name}")


if __name__ == "__main__":
    main()
