"""Re-ranking of drafts: sample several continuations, score each, and take the best.

    python examples/rerank.py                                      # a private pool, the tiny model
    python examples/rerank.py "Dear customer," --drafts 32 --url redis://server:6379/0 --pool llama

Two orders are printed. By the token, a draft is as good as the model finds it likely after the
prompt, which favours what is likely anywhere. By what the prompt brought (its log-probability after
the prompt, less that without it), it is as good as it has to do with the prompt. All scores are one
call, and the prompt is computed once for all drafts.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import lmpool
from lmpool.wants import Score, TextScores

PROMPT = "If the file does not exist,"


@dataclass(frozen=True)
class Draft:
    """A continuation: its mean log-probability a token, and how much of it the prompt brought."""

    tokens: tuple[int, ...]
    likely: float
    from_prompt: float


async def sample(
    lm: lmpool.PooledLM[object],
    prompt: Sequence[int],
    drafts: int,
    max_tokens: int,
    temperature: float,
    seed: int,
) -> list[tuple[int, ...]]:
    """So many continuations, each different one once."""
    eos = list(lm.info.eos_token_ids)
    found = await asyncio.gather(
        *(lm.sample(prompt, max_tokens, eos, temperature, seed + n) for n in range(drafts))
    )
    return list(dict.fromkeys(tuple(tokens) for tokens in found if tokens))


async def judge(
    lm: lmpool.PooledLM[object], prompt: Sequence[int], drafts: Sequence[tuple[int, ...]]
) -> list[Draft]:
    """Drafts with their scores, the likeliest by the token first. `prompt` begins with the token
    that stands before every text."""
    after = [([*prompt, *tokens], Score(start=len(prompt))) for tokens in drafts]
    alone = [([prompt[0], *tokens], Score(start=1)) for tokens in drafts]
    totals = [
        each.total for each in await lm.ask_many(after + alone) if isinstance(each, TextScores)
    ]
    found = [
        Draft(tokens, given / len(tokens), (given - bare) / len(tokens))
        for tokens, given, bare in zip(
            drafts, totals[: len(drafts)], totals[len(drafts) :], strict=True
        )
    ]
    return sorted(found, key=lambda draft: -draft.likely)


async def run(given: argparse.Namespace) -> None:
    """Sample, judge, and print."""
    lm = lmpool.connect(given.url, given.pool) if given.url else lmpool.embedded("tiny", "hf")
    async with lm:
        prompt = lm.encode(given.prompt, bos=True)
        drafts = await sample(
            lm, prompt, given.drafts, given.max_tokens, given.temperature, given.seed
        )
        found = await judge(lm, prompt, drafts)
        texts = {draft: lm.decode(draft.tokens) for draft in found}
    print("a token  by the prompt  draft")
    for draft in found[: given.show]:
        print(f"{draft.likely:7.3f}  {draft.from_prompt:13.3f}  {texts[draft]!r}")
    most = max(found, key=lambda draft: draft.from_prompt)
    print(f"the likeliest of {len(found)}: {given.prompt}{texts[found[0]]}")
    print(f"most of the prompt's: {given.prompt}{texts[most]}")


def main() -> None:
    """Rank what the command line says."""
    parser = argparse.ArgumentParser(description="Re-ranking of drafts.")
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    parser.add_argument("--drafts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=8, help="how many are printed")
    parser.add_argument("--url", help="of a pool's server; without one a private pool is started")
    parser.add_argument("--pool")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
