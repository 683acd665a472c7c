"""Which of two words comes next: a classifier that fetches two numbers a text instead of a row.

    python examples/classify.py                                   # a private pool, the tiny model
    python examples/classify.py --url redis://server:6379/0 --pool llama --words " yes" " no"

One job a text, answered with 8 bytes: at a vocabulary of 128,256 a row would be 513 kB.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import lmpool

TEXTS = (
    "If the file does not exist, the method raises",
    "Return a list of",
    "The function returns the",
)
WORDS = (" an", " the")


def classify(
    lm: lmpool.SyncPooledLM[object], texts: Sequence[str], words: Sequence[str]
) -> npt.NDArray[np.float64]:
    """The probability of each word after each text, among these words alone: [texts, words]."""
    first = [lm.encode(word, bos=False)[0] for word in words]
    if len(set(first)) < len(words):
        raise SystemExit(f"{words} begin with the same token: choose others")
    logprobs = lm.batch_token_logprobs([lm.encode(text) for text in texts], first)
    shares: npt.NDArray[np.float64] = np.exp(logprobs.astype(np.float64))
    shares /= shares.sum(axis=1, keepdims=True)
    return shares


def main() -> None:
    """Classify what the command line says."""
    parser = argparse.ArgumentParser(description="Which of two words comes next.")
    parser.add_argument("texts", nargs="*", default=TEXTS)
    parser.add_argument("--words", nargs=2, default=WORDS)
    parser.add_argument("--url", help="of a pool's server; without one a private pool is started")
    parser.add_argument("--pool")
    given = parser.parse_args()
    lm = lmpool.connect(given.url, given.pool) if given.url else lmpool.embedded("tiny", "hf")
    with lm:
        found = classify(lm.sync, given.texts, given.words)
        for text, shares in zip(given.texts, found, strict=True):
            chosen = given.words[int(shares.argmax())]
            print(f"{text!r} goes on with {chosen!r} ({100 * shares.max():.1f} %)")


if __name__ == "__main__":
    main()
