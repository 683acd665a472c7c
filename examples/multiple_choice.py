"""Multiple choice: which of several answers a model finds likeliest after a question.

    python examples/multiple_choice.py                             # a private pool, the tiny model
    python examples/multiple_choice.py --url redis://server:6379/0 --pool llama

One job an answer, of which the pool computes the shared question once, and 7 bytes a scored token.
Both sums are printed that evaluations use: of the whole answer, and by the byte (long answers
are unlikelier than short ones by their length alone).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import lmpool
from lmpool.wants import Score, TextScores

QUESTION = "If the key is not found, the method raises"
ANSWERS = (" KeyError.", " a list of strings.", " the name of the file.", " None.")


@dataclass(frozen=True)
class Answer:
    """An answer's log-probability after the question, whole and by the byte of its text."""

    text: str
    logprob: float
    by_byte: float


def judge(lm: lmpool.SyncPooledLM[object], question: str, answers: Sequence[str]) -> list[Answer]:
    """Each answer's log-probabilities, in their order."""
    context = lm.encode(question)
    asks = [
        ([*context, *lm.encode(answer, bos=False)], Score(start=len(context))) for answer in answers
    ]
    found = []
    for answer, scores in zip(answers, lm.ask_many(asks), strict=True):
        assert isinstance(scores, TextScores)
        found.append(Answer(answer, scores.total, scores.total / len(answer.encode())))
    return found


def main() -> None:
    """Judge what the command line says."""
    parser = argparse.ArgumentParser(description="Multiple choice by log-probabilities.")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("answers", nargs="*", default=ANSWERS)
    parser.add_argument("--url", help="of a pool's server; without one a private pool is started")
    parser.add_argument("--pool")
    given = parser.parse_args()
    lm = lmpool.connect(given.url, given.pool) if given.url else lmpool.embedded("tiny", "hf")
    with lm:
        found = judge(lm.sync, given.question, given.answers)
    print(given.question)
    for answer in found:
        print(f"  {answer.logprob:8.2f}  {answer.by_byte:6.3f} a byte  {answer.text}")
    print(f"the likeliest is{max(found, key=lambda answer: answer.logprob).text}")
    print(f"by the byte it is{max(found, key=lambda answer: answer.by_byte).text}")


if __name__ == "__main__":
    main()
